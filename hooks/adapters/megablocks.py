"""megablocks, by the documented output form of 0.10.0 (the package is not needed, nor tested against)."""

from __future__ import annotations

from typing import Any

from moe_audit.hooks.adapters.base import Adapter, Observation, register
from moe_audit.hooks.adapters.form import by_form
from moe_audit.store import LayerInfo


@register
class MegablocksRouter(Adapter):
    """Returns (probabilities T,E; weights T,k; ids T,k, or T for top-1).

    The layers take (S, B, D), so tokens are sequence-major. The ids are the demand: what exceeds
    `moe_capacity_factor` is dropped later, unseen.
    """

    classes = ("megablocks.layers.router.LearnedRouter",)

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        args = module.args
        dropless = any(base.__name__ == "dMoE" for base in type(parent).__mro__)
        capacity = None if dropless else getattr(args, "moe_capacity_factor", None) or None
        return LayerInfo(-1, name, args.moe_num_experts, args.moe_top_k, capacity, "softmax")

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        probs, weights, indices = output
        top_k = module.args.moe_top_k
        if top_k == 1:
            weights, indices = weights.reshape(-1, 1), indices.reshape(-1, 1)
        seen = by_form(
            (probs, weights, indices), module.args.moe_num_experts, top_k, "LearnedRouter", "probs"
        )
        return seen._replace(layout="sequence")
