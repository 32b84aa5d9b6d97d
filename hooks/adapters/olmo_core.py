"""OLMo-core 3.0.0, both stacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from moe_audit.hooks.adapters.base import Adapter, Observation, register
from moe_audit.hooks.adapters.form import by_form
from moe_audit.store import LayerInfo


@register
class OlmoCoreRouter(Adapter):
    """First stack: (weights, ids, counts, loss or None). No scores leave the router."""

    classes = ("olmo_core.nn.moe.router.MoERouter",)

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        mlp = getattr(parent, "experts", None)
        return LayerInfo(
            -1,
            name,
            module.num_experts,
            module.top_k,
            getattr(mlp, "capacity_factor", None),
            str(module.gating_function),
        )

    def observe(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Observation | None:
        return by_form(output[:2], module.num_experts, module.top_k, type(module).__name__)


@register
class OlmoCoreRouterV2(OlmoCoreRouter):
    """Second stack: (weights, ids, counts, (scores, logits, ...)).

    The router of shared experts is of the same class. It only mixes them, with scores and without a choice
    (scores_only=True), and is left out.
    """

    classes = ("olmo_core.nn.moe.v2.router.MoERouterV2",)

    def find(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, module in super().find(model):
            if name.rpartition(".")[2] != "shared_experts_router":
                yield name, module

    def observe(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Observation | None:
        weights, indices, _, losses_of = output
        if indices is None:
            return None
        logits = losses_of[1]
        return by_form(
            (weights, indices, logits), module.num_experts, module.top_k, type(module).__name__, "logits"
        )
