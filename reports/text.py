"""The verdict for a terminal: the sentence, then the worst cell of each gate, then what was not judged."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from moe_audit.reports.wording import (
    breach,
    clean,
    error_of,
    expert_list,
    note_label,
    number,
    scope,
    sentence,
    status_name,
    steps,
    totals,
    waiver_line,
)  # fmt: skip

if TYPE_CHECKING:
    from rich.table import Table

    from moe_audit.verdict import Verdict

STYLES = {
    "PASS": "green",
    "WARN": "yellow",
    "FAIL": "bold red",
    "INSUFFICIENT": "cyan",
    "INVALID": "bold magenta",
    "ERROR": "bold magenta",
}
SHORT = {"INSUFFICIENT": "INSUFF."}  # the status column stays narrow enough for 80 characters


def render(verdict: Verdict, width: int | None = None, color: bool = False, quiet: bool = False) -> str:
    """Text at most `width` (default 100) wide; no escape codes unless `color`; `quiet`: one line."""
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out,
        width=width or 100,
        color_system="standard" if color else None,
        force_terminal=color,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    status = status_name(verdict)
    path = f"{clean(verdict.run['path'], 200)}: " if verdict.run.get("path") else ""
    if quiet:
        return f"{status} {path}{sentence(verdict)}\n"
    console.print(Text.assemble((status, STYLES[status]), " ", path, sentence(verdict)))
    if scope(verdict):
        console.print(Text(scope(verdict), style="dim"))
    name, origin = verdict.policy.get("name"), verdict.policy.get("origin")
    if origin and origin != f"preset {name}":
        console.print(Text(f"policy {clean(name, 80)}: {clean(origin, 200)}", style="dim"))
    if verdict.gates:
        console.print()
        console.print(_gates(verdict))
    _notes(verdict, console.print)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _gates(verdict: Verdict) -> Table:
    """One row a gate. Figures are never cut; names give way where the terminal is narrow."""
    from rich.table import Table
    from rich.text import Text

    rows = []
    for gate in sorted(verdict.gates, key=lambda g: -g.status):
        cell = gate.worst
        row = ["-", "-", "-", "-", ""]
        if cell is not None:
            who = [clean(cell.source, 20)] if cell.source != "all" else []
            who += [expert_list(cell.experts)] if cell.experts else []
            window = steps(cell.first_step, cell.last_step)
            row = [breach(cell, gate.op), number(cell.floor), str(cell.layer), window, ": ".join(who)]
        rows.append((gate, row))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=False)
    table.add_column("gate", no_wrap=True, min_width=min(14, max(len(g.gate) for g, _ in rows)))
    table.add_column("status", no_wrap=True, min_width=7)
    for i, name in enumerate(("worst", "floor", "layer", "steps")):
        widest = max(len(name), *(len(row[i]) for _, row in rows))
        table.add_column(name, justify="right", no_wrap=True, min_width=min(widest, 24))
    named = any(gate.worst is not None and gate.worst.source != "all" for gate, _ in rows)
    table.add_column("source: experts" if named else "experts", overflow="fold", min_width=6)
    for gate, row in rows:
        status = gate.status.name
        table.add_row(
            clean(gate.gate), Text(SHORT.get(status, status), style=STYLES[status]), *map(Text, row)
        )
    return table


def _notes(verdict: Verdict, say: Callable[..., None]) -> None:
    from rich.text import Text

    lines: list[tuple[str, str]] = []
    if verdict.gates:
        lines.append(("cells", totals(verdict)))
    skipped = [f"{clean(s['gate'])} ({clean(s['reason'], 200)})" for s in verdict.skipped]
    lines += [("skipped", ", ".join(skipped))] if skipped else []
    lines += [("waived", waiver_line(w)) for w in verdict.waived]
    lines += [(note_label(p), f"{clean(p['kind'])}: {clean(p['message'], 400)}") for p in verdict.problems]
    error = error_of(verdict)
    if error is not None and error.get("remedy"):
        lines.append(("remedy", clean(error["remedy"], 300)))
    if lines:
        say()
    for label, text in lines:
        say(Text.assemble((f"{label:<8} ", "dim"), text))
