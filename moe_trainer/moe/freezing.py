"""Fine-tuning with parts of a layer frozen.

Freeze the router with `layer.router.requires_grad_(False)`: its score bias stands still as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_trainer.moe.config import ConfigError
from moe_trainer.moe.layer import MoE


class FrozenExperts:
    """Keeps chosen experts bit-equal through every optimizer step.

    The experts of a layer share one tensor, and momentum and weight decay move what has no gradient: their
    values are put back after each step.

    Args:
        layers: MoE layers.
        experts: Indices of the experts to freeze in each of them.
        optimizer: The optimizer that holds their parameters.

    Raises:
        ConfigError: An index is not that of an expert.
    """

    def __init__(
        self, layers: Iterable[MoE], experts: Sequence[int], optimizer: torch.optim.Optimizer
    ) -> None:
        self.rows: list[tuple[Tensor, Tensor]] = []
        for layer in layers:
            count = layer.config.num_experts
            for index in experts:
                if type(index) is not int or not 0 <= index < count:
                    raise ConfigError("frozen experts", index, f"must be in 0..{count - 1}")
            for parameter in layer.experts.parameters():
                frozen = torch.tensor(list(experts), dtype=torch.int64, device=parameter.device)
                self.rows.append((parameter, frozen))
        self._values: list[Tensor] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._keep),
            optimizer.register_step_post_hook(self._restore),
        ]

    def _keep(self, *_: Any) -> None:
        self._values = [parameter.detach()[frozen] for parameter, frozen in self.rows]

    @torch.no_grad()
    def _restore(self, *_: Any) -> None:
        for (parameter, frozen), values in zip(self.rows, self._values, strict=True):
            parameter[frozen] = values
        self._values = []

    def release(self) -> None:
        """Let the experts train again."""
        for hook in self._hooks:
            hook.remove()
