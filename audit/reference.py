"""`calibrate`: the values that healthy runs show, gate by gate, made into a policy.

Shapes: W windows, S sources.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moe_audit.checking import check
from moe_audit.column import Column, Looks
from moe_audit.frame import Analysis, analyse
from moe_audit.gates import column
from moe_audit.record import now
from moe_audit.run import Run
from moe_audit.thresholds.calibrate import (
    NOT_CALIBRATED,
    CalibratedGate,
    attainable_alpha,
    calibrate_gate,
    expected_breaches,
    policy_toml,
    run_alpha,
)
from moe_audit.thresholds.errors import NoDataError, StoreError, UsageError
from moe_audit.thresholds.gate_names import GATES
from moe_audit.thresholds.policy import PRESETS, Policy, load_policy
from moe_audit.thresholds.policy_file import SAME_MIX, Provenance, mix_distance, same_batches
from moe_audit.verdict import Status

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """What a reference and a run judged by it must have in common."""

    num_experts: int
    top_k: int | None
    capacity_factor: float | None
    source_mix: dict[str, float]
    microbatch_tokens: float | None


@dataclass(frozen=True)
class Calibration:
    """The calibrated limits, the policy file as text, and what to tell the user."""

    toml: str
    gates: list[CalibratedGate]
    provenance: Provenance
    lines: list[str]


def calibrate(
    runs: Sequence[Run],
    *,
    base: str = "default",
    alpha: float = 0.05,
    length: int | None = None,
    layers: Sequence[int] | None = None,
    allow_mismatch: bool = False,
    name: str = "calibrated",
    folder: Path | None = None,
) -> Calibration:
    """Takes the limits of the gates of `base` from healthy runs.

    Each disjoint window gives one value a gate: that of its worst layer (and source), so that one limit holds
    for all layers at once.

    Args:
        runs: Open reference runs.
        base: Policy whose gates are calibrated; what it has beyond limits stays.
        alpha: Probability with which a healthy window may breach a fail limit.
        length: Window length in steps; None: as `check` would choose for the first run.
        layers: Only these, of every run; all by default.
        allow_mismatch: Take runs that differ in experts, top-k, capacity, micro-batch or source mix.
        name: Name of the new policy.
        folder: Where the policy file will lie, so that it finds `base`.

    Raises:
        UsageError: runs that differ, or a bad alpha.
        NoDataError: no window.
        StoreError: a run is invalid.
    """
    policy = load_policy(base)
    notes: list[str] = []
    analyses: list[Analysis] = []
    for run in runs:
        verdict = check(run, policy, length, layers=layers)
        if verdict.status == Status.INVALID:
            raise StoreError(f"{run.path} is no reference: it is INVALID", verdict.problems[0]["message"])
        failing = [g.gate for g in verdict.gates if g.status == Status.FAIL]
        if failing:
            notes.append(f"{run.path} fails {', '.join(failing)} under {policy.name}: is it healthy?")
        analysis = analyse(run, policy=policy, length=length, layers=layers)
        length = length or analysis.windows.layout.length
        analyses.append(analysis)
    stride = analyses[0].windows.layout.stride
    settings = [_setting(analysis) for analysis in analyses]
    notes += _differences(runs, settings, allow_mismatch)
    values = _values(analyses, policy)
    gates = []
    for gate, series in values.items():
        rule = policy.rule(gate)
        fails = rule is not None and rule.fail is not None
        gates.append(calibrate_gate(gate, series, alpha, fails=fails))
    if not gates:
        raise NoDataError("no gate has a value in these runs", f"policy {policy.name} gates nothing here")
    disjoint = sum(int(analysis.windows.disjoint_W.sum()) for analysis in analyses)
    fewest = min((g.fail or g.warn).windows for g in gates)
    attainable = attainable_alpha(fewest)
    if attainable > alpha:
        need = math.ceil(1 / alpha - 1)
        notes.append(
            f"uncalibrated: {fewest} disjoint windows, where alpha {alpha:g} needs {need};"
            f" smallest attainable alpha = 1/{fewest + 1} = {attainable:.3g}"
        )
    if with_fail := sum(gate.fail is not None for gate in gates):
        notes += _what_alpha_means(alpha, with_fail, int(analyses[0].windows.disjoint_W.sum()), attainable)
    first = settings[0]
    provenance = Provenance(
        references=[str(run.meta.get("run_id") or run.path) for run in runs],
        created=now(),
        method="split conformal over disjoint windows, worst layer and source of each",
        num_experts=first.num_experts,
        top_k=first.top_k,
        capacity_factor=first.capacity_factor,
        source_mix={name: round(share, 4) for name, share in first.source_mix.items()},
        microbatch_tokens=first.microbatch_tokens,
        disjoint_windows=disjoint,
        alpha=alpha,
        attainable_alpha=round(attainable, 6),
        calibrated=attainable <= alpha + 1e-9,
        notes=notes,
    )
    assert length is not None  # the first analysis has set it
    extends = base if base in PRESETS else os.path.relpath(base, folder or Path.cwd())
    toml = policy_toml(name, extends, gates, length, stride, provenance)
    return Calibration(toml, gates, provenance, [*(_line(g) for g in gates), *(f"note: {n}" for n in notes)])


def _what_alpha_means(alpha: float, gates: int, windows: int, attainable: float) -> list[str]:
    """alpha is per gate and window, so that a long healthy run fails somewhere, the reference too."""
    each = run_alpha(alpha, gates, windows)
    need = math.ceil(1 / each - 1)
    return [
        f"alpha {alpha:g} is meant per gate and window: of a healthy run as long as the first reference,"
        f" {expected_breaches(max(alpha, attainable), gates, windows)} lie beyond a fail limit",
        f"for at most {alpha:g} of such runs to fail anywhere, take --alpha {each:.2g} and {need} disjoint"
        f" reference windows; with fewer the worst of them is the limit, worth {attainable:.2g}",
    ]


def _values(analyses: Sequence[Analysis], policy: Policy) -> dict[str, list[float]]:
    """Gate -> the worst value over layers and sources in each disjoint window of all runs."""
    wanted = [gate for gate in policy.gates if gate not in NOT_CALIBRATED]
    out: dict[str, list[float]] = {}
    for analysis in analyses:
        disjoint = np.flatnonzero(analysis.windows.disjoint_W)
        layers, sources = len(analysis.layers), len(analysis.sources)
        looks = Looks(policy.alpha, max(len(disjoint), 1), layers, sources, policy.effect)
        worst: dict[str, Floats] = {}
        for frame in analysis.frames():
            for gate in wanted:
                places = range(len(frame.sources)) if GATES[gate].per_source else [None]
                for source in places:
                    result = column(gate, frame, looks, source)
                    if not isinstance(result, Column):
                        continue
                    pick = np.fmax if GATES[gate].op == ">" else np.fmin
                    value = np.asarray(result.value_W[disjoint], np.float64)
                    worst[gate] = pick(worst[gate], value) if gate in worst else value
        for gate, series in worst.items():
            known = [float(v) for v in series if not math.isnan(v)]
            if known:
                out.setdefault(gate, []).extend(known)
    return {gate: out[gate] for gate in wanted if gate in out}


def _setting(analysis: Analysis) -> Setting:
    infos = analysis.layers
    shapes = {(i.num_experts, i.top_k, i.capacity_factor) for i in infos}
    if len(shapes) > 1:
        raise UsageError(
            f"the layers of {analysis.run.path} differ in experts, top-k or capacity",
            "calibrate one kind of layer at a time, with --layer",
        )
    frame = next(iter(analysis.frames()))
    shape = next(iter(shapes))
    return Setting(*shape, frame.source_mix, analysis.microbatch_tokens)


def _differences(runs: Sequence[Run], settings: Sequence[Setting], allowed: bool) -> list[str]:
    """What sets a reference apart from the first one.

    Raises:
        UsageError: something does, and it is not allowed.
    """
    first, found = settings[0], []
    for run, each in zip(runs[1:], settings[1:]):
        for field in ("num_experts", "top_k", "capacity_factor"):
            a, b = getattr(first, field), getattr(each, field)
            if a != b:
                found.append(f"{run.path} has {field} {b}, {runs[0].path} has {a}")
        tv = mix_distance(first.source_mix, each.source_mix)
        if tv > SAME_MIX:
            found.append(f"the source mix of {run.path} differs from {runs[0].path} by {tv:.2f} (tv)")
        a_tokens, b_tokens = first.microbatch_tokens, each.microbatch_tokens
        if not same_batches(a_tokens, b_tokens):
            found.append(
                f"{run.path} has {b_tokens:.0f} tokens a micro-batch, {runs[0].path} has {a_tokens:.0f}"
            )
    if found and not allowed:
        raise UsageError(found[0], "references must match; --allow-mismatch takes them all the same")
    return found


def _line(gate: CalibratedGate) -> str:
    op = GATES[gate.gate].op
    limit = gate.fail or gate.warn
    what = f"fail {gate.fail.value:.4g}, " if gate.fail else ""
    what += f"warn {gate.warn.value:.4g}"
    label = "" if limit.calibrated else " (uncalibrated)"
    return f"{gate.gate} {op} {what} from {limit.windows} windows{label}"
