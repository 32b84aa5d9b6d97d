"""Following a run that grows: check after check of its last windows, each at the same cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_audit.checking import check
from moe_audit.run import Run, open_run
from moe_audit.thresholds.errors import NoDataError
from moe_audit.thresholds.policy import Policy
from moe_audit.verdict import Verdict


class Following:
    """Judges the last windows of a run again and again. It reads on from where the last check began to read,
    so that a check costs the same however long the run has become.

    Args:
        path: The store, or its folder.
        policy: What to judge by.
    """

    def __init__(self, path: Path, policy: Policy) -> None:
        self.path = path
        self.policy = policy
        self._before: tuple[Verdict, int] | None = None  # with the number of attempts

    @contextmanager
    def look(self, step: int | None = None) -> Iterator[tuple[Run, Verdict | None]]:
        """The run as it is now, and the verdict on the windows up to `step` (None: the last there is).

        The verdict is that of `check(path, policy, checkpoint=step)`; None before the first record. `records`
        of the run may be its last ones only.

        Raises:
            UsageError, StoreError: See `open_run`.
        """
        before, attempts = self._before or (None, 0)
        if before is not None and before.tail is not None:
            with open_run(self.path, tail=before.tail) as run:
                verdict = self._judge(run, step)
                # After a resume, or once the windows grow, earlier records are needed.
                if verdict is not None and len(run.attempts) == attempts and _alike(verdict, before):
                    self._before = verdict, attempts
                    yield run, verdict
                    return
        with open_run(self.path) as run:
            verdict = self._judge(run, step)
            self._before = None if verdict is None else (verdict, len(run.attempts))
            yield run, verdict

    def _judge(self, run: Run, step: int | None) -> Verdict | None:
        if not run.records:
            return None
        try:
            return check(run, self.policy, checkpoint=run.records[-1].last_step if step is None else step)
        except NoDataError:  # all records are of later steps
            return None


def _alike(a: Verdict, b: Verdict) -> bool:
    return all(a.windows[name] == b.windows[name] for name in ("length", "stride"))
