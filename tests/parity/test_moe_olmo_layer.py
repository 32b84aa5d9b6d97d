"""Experts, shared experts, capacity and the whole layer against OLMo-core 3.0.0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trainer.moe import MoEConfig, RouterConfig, SharedExpertsConfig
from moe_trainer.moe.dispatch import expert_capacity, parallel_bins
from moe_trainer.moe.experts import Experts
from moe_trainer.moe.layer import MoE
from moe_trainer.moe.shared import SharedExperts

pytest.importorskip("olmo_core")
from olmo_core.config import DType
from olmo_core.nn.buffer_cache import BufferCache
from olmo_core.nn.moe.mlp import DroplessMoEMLP
from olmo_core.nn.moe.parallel_mlp import ParallelMLP
from olmo_core.nn.moe.v2 import nemotron, routed_experts
from olmo_core.nn.moe.v2.routed_experts import ExpertActivation, RoutedExpertsConfig
from olmo_core.nn.moe.v2.shared_experts import SharedExpertsConfig as TheirSharedConfig

pytestmark = pytest.mark.parity
D, H, E = 16, 24, 6
SIZES = [5, 0, 9, 1, 0, 17]
BACKENDS = ["torch", "loop"]


def same(a: Tensor, b: Tensor) -> None:
    """Equal to 1e-5 of the largest element: the order of a sum differs."""
    torch.testing.assert_close(a, b.reshape(a.shape), rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their experts take sizes on the host only with this setting."""
    monkeypatch.setattr(routed_experts, "REQUIRES_HOST_SIDE_SPLIT_SIZES", True)


def randomize(*modules: torch.nn.Module) -> None:
    """The same random parameters for modules whose parameters have the same names and shapes."""
    for module in modules:
        torch.manual_seed(0)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss_swiglu", "relu2"])
