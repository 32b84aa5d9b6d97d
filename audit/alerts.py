"""When a person is told: from the windows of a verdict to an alert. Shared by the training gate and `watch`.

Shapes: W windows.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_audit.verdict import Status, Verdict
from moe_audit.windows import AUTO_WINDOWS

SEVERE_IN_A_ROW = 3  # disjoint failing windows


@dataclass(frozen=True)
class Alert:
    """What happened to the routing. `severe`: three disjoint windows failed in a row; pause is advised."""

    title: str
    body: str
    severe: bool = False


def failing_in_a_row(verdict: Verdict) -> int:
    """How many disjoint windows fail in a row, counted back from the newest; one fails where any layer does.

    0 for an INVALID verdict: its counts mean nothing, so nothing may act on them. 0 too for a run that has
    just begun: with less than half a window, or fewer than the three windows that `auto` lays out.
    """
    grid = verdict.grid
    if grid is None or verdict.status == Status.INVALID:
        return 0
    windows = verdict.windows
    if windows["origin"] == "auto" and windows["disjoint"] < AUTO_WINDOWS:
        return 0
    whole_W = 2 * (grid.last_step_W - grid.first_step_W + 1) >= windows["length"]
    fails_W = (grid.status_WL == Status.FAIL).any(axis=1) & whole_W
    count, begins = 0, None
    for w in reversed(range(len(fails_W))):
        if begins is not None and grid.last_step_W[w] >= begins:
            continue  # overlaps the window counted last
        if not fails_W[w]:
            break
        count, begins = count + 1, int(grid.first_step_W[w])
    return count


def newest_window(verdict: Verdict) -> tuple[int, int]:
    """First and last step of the newest window judged; (0, 0) without one."""
    grid = verdict.grid
    if grid is None or not len(grid.first_step_W):
        return 0, 0
    return int(grid.first_step_W[-1]), int(grid.last_step_W[-1])


def alert_of(verdict: Verdict, sentence: str) -> Alert | None:
    """The alert that the newest window calls for, None where it does not fail.

    Args:
        verdict: of the last windows of a run.
        sentence: the verdict in words, the body of the alert.
    """
    name = verdict.run.get("path", "run")
    if verdict.status == Status.INVALID:
        return Alert(f"{name}: the recording is invalid", sentence)
    count = failing_in_a_row(verdict)
    if count == 0:
        return None
    if count >= SEVERE_IN_A_ROW:
        title = f"{name}: routing failed in {count} windows in a row, pause the training"
        return Alert(title, sentence, severe=True)
    return Alert(f"{name}: routing failed", sentence)
