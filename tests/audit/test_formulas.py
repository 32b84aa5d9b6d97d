"""The metrics against published counts, closed formulas and simulation."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moe_audit import attribution, detectors, formulas, judge
from moe_audit import formulas as m

CASES = json.loads((Path(__file__).parent / "counts.json").read_text())
counts = hnp.arrays(
    np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.integers(0, 10**6)
)


@pytest.mark.parametrize("module", [formulas, attribution, detectors, judge])
def test_doctests(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_published_counts(case: dict[str, Any]) -> None:
    rows = np.array(case["counts"])
    for n, expect in [(rows.sum(0), case["expect"]), *zip(rows, case["expect_rows"], strict=True)]:
        for name, value in expect.items():
            assert float(getattr(m, name)(n)) == pytest.approx(float(value), abs=1e-9)
    for a, b, pair in zip(rows, rows[1:], case.get("adjacent_rows", []), strict=False):
        assert float(m.total_variation(m.shares(a), m.shares(b))) == pytest.approx(
            pair["total_variation"], abs=1e-9
        )


def test_one_hot_expert_has_entropy_zero_not_minus_zero() -> None:
    assert math.copysign(1, float(m.norm_entropy(np.array([7, 0, 0])))) == 1
    assert float(m.lir(np.array([7, 0]))) == math.inf


def test_nothing_picked_is_no_value() -> None:
    empty = np.zeros((2, 3), np.int64)
    for name in (
        "lir",
        "cv",
        "max_load",
        "min_load",
        "min_share",
        "norm_entropy",
        "effective_experts",
        "dead_experts",
    ):
        assert np.isnan(getattr(m, name)(empty)).all(), name
    assert np.isnan(m.cramers_v(empty)), "no source"


def test_metrics_reduce_over_experts_only() -> None:
    """A non-square matrix: the wrong axis would call this perfectly even."""
    loads = np.array([[90, 10]] * 3)
    assert m.lir(loads).tolist() == [9.0] * 3
    assert m.cv(loads) == pytest.approx([0.8] * 3)
    assert 1 / m.max_load(loads) == pytest.approx([0.5555555555] * 3)


@given(counts)
def test_evenness_identities(n: np.ndarray) -> None:
    n = n[n.sum(1) > 0]
    N = n.shape[1]
    assert np.allclose(N * (m.shares(n) ** 2).sum(1), 1 + m.cv(n) ** 2)
    h = m.norm_entropy(n)
    assert ((h >= 0) & (h <= 1 + 1e-12)).all()
    assert np.allclose(m.effective_experts(n), np.exp(h * math.log(N)) / N)


@given(st.data())
def test_router_and_mix_add_up_exactly(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=5))
    before, after = (data.draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 1000))) for _ in range(2))
    before[0, 0] += 1
    after[0, 0] += 1
    router, mix = m.split_shift(before, after)
    change = m.shares(after.sum(0)) - m.shares(before.sum(0))
    assert np.abs(router + mix - change).max() < 1e-15


def test_a_source_that_appears_is_all_mix() -> None:
    router, mix = m.split_shift(np.array([[50, 50], [0, 0]]), np.array([[25, 25], [0, 50]]))
    assert np.abs(router).max() == 0
    assert mix == pytest.approx([-0.25, 0.25])


def headline() -> np.ndarray:
    """Three of ten experts take 70 % of code, which is 30 % of the tokens; the pooled load is uniform."""
    code = np.array([0.7 / 3] * 3 + [0.3 / 7] * 7)
    rest = (0.1 - 0.3 * code) / 0.7
    return np.rint(np.stack([0.3 * code, 0.7 * rest]) * 2_100_000).astype(np.int64)


def test_headline_case_shows_in_association_only() -> None:
    n = headline()
    assert float(m.lir(n.sum(0))) == pytest.approx(1, abs=1e-4)
    assert float(m.norm_entropy(n[0])) == pytest.approx(0.853, abs=1e-3)
    assert float(m.cramers_v(n, 2, equal_weights=False)) == pytest.approx(0.57, abs=0.005)
    assert float(m.association_rel(n, 2, equal_weights=False)) == pytest.approx(0.26, abs=0.005)
    assert float(m.max_lift(n)) == pytest.approx(2.33, abs=0.005)


def test_published_association() -> None:
    table = {"C01-L0": (0.26, 0.07), "C02-L0": (0.03, 0.001)}
    for case in CASES:
        if case["id"] in table:
            v, rel = table[case["id"]]
            n = np.array(case["counts"])
            assert float(m.cramers_v(n, case["top_k"])) == pytest.approx(v, abs=0.005)
            assert float(m.association_rel(n, case["top_k"])) == pytest.approx(rel, abs=0.005)


def top_k_counts(rng: np.random.Generator, tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """What a perfect router does: each token picks k different experts, all alike."""
    picks = np.argpartition(rng.random((tokens, num_experts)), top_k - 1, axis=1)[:, :top_k]
    return np.bincount(picks.ravel(), minlength=num_experts)


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 1), (8, 2), (32, 8)])
def test_association_has_no_bias_on_independent_picks(num_experts: int, top_k: int) -> None:
    rng = np.random.default_rng(0)
    sizes = (150, 300, 600)
    n = np.array([[top_k_counts(rng, t, num_experts, top_k) for t in sizes] for _ in range(150)])
    p = n / n.sum(-1, keepdims=True)
    plug_in = m.entropy(p.mean(1)) - m.entropy(p).mean(-1)
    bias = (len(sizes) - 1) * (num_experts - top_k) / (2 * m.balanced_assignments(n))
    assert plug_in.mean() == pytest.approx(bias.mean(), rel=0.1)
    assert np.mean(m.cramers_v(n, top_k) == 0) > 0.35  # the correction hits zero about as often as not


def test_source_headroom_is_where_the_expert_overflows() -> None:
    n = np.array([[500, 300, 200], [500, 700, 800]])
    share = m.source_headroom(n, 1.15)
    for s in range(2):
        mix = np.where(np.arange(2) == s, share[s], 1 - share[s])
        assert float((mix @ m.shares(n)).max()) == pytest.approx(1.15 / 3)
    assert m.source_headroom(np.array([[90, 10], [50, 50]]), 1.1).tolist() == [0.0, 0.0]  # over already
    assert np.isnan(m.source_headroom(np.array([[50, 50], [50, 50]]), 1.1)).all()  # never


def test_balancing_loss_looks_fine_while_dispatch_has_collapsed() -> None:
    picks, probs = np.array([97, 1, 1, 1]), np.array([0.26, 0.74 / 3, 0.74 / 3, 0.74 / 3])
    assert float(m.switch_loss(picks, probs)) == pytest.approx(1.0384)
    assert float(m.f_p_gap(picks, probs)) == pytest.approx(0.71)


def test_monopoly_leaves_dead_experts_out() -> None:
    n = np.array([[10, 0, 0], [10, 20, 0]])
    assert float(m.max_monopoly(n)) == 1.0
    assert np.isnan(m.monopoly(n)[:, 2]).all()
