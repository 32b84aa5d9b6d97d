"""Verdicts in words: one wording, and one way to make untrusted names harmless, for every format."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_audit.verdict import Cell, GateResult, Verdict

NAME_LIMIT = 60  # characters of a name that are shown; names come from the store and may have any length
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, format and bidi marks, line separators


def clean(text: object, limit: int = NAME_LIMIT) -> str:
    """`text` on one line, each control character as its escape, cut to `limit` characters.

    "::" and "##[" get a space: at the start of a line they are commands to the log readers of CI services.
    """
    shown = "".join(
        c if unicodedata.category(c) not in _UNSAFE else c.encode("unicode_escape", "surrogatepass").decode()
        for c in str(text)[: limit + 1]
    )
    shown = shown.replace("::", ": :").replace("::", ": :").replace("##[", "## [")
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def number(value: float | None) -> str:
    """Three significant digits, thousands with separators; "-" where there is no value."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.2g}"
    return f"{value:.3g}"


def steps(first: int | None, last: int | None) -> str:
    return "-" if first is None or last is None else f"{first}-{last}"


def expert_list(experts: Iterable[int], most: int = 6) -> str:
    numbers = list(experts)
    rest = f" +{len(numbers) - most}" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + rest


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


INVERSE = {">": "<=", "<": ">=", ">=": "<", "<=": ">"}


def breach(cell: Cell, op: str = "") -> str:
    """The value against its limit: "0.012 < 0.25", or "0.4 >= 0.25" of a cell that passes."""
    if cell.status.name == "PASS":
        op = INVERSE.get(op, op)
    value = number(cell.value)
    if cell.value is None and cell.value_reason:
        value = clean(cell.value_reason)
    return value if cell.limit is None else f"{value} {op or 'against'} {number(cell.limit)}"


def place(cell: Cell) -> str:
    """Where a cell is: layer, steps, source and the experts named."""
    words = [f"layer {cell.layer} ({clean(cell.layer_name)})" if cell.layer_name else f"layer {cell.layer}"]
    words.append(f"steps {steps(cell.first_step, cell.last_step)}")
    if cell.source != "all":
        words.append(f"source {clean(cell.source)}")
    if cell.experts:
        words.append(f"{'expert' if len(cell.experts) == 1 else 'experts'} {expert_list(cell.experts)}")
    return ", ".join(words)


def status_name(verdict: Verdict) -> str:
    """The status in upper case; ERROR where the audit could not run (exit codes 2 and 5)."""
    return "ERROR" if verdict.exit_code in (2, 5) else verdict.status.name


def error_of(verdict: Verdict) -> dict[str, str] | None:
    """`error`, filled in from the problems and skipped gates where exit codes 2 to 5 came without one."""
    if verdict.error is not None or verdict.exit_code not in (2, 3, 4, 5):
        return verdict.error
    causes = [p["message"] for p in verdict.problems] or [
        f"{s['gate']}: {s['reason']}" for s in verdict.skipped
    ]
    message = "; ".join(causes) or "nothing was judged"
    remedy = (
        "record more windows, or judge shorter ones with --length"
        if verdict.exit_code == 3
        else "see `problems`"
    )
    return {"message": message, "remedy": remedy}


def worst_gate(verdict: Verdict) -> GateResult | None:
    """The gate that decides the status: the worst status, then the largest breach relative to its limit."""
    decided = [g for g in verdict.gates if g.worst is not None]
    return max(decided, key=lambda g: (g.status, excess(g.worst)), default=None)


def excess(cell: Cell | None) -> float:
    """How far a cell is from its limit, as the logarithm of their ratio: orders cells of different gates."""
    if cell is None or cell.value is None or cell.limit is None:
        return 0.0
    if math.isinf(cell.value):
        return math.inf
    small = 1e-12
    return abs(math.log((abs(cell.value) + small) / (abs(cell.limit) + small)))


