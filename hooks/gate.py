"""The training gate: judges the last windows while training runs, and acts on the learning rate.

One decision, made where the store is and sent to all: every rank acts from the same optimizer step on.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.optim import Optimizer

from moe_audit.alerts import SEVERE_IN_A_ROW, Alert, alert_of, failing_in_a_row, newest_window
from moe_audit.following import Following
from moe_audit.hooks.learning_rate import Groups, LearningRateOverride
from moe_audit.hooks.recorder import Recorder
from moe_audit.reports.json import to_dict
from moe_audit.reports.notify import Notifier
from moe_audit.reports.wording import sentence, status_name
from moe_audit.thresholds.errors import AuditError, UsageError
from moe_audit.thresholds.policy import load_policy
from moe_audit.verdict import Verdict

Action = Literal["hold", "scale", "zero_router", "pause"]
WAIT_FOR_DISK, NO_WAIT = 10.0, 0.1  # seconds that a check waits for the writer; later ones, once that failed
CHECKS_FOLDER = "checks"  # in the run folder: one report a check


@dataclass
class GateState:
    """All that the gate remembers between steps; plain data for a checkpoint."""

    next_check: int = 0
    action_ends: int | None = None  # last step of the action that is on
    rearmed: int = 0  # a window that begins before this step raises no new action
    status: str = "NO DATA"
    failing_in_a_row: int = 0
    pause_requested: bool = False
    paused: int = 0  # step of the last request
    told: int = 0  # last step of the newest window judged: each is alerted of once


@dataclass(frozen=True)
class Decision:
    """What one check came to, the same on all ranks."""

    status: str
    failing_in_a_row: int  # disjoint windows, counted back from the newest
    newest_begins: int  # first step of the newest window
    newest_ends: int
    recorded: int  # last step that is in the store
    stride: int


class TrainingGate:
    """Judges every stride and acts on a failing window. It needs no call of its own in the loop:
    `recorder.step` drives it, and hooks on the optimizer apply the action.

    An action lasts `cooldown` steps, then the schedule applies again. While one is on no other begins, and
    after it only a window that began after its end can raise the next: the same steps never alarm twice.

    Args:
        recorder: the recorder of the run; on ranks that record nothing too.
        optimizer: the optimizer, or all that train the model.
        policy: preset or path, as for `moe-audit check`.
        action: `hold` (learning rate at most that of the alarm), `scale` (times `factor`), `zero_router` (the
            routers' own parameter group at 0), `pause` (sets `pause_requested`, the loop obeys).
        groups: the parameter groups that `hold` and `scale` govern.
        check_every: steps between checks; None: one stride.
        cooldown: steps that an action lasts.
        factor: of `scale`.
        dry_run: judge, report and alert, but leave the learning rate alone.
        pause_when_severe: request a pause also after three disjoint failing windows in a row.
        notify: takes each alert, from a thread of its own; e.g. a `moe_audit.reports.notify.Notifier`.

    Attributes:
        state: what it remembers; `state.status` is the last status in upper case.
        pause_requested: the loop should save and stop.

    Raises:
        UsageError: an unknown action, a cooldown or check_every under 1, no router group for `zero_router`, a
            recorder with a store for each rank.
    """

    def __init__(
        self,
        recorder: Recorder,
        optimizer: Optimizer | Sequence[Optimizer],
        policy: str | Path = "default",
        action: Action = "hold",
        groups: Groups = "all",
        check_every: int | None = None,
        cooldown: int = 200,
        *,
        factor: float = 0.1,
        dry_run: bool = False,
        pause_when_severe: bool = False,
        notify: Callable[[Alert], object] | None = None,
    ) -> None:
        _one_of("action", action, get_args(Action))
        _one_of("groups", groups, get_args(Groups))
        for name, value in (("cooldown", cooldown), ("check_every", check_every)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", "it counts steps: 1 or more")
        if recorder.is_share:
            raise UsageError(
                f"{recorder.path} has the counts of one rank, which say nothing of the whole",
                'a gate needs a recorder with mode="reduce"',
            )
        self.recorder = recorder
        self.following = Following(recorder.path, load_policy(policy))
        self.action = action
        self.check_every = check_every
        self.cooldown = cooldown
        self.dry_run = dry_run
        self.pause_when_severe = pause_when_severe
        self.notifier = (
            notify
            if notify is None or isinstance(notify, Notifier)
            else Notifier(min_interval=0.0, send=notify)
        )
        self.state = GateState()
        self.verdict: Verdict | None = None  # of the last check, where there is a store
        self.judged_step: int | None = None  # the step of that check
        self.override = None
        if action != "pause":
            self.override = LearningRateOverride(
                optimizer,
                action,
                groups,
                recorder.router_parameters(),
                factor,
                may_be_empty=not recorder.has_routers,
            )
        self._disk_is_slow = self._closed = False
        recorder.on_step(self._step)
        recorder.on_close(self._close)

    @property
    def pause_requested(self) -> bool:
        return self.state.pause_requested

    @property
    def action_ends(self) -> int | None:
        """The last step of the action that is on; None where none is."""
        return self.state.action_ends

    def line(self) -> str:
        """The routing-health field of a training log: the status, and the action that is on."""
        if self.state.action_ends is None:
            return self.state.status
        doing = f"{self.action} (dry run)" if self.dry_run else self.action
        return f"{self.state.status}, {doing} to step {self.state.action_ends}"

    def rate(self, group: dict[str, Any]) -> float:
        """The learning rate that a parameter group's next step is taken with."""
        return self.override.rate(group) if self.override else float(group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint; it keeps an action that is on."""
        override = self.override.state_dict() if self.override else None
        return {"state": asdict(self.state), "override": override}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint, in the middle of an action too."""
        self.state = GateState(**state["state"])
        self.state.pause_requested = False  # it was obeyed
        if self.override and state["override"]:
            self.override.load_state_dict(state["override"])
            self.override.active = self.state.action_ends is not None and not self.dry_run

    def check(self, step: int) -> str:
        """Judges what is recorded up to `step` and acts on it; on all ranks together. Returns the status.

        `recorder.step` calls it every stride; call it before a checkpoint is kept, after `recorder.flush()`.
        """
        written = self.recorder.written(NO_WAIT if self._disk_is_slow else WAIT_FOR_DISK)
        self._disk_is_slow = not written
        decision = _agreed(self._judge(step, written) if self.recorder.writes else None)
        self.state.status = decision.status
        self.state.next_check = self._next_check(step, decision)
        self.state.failing_in_a_row = decision.failing_in_a_row
        self.state.told = decision.newest_ends
        # Windows from before a pause must not end the run that was resumed after it.
        is_new = decision.newest_begins > self.state.paused
        if decision.failing_in_a_row >= SEVERE_IN_A_ROW and self.pause_when_severe and is_new:
            self._request_pause(step)
        fails = decision.failing_in_a_row > 0 and decision.newest_begins >= self.state.rearmed
        if fails and self.state.action_ends is None and not self._closed:
            self._begin_action(step)
        return self.state.status

    # -- one step

    def _next_check(self, step: int, decision: Decision) -> int:
        """The step in which the next window ends; it may have passed where the disk keeps records back."""
        if self.check_every is not None:
            return (step // self.check_every + 1) * self.check_every
        ends = decision.recorded + decision.stride
        return ends if ends > step else step + decision.stride

    def _step(self, step: int) -> None:
        if self.state.action_ends is not None and step >= self.state.action_ends:
            self._end_action(step)
        if step >= self.state.next_check:
            self.check(step)

    def _begin_action(self, step: int) -> None:
        self.state.action_ends = step + self.cooldown
        self.state.rearmed = step + self.cooldown + 1
        if self.dry_run:
            self._event(step, "lr_action", until=self.state.action_ends, dry_run=True)
        elif self.override is None:
            self._request_pause(step)
        else:
            self.override.start()
            self._event(step, "lr_action", until=self.state.action_ends, lr=self.override.applied())

    def _end_action(self, step: int) -> None:
        self.state.action_ends = None
        if self.override is not None and self.override.active:
            self.override.stop()
            self._event(step, "lr_return")

    def _request_pause(self, step: int) -> None:
        if not self.state.pause_requested and not self.dry_run and not self._closed:
            self._event(step, "pause_requested")
        if not self.dry_run:
            self.state.pause_requested, self.state.paused = True, step

    def _event(self, step: int, kind: str, **detail: Any) -> None:
        self.recorder.event(step, kind, {"action": self.action, **detail})

    def _close(self) -> None:
        """Without the recorder nothing would end an action. A later check only judges."""
        self._closed = True
        if self.override is not None:
            self.override.stop()
        if self.notifier is not None:
            self.notifier.close()

    # -- judging, where there is a store

    def _judge(self, step: int, written: bool) -> Decision:
        """One check. An audit that cannot be made is told, and never stops training."""
        if not written:
            warnings.warn(f"{self.recorder.path}: the last records wait for the disk", stacklevel=2)
        self.verdict = None
        try:
            with self.following.look(step) as (_, self.verdict):
                pass
        except Exception as error:  # not only AuditError: other ranks wait for this one
            reason = error if isinstance(error, AuditError) else repr(error)
            warnings.warn(f"the training gate could not judge step {step}: {reason}", stacklevel=2)
            return Decision("UNKNOWN", 0, 0, 0, step, self.recorder.flush_every)
        if self.verdict is None:
            return Decision("NO DATA", 0, 0, 0, step, self.recorder.flush_every)
        self.judged_step = step
        self._write_report(step, self.verdict)
        self._alert(step, self.verdict)
        return Decision(
            status_name(self.verdict),
            failing_in_a_row(self.verdict),
            *newest_window(self.verdict),
            int(self.verdict.run["last_step"]),
            int(self.verdict.windows["stride"]),
        )

    def _write_report(self, step: int, verdict: Verdict) -> None:
        folder = self.recorder.path.parent / CHECKS_FOLDER
        try:
            folder.mkdir(exist_ok=True)
            (folder / f"step_{step:08d}.json").write_text(json.dumps(to_dict(verdict), indent=1))
        except OSError as error:
            warnings.warn(f"the report of step {step} could not be written: {error}", stacklevel=2)

    def _alert(self, step: int, verdict: Verdict) -> None:
        alert = alert_of(verdict, sentence(verdict))
        if alert is None or self._closed or newest_window(verdict)[1] == self.state.told:
            return
        kind = "routing_severe" if alert.severe else "routing_failed"
        self.recorder.event(step, kind, {"title": alert.title, "body": alert.body})
        if self.notifier is not None:
            self.notifier(alert)


def _agreed(decision: Decision | None) -> Decision:
    """The decision of the rank that has the store, on all ranks; the others give None."""
    decisions: list[Decision | None] = [decision]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        decisions = [None] * dist.get_world_size()
        dist.all_gather_object(decisions, decision)
    return next(d for d in decisions if d is not None)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r}", f"it is one of {', '.join(known)}")
