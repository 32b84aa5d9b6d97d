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
