"""Hugging Face model, your own loop: five lines of recording around it.

pip install 'moe-audit[train]' transformers
python examples/huggingface.py
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moe_audit.hooks import Recorder

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_local_experts=8,
    num_experts_per_tok=2,
)
model = MixtralForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with Recorder.attach(model, "runs/huggingface/routing.db", ["code", "prose"], flush_every=5) as recorder:
    for step in range(1, 31):
        ids = torch.randint(0, 256, (4, 16))
        mask = torch.ones_like(ids)
        mask[0, 12:] = 0  # padding: routed, not counted
        with recorder.microbatch(sources=["code", "code", "prose", "prose"], mask=mask):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(step, lr=1e-3, loss=loss)
