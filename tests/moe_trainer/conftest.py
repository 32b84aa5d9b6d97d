"""A tiny run that the trainer tests share: two layers, two sources, a dozen steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_trainer import train
from moe_trainer.config import load_config
from moe_trainer.runs import run

TINY = """
[model]
num_layers = 2
d_model = 16
num_heads = 2
num_kv_heads = 1

[model.moe]
num_experts = 4
hidden_size = 16

[model.moe.router]
top_k = 2
jitter_eps = 0.1

[data]
sequence_length = 16
max_document_bytes = 50

[optim]
lr = 1e-2
warmup_steps = 3

[train]
steps = 12
micro_batch_sequences = 3
accumulation = 2
log_every = 4
device = "cpu"

[recorder]
flush_every = 4

[checkpoint]
save_every = 4
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Configuration file of a tiny run; its text lies beside it."""
    rng = np.random.default_rng(0)
    folders = []
    for source, letters in (("code", "()=_xyz"), ("prose", "aeiou nst.")):
        (tmp_path / "text" / source).mkdir(parents=True)
        for number in range(6):
            text = "".join(rng.choice(list(letters), size=int(rng.integers(40, 200))))
            (tmp_path / "text" / source / f"{number}.txt").write_text(text)
        folders.append(f'{source} = "{tmp_path / "text" / source}"')
    path = tmp_path / "tiny.toml"
    path.write_text(TINY + "\n[data.sources]\n" + "\n".join(folders) + "\n")
    return path


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train as far as a step, then be killed at the worst moment: after the step, before any save."""

    def interrupt(config_file: Path, folder: Path, at: int, overrides: list[str]) -> None:
        update = train.Trainer.update

        def killing(self: train.Trainer, loss: torch.Tensor) -> None:
            update(self, loss)
            if self.step == at:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(train.Trainer, "update", killing)
            with pytest.raises(KeyboardInterrupt):
                run(load_config(config_file, overrides), folder)

    return interrupt
