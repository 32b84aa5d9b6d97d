"""Configuration of a router, and the base of the layer's configuration classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from moe_audit.thresholds.errors import UsageError

DTypeName = Literal["float32", "bfloat16", "float16"]


class ConfigError(UsageError):
    """An invalid setting.

    Args:
        field: Name of the setting, with the configuration class in front.
        value: The value that was given.
        rule: What a valid value looks like.
    """

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} = {value!r}: {rule}")
        self.field = field
        self.value = value
        self.rule = rule


class Config(BaseModel):
    """Base of the configuration classes: unknown fields and wrong types are `ConfigError`s as well."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _one_error(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join([cls.__name__, *(str(part) for part in first["loc"])])
            value = None if first["type"] == "missing" else first["input"]
            raise ConfigError(field, value, first["msg"]) from None
        except ConfigError as error:
            if "." in error.field or not isinstance(data, Mapping):
                raise
            # A part of this object is no configuration at all: what it lacks is the name it was given here.
            name = next(name for name, value in data.items() if value is error.value)
            raise ConfigError(f"{cls.__name__}.{name}", error.value, error.rule) from None

    def _require(self, ok: bool, field: str, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{type(self).__name__}.{field}", getattr(self, field), rule)


class RouterOptions(Config):
    """Router settings that do not depend on the layer the router sits in.

    Attributes:
        top_k: Experts per token.
        routing: ``token_choice`` (each token picks k experts) or ``expert_choice`` (each expert picks
            T*k/E tokens; not causal, so not for generating text).
        bias: Add a bias to the logits.
        jitter_eps: Multiply the router input by uniform(1-eps, 1+eps) in training.
        normalize_expert_weights: p of the norm that the k weights are divided by; inf: the largest weight.
        gating_function: ``softmax`` over all experts, ``topk_softmax`` over the selected, or ``sigmoid``.
        bias_gamma: Step of the aux-loss-free score bias (sign update after each optimizer step).
        score_correction_bias: A score bias that is used for selection but not updated.
        n_group, topk_group: Only the best topk_group of n_group equal groups of experts can be selected.
        restore_weight_scale: Multiply the weights by k.
        expert_weight_scale: Multiply the weights by this value.
        original_top_k: Multiply the weights by sqrt(original_top_k / top_k): the k it was trained with.
        uniform_expert_assignment, random_expert_assignment: System tests: ignore the scores when selecting.
        sigmoid_stability_epsilon: Added to sigmoid scores.
        tie_break: Equal selection scores go to the lower expert index.
        score_quantization: Grid of the selection scores with `tie_break`, as bits after the binary point
            (the grid is 2**-bits); None keeps every bit.
        temperature: The logits are divided by it.
        dtype: Data type of the router's parameters; logits and scores are fp32 in any case.
    """

    top_k: int = 1
    routing: Literal["token_choice", "expert_choice"] = "token_choice"
    bias: bool = False
    jitter_eps: float | None = None
    normalize_expert_weights: float | None = Field(default=None, allow_inf_nan=True)
    gating_function: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    bias_gamma: float | None = None
    score_correction_bias: bool = False
    n_group: int | None = None
    topk_group: int | None = None
    restore_weight_scale: bool = False
    expert_weight_scale: float | None = None
    original_top_k: int | None = None
    uniform_expert_assignment: bool = False
    random_expert_assignment: bool = False
    sigmoid_stability_epsilon: float = 1e-7
    tie_break: bool = False
    score_quantization: int | None = 14
    temperature: float = 1.0
    dtype: DTypeName = "float32"

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        need = self._require
        need(self.top_k >= 1, "top_k", "must be at least 1")
        need(self.jitter_eps is None or 0 < self.jitter_eps < 1, "jitter_eps", "must be between 0 and 1")
        p = self.normalize_expert_weights
        need(p is None or p > 0, "normalize_expert_weights", "the p of a norm must be positive")
        need(self.bias_gamma is None or self.bias_gamma > 0, "bias_gamma", "must be positive")
        need(self.sigmoid_stability_epsilon >= 0, "sigmoid_stability_epsilon", "must not be negative")
        need(self.temperature > 0, "temperature", "must be positive")
        scale = self.expert_weight_scale
        need(scale is None or scale > 0, "expert_weight_scale", "must be positive")
        k = self.original_top_k
        need(k is None or k >= 1, "original_top_k", "must be at least 1")
        bits = self.score_quantization
        need(bits is None or 1 <= bits <= 23, "score_quantization", "must be between 1 and 23 bits")
        grouped = self.n_group is not None
        need(
            grouped == (self.topk_group is not None),
            "topk_group" if grouped else "n_group",
            "n_group and topk_group must be set together",
        )
        need(self.n_group is None or self.n_group >= 1, "n_group", "must be at least 1")
        if self.n_group is not None and self.topk_group is not None:
            need(
                1 <= self.topk_group <= self.n_group, "topk_group", f"must be in 1..n_group = {self.n_group}"
            )
        if self.gating_function == "topk_softmax":
            need(not grouped, "n_group", "groups need gating_function softmax or sigmoid, not topk_softmax")
            need(
                not self.random_expert_assignment,
                "random_expert_assignment",
                "needs gating_function softmax or sigmoid: topk_softmax selects by the logits",
            )
        need(
            not (self.uniform_expert_assignment and self.random_expert_assignment),
            "random_expert_assignment",
            "cannot be combined with uniform_expert_assignment",
        )
        if self.routing == "expert_choice":
            need(not grouped, "n_group", "expert_choice has no groups: every expert picks its own tokens")
            need(self.bias_gamma is None, "bias_gamma", "expert_choice is balanced by construction")
            need(not self.score_correction_bias, "score_correction_bias", "expert_choice has no score bias")
            need(not self.tie_break, "tie_break", "expert_choice compares tokens, not experts")
            need(
                not (self.uniform_expert_assignment or self.random_expert_assignment),
                "routing",
                "uniform and random assignment need token_choice",
            )
            need(
                self.gating_function != "topk_softmax", "gating_function", "expert_choice has no top-k logits"
            )
        return self

    def for_layer(self, d_model: int, num_experts: int) -> RouterConfig:
        """The complete configuration for a layer of this width and number of experts."""
        given = self.model_dump()
        for field, value in (("d_model", d_model), ("num_experts", num_experts)):
            if given.setdefault(field, value) != value:
                raise ConfigError(f"RouterConfig.{field}", given[field], f"the layer has {field} = {value}")
        return RouterConfig(**given)


class RouterConfig(RouterOptions):
    """A router that is ready to build: `RouterOptions` with the width and the number of experts."""

    d_model: int
    num_experts: int
    top_k: int

    @model_validator(mode="after")
    def _check_layer(self) -> Self:
        need = self._require
        need(self.d_model >= 1, "d_model", "must be at least 1")
        need(self.num_experts >= 1, "num_experts", "must be at least 1")
        check_selection(self, self.num_experts)
        return self

    def num_params(self) -> int:
        """Number of parameters: d*E, and E more with a bias."""
        return self.num_experts * (self.d_model + self.bias)


def check_selection(router: RouterOptions, num_experts: int) -> None:
    need = router._require
    need(router.top_k <= num_experts, "top_k", f"must be in 1..num_experts = {num_experts}")
    if router.n_group is not None and router.topk_group is not None:
        need(num_experts % router.n_group == 0, "n_group", f"must divide num_experts = {num_experts}")
        reach = router.topk_group * (num_experts // router.n_group)
        need(router.top_k <= reach, "top_k", f"only {reach} experts are in the selected groups")
