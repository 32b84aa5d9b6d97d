"""What training tells about its steps: which a record covers, at which learning rate and loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from moe_audit.thresholds.errors import UsageError

LearningRate = float | Mapping[str, float]


@dataclass(frozen=True)
class Steps:
    """The steps of one record.

    Attributes:
        due: Whether it is written even if no router fired: steps were done.
        lr, router_lr: Of its first step.
    """

    first: int
    last: int
    due: bool
    lr: float | None = None
    router_lr: float | None = None


class Span(NamedTuple):
    """What `StepClock.cut` gives: the steps for each phase, and sum and number of the losses."""

    train: Steps
    eval: Steps
    loss: Tensor | float
    losses: int


class StepClock:
    """Follows the steps of one attempt.

    Attributes:
        last: Optimizer steps done, as told; None before the first.
        first: First step of the record that is being filled; None if none was done since the last cut.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        self.first: int | None = None
        self._begin: int | None = None
        self._rates: tuple[float | None, float | None] = (None, None)
        self._eval: list[int | None] = []
        self._loss: Tensor | float = 0.0
        self._losses = 0

    def step(self, step: int | np.integer[Any], lr: LearningRate | None, loss: Tensor | float | None) -> None:
        """A step is done.

        Raises:
            UsageError: it is no step number, or does not increase; a rate or the loss is not one number.
        """
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 1:
            raise UsageError(f"step={step!r}", "pass the number of optimizer steps done, from 1")
        step = int(step)  # of numpy: SQLite would store it as bytes
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise UsageError(f"the loss has shape {tuple(loss.shape)}", "pass the mean, one number")
        if self.last is not None and step <= self.last:
            raise UsageError(
                f"step {step} after step {self.last}: steps increase within an attempt",
                "after going back to a checkpoint attach again with resume=True",
            )
        if self.first is None:
            self._rates = _rates(lr)  # which waits for a device tensor: once a record
            self.first = step if self.last is None else self.last + 1
        if self._begin is None:
            self._begin = step
        self.last = step
        if loss is not None:
            self._loss = self._loss + (loss.detach().float() if isinstance(loss, Tensor) else float(loss))
            self._losses += 1

    def evaluated(self) -> None:
        """A router fired in evaluation, after the last step told."""
        self._eval = [*self._eval[:1], self.last]

    def steps_since_cut(self) -> int:
        return 0 if self.first is None or self.last is None else self.last - self.first + 1

    def cut(self) -> Span:
        """The steps of the record that ends here; forwards after the last step belong to the next one."""
        done = self.last or 0
        first = done + 1 if self.first is None else self.first
        train = Steps(first, max(first, done), self.first is not None, *self._rates)
        before = (self._begin or 1) - 1  # evaluation before the first step of this attempt
        evals = [before if step is None else step for step in self._eval or [done]]
        span = Span(train, Steps(evals[0], evals[-1], False), self._loss, self._losses)
        self.first, self._rates = None, (None, None)
        self._eval, self._loss, self._losses = [], 0.0, 0
        return span


def _rates(lr: LearningRate | None) -> tuple[float | None, float | None]:
    """Learning rate of all parameters and of the router's."""
    try:
        if isinstance(lr, Mapping):
            every, router = lr.get("all"), lr.get("router")
            return None if every is None else float(every), None if router is None else float(router)
        return (None if lr is None else float(lr)), None
    except (TypeError, ValueError):
        raise UsageError(f"lr={lr!r}", 'pass a number, or {"all": ..., "router": ...}') from None
