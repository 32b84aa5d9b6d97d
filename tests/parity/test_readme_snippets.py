"""The README's lines for Hugging Face and OLMo-core, run against the packages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_audit.run import open_run

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = dict(re.findall(r"<!-- test: (\w+) -->\n```\w+\n(.*?)```", README.read_text(), flags=re.S))

pytestmark = pytest.mark.parity


def tiny_mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def picks(folder: Path) -> list[list[int]]:
    """Picks per layer and source."""
    with open_run(folder) as run:
        return [run.counts(info.layer).sum((0, 2)).tolist() for info in run.layers]


def test_huggingface_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_mixtral()
    batch = {
        "input_ids": torch.randint(64, (4, 8)),
        "attention_mask": torch.ones(4, 8, dtype=torch.int64),
        "source_ids": torch.tensor([0, 1, 1, 1]),
    }
    batch["attention_mask"][3, 5:] = 0
    names = {"model": model, "batches": [batch] * 2, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(SNIPPETS["huggingface"], names)
    assert picks(tmp_path / "runs" / "a") == [[2 * 2 * 8, 2 * 2 * 21]] * 2


def test_huggingface_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ids = torch.arange(8)
    rows = [{"input_ids": ids, "labels": ids, "source": "code" if i % 4 == 0 else "prose"} for i in range(16)]
    arguments = transformers.TrainingArguments(
        output_dir="out", max_steps=2, per_device_train_batch_size=8, report_to=[], save_strategy="no",
        use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=tiny_mixtral(), args=arguments, train_dataset=rows)
    exec(SNIPPETS["huggingface_trainer"], {"trainer": trainer})
    assert picks(tmp_path / "runs" / "a") == [[2 * 4 * 8, 2 * 12 * 8]] * 2


def test_olmo_core() -> None:
    """The callback itself is proved by the example; here that the line makes one."""
    pytest.importorskip("olmo_core")
    names: dict[str, Any] = {}
    exec(SNIPPETS["olmo_core"], names)
    assert type(names["callbacks"]["routing"]).__name__ == "RoutingCallback"
