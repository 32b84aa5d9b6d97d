"""Following a live run in the terminal, from outside the training process: the last verdict, and alerts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moe_audit.alerts import Alert, alert_of, newest_window
from moe_audit.following import Following
from moe_audit.reports import text
from moe_audit.reports.wording import clean, sentence, steps
from moe_audit.run import store_file
from moe_audit.thresholds.errors import NoDataError, UsageError
from moe_audit.verdict import Status

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from moe_audit.run import Run
    from moe_audit.thresholds.policy import Policy
    from moe_audit.verdict import Grid, Verdict

MARKS = {Status.PASS: "·", Status.WARN: "w", Status.FAIL: "F", Status.INSUFFICIENT: "?", Status.INVALID: "!"}


def watch(
    path: Path,
    policy: Policy,
    console: Console,
    *,
    interval: float = 5.0,
    notify: Callable[[Alert], object] | None = None,
) -> int:
    """Shows the verdict on the last windows until the run ends (or Ctrl-C); returns that verdict's exit code.

    The run may not have begun: then it waits for the store. Each window alarms once.

    Raises:
        UsageError: interval is not positive.
        StoreError: the file is no routing store, or is damaged.
    """
    from rich.live import Live

    if not interval > 0:
        raise UsageError(f"interval is {interval}", "seconds between two looks, more than 0")
    verdict, told = None, -1
    following = Following(path, policy)
    # Ctrl-C may come at any moment.
    with Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        is_live = True
        while is_live:
            if store_file(path).exists():
                with following.look() as (run, verdict):
                    live.update(_screen(run, verdict, console.width), refresh=True)
                    is_live = run.is_live
            else:
                live.update(f"waiting for {clean(str(path), 200)}", refresh=True)
            alert = _new_alert(verdict, told)
            if verdict is not None and alert is not None:
                told = newest_window(verdict)[1]
                live.console.print(_alert_line(alert))
                if notify is not None:
                    notify(alert)
            if is_live:
                time.sleep(interval)
    return verdict.exit_code if verdict is not None else NoDataError.exit_code


def _new_alert(verdict: Verdict | None, told: int) -> Alert | None:
    """The alert of the newest window, unless that window was told of already."""
    if verdict is None or newest_window(verdict)[1] == told:
        return None
    return alert_of(verdict, sentence(verdict))


def _screen(run: Run, verdict: Verdict | None, width: int) -> RenderableType:
    """Where the run is, the grid of the last windows, and the verdict as `check` prints it."""
    from rich.console import Group
    from rich.text import Text

    if verdict is None:
        return Text("no record yet", style="dim")
    last = run.records[-1]
    loss = "" if last.loss is None else f", loss {last.loss:.4f}"
    where = f"step {last.last_step:,}{loss}, written {last.written_at}"
    parts = [Text(where, style="dim"), Text(text.render(verdict, width=width).rstrip())]
    if verdict.grid is not None and len(verdict.grid.first_step_W):
        parts.append(Text("\n" + _grid(verdict.grid)))
    return Group(*parts)


def _grid(grid: Grid) -> str:
    """One line a window, newest last, one mark a layer."""
    lines = [f"{'window':>20}  layers {grid.layers[0]} to {grid.layers[-1]}"]
    for w in range(len(grid.first_step_W)):
        marks = "".join(MARKS.get(Status(int(s)), " ") if s >= 0 else " " for s in grid.status_WL[w])
        lines.append(f"{steps(int(grid.first_step_W[w]), int(grid.last_step_W[w])):>20}  {marks}")
    return "\n".join(lines)


def _alert_line(alert: Alert) -> RenderableType:
    from rich.text import Text

    style = "bold red" if alert.severe else "yellow"
    return Text(
        f"{time.strftime('%H:%M:%S')}  {clean(alert.title, 200)}: {clean(alert.body, 300)}", style=style
    )
