"""Hugging Face transformers 5.x.

A model class names its router class in `_can_record_outputs`. Most of them return (logits, weights, ids) for
T tokens in batch-major order and share one adapter; the others have one each below, or a refusal. Experts
whose router is not known are observed by their own arguments (hidden states, ids, weights).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

from torch import nn

from moe_audit.hooks.adapters.base import Adapter, Observation, class_name, is_a, register
from moe_audit.hooks.adapters.form import (
    EXPERT_COUNTS,
    by_form,
    check_indices,
    expert_count,
    local,
    number,
    pick_count,
)
from moe_audit.store import LayerInfo
from moe_audit.thresholds.errors import UsageError

# Families whose gate is a sigmoid of each logit, or a softmax over the experts. Of others only the choice is
# read, no probabilities.
SIGMOID = (
    "afmoe axk1 axk2 bailing_hybrid beam deepseek_v3 deepseek_v32 dots1 dots3_note exaone_moe flint glm4_moe "
    "glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa hy_v3 hy_v4 hy_v4_vl inkling kimi_linear kolibri1 laguna "
    "lfm2_moe llama4 mimo_v2_flash minimax_m2 minimax_m3_vl muse_spark nemotron_h solar_open step3p7"
)
SOFTMAX = (
    "aria deepseek_ocr2 deepseek_v2 ernie4_5_moe flex_olmo gpt_oss granitemoe granitemoe_swa "
    "granitemoehybrid granitemoeshared hunyuan_v1_moe jamba jetmoe lara_mini mellum minimax mistral4 "
    "mistral_large4 mixtral olmoe openai_privacy_filter phimoe qwen2_moe qwen3_5_moe qwen3_moe qwen3_next "
    "qwen3_omni_moe qwen3_vl_moe qwen4_exp unlimited_ocr"
)
GATES = dict.fromkeys(SIGMOID.split(), "sigmoid") | dict.fromkeys(SOFTMAX.split(), "softmax")
# How modules of experts call the ids and weights that they take behind the hidden states.
EXPERT_ARGUMENTS = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
# From here on the common form holds in all families. Before, some returned probabilities as the first element
# (Mixtral, 5.0) or logits alone (DeepSeek-V3 to 5.9, GLM-4V to 5.12): their experts are observed instead.
SETTLED = (5, 23)


def version() -> tuple[int, int]:
    """Major and minor version of the loaded transformers package; (0, 0) if none is loaded."""
    package = sys.modules.get("transformers")
    parts = getattr(package, "__version__", "0.0").split(".")
    return int(parts[0]), int(parts[1])


def family(module: nn.Module) -> str:
    """`mixtral` of `transformers.models.mixtral.modeling_mixtral.MixtralTopKRouter`; "" for other classes."""
    for base in type(module).__mro__:
        parts = base.__module__.split(".")
        if parts[:2] == ["transformers", "models"] and len(parts) > 2:
            return parts[2]
    return ""


def modeling(package: str, *classes: str) -> tuple[str, ...]:
    """Qualified names of classes of one model family."""
    return tuple(f"transformers.models.{package}.modeling_{package}.{name}" for name in classes)


def router_classes(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that the model, or one inside it, names in `_can_record_outputs["router_logits"]`."""
    for root_name, root in model.named_modules():
        recorded = getattr(root, "_can_record_outputs", None) or {}
        specs = recorded.get("router_logits", ())
        for spec in specs if isinstance(specs, list | tuple) else (specs,):
            target: Any = getattr(spec, "target_class", spec)
            for name, module in root.named_modules():
                if target is not None and isinstance(module, target):
                    yield f"{root_name}.{name}".strip("."), module


class TransformersAdapter(Adapter):
    """Base: E, K and the gate from the module and the block around it."""

    kind: ClassVar[Literal["logits", "probs"] | None] = "logits"

    def gating(self, module: Any) -> str | None:
        """The function that makes probabilities of logits; None: not known."""
        chosen: str | None = getattr(module, "expert_selection_fn", None)  # Cohere2
        return chosen or GATES.get(family(module))

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        more = (parent, getattr(parent, "config", None))
        experts = expert_count(module, *more)
        return LayerInfo(-1, name, experts, pick_count(module, *more), gating=self.gating(module))


