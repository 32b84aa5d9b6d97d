"""transformers 4.57, in a venv of its own: gates are plain linear layers, the choice is made in the block."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_audit.hooks import Recorder
from moe_audit.run import open_run
from moe_audit.thresholds.errors import UsageError

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not transformers.__version__.startswith("4."), reason="the forms of 4.57"),
]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
PICKS = {"num_experts_per_tok": 2}
QWEN = {
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    **PICKS,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralModel", {"num_local_experts": 8, **PICKS}),
    "minimax": ("MiniMaxModel", {"num_local_experts": 8, **PICKS}),
    "qwen2_moe": ("Qwen2MoeModel", {**QWEN, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeModel", QWEN),
    "qwen3_vl_moe": (
        "Qwen3VLMoeTextModel",
        QWEN | {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    ),
    "olmoe": ("OlmoeModel", {"num_experts": 8, **PICKS}),
    "flex_olmo": ("FlexOlmoModel", {"num_experts": 8, **PICKS}),
    "jamba": (
        "JambaModel",
        {
            "num_experts": 8,
            "use_mamba_kernels": False,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            **PICKS,
        },
    ),
    "gpt_oss": ("GptOssModel", {"num_local_experts": 8, **PICKS}),
    "deepseek_v2": ("DeepseekV2Model", {**LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Model", LATENT),
    "dots1": ("Dots1Model", LATENT),
    "glm4_moe": ("Glm4MoeModel", LATENT),
    "granitemoe": ("GraniteMoeModel", {"num_local_experts": 8, **PICKS}),
    "jetmoe": ("JetMoeModel", {"num_local_experts": 8, "kv_channels": 8, "num_key_value_heads": 2, **PICKS}),
    "llama4": ("Llama4TextModel", {"num_local_experts": 8, "intermediate_size_mlp": 48, **PICKS}),
    "dbrx": (
        "DbrxModel",
        {
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {
                "ffn_hidden_size": 48,
                "moe_num_experts": 8,
                "moe_top_k": 2,
                "ffn_act_fn": {"name": "silu"},
            },
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
        },
    ),
}
REFUSED = {
    "ernie4_5_moe": ("Ernie4_5_MoeModel", {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0}),
    "phimoe": ("PhimoeModel", {"num_local_experts": 8, **PICKS}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Model", {"num_experts": 8, "moe_topk": 2}),
    "nllb_moe": ("NllbMoeModel", {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "d_model": 32}),
}


def build(cls: Any, settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = cls(cls.config_class(**(SIZES | settings)))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("gate.weight", "router.weight", "router.bias", "layer.weight", "correction_bias")):
            nn.init.normal_(tensor, std=0.5)
    return model


def chosen(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every last result of torch.topk with two picks: what the blocks go on with."""
    calls: list[Tensor] = []
    topk = torch.topk

    def keep(x: Tensor, k: int = 2, *args: Any, **kwargs: Any) -> Any:
        result = topk(x, k, *args, **kwargs)
        calls.append(result.indices.detach().clone())
        return result

    monkeypatch.setattr(torch, "topk", keep)
    monkeypatch.setattr(Tensor, "topk", keep)
    return calls


@pytest.mark.parametrize("family", MODELS)
def test_counts_are_those_of_the_blocks_own_choice(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_name, settings = MODELS[family]
    model = build(getattr(transformers, class_name), settings)
    sources = torch.tensor([0, 1])
    ids = torch.randint(3, 60, (2, 6))
    with Recorder.attach(model, tmp_path / "routing.db", ["code", "prose"]) as recorder:
        with recorder.microbatch(sources=sources):
            model(input_ids=ids, use_cache=False)[0].float().pow(2).mean().backward()
        recorder.step(1)
    run = open_run(tmp_path / "routing.db")
    assert run.layers
    picks = chosen(model, monkeypatch)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    experts = [ids_TK for ids_TK in picks if ids_TK.shape == (12, 2)]
    if family == "jetmoe":  # attention, then feed-forward
        experts = experts[1::2]
    assert len(experts) == len(run.layers), [tuple(i.shape) for i in picks]
    for layer, ids_TK in zip(run.layers, experts, strict=True):
        expected = torch.stack([torch.bincount(part.flatten(), minlength=8) for part in ids_TK.view(2, 6, 2)])
        assert torch.equal(torch.from_numpy(run.counts(layer.layer).sum(0)), expected), layer


@pytest.mark.parametrize("family", REFUSED)
def test_what_only_shows_logits_is_refused_with_a_reason(family: str, tmp_path: Path) -> None:
    class_name, settings = REFUSED[family]
    model = build(getattr(transformers, class_name), settings)
    with pytest.raises(UsageError, match=r"cannot be recorded: (it shows|its output holds only)"):
        Recorder.attach(model, tmp_path / "routing.db")


def test_ids_of_one_ranks_experts_are_refused(tmp_path: Path) -> None:
    """As a hook of the package leaves them for expert parallelism."""
    parallel = pytest.importorskip("transformers.integrations.tensor_parallel").RouterParallel
    model = build(transformers.GptOssModel, MODELS["gpt_oss"][1])
    mesh = SimpleNamespace(get_local_rank=lambda: 1, size=lambda: 2)
    for layer in model.layers:
        layer.mlp.router.register_forward_hook(
            lambda module, args, out: parallel._prepare_output_fn(None, None, module, out, mesh)
        )
    recording = Recorder.attach(model, tmp_path / "routing.db")
    with recording, pytest.raises(UsageError, match="scores of 4 of 8 experts"):
        model(input_ids=torch.randint(3, 60, (2, 6)))
