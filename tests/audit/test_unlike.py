"""Runs whose layers or sources are not alike: of other sizes, with other arrays, named in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moe_audit
from moe_audit.compare import compare
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.run import open_run
from moe_audit.store import Store
from moe_audit.thresholds.policy import policy_from_dict

SIZES = (8, 16, 8)  # experts of layers 0, 1, 2


def unlike_layers(path: Path, odd: int, kind: str) -> Path:
    """40 records of layers of different size; layer `odd` is static, drifts, or swings every eight steps."""
    rng = np.random.default_rng(1)
    names = [LayerInfo(i, f"blocks.{i}", experts, 1) for i, experts in enumerate(SIZES)]
    store = Store.create(path / "routing.db", names, ["a"], {"shard_cycle_steps": 8})
    store.begin_attempt(1)
    fixed = [rng.multinomial(10**6, np.full(n, 1 / n))[None] for n in SIZES]
    for r in range(40):
        rows = {}
        for i, experts in enumerate(SIZES):
            p = np.ones(experts)
            if i == odd and kind == "drift" and r >= 20:
                p[2] = 1.4
            if i == odd and kind == "periodicity":
                p[2] += 0.3 * np.sin(2 * np.pi * r / 8)
            counts = rng.multinomial(10**6, p / p.sum())[None]
            rows[i] = LayerRecord(fixed[i] if i == odd and kind == "static_router" else counts)
        store.append(Record("train", r + 1, r + 1, rows))
    store.close()
    return path


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("kind", ["static_router", "drift", "periodicity"])
def test_the_layer_named_is_the_one_that_is_odd(tmp_path: Path, odd: int, kind: str) -> None:
    verdict = moe_audit.check(unlike_layers(tmp_path, odd, kind), length=1, stride=1)
    cells = [c for c in verdict.cells if c.gate == kind]
    assert {(c.layer, c.layer_name) for c in cells} == {(odd, f"blocks.{odd}")}


def test_a_layer_that_drift_leaves_out_does_not_hide_the_others(make_run: Any) -> None:
    rng = np.random.default_rng(1)
    p = np.ones((30, 2, 1, 8))
    p[:, 0, 0, 0], p[15:, 1, 0, 3] = 2.2, 1.45  # layer 0 is always the fuller one
    p[:, 0, 0, 1] = 0.3
    p /= p.sum(-1, keepdims=True)
    path = make_run(rng.multinomial(10**6, p))
    off = {"layers": 0, "gates": {"drift": {"enabled": False}}}
    policy = policy_from_dict({"extends": "default", "overrides": [off]})
    seen, hidden = (moe_audit.check(path, x, length=1, stride=1) for x in (policy, "default"))
    assert {c.layer for c in seen.cells if c.gate == "drift"} == {1}
    assert not [c for c in hidden.cells if c.gate == "drift"]


def test_an_array_that_one_layer_lacks_is_not_known_rather_than_zero(make_run: Any) -> None:
    """Layers of one size are summed together; what only one of them has says nothing of the other."""
    rng = np.random.default_rng(1)
    given = {
        "tokens_S": np.array([4000, 4000]), "prob_sum_SE": np.full((2, 8), 1000.0),
        "top1_S2": np.full((2, 2), 2000.0), "peak_E": np.full(8, 1.5), "sq_over_t_E": np.full(8, 500.0),
        "dropped_E": np.full(8, 7), "logit_mean_E": np.zeros(8), "logit_std_E": np.ones(8), "calls": 4,
    }  # fmt: skip
    path = make_run(
        rng.multinomial(8000, np.full(8, 1 / 8), size=(6, 2, 2)),
        2,
        capacity_factor=1.25,
        extra=lambda r, layer: given if layer == 0 else {},
    )
    frame = moe_audit.metrics(path, length=1)
    whole = frame[frame.source == "all"]
    known, unknown = whole[whole.layer == 0], whole[whole.layer == 1]
    for name in ("peak_load", "capacity_use", "drop_rate", "f_p_gap", "top1_mean", "phi"):
        assert known[name].notna().all() and unknown[name].isna().all(), name
    assert (unknown.tokens == 8000).all()  # M/k, where tokens were not recorded
    verdict = moe_audit.check(path, length=1, all_cells=True)
    for gate in ("capacity_use", "drop_rate", "f_p_gap", "logit_bias"):
        assert {c.layer for c in verdict.cells if c.gate == gate} == {0}, gate


# -- sources


def by_source(rng: np.random.Generator, records: int = 6) -> np.ndarray:
    """Three sources of different size and preferences: [R, 1, 3, 4]."""
    p, size = rng.dirichlet(np.full(4, 3.0), size=3), (9000, 3000, 600)
    return np.array([[[rng.multinomial(n, q) for n, q in zip(size, p)]] for _ in range(records)])


@pytest.mark.parametrize("order", [("c", "a", "b"), ("b", "a"), ("a",), ("c", "b", "a")])
def test_sources_named_in_any_order_keep_their_rows(make_run: Any, order: tuple[str, ...]) -> None:
    path = make_run(by_source(np.random.default_rng(3)), sources=["a", "b", "c"])
    every = moe_audit.metrics(path, length=2)
    some = moe_audit.metrics(path, length=2, sources=order)
    for name in order:
        a, b = (x[x.source == name].reset_index(drop=True) for x in (every, some))
        assert a.equals(b)
    counts = open_run(path).counts(0)[:2, ["abc".index(name) for name in order]].sum((0, 1))
    first = some[some.source == "all"].iloc[0]
    assert first.max_load == pytest.approx(4 * counts.max() / counts.sum())


def test_runs_that_list_their_sources_in_another_order_compare_as_the_same(make_run: Any) -> None:
    counts = by_source(np.random.default_rng(3))
    a = make_run(counts, sources=["a", "b", "c"])
    b = make_run(counts[:, :, [2, 0, 1]], sources=["c", "a", "b"])
    with open_run(a) as run_a, open_run(b) as run_b:
        layer = compare(run_a, run_b).layers[0]
    assert (layer.total, layer.router, layer.mix) == pytest.approx((0, 0, 0), abs=1e-12)
    assert layer.by_source == pytest.approx({"a": 0, "b": 0, "c": 0})


def test_what_is_not_split_by_source_refers_to_all_of_them(make_run: Any) -> None:
    """Drops and micro-batches are of the whole layer, whichever sources are looked at."""
    counts = by_source(np.random.default_rng(3))
    path = make_run(
        counts,
        1,
        sources=["a", "b", "c"],
        capacity_factor=1.0,
        tokens=True,
        record=lambda r: {"microbatches": 10},
        extra=lambda r, layer: {"dropped_E": np.full(4, 30), "peak_E": np.full(4, 0.95), "calls": 10},
    )
    whole, part = (
        {c.gate: c for c in moe_audit.check(path, length=2, sources=sources, all_cells=True).cells}
        for sources in (None, ["c"])
    )
    assert part["drop_rate"].value == whole["drop_rate"].value == pytest.approx(120 / 12600)
    assert (part["capacity_use"].value, part["capacity_use"].floor) == (
        whole["capacity_use"].value,
        whole["capacity_use"].floor,
    )
    table = moe_audit.metrics(path, length=2, sources=["c"])
    assert table[table.source == "all"].drop_rate.iloc[0] == pytest.approx(120 / 12600)
