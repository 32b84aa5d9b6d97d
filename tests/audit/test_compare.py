"""`compare` and `calibrate`: two sides that differ in one known way, references that match or do not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moe_audit
from moe_audit.compare import compare, render
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.reference import calibrate
from moe_audit.run import Run, open_run
from moe_audit.store import Store
from moe_audit.thresholds.errors import NoDataError, UsageError
from moe_audit.thresholds.policy import load_policy

EVEN = np.full((2, 8), 5000)
SOURCES = ["code", "prose"]


def opened(make_run: Any, matrix: Any, records: int = 6, **options: Any) -> Run:
    options = {"sources": SOURCES, "steps": 10} | options
    return open_run(make_run(np.tile(matrix, (records, 2, 1, 1)), options.pop("top_k", 2), **options))


def moved(source: int, share: float, start: int = 0, to: int = 7) -> np.ndarray:
    """Some of the picks of one source go from one expert to another."""
    out = EVEN.copy()
    out[source, start] -= int(share * 40000)
    out[source, to] += int(share * 40000)
    return out


def test_what_the_router_moved(make_run: Any) -> None:
    with opened(make_run, EVEN) as a, opened(make_run, moved(0, 0.1)) as b:
        result = compare(a, b, "default")
    layer = result.layers[1]
    assert (layer.total, layer.router, layer.mix) == (pytest.approx(0.05), pytest.approx(0.05), 0)
    assert {e["expert"] for e in layer.experts[:2]} == {0, 7}
    assert layer.source_moved == "code"
    assert layer.by_source == {"code": pytest.approx(0.1), "prose": 0}
    assert (result.status, result.exit_code) == ("PASS", 0)
    before, after = layer.metrics["cramers_v"]
    assert before == 0
    assert after is not None and after > 0.1


def test_limits_decide(make_run: Any) -> None:
    with opened(make_run, EVEN) as a, opened(make_run, moved(0, 0.125) + moved(1, 0.125) - EVEN) as b:
        result = compare(a, b, "default")
        total = compare(a, b, "classic")
    assert (result.status, result.exit_code) == (
        "WARN",
        0,
    )  # tv .125 beyond .1; load_shift 1.0 is not above 1
    assert {j.gate: j.status for j in result.layers[0].judgements} == {"tv": "WARN", "load_shift": "WARN"}
    assert (total.status, total.exit_code) == ("FAIL", 1)  # share_shift 12.5 points


def test_another_mix_is_not_the_router(make_run: Any) -> None:
    skewed = moved(0, 0.12, 0, 7)
    with opened(make_run, skewed) as a, opened(make_run, skewed * [[3], [1]]) as b:
        result = compare(a, b, "default")
    assert result.layers[0].router == pytest.approx(0, abs=1e-12)
    assert result.layers[0].mix > 0.02
    assert result.status == "PASS"


def test_ranges_of_one_run(make_run: Any) -> None:
    counts = np.concatenate([np.tile(EVEN, (4, 2, 1, 1)), np.tile(moved(1, 0.12), (4, 2, 1, 1))])
    with open_run(make_run(counts, 2, steps=10, sources=SOURCES)) as run:
        result = compare(run, run, "default", steps_a=(1, 40), steps_b=(41, 80))
        assert (result.a.last_step, result.b.first_step) == (40, 41)
        assert result.layers[0].source_moved == "prose"
        same = compare(run, run, "default")
        assert {layer.total for layer in same.layers} == {0.0}
        with pytest.raises(NoDataError):
            compare(run, run, steps_b=(500, 600))


def test_a_side_without_counts_is_no_number_in_json(make_run: Any) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    with opened(make_run, EVEN) as a, opened(make_run, EVEN * 0) as b:
        result = compare(a, b)
    data = json.loads(render(result, "json"), parse_constant=refuse)
    assert (data["status"], data["exit_code"], data["layers"][0]["router"]) == ("INSUFFICIENT", 3, None)


def test_noise_is_no_change(make_run: Any) -> None:
    rng = np.random.default_rng(0)
    a_counts, b_counts = (rng.multinomial(60, np.full(8, 1 / 8), size=2) for _ in range(2))
    with opened(make_run, a_counts, 1) as a, opened(make_run, b_counts, 1) as b:
        result = compare(a, b, "default")
    assert (result.status, result.exit_code) == ("INSUFFICIENT", 3) or result.status == "PASS"
    assert all(j.floor > 0.1 for layer in result.layers for j in layer.judgements if j.gate == "tv")


def test_sides_that_cannot_be_compared(make_run: Any) -> None:
    with opened(make_run, EVEN) as a:
        with opened(make_run, np.full((2, 4), 10)) as b, pytest.raises(UsageError, match="8 experts in A"):
            compare(a, b)
        with opened(make_run, EVEN, sources=["x", "y"]) as b, pytest.raises(UsageError, match="no source"):
            compare(a, b)
    with opened(make_run, EVEN) as a, opened(make_run, EVEN, sources=["code", "new"]) as b:
        notes = compare(a, b).notes
        assert notes == ["A alone has source prose: left out", "B alone has source new: left out"]


def test_forms_of_a_comparison(make_run: Any) -> None:
    with opened(make_run, EVEN) as a, opened(make_run, moved(0, 0.1)) as b:
        result = compare(a, b)
    assert json.loads(render(result, "json"))["layers"][0]["router"] == pytest.approx(0.05)
    assert "experts that moved most" in render(result)
    lines = render(result, "markdown").splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


# -- calibrate


def noisy(make_run: Any, seed: int, records: int = 40, **options: Any) -> Run:
    rng = np.random.default_rng(seed)
    share = np.array([1.3, 1.1, 1.0, 1.0, 1.0, 1.0, 0.9, 0.7]) / 8
    counts = rng.multinomial(40000, share, size=(records, 2, 2))
    options = {"sources": SOURCES, "steps": 10} | options
    return open_run(make_run(counts, options.pop("top_k", 2), **options))


def test_limits_from_healthy_runs(make_run: Any, tmp_path: Path) -> None:
    with noisy(make_run, 1) as a, noisy(make_run, 2) as b:
        result = calibrate([a, b], alpha=0.05, length=10)
    fail = {g.gate: g.fail.value for g in result.gates if g.fail}
    assert 1.3 < fail["max_load"] < 1.35
    assert 0.65 < fail["min_load"] < 0.7
    assert result.provenance.disjoint_windows == 80
    assert result.provenance.calibrated
    file = tmp_path / "mine.toml"
    file.write_text(result.toml)
    policy = load_policy(file)
    assert policy.limit("max_load", num_experts=8, top_k=2).fail == fail["max_load"]  # type: ignore[union-attr]
    assert (policy.length, policy.provenance.num_experts) == (10, 8)  # type: ignore[union-attr]
    assert policy.provenance.source_mix == pytest.approx({"code": 0.5, "prose": 0.5})  # type: ignore[union-attr]
    assert policy.mismatches(8, 2) == []
    assert len(policy.mismatches(16, 4)) == 2
    told = policy.mismatches(8, 2, source_mix={"code": 0.9, "prose": 0.1}, microbatch_tokens=None)
    assert "another source mix" in told[0]
    with noisy(make_run, 3) as other:
        verdict = moe_audit.check(other, policy, stride=10, all_cells=True)
    over = [c for c in verdict.cells if c.gate == "max_load" and c.status.name == "FAIL"]
    assert len(over) <= 8  # 5 % of 80 cells are to be expected
    assert verdict.status == "FAIL"
    (told,) = [p["message"] for p in verdict.problems if p["kind"] == "policy"]
    gates = {g.gate for g in verdict.gates if g.fail is not None} - {"invalid_ids"}
    assert f"{0.05 * 40 * len(gates):.3g} of {40 * len(gates)} ({len(gates)} gates x 40 windows)" in told
    beyond = {(c.gate, c.first_step) for c in verdict.cells if c.status == "FAIL"}
    assert told.startswith(f"{len(beyond)} lie beyond") and len(beyond) < 0.1 * 40 * len(gates)


def test_calibration_says_what_alpha_means_for_a_whole_run(make_run: Any) -> None:
    """Per gate and window: with few windows, and with as many as it asks for."""
    with noisy(make_run, 1) as run:
        lines = " ".join(calibrate([run], alpha=0.05, length=10).lines)
        gates = sum(g.fail is not None for g in calibrate([run], alpha=0.05, length=10).gates)
    assert f"about {0.05 * gates * 40:.3g} of {gates * 40} ({gates} gates x 40 windows)" in lines
    each = 1 - (1 - 0.05) ** (1 / (gates * 40))
    assert f"--alpha {each:.2g} and {math.ceil(1 / each - 1)} disjoint reference windows" in lines


def test_too_few_windows_say_what_they_are_worth(make_run: Any) -> None:
    with noisy(make_run, 1, records=9) as run:
        result = calibrate([run], alpha=0.05, length=10)
    assert not result.provenance.calibrated
    assert result.provenance.attainable_alpha == pytest.approx(
        1 / 9, abs=1e-3
    )  # 8 windows have an earlier one
    assert "smallest attainable alpha = 1/9" in " ".join(result.lines)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"top_k": 4}, "top_k 4"), ({"capacity_factor": 1.25}, "capacity_factor 1.25"),
     ({"sources": ["code", "web"]}, "source mix")],
)  # fmt: skip
def test_references_must_match(make_run: Any, options: dict[str, Any], named: str) -> None:
    with noisy(make_run, 1) as a, noisy(make_run, 2, **options) as b:
        with pytest.raises(UsageError, match=named):
            calibrate([a, b], length=10)
        assert any(
            named in note for note in calibrate([a, b], length=10, allow_mismatch=True).provenance.notes
        )


def test_a_reference_that_fails_is_told(make_run: Any) -> None:
    hot = np.tile([19000] + [3000] * 7, (2, 1))
    with opened(make_run, hot, records=12) as run:
        notes = calibrate([run], length=10).provenance.notes
    assert any("is it healthy?" in note for note in notes)


def test_a_calibrated_policy_tells_where_it_does_not_fit(make_run: Any, tmp_path: Path) -> None:
    with noisy(make_run, 1) as run:
        (tmp_path / "mine.toml").write_text(calibrate([run], length=10).toml)
    with noisy(make_run, 2, top_k=4, sources=["code", "web"]) as other:
        problems = [p["message"] for p in moe_audit.check(other, tmp_path / "mine.toml").problems]
    assert any("top_k = 2, the run has 4" in p for p in problems)
    assert any("another source mix" in p for p in problems)


def test_a_reference_of_unlike_layers_is_calibrated_one_kind_at_a_time(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "routing.db", [LayerInfo(i, f"b{i}", n, 1) for i, n in enumerate((8, 4))])
    store.begin_attempt(1)
    rng = np.random.default_rng(0)
    for r in range(30):
        rows = {i: LayerRecord(rng.multinomial(5000, np.full(n, 1 / n))[None]) for i, n in enumerate((8, 4))}
        store.append(Record("train", r + 1, r + 1, rows))
    store.close()
    with open_run(tmp_path) as run:
        with pytest.raises(UsageError, match="--layer"):
            calibrate([run], length=1)
        made = calibrate([run], length=1, layers=[1])
        worst = sorted(moe_audit.metrics(run, length=1, layers=[1]).query("source == 'all'").max_load)
    assert made.provenance.num_experts == 4
    fail = next(g.fail for g in made.gates if g.gate == "max_load")
    assert fail is not None and fail.value == pytest.approx(worst[math.ceil(31 * 0.95) - 1])
