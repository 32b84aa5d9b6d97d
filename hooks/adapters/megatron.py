"""Megatron-core, by the documented output form of 0.19.2 (the package is not needed, nor tested against)."""

from __future__ import annotations

from typing import Any

from moe_audit.hooks.adapters.base import NO_PICK, Adapter, Observation, register
from moe_audit.hooks.adapters.form import check_map, local
from moe_audit.store import LayerInfo
from moe_audit.thresholds.errors import UsageError


@register
class MegatronRouter(Adapter):
    """Returns (probs T,E with zeros, bool map T,E), tokens in sequence-major order.

    With a capacity factor the map is what is left after the drop: the layer is tagged `post_drop`, its unused
    slots are the dropped assignments, and no demand per expert is known.
    """

    classes = ("megatron.core.transformer.moe.router.TopKRouter",)

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        config = module.config
        if getattr(config, "moe_pad_expert_input_to_capacity", False):
            raise UsageError(
                f"{name}: with moe_pad_expert_input_to_capacity Megatron's routing map also marks padding, "
                "so it does not say which expert a token chose",
                "turn that option off for the runs to audit",
            )
        capacity = config.moe_expert_capacity_factor
        number = -1 if module.layer_number is None else module.layer_number - 1
        if number >= 0 and getattr(module, "is_mtp_layer", False):  # numbered from 1 again
            number += config.num_layers
        return LayerInfo(
            number,
            name,
            config.num_moe_experts,
            config.moe_router_topk,
            capacity,
            getattr(config, "moe_router_score_function", None),
            () if capacity is None else ("post_drop",),
        )

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        experts, top_k = module.config.num_moe_experts, module.config.moe_router_topk
        probs_TE, chosen_TE = output
        chosen_TE = check_map(chosen_TE, experts, "Megatron TopKRouter")
        marked_TK, indices_TK = chosen_TE.byte().topk(top_k, dim=-1)
        weights_TK = local(probs_TE).reshape(-1, experts).gather(-1, indices_TK)
        indices_TK = indices_TK.masked_fill(marked_TK == 0, NO_PICK)
        return Observation(indices_TK, weights_TK, layout="sequence")
