"""torchtitan: a mixin for its Trainer that records every step.

    from torchtitan.trainer import Trainer
    class AuditedTrainer(RoutingAudit, Trainer):
        sources = ("code", "prose")

The data loader puts `source_ids` into the input dictionary, (B,) or (B, L). Without pipeline parallelism.
torchtitan's attention kernels need a GPU, so this file, run by itself, trains a real Qwen3-MoE of torchtitan
with another attention and the smallest loop that has the trainer's three methods:

    pip install 'moe-audit[train]' torchtitan==0.3.0 triton
    python examples/torchtitan_recipe.py
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE, Embedding, Linear

from moe_audit.hooks import Recorder


class RoutingAudit:
    """Put it before `torchtitan.trainer.Trainer` in the bases."""

    sources: Sequence[str] | None = None
    store = "runs/torchtitan/routing.db"
    flush_every = 4

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (model,) = self.model_parts
        self.recorder = Recorder.attach(model, self.store, self.sources, flush_every=self.flush_every)

    def forward_backward_step(self, *, input_dict: dict[str, Tensor], **kwargs: Any) -> Tensor:
        with self.recorder.microbatch(sources=input_dict.pop("source_ids", None)):
            return super().forward_backward_step(input_dict=input_dict, **kwargs)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        super().train_step(data_iterator)
        self.recorder.step(self.step)

    def close(self) -> None:
        self.recorder.close()
        super().close()


class Attention(nn.Module):
    """Causal attention that runs without a GPU."""

    def forward(self, q_BLND: Tensor, k_BLND: Tensor, v_BLND: Tensor, **_: Any) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q_BLND, k_BLND, v_BLND))
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def tiny_model() -> nn.Module:
    """A Qwen3-MoE of two layers, 8 experts, top-2."""
    config = qwen3.Qwen3Model.Config(
        vocab_size=256,
        dim=32,
        norm=qwen3._qwen3_norm(32),
        tok_embeddings=Embedding.Config(
            num_embeddings=256, embedding_dim=32, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=32, out_features=256, param_init=qwen3._LINEAR_INIT),
        layers=qwen3._build_qwen3_moe_layers(
            n_layers=2,
            dim=32,
            n_heads=4,
            n_kv_heads=2,
            head_dim=8,
            moe_hidden_dim=16,
            num_experts=8,
            top_k=2,
            attn_backend="flex",
            rope=CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e4),
            moe_comm_backend="standard",
        ),
    )
    model = config.build()
    model.init_states()
    for block in model.layers.values():
        block.attention.inner_attention = Attention()
    return model


class SmallestTrainer:
    """The three methods of torchtitan's Trainer that the mixin goes around."""

    def __init__(self) -> None:
        self.model_parts = [tiny_model()]
        self.optimizer = torch.optim.AdamW(self.model_parts[0].parameters(), lr=1e-3)
        self.step = 0

    def forward_backward_step(self, *, input_dict: dict[str, Tensor], labels: Tensor) -> Tensor:
        logits = self.model_parts[0](input_dict["input"])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        return loss

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        self.step += 1
        for _ in range(2):  # gradient accumulation
            input_dict, labels = next(data_iterator)
            self.forward_backward_step(input_dict=input_dict, labels=labels)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        pass


def batches() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Random tokens; every fourth sequence is of source 0."""
    while True:
        ids = torch.randint(0, 256, (8, 17))
        yield {"input": ids[:, :-1], "source_ids": (torch.arange(8) % 4 != 0).long()}, ids[:, 1:]


class Demo(RoutingAudit, SmallestTrainer):
    sources = ("code", "prose")


if __name__ == "__main__":
    trainer, data = Demo(), batches()
    for _ in range(12):
        trainer.train_step(data)
    trainer.close()
