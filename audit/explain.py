"""`explain`: why a run fails, with the evidence of this run filled in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from string import Formatter
from typing import Any

import numpy as np

from moe_audit.checking import check
from moe_audit.diagnosis import BY_KEY, OF_GATE, Pattern
from moe_audit.evidence import gather, headroom_text
from moe_audit.frame import Analysis, LayerFrame, analyse
from moe_audit.printable import finite, markdown, printable
from moe_audit.run import Run
from moe_audit.thresholds.gate_names import GATES
from moe_audit.thresholds.policy import PRESETS, Policy, load_policy
from moe_audit.verdict import Cell, Status, Verdict

SHAPE_GATES = ("lir", "cv", "norm_entropy")  # a hot expert and starved ones both breach them
MOST_HEADROOMS = 3
SAME_ENTROPY = 0.05  # a source whose entropy is as low as the pool's is not cut off from it


@dataclass(frozen=True)
class LikelyCause:
    """A cause with its evidence; `supported`: True for, False against, None: the store does not tell."""

    cause: str
    evidence: str | None
    supported: bool | None


@dataclass(frozen=True)
class Diagnosis:
    """One pattern in one run: the window where it is worst, the step since when it shows, and what to do."""

    pattern: str
    title: str
    status: str
    gates: list[str]
    layer: int
    layer_name: str
    also_layers: list[int]
    first_step: int
    last_step: int
    since: int
    source: str
    symptom: str
    breaches: list[str]
    causes: list[LikelyCause]
    look_at: list[str]
    remedies: list[str]
    evidence: dict[str, Any]


@dataclass
class Explanation:
    """All diagnoses of a run, the worst first, and what else is worth knowing."""

    path: str
    policy: str
    status: str
    diagnoses: list[Diagnosis] = field(default_factory=list)
    other_policies: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def explain(run: Run, policy: Policy | str | None = "default", **scope: Any) -> Explanation:
    """Why `run` fails or warns under `policy`.

    Args:
        run: An open run.
        policy: As for `check`.
        scope: length, stride, checkpoint, first_step, last_step, last, layers, sources as in `check`.

    Raises:
        UsageError, NoDataError, StoreError: as `check` does.
    """
    loaded = policy if isinstance(policy, Policy) else load_policy(policy)
    verdict = check(run, loaded, **scope)
    out = Explanation(str(run.path), loaded.name, verdict.status.name)
    bad = [c for c in verdict.cells if c.status in (Status.WARN, Status.FAIL)]
    groups: dict[tuple[str, int], list[Cell]] = {}
    analysis = analyse(run, policy=loaded, judged_only=True, **scope)
    by_layer = {layer: [c for c in bad if c.layer == layer] for layer in {c.layer for c in bad}}
    facts: dict[tuple[str, int], dict[str, Any]] = {}
    for frame in analysis.frames():
        cells = by_layer.get(frame.info.layer, [])
        for key, members in _group(cells, analysis, frame):
            worst = max(members, key=_badness)
            groups[key, frame.info.layer] = members
            facts[key, frame.info.layer] = gather(analysis, frame, _window(frame, worst))
        note = headroom_text(frame, len(frame.windows) - 1)
        if note and len(out.notes) < MOST_HEADROOMS:
            out.notes.append(f"layer {frame.info.layer}: {note}")
    out.diagnoses = _diagnoses(groups, facts, verdict)
    out.notes += [p["message"] for p in verdict.problems if p["kind"] in ("mix_shift", "balancing_loss")]
    if verdict.error:
        out.notes.append(verdict.error["message"])
    if bad and loaded.name in PRESETS:
        others = [name for name in PRESETS if name != loaded.name]
        out.other_policies = {name: check(run, load_policy(name), **scope).status.name for name in others}
        out.notes += _policy_notes(loaded, verdict, out.other_policies)
    return out


def _group(cells: Iterable[Cell], analysis: Analysis, frame: LayerFrame) -> Iterator[tuple[str, list[Cell]]]:
    """Cells of one layer by pattern."""
    found: dict[str, list[Cell]] = {}
    known: dict[int, dict[str, Any]] = {}
    for cell in cells:
        key = OF_GATE[cell.gate].key
        w = _window(frame, cell)
        facts = known[w] if w in known else known.setdefault(w, gather(analysis, frame, w))
        pooled = cell.gate == "source_entropy" and facts.get("entropy_gap", 0.0) < SAME_ENTROPY
        if cell.gate in SHAPE_GATES or pooled:
            hot = facts.get("load", 1.0) - 1 >= 1 - facts.get("least_load", 1.0)
            key = "hot_expert" if hot else "starved_experts"
        elif key == "swinging" and "restart" in facts:
            key = "after_restart"
        found.setdefault(key, []).append(cell)
    yield from found.items()


def _diagnoses(
    groups: Mapping[tuple[str, int], list[Cell]],
    facts: Mapping[tuple[str, int], dict[str, Any]],
    verdict: Verdict,
) -> list[Diagnosis]:
    """One diagnosis a pattern, at the layer where it is worst."""
    ops = {g.gate: g.op for g in verdict.gates}
    out: list[Diagnosis] = []
    for key in dict.fromkeys(key for key, _ in groups):
        layers = [layer for k, layer in groups if k == key]
        worst_of = {layer: max(groups[key, layer], key=_badness) for layer in layers}
        layer = max(layers, key=lambda x: _badness(worst_of[x]))
        cell, known = worst_of[layer], dict(facts[key, layer])
        known["since"] = min(c.first_step for c in groups[key, layer])
        if cell.value_reason:
            known["note"] = cell.value_reason
        pattern = BY_KEY[key]
        members = [c for x in layers for c in groups[key, x]]
        gates = list(dict.fromkeys(c.gate for c in sorted(members, key=_badness, reverse=True)))
        breaches = []
        for gate in gates:
            worst = max((c for c in members if c.gate == gate), key=_badness)
            breaches.append(_breach(worst, ops.get(gate, GATES[gate].op)))
        diagnosis = Diagnosis(
            key,
            pattern.title,
            cell.status.name,
            gates,
            layer,
            cell.layer_name,
            sorted(set(layers) - {layer}),
            cell.first_step,
            cell.last_step,
            known["since"],
            cell.source,
            _first_filled(pattern.symptom, known) or pattern.title,
            breaches,
            _causes(pattern, known),
            _filled(pattern.look_at, known),
            _filled(pattern.remedies, known),
            known,
        )
        out.append(diagnosis)
    order = list(BY_KEY)
    return sorted(out, key=lambda d: (d.status != Status.FAIL.name, order.index(d.pattern)))


def _causes(pattern: Pattern, facts: Mapping[str, Any]) -> list[LikelyCause]:
    """In the order of the pattern, but what the evidence supports first and what it contradicts last."""
    rank = {True: 0, None: 1, False: 2}
    held = [(cause, cause.holds(facts)) for cause in pattern.causes]
    held.sort(key=lambda item: rank[item[1]])
    return [LikelyCause(c.text, _first_filled(c.evidence, facts), holds) for c, holds in held]


def _policy_notes(policy: Policy, verdict: Verdict, others: Mapping[str, str]) -> list[str]:
    """Why a limit is what it is, and what other presets make of the run."""
    notes = []
    failing = [g.gate for g in verdict.gates if g.status == Status.FAIL]
    run = verdict.run
    for gate in failing:
        rule = policy.rule(gate)
        result = next(g for g in verdict.gates if g.gate == gate)
        if rule is not None and isinstance(rule.fail, str) and run["num_experts"]:
            notes.append(
                f"{gate} fails beyond {result.fail:.4g} because {policy.name} says {rule.fail}"
                f" and N = {run['num_experts']}, k = {run['top_k']}"
            )
        elif rule is not None:
            notes.append(f"{gate} fails beyond {result.fail} because {policy.name} says so for every N and k")
    evenness = failing and all(GATES[g].family in ("evenness", "cutting") for g in failing)
    if policy.name != "specialised" and evenness and others.get("specialised") in ("PASS", "WARN"):
        notes.append(
            "only evenness and its ties to sources fail, and `specialised` accepts "
            "the run: where many small experts"
            " are meant to specialise this is the aim, so calibrate limits on a "
            "healthy run of this architecture"
        )
    return notes


def _window(frame: LayerFrame, cell: Cell) -> int:
    windows = frame.windows
    match = np.flatnonzero(
        (windows.first_step_W == cell.first_step) & (windows.last_step_W == cell.last_step)
    )
    return int(match[0]) if len(match) else int(np.abs(windows.last_step_W - cell.last_step).argmin())


def _badness(cell: Cell) -> float:
    """Status first, then the distance past the limit in its own size."""
    value = cell.value if cell.value is not None and np.isfinite(cell.value) else 1e9
    limit = cell.limit or 0.0
    return 1000.0 * int(cell.status) + float(np.arctan(abs(value - limit) / max(abs(limit), 1e-9)))


def _breach(cell: Cell, op: str) -> str:
    value = "-" if cell.value is None else f"{cell.value:.4g}"
    limit = "-" if cell.limit is None else f"{cell.limit:.4g}"
    return f"{cell.gate} {value} {op} {limit} ({cell.status.name})"


def _keys(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def _first_filled(templates: Iterable[str], facts: Mapping[str, Any]) -> str | None:
    """The first template all of whose facts are known, filled in."""
    return next(iter(_filled(templates, facts)), None)


def _filled(templates: Iterable[str], facts: Mapping[str, Any]) -> list[str]:
    return [t.format_map(facts) for t in templates if _keys(t) <= facts.keys()]


def render(found: Explanation, format: str = "text") -> str:
    """An explanation as text, Markdown or JSON."""
    if format == "json":
        return json.dumps({"schema_version": 1, **finite(asdict(found))}, indent=1) + "\n"
    strong, item = ("**{}**", "- {}") if format == "markdown" else ("{}", "  {}")
    say = markdown if format == "markdown" else printable
    head = f"{found.status} under policy {found.policy}: {say(found.path)}"
    lines = [f"# {head}" if format == "markdown" else head]
    if not found.diagnoses:
        lines += ["", "no gate warns or fails, so there is nothing to explain"]
    for number, d in enumerate(found.diagnoses, 1):
        others = ", ".join(map(str, d.also_layers[:12]))
        also = f" (also layer{'s' * (len(d.also_layers) > 1)} {others})" if others else ""
        title = f"{number}. {d.title} [{d.status}]"
        lines += [
            "",
            f"## {title}" if format == "markdown" else title,
            "",
            f"layer {d.layer} {say(d.layer_name)}{also}, steps {d.first_step}-{d.last_step}"
            + ("" if d.source == "all" else f", source {say(d.source)}")
            + f": {say(d.symptom)}",
            f"{'' if format == 'markdown' else '  '}{'; '.join(d.breaches)}",
            "",
            strong.format("likely causes, in the order to check them"),
            "",
        ]
        for place, cause in enumerate(d.causes, 1):
            mark = {True: "evidence for it", False: "evidence against it", None: "check"}[cause.supported]
            evidence = f": {say(cause.evidence)}" if cause.evidence else ""
            lines.append(item.format(f"{place}. {cause.cause} [{mark}]{evidence}"))
        for label, entries in (("look at", d.look_at), ("usual remedies", d.remedies)):
            lines += ["", strong.format(label), "", *(item.format(say(entry)) for entry in entries)]
    if found.other_policies:
        others = ", ".join(f"{name} {status}" for name, status in found.other_policies.items())
        lines += ["", f"the same run under other presets: {others}"]
    lines += ["", *(f"note: {say(note)}" for note in found.notes)] if found.notes else []
    return "\n".join(lines) + "\n"
