"""`explain` on runs made sick in one known way: the pattern, its evidence, the order of its causes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from moe_audit.diagnosis import BY_KEY, PATTERNS
from moe_audit.explain import Diagnosis, Explanation, explain, render
from moe_audit.run import open_run
from moe_audit.thresholds.gate_names import GATES

from .test_formulas import CASES, headline

SOURCES = ["code", "prose"]
EVEN = np.full((2, 8), 5000)


def run_of(make_run: Any, matrices: list[np.ndarray], **options: Any) -> Any:
    """One record of ten steps a matrix [sources, experts]; one layer."""
    counts = np.array(matrices)[:, None]
    return open_run(make_run(counts, 2, steps=10, sources=options.pop("sources", SOURCES), **options))


def diagnosed(make_run: Any, matrices: list[np.ndarray], **options: Any) -> Explanation:
    policy = options.pop("policy", "default")
    length = options.pop("length", 20)
    with run_of(make_run, matrices, **options) as run:
        return explain(run, policy, length=length)


def the(found: Explanation, pattern: str) -> Diagnosis:
    return next(d for d in found.diagnoses if d.pattern == pattern)


def tilted(expert: int, load: float, base: np.ndarray = EVEN) -> np.ndarray:
    """The same number of picks with one expert at `load` fair shares."""
    total = base.sum(1)
    rest = np.full(8, (1 - load / 8) / 7)
    rest[expert] = load / 8
    return np.rint(total[:, None] * rest).astype(int)


# -- the data


def test_every_gate_has_a_pattern() -> None:
    assert {gate for p in PATTERNS for gate in p.gates} == set(GATES)
    assert len(BY_KEY) == len(PATTERNS)
    for pattern in PATTERNS:
        assert pattern.causes and pattern.remedies and pattern.symptom


# -- one run a pattern


def test_hot_expert_with_its_evidence(make_run: Any) -> None:
    logits = np.full(8, 0.1)
    logits[3] = 4.0
    found = diagnosed(
        make_run,
        [tilted(3, 3.2)] * 8,
        meta={"balancing": "none"},
        record=lambda r: {"lr": 1e-3, "router_lr": 1e-2, "loss": 2.0},
        extra=lambda r, layer: {
            "logit_mean_E": logits.astype(np.float32), "logit_std_E": np.ones(8, np.float32), "calls": 10,
        },
    )  # fmt: skip
    d = the(found, "hot_expert")
    assert (d.status, d.layer, d.evidence["expert"]) == ("FAIL", 0, 3)
    assert "expert 3 carries 3.2 fair shares" in d.symptom
    evidence = {c.cause: c for c in d.causes}
    assert [c.supported for c in d.causes] == [True, True, True, False]  # the last: no source owns it
    assert "balancing is none" in d.causes[0].evidence
    assert "0.01, 10 times the 0.001" in d.causes[1].evidence
    logit = next(c for text, c in evidence.items() if "logits" in text)
    assert "mean logit of expert 3 is 4" in logit.evidence
    assert any("0.01 -> 0.1" in r for r in d.remedies)
    assert any("row of expert 3" in r for r in d.remedies)
    assert any("fair shares of expert 3: code 3.2" in line for line in d.look_at)


def test_evidence_against_a_cause_moves_it_down(make_run: Any) -> None:
    strong = {"meta": {"balancing": "batch loss 0.1"}, "record": lambda r: {"lr": 1e-3, "router_lr": 1e-4}}
    mine = np.stack([tilted(3, 6.0)[0], tilted(3, 1.0)[1]])
    d = the(diagnosed(make_run, [mine] * 8, **strong), "hot_expert")
    first, last = d.causes[0], d.causes[-2:]
    assert "one source owns the expert" in first.cause
    assert first.supported is True
    assert "6 fair shares of code and 1 of prose" in (first.evidence or "")
    assert {c.supported for c in last} == {False}


def test_starved_experts(make_run: Any) -> None:
    counts = np.tile([6600] * 6 + [200, 0], (2, 1))
    d = the(diagnosed(make_run, [counts] * 8), "starved_experts")
    assert "min_load" in d.gates
    assert "2 of 8 experts" in d.symptom and "1 got nothing" in d.symptom
    assert any("experts 6, 7" in r for r in d.remedies)
    assert any("fair shares of expert 7: code 0, prose 0" in line for line in d.look_at)


def test_router_that_swings_and_mix_that_swings(make_run: Any) -> None:
    ways = [tilted(0, 2.4), tilted(5, 2.4)]
    found = diagnosed(make_run, [ways[(r // 2) % 2] for r in range(12)], record=lambda r: {"lr": 1e-3})
    d = the(found, "swinging")
    assert d.evidence["mix"] == pytest.approx(0, abs=1e-3)
    assert d.evidence["router"] > 0.15
    assert set(d.evidence["moved_experts"].split(", ")[:2]) == {"0", "5"}
    assert any("1/5 to 1/3" in r for r in d.remedies)

    code, prose = tilted(0, 1.45)[0], tilted(5, 1.45)[0]
    weights = [(1.8, 0.2), (0.2, 1.8)]
    mixed = [np.rint(np.stack([code * a, prose * b])).astype(int) for a, b in weights]
    found = diagnosed(make_run, [mixed[(r // 2) % 2] for r in range(12)])
    assert "swinging" not in {d.pattern for d in found.diagnoses}


def test_change_at_a_restart(make_run: Any) -> None:
    """C09: two collapses right after the learning rate went back up."""
    matrices = [EVEN] * 4 + [tilted(6, 3.0)] * 4
    rates = [1e-3, 8e-4, 5e-4, 2e-4, 1e-3, 8e-4, 5e-4, 2e-4]
    found = diagnosed(make_run, matrices, record=lambda r: {"lr": rates[r]})
    d = the(found, "after_restart")
    assert "the learning rate rose from 0.0005 to 0.001" in d.symptom
    assert any("mix" in c.cause for c in d.causes)
    assert any("compare" in line for line in d.look_at)


def test_overflow_with_its_timeline(make_run: Any) -> None:
    peaks = [1.2, 1.2, 1.2, 2.6, 2.4, 1.2, 1.2, 1.2]
    found = diagnosed(
        make_run,
        [np.stack([tilted(2, 1.4)[0], tilted(2, 1.0)[1]])] * 8,
        capacity_factor=1.25,
        record=lambda r: {"loss": 3.0 if peaks[r] > 2 else 2.0},
        extra=lambda r, layer: {
            "peak_E": np.array([1, 1, peaks[r], 1, 1, 1, 1, 1], np.float32),
            "dropped_E": np.array([0, 0, 9000 if peaks[r] > 2 else 0, 0, 0, 0, 0, 0]),
            "calls": 10,
        },
    )
    d = the(found, "overflow")
    assert set(d.gates) == {"capacity_use", "drop_rate"}
    assert "expert 2 2.6 fair shares at capacity 1.25" in d.symptom
    timeline = next(line for line in d.look_at if "timeline" in line)
    assert "steps 31-50 2.6 (loss 3.000)" in timeline
    assert any("1.35 to 1.5" in r for r in d.remedies)
    assert any("finer" in r for r in d.remedies)
    # p = .15 + b (.175 - .15) reaches 1.25/8 at b = 1/4: a share of 1/4 + 3/4 * 1/2
    assert "layer 0: an expert overflows once code exceeds 62% of the traffic" in found.notes


def test_drops_of_a_layer_seen_after_the_drop_are_part_of_the_demand(make_run: Any) -> None:
    """As the gate takes them; and where demand is not known there is no headroom to speak of."""
    found = diagnosed(
        make_run,
        [np.stack([tilted(2, 1.2)[0], tilted(2, 1.0)[1]])] * 8,
        capacity_factor=1.25,
        tags=["post_drop"],
        extra=lambda r, layer: {"dropped_E": np.full(8, 2500)},
    )
    assert the(found, "overflow").evidence["drop_rate"] == pytest.approx(0.2, rel=1e-4)
    assert "20.00% of the assignments" in the(found, "overflow").symptom
    assert not [n for n in found.notes if "overflows" in n]


def test_flattening(make_run: Any) -> None:
    """C41: picks [97, 1, 1, 1] at nearly even probabilities; the loss is 4 % above its floor."""
    counts = np.array([[97, 1, 1, 1]]) * 500
    prob = np.array([[0.26, 0.24667, 0.24667, 0.24666]], np.float32) * counts.sum()
    found = diagnosed(
        make_run, [counts] * 8, sources=["all text"],
        extra=lambda r, layer: {"prob_sum_SE": prob, "top1_S2": np.array([[13000.0, 3400.0]], np.float32)},
    )  # fmt: skip
    d = the(found, "flattening")
    assert "1.038" in d.symptom and "97.0%" in d.symptom
    assert any("dispatch" in r for r in d.remedies)
    assert any("balancing loss" in note for note in found.notes)


def test_semantic_cutting_of_the_headline_case(make_run: Any) -> None:
    counts = np.asarray(headline())
    with open_run(make_run(np.tile(counts, (8, 1, 1, 1)), 2, steps=10, sources=["code", "rest"])) as run:
        found = explain(run, "default", length=20)
    d = the(found, "cutting")
    assert d.status == "FAIL"
    assert "source code uses expert" in d.symptom and "2.33 times" in d.symptom
    assert "hot_expert" not in {x.pattern for x in found.diagnoses}
    assert any("specialised" in r for r in d.remedies)


def test_router_that_is_not_finite(make_run: Any) -> None:
    found = diagnosed(make_run, [EVEN] * 8, extra=lambda r, layer: {"invalid": 5 * (r == 6)})
    assert found.diagnoses[0].pattern == "invalid_ids"  # under it the rest means little
    assert "5 picks" in found.diagnoses[0].symptom


def test_counts_that_measure_no_router(make_run: Any) -> None:
    found = diagnosed(make_run, [EVEN * 100] * 24, length=10)
    assert [d.pattern for d in found.diagnoses][:2] == ["uniform_counts", "static_router"]


def test_drift_names_the_step_of_change(make_run: Any) -> None:
    loads = [1.1] * 60 + [1.1 + 0.004 * r for r in range(60)]
    rng = np.random.default_rng(0)
    matrices = [tilted(2, load) + rng.integers(-20, 20, (2, 8)) for load in loads]
    d = the(diagnosed(make_run, matrices, length=50, record=lambda r: {"lr": 1e-3}), "drift")
    assert "rose from step 6" in d.symptom
    data = next(c for c in d.causes if "data changed" in c.cause)
    assert data.supported is False  # it was the router


def test_swings_with_the_shard_cycle(make_run: Any) -> None:
    matrices = [tilted(2 if (r // 5) % 2 else 5, 1.35) for r in range(120)]
    meta = {"shard_cycle_steps": 100}
    d = the(diagnosed(make_run, matrices, length=200, meta=meta), "periodic")
    assert "every 100 steps" in d.symptom
    assert any("the shard cycle is 100 steps" in (c.evidence or "") for c in d.causes)
    assert "shuffle finer" in d.remedies


# -- why a limit is what it is


def test_a_good_model_that_classic_rejects(make_run: Any) -> None:
    """OLMoE-1B-7B, layer 15 too: `classic` fails it, `specialised` does not, and it is said why."""
    counts = np.array(next(c["counts"] for c in CASES if c["id"] == "C01-L0"))
    path = make_run(np.tile(counts, (6, 1, 1, 1)), 8, steps=10)
    with open_run(path) as run:
        found = explain(run, "classic", length=20)
        accepted = explain(run, "specialised", length=20)
    assert found.status == "FAIL"
    assert found.other_policies["specialised"] in ("PASS", "WARN")
    assert accepted.status in ("PASS", "WARN")
    text = render(found)
    assert "lir fails beyond 2 because classic says" in text and "N = 64" in text
    assert "specialise" in text and "calibrate" in text
    assert "specialised " + found.other_policies["specialised"] in text


def test_a_healthy_run_needs_no_explanation(make_run: Any) -> None:
    rng = np.random.default_rng(0)
    found = diagnosed(make_run, [EVEN + rng.integers(-50, 50, EVEN.shape) for _ in range(8)])
    assert (found.status, found.diagnoses) == ("PASS", [])
    assert "nothing to explain" in render(found)


# -- forms


def test_text_markdown_and_json_agree(make_run: Any) -> None:
    found = diagnosed(make_run, [tilted(3, 3.2)] * 8, sources=["co|de\x1b[31m", "prose"])
    content = json.loads(render(found, "json"))
    assert content["schema_version"] == 1
    first = content["diagnoses"][0]
    assert first["pattern"] == found.diagnoses[0].pattern
    assert isinstance(first["evidence"], Mapping)
    for format in ("text", "markdown"):
        shown = render(found, format)
        assert found.diagnoses[0].title in shown
        assert "\x1b" not in shown
        assert "{" not in shown  # every template is filled
    assert "co\\|de" in render(found, "markdown")
