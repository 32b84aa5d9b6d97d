"""Configuration of one mixture-of-experts layer: router, experts, shared experts, latent projections.

Every setting is checked when the object is built; what is wrong is reported as one `ConfigError` that
names the field, the value and the rule. Parameter counts are closed formulas that equal the real tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from moe_trainer.moe.router_config import (
    Config,
    ConfigError,
    DTypeName,
    RouterConfig,
    RouterOptions,
    check_selection,
)

__all__ = [
    "UP_FACTOR",
    "Config",
    "ConfigError",
    "LatentConfig",
    "MoEConfig",
    "RouterConfig",
    "RouterOptions",
    "SharedExpertsConfig",
]

Activation = Literal["swiglu", "gpt_oss_swiglu", "relu2"]
Backend = Literal["auto", "torch", "grouped_gemm", "loop"]

# Columns of the first matmul per hidden unit: value and gate, or the value alone.
UP_FACTOR: dict[str, int] = {"swiglu": 2, "gpt_oss_swiglu": 2, "relu2": 1}

# Bytes of which torch's grouped matmul takes rows in multiples only, and of one value.
_ROW_BYTES = 16
_ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

# Router settings that mean nothing where every expert is used with its plain score.
_OF_SELECTION = (
    "bias_gamma",
    "score_correction_bias",
    "n_group",
    "restore_weight_scale",
    "expert_weight_scale",
    "original_top_k",
    "uniform_expert_assignment",
    "tie_break",
)


class LatentConfig(Config):
    """Routed experts that work in a narrower space: d_model -> latent_dim before, back after.

    Attributes:
        latent_dim: Width L of the experts' space, 0 < L < d_model.
        bias: Biases on both projections.
        norm: RMSNorm (scale only) in front of the up-projection.
        norm_eps: Its epsilon.
    """

    latent_dim: int
    bias: bool = False
    norm: bool = False
    norm_eps: float = 1e-5

    @model_validator(mode="after")
    def _check_latent(self) -> Self:
        self._require(self.latent_dim >= 1, "latent_dim", "must be between 0 and d_model")
        self._require(self.norm_eps > 0, "norm_eps", "must be positive")
        return self

    def check(self, d_model: int) -> None:
        """Raise `ConfigError` unless the latent space is narrower than the model."""
        self._require(self.latent_dim < d_model, "latent_dim", f"must be between 0 and d_model = {d_model}")

    def num_params(self, d_model: int) -> int:
        """2*d*L, biases L + d, norm L."""
        bias = self.latent_dim + d_model if self.bias else 0
        return 2 * d_model * self.latent_dim + bias + (self.latent_dim if self.norm else 0)


class SharedExpertsConfig(Config):
    """Experts that every token passes through. Several are mixed by the dense scores of their own router.

    Attributes:
        num_experts: Number of shared experts.
        hidden_size: Hidden units of each.
        activation, activation_alpha, activation_limit, bias: As for the routed experts.
        router: Options of the router that mixes several (top_k is not used); None: softmax scores.
    """

    num_experts: int = 1
    hidden_size: int = 256
    activation: Activation = "swiglu"
    activation_alpha: float = 1.702
    activation_limit: float | None = None
    bias: bool = False
    router: RouterOptions | None = None

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        self._require(self.num_experts >= 1, "num_experts", "must be at least 1")
        self._require(self.hidden_size >= 1, "hidden_size", "must be at least 1")
        _check_activation(self)
        if self.router is not None:
            need = self.router._require
            need(
                self.router.gating_function != "topk_softmax",
                "gating_function",
                "a router of shared experts gives dense scores; topk_softmax has none",
            )
            need(self.router.routing == "token_choice", "routing", "shared experts see every token")
            for field in _OF_SELECTION:
                value, default = getattr(self.router, field), RouterOptions.model_fields[field].default
                need(value == default, field, "a router of shared experts selects and scales nothing")
            check_selection(self.router, self.num_experts)
            if isinstance(self.router, RouterConfig):
                need(
                    self.router.num_experts == self.num_experts,
                    "num_experts",
                    f"there are {self.num_experts} shared experts",
                )
            self._require(self.num_experts > 1, "router", "one shared expert is added without a router")
        return self

    def router_config(self, d_model: int) -> RouterConfig | None:
        """The router that mixes several shared experts; None for a single one."""
        if self.num_experts == 1:
            return None
        return (self.router or RouterOptions()).for_layer(d_model, self.num_experts)

    def num_params(self, d_model: int) -> int:
        """Experts and, when there are several, their router."""
        router = self.router_config(d_model)
        experts = self.num_experts * _expert_params(self.activation, self.bias, d_model, self.hidden_size)
        return experts + (router.num_params() if router else 0)


def _expert_params(activation: str, bias: bool, width: int, hidden: int) -> int:
    up = UP_FACTOR[activation]
    return (up + 1) * width * hidden + (up * hidden + width if bias else 0)


def _check_activation(config: SharedExpertsConfig | MoEConfig) -> None:
    config._require(config.activation_alpha > 0, "activation_alpha", "must be positive")
    limit = config.activation_limit
    config._require(limit is None or limit > 0, "activation_limit", "must be positive")
    config._require(
        limit is None or config.activation == "gpt_oss_swiglu",
        "activation_limit",
        f"only gpt_oss_swiglu clamps, the activation is {config.activation}",
    )


class MoEConfig(Config):
    """One mixture-of-experts layer. The model width is passed to the counting and building methods.

    Attributes:
        num_experts: Number of routed experts E.
        hidden_size: Hidden units H of each.
        capacity_factor: None for dropless, else each expert keeps at most its capacity of tokens.
        drop_policy: Which assignments go when an expert is full: the last ones (``position``) or those
            with the lowest weight (``probs``).
        renormalize_after_drop: Scale a token's surviving weights so that their sum is as before the drop.
        activation, activation_alpha, activation_limit, bias: Of the experts.
        router: Options, or a mapping of them.
        shared_mlp: Shared experts beside the routed ones.
        latent: Projections around the routed experts.
        lb_loss_weight, lb_loss_granularity: Balancing loss; None switches it off (expert_choice has none).
        lb_loss_kind: ``probs`` (counts times mean probabilities) or ``dispatch`` (acts on the weights of
            the tokens that really went to an expert; see `moe_trainer.moe.losses`).
        z_loss_weight, orth_loss_weight: Further router losses; None switches them off.
        global_load_balancing: Counts of the balancing loss averaged over the data-parallel group.
        scale_loss_by_num_layers: Divide the losses by the number of MoE layers.
        backend: Grouped matmul implementation; ``auto`` picks by device and size.
        dtype: Data type of the experts' parameters.
    """

    num_experts: int = 1
    hidden_size: int = 256
    capacity_factor: float | None = None
    drop_policy: Literal["position", "probs"] = "probs"
    renormalize_after_drop: bool = False
    activation: Activation = "swiglu"
    activation_alpha: float = 1.702
    activation_limit: float | None = None
    bias: bool = False
    router: RouterOptions = RouterOptions()
    shared_mlp: SharedExpertsConfig | None = None
    latent: LatentConfig | None = None
    lb_loss_weight: float | None = 0.01
    lb_loss_granularity: Literal["local_batch", "instance"] = "local_batch"
    lb_loss_kind: Literal["probs", "dispatch"] = "probs"
    z_loss_weight: float | None = None
    orth_loss_weight: float | None = None
    global_load_balancing: bool = False
    scale_loss_by_num_layers: bool = True
    backend: Backend = "auto"
    dtype: DTypeName = "float32"

    @field_validator("router", mode="before")
    @classmethod
    def _complete_router(cls, value: Any) -> Any:
        """A mapping that names a width or a number of experts describes a whole `RouterConfig`."""
        if isinstance(value, Mapping) and ("d_model" in value or "num_experts" in value):
            return RouterConfig.model_validate(value)
        return value

    @model_validator(mode="after")
    def _check_layer(self) -> Self:
        need = self._require
        need(self.num_experts >= 1, "num_experts", "must be at least 1")
        need(self.hidden_size >= 1, "hidden_size", "must be at least 1")
        need(self.capacity_factor is None or self.capacity_factor > 0, "capacity_factor", "must be positive")
        _check_activation(self)
        for field in ("lb_loss_weight", "z_loss_weight", "orth_loss_weight"):
            weight = getattr(self, field)
            need(weight is None or weight >= 0, field, "must not be negative")
        need(
            not (self.global_load_balancing and self.lb_loss_granularity == "instance"),
            "lb_loss_granularity",
            "global_load_balancing needs local_batch: instances of different ranks have nothing in common",
        )
        need(
            not (self.lb_loss_kind == "dispatch" and self.lb_loss_granularity == "instance"),
            "lb_loss_kind",
            "the dispatch loss needs the granularity local_batch",
        )
        need(
            not self.renormalize_after_drop or self.capacity_factor is not None,
            "renormalize_after_drop",
            "needs a capacity_factor: without one nothing is dropped",
        )
        if isinstance(self.router, RouterConfig):
            need(
                self.router.num_experts == self.num_experts,
                "num_experts",
                f"the router has num_experts = {self.router.num_experts}",
            )
        check_selection(self.router, self.num_experts)
        if self.router.routing == "expert_choice":
            need(self.capacity_factor is None, "capacity_factor", "expert_choice never exceeds its share")
        return self

    def check(self, d_model: int, ep_degree: int = 1) -> None:
        """Raise `ConfigError` unless the layer fits this width and can be spread over `ep_degree` ranks."""
        self.router_config(d_model)
        if self.latent is not None:
            self.latent.check(d_model)
        if self.backend == "torch":
            self._check_rows(self.expert_width(d_model), self.hidden_size)
            if self.shared_mlp is not None:
                self._check_rows(d_model, self.shared_mlp.hidden_size)
        if ep_degree < 1 or self.num_experts % ep_degree:
            raise ConfigError(
                "MoEConfig.num_experts", self.num_experts, f"must be divisible by the EP degree {ep_degree}"
            )

    def _check_rows(self, *widths: int) -> None:
        unit = _ROW_BYTES // _ITEM_BYTES[self.dtype]
        for width in widths:
            self._require(
                width % unit == 0, "backend", f"needs widths that are multiples of {unit}, one is {width}"
            )

    def router_config(self, d_model: int) -> RouterConfig:
        """The complete router configuration for a model of this width."""
        return self.router.for_layer(d_model, self.num_experts)

    def expert_width(self, d_model: int) -> int:
        """Width the routed experts see: latent_dim, or d_model without latent projections."""
        return self.latent.latent_dim if self.latent else d_model

    def num_params_per_part(self, d_model: int) -> dict[str, int]:
        """Parameters of ``router``, ``experts``, ``shared`` and ``latent`` at this width."""
        self.check(d_model)
        width = self.expert_width(d_model)
        expert = _expert_params(self.activation, self.bias, width, self.hidden_size)
        return {
            "router": self.router_config(d_model).num_params(),
            "experts": self.num_experts * expert,
            "shared": self.shared_mlp.num_params(d_model) if self.shared_mlp else 0,
            "latent": self.latent.num_params(d_model) if self.latent else 0,
        }

    def num_active_params_per_part(self, d_model: int) -> dict[str, int]:
        """As `num_params_per_part`, with the k experts that one token uses."""
        parts = self.num_params_per_part(d_model)
        return {**parts, "experts": parts["experts"] // self.num_experts * self.router.top_k}

    def num_params(self, d_model: int) -> int:
        """All parameters of the layer."""
        return sum(self.num_params_per_part(d_model).values())

    def num_active_params(self, d_model: int) -> int:
        """Parameters that one token uses: total - experts + experts * k / E."""
        return sum(self.num_active_params_per_part(d_model).values())
