"""Changing the learning rate of optimizer steps from outside, for a while.

The change is made by the optimizer's own step hooks: before a step the learning rate of the governed
parameter groups is replaced, after it the schedule's value is put back. So no scheduler ever sees the
change, whether it computes its value anew or from the last one, and the day the change ends the
schedule is where it would have been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from moe_audit.thresholds.errors import UsageError

LrAction = Literal["hold", "scale", "zero_router"]
Groups = Literal["all", "router"]
_Rate = float | torch.Tensor


@dataclass
class _Step:
    """What was replaced for one step of one optimizer, to be put back."""

    rates: list[tuple[dict[str, Any], _Rate]] = field(default_factory=list)
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = field(default_factory=list)

    def withhold(self, params: Sequence[torch.nn.Parameter]) -> None:
        for p in params:
            if p.grad is not None:
                self.gradients.append((p, p.grad))
                p.grad = None


class LearningRateOverride:
    """Overrides the learning rate of some parameter groups while an action is on.

    - `hold`: min(schedule, the value of the last step before the action).
    - `scale`: schedule times `factor`.
    - `zero_router`: 0 for the router's groups. Their gradients are withheld from the step as well: some
      optimizers keep step sizes of their own (Rprop), and -0.0 + 0.0 is not -0.0, so that a learning rate
      of 0 alone does not leave every weight bit-equal.

    Groups that are added to an optimizer later are governed as well.

    Args:
        optimizers: one optimizer, or all that train the model; also in a wrapper that has them as
            `optimizer` (accelerate) or `optimizers` (torchtitan).
        action: see above.
        groups: which groups `hold` and `scale` govern; `zero_router` always governs the router's.
        router_parameters: the parameters of the observed routers.
        factor: for `scale`, between 0 and 1.
        may_be_empty: take it that no group is the router's: a pipeline stage without a router.

    Raises:
        UsageError: a router's group is asked for and none holds router parameters only; something that is
            no torch optimizer.
    """

    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        action: LrAction,
        groups: Groups = "all",
        router_parameters: Iterable[torch.nn.Parameter] = (),
        factor: float = 0.1,
        *,
        may_be_empty: bool = False,
    ) -> None:
        if not 0 <= factor < 1:
            raise UsageError(f"factor is {factor}", "`scale` takes a factor from 0 up to, not including, 1")
        self.optimizers = list(_plain(optimizers))
        self.action = action
        self.factor = factor
        self.active = False
        self._only_router = action == "zero_router" or groups == "router"
        self._router_parameters = {id(p): p for p in router_parameters}
        if not may_be_empty and not any(self._governed()):
            raise UsageError(
                "no parameter group of the optimizer holds router parameters alone",
                'give the routers their own group, or use action="hold" or "scale" with groups="all"',
            )
        self._last: dict[str, _Rate] = {}  # by name of the group: the rate of the last step
        self._held: dict[str, _Rate] = {}
        self._steps: dict[int, _Step] = {}  # by id of the optimizer; empty outside a step
        self._handles = []
        for optimizer in self.optimizers:
            self._handles += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_state_dict_pre_hook(self._before_state_dict),
            ]

    def start(self) -> None:
        """From the next optimizer step on the action is applied."""
        self._held = {name: self._last.get(name, _copy(group["lr"])) for name, group in self._governed()}
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
        for name, governed in self._governed():
            if self.active and governed is group:
                return float(self._overridden(name, group["lr"]))
        return float(group["lr"])

    def applied(self) -> list[float]:
        """The learning rates of the last step of each governed group."""
        return [float(self._last.get(name, group["lr"])) for name, group in self._governed()]

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"active": self.active, "held": {name: float(rate) for name, rate in self._held.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues an action that a checkpoint was taken in.

        Raises:
            UsageError: a group that the action governs is not there.
        """
        missing = state["held"].keys() - dict(self._governed()).keys()
        if missing:
            raise UsageError(
                f"the saved learning-rate action governs parameter group {min(missing)}, which is not there"
                " (or not the router's)",
                "resume with the optimizer groups of the run that was saved",
            )
        self.active = bool(state["active"])
        self._held = dict(state["held"])

    def _governed(self, only: Optimizer | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names `optimizer.group` and groups."""
        for o, optimizer in enumerate(self.optimizers):
            if only is None or optimizer is only:
                for g, group in enumerate(optimizer.param_groups):
                    params = group["params"]
                    routers = bool(params) and all(id(p) in self._router_parameters for p in params)
                    if routers or not self._only_router:
                        yield f"{o}.{g}", group

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._clear(optimizer)  # a step that raised left its override behind
        frozen: list[torch.nn.Parameter] = []
        step = _Step()
        for name, group in self._governed(optimizer):
            if self.active:
                # A new object, never in place: groups may share one tensor, and the schedule owns it.
                step.rates.append((group, group["lr"]))
                group["lr"] = self._overridden(name, group["lr"])
                if self.action == "zero_router":
                    frozen += group["params"]
            self._last[name] = _copy(group["lr"])
        if step.rates:
            self._steps[id(optimizer)] = step
        if not frozen:
            return None
        step.withhold(frozen)
        return _with_closure(args, kwargs, lambda: step.withhold(frozen))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        step = self._clear(optimizer)
        if step is not None:
            for p, gradient in step.gradients:
                p.grad = gradient

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self._clear(optimizer)  # a checkpoint after a step that raised has the schedule's rate

    def _clear(self, optimizer: Optimizer) -> _Step | None:
        """Puts the schedule's rates back; gradients of a step that raised are given up."""
        step = self._steps.pop(id(optimizer), None)
        if step is not None:
            for group, rate in step.rates:
                group["lr"] = rate
        return step

    def _overridden(self, name: str, scheduled: _Rate) -> _Rate:
        if self.action == "zero_router":
            return scheduled * 0.0
        if self.action == "scale":
            return scheduled * self.factor
        held = self._held.setdefault(name, _copy(scheduled))
        if isinstance(scheduled, torch.Tensor):
            return torch.minimum(
                scheduled, torch.as_tensor(held, dtype=scheduled.dtype, device=scheduled.device)
            )
        return min(scheduled, float(held))


def _plain(optimizers: Any) -> Iterator[Optimizer]:
    """The torch optimizers that take the steps, out of lists and wrappers."""
    inner = getattr(optimizers, "optimizers", getattr(optimizers, "optimizer", None))
    if inner is not None:
        yield from _plain(inner)
    elif isinstance(optimizers, Optimizer):
        yield optimizers
    elif isinstance(optimizers, Iterable):
        for optimizer in optimizers:
            yield from _plain(optimizer)
    else:
        raise UsageError(
            f"{type(optimizers).__name__} is no torch optimizer", "give the optimizer, or a list of all"
        )


def _with_closure(args: Any, kwargs: Any, after: Callable[[], None]) -> Any:
    """Arguments of `step` whose closure, if there is one, is followed by `after`."""

    def followed(closure: Any) -> Any:
        if closure is None:
            return None

        def run() -> Any:
            loss = closure()
            after()
            return loss

        return run

    if "closure" in kwargs:
        return args, {**kwargs, "closure": followed(kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer
        return (args[0], followed(args[1]), *args[2:]), kwargs
    return None


def _copy(rate: _Rate) -> _Rate:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate
