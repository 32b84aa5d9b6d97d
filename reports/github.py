"""GitHub workflow commands: annotations on the job. The step summary is the format `markdown`.

A step shows at most ten annotations of a kind, so the worst nine stand alone and the tenth counts the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_audit.reports.wording import (
    breach,
    clean,
    op_of,
    place,
    plural,
    ranked,
    sentence,
    status_name,
    waiver_of,
)

if TYPE_CHECKING:
    from moe_audit.verdict import Verdict

WORST = 9
COMMANDS = {"FAIL": "error", "WARN": "warning", "INSUFFICIENT": "notice"}


def render(verdict: Verdict) -> str:
    """One line of plain text, then the annotations. Where nothing was judged there is an error, always."""
    status = status_name(verdict)
    lines = [f"moe-audit: {status}: {sentence(verdict)}"]
    if verdict.exit_code not in (0, 1):
        lines.append(command("error", f"moe-audit: {status}", sentence(verdict)))
    ops = op_of(verdict)
    cells = [c for c in ranked(verdict.cells) if c.status and not waiver_of(verdict, c)]
    for cell in cells[:WORST]:
        title = f"{clean(cell.gate)} {cell.status.name}"
        lines.append(
            command(
                COMMANDS[cell.status.name], title, f"{breach(cell, ops.get(cell.gate, ''))} in {place(cell)}"
            )
        )
    if len(cells) > WORST:
        rest = cells[WORST:]
        kind = COMMANDS[rest[0].status.name]
        lines.append(
            command(kind, "moe-audit", f"{plural(len(rest), 'more cell')} that do not pass: see the summary")
        )
    return "\n".join(lines) + "\n"


def command(kind: str, title: str, message: str) -> str:
    """One workflow command; what would end it or start another is percent-encoded."""
    title = _encode(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={title}::{_encode(message)}"


def _encode(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
