"""Changing the learning rate of optimizer steps from outside, for a while.

The change is made by the optimizer's own step hooks: before a step the learning rate of the governed
parameter groups is replaced, after it the schedule's value is put back. So no scheduler ever sees the
change, whether it computes its value anew or from the last one, and the day the change ends the
schedule is where it would have been.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from moe_audit.thresholds.errors import UsageError

LrAction = Literal["hold", "scale", "zero_router"]
Groups = Literal["all", "router"]
_Rate = float | torch.Tensor


class LearningRateOverride:
    """Overrides the learning rate of some parameter groups while an action is on.

    - `hold`: min(schedule, the value of the last step before the action).
    - `scale`: schedule times `factor`.
    - `zero_router`: 0 for the router's groups. Their gradients are withheld from the step as well: some
      optimizers keep step sizes of their own (Rprop), and -0.0 + 0.0 is not -0.0, so that a learning rate
      of 0 alone does not leave every weight bit-equal.

    Args:
        optimizers: one optimizer, or all that train the model.
        action: see above.
        groups: which groups `hold` and `scale` govern; `zero_router` always governs the router's.
        router_parameters: the parameters of the observed routers.
        factor: for `scale`, between 0 and 1.

    Raises:
        UsageError: a router's group is asked for and none holds router parameters only.
    """

    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        action: LrAction,
        groups: Groups = "all",
        router_parameters: Iterable[torch.nn.Parameter] = (),
        factor: float = 0.1,
    ) -> None:
        if not 0 <= factor < 1:
            raise UsageError(f"factor is {factor}", "`scale` takes a factor from 0 up to, not including, 1")
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self.action = action
        self.factor = factor
        self.active = False
        only_router = action == "zero_router" or groups == "router"
        self._governed = self._find_groups(only_router, {id(p) for p in router_parameters})
        self._last: dict[int, _Rate] = {}  # by index of the governed group: the rate of the last step
        self._held: dict[int, _Rate] = {}
        self._scheduled: dict[int, _Rate] = {}  # what to put back; empty outside a step
        self._withheld: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._handles = [o.register_step_pre_hook(self._before_step) for o in self.optimizers]
        self._handles += [o.register_step_post_hook(self._after_step) for o in self.optimizers]

    def start(self) -> None:
        """From the next optimizer step on the action is applied."""
        self._held = {i: self._last.get(i, _copy(self._group(i)["lr"])) for i in range(len(self._governed))}
        self.active = True

    def stop(self) -> None:
        """From the next optimizer step on the schedule's value applies again."""
        self.active = False

    def detach(self) -> None:
        """Removes the hooks from the optimizers."""
        for handle in self._handles:
            handle.remove()

    def rate(self, group: dict[str, Any]) -> float:
        """The learning rate that a parameter group's next step is taken with."""
        for i in range(len(self._governed)):
            if self.active and self._group(i) is group:
                return float(self._overridden(i, group["lr"]))
        return float(group["lr"])

    def applied(self) -> list[float]:
        """The learning rates of the last step of each governed group."""
        return [float(self._last.get(i, self._group(i)["lr"])) for i in range(len(self._governed))]

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"active": self.active, "held": [float(self._held[i]) for i in sorted(self._held)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues an action that a checkpoint was taken in."""
        if state["held"] and len(state["held"]) != len(self._governed):
            raise UsageError(
                f"the saved learning-rate action governs {len(state['held'])} parameter groups,"
                f" this one {len(self._governed)}",
                "resume with the optimizer groups of the run that was saved",
            )
        self.active = bool(state["active"])
        self._held = dict(enumerate(state["held"]))

    def _find_groups(self, only_router: bool, router_ids: set[int]) -> list[tuple[int, int]]:
        governed = [
            (o, g)
            for o, optimizer in enumerate(self.optimizers)
            for g, group in enumerate(optimizer.param_groups)
            if not only_router or (group["params"] and all(id(p) in router_ids for p in group["params"]))
        ]
        if not governed:
            raise UsageError(
                "no parameter group of the optimizer holds router parameters alone",
                'give the routers their own group, or use action="hold" or "scale" with groups="all"',
            )
        return governed

    def _group(self, i: int) -> dict[str, Any]:
        o, g = self._governed[i]
        return self.optimizers[o].param_groups[g]

    def _groups_of(self, optimizer: Optimizer) -> list[tuple[int, dict[str, Any]]]:
        return [
            (i, self._group(i)) for i, (o, _) in enumerate(self._governed) if self.optimizers[o] is optimizer
        ]

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore(optimizer)  # a step that raised left its override behind
        for i, group in self._groups_of(optimizer):
            if self.active:
                # A new object, never in place: groups may share one tensor, and the schedule owns it.
                self._scheduled[i] = group["lr"]
                group["lr"] = self._overridden(i, group["lr"])
                if self.action == "zero_router":
                    self._withhold(group["params"])
            self._last[i] = _copy(group["lr"])

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore(optimizer)

    def _overridden(self, i: int, scheduled: _Rate) -> _Rate:
        if self.action == "zero_router":
            return scheduled * 0.0
        if self.action == "scale":
            return scheduled * self.factor
        held = self._held[i]
        if isinstance(scheduled, torch.Tensor):
            return torch.minimum(
                scheduled, torch.as_tensor(held, dtype=scheduled.dtype, device=scheduled.device)
            )
        return min(scheduled, float(held))

    def _withhold(self, params: Sequence[torch.nn.Parameter]) -> None:
        for p in params:
            if p.grad is not None:
                self._withheld.append((p, p.grad))
                p.grad = None

    def _restore(self, optimizer: Optimizer) -> None:
        for i, group in self._groups_of(optimizer):
            if i in self._scheduled:
                group["lr"] = self._scheduled.pop(i)
        for p, grad in self._withheld:
            p.grad = grad
        self._withheld.clear()


def _copy(rate: _Rate) -> _Rate:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate
