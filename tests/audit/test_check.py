"""`check` on runs whose outcome is known: published cases, simulations, broken recordings."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import moe_audit
from moe_audit.explain import explain, render
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.store import Store
from moe_audit.thresholds.errors import NoDataError, UsageError
from moe_audit.thresholds.policy import policy_from_dict
from moe_audit.verdict import Status, Verdict

from .test_formulas import CASES, headline, top_k_counts

COUNTS = {c["id"]: np.array(c["counts"]) for c in CASES}


def windows(*rows: Any, layers: int = 1) -> np.ndarray:
    """Each row one record of one source: [R, L, 1, E]."""
    return np.array(rows)[:, None, None, :].repeat(layers, axis=1)


def named(verdict: Verdict, gate: str, status: Status | None = None) -> list[moe_audit.verdict.Cell]:
    return [c for c in verdict.cells if c.gate == gate and status in (None, c.status)]


def gate(verdict: Verdict, name: str) -> Status:
    return next(g.status for g in verdict.gates if g.gate == name)


# -- evenness


def test_collapse_at_restarts(make_run) -> None:  # type: ignore[no-untyped-def]
    """C09: the pooled counts hide that expert 7 was dead at epoch 37."""
    path = make_run(windows(*COUNTS["C09"]), 2, record=lambda r: {"lr": [1e-3, 5e-3, 5e-3][r]})
    verdict = moe_audit.check(path, length=1, stride=1)
    assert (verdict.status, verdict.exit_code) == (Status.FAIL, 1)
    failed = {c.first_step for c in verdict.cells if c.status == Status.FAIL}
    assert failed == {2, 3}
    saturated = named(verdict, "max_load", Status.FAIL)[0]
    assert saturated.experts[0] == 6 and "saturated" in (saturated.value_reason or "")
    assert "1 dead: 7" in (named(verdict, "min_load", Status.FAIL)[0].value_reason or "")


def test_layers_are_never_pooled(make_run) -> None:  # type: ignore[no-untyped-def]
    """C37: two opposite collapses cancel in the sum."""
    counts = np.array([[[[100, 0]], [[0, 100]]]]).repeat(4, axis=0)
    verdict = moe_audit.check(make_run(counts), length=1, stride=1)
    assert verdict.status == Status.FAIL
    assert {c.layer for c in named(verdict, "max_load", Status.FAIL)} == {0, 1}


def test_too_few_tokens_are_not_imbalance(make_run) -> None:  # type: ignore[no-untyped-def]
    """C38: the most even split of ten assignments over four experts."""
    verdict = moe_audit.check(make_run(windows([3, 3, 2, 2]), 2))
    assert (verdict.status, verdict.exit_code) == (Status.INSUFFICIENT, 3)
    assert not [c for c in verdict.cells if c.status in (Status.WARN, Status.FAIL)]
    rng = np.random.default_rng(0)
    few = windows(*[top_k_counts(rng, 8, 256, 8) for _ in range(3)])
    verdict = moe_audit.check(make_run(few, 8), length=1, stride=1)
    assert verdict.status == Status.INSUFFICIENT
    cell = named(verdict, "max_load")[0]
    assert cell.status == Status.INSUFFICIENT
    assert cell.floor is not None and cell.limit is not None and cell.floor > cell.limit
    assert "more tokens" in (cell.value_reason or "")


def test_the_tokens_asked_for_are_enough(make_run) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    few = windows(*[top_k_counts(rng, 60, 64, 8) for _ in range(4)])
    cells = named(moe_audit.check(make_run(few, 8), length=1, stride=1), "min_load", Status.INSUFFICIENT)
    more = max(
        int("".join(x for x in (c.value_reason or "").split("needs ")[1].split(" more")[0] if x != " "))
        for c in cells
    )
    enough = windows(*[top_k_counts(rng, 60 + more, 64, 8) for _ in range(4)])
    verdict = moe_audit.check(make_run(enough, 8), length=1, stride=1)
    assert not named(verdict, "min_load", Status.INSUFFICIENT)


def test_window_averages_hide_short_peaks(make_run) -> None:  # type: ignore[no-untyped-def]
    """C48: the hot expert alternates; per window it is plain, and stability tells of the flip."""
    path = make_run(windows(*COUNTS["C48"]) * 10)
    verdict = moe_audit.check(path, length=1, stride=1)
    assert gate(verdict, "max_load") == Status.FAIL
    assert gate(verdict, "tv") == Status.FAIL
    assert named(verdict, "tv")[0].value == 1.0


def test_micro_batches_and_ranks_are_summed_before_ratios(make_run) -> None:  # type: ignore[no-untyped-def]
    """C24 and C61: opposite halves of one step are even together."""
    for case in ("C24", "C61"):
        table = moe_audit.metrics(make_run(windows(*COUNTS[case])), length=2, stride=2)
        row = table[table.source == "all"].iloc[0]
        assert (row.lir, row.cv, row.norm_entropy) == (1.0, 0.0, 1.0)


def test_counts_decide_not_the_balancing_loss(make_run) -> None:  # type: ignore[no-untyped-def]
    """C41: picks [97, 1, 1, 1] at nearly even mean probabilities."""
    case = next(c for c in CASES if c["id"] == "C41")
    probs = np.array(case["extra"]["mean_prob"])[None] * 100
    path = make_run(windows(*[COUNTS["C41"][0]] * 3), extra=lambda r, layer: {"prob_sum_SE": probs})
    verdict = moe_audit.check(path, length=1, stride=1)
    assert verdict.status == Status.FAIL
    assert any(p["kind"] == "balancing_loss" and "1.038" in p["message"] for p in verdict.problems)
    assert gate(verdict, "f_p_gap") == Status.WARN


def test_shares_are_of_assignments(make_run) -> None:  # type: ignore[no-untyped-def]
    """C40: uniform over 64 experts at top-8 is 1/64 of the assignments, 1/8 of the tokens."""
    table = moe_audit.metrics(make_run(windows([125] * 64), 8))
    row = table[table.source == "all"].iloc[0]
    assert (row.min_share, row.min_load, row.tokens) == (1 / 64, 1.0, 1000)


def test_published_counts_through_the_whole(make_run) -> None:  # type: ignore[no-untyped-def]
    """One row = one source, as an import would store them, to 1e-9."""
    for case in CASES:
        rows = np.array(case["counts"])
        table = moe_audit.metrics(make_run(rows[None, None], case["top_k"]))
        assert list(table.source) == ["all", *[f"s{i}" for i in range(len(rows))]]
        for (_, row), expect in zip(table.iterrows(), [case["expect"], *case["expect_rows"]], strict=True):
            for name, value in expect.items():
                assert row[name] == pytest.approx(float(value), abs=1e-9)


# -- policies on known models


def test_good_public_models(make_run) -> None:  # type: ignore[no-untyped-def]
    """OLMoE fails the published table, and neither scaled policy; Mixtral passes all three."""
    olmoe = make_run(np.array([COUNTS["C01-L0"]] * 6)[:, None], 8)
    mixtral = make_run(np.array([COUNTS["C02-L0"]] * 6)[:, None], 2)
    for path in (olmoe, mixtral):
        assert moe_audit.check(path, "default").status == Status.PASS
        assert moe_audit.check(path, "specialised").status == Status.PASS
    assert moe_audit.check(mixtral, "classic").status == Status.PASS
    classic = moe_audit.check(olmoe, "classic")
    assert (classic.status, gate(classic, "lir"), gate(classic, "cv")) == (Status.FAIL,) * 3
    lir = next(g for g in classic.gates if g.gate == "lir").worst
    assert lir is not None and (lir.limit, lir.value) == (2.0, pytest.approx(6.3036474514))


def test_headline_case_fails_by_association(make_run) -> None:  # type: ignore[no-untyped-def]
    path = make_run(np.array([headline()] * 6)[:, None], 2, sources=["code", "prose"])
    verdict = moe_audit.check(path, "default")
    assert verdict.status == Status.FAIL
    assert gate(verdict, "cramers_v") == Status.FAIL
    assert gate(verdict, "max_load") == Status.PASS
    assert "code uses expert" in (named(verdict, "cramers_v")[0].value_reason or "")
    assert moe_audit.check(path, "classic").status == Status.WARN, "the published table passes it, at .853"


def test_pooled_use_says_nothing_on_sources(make_run) -> None:  # type: ignore[no-untyped-def]
    """C47: even in sum, split by source; beside it three sources that share."""
    split = make_run((COUNTS["C47"] * 10)[None, None].repeat(3, 0))
    mixed = make_run(np.array([[340, 330, 330]] * 3)[None, None].repeat(3, 0))
    verdict = moe_audit.check(split, length=1, stride=1)
    assert gate(verdict, "max_load") == Status.PASS
    assert gate(verdict, "cramers_v") == Status.FAIL
    assert {c.source for c in named(verdict, "source_entropy", Status.FAIL)} == {"s0", "s1", "s2"}
    assert moe_audit.check(mixed, length=1, stride=1).status == Status.PASS


# -- the mix or the router


def swinging(rng: np.random.Generator, router: bool, tokens: int = 4000) -> np.ndarray:
    """Two sources with their own experts. Either the mix swings between windows, or the router does."""
    base = np.array([[4, 4, 2, 2, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 4, 4]]) / 16
    out = []
    for r in range(24):
        high = (r // 4) % 2
        weight = 0.5 if router else (0.85 if high else 0.15)
        p = base if not router else base[:, ::-1] * high + base * (1 - high)
        if router:
            p = np.stack([p[0], p[0]])
        out.append(
            [rng.multinomial(int(tokens * w), q) for w, q in zip((weight, 1 - weight), p, strict=True)]
        )
    return np.array(out)[:, None]


def test_a_swing_of_the_mix_is_no_alarm(make_run) -> None:  # type: ignore[no-untyped-def]
    verdict = moe_audit.check(make_run(swinging(np.random.default_rng(0), router=False)), length=4, stride=4)
    assert gate(verdict, "tv") == Status.PASS and gate(verdict, "load_shift") == Status.PASS
    assert any(p["kind"] == "mix_shift" for p in verdict.problems)
    total = policy_from_dict({"extends": "default", "effect": "total"})
    path = make_run(swinging(np.random.default_rng(0), router=False))
    assert gate(moe_audit.check(path, total, 4, 4), "tv") == Status.FAIL


def test_the_same_swing_of_the_router_fails(make_run) -> None:  # type: ignore[no-untyped-def]
    verdict = moe_audit.check(make_run(swinging(np.random.default_rng(0), router=True)), length=4, stride=4)
    assert gate(verdict, "tv") == Status.FAIL
    assert not any(p["kind"] == "mix_shift" for p in verdict.problems)
    assert "the router moved" in (named(verdict, "tv", Status.FAIL)[0].value_reason or "")


# -- noise


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (64, 8), (256, 8)])
def test_perfect_routing_raises_no_alarm_at_any_size(make_run, num_experts: int, top_k: int) -> None:  # type: ignore[no-untyped-def]
    """Random routing, from far too few tokens to many: no gate may warn or fail (alpha is 1 %)."""
    rng = np.random.default_rng(7)
    for tokens in (16, 64, 200, 700):
        draws = np.array([top_k_counts(rng, tokens, num_experts, top_k) for _ in range(30 * 10 * 2)])
        path = make_run(draws.reshape(30, 10, 2, num_experts), top_k)
        verdict = moe_audit.check(path, length=1, stride=1)
        assert not [c for c in verdict.cells if c.status in (Status.WARN, Status.FAIL)]


def test_classic_shows_floors_that_never_decide(make_run) -> None:  # type: ignore[no-untyped-def]
    few = windows(*[top_k_counts(np.random.default_rng(1), 60, 8, 2) for _ in range(4)])
    verdict = moe_audit.check(make_run(few, 2), "classic", length=1, stride=1)
    assert verdict.totals["INSUFFICIENT"] == 0
    assert verdict.status == Status.FAIL
    assert named(verdict, "lir")[0].floor is not None


def test_correlated_tokens_need_more_of_them(make_run) -> None:  # type: ignore[no-untyped-def]
    """Documents of 64 alike tokens: the design effect turns a false alarm into INSUFFICIENT."""
    rng = np.random.default_rng(3)
    batches = 64 * rng.multinomial(10, [1 / 16] * 16, size=(6, 20))  # [R, B, E], micro-batches of 640 tokens

    def extra(r: int, layer: int) -> dict[str, Any]:
        return {"sq_over_t_E": (batches[r] ** 2 / 640).sum(0), "calls": 20, "tokens_S": np.array([12800])}

    counts = batches.sum(1)[:, None, None]
    known = make_run(counts, extra=extra, record=lambda r: {"tokens": 12800, "microbatches": 20})
    assert moe_audit.check(make_run(counts), length=1, stride=1).totals["WARN"] > 0
    verdict = moe_audit.check(known, length=1, stride=1)
    assert verdict.totals["WARN"] + verdict.totals["FAIL"] == 0
    assert verdict.totals["INSUFFICIENT"] > 0
    table = moe_audit.metrics(known, length=1, stride=1)
    assert 40 < table[table.source == "all"].phi.median() < 90


# -- capacity, health


def test_capacity_counts_demand_before_the_drop(make_run) -> None:  # type: ignore[no-untyped-def]
    """C43: picks [5, 1, 1, 1] at capacity 2, three of eight dropped."""
    path = make_run(
        windows(*[[500, 100, 100, 100]] * 3),
        capacity_factor=1.0,
        extra=lambda r, layer: {
            "peak_E": np.array([2.5, 0.5, 0.5, 0.5]), "dropped_E": np.array([300, 0, 0, 0]), "calls": 1
        },
        record=lambda r: {"microbatches": 1},
    )  # fmt: skip
    verdict = moe_audit.check(path, length=1, stride=1)
    assert gate(verdict, "drop_rate") == Status.FAIL
    drops = named(verdict, "drop_rate", Status.FAIL)[0]
    assert (drops.value, drops.experts[0]) == (0.375, 0)
    use = named(verdict, "capacity_use")[0]
    assert (use.value, use.experts) == (2.5, (0,))


def test_capacity_margin_of_small_micro_batches_is_noise(make_run) -> None:  # type: ignore[no-untyped-def]
    """Uniform routing over micro-batches of 512 tokens passes .9 of capacity 1.25 nearly always."""
    rng = np.random.default_rng(5)
    counts, peaks = [], []
    for _ in range(3):
        n = np.array([top_k_counts(rng, 512, 8, 2) for _ in range(20)])
        counts.append(n.sum(0))
        peaks.append((8 * n / 1024).max(0))
    path = make_run(
        windows(*counts), 2, capacity_factor=1.25,
        extra=lambda r, layer: {"peak_E": peaks[r], "calls": 20}, record=lambda r: {"microbatches": 20},
    )  # fmt: skip
    cell = named(moe_audit.check(path, length=1, stride=1), "capacity_use")[0]
    assert cell.status == Status.INSUFFICIENT
    assert "tokens in a micro-batch" in (cell.value_reason or "")
    assert named(moe_audit.check(path, "classic", length=1, stride=1), "capacity_use")


def test_a_dropless_layer_has_no_capacity_gates(make_run) -> None:  # type: ignore[no-untyped-def]
    verdict = moe_audit.check(make_run(windows(*[[100] * 4] * 3)), length=1, stride=1)
    assert {"capacity_use", "drop_rate"} <= {s["gate"] for s in verdict.skipped}


def test_drops_are_judged_where_the_capacity_is_not_known(make_run) -> None:  # type: ignore[no-untyped-def]
    """A router of the user's own shows what was kept, but no capacity factor."""
    path = make_run(
        windows(*[[500, 100, 100, 100]] * 3),
        extra=lambda r, layer: {"dropped_E": np.array([300, 0, 0, 0]), "calls": 1},
    )
    verdict = moe_audit.check(path, length=1, stride=1)
    drops = named(verdict, "drop_rate", Status.FAIL)[0]
    assert (drops.value, drops.experts) == (0.375, (0,))
    with moe_audit.open_run(path) as run:
        why = render(explain(run, length=1, stride=1), "text")
    assert "37.50% of the assignments were dropped" in why


