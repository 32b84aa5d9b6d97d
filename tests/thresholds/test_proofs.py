"""What `policy check` proves: against published figures, random loads, and simulated routing."""

from __future__ import annotations

import doctest
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_audit import formulas
from moe_audit.thresholds import calibrate, extremes, gate_names, policy_file
from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.policy import load_policy, policy_from_dict
from moe_audit.thresholds.proofs import Finding, Setting, capacity_alarm, check_policy

JUDGED = {
    "max_load": formulas.max_load, "min_load": formulas.min_load, "min_share": formulas.min_share,
    "cv": formulas.cv, "lir": formulas.lir, "norm_entropy": formulas.norm_entropy,
}  # fmt: skip
LIMITS = {
    "max_load": (1.05, 3.0), "min_load": (0.05, 0.95), "min_share": (0.01, 0.1), "cv": (0.02, 1.5),
    "lir": (1.05, 20.0), "norm_entropy": (0.5, 0.999),
}  # fmt: skip


def found(
    policy: str, kind: str, gate: str, num_experts: int, top_k: int, by: str | None = None
) -> Finding | None:
    findings = check_policy(load_policy(policy), num_experts=num_experts, top_k=top_k)
    hits = [f for f in findings if (f.kind, f.gate) == (kind, gate) and by in (None, f.by)]
    return hits[0] if hits else None


@pytest.mark.parametrize("module", [calibrate, extremes, gate_names, policy_file])
def test_doctests(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


# -- bounds


def test_bounds_as_published() -> None:
    assert extremes.worst("cv", 8, 2, "lir", 1.5) == pytest.approx(0.204, abs=5e-4)
    assert 0.25 < extremes.worst("cv", 64, 8, "lir", 2.0) <= 1 / (2 * math.sqrt(2)) + 1e-12
    assert extremes.worst("min_share", 8, 2, "lir", 1.5) == pytest.approx(1 / (1 + 1.5 * 7))
    assert extremes.worst("cv", 8, 1, "norm_entropy", 0.85) == pytest.approx(0.967, abs=5e-4)
    assert extremes.worst("cv", 64, 1, "norm_entropy", 0.85) == pytest.approx(2.23, abs=5e-3)
    assert extremes.worst("norm_entropy", 8, 2, "cv", 0.25) == pytest.approx(0.980, abs=5e-4)
    assert extremes.worst("max_load", 8, 2) == pytest.approx(4)
    assert extremes.worst("cv", 64, 8) == pytest.approx(math.sqrt(7))
    assert extremes.worst("norm_entropy", 64, 8) == pytest.approx(math.log(8) / math.log(64))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_no_load_is_worse_than_its_bound(data: st.DataObject) -> None:
    """Any load that keeps a limit lies within the bounds that follow from it."""
    top_k = data.draw(st.integers(1, 3))
    num_experts = data.draw(st.integers(top_k + 1, 10))
    given_metric = data.draw(st.sampled_from(sorted(JUDGED)))
    low, high = LIMITS[given_metric]
    limit = data.draw(st.floats(low, high))
    raw = data.draw(st.lists(st.floats(0.001, 1), min_size=num_experts, max_size=num_experts))
    u = np.array(raw) * num_experts / sum(raw)
    c = num_experts / top_k

    def keeps(v: np.ndarray) -> bool:
        value = extremes.METRICS[given_metric](v)
        good = value >= limit if given_metric in extremes.LOWER_IS_WORSE else value <= limit
        return bool(good) and v.max() <= c

    for _ in range(60):  # towards even, until the limit is kept
        if keeps(u):
            break
        u = 1 + (u - 1) * 0.9
    if not keeps(u):
        return
    for metric in JUDGED:
        bound = extremes.worst(metric, num_experts, top_k, given_metric, limit)
        value = extremes.METRICS[metric](u)
        if metric in extremes.LOWER_IS_WORSE:
            assert value >= bound - 1e-7
        else:
            assert value <= bound + 1e-7


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_no_load_has_more_dead_experts_than_its_bound(data: st.DataObject) -> None:
    """Against every number of equal loads; it is reached, so that each limit below it can be breached."""
    num_experts = data.draw(st.integers(2, 24))
    top_k = data.draw(st.integers(1, num_experts))
    given_metric = data.draw(st.sampled_from([*sorted(JUDGED), "dead_experts"]))
    low, high = (*LIMITS.values(), (0, 8))[[*LIMITS, "dead_experts"].index(given_metric)]
    whole = data.draw(st.booleans())  # limits at which a whole number of experts is just full
    limit = data.draw(st.floats(low, high))
    if whole and given_metric == "max_load":
        limit = num_experts / data.draw(st.integers(top_k, num_experts))
    most = 0
    for alive in range(top_k, num_experts + 1):
        u = np.zeros(num_experts)
        u[:alive] = num_experts / alive
        value = extremes.METRICS[given_metric](u)
        worse = value < limit - 1e-12 if given_metric in extremes.LOWER_IS_WORSE else value > limit + 1e-12
        most = most if worse else max(most, num_experts - alive)
    assert extremes.worst("dead_experts", num_experts, top_k, given_metric, limit) == most


@pytest.mark.parametrize(("num_experts", "v"), [(3, 0.3), (6, 0.19495), (12, 0.15), (64, 0.1)])
def test_largest_imbalance_ratio_at_a_cv_is_reached(num_experts: int, v: float) -> None:
    """One expert high, one low, the others equal: a^2 + b^2 + (b - a)^2/(N - 2) = N v^2."""
    angles = np.linspace(0, np.pi / 2, 20001)
    a, b = np.cos(angles), np.sin(angles)
    scale = np.sqrt(num_experts * v**2 / (a**2 + b**2 + (b - a) ** 2 / (num_experts - 2)))
    best = ((1 + scale * a) / (1 - scale * b)).max()
    assert extremes.worst("lir", num_experts, 1, "cv", v) == pytest.approx(best, rel=1e-6)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=12))