def sentence(verdict: Verdict) -> str:
    """The verdict in one sentence, without the status word in front."""
    error = error_of(verdict)
    if error is not None:
        remedy = f" ({clean(error['remedy'], 300)})" if error.get("remedy") else ""
        return clean(error["message"], 400) + remedy
    count = verdict.totals
    judged = sum(count.get(s, 0) for s in ("PASS", "WARN", "FAIL"))
    policy = clean(verdict.policy.get("name", "?"))
    gate = worst_gate(verdict)
    worst = (
        f"; worst: {gate.gate} {breach(gate.worst, gate.op)} in {place(gate.worst)}"
        if gate is not None and gate.worst is not None
        else ""
    )
    if verdict.status.name == "FAIL":
        failing = [g.gate for g in verdict.gates if g.status.name == "FAIL"]
        return (
            f"routing is not acceptable under policy {policy}: {', '.join(failing)} "
            f"{'fails' if len(failing) == 1 else 'fail'} in {count.get('FAIL', 0):,} "
            f"of {plural(judged, 'cell')}{worst}"
        )
    if verdict.status.name == "WARN":
        return (
            f"routing is acceptable under policy {policy}, with {plural(count.get('WARN', 0), 'warning')} "
            f"in {plural(judged, 'cell')}{worst}"
        )
    waived = f" but those of {plural(len(verdict.waived), 'waiver')}" if verdict.waived else ""
    return (
        f"routing is acceptable under policy {policy}: "
        f"{plural(judged, 'cell')} judged, none beyond a limit{waived}"
    )


def headline(verdict: Verdict) -> str:
    """The sentence as running text: with a capital and a full stop."""
    text = sentence(verdict)
    return text if error_of(verdict) is not None else f"{text[:1].upper()}{text[1:]}."


def totals(verdict: Verdict) -> str:
    """How many cells there are of each status."""
    return ", ".join(f"{verdict.totals.get(s, 0):,} {s}" for s in ("PASS", "WARN", "FAIL", "INSUFFICIENT"))


def scope(verdict: Verdict) -> str:
    """What was judged, in one line: windows, layers, experts, sources."""
    run, windows = verdict.run, verdict.windows
    parts: list[str] = []
    if windows.get("count") is not None:
        length = f" of {windows['length']:,} steps" if windows.get("length") is not None else ""
        stride = f", stride {windows['stride']:,}" if windows.get("stride") is not None else ""
        origin = f" ({clean(windows['origin'])})" if windows.get("origin") else ""
        parts.append(f"{plural(int(windows['count']), 'window')}{length}{stride}{origin}")
    if run.get("first_step") is not None:
        parts.append(f"steps {steps(run['first_step'], run['last_step'])}")
    layers = _count(run.get("layers"))
    if layers:
        experts = f" x {run['num_experts']} experts" if run.get("num_experts") else ""
        top_k = f" top-{run['top_k']}" if run.get("top_k") else ""
        parts.append(f"{plural(layers, 'layer')}{experts}{top_k}")
    sources = _count(run.get("sources"))
    if sources:
        parts.append(plural(sources, "source"))
    return ", ".join(parts)


def ranked(cells: Iterable[Cell]) -> list[Cell]:
    """Cells from the worst: what failed, what came near, what could not be decided; then by excess."""
    order = {"INVALID": 0, "FAIL": 1, "WARN": 2, "INSUFFICIENT": 3, "PASS": 4}
    return sorted(
        cells, key=lambda c: (order[c.status.name], -excess(c), c.first_step, c.layer, c.gate, c.source)
    )


def waiver_of(verdict: Verdict, cell: Cell) -> str | None:
    """The waiver that covers a cell, in words; None where none does. INSUFFICIENT cells need none."""
    if cell.status.name not in ("WARN", "FAIL"):
        return None
    for waiver in verdict.waived:
        if all(waiver.get(key, value) == value for key, value in _place_of(cell).items()):
            return waiver_line({k: v for k, v in waiver.items() if k in ("owner", "reason", "expires")})
    return None


def _place_of(cell: Cell) -> dict[str, Any]:
    return {"gate": cell.gate, "layer": cell.layer, "source": cell.source}


def op_of(verdict: Verdict) -> dict[str, str]:
    """gate -> comparison sign."""
    return {g.gate: g.op for g in verdict.gates}


def note_label(problem: dict[str, str]) -> str:
    """A broken invariant is a problem; all else under `problems` is a note on how to read the verdict."""
    return "problem" if problem["kind"] == "invariant" else "note"


def waiver_line(waiver: dict[str, Any]) -> str:
    return ", ".join(f"{clean(k)} {clean(v, 200)}" for k, v in waiver.items() if v is not None)


def _count(value: Sequence[object] | int | None) -> int:
    if value is None:
        return 0
    return value if isinstance(value, int) else len(value)