def test_a_layer_seen_after_the_drop_has_no_demand_gates(make_run) -> None:  # type: ignore[no-untyped-def]
    path = make_run(
        windows(*[[400, 400, 10, 10]] * 3), capacity_factor=1.0, tags=["post_drop"],
        extra=lambda r, layer: {"dropped_E": np.array([180, 0, 0, 0]), "calls": 1},
    )  # fmt: skip
    verdict = moe_audit.check(path, length=1, stride=1)
    assert "max_load" in {s["gate"] for s in verdict.skipped}
    assert named(verdict, "drop_rate")[0].value == pytest.approx(0.18)


def test_invalid_ids_fail_whatever_the_balance(make_run) -> None:  # type: ignore[no-untyped-def]
    """C33: NaN logits give ids that are no expert."""
    path = make_run(windows([4, 4, 4, 3]), extra=lambda r, layer: {"invalid": 5})
    verdict = moe_audit.check(path)
    assert (verdict.status, verdict.exit_code) == (Status.FAIL, 1)
    cell = named(verdict, "invalid_ids", Status.FAIL)[0]
    assert cell.value == 5 and "not finite" in (cell.value_reason or "")
    everything = make_run(windows([0, 0, 0, 0]), extra=lambda r, layer: {"invalid": 5})
    assert moe_audit.check(everything).status == Status.FAIL