def test_metrics_are_those_of_the_engine(counts: list[int]) -> None:
    n = np.array(counts)
    u = len(n) * n / n.sum()
    for name, function in JUDGED.items():
        assert extremes.METRICS[name](u) == pytest.approx(float(function(n)), abs=1e-12)


@pytest.mark.parametrize(("low", "high"), [(0.0, 4.0), (0.5, 1.5), (0.9, 2.0)])
def test_largest_swing_covers_random_pairs(low: float, high: float) -> None:
    rng = np.random.default_rng(1)
    tv, shift = extremes.largest_swing(8, low, high)
    for _ in range(300):
        p, q = (1 + (x * 8 - 1) for x in rng.dirichlet(np.full(8, 0.3), 2))
        for u in (p, q):
            scale = min(1.0, *((high - 1) / (u.max() - 1), (1 - low) / (1 - u.min())))
            u[:] = 1 + (u - 1) * scale
        assert np.abs(p - q).sum() / 16 <= tv + 1e-9
        assert np.abs(p - q).max() <= shift + 1e-9


# -- the published table is not consistent with itself


def test_classic_at_8_experts() -> None:
    for gate in ("cv", "min_share", "norm_entropy"):
        finding = found("classic", "never", gate, 8, 2, by="lir")
        assert finding is not None
        assert "lir <= 1.5 implies" in finding.inequality
    assert "0.204" in (found("classic", "never", "cv", 8, 2) or pytest.fail()).inequality


def test_classic_at_many_experts() -> None:
    assert found("classic", "never", "cv", 64, 8) is None  # at lir 2.0 it can fire
    assert found("classic", "always", "min_share", 64, 8) is not None
    assert found("classic", "always", "min_share", 20, 2) is not None  # 5 % is the fair share
    assert found("classic", "always", "min_share", 19, 2) is None
    assert "6.4 fair shares" in (found("classic", "blind", "share_shift", 64, 8) or pytest.fail()).message
    assert found("classic", "blind", "share_shift", 10, 2) is None


@pytest.mark.parametrize("num_sources", [2, 4])
def test_ties_of_a_packed_source_are_those_of_the_engine(num_sources: int) -> None:
    code = np.r_[np.full(3, 700), np.full(7, 300 * 3 / 7)] * 0.3 * 10**6
    rest = (np.full(10, 300) * 10**6 - code * 1.0) / (num_sources - 1)
    n = np.rint(np.stack([code, *[rest] * (num_sources - 1)])).astype(np.int64)
    share, weight = float(code[:3].sum() / code.sum()), float(code.sum() / (300 * 10**7))
    ties = extremes.packed_ties(10, 3, share, weight, num_sources)
    for name in ("cramers_v", "association_rel", "max_lift", "max_monopoly"):
        assert ties[name] == pytest.approx(float(getattr(formulas, name)(n)), rel=1e-5), name


