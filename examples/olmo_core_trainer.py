"""OLMo-core trainer: one callback, sources from the batches of the data loader.

pip install 'moe-audit[train]' ai2-olmo-core==3.0.0
python examples/olmo_core_trainer.py
"""

from collections.abc import Iterable
from typing import Any

import torch
from olmo_core.config import DType
from olmo_core.data.data_loader import DataLoaderBase
from olmo_core.nn.layer_norm import LayerNormConfig
from olmo_core.nn.lm_head import LMHeadConfig
from olmo_core.nn.moe.v2.nemotron import NemotronBlockConfig, NemotronBlockKind, NemotronMoEConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.train_module import TransformerTrainModule

from moe_audit.hooks.olmo_core_callback import RoutingCallback

BATCH, LENGTH, STEPS = 8, 16, 12


class Loader(DataLoaderBase):
    """Random tokens; a quarter of the sequences is of source 0."""

    total_batches = STEPS

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        self._epoch = epoch or 1

    def get_mock_batch(self) -> dict[str, Any]:
        return {"input_ids": torch.randint(0, 256, (BATCH, LENGTH))}

    def _iter_batches(self) -> Iterable[dict[str, Any]]:
        for _ in range(STEPS):
            yield self.get_mock_batch() | {"source_ids": (torch.arange(BATCH) % 4 != 0).long()}


def main() -> None:
    block = NemotronBlockConfig(
        kind=NemotronBlockKind.moe,
        norm=LayerNormConfig(),
        mixer=NemotronMoEConfig(
            num_experts=8,
            num_experts_per_tok=2,
            intermediate_size=32,
            shared_expert_intermediate_size=32,
            dtype=DType.float32,
        ),
    )
    model = TransformerConfig(
        d_model=32,
        vocab_size=256,
        n_layers=2,
        block=block,
        lm_head=LMHeadConfig(layer_norm=LayerNormConfig(), bias=False),
    ).build(init_device="cpu")
    train_module = TransformerTrainModule(
        model,
        AdamWConfig(lr=1e-3),
        rank_microbatch_size=BATCH // 2 * LENGTH,
        max_sequence_length=LENGTH,
        device=torch.device("cpu"),
    )
    loader = Loader(
        work_dir="runs/olmo_core/data",
        global_batch_size=BATCH * LENGTH,
        dp_world_size=1,
        dp_rank=0,
        fs_local_rank=0,
    )
    routing = RoutingCallback("runs/olmo_core/routing.db", ["code", "prose"], options={"flush_every": 4})
    config = TrainerConfig(
        save_folder="runs/olmo_core",
        max_duration=Duration.steps(STEPS),
        no_checkpoints=True,
        device="cpu",
        callbacks={"routing": routing},
    )
    config.build(train_module, loader).fit()


if __name__ == "__main__":
    main()