def test_a_router_that_stands_still(make_run) -> None:  # type: ignore[no-untyped-def]
    """C72: identical counts in twenty windows."""
    rng = np.random.default_rng(0)
    still = windows(*[[900, 1100, 1000, 1000]] * 25)
    moving = windows(*rng.multinomial(4000, [0.25] * 4, size=25))
    verdict = moe_audit.check(make_run(still), length=1, stride=1)
    assert gate(verdict, "static_router") == Status.WARN
    assert "not learning" in (named(verdict, "static_router")[0].value_reason or "")
    assert gate(moe_audit.check(make_run(moving), length=1, stride=1), "static_router") == Status.PASS


def test_exactly_even_counts_are_forced(make_run) -> None:  # type: ignore[no-untyped-def]
    even = windows(*[[1000] * 16] * 3)
    verdict = moe_audit.check(make_run(even), length=1, stride=1)
    assert gate(verdict, "uniform_counts") == Status.WARN


def test_one_expert_biased_by_its_logits(make_run) -> None:  # type: ignore[no-untyped-def]
    mean = np.array([9.0, 0, 0, 0])
    path = make_run(
        windows(*[[1000, 900, 950, 980]] * 3),
        extra=lambda r, layer: {"logit_mean_E": mean, "logit_std_E": np.full(4, 0.5), "calls": 1},
    )
    cell = named(moe_audit.check(path, length=1, stride=1), "logit_bias", Status.WARN)[0]
    assert cell.experts[0] == 0
    assert cell.value == pytest.approx(mean.std() / 0.5, rel=1e-5)


