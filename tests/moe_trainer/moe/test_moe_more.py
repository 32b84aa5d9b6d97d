"""The layer in all combinations of its settings against the written formulas, one token at a time.

Nothing of the layer's own arithmetic is used: the formulas here are those of the layer's description, in
float64 from the fp32 logits on, and autograd differentiates them.
"""

from __future__ import annotations

import copy
import math
from fractions import Fraction
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
ACTIVATIONS = [("swiglu", None), ("relu2", None), ("gpt_oss_swiglu", None), ("gpt_oss_swiglu", 0.5)]


def activated(up: Tensor, kind: str, limit: float | None) -> Tensor:
    if kind == "relu2":
        return torch.where(up > 0, up**2, 0.0)
    if kind == "swiglu":
        value, gate = up[: len(up) // 2], up[len(up) // 2 :]
        return value * gate / (1 + torch.exp(-gate))
    gate, value = up[0::2], up[1::2]
    if limit is not None:
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return (value + 1) * gate / (1 + torch.exp(-1.702 * gate))


def one_expert(experts: Experts, e: int, x: Tensor) -> Tensor:
    up = experts.w_up_gate[e].double() @ x
    if experts.b_up_gate is not None:
        up = up + experts.b_up_gate[e].double()
    y = activated(up, experts.activation, experts.limit) @ experts.w_down[e].double()
    return y if experts.b_down is None else y + experts.b_down[e].double()


def scores_of(logits: Tensor, gating: str, epsilon: float) -> Tensor:
    if gating == "sigmoid":
        return 1 / (1 + torch.exp(-logits)) + epsilon
    return torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)


def routing(layer: MoE, x: Tensor) -> tuple[list[list[int]], list[list[Tensor]], Tensor, Tensor]:
    """Selected experts and their weights for each token, scores and logits."""
    c, router = layer.router.config, layer.router
    logits = x @ router.weight.double().T
    if router.bias is not None:
        logits = logits + router.bias.double()
    logits = logits / c.temperature
    scores = scores_of(logits, c.gating_function, c.sigmoid_stability_epsilon)
    topk = c.gating_function == "topk_softmax"
    chosen, weights = [], []
    for t in range(len(x)):
        value = (logits if topk else scores)[t].detach()
        if router.score_bias is not None:
            value = value + router.score_bias.double()
        allowed = set(range(E))
        if c.n_group is not None and c.topk_group is not None:
            size = E // c.n_group
            groups = [list(range(g * size, (g + 1) * size)) for g in range(c.n_group)]
            best = {g: sum(sorted(value[m].tolist())[-2:]) for g, m in enumerate(groups)}
            kept = sorted(best, key=lambda g: -best[g])[: c.topk_group]
            allowed = {e for g in kept for e in groups[g]}
        picks = sorted(allowed, key=lambda e: -float(value[e]))[: c.top_k]
        w = torch.softmax(logits[t, picks], -1) if topk else scores[t, picks]
        p = c.normalize_expert_weights
        if p is not None:
            w = w / (w.max() if math.isinf(p) else (w**p).sum() ** (1 / p))
        w = w * (c.top_k if c.restore_weight_scale else 1) * (c.expert_weight_scale or 1)
        w = w * ((c.original_top_k or c.top_k) / c.top_k) ** 0.5
        chosen.append(picks)
        weights.append(list(w))
    return chosen, weights, scores, logits


def drop(layer: MoE, chosen: list[list[int]], weights: list[list[Tensor]]) -> list[list[Tensor]]:
    """Weights after the capacity has been applied."""
    c = layer.config
    if c.capacity_factor is None:
        return weights
    ideal = Fraction(str(c.capacity_factor)) * c.router.top_k * len(chosen) / E
    capacity = math.ceil(ideal / 8) * 8
    out = [list(w) for w in weights]
    for e in range(E):
        slots = [(t, j) for t, picks in enumerate(chosen) for j, pick in enumerate(picks) if pick == e]
        if c.drop_policy == "probs":
            slots.sort(key=lambda slot: -float(weights[slot[0]][slot[1]].detach()))
        for t, j in slots[capacity:]:
            out[t][j] = 0 * weights[t][j]
    if c.renormalize_after_drop:
        for t, w in enumerate(out):
            left = sum(w, torch.zeros(()))
            if float(left.detach()) > 0:
                out[t] = [v * sum(weights[t], torch.zeros(())) / left for v in w]
    return out


