"""The learning-rate override: frozen means bit-equal, and the schedule never notices (case C70's kind)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as S

from moe_audit.hooks.learning_rate import LearningRateOverride
from moe_audit.thresholds.errors import UsageError

STEPS, FREEZE = 30, range(10, 20)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda g: torch.optim.AdamW(g, lr=0.1, weight_decay=0.1),
    "sgd_momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rprop": lambda g: torch.optim.Rprop(g, lr=0.1),
    "adamw_tensor_lr": lambda g: torch.optim.AdamW(g, lr=torch.tensor(0.1), foreach=False),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: S.LambdaLR(o, lambda s: min(1.0, (s + 1) / 5)),
    "step": lambda o: S.StepLR(o, 7, 0.5),
    "exponential": lambda o: S.ExponentialLR(o, 0.95),
    "cosine": lambda o: S.CosineAnnealingLR(o, STEPS),
    "linear": lambda o: S.LinearLR(o, 0.2, 1.0, 15),
    "one_cycle": lambda o: S.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
    "plateau": lambda o: S.ReduceLROnPlateau(o, patience=2),
    "sequential": lambda o: S.SequentialLR(o, [S.ConstantLR(o, 0.5, 12), S.ExponentialLR(o, 0.9)], [12]),
}


def train(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], Any],
    action: str | None,
    resume_at: int | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Weights of router and body after each step, and the scheduled learning rate before each step."""
    torch.manual_seed(0)
    router, body = nn.Linear(4, 3), nn.Linear(3, 4)
    optimizer = make_optimizer([{"params": body.parameters()}, {"params": router.parameters()}])
    scheduler = make_scheduler(optimizer)

    def override() -> LearningRateOverride:
        assert action in ("hold", "scale", "zero_router")
        return LearningRateOverride(optimizer, action, router_parameters=router.parameters())  # type: ignore[arg-type]

    control = override() if action else None
    routers, bodies, rates = [], [], []
    for step in range(STEPS):
        rates.append(float(optimizer.param_groups[1]["lr"]))
        if control and step == FREEZE.start:
            control.start()
        if control and step == FREEZE.stop:
            control.stop()
        if control and step == resume_at:
            state = control.state_dict()
            control.detach()
            control = override()
            control.load_state_dict(state)
        loss = body(router(torch.randn(8, 4))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(1.0) if isinstance(scheduler, S.ReduceLROnPlateau) else scheduler.step()
        routers.append(router.weight.detach().clone())
        bodies.append(body.weight.detach().clone())
    return routers, bodies, rates


# Every schedule with the usual optimizers; the odd ones (step sizes of their own, tensor rates) with two.
PAIRS = [(o, s) for o in ("adamw", "sgd_momentum") for s in SCHEDULERS]
PAIRS += [(o, s) for o in ("rprop", "adamw_tensor_lr") for s in ("lambda", "exponential")]


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_zero_router_freezes_bit_for_bit_and_the_schedule_goes_on(optimizer: str, scheduler: str) -> None:
    free = train(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], None)
    frozen = train(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], "zero_router", resume_at=14)
    assert frozen[2] == free[2]
    before = frozen[0][FREEZE.start - 1]
    assert all(torch.equal(frozen[0][s], before) for s in FREEZE)
    assert not torch.equal(frozen[0][FREEZE.stop], before)
    assert not torch.equal(frozen[1][FREEZE.stop - 1], frozen[1][FREEZE.start - 1])  # the body goes on


@pytest.mark.parametrize(("action", "resume_at"), [("hold", None), ("hold", 14), ("scale", 14)])
def test_hold_and_scale_apply_the_stated_rate_in_every_step(action: str, resume_at: int | None) -> None:
    applied: list[float] = []

    def spying(groups: Any) -> torch.optim.Optimizer:
        class Spy(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                applied.append(float(self.param_groups[1]["lr"]))
                return super().step(closure)

        return Spy(groups, lr=0.1)

    rates = train(spying, lambda o: S.CyclicLR(o, 0.01, 0.2, step_size_up=6), action, resume_at)[2]
    expected = list(rates)
    for step in FREEZE:
        expected[step] = min(rates[step], rates[FREEZE.start - 1]) if action == "hold" else rates[step] * 0.1
    assert applied == expected


def test_a_step_that_raises_leaves_the_schedule_alone() -> None:
    p = nn.Parameter(torch.ones(2))

    class Failing(torch.optim.SGD):
        fail = True

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise RuntimeError("boom")
            return super().step(closure)

    optimizer = Failing([p], lr=0.5)
    control = LearningRateOverride(optimizer, "scale", factor=0.0)
    control.start()
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="boom"):
        optimizer.step()
    optimizer.fail = False
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(p.detach(), torch.ones(2))


