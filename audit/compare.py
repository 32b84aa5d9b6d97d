"""`compare`: two runs, two ranges of one run, or a model before and after fine-tuning; layer by layer.

Shapes: S sources, E experts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from moe_audit import formulas as m
from moe_audit.attribution import Shift, attribute
from moe_audit.frame import LayerFrame, analyse
from moe_audit.printable import finite, printable
from moe_audit.run import Run
from moe_audit.thresholds import floors
from moe_audit.thresholds.errors import NoDataError, UsageError
from moe_audit.thresholds.gate_names import breaches
from moe_audit.thresholds.policy import Policy, load_policy
from moe_audit.verdict import Status
from moe_audit.windows import NO_WARMUP, warmup_steps

JUDGED = ("tv", "load_shift", "share_shift")
MOST_NAMED = 3
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Side:
    """One side of the comparison."""

    path: str
    first_step: int
    last_step: int
    tokens: float


@dataclass(frozen=True)
class Judgement:
    """A stability gate on the change, by the limits of the policy."""

    gate: str
    status: str
    value: float
    op: str
    warn: float | None
    fail: float | None
    floor: float


@dataclass(frozen=True)
class LayerChange:
    """What changed in one layer from A to B; shares are fractions of the assignments.

    Attributes:
        total, router, mix: 0.5 * sum abs of the change, of the router's part, of the data mix's part.
        largest_share: Largest change of an expert's share in the part that is judged.
        experts: Experts that moved most: expert, share in A, share in B.
        source_moved: The source that adds most to the router's part.
        by_source: Source -> total variation between its own distributions in A and B.
        metrics: Metric -> [A, B].
    """

    layer: int
    name: str
    status: str
    total: float
    router: float
    mix: float
    largest_share: float
    experts: list[dict[str, float]]
    source_moved: str | None
    by_source: dict[str, float]
    metrics: dict[str, list[float | None]]
    judgements: list[Judgement]


@dataclass
class Comparison:
    """The whole comparison; `exit_code` 0, 1 where a gate fails, 3 where noise drowns every layer."""

    a: Side
    b: Side
    policy: str
    effect: str
    status: str
    exit_code: int
    sources: list[str]
    layers: list[LayerChange] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(
    run_a: Run,
    run_b: Run,
    policy: Policy | str | None = "default",
    *,
    steps_a: tuple[int, int] | None = None,
    steps_b: tuple[int, int] | None = None,
) -> Comparison:
    """How routing differs between A and B, and whether the policy's stability limits accept that.

    Counts are summed over each side; sources are matched by name. The change is split exactly into what the
    router did and what the data mix did, and the policy's `effect` says which part is judged.

    Args:
        run_a, run_b: Open runs, maybe the same.
        policy: Its limits of tv, load_shift and share_shift are used.
        steps_a, steps_b: First and last step of each side.

    Raises:
        UsageError: the runs have no layer of the same number of experts in common, or no source.
        NoDataError: a side has no record.
    """
    loaded = policy if isinstance(policy, Policy) else load_policy(policy)
    common = sorted({i.layer for i in run_a.layers} & {i.layer for i in run_b.layers})
    if not common:
        raise UsageError(
            f"{run_a.path} and {run_b.path} have no layer in common", "compare runs of one model"
        )
    for layer in common:
        experts = [run.layer_info(layer).num_experts for run in (run_a, run_b)]
        if experts[0] != experts[1]:
            raise UsageError(
                f"layer {layer} has {experts[0]} experts in A and {experts[1]} in B",
                "only layers of the same number of experts can be compared",
            )
    sources = [name for name in run_a.sources if name in run_b.sources]
    if not sources:
        raise UsageError(
            f"{run_a.path} and {run_b.path} have no source in common",
            f"A has {', '.join(run_a.sources)}; B has {', '.join(run_b.sources)}",
        )
    notes = [
        f"{side} alone has {kind} {', '.join(extra)}: left out"
        for side, one, other in (("A", run_a, run_b), ("B", run_b, run_a))
        for kind, extra in (
            ("source", [s for s in one.sources if s not in other.sources]),
            ("layer", [str(i.layer) for i in one.layers if i.layer not in common]),
        )
        if extra
    ]
    sides = [_frames(run, steps, common, sources) for run, steps in ((run_a, steps_a), (run_b, steps_b))]
    infos = [_side(run, frames) for run, frames in zip((run_a, run_b), sides)]
    layers = [_layer(a, b, sources, loaded, len(common)) for a, b in zip(*sides)]
    layers.sort(key=lambda change: change.layer)
    judged = [j.status for layer in layers for j in layer.judgements]
    status = _overall(judged)
    if not judged:
        notes.append(f"policy {loaded.name} sets no limit on {', '.join(JUDGED)}: nothing is judged")
    code = {"FAIL": 1, "INSUFFICIENT": 3}.get(status, 0)
    return Comparison(infos[0], infos[1], loaded.name, loaded.effect, status, code, sources, layers, notes)


def _frames(
    run: Run, steps: tuple[int, int] | None, layers: Sequence[int], sources: Sequence[str]
) -> list[LayerFrame]:
    """All records of a side as one window, layer by layer."""
    warmup = warmup_steps(run.meta)
    first, last = steps or (warmup + 1, None)
    records = [r for r in run.records if r.first_step >= first and (last is None or r.last_step <= last)]
    if not records:
        span = f" after the warm-up of {warmup} steps" if warmup != NO_WARMUP else ""
        span = f" within steps {first}-{last}" if last is not None else span
        raise NoDataError(f"{run.path} has no record{span}", "no data is never a pass")
    length = records[-1].last_step - records[0].first_step + 1
    analysis = analyse(
        run,
        length=length,
        stride=length,
        first_step=records[0].first_step,
        last_step=records[-1].last_step,
        layers=layers,
        sources=sources,
    )
    return list(analysis.frames())


def _side(run: Run, frames: Sequence[LayerFrame]) -> Side:
    windows = frames[0].windows
    return Side(
        str(run.path),
        int(windows.first_step_W[-1]),
        int(windows.last_step_W[-1]),
        float(frames[0].tokens_W()[-1]),
    )


def _layer(
    a: LayerFrame, b: LayerFrame, sources: Sequence[str], policy: Policy, num_layers: int
) -> LayerChange:
    before, after = a.counts_WSE[-1], b.counts_WSE[-1]
    shift = attribute(before, after)
    part_E = shift.router_E if policy.effect == "router" else shift.router_E + shift.mix_E
    p, q = m.shares(before.sum(0)), m.shares(after.sum(0))
    order = np.argsort(-np.abs(np.nan_to_num(part_E)))[:MOST_NAMED]
    tv_S = m.total_variation(m.shares(before), m.shares(after))
    judgements = _judge(a, b, part_E, policy, num_layers)
    return LayerChange(
        a.info.layer,
        a.info.name,
        _overall([j.status for j in judgements]),
        shift.total,
        shift.router,
        shift.mix,
        float(np.abs(part_E).max()),
        [{"expert": int(e), "a": float(p[e]), "b": float(q[e])} for e in order],
        _moved_source(shift, sources),
        {name: float(tv) for name, tv in zip(sources, tv_S) if not math.isnan(tv)},
        {name: [_finite(x), _finite(y)] for name, (x, y) in _metrics(a, b).items()},
        judgements,
    )


def _metrics(a: LayerFrame, b: LayerFrame) -> dict[str, tuple[float, float]]:
    """Metrics of both sides; those of association need two sources."""
    out: dict[str, tuple[float, float]] = {}
    for name, function in (("max_load", m.max_load), ("min_load", m.min_load), ("cv", m.cv)):
        out[name] = (float(function(a.n_WE[-1])), float(function(b.n_WE[-1])))
    if len(a.sources) > 1:
        for name, tied in (("cramers_v", m.cramers_v), ("association_rel", m.association_rel)):
            out[name] = tuple(  # type: ignore[assignment]
                float(tied(f.counts_WSE[-1], f.k, float(f.phi1_W[-1]))) for f in (a, b)
            )
    return out


def _judge(a: LayerFrame, b: LayerFrame, part_E: Floats, policy: Policy, num_layers: int) -> list[Judgement]:
    """The stability gates on the change, against the sampling floor of two windows of these sizes."""
    values = {
        "tv": 0.5 * float(np.abs(part_E).sum()),
        "load_shift": a.N * float(np.abs(part_E).max()),
        "share_shift": float(np.abs(part_E).max()),
    }
    phi = max(float(a.phi1_W[-1]), float(b.phi1_W[-1]))
    z = floors.looks_z(policy.alpha, a.N * num_layers)
    tv_floor, load_floor = (
        float(x) for x in floors.shift_floor(a.N, a.k, float(a.m_W[-1]), float(b.m_W[-1]), phi, z)
    )
    noise = {"tv": tv_floor, "load_shift": load_floor, "share_shift": load_floor / a.N}
    out = []
    for gate in JUDGED:
        limit = policy.limit(gate, num_experts=a.N, top_k=a.info.top_k, layer=a.info.layer)
        if limit is None or math.isnan(values[gate]):
            continue
        status = Status.PASS
        for level, worse in ((limit.warn, Status.WARN), (limit.fail, Status.FAIL)):
            if level is not None and breaches(limit.op, values[gate], level):
                lost = policy.noise_aware and breaches(limit.op, noise[gate], level)
                status = Status.INSUFFICIENT if lost else worse
        out.append(Judgement(gate, status.name, values[gate], limit.op, limit.warn, limit.fail, noise[gate]))
    return out


def _overall(statuses: Sequence[str]) -> str:
    """FAIL, then WARN, then PASS; INSUFFICIENT only where nothing was decided."""
    for status in (Status.FAIL, Status.WARN, Status.PASS):
        if status.name in statuses:
            return status.name
    return Status.INSUFFICIENT.name


def _moved_source(shift: Shift, sources: Sequence[str]) -> str | None:
    return sources[shift.sources[0]] if len(sources) > 1 and shift.by_source_S.any() else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def render(result: Comparison, format: str = "text") -> str:
    """A comparison as text, Markdown or JSON."""
    if format == "json":
        return json.dumps({"schema_version": 1, **finite(asdict(result))}, indent=1) + "\n"
    a, b = result.a, result.b
    what = "the router's part is judged" if result.effect == "router" else "the whole change is judged"
    lines = [
        f"{result.status} under policy {result.policy} ({what})",
        f"A {printable(a.path)} steps {a.first_step}-{a.last_step}, {a.tokens:,.0f} tokens",
        f"B {printable(b.path)} steps {b.first_step}-{b.last_step}, {b.tokens:,.0f} tokens",
    ]
    header = ["layer", "status", "tv", "router", "mix", "largest", "experts that moved most", "source", "V"]
    rows = [header]
    for layer in result.layers:
        moved = ", ".join(f"{e['expert']:.0f} {e['a']:.1%} -> {e['b']:.1%}" for e in layer.experts)
        v = layer.metrics.get("cramers_v")
        rows.append([
            str(layer.layer), layer.status, f"{layer.total:.3f}", f"{layer.router:.3f}", f"{layer.mix:.3f}",
            f"{layer.largest_share:.2%}", moved, printable(layer.source_moved or "-"),
            "-" if v is None or None in v else f"{v[0]:.2f} -> {v[1]:.2f}",
        ])  # fmt: skip
    if format == "markdown":
        lines = [f"# {lines[0]}", "", *(f"- {line}" for line in lines[1:]), ""]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        lines.insert(len(lines) - len(rows) + 1, "|" + " --- |" * len(header))
    else:
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines += ["", *("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)]
        lines += ["", "tv = 0.5*sum abs(dp); V = Cramer's V of source and expert, A -> B"]
    lines += [f"note: {printable(note)}" for note in result.notes]
    return "\n".join(lines) + "\n"
