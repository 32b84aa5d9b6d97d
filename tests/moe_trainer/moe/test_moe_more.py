"""Precision, layouts, compiling, construction, and what a setting may be."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_trainer.config import ModelConfig, TrainConfig
from moe_trainer.model import Transformer
from moe_trainer.moe import ConfigError, MoEConfig, RouterConfig
from moe_trainer.moe.experts import Experts
from moe_trainer.moe.layer import MoE, post_step
from moe_trainer.moe.router import Router

D, E = 16, 8


def build(dtype: torch.dtype = torch.float32, **given_settings: Any) -> MoE:
    torch.manual_seed(0)
    router = {"top_k": 2, "bias_gamma": 1e-3}
    layer = MoE(MoEConfig(**{"num_experts": E, "hidden_size": 16, "router": router, **given_settings}), D)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer.to(dtype)


PARTS: dict[str, Any] = {
    "bias": True,
    "shared_mlp": {"num_experts": 2, "hidden_size": 8},
    "latent": {"latent_dim": 8, "bias": True, "norm": True},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("inputs", DTYPES)
def test_output_has_the_dtype_of_the_input_and_the_rest_keeps_its_precision(
    inputs: torch.dtype, weights: torch.dtype, autocast: torch.dtype | None
) -> None:
    x = torch.randn(2, 30, D).to(inputs).requires_grad_()
    expected, _ = build(**PARTS)(x.float())
    for backend in ("torch", "loop"):
        layer = build(weights, backend=backend, **PARTS)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            y, losses = layer(x)
        (y.float().square().mean() + losses.total).backward()
        assert y.dtype == inputs and losses.total.dtype == torch.float32
        assert all(p.grad is not None and p.grad.dtype == weights for p in layer.parameters())
        assert layer.router.score_bias is not None and layer.router.score_bias.dtype == torch.float32
        assert layer.load.counts_E.dtype == torch.int64
        assert float((y.float() - expected).detach().norm() / expected.detach().norm()) < 0.03


def test_score_bias_is_fp32_where_the_default_dtype_is_not() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = MoE(MoEConfig(num_experts=4, router={"bias_gamma": 1e-3}), D)
        layer(torch.randn(2, 3, D))[0].sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.router.score_bias is not None and layer.router.score_bias.dtype == torch.float32


@pytest.mark.parametrize("start", [0.0, 0.1234567, -3.0004])
def test_bias_moves_by_whole_steps_from_wherever_it_starts(start: float) -> None:
    layer = build(torch.bfloat16)
    assert layer.router.score_bias is not None
    layer.router.score_bias.fill_(start)
    begin = layer.router.score_bias.double()
    for _ in range(2000):
        layer.load.counts_E += torch.tensor([30, 1, 4, 4, 4, 4, 1, 0])
        post_step([layer])
    moved = layer.router.score_bias.double() - begin
    expected = torch.tensor([-2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]).double()
    torch.testing.assert_close(moved, expected, rtol=0 if start == 0 else 1e-4, atol=0)


def test_a_layer_built_on_meta_starts_like_any_other() -> None:
    """`to_empty` leaves what the memory holds: weights, score bias and counters are all set."""
    config = build(**PARTS).config
    late = MoE(config, D, device="meta").to_empty(device="cpu")
    for tensor in (*late.parameters(), *late.buffers()):
        tensor.data.fill_(7)
    late.reset_parameters(generator=torch.Generator().manual_seed(3))
    early = MoE(config, D, generator=torch.Generator().manual_seed(3))
    for a, b in zip(
        (*late.parameters(), *late.buffers()), (*early.parameters(), *early.buffers()), strict=True
    ):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("backend", ["torch", "loop"])
@pytest.mark.parametrize("offs", [[0, 2, 2, 6], [0, 0, 0, 0]])
def test_gradients_of_a_plain_sum_reach_every_expert(backend: str, offs: list[int]) -> None:
    """A sum's gradient is one number expanded, which torch's kernel refuses."""
    experts = Experts(4, D, 16, backend=backend)
    experts(torch.randn(offs[-1], D), torch.tensor(offs, dtype=torch.int32)).sum().backward()
    sizes = torch.tensor(offs).diff(prepend=torch.zeros(1, dtype=torch.int64))
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert (parameter.grad.flatten(1) != 0).any(-1).tolist() == (sizes > 0).tolist()


@pytest.mark.parametrize("backend", ["torch", "loop"])
def test_compiled_layer_takes_any_length_layout_and_recompute(backend: str) -> None:
    """fp32 with torch's kernel, a capacity, lengths that change, a transposed input, a checkpoint inside."""
    plain = build(backend=backend, capacity_factor=0.6, activation="gpt_oss_swiglu", activation_limit=0.5)
    traced = copy.deepcopy(plain)

    def recomputed(x: Tensor) -> Any:
        return checkpoint(traced, x, use_reentrant=False)

    compiled = torch.compile(recomputed, backend="aot_eager")
    for x in (torch.randn(60, D), torch.randn(40, D), torch.randn(D, 52).T):
        grads = []
        for layer, run in ((plain, plain), (traced, compiled)):
            layer.zero_grad()
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            y, losses = run(leaf)
            (y.square().mean() + losses.total).backward()
            grads.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
    for a, b in zip(plain.load.buffers(), traced.load.buffers(), strict=True):
        assert torch.equal(a, b)
    assert int(plain.load.counts_E.sum()) == 2 * (60 + 40 + 52)


