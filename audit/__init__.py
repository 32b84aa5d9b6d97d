"""Exact counts of a router, judged window by window.

import moe_audit
run = moe_audit.open_run("runs/a")
frame = moe_audit.metrics(run)            # pandas.DataFrame
verdict = moe_audit.check(run)            # .status .cells .gates .exit_code
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_audit.checking import check as check
    from moe_audit.run import Run as Run
    from moe_audit.run import open_run as open_run
    from moe_audit.table import metrics as metrics
    from moe_audit.verdict import Verdict as Verdict

# Name -> where it lives. Loaded when first used, so that importing a part does not load the whole.
_HOMES = {
    "Run": "moe_audit.run",
    "Verdict": "moe_audit.verdict",
    "check": "moe_audit.checking",
    "metrics": "moe_audit.table",
    "open_run": "moe_audit.run",
}
__all__ = ["Run", "Verdict", "check", "metrics", "open_run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
