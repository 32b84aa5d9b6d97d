"""Megatron-core and megablocks by stand-ins of their documented output form: neither installs here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_audit.hooks import Recorder
from moe_audit.hooks.adapters import NO_PICK, find_routers
from moe_audit.run import open_run
from moe_audit.thresholds.errors import UsageError


def named(module: str, name: str, *bases: type) -> Any:
    """A class with a foreign qualified name."""
    return type(name, bases or (nn.Module,), {"__module__": module})


class TopKRouterForm(nn.Module):
    """(probs T,E with zeros; bool map T,E) of tokens (S, B, D), as in megatron.core 0.19."""

    def __init__(self, layer_number: int, **options: Any) -> None:
        super().__init__()
        settings = {
            "num_moe_experts": 6,
            "moe_router_topk": 2,
            "moe_expert_capacity_factor": None,
            "moe_pad_expert_input_to_capacity": False,
            "moe_router_score_function": "sigmoid",
            "num_layers": 12,
        }
        self.config = SimpleNamespace(**settings | options)
        self.layer_number = layer_number
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = (x.reshape(-1, 8) @ self.weight.T).sigmoid()
        ids = scores.topk(2).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
        if self.config.moe_expert_capacity_factor is not None:  # by position
            capacity = int(self.config.moe_expert_capacity_factor * 2 * len(scores) / 6)
            chosen &= chosen.long().cumsum(0) <= capacity
        return scores * chosen, chosen


def megatron(**options: Any) -> nn.Module:
    router = named("megatron.core.transformer.moe.router", "TopKRouter", TopKRouterForm)
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(
        nn.ModuleDict({"router": router(i + 5, **options)}) for i in range(2)
    )
    return model


def test_megatron_numbers_layers_from_one_and_orders_tokens_by_position() -> None:
    model = megatron()
    found = find_routers(model)
    assert [(r.info.layer, r.info.name) for r in found] == [
        (4, "decoder.layers.0.router"),
        (5, "decoder.layers.1.router"),
    ]
    assert (found[0].info.gating, found[0].info.tags) == ("sigmoid", ())
    x = torch.randn(3, 2, 8)
    output = found[0].module(x)
    seen = found[0].adapter.observe(found[0].module, (x,), {}, output)
    assert seen.layout == "sequence"
    assert torch.equal(seen.indices_TK.sort().values, output[0].topk(2).indices.sort().values)
    assert torch.equal(seen.weights_TK, output[0].gather(1, seen.indices_TK))


def test_megatron_after_a_drop_is_tagged_and_leaves_slots_unused() -> None:
    found = find_routers(megatron(moe_expert_capacity_factor=0.5))[0]
    assert found.info.tags == ("post_drop",) and found.info.capacity_factor == 0.5
    x = torch.randn(12, 2, 8)
    output = found.module(x)
    seen = found.adapter.observe(found.module, (x,), {}, output)
    kept = seen.indices_TK[seen.indices_TK != NO_PICK]
    assert torch.equal(torch.bincount(kept, minlength=6), output[1].sum(0))
    assert len(kept) < 24 * 2


def test_megatron_numbers_prediction_layers_behind_the_others() -> None:
    model = megatron()
    extra = named("megatron.core.transformer.moe.router", "TopKRouter", TopKRouterForm)(1)
    extra.is_mtp_layer = True
    model.mtp = nn.ModuleDict({"router": extra})
    assert [r.info.layer for r in find_routers(model)] == [4, 5, 12]


def test_megatron_padded_to_capacity_is_refused() -> None:
    with pytest.raises(UsageError, match="also marks padding"):
        find_routers(megatron(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True))


class LearnedRouterForm(nn.Module):
    """(scores T,E; weights T,k; ids T,k, squeezed for k = 1), as in megablocks 0.10."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.args = SimpleNamespace(moe_num_experts=6, moe_top_k=top_k, moe_capacity_factor=1)
        self.layer = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.layer(x.reshape(-1, 8)).softmax(-1)
        weights, ids = scores.topk(self.args.moe_top_k)
        return scores, weights, ids.squeeze(-1)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(("layer", "capacity"), [("dMoE", None), ("MoE", 1)])