def test_a_gate_is_said_to_see_a_packed_source_only_where_it_does() -> None:
    for limit, seen in ((0.15, True), (0.5, False)):
        gates = {"source_entropy": {"fail": 0.93}, "cramers_v": {"fail": limit}}
        findings = check_policy(policy_from_dict({"gates": gates}), num_experts=10, top_k=2, num_sources=4)
        message = next(f.message for f in findings if f.kind == "blind")
        assert ("cramers_v would see it" in message) == seen
        assert ("nor is cramers_v = 0.20 beyond its limit" in message) != seen


def test_a_warning_that_an_inherited_limit_buries_is_told() -> None:
    policy = policy_from_dict({"extends": "default", "gates": {"cv": {"fail": 0.2}}})
    findings = check_policy(policy, num_experts=8, top_k=2)
    finding = next(f for f in findings if (f.gate, f.kind, f.level) == ("cv", "never", "warn"))
    assert finding.inequality == "warn 0.35 lies beyond fail 0.2"
    for preset in ("default", "specialised", "classic"):
        for num_experts, top_k in ((8, 2), (8, 8), (64, 8), (1, 1)):
            every = check_policy(load_policy(preset), num_experts=num_experts, top_k=top_k)
            assert not [f for f in every if "lies beyond" in f.inequality]


def test_why_the_headline_case_passes_an_entropy_of_085() -> None:
    """Three of ten experts take 70 % of one source, and the pooled load is uniform."""
    finding = found("classic", "blind", "source_entropy", 10, 2)
    assert finding is not None
    assert "3 of 10 experts take 70 %" in finding.message
    assert "limit cramers_v" in finding.message
    for figure in ("0.853", "lir 1.0", "Cramer's V 0.57"):
        assert figure in finding.inequality
    assert (
        "cramers_v would see it"
        in (found("default", "blind", "source_entropy", 10, 2) or pytest.fail()).message
    )


@pytest.mark.parametrize(
    ("num_experts", "top_k", "tokens", "batches", "chance"),
    [(8, 2, 512, 20, 1.0), (16, 2, 4096, 20, 0.3), (64, 8, 4096, 20, 0.9), (64, 8, 65536, 20, 0.0),
     (8, 2, 512, 2000, 1.0), (16, 2, 4096, 2000, 1.0), (64, 8, 4096, 2000, 1.0), (64, 8, 65536, 2000, 0.0)],
)  # fmt: skip
def test_capacity_margin_trips_on_uniform_routing(
    num_experts: int, top_k: int, tokens: int, batches: int, chance: float
) -> None:
    setting = Setting(num_experts, top_k, tokens, batches, 1.25)
    assert capacity_alarm(setting, 0.9, strict=True) == pytest.approx(chance, abs=0.1)
    kinds = {"always"} if chance == 1 else {"noise"} if chance else set()
    findings = check_policy(
        load_policy("classic"), num_experts=num_experts, top_k=top_k, tokens=tokens, micro_batches=batches,
        capacity_factor=1.25,
    )  # fmt: skip
    assert {f.kind for f in findings if (f.gate, f.level) == ("capacity_use", "fail")} == kinds


def test_capacity_alarm_against_simulation() -> None:
    rng = np.random.default_rng(3)
    peaks = np.array([
        np.bincount(np.argpartition(rng.random((512, 8)), 2, axis=1)[:, :2].ravel(), minlength=8).max()
        for _ in range(1500)
    ])  # fmt: skip
    limit = 150 / (1.25 * 512 * 2 / 8)
    expected = capacity_alarm(Setting(8, 2, 512, 1, 1.25), limit, strict=False)
    assert (peaks >= 150).mean() == pytest.approx(expected, abs=0.03)