def test_zero_router_without_a_router_group_is_refused() -> None:
    router, body = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*router.parameters(), *body.parameters()], lr=0.1)
    with pytest.raises(UsageError, match="no parameter group"):
        LearningRateOverride(optimizer, "zero_router", router_parameters=router.parameters())


# -- the ways in which optimizers are used


def frozen_router(make: Callable[[list[nn.Parameter]], Any], **options: Any) -> tuple[nn.Parameter, Any, Any]:
    """A router's weight with a gradient, what `make` makes of it, and an action that is on."""
    p = nn.Parameter(torch.tensor([1.0, -0.0, -2.0]))
    p.grad = torch.ones(3)
    optimizer = make([p])
    control = LearningRateOverride(optimizer, "zero_router", router_parameters=[p], **options)
    control.start()
    return p, optimizer, control


def step_of(optimizer: Any, p: nn.Parameter, form: str) -> None:
    def closure() -> torch.Tensor:
        p.grad = None
        loss = ((p - 3) ** 2).sum()
        loss.backward()
        return loss

    if form == "closure":
        optimizer.step(closure)
    elif form == "closure by name":
        optimizer.step(closure=closure)
    elif form == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        p.grad = None
        scaler.scale(((p - 3) ** 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()


@pytest.mark.parametrize("form", ["plain", "closure", "closure by name", "scaler"])
@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
        lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True, amsgrad=True),
        lambda ps: torch.optim.Rprop(ps, lr=0.1),
        lambda ps: torch.optim.LBFGS(ps, line_search_fn="strong_wolfe"),
    ],
    ids=["fused", "foreach", "rprop", "lbfgs"],
)
def test_every_form_of_a_step_leaves_the_router_bit_equal(make: Any, form: str) -> None:
    p, optimizer, control = frozen_router(make)
    if isinstance(optimizer, torch.optim.LBFGS) and "closure" not in form:
        pytest.skip("LBFGS takes steps with a closure only")
    before = p.detach().clone()
    for _ in range(3):
        step_of(optimizer, p, form)
        assert p.detach().view(torch.int32).equal(before.view(torch.int32))
        assert p.grad is not None  # it can still be logged
    control.stop()
    step_of(optimizer, p, form)
    assert not p.detach().equal(before)


def test_groups_that_come_later_and_optimizers_in_wrappers_are_governed() -> None:
    class Container(torch.optim.Optimizer):  # as torchtitan's: its own groups govern nothing
        def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
            self.optimizers = optimizers
            super().__init__([p for o in optimizers for p in o.param_groups[0]["params"]], {"lr": 0.0})

        def step(self, closure: Any = None) -> None:
            for optimizer in self.optimizers:
                optimizer.step()

    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([early], lr=1.0)
    wrapped = Container([inner])
    control = LearningRateOverride([wrapped], "zero_router", router_parameters=[early, late])
    inner.add_param_group({"params": [late]})
    control.start()
    early.grad = late.grad = torch.ones(2)
    wrapped.step()
    assert early.detach().equal(torch.ones(2)) and late.detach().equal(torch.ones(2))
    with pytest.raises(UsageError, match="no torch optimizer"):
        LearningRateOverride(object(), "hold")  # type: ignore[arg-type]


def test_a_checkpoint_after_a_step_that_raised_has_the_schedules_rate() -> None:
    p, optimizer, control = frozen_router(lambda ps: torch.optim.SGD(ps, lr=0.5))

    def failing() -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(failing)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    control.stop()
    p.grad = torch.full((3,), 2.0)  # of the next backward: what was withheld must not come back
    optimizer.step()
    assert p.detach().tolist() == [0.0, -1.0, -3.0]