def test_over_confident_on_the_common_source(make_run) -> None:  # type: ignore[no-untyped-def]
    tokens = np.array([9000, 500, 500])
    top1 = np.array([[9000 * 0.9, 9000 * 0.82], [500 * 0.4, 500 * 0.2], [500 * 0.5, 500 * 0.3]])
    counts = np.array([[4500, 4500], [250, 250], [250, 250]])[None, None].repeat(3, 0)
    path = make_run(
        counts, sources=["web", "code", "maths"],
        extra=lambda r, layer: {"tokens_S": tokens, "top1_S2": top1}, record=lambda r: {"tokens": 10000},
    )  # fmt: skip
    cell = named(moe_audit.check(path, length=1, stride=1), "top1_gap", Status.WARN)[0]
    assert cell.value == pytest.approx(0.45, abs=1e-6)
    assert "web 0.90 (spread 0.10)" in (cell.value_reason or "")


# -- many windows


def test_drift_names_the_step_and_the_experts(make_run) -> None:  # type: ignore[no-untyped-def]
    """One expert of sixteen, in the second layer and one source, takes 30 % more from step 161 on."""
    rng = np.random.default_rng(2)
    p = np.full((30, 2, 2, 16), 1 / 16)
    p[16:, 1, 0, 5] *= 1.6
    p /= p.sum(-1, keepdims=True)
    counts = np.array([[[rng.multinomial(20000, q) for q in layer] for layer in r] for r in p])
    verdict = moe_audit.check(make_run(counts, 1, steps=10), length=10, stride=10)
    assert verdict.status == Status.WARN
    cells = named(verdict, "drift", Status.WARN)
    assert {c.layer for c in cells} == {1} and cells[0].experts[0] == 5
    assert "from step 161 on" in (cells[0].value_reason or "")
    assert "source s0" in (cells[0].value_reason or "")
    assert "when 25 windows are looked at" in (cells[0].value_reason or "")
    assert cells[0].effective_tokens == 40000


