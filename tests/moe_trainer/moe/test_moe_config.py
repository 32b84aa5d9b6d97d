"""Counts equal the real tensors; every invalid setting is one error that names field, value and rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_trainer.moe import ConfigError, LatentConfig, MoEConfig, RouterConfig, RouterOptions
from moe_trainer.moe import SharedExpertsConfig as Shared
from moe_trainer.moe.layer import MoE


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss_swiglu", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("latent", [None, {"latent_dim": 6}, {"latent_dim": 6, "bias": True, "norm": True}])
@pytest.mark.parametrize(
    "shared", [None, {"hidden_size": 5, "bias": True}, {"num_experts": 3, "activation": "relu2"}]
)
def test_counts_are_those_of_the_tensors(
    activation: str, bias: bool, latent: dict[str, Any] | None, shared: dict[str, Any] | None
) -> None:
    config = MoEConfig(
        num_experts=4,
        hidden_size=7,
        activation=activation,
        bias=bias,
        latent=latent,
        shared_mlp=shared,
        router={"top_k": 3, "bias": bias, "bias_gamma": 1e-3},
    )
    layer = MoE(config, 8)
    real = {
        part: sum(p.numel() for p in module.parameters()) if module is not None else 0
        for part, module in (
            ("router", layer.router),
            ("experts", layer.experts),
            ("shared", layer.shared),
            ("latent", layer.latent),
        )
    }
    assert config.num_params_per_part(8) == real
    assert config.num_params(8) == sum(p.numel() for p in layer.parameters())
    assert config.num_active_params(8) == config.num_params(8) - real["experts"] // 4


def test_published_formula_of_the_active_parameters() -> None:
    """total - 3*L*H*E + 3*L*H*k for swiglu without expert bias."""
    config = MoEConfig(num_experts=64, hidden_size=1024, router={"top_k": 8}, latent={"latent_dim": 256})
    unused = 3 * 256 * 1024 * (64 - 8)
    assert config.num_active_params(2048) == config.num_params(2048) - unused


def test_a_whole_router_config_and_options_mean_the_same() -> None:
    whole = MoEConfig(num_experts=4, router=RouterConfig(d_model=8, num_experts=4, top_k=2))
    options = MoEConfig(num_experts=4, router=RouterOptions(top_k=2))
    mapping = MoEConfig(num_experts=4, router={"top_k": 2, "d_model": 8, "num_experts": 4})
    assert whole.router_config(8) == options.router_config(8) == mapping.router_config(8)
    with pytest.raises(ConfigError, match=r"d_model = 8: the layer has d_model = 16"):
        whole.check(16)


def router(**settings: Any) -> RouterConfig:
    return RouterConfig(**{"d_model": 8, "num_experts": 8, "top_k": 2, **settings})


def moe(**settings: Any) -> MoEConfig:
    return MoEConfig(**{"num_experts": 8, **settings})


INVALID: list[tuple[str, object, Callable[[], object]]] = [
    ("top_k", 0, lambda: router(top_k=0)),
    ("top_k", -1, lambda: moe(router={"top_k": -1})),
    ("top_k", 9, lambda: router(top_k=9)),
    ("top_k", 9, lambda: moe(router={"top_k": 9})),
    ("top_k", 2.5, lambda: router(top_k=2.5)),
    ("bias_gamma", 0.0, lambda: router(bias_gamma=0.0)),
    ("bias_gamma", -1e-3, lambda: router(bias_gamma=-1e-3)),
    ("n_group", None, lambda: router(topk_group=2)),
    ("topk_group", None, lambda: router(n_group=2)),
    ("n_group", 3, lambda: router(n_group=3, topk_group=2)),
    ("topk_group", 0, lambda: router(n_group=4, topk_group=0)),
    ("topk_group", 5, lambda: router(n_group=4, topk_group=5)),
    ("top_k", 3, lambda: router(top_k=3, n_group=4, topk_group=1)),
    ("n_group", 2, lambda: router(gating_function="topk_softmax", n_group=2, topk_group=1)),
    (
        "random_expert_assignment",
        True,
        lambda: router(gating_function="topk_softmax", random_expert_assignment=True),
    ),
    ("gating_function", "relu", lambda: router(gating_function="relu")),
    (
        "gating_function",
        "topk_softmax",
        lambda: Shared(num_experts=2, router={"gating_function": "topk_softmax"}),
    ),
    (
        "lb_loss_granularity",
        "instance",
        lambda: moe(global_load_balancing=True, lb_loss_granularity="instance"),
    ),
    ("latent_dim", 0, lambda: LatentConfig(latent_dim=0)),
    ("latent_dim", 8, lambda: moe(latent={"latent_dim": 8}).check(8)),
    ("latent_dim", 9, lambda: MoE(moe(latent={"latent_dim": 9}), 8)),
    ("num_experts", 8, lambda: moe().check(8, ep_degree=3)),
    ("capacity_factor", 0.0, lambda: moe(capacity_factor=0.0)),
    ("capacity_factor", -1.0, lambda: moe(capacity_factor=-1.0)),
    ("num_experts", 0, lambda: MoEConfig(num_experts=0)),
    ("num_experts", True, lambda: MoEConfig(num_experts=True)),
    ("hidden_size", "64", lambda: moe(hidden_size="64")),
    ("activation_limit", 7.0, lambda: moe(activation_limit=7.0)),
    ("lb_loss_weight", -0.1, lambda: moe(lb_loss_weight=-0.1)),
    ("renormalize_after_drop", True, lambda: moe(renormalize_after_drop=True)),
    ("jitter_eps", 1.5, lambda: router(jitter_eps=1.5)),
    ("topk", 2, lambda: router(topk=2)),
    ("bias_gamma", 1e-3, lambda: router(routing="expert_choice", bias_gamma=1e-3)),
    ("tie_break", True, lambda: router(routing="expert_choice", tie_break=True)),
    ("expert_weight_scale", 0.0, lambda: router(expert_weight_scale=0.0)),
    ("activation_alpha", -1.0, lambda: moe(activation="gpt_oss_swiglu", activation_alpha=-1.0)),
    ("router", 5, lambda: moe(router=5)),
    ("bias_gamma", 1e-3, lambda: Shared(num_experts=2, router={"bias_gamma": 1e-3})),
    ("n_group", 2, lambda: Shared(num_experts=4, router={"n_group": 2, "topk_group": 1})),
    ("expert_weight_scale", 2.0, lambda: Shared(num_experts=2, router={"expert_weight_scale": 2.0})),
    ("top_k", 3, lambda: Shared(num_experts=2, router={"top_k": 3})),
    ("num_experts", 8, lambda: Shared(num_experts=2, router=router())),
    ("backend", "torch", lambda: moe(hidden_size=6, backend="torch").check(8)),
    ("backend", "torch", lambda: moe(hidden_size=8, backend="torch", dtype="bfloat16").check(4)),
    ("backend", "torch", lambda: moe(backend="torch", shared_mlp={"hidden_size": 6}).check(8)),
    ("num_layers", 0, lambda: MoE(moe(), 8, num_layers=0)),
]


@pytest.mark.parametrize(("field", "value", "build"), INVALID)
def test_invalid_settings_name_field_value_and_rule(
    field: str, value: object, build: Callable[[], object]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.field.split(".")[-1] == field
    assert caught.value.value == value
    assert str(caught.value).startswith(f"{caught.value.field} = {value!r}: ") and caught.value.rule