def test_scores_of_zero_give_no_nan() -> None:
    """Sigmoid without its epsilon underflows for every expert."""
    router = {"top_k": 2, "gating_function": "sigmoid", "sigmoid_stability_epsilon": 0.0}
    layer = build(router=router)
    torch.nn.init.constant_(layer.router.weight, -1e4)
    leaf = torch.rand(2, 8, D).requires_grad_()
    y, losses = layer(leaf)
    (y.sum() + losses.total).backward()
    assert losses.total.isfinite() and leaf.grad is not None and leaf.grad.isfinite().all()


def test_a_norm_of_any_power_divides_weights_of_any_size() -> None:
    """Sigmoid scores of 1e-26, the largest of which has the norm's weight 1 for p = inf."""
    for p in (0.5, 2.0, 40.0, math.inf):
        config = RouterConfig(
            d_model=D,
            num_experts=E,
            top_k=2,
            gating_function="sigmoid",
            sigmoid_stability_epsilon=0.0,
            normalize_expert_weights=p,
        )
        router = Router(config)
        torch.nn.init.constant_(router.weight, -60 / D)
        weights = router(torch.ones(1, D)).weights_TK
        torch.testing.assert_close(weights, torch.full((1, 2), 1.0 if math.isinf(p) else 2 ** (-1 / p)))


ANY: list[object] = ["x", None, math.nan, math.inf, -1, -0.5, 0, 10**30, [], {}, object(), True, 2.5, 1j]


@pytest.mark.parametrize("owner", [RouterConfig, MoEConfig, ModelConfig, TrainConfig])
def test_any_value_of_any_field_is_taken_or_named(owner: type[Any]) -> None:
    """Never another error than the one, and never a section without its name."""
    needed = {"d_model": 8, "num_experts": 8, "top_k": 2} if owner is RouterConfig else {}
    for field in owner.model_fields:
        for value in ANY:
            try:
                owner(**{**needed, field: value})
            except ConfigError as error:
                assert error.rule and not error.field.endswith(".") and "\n" not in str(error)
                if not isinstance(value, int | float | dict):
                    assert error.field == f"{owner.__name__}.{field}"


models = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 4),
        "moe_every": st.integers(1, 4),
        "num_kv_heads": st.sampled_from([1, 2, 4]),
        "dense_hidden_size": st.integers(1, 9),
        "bias": st.booleans(),
        "router_bias": st.booleans(),
        "activation": st.sampled_from(["swiglu", "gpt_oss_swiglu", "relu2"]),
        "latent": st.sampled_from([None, {"latent_dim": 3}, {"latent_dim": 7, "bias": True, "norm": True}]),
        "shared_mlp": st.sampled_from(
            [None, {"hidden_size": 3, "bias": True}, {"num_experts": 3, "router": {"bias": True}}]
        ),
        "hidden_size": st.integers(1, 9),
        "num_experts": st.integers(2, 6),
        "top_k": st.integers(1, 2),
    }
).filter(lambda m: m["moe_every"] <= m["num_layers"])


@settings(deadline=None, max_examples=30)
@given(models)
def test_plan_counts_the_tensors_of_the_model(given_model: dict[str, Any]) -> None:
    m = dict(given_model)
    outer = {name: m.pop(name) for name in ("num_layers", "moe_every", "num_kv_heads", "dense_hidden_size")}
    moe = {**m, "router": {"top_k": m["top_k"], "bias": m["router_bias"]}}
    del moe["top_k"], moe["router_bias"]
    config = ModelConfig(d_model=16, moe=MoEConfig(**moe), **outer)
    with torch.device("meta"):
        model = Transformer(config)
    parts = config.num_params_per_part()
    assert sum(total for total, _ in parts.values()) == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".moe.experts." in name)
    unused = experts // m["num_experts"] * (m["num_experts"] - m["top_k"])
    assert sum(active for _, active in parts.values()) == sum(total for total, _ in parts.values()) - unused


def test_routers_start_anew_by_command(tiny: Path, tmp_path: Path, interrupted: Any) -> None:
    from moe_trainer.cli import main
    from moe_trainer.config import load_config
    from moe_trainer.runs import build_stream, find_checkpoint
    from moe_trainer.train import Trainer

    overrides = ["recorder.enabled=false", "model.moe.router.bias_gamma=1e-2"]
    folder = tmp_path / "run"
    interrupted(tiny, folder, 5, overrides)
    config, checkpoint_folder = load_config(folder / "config.toml"), find_checkpoint(folder)
    kept, reset = (
        Trainer(config, folder, build_stream(config), checkpoint_folder, reset_routers=anew)
        for anew in (False, True)
    )
    for (name, a), b in zip(kept.model.named_parameters(), reset.model.parameters(), strict=True):
        assert torch.equal(a, b) != (".router." in name)
        assert (b in reset.optimizer.state) != (".router." in name)
    for a, b in zip(kept.moe_layers, reset.moe_layers, strict=True):
        assert a.router.score_bias is not None and b.router.score_bias is not None
        assert a.router.score_bias.any() and not b.router.score_bias.any()
        assert 0 < float(b.router.weight.detach().std()) < 0.03
    main(["resume", str(folder), "--reset-routers"])
    assert find_checkpoint(folder).name == "step_00000012"


def test_counters_and_bias_move_once_in_inference_mode_and_after_it() -> None:
    layer, x = build(), torch.randn(2, 30, D)
    with torch.inference_mode():
        layer(x)
    assert int(layer.load.counts_E.sum()) == 120
    layer(x)[0].sum().backward()
    assert int(post_step([layer])[0].counts_E.sum()) == 240


@pytest.mark.parametrize("shape", [(2, 4, 7), (2, D, 8)])
def test_an_input_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    """Even where its elements would make whole tokens."""
    with pytest.raises(RuntimeError, match="shapes"):
        build()(torch.randn(shape))
