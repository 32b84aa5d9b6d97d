"""What several tests of the callbacks train: a Mixtral of two small layers, for four steps on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def mixtral() -> Callable[[], Any]:
    """Builds the model, with the same weights each time."""

    def build() -> Any:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                num_local_experts=4,
                num_experts_per_tok=2,
            )
        )

    return build


@pytest.fixture
def trainer_args() -> Callable[..., Any]:
    """Four steps of two micro-batches of two rows; what is saved goes to the folder's `out`."""

    def build(folder: Path, **changed: Any) -> Any:
        from transformers import TrainingArguments

        options = {
            "output_dir": str(folder / "out"),
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        return TrainingArguments(**(options | changed))

    return build
