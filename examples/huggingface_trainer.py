"""Hugging Face Trainer: the sources come from a column of the data set.

pip install 'moe-audit[train]' transformers accelerate
python examples/huggingface_trainer.py
"""

import torch
from torch.utils.data import Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

from moe_audit.hooks.transformers_callback import audit_trainer


class Rows(Dataset):
    """Sequences with labels and the name of their source."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict:
        ids = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids, "source": "code" if i % 4 == 0 else "prose"}


torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
)
trainer = Trainer(
    model=Qwen3MoeForCausalLM(config),
    args=TrainingArguments(
        output_dir="runs/huggingface_trainer",
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Rows(),
)
audit_trainer(trainer, "runs/huggingface_trainer/routing.db", ["code", "prose"], flush_every=4)
trainer.train()