def test_megablocks(top_k: int, layer: str, capacity: int | None) -> None:
    router = named("megablocks.layers.router", "LearnedRouter", LearnedRouterForm)(top_k)
    parent = named("megablocks.layers.moe", layer)()
    parent.router = router
    (found,) = find_routers(nn.Sequential(nn.Identity(), parent))
    assert (found.info.layer, found.info.num_experts, found.info.top_k) == (1, 6, top_k)
    assert found.info.capacity_factor == capacity
    x = torch.randn(3, 2, 8)
    output = router(x)
    seen = found.adapter.observe(router, (x,), {}, output)
    assert torch.equal(seen.indices_TK, output[0].topk(top_k).indices)
    assert (seen.layout, seen.full_kind, seen.full_TE.shape) == ("sequence", "probs", (6, 6))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("framework", ["megatron", "megablocks"])
def test_sources_follow_the_sequences_of_a_sequence_major_batch(
    framework: str, compiled: bool, tmp_path: Path
) -> None:
    if framework == "megatron":
        model = nn.Sequential(*[layer["router"] for layer in megatron().decoder.layers][:1])
    else:
        model = nn.Sequential(named("megablocks.layers.router", "LearnedRouter", LearnedRouterForm)(2))
    x = torch.randn(5, 3, 8)  # S, B, D
    with Recorder.attach(model, tmp_path / "routing.db", ["code", "prose"]) as recorder:
        run_model = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        with recorder.microbatch(sources=torch.tensor([1, 0, 1])):
            output = run_model(x)
        recorder.step(1)
    chosen = output[1] if framework == "megatron" else torch.zeros(15, 6).scatter(1, output[2], 1.0)
    by_sequence = chosen.view(5, 3, 6).sum(0).long()
    run = open_run(tmp_path / "routing.db")
    counts = torch.from_numpy(run.counts(run.layers[0].layer).sum(0))
    assert torch.equal(counts, torch.stack([by_sequence[1], by_sequence[0] + by_sequence[2]]))


def test_mxfp4_blocks_are_refused_although_a_router_is_inside() -> None:
    block = named("transformers.integrations.mxfp4", "Mxfp4GptOssMLP")()
    block.router = nn.Linear(2, 2)
    with pytest.raises(
        UsageError, match=r"mlp \(Mxfp4GptOssMLP\) cannot be recorded: the MXFP4 kernels route"
    ):
        find_routers(nn.ModuleDict({"mlp": block}))


class Experts(nn.Module):
    """The arguments of every experts module of transformers 5; on this rank 2 of 6."""

    num_experts = 2

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


@pytest.mark.parametrize("by_name", [False, True])
def test_experts_without_a_known_router_are_observed_by_their_arguments(by_name: bool) -> None:
    block = nn.Module()
    block.experts = named("transformers.models.other.modeling_other", "OtherExperts", Experts)()
    block.gate = nn.Linear(8, 6)
    block.gate.num_experts, block.top_k = 6, 2
    (found,) = find_routers(nn.ModuleList([block]))
    assert (found.info.num_experts, found.info.top_k, found.adapter.hook) == (6, 2, "pre")
    assert found.router is block.gate
    ids, weights = torch.tensor([[5, 0], [1, 3]]), torch.rand(2, 2)
    args = (torch.randn(2, 8),) if by_name else (torch.randn(2, 8), ids, weights)
    kwargs = {"top_k_index": ids, "top_k_weights": weights} if by_name else {}
    seen = found.adapter.observe(found.module, args, kwargs, None)
    assert torch.equal(seen.indices_TK, ids) and torch.equal(seen.weights_TK, weights)
