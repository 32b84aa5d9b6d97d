"""torchtitan 0.3.0: token-choice routers; ids and scores may be DTensors, 3-D here and 2-D later."""

from __future__ import annotations

from typing import Any

from moe_audit.hooks.adapters.base import Adapter, Observation, register
from moe_audit.hooks.adapters.form import by_form
from moe_audit.store import LayerInfo


@register
class TorchtitanRouter(Adapter):
    """Returns (weights, ids, scores after softmax or sigmoid)."""

    classes = ("torchtitan.models.common.moe.TokenChoiceTopKRouter",)

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        return LayerInfo(-1, name, module.num_experts, module.top_k, gating=module.score_func)

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        return by_form(output, module.num_experts, module.top_k, type(module).__name__, "probs")