@pytest.mark.parametrize("limit", [None, 0.4])
def test_routed_experts(activation: str, bias: bool, limit: float | None, backend: str) -> None:
    if limit is not None and activation != "gpt_oss_swiglu":
        pytest.skip("only gpt_oss_swiglu clamps")
    config = RoutedExpertsConfig(
        d_model=D,
        hidden_size=H,
        num_experts=E,
        bias=bias,
        dtype=DType.float32,
        activation=ExpertActivation(activation),
        activation_limit=limit,
    )
    theirs = config.build()
    ours = Experts(E, D, H, activation=activation, limit=limit, bias=bias, backend=backend)
    assert config.num_params() == sum(p.numel() for p in ours.parameters())
    randomize(ours)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    x, sizes = torch.randn(sum(SIZES), D), torch.tensor(SIZES)
    offs = sizes.cumsum(0).to(torch.int32)
    cotangent = torch.randn_like(x)

    leaf = x.clone().requires_grad_()
    expected = theirs(leaf, sizes)
    expected.backward(cotangent)
    leaves = [leaf]
    # The rows by themselves, and the same rows as slots of a layer with one expert per token.
    slots, ones = torch.arange(len(x)), torch.ones(len(x), 1)
    for run in (lambda v: ours(v, offs), lambda v: ours.combine(v, ones, slots, offs)):
        leaf = x.clone().requires_grad_()
        ours.zero_grad()
        y = run(leaf)
        y.backward(cotangent)
        same(y, expected)
        same(leaf.grad, leaves[0].grad)
        for name, parameter in ours.named_parameters():
            same(parameter.grad, theirs.get_parameter(name).grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_stack_dropless_experts(backend: str) -> None:
    theirs = DroplessMoEMLP(d_model=D, hidden_size=H, num_experts=E)
    theirs._gmm = None
    ours = Experts(E, D, H, backend=backend)
    with torch.no_grad():
        value, gate = ours.w_up_gate.chunk(2, dim=1)
        value.copy_(theirs.w3.view(E, H, D))
        gate.copy_(theirs.w1.view(E, H, D))
        ours.w_down.copy_(theirs.w2.view(E, H, D))
    x, sizes = torch.randn(sum(SIZES), D), torch.tensor(SIZES)
    same(ours(x, sizes.cumsum(0).to(torch.int32)), theirs(x, sizes))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("number", [1, 3])
def test_shared_experts(activation: str, number: int) -> None:
    theirs = TheirSharedConfig(
        d_model=D,
        hidden_size=H,
        num_experts=number,
        bias=False,
        dtype=DType.float32,
        activation=ExpertActivation(activation),
    ).build()
    config = SharedExpertsConfig(num_experts=number, hidden_size=H, activation=activation)
    ours = SharedExperts(config, D)
    randomize(ours)
    with torch.no_grad():
        up = ours.experts.w_up_gate  # (E, U, D); theirs is one (D, E * U)
        theirs.w_up_gate.copy_(up.flatten(0, 1).T)
        theirs.w_down.copy_(ours.experts.w_down)
    x = torch.randn(2, 7, D)
    each = theirs(x)
    weights = torch.ones(1, 14, 1) if ours.router is None else ours.router(x).T.unsqueeze(-1)
    expected = (each.flatten(1, 2) * weights).sum(0)
    same(ours(x.view(-1, D)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_layer_of_nemotron(backend: str) -> None:
    """Groups, sigmoid, correction bias, relu2 experts and a shared expert: output and gradients."""
    theirs = nemotron.NemotronMoEConfig(
        num_experts=8,
        num_experts_per_tok=3,
        intermediate_size=H,
        shared_expert_intermediate_size=40,
        n_group=4,
        topk_group=2,
        dtype=DType.float32,
    ).build(D, layer_idx=0, n_layers=1)
    router = RouterConfig(
        d_model=D,
        num_experts=8,
        top_k=3,
        gating_function="sigmoid",
        sigmoid_stability_epsilon=0.0,
        normalize_expert_weights=1.0,
        expert_weight_scale=2.5,
        score_correction_bias=True,
        n_group=4,
        topk_group=2,
    )
    ours = MoE(
        MoEConfig(
            num_experts=8,
            hidden_size=H,
            activation="relu2",
            router=router,
            shared_mlp=SharedExpertsConfig(hidden_size=40, activation="relu2"),
            backend=backend,
        ),
        D,
    )
    randomize(ours)
    assert ours.shared is not None and ours.router.score_bias is not None
    with torch.no_grad():
        ours.router.score_bias.normal_(std=0.2)
        theirs.routed_experts_router.weight.copy_(ours.router.weight.flatten())
        theirs.routed_experts_router.score_bias.copy_(ours.router.score_bias)
        theirs.routed_experts.w_up_gate.copy_(ours.experts.w_up_gate)
        theirs.routed_experts.w_down.copy_(ours.experts.w_down)
        theirs.shared_experts.w_up_gate.copy_(ours.shared.experts.w_up_gate[0].T)
        theirs.shared_experts.w_down.copy_(ours.shared.experts.w_down)
    x, cotangent = torch.randn(2, 33, D), torch.randn(2, 33, D)
    results: list[Any] = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)[0] if layer is ours else layer(leaf)
        y.backward(cotangent)
        results.append((y, leaf.grad))
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])
    same(ours.router.weight.grad, theirs.routed_experts_router.weight.grad)
    same(ours.experts.w_up_gate.grad, theirs.routed_experts.w_up_gate.grad)
    same(ours.experts.w_down.grad, theirs.routed_experts.w_down.grad)
    same(ours.shared.experts.w_up_gate.grad[0].T, theirs.shared_experts.w_up_gate.grad)


@pytest.mark.parametrize("tokens", [8, 100, 400, 1000, 4096])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.1, 1.25, 2.0])
def test_capacity_is_theirs_but_for_its_float_noise(tokens: int, factor: float) -> None:
    """They truncate factor * ideal to an integer before rounding up; we round the exact product."""
    theirs = SimpleNamespace(
        top_k=3, num_experts=10, capacity_factor=factor, ep_world_size=1, max_local_microbatch_size=None
    )
    ours = expert_capacity(tokens, 3, 10, factor)
    assert ours - ParallelMLP.expert_capacity(theirs, tokens) in (0, 8)
    assert 0 <= ours - factor * 3 * tokens / 10 < 8 + 1e-9
    assert expert_capacity(400, 10, 10, 1.1) == 440


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bins_of_the_parallel_permutation_are_built_once(ranks: int) -> None:
    theirs = SimpleNamespace(
        _cache=BufferCache(),
        num_experts=8,
        num_local_experts=8 // ranks,
        hidden_sharding_degree=1,
    )
    order, ends = ParallelMLP._get_parallel_indices_and_bins(
        theirs, expert_capacity=16 * ranks, local_expert_capacity=16, device=torch.device("cpu")
    )
    mine = parallel_bins(8, 8 // ranks, 16, "cpu")
    # Their sort is not stable: the same rows for each expert, in any order.
    for a, b in zip(mine[0].split(16 * ranks), order.split(16 * ranks), strict=True):
        assert a.sort().values.tolist() == b.sort().values.tolist()
    assert torch.equal(mine[1], ends)
    assert parallel_bins(8, 8 // ranks, 16, "cpu") is mine
