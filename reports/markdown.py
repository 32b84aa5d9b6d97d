"""The verdict as Markdown: a pull-request comment, or the summary of a CI step."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moe_audit.reports.wording import (
    breach,
    clean,
    error_of,
    headline,
    note_label,
    number,
    op_of,
    place,
    ranked,
    scope,
    status_name,
    totals,
    waiver_line,
)

if TYPE_CHECKING:
    from moe_audit.verdict import Cell, Verdict

SIGNS = {"PASS": "✅", "WARN": "⚠️", "FAIL": "❌", "INSUFFICIENT": "❔", "INVALID": "⛔", "ERROR": "⛔"}
MOST_CELLS = 20


def render(verdict: Verdict) -> str:
    """Markdown that fits a comment (65,536 characters) whatever the run."""
    status = status_name(verdict)
    path = escape(verdict.run.get("path") or "routing audit", 200)
    lines = [f"### {SIGNS[status]} {status}: {path}", "", escape(headline(verdict), 1000)]
    if scope(verdict):
        lines += ["", escape(scope(verdict), 400)]
    if verdict.gates:
        lines += ["", "| gate | status | worst | floor | where |", "| :-- | :-- | --: | --: | :-- |"]
        for gate in sorted(verdict.gates, key=lambda g: -g.status):
            name = f"{SIGNS[gate.status.name]} {gate.status.name}"
            cells = ["–", "–", "–"] if gate.worst is None else _cells(gate.worst, gate.op)
            lines.append(f"| {escape(gate.gate)} | {name} | {' | '.join(cells)} |")
        lines += ["", escape(totals(verdict))]
    worst = [c for c in ranked(verdict.cells) if c.status]
    if worst:
        ops = op_of(verdict)
        lines += ["", f"<details><summary>The worst of {len(worst):,} cells that do not pass</summary>", ""]
        lines += ["| gate | status | value | floor | where |", "| :-- | :-- | --: | --: | :-- |"]
        for cell in worst[:MOST_CELLS]:
            columns = [escape(cell.gate), cell.status.name, *_cells(cell, ops.get(cell.gate, ""))]
            lines.append(f"| {' | '.join(columns)} |")
        lines += ["", "</details>"]
    notes = [f"**skipped** {escape(s['gate'])}: {escape(s['reason'], 200)}" for s in verdict.skipped]
    notes += [f"**waived** {escape(waiver_line(w), 400)}" for w in verdict.waived]
    notes += [
        f"**{note_label(p)}** {escape(p['kind'])}: {escape(p['message'], 400)}" for p in verdict.problems
    ]
    error = error_of(verdict)
    if error is not None and error.get("remedy"):
        notes.append(f"**remedy** {escape(error['remedy'], 300)}")
    if notes:
        lines += ["", *(f"- {note}" for note in notes[:50])]
        if len(notes) > 50:
            lines.append(f"- and {len(notes) - 50} more")
    policy = verdict.policy.get("name")
    if policy:
        lines += ["", f"<sub>moe-audit, policy {escape(policy)}, exit code {verdict.exit_code}</sub>"]
    return "\n".join(lines) + "\n"


def escape(text: object, limit: int = 60) -> str:
    """`text` as Markdown shows it literally: no markup, HTML, mention, reference or link comes out of it."""
    shown = clean(text, limit)
    shown = re.sub(r"[&<>|@#*`\[\]\\~!$^{}\"']", lambda m: f"&#{ord(m.group())};", shown)
    shown = shown.replace("://", "&#58;//")
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", "&#95;", shown)


def _cells(cell: Cell, op: str) -> list[str]:
    return [escape(breach(cell, op), 80), number(cell.floor), escape(place(cell), 300)]
