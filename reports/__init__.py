"""A verdict in the forms people read and machines obey. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_audit.thresholds.errors import AuditError, UsageError

if TYPE_CHECKING:
    from moe_audit.verdict import Verdict

# format -> module of this package that holds `render(verdict, **options) -> str`
FORMATS = {
    "text": "text",
    "json": "json",
    "markdown": "markdown",
    "junit": "junit",
    "sarif": "sarif",
    "github": "github",
}


def render(verdict: Verdict, format: str = "text", **options: Any) -> str:
    """The verdict in one of `FORMATS`, as text that ends in a newline.

    Options: `text` takes width, color, quiet; `json` takes all_cells; the others take none.

    Raises:
        UsageError: the format is not known.
    """
    if format not in FORMATS:
        raise UsageError(f"there is no format {format!r}", f"choose one of {', '.join(FORMATS)}")
    renderer: Callable[..., str] = import_module(f"{__name__}.{FORMATS[format]}").render
    return renderer(verdict, **options)


def error_verdict(error: Exception, path: str = "") -> Verdict:
    """What stands in for a verdict where the audit itself could not run, so that no format shows a pass.

    A user's error keeps its exit code; anything else is an internal error, exit code 5.
    """
    from moe_audit.verdict import Status, Verdict

    if isinstance(error, AuditError):
        exit_code, message, remedy = error.exit_code, error.message, error.remedy
    else:
        exit_code, message = 5, f"{type(error).__name__}: {error}"
        remedy = "this is a fault of moe-audit: please report it"
    return Verdict(
        status=Status.INSUFFICIENT if exit_code == 3 else Status.INVALID,
        exit_code=exit_code,
        run={"path": path},
        policy={},
        windows={},
        totals={},
        error={"message": message, "remedy": remedy},
    )
