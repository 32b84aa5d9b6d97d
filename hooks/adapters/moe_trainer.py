"""The router of our own trainer, observed where its choice meets the capacity."""

from __future__ import annotations

from typing import Any

from moe_audit.hooks.adapters.base import NO_PICK, Adapter, Observation, register
from moe_audit.store import LayerInfo


@register
class MoeTrainerDispatcher(Adapter):
    """`moe_trainer.moe.dispatch.Dispatcher`: takes the router's output, returns what is kept of it."""

    classes = ("moe_trainer.moe.dispatch.Dispatcher",)

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        config = parent.router.config
        gating = "random" if config.random_expert_assignment else config.gating_function
        return LayerInfo(
            -1,
            name.removesuffix(".dispatcher"),
            config.num_experts,
            None if config.routing == "expert_choice" else config.top_k,
            module.capacity_factor,
            gating,
        )

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        routed = args[0]
        indices_TK = routed.indices_TK
        if module.expert_choice:
            indices_TK = indices_TK.masked_fill(indices_TK == -1, NO_PICK)
        return Observation(
            indices_TK,
            routed.weights_TK,
            routed.logits_TE,
            "logits",
            output.kept_TK,
            gated_TE=routed.scores_TE,
            complete=not module.expert_choice,
        )
