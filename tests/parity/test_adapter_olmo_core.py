"""OLMo-core 3.0.0, both stacks: real routers, compared with what their experts are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_audit.hooks import Recorder
from moe_audit.hooks.adapters import find_routers
from moe_audit.run import Run, open_run

pytest.importorskip("olmo_core")
pytestmark = pytest.mark.parity
SOURCES = [torch.tensor([0, 1]), torch.tensor([1, 1])]


def counts_by_source(calls: list[Tensor]) -> Tensor:
    counts = torch.zeros(2, 8, dtype=torch.int64)
    for ids, sources in zip(calls, SOURCES, strict=True):
        for source, ids_SK in zip(sources.tolist(), ids.reshape(len(sources), -1), strict=True):
            counts[source] += torch.bincount(ids_SK, minlength=8)
    return counts


def record(model: nn.Module, loss: Any, path: Path) -> Run:
    with Recorder.attach(model, path, ["code", "prose"]) as recorder:
        for sources in SOURCES:
            with recorder.microbatch(sources=sources):
                loss(torch.randint(0, 64, (2, 6))).backward()
        recorder.step(1)
    return open_run(path)


@pytest.mark.parametrize("top_k", [1, 2])
def test_first_stack(top_k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from olmo_core.nn.moe.parallel_mlp import ParallelMLPBase
    from olmo_core.nn.transformer import TransformerConfig

    seen: dict[int, list[Tensor]] = {}

    def experts(self: Any, x: Tensor, weights: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
        """The dispatch kernels need a GPU; what they are given is what counts."""
        seen.setdefault(id(self), []).append(indices.clone())
        return x * weights.sum(-1, keepdim=True)

    monkeypatch.setattr(ParallelMLPBase, "forward", experts)
    torch.manual_seed(0)
    config = TransformerConfig.llama_like_moe(
        d_model=32,
        vocab_size=64,
        n_layers=2,
        n_heads=4,
        num_experts=8,
        top_k=top_k,
        expert_hidden_size=16,
        capacity_factor=1.2,
    )
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"))
    run = record(model, lambda ids: model(ids).float().pow(2).mean(), tmp_path / "routing.db")
    assert [(i.layer, i.name, i.top_k, i.capacity_factor, i.gating) for i in run.layers] == [
        (layer, f"blocks.{layer}.feed_forward_moe.router", top_k, 1.2, "softmax") for layer in (0, 1)
    ]
    for layer, calls in enumerate(seen.values()):
        assert torch.equal(torch.from_numpy(run.counts(layer).sum(0)), counts_by_source(calls))


class Nemotron(nn.Module):
    """Real layers of the second stack that run without a GPU: router, routed and shared experts."""

    def __init__(self) -> None:
        from olmo_core.config import DType
        from olmo_core.nn.moe.v2.nemotron import NemotronMoE

        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            NemotronMoE(
                d_model=32,
                num_experts=8,
                num_experts_per_tok=2,
                intermediate_size=16,
                shared_expert_intermediate_size=16,
                n_group=2,
                topk_group=1,
                routed_scaling_factor=1.0,
                norm_topk_prob=True,
                dtype=DType.float32,
            )
            for _ in range(2)
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


def test_second_stack_with_groups_and_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from olmo_core.nn.moe.v2.nemotron import NemotronMoE

    seen: dict[int, list[Tensor]] = {}
    experts = NemotronMoE._forward_loop

    def keep(self: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        seen.setdefault(id(self), []).append(indices.clone())
        return experts(self, x, indices, weights)

    monkeypatch.setattr(NemotronMoE, "_forward_loop", keep)
    torch.manual_seed(0)
    model = Nemotron()
    model.blocks[0].routed_experts_router.score_bias.normal_()
    run = record(model, lambda ids: model(ids).pow(2).mean(), tmp_path / "routing.db")
    assert [(i.layer, i.name, i.gating) for i in run.layers] == [
        (layer, f"blocks.{layer}.routed_experts_router", "sigmoid") for layer in (0, 1)
    ]
    for layer, calls in enumerate(seen.values()):
        assert torch.equal(torch.from_numpy(run.counts(layer).sum(0)), counts_by_source(calls))


def test_second_stack_finds_the_routed_experts_of_the_whole_model() -> None:
    from olmo_core.config import DType
    from olmo_core.nn.moe.v2.gpt_oss import build_debug_gpt_oss_20b_config

    config = build_debug_gpt_oss_20b_config(
        vocab_size=64,
        n_layers=2,
        d_model=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        dtype=DType.float32,
    )
    model = config.build(init_device="cpu")
    assert [(r.info.layer, r.info.name, r.info.gating) for r in find_routers(model)] == [
        (layer, f"blocks.{layer}.routed_experts_router", "topk_softmax") for layer in (0, 1)
    ]


def test_second_stack_leaves_out_the_mixing_of_shared_experts() -> None:
    from olmo_core.nn.moe.v2.router import MoERouterConfigV2

    block = nn.Module()
    block.routed_experts_router = MoERouterConfigV2(d_model=32, num_experts=8, top_k=2).build()
    block.shared_experts_router = MoERouterConfigV2(d_model=32, num_experts=2, top_k=1).build()
    (found,) = find_routers(nn.ModuleDict({"blocks": nn.ModuleList([block])}))
    assert found.info.name == "blocks.0.routed_experts_router"
    x = torch.randn(2, 4, 32)
    assert found.adapter.observe(found.module, (), {}, block.shared_experts_router(x, True)) is None
    seen = found.adapter.observe(found.module, (), {}, found.module(x, False))
    assert (seen.full_kind, seen.full_TE.shape, seen.indices_TK.shape) == (
        "logits",
        (8, 8),
        (8, 2),
    )


def test_document_pools_are_routers_of_the_second_stack() -> None:
    from olmo_core.nn.moe.v2.emo_router import EmoRouterV2

    from moe_audit.hooks.adapters.base import is_a

    assert is_a(EmoRouterV2.__new__(EmoRouterV2), "olmo_core.nn.moe.v2.router.MoERouterV2")