def test_binomial_tail_is_exact() -> None:
    for trials, p, at_least in ((10, 0.3, 4), (40, 0.5, 15), (200, 0.125, 40), (7, 0.9, 7), (5, 0.5, 0)):
        exact = sum(
            math.comb(trials, n) * p**n * (1 - p) ** (trials - n) for n in range(at_least, trials + 1)
        )
        assert extremes.binomial_tail(trials, p, at_least) == pytest.approx(exact, rel=1e-10)


# -- other findings


def check(
    table: dict[str, object], num_experts: int = 8, top_k: int = 2, **setting: object
) -> set[tuple[str, str]]:
    findings = check_policy(policy_from_dict(table), num_experts=num_experts, top_k=top_k, **setting)  # type: ignore[arg-type]
    return {(f.kind, f.gate) for f in findings}


def test_ranges_and_contradictions() -> None:
    assert ("never", "max_load") in check({"gates": {"max_load": {"fail": 4.0}}})  # N/k = 4 is the most
    assert ("never", "max_load") not in check({"gates": {"max_load": {"fail": 3.9}}})
    assert ("never", "norm_entropy") in check({"gates": {"norm_entropy": {"fail": 0.3}}})
    assert ("always", "max_load") in check({"gates": {"max_load": {"fail": 0.9}}})
    assert ("always", "cv") in check({"gates": {"cv": {"fail": 0}}})
    assert ("always", "capacity_use") in check(
        {"gates": {"capacity_use": {"fail": 0.5}}}, capacity_factor=1.25
    )
    assert ("never", "drop_rate") in check({"gates": {"drop_rate": {"fail": 0.01}}}, capacity_factor=4.0)
    required = {
        "gates": {"cv": {"fail": 1}, "drop_rate": {"fail": 0.1}},
        "required": ["drop_rate", "max_load"],
    }
    assert {("contradiction", "drop_rate"), ("contradiction", "max_load")} <= check(required)
    assert ("contradiction", "drop_rate") not in check(required, capacity_factor=1.25)


def test_two_gates_that_no_router_can_keep_both() -> None:
    both = {"gates": {"max_load": {"fail": 1}, "uniform_counts": {"fail": 0.5}}}
    assert ("contradiction", "max_load") in check(both)
    assert ("contradiction", "max_load") not in check({"gates": {"max_load": {"fail": 1.5}}})


@pytest.mark.parametrize("preset", ["classic", "default", "specialised"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 4), (64, 64)])
def test_where_every_token_takes_every_expert_nothing_can_fire(
    preset: str, num_experts: int, top_k: int
) -> None:
    findings = check_policy(
        load_policy(preset), num_experts=num_experts, top_k=top_k, tokens=512, num_sources=4
    )
    unreachable = {"min_share"} if num_experts == 64 else set()  # 5 % of 64 experts
    assert {f.gate for f in findings if f.kind == "always"} <= unreachable
    assert not [f for f in findings if f.kind == "blind" and f.gate == "source_entropy"]


def test_no_expert_gets_more_of_a_source_than_top_k_allows() -> None:
    """4 experts, top-3: one expert takes a third of the picks at most, so nothing is hidden."""
    assert found("default", "blind", "source_entropy", 4, 3) is None
    assert found("default", "blind", "source_entropy", 4, 1) is not None


def test_noise() -> None:
    table = {"gates": {"lir": {"fail": 1.25}}}
    assert check(table, 64, 8, tokens=4096, micro_batches=1000) == set()
    aware = check_policy(policy_from_dict(table), num_experts=64, top_k=8, tokens=4096)
    assert [(f.kind, "INSUFFICIENT" in f.message) for f in aware] == [("noise", True)]
    assert "needs" in aware[0].message
    blind = {"noise_aware": False, **table}
    assert check(blind, 64, 8, tokens=4096) == {("noise", "lir")}  # mean floor 1.21, quantile beyond 1.25
    assert check(blind, 64, 8, tokens=2048) == {("always", "lir")}


def test_a_layer_that_cannot_be() -> None:
    policy = load_policy("default")
    for wrong in (
        {"num_experts": 0, "top_k": 1},
        {"num_experts": 4, "top_k": 5},
        {"num_experts": 4, "top_k": 0},
    ):
        with pytest.raises(UsageError):
            check_policy(policy, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        check_policy(policy, num_experts=4, top_k=1, capacity_factor=math.nan)