@register
class TransformersExperts(TransformersAdapter):
    """Fallback: any module that takes (hidden_states, top_k_index, top_k_weights); the ids are global."""

    hook = "pre"
    fallback = True

    def match(self, module: nn.Module) -> bool:
        """Whether the forward takes ids and weights of experts."""
        return self._arguments(module) in EXPERT_ARGUMENTS

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        """The layer. Experts that are split over ranks count their own; the router beside them counts all."""
        info = super().describe(name, module, parent)
        beside = number((self.router(module, parent),), EXPERT_COUNTS)
        return info if beside is None else replace(info, num_experts=beside)

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        indices, weights = (
            kwargs[name] if name in kwargs else args[place]
            for place, name in enumerate(self._arguments(module), start=1)
        )
        indices_TK = check_indices(indices, expert_count(module), None, class_name(module))
        weights = local(weights).reshape(len(indices_TK), -1)
        if weights.shape != indices_TK.shape:  # one for every expert, zero where not chosen (PhiMoE in 5.0)
            weights = weights.gather(-1, indices_TK)
        return Observation(indices_TK, weights)

    @staticmethod
    def _arguments(module: nn.Module) -> tuple[str, ...]:
        return tuple(inspect.signature(type(module).forward).parameters)[2:4]


@register
class TransformersRouter(TransformersAdapter):
    """(logits T,E; weights T,k; ids T,k), the form of 66 of 77 router classes in 5.24."""

    def match(self, module: nn.Module) -> bool:
        """Whether E and K of a settled router are known; others are left to the experts behind."""
        known = number((module, getattr(module, "config", None)), EXPERT_COUNTS) and pick_count(module)
        return version() >= SETTLED and bool(known)

    def find(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The routers that the model names."""
        for name, module in router_classes(model):
            if self.match(module) and not is_a(module, *modeling("jetmoe", "JetMoeTopKGating")):
                yield name, module

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        top_k = cast("int", pick_count(module))
        kind = self.kind if self.kind == "probs" or self.gating(module) else None
        return by_form(output, expert_count(module), top_k, class_name(module), kind)


class SpecialRouter(TransformersRouter):
    """Base of close relatives of the common form, found by their class."""

    def match(self, module: nn.Module) -> bool:
        """Whether `module` is of one of the classes, in a version where their form has settled."""
        return version() >= SETTLED and is_a(module, *self.classes)

    find = Adapter.find


@register
class ProbabilityRouter(SpecialRouter):
    """(probabilities T,E; weights T,k; ids T,k)."""

    classes = modeling("gemma4", "Gemma4TextRouter") + modeling("diffusion_gemma", "DiffusionGemmaTextRouter")
    kind = "probs"


@register
class ScoreFunctionRouter(SpecialRouter):
    """The common form, with a gate of the router's own: its scores are taken, not its logits."""

    classes = (
        modeling("deepseek_v4", "DeepseekV4TopKRouter")
        + modeling("inkling2", "Inkling2TopKRouter")
        + modeling("inkling2_loop", "Inkling2LoopTopKRouter")
    )

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        seen = by_form(output, module.num_experts, module.top_k, class_name(module), "logits")
        scores = None if seen.full_TE is None else module.score_fn(seen.full_TE)
        return seen._replace(full_TE=scores, full_kind=None if scores is None else "probs")


@register
class LongcatFlashRouter(SpecialRouter):
    """The common form; its ids go on past the experts: those have no weights and return their input.

    They are chosen like the others, so they are counted like the others.
    """

    classes = modeling("longcat_flash", "LongcatFlashTopkRouter")

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        return LayerInfo(
            -1, name, module.n_routed_experts, module.top_k, gating="softmax", tags=("identity_experts",)
        )

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        return by_form(output, module.n_routed_experts, module.top_k, class_name(module), "logits")


@register
class ZayaRouter(TransformersAdapter):
    """(logits T,E+1; weights; ids; states). Id E is "skip this layer"; the output has expert 0, weight 0."""

    classes = modeling("zaya", "ZayaRouter")

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        return LayerInfo(
            -1, name, module.num_router_classes, module.top_k, gating="softmax", tags=("identity_experts",)
        )

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        seen = by_form(output[:3], module.num_router_classes, module.top_k, class_name(module), "logits")
        skipped = local(output[1]).reshape(seen.indices_TK.shape) == 0
        return seen._replace(indices_TK=seen.indices_TK.masked_fill(skipped, module.num_experts))


@register
class Llama4Router(TransformersAdapter):
    """(sigmoid scores T,E, zero where not chosen; logits T,E): the choice is the top-k of the logits."""

    classes = modeling("llama4", "Llama4Router")

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        scores, logits = (local(x).reshape(-1, module.num_experts) for x in output)
        indices_TK = logits.topk(module.top_k, dim=-1).indices
        return Observation(indices_TK, scores.gather(-1, indices_TK), logits, "logits")


@register
class SortingRouter(TransformersAdapter):
    """(order, rows, weights, sizes, logits T,E), all but the logits sorted by expert: top-k of the logits.

    JetMoe has routers of this class in its attention too. Those choose heads, not experts of a feed-forward
    layer, and are left out.
    """

    classes = (
        modeling("jetmoe", "JetMoeMoE")
        + modeling("granitemoe", "GraniteMoeMoE")
        + modeling("granitemoehybrid", "GraniteMoeHybridMoE")
        + modeling("granitemoeshared", "GraniteMoeSharedMoE")
    )
    sorting = re.compile(r"TopKGating$")

    def find(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The routers of the feed-forward layers."""
        for name, block in super().find(model):
            router = getattr(block, "router", None)
            if router is not None and self.sorting.search(type(router).__name__):
                yield f"{name}.router", router

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        logits = local(output[4])
        return Observation(logits.topk(module.top_k, dim=-1).indices, full_TE=logits, full_kind="logits")


@register
class SwitchRouter(TransformersAdapter):
    """(one-hot of what is kept B,S,E; best probability; logits B,S,E): top-1 with a capacity per sequence."""

    classes = modeling("switch_transformers", "SwitchTransformersTop1Router")

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        """The layer.

        Raises:
            UsageError: A version that hands out nothing about the dropped tokens.
        """
        if (5, 0) <= version() < SETTLED:
            raise UsageError(
                f"{name} cannot be recorded: before transformers 5.23 no logits leave it, and what a dropped "
                "token had chosen is not seen",
                "use transformers 5.23 or later, or 4.57",
            )
        return LayerInfo(-1, name, module.num_experts, 1, gating="softmax")

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        dispatched, weights, logits = (local(x).reshape(-1, x.shape[-1]) for x in output)
        # Rounded as the router rounds: in bf16 equal probabilities are frequent, and the first one wins.
        probs = logits.softmax(-1, dtype=module.dtype).to(module.input_dtype)
        kept_TK = dispatched.sum(-1, keepdim=True) > 0
        return Observation(probs.argmax(-1, keepdim=True), weights, logits, "logits", kept_TK)


@register
class DogeRouter(TransformersAdapter):
    """Whole block, (hidden states, logits 2,T,sqrt(E)): the best sums of a row and a column logit."""

    classes = modeling("doge", "DogeCDMoE")

    def router(self, module: Any, parent: nn.Module) -> nn.Module:
        """The linear layer inside the block."""
        gate: nn.Module = module.router_gate
        return gate

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        (rows, columns), (row_ids, column_ids) = local(output[1]).topk(module.num_keys, dim=-1)
        sums = (rows.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(-2)
        ids = (row_ids.unsqueeze(-1) * module.num_keys + column_ids.unsqueeze(-2)).flatten(-2)
        return Observation(ids.gather(-1, sums.topk(module.top_k, dim=-1).indices))


REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        modeling("nllb_moe", "NllbMoeTop2Router"),
        (
            "its output holds only the first of the two choices, after the capacity drop",
            "record another model, or a router of your own through FunctionAdapter",
        ),
    ),
    **dict.fromkeys(
        modeling("ernie4_5_vl_moe", "Ernie4_5_VLMoeMoeBlock", "Ernie4_5_VL_MoeMoeBlock"),
        (
            "text and image tokens are split up before they are routed, so no token can be told its source",
            "give Recorder.attach an adapter for Ernie4_5_VLMoeMoeTopKRouter and microbatches of text alone",
        ),
    ),
    "transformers.integrations.mxfp4.Mxfp4GptOssMLP": (
        "the MXFP4 kernels route by themselves and never call the router",
        "load the model with quantization_config=Mxfp4Config(dequantize=True)",
    ),
}


@register
class RefusedRouter(Adapter):
    """Routers whose choice cannot be seen from outside, each with its reason."""

    classes = tuple(REFUSED)

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        """Always raises.

        Raises:
            UsageError: Why not, and what to do.
        """
        for qualified, (reason, remedy) in REFUSED.items():
            if is_a(module, qualified):
                raise UsageError(
                    f"{name} ({qualified.rpartition('.')[2]}) cannot be recorded: {reason}", remedy
                )
        raise AssertionError(class_name(module))

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        return None
