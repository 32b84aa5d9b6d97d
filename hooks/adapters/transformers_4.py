"""Hugging Face transformers 4.57: most gates are plain linear layers, the choice is made in the block around.

Where only logits leave the block, the choice is made again from them, by the same operations. That is wrong
where a bias or groups take part, so those blocks are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_audit.hooks.adapters.base import Adapter, Observation, class_name, register
from moe_audit.hooks.adapters.form import by_form, expert_count, local, pick_count
from moe_audit.hooks.adapters.transformers import TransformersAdapter, modeling, version
from moe_audit.store import LayerInfo
from moe_audit.thresholds.errors import UsageError


class Version4(TransformersAdapter):
    """Base: the class names live on in 5.x with other outputs."""

    def match(self, module: nn.Module) -> bool:
        """Whether `module` is of one of the classes and transformers is 4.x."""
        return version()[0] == 4 and Adapter.match(self, module)


@register
class SoftmaxTopKBlock(Version4):
    """Whole block, (hidden states, logits T,E): softmax in float32, then top-k."""

    classes = (
        modeling("mixtral", "MixtralSparseMoeBlock")
        + modeling("qwen2_moe", "Qwen2MoeSparseMoeBlock")
        + modeling("qwen3_moe", "Qwen3MoeSparseMoeBlock")
        + modeling("qwen3_next", "Qwen3NextSparseMoeBlock")
        + modeling("qwen3_vl_moe", "Qwen3VLMoeTextSparseMoeBlock")
        + modeling(
            "qwen3_omni_moe",
            "Qwen3OmniMoeThinkerTextSparseMoeBlock",
            "Qwen3OmniMoeTalkerTextSparseMoeBlock",
        )
        + modeling("olmoe", "OlmoeSparseMoeBlock")
        + modeling("flex_olmo", "FlexOlmoSparseMoeBlock")
        + modeling("minimax", "MiniMaxSparseMoeBlock")
        + modeling("jamba", "JambaSparseMoeBlock")
    )

    def router(self, module: Any, parent: nn.Module) -> nn.Module:
        """The linear layer inside the block."""
        gate: nn.Module = module.gate if hasattr(module, "gate") else module.router
        return gate

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        logits = local(output[1])
        weights, indices = logits.softmax(-1, dtype=torch.float32).topk(module.top_k, dim=-1)
        return Observation(indices, weights, logits, "logits")


@register
class IdsAndWeights(Version4):
    """(ids T,k; weights T,k), for gates with groups and a bias."""

    classes = (
        modeling("deepseek_v2", "DeepseekV2MoEGate")
        + modeling("deepseek_v3", "DeepseekV3TopkRouter")
        + modeling("dots1", "Dots1TopkRouter")
        + modeling("glm4_moe", "Glm4MoeTopkRouter")
        + modeling("glm4v_moe", "Glm4vMoeTextTopkRouter")
        + modeling("longcat_flash", "LongcatFlashTopkRouter")
    )

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        return by_form(output, expert_count(module), module.top_k, class_name(module))


@register
class GptOssRouter(Version4):
    """(scores T,E with zeros; ids T,k)."""

    classes = modeling("gpt_oss", "GptOssTopKRouter")

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        """One observation.

        Raises:
            UsageError: The package's expert parallelism has cut the output to the experts of this rank.
        """
        if output[0].shape[-1] != module.num_experts:
            raise UsageError(
                f"{class_name(module)} hands out scores of {output[0].shape[-1]} of {module.num_experts}"
                " experts: its ids are those of one rank's experts, and all other picks look alike",
                "load the model without enable_expert_parallel, or use transformers 5.23 or later",
            )
        seen = by_form(output, module.num_experts, module.top_k, class_name(module))
        scores = local(output[0]).reshape(-1, module.num_experts)
        return seen._replace(weights_TK=scores.gather(-1, seen.indices_TK))


@register
class DbrxRouter(Version4):
    """(probabilities T,E; weights T,k; ids T,k)."""

    classes = modeling("dbrx", "DbrxRouter")

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        top_k = pick_count(module) or output[2].shape[-1]
        return by_form(output, expert_count(module), top_k, class_name(module), "probs")


@register
class Refused4(Version4):
    """Blocks that show logits alone although more takes part in the choice."""

    classes = (
        modeling("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock")
        + modeling("phimoe", "PhimoeSparseMoeBlock")
        + modeling("aria", "AriaTextMoELayer")
        + modeling("hunyuan_v1_moe", "HunYuanMoEV1Moe")
    )

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        """Always raises.

        Raises:
            UsageError: Why not, and what to do.
        """
        raise UsageError(
            f"{name} ({type(module).__name__}) cannot be recorded: it shows at most the logits of its "
            "router, and which experts a bias, noise or the block make of them is not seen",
            "use transformers 5.10 or later, where the router returns the chosen experts",
        )

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        return None