@pytest.mark.parametrize(
    ("windows", "tokens", "num_experts", "top_k"), [(20, 5000, 8, 1), (60, 25, 8, 2), (100, 60, 64, 8)]
)
@pytest.mark.parametrize("policy", ["default", "specialised"])
def test_no_drift_in_noise(  # type: ignore[no-untyped-def]
    make_run, windows: int, tokens: int, num_experts: int, top_k: int, policy: str
) -> None:
    """CUSUM passes a fixed limit sooner or later: the limit grows with the windows looked at."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        draws = [top_k_counts(rng, tokens, num_experts, top_k) for _ in range(windows * 4)]
        counts = np.array(draws).reshape(windows, 2, 2, num_experts)
        verdict = moe_audit.check(make_run(counts, top_k), policy, length=1, stride=1)
        assert not named(verdict, "drift")
        drift = next(g for g in verdict.gates if g.gate == "drift")
        assert drift.worst is not None and drift.worst.floor is not None and drift.worst.floor > 6
        assert min(x for x in (drift.warn, drift.fail) if x is not None) == drift.worst.floor


@pytest.mark.parametrize(("router", "status"), [(True, Status.WARN), (False, Status.PASS)])
def test_swings_at_the_shard_cycle(make_run, router: bool, status: Status) -> None:  # type: ignore[no-untyped-def]
    """A router that swings every eight steps, and a mix that does while the router is constant."""
    rng = np.random.default_rng(4)
    p = np.array([[4, 3, 2, 1], [1, 2, 3, 4]]) / 10
    counts = []
    for r in range(160):
        phase = 0.5 + 0.3 * np.sin(2 * np.pi * r / 8)
        if router:
            q = phase * p[0] + (1 - phase) * p[1]
            counts.append([rng.multinomial(1000, q), rng.multinomial(1000, q)])
        else:
            counts.append(
                [rng.multinomial(int(2000 * phase), p[0]), rng.multinomial(int(2000 * (1 - phase)), p[1])]
            )
    path = make_run(np.array(counts)[:, None], meta={"shard_cycle_steps": 8})
    verdict = moe_audit.check(path, length=40, stride=20)
    assert gate(verdict, "periodicity") == status
    skipped = moe_audit.check(make_run(np.array(counts)[:, None], meta={"shard_cycle_steps": 1}), length=40)
    assert "too long" in next(s["reason"] for s in skipped.skipped if s["gate"] == "periodicity")


@pytest.mark.parametrize("cycle", [25, 24, 35, 27, 40, 50])
def test_a_cycle_that_is_no_whole_number_of_records_is_seen(make_run, cycle: int) -> None:  # type: ignore[no-untyped-def]
    """Records of ten steps: the swing comes back after a few cycles, not after one rounded to records."""
    rng = np.random.default_rng(4)
    phase = np.sin(2 * np.pi * np.arange(800) / cycle).reshape(80, 10).mean(1)
    p = np.full((80, 1, 2, 8), 1 / 8)
    p[..., 0] += 0.05 * phase[:, None, None]
    p[..., 1] -= 0.05 * phase[:, None, None]
    counts = rng.multinomial(20000, p)
    verdict = moe_audit.check(make_run(counts, steps=10, meta={"shard_cycle_steps": cycle}), length=200)
    assert gate(verdict, "periodicity") == Status.WARN
    still = rng.multinomial(20000, np.full(p.shape, 1 / 8))
    verdict = moe_audit.check(make_run(still, steps=10, meta={"shard_cycle_steps": cycle}), length=200)
    assert gate(verdict, "periodicity") == Status.PASS


# -- windows, scope, statuses


def run_of(make_run: Any, bad: slice, R: int = 40, **kwargs: Any) -> Any:
    rng = np.random.default_rng(9)
    p = np.full((R, 8), 0.125)
    p[bad] = [0.5, 0.1, 0.1, 0.1, 0.1, 0.08, 0.015, 0.005]
    return make_run(np.array([[[rng.multinomial(8000, q)]] for q in p]), 2, steps=10, **kwargs)


def test_warm_up_is_not_judged(make_run) -> None:  # type: ignore[no-untyped-def]
    path = run_of(make_run, slice(0, 5), meta={"warmup_steps": 50})
    assert moe_audit.check(path).status == Status.PASS
    assert moe_audit.check(run_of(make_run, slice(0, 5))).status == Status.FAIL
    table = moe_audit.metrics(path)
    assert not table[table.first_step <= 50].judged.any() and (table.first_step <= 50).any()


def test_checkpoint_judges_the_last_five_windows_before_it(make_run) -> None:  # type: ignore[no-untyped-def]
    path = run_of(make_run, slice(30, 40))
    assert moe_audit.check(path, length=40, stride=20).status == Status.FAIL
    before = moe_audit.check(path, length=40, stride=20, checkpoint=300)
    assert before.status == Status.PASS
    assert before.windows["count"] == 5 and before.grid is not None
    assert before.grid.last_step_W.tolist() == [220, 240, 260, 280, 300]
    assert moe_audit.check(path, length=40, stride=20, checkpoint=400).status == Status.FAIL
    assert moe_audit.check(path, length=40, stride=20, last_step=300).status == Status.PASS
    assert (
        moe_audit.check(path, length=20, stride=10, first_step=1, last_step=200, last=3).windows["count"] == 3
    )


def test_checkpoint_gives_the_same_cells_as_the_whole_run(make_run) -> None:  # type: ignore[no-untyped-def]
    path = run_of(make_run, slice(20, 24))
    part = moe_audit.check(path, length=40, stride=20, checkpoint=260, all_cells=True)
    whole = moe_audit.check(path, length=40, stride=20, all_cells=True)
    values = {(c.first_step, c.gate): c.value for c in whole.cells}
    for c in part.cells:
        if c.gate not in ("drift", "static_router"):
            assert c.value == pytest.approx(values[c.first_step, c.gate]), c.gate


def test_fewer_than_three_disjoint_windows_is_insufficient(make_run) -> None:  # type: ignore[no-untyped-def]
    path = run_of(make_run, slice(0, 0))
    verdict = moe_audit.check(path, length=200, stride=100)
    assert (verdict.status, verdict.exit_code) == (Status.INSUFFICIENT, 3)
    assert verdict.error is not None and "2 disjoint windows" in verdict.error["message"]
    assert moe_audit.check(path, "classic", length=200, stride=100).status == Status.PASS, (
        "three consecutive ones"
    )
    assert moe_audit.check(run_of(make_run, slice(0, 40)), length=400).status == Status.FAIL, (
        "FAIL comes first"
    )


def test_required_gates_must_decide(make_run) -> None:  # type: ignore[no-untyped-def]
    policy = policy_from_dict({"extends": "default", "required": ["cramers_v"]})
    verdict = moe_audit.check(run_of(make_run, slice(0, 0)), policy)
    assert verdict.status == Status.INSUFFICIENT
    assert verdict.error is not None and "cramers_v" in verdict.error["message"]


def test_a_policy_of_health_gates_only_can_pass(make_run) -> None:  # type: ignore[no-untyped-def]
    policy = policy_from_dict({"gates": {"invalid_ids": {"fail": 0}}})
    assert moe_audit.check(run_of(make_run, slice(0, 0)), policy).status == Status.PASS


def test_waivers_are_listed_and_expire(make_run) -> None:  # type: ignore[no-untyped-def]
    path = run_of(make_run, slice(0, 40))
    gates = {c.gate for c in moe_audit.check(path).cells if c.status in (Status.FAIL, Status.WARN)}
    waivers = [{"gate": g, "owner": "ana", "reason": "known", "expires": "2999-01-01"} for g in gates]
    verdict = moe_audit.check(path, policy_from_dict({"extends": "default", "waivers": waivers}))
    assert verdict.status == Status.PASS and {w["gate"] for w in verdict.waived} == gates
    assert verdict.totals["FAIL"] > 0, "never silent"
    for waiver in waivers:
        waiver["expires"] = "2001-01-01"
    verdict = moe_audit.check(path, policy_from_dict({"extends": "default", "waivers": waivers}))
    assert verdict.status == Status.FAIL and any(p["kind"] == "waiver" for p in verdict.problems)


def test_gates_by_layer_and_source(make_run) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    p = np.full((2, 2, 8), 0.125)
    p[1, 0] = [0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05]
    counts = np.array([[[rng.multinomial(4000, q) for q in layer] for layer in p] for _ in range(6)])
    path = make_run(counts, sources=["code", "prose"])
    loud = moe_audit.check(path, length=1, stride=1)
    assert {c.layer for c in loud.cells if c.status == Status.WARN} == {1}
    off = {"gates": {g.gate: {"enabled": False} for g in loud.gates}, "layers": "1"}
    quiet = policy_from_dict({"extends": "default", "overrides": [off]})
    assert moe_audit.check(path, quiet, 1, 1).status == Status.PASS
    strict = {"sources": ["code"], "gates": {"max_load": {"warn": 1.4, "fail": 2.0}}}
    verdict = moe_audit.check(path, policy_from_dict({"extends": "default", "overrides": [strict]}), 1, 1)
    assert {(c.layer, c.source) for c in named(verdict, "max_load", Status.FAIL)} == {(1, "code")}
    only = moe_audit.check(path, length=1, stride=1, layers=[0])
    assert only.run["layers"] == [0] and only.status == Status.PASS
    assert moe_audit.check(path, length=1, stride=1, sources=["prose"]).status == Status.PASS
    assert gate(moe_audit.check(path, length=1, stride=1, sources=["code"]), "max_load") == Status.FAIL
    for wrong in ({"layers": [7]}, {"sources": ["cod"]}):
        with pytest.raises(UsageError):
            moe_audit.check(path, **wrong)


def test_a_status_is_shown_as_its_name(make_run) -> None:  # type: ignore[no-untyped-def]
    verdict = moe_audit.check(run_of(make_run, slice(0, 40)))
    assert verdict.status == "FAIL" and verdict.status != "PASS"
    assert f"{verdict.status:>5}" == " FAIL" and str(verdict.status) == "FAIL"
    assert {Status.FAIL: 1}[verdict.status] == 1
    assert (np.array([3, 0]) == Status.FAIL).tolist() == [True, False]


def test_no_data_is_never_a_pass(make_run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = run_of(make_run, slice(0, 0))
    with moe_audit.open_run(path, phase="eval") as run, pytest.raises(NoDataError):
        moe_audit.check(run)
    with pytest.raises(NoDataError):
        moe_audit.check(path, first_step=5000)
    warm = run_of(make_run, slice(0, 0), meta={"warmup_steps": 1000})
    verdict = moe_audit.check(warm)
    assert (verdict.status, verdict.exit_code) == (Status.INSUFFICIENT, 3)
    zeros = make_run(np.zeros((4, 1, 1, 4), int))
    assert moe_audit.check(zeros).exit_code == 3


@pytest.mark.parametrize(("num_experts", "top_k", "tokens"), [(8, 2, 6), (8, 2, 12), (16, 1, 30), (64, 8, 4)])
def test_a_run_whose_loads_drown_in_noise_has_not_passed(  # type: ignore[no-untyped-def]
    make_run, num_experts: int, top_k: int, tokens: int
) -> None:
    """Gates that a few tokens can decide, such as the entropy of a source, do not speak for the others."""
    rng = np.random.default_rng(tokens)
    draws = [top_k_counts(rng, tokens, num_experts, top_k) for _ in range(16)]
    path = make_run(np.array(draws).reshape(8, 1, 2, num_experts), top_k)
    verdict = moe_audit.check(path, length=1, stride=1)
    assert verdict.totals["PASS"] > 0, "single cells pass by luck, or by a wide limit"
    assert (verdict.status, verdict.exit_code) == (Status.INSUFFICIENT, 3)
    assert verdict.error is not None and "within sampling noise" in verdict.error["message"]
    wide = policy_from_dict({"gates": {"source_entropy": {"fail": 0.01}}})
    assert moe_audit.check(path, wide, 1, 1).status == Status.PASS, "all that was asked can be told"
    luck = policy_from_dict({"gates": {"max_load": {"fail": 50}}, "required": ["max_load"]})
    assert moe_audit.check(path, luck, 1, 1).status == Status.PASS


@pytest.mark.parametrize(("num_experts", "per_expert"), [(2, 10), (4, 1), (8, 1)])
def test_even_counts_by_luck_say_how_many_tokens_would_tell(  # type: ignore[no-untyped-def]
    make_run, num_experts: int, per_expert: int
) -> None:
    counts = np.full((4, 1, 1, num_experts), per_expert)
    cell = named(moe_audit.check(make_run(counts), length=1, stride=1), "uniform_counts")[0]
    assert cell.status == Status.INSUFFICIENT
    needed = int(re.sub(r".*needs ([\d ]+) more tokens.*", r"\1", cell.value_reason or "").replace(" ", ""))
    enough = -(-(per_expert * num_experts + needed) // num_experts)
    assert (
        gate(moe_audit.check(make_run(counts * 0 + enough), length=1, stride=1), "uniform_counts") == "WARN"
    )
    if enough > per_expert + 1:
        almost = moe_audit.check(make_run(counts * 0 + enough - 1), length=1, stride=1)
        assert gate(almost, "uniform_counts") == "INSUFFICIENT"


def test_warnings_and_fail_on(make_run) -> None:  # type: ignore[no-untyped-def]
    path = make_run(windows(*[[1700, 900, 900, 800, 900, 900, 950, 950]] * 3))
    codes = [
        moe_audit.check(path, length=1, stride=1, fail_on=f).exit_code for f in ("fail", "warn", "never")
    ]
    assert codes == [0, 1, 0]


# -- invariants


def test_picks_must_be_k_times_tokens(make_run) -> None:  # type: ignore[no-untyped-def]
    def extra(r: int, layer: int) -> dict[str, Any]:
        return {"tokens_S": np.array([501 if (r, layer) == (2, 1) else 500])}

    counts = windows(*[[250] * 4] * 6, layers=2)
    path = make_run(counts, 2, extra=extra, record=lambda r: {"tokens": 500})
    verdict = moe_audit.check(path, length=1, stride=1)
    assert (verdict.status, verdict.exit_code) == (Status.INVALID, 4)
    message = next(p["message"] for p in verdict.problems if p["kind"] == "invariant")
    assert "layer 1" in message and "steps 3-3" in message and "1000" in message


def test_counts_twice_under_recompute_are_invalid(make_run) -> None:  # type: ignore[no-untyped-def]
    """Ratios do not change when all is doubled; tokens per layer against tokens of the record do."""

    def extra(r: int, layer: int) -> dict[str, Any]:
        return {"tokens_S": np.array([1000])}

    path = make_run(windows(*[[250] * 4] * 3), extra=extra, record=lambda r: {"tokens": 500})
    assert moe_audit.check(path, length=1, stride=1).status == Status.INVALID
    layer_used_twice = make_run(
        windows(*[[260, 240, 251, 249]] * 3),
        extra=lambda r, layer: {"tokens_S": np.array([1000]), "calls": 8},
        record=lambda r: {"tokens": 500, "microbatches": 4},
    )
    assert moe_audit.check(layer_used_twice, length=1, stride=1).status == Status.PASS


def test_a_layer_that_falls_silent_is_told(make_run) -> None:  # type: ignore[no-untyped-def]
    """An import does not say which layers were attached: what has no row counts as nothing picked."""
    counts = windows(*[[100, 101, 99, 100]] * 30, layers=2)
    counts[15:, 1] = 0
    verdict = moe_audit.check(make_run(counts), length=5, stride=5)
    told = [p["message"] for p in verdict.problems if p["kind"] == "no_data"]
    assert len(told) == 1
    assert "layer 1" in told[0] and "3 of the 6 windows" in told[0] and "step 16" in told[0]


def test_a_layer_that_never_fired_is_invalid(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "routing.db"
    store = Store.create(path, [LayerInfo(0, "a", 4, 1), LayerInfo(1, "b", 4, 1)])
    store.begin_attempt(1)
    for r in range(4):
        rows = {
            layer: LayerRecord(np.array([[9, 11, 10, 10]]), np.array([40])) for layer in range(1 + (r != 2))
        }
        store.append(Record("train", r + 1, r + 1, rows, tokens=40))
    store.close()
    verdict = moe_audit.check(path, length=1, stride=1)
    assert verdict.status == Status.INVALID
    assert any("layer 1 (b) did not fire in steps 3-3" in p["message"] for p in verdict.problems)


@pytest.mark.parametrize(
    ("broken", "status"), [(None, Status.PASS), (0, Status.INVALID), (9, Status.INVALID)]
)
def test_invariants_hold_in_warm_up_and_tail_too(make_run, broken, status) -> None:  # type: ignore[no-untyped-def]
    """Ten records, the first in the warm-up, the last in no window."""
    counts = windows(*[[260, 240, 251, 249]] * 10)
    path = make_run(
        counts,
        meta={"warmup_steps": 1},
        extra=lambda r, layer: {"tokens_S": np.array([1000 + (r == broken)])},
        record=lambda r: {"tokens": 1000},
    )
    assert moe_audit.check(path, length=2, stride=2).status == status


def test_missing_ranks_and_a_counter_that_goes_back_are_invalid(make_run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = make_run(windows(*[[9, 11, 10, 10]] * 3), record=lambda r: {"ranks": 2 + (r != 1)}, world_size=3)
    verdict = moe_audit.check(path, length=1, stride=1)
    assert verdict.status == Status.INVALID and "2 of 3 ranks" in verdict.problems[0]["message"]
    store = Store.create(tmp_path / "back.db", [LayerInfo(0, "a", 4, 1)])
    store.begin_attempt(1)
    for step in (1, 2, 1, 2):
        store.append(Record("train", step, step, {0: LayerRecord(np.array([[9, 11, 10, 10]]))}))
    store.close()
    assert moe_audit.check(tmp_path / "back.db", length=1, stride=1).status == Status.INVALID


def test_an_import_is_not_checkable_and_not_invalid(make_run) -> None:  # type: ignore[no-untyped-def]
    verdict = moe_audit.check(make_run(windows(*[[900, 1100, 1000, 1000]] * 3)), length=1, stride=1)
    assert verdict.status == Status.PASS
    assert any(p["kind"] == "not_checkable" for p in verdict.problems)


def test_resume_counts_each_step_once(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """C67: steps 101 to 150 were done twice; the first pass counts no longer."""
    store = Store.create(tmp_path / "routing.db", [LayerInfo(0, "a", 2, 1)])
    store.begin_attempt(1)
    for step in range(1, 151, 10):
        hot = [[100, 0]] if step > 100 else [[50, 50]]
        store.append(Record("train", step, step + 9, {0: LayerRecord(np.array(hot))}))
    store.begin_attempt(101)
    for step in range(101, 201, 10):
        store.append(Record("train", step, step + 9, {0: LayerRecord(np.array([[50, 50]]))}))
    store.close()
    table = moe_audit.metrics(tmp_path / "routing.db", length=200, stride=200)
    row = table[table.source == "all"].iloc[0]
    assert (row.tokens, row.lir) == (2000, 1.0)


def test_no_mask_is_said(make_run) -> None:  # type: ignore[no-untyped-def]
    """C15: padding that was not excluded must be told."""

    def problems(excluded: int | None) -> set[str]:
        path = make_run(
            windows(*[[900, 1100, 1000, 1000]] * 3),
            tokens=True,
            record=lambda r: {"excluded_tokens": excluded},
        )
        return {p["kind"] for p in moe_audit.check(path, length=1, stride=1).problems}

    assert "padding" in problems(None)
    assert "padding" not in problems(300)


def test_loss_and_rate_per_window(make_run) -> None:  # type: ignore[no-untyped-def]
    from moe_audit.frame import analyse

    path = make_run(
        windows(*[[10, 10]] * 4), record=lambda r: {"loss": float(r), "lr": 0.1 * r, "router_lr": None}
    )
    with moe_audit.open_run(path) as run:
        analysis = analyse(run, length=2, stride=1)
        assert analysis.loss_W.tolist() == [0.5, 1.5, 2.5]
        assert analysis.router_lr_W == pytest.approx([0.0, 0.1, 0.2])


def test_check_imports_neither_pandas_nor_torch(make_run) -> None:  # type: ignore[no-untyped-def]
    path = make_run(windows(*[[900, 1100, 1000, 1000]] * 3), 1)
    code = (
        f"import sys, moe_audit; v = moe_audit.check({str(path)!r}, length=1, stride=1);"
        "heavy = {'pandas', 'torch', 'plotly', 'jinja2', 'sqlite_utils'};"
        "print(v.status.name, sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split(maxsplit=1) == ["PASS", "[]\n"]


@pytest.mark.parametrize(
    ("experts", "top_k"),
    [(1, 1), (4, 4), (2, 1), (4, None), (5, 3)],
    ids=["N=1", "k=N", "N=2", "k varies", "odd"],
)
@pytest.mark.parametrize("policy", ["classic", "default", "specialised"])
def test_edges_of_the_layer(make_run, policy: str, experts: int, top_k: int | None) -> None:  # type: ignore[no-untyped-def]
    """Even routing in layers at the edge of the definitions: no crash, no failure."""
    rng = np.random.default_rng(0)
    tokens = 30_000
    n = np.stack([top_k_counts(rng, tokens, experts, top_k or 1) for _ in range(6 * 2 * 3)])
    path = make_run(n.reshape(6, 2, 3, experts), top_k, extra=lambda r, layer: {"prob_sum_SE": n[:3] / 7})
    verdict = moe_audit.check(path, policy, 1, 1)
    # a single expert has no balance to judge
    assert verdict.status in (
        (Status.INSUFFICIENT, Status.PASS) if experts == 1 else (Status.PASS, Status.WARN)
    )
    assert not [c for c in verdict.cells if c.status == Status.FAIL]
    assert len(moe_audit.metrics(path, 1, 1)) == 6 * 2 * 4
