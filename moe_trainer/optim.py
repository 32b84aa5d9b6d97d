"""AdamW with parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from moe_trainer.config import OptimConfig

# Endings of the names of biases; those of the experts are matrices, a row for each.
BIASES = ("bias", ".b_up_gate", ".b_down")


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups `router`, `experts` and `dense`, each split into matrices and the rest (no weight decay).

    Each group carries its `name`; `<name>.no_decay` are the norms and biases. Router parameters have a
    group of their own so that their learning rate can differ, or be held, alone.
    """
    multipliers = {
        "router": config.router_lr_multiplier,
        "experts": config.expert_lr_multiplier,
        "dense": 1.0,
    }
    members: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        part = part_of(name)
        group = part if parameter.ndim >= 2 and not name.endswith(BIASES) else f"{part}.no_decay"
        members.setdefault(group, []).append(parameter)
    return [
        {
            "name": name,
            "params": parameters,
            "lr": config.lr * multipliers[name.partition(".")[0]],
            "weight_decay": 0.0 if name.endswith(".no_decay") else config.weight_decay,
        }
        for name, parameters in sorted(members.items())
    ]


def part_of(parameter_name: str) -> str:
    """`router`, `experts` or `dense`, by the place of the parameter in the model.

    The router that mixes shared experts counts as `experts`: it sends no token anywhere.
    """
    _, moe, inside = f".{parameter_name}".partition(".moe.")
    if not moe:
        return "dense"
    return "router" if inside.startswith("router.") else "experts"


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`."""
    return torch.optim.AdamW(
        parameter_groups(model, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def schedule_factor(step: int, *, warmup: int, steps: int, min_ratio: float) -> float:
    """Factor on the peak learning rate for the update that follows `step` updates.

    Linear over the first `warmup` updates up to 1, then half a cosine that reaches `min_ratio` at the
    last of the `steps` updates.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, steps: int, done: int = 0
) -> LambdaLR:
    """Warm-up and cosine decay over `steps` updates, of which `done` are made.

    The same factor for every group; it is a pure function of the step, so a resumed run builds its
    scheduler anew and learning rates that were changed for the resume take effect.
    """
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # what LambdaLR asks for when it starts late
    return LambdaLR(
        optimizer,
        lambda step: schedule_factor(
            step, warmup=config.warmup_steps, steps=steps, min_ratio=config.min_lr_ratio
        ),
        last_epoch=done - 1,
    )


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore the moments of every parameter; the groups' settings stay those of the configuration."""
    optimizer.load_state_dict(
        {"state": saved["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    )