def formula(layer: MoE, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
    """Output and total router loss."""
    c, x = layer.config, x_BSD.double().flatten(0, 1)
    chosen, weights, scores, logits = routing(layer, x)
    used = drop(layer, chosen, weights)
    rows = []
    for t in range(len(x)):
        routed_x = x[t]
        if layer.latent is not None:
            routed_x = layer.latent.down.weight.double() @ routed_x + layer.latent.down.bias.double()
        terms = [w * one_expert(layer.experts, e, routed_x) for e, w in zip(chosen[t], used[t], strict=True)]
        y = torch.stack(terms).sum(0)
        if layer.latent is not None:
            assert layer.latent.norm is not None
            y = y / (y.square().mean() + 1e-5).sqrt() * layer.latent.norm.weight.double()
            y = layer.latent.up.weight.double() @ y + layer.latent.up.bias.double()
        if layer.shared is not None:
            parts = [
                one_expert(layer.shared.experts, e, x[t]) for e in range(layer.shared.experts.num_experts)
            ]
            mix = torch.ones(1, dtype=torch.float64)
            if layer.shared.router is not None:
                mix = torch.softmax(layer.shared.router.weight.double() @ x[t], -1)
            y = y + sum(m * part for m, part in zip(mix, parts, strict=True))
        rows.append(y)
    probs = scores / scores.sum(-1, keepdim=True) if c.router.gating_function == "sigmoid" else scores
    instances = x_BSD.shape[0] if c.lb_loss_granularity == "instance" else 1
    balance = torch.zeros((), dtype=torch.float64)
    for part in torch.arange(len(x)).chunk(instances):
        counts = torch.tensor([sum(e in chosen[t] for t in part.tolist()) for e in range(E)])
        balance = balance + E / c.router.top_k * (counts * probs[part].mean(0)).sum() / len(x)
    z = torch.log(torch.exp(logits).sum(-1)).square().sum() / len(x)
    assert c.lb_loss_weight is not None and c.z_loss_weight is not None
    return torch.stack(rows).view_as(x_BSD), c.lb_loss_weight * balance + c.z_loss_weight * z


routers = st.fixed_dictionaries(
    {
        "gating_function": st.sampled_from(["softmax", "topk_softmax", "sigmoid"]),
        "top_k": st.integers(1, 4),
        "bias": st.booleans(),
        "score_correction_bias": st.booleans(),
        "normalize_expert_weights": st.sampled_from([None, 0.5, 1.0, 2.0, 3.0, math.inf]),
        "restore_weight_scale": st.booleans(),
        "expert_weight_scale": st.sampled_from([None, 2.5]),
        "original_top_k": st.sampled_from([None, 1, 8]),
        "temperature": st.sampled_from([1.0, 0.7]),
    },
    optional={"n_group": st.just(4), "topk_group": st.just(2)},
).filter(
    lambda r: (
        ("n_group" in r) == ("topk_group" in r)
        and not ("n_group" in r and r["gating_function"] == "topk_softmax")
    )
)
layers = st.fixed_dictionaries(
    {
        "router": routers,
        "bias": st.booleans(),
        "backend": st.sampled_from(["torch", "loop"]),
        "latent": st.sampled_from([None, {"latent_dim": 8, "bias": True, "norm": True}]),
        "shared_mlp": st.sampled_from([None, {"hidden_size": 4}, {"num_experts": 3, "hidden_size": 4}]),
        "capacity_factor": st.sampled_from([None, 0.3, 0.9, 1e300]),
        "drop_policy": st.sampled_from(["position", "probs"]),
        "renormalize_after_drop": st.booleans(),
        "lb_loss_granularity": st.sampled_from(["local_batch", "instance"]),
    }
).filter(lambda c: not c["renormalize_after_drop"] or c["capacity_factor"] is not None)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(layers, st.sampled_from(ACTIVATIONS), st.integers(0, 99))
def test_layer_is_the_formula_for_every_combination(
    given_layer: dict[str, Any], activation: tuple[str, float | None], seed: int
) -> None:
    torch.manual_seed(seed)
    config = MoEConfig(
        num_experts=E,
        hidden_size=8,
        activation=activation[0],
        activation_limit=activation[1],
        lb_loss_weight=0.3,
        z_loss_weight=0.2,
        **given_layer,
    )
    layer = MoE(config, D)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    if layer.router.score_bias is not None:
        layer.router.score_bias.normal_(std=0.2)
    x, cotangent = torch.randn(2, 12, D), torch.randn(2, 12, D)
    results: list[list[Tensor]] = []
    for run in (layer, lambda leaf: formula(layer, leaf)):
        leaf = x.clone().requires_grad_()
        y, losses = run(leaf)
        total = losses if isinstance(losses, Tensor) else losses.total
        inputs = [leaf, *layer.parameters()]
        gradients = torch.autograd.grad([y, total], inputs, [cotangent.to(y.dtype), torch.ones_like(total)])
        results.append([y, total, *gradients])
    for got, expected in zip(*results, strict=True):
        # Terms of the size of 1 cancel, as in the weights' gradient where there is one expert of weight 1.
        scale = max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=2e-5 * scale)


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
