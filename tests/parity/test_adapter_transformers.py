"""Every router class that transformers names: recorded exactly, or refused with a reason."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_audit.hooks import Recorder
from moe_audit.hooks.adapters import find_routers
from moe_audit.hooks.adapters.transformers import version
from moe_audit.run import open_run
from moe_audit.thresholds.errors import UsageError

transformers = pytest.importorskip("transformers", minversion="5.23")
pytestmark = pytest.mark.parity


def _same(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


# Sizes for whatever field of these names a configuration has.
SMALL: dict[str, Any] = {
    **_same(64, "vocab_size", "max_position_embeddings", "vocab_size_per_layer_input", "index_topk"),
    **_same(48, "intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"),
    **_same(32, "hidden_size", "d_model"),
    **_same(16, "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
    **_same(
        16,
        "shared_experts_intermediate_size",
        "q_lora_rank",
        "kv_lora_rank",
        "index_head_dim",
        "mamba_d_head",
    ),
    **_same(
        8,
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "hidden_size_per_layer_input",
    ),
    **_same(8, "head_dim", "d_kv", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    **_same(8, "linear_key_head_dim", "linear_value_head_dim"),
    **_same(4, "num_attention_heads", "num_key_value_heads", "num_heads", "encoder_attention_heads"),
    **_same(4, "decoder_attention_heads", "linear_num_value_heads", "linear_num_heads", "mamba_n_heads"),
    **_same(4, "index_kpool", "sliding_window"),
    **_same(16, "mamba_d_head"),
    **_same(3, "num_hidden_layers", "num_layers", "encoder_layers"),
    **_same(
        2, "num_decoder_layers", "decoder_layers", "linear_num_key_heads", "index_n_heads", "mamba_expand"
    ),
    **_same(2, "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "n_group"),
    **_same(2, "zero_expert_num", "mamba_expand"),
    **_same(
        1, "topk_group", "first_k_dense_replace", "num_dense_layers", "n_shared_experts", "mamba_n_groups"
    ),
    **_same(True, "enable_moe_block", "is_moe"),
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER = {"nllb_moe": "NllbMoeModel", "switch_transformers": "SwitchTransformersModel"}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SPECIAL: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
        "n_heads": 4,
        "n_layers": 3,
    },
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "dots3_note": {"layer_types": ["indexed_attention"] * 3},
    "doge": {"num_experts": 16},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
    },
    "glm5_next": {"qk_rope_head_dim": 0},
    "glm4v_moe": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}},
    "hy_v4_vl": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "mimo_v2_flash": {"layer_types": ["full_attention"] * 3},
    "nllb_moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "switch_transformers": {
        "num_sparse_encoder_layers": 3,
        "num_sparse_decoder_layers": 2,
        "expert_capacity": 2,
        "router_jitter_noise": 0.0,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def families() -> list[str]:
    """The families of the installed package that name a router class, from the text of their files."""
    root = Path(str(importlib.util.find_spec("transformers").submodule_search_locations[0])) / "models"
    files = sorted(root.glob("*/modeling_*.py"))
    return [file.parent.name for file in files if '"router_logits":' in file.read_text()]


def model_class(family: str) -> type[Any]:
    """The smallest model class of a family that names a router: a text model where there is one."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family in ENCODER_DECODER:
        return getattr(module, ENCODER_DECODER[family])
    named = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and "router_logits" in (getattr(value, "_can_record_outputs", None) or {})
        and not name.lower().endswith("pretrainedmodel")
    ]

    def rank(cls: type[Any]) -> tuple[bool, bool, int]:
        name = cls.__name__
        return not name.endswith("TextModel"), not name.endswith("Model"), len(name)

    return min(named, key=rank)


def build(family: str) -> nn.Module:
    """A tiny model; routers whose weights start at zero are drawn too."""
    cls = model_class(family)
    fields = set(inspect.signature(cls.config_class.__init__).parameters)
    fields |= set(getattr(cls.config_class, "__dataclass_fields__", {}))
    settings = {key: value for key, value in SMALL.items() if key in fields} | SPECIAL.get(family, {})
    torch.manual_seed(0)
    model = cls(cls.config_class(**settings))
    if sum(p.numel() for p in model.parameters()) > 10_000_000:
        raise ValueError(f"{family} is not tiny")
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "balancing_biases")):
            buffer.normal_(std=0.1)
        if name.endswith("tid2eid"):
            buffer.copy_(torch.randint(0, 8, buffer.shape))
    return model


def forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """A scalar to go backward from."""
    more = {"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {}
    return model(input_ids=ids, use_cache=False, **more)[0].float().pow(2).mean()


REFUSED = {
    "nllb_moe": "only the first of the two choices",
    "ernie4_5_vl_moe": "split up before they are routed",
}
FAMILIES = families()


def top_k_of_linear(weight: Callable[[nn.Module], torch.Tensor], k: int) -> Callable[[nn.Module, Any], Any]:
    return lambda module, args: (args[0].flatten(0, -2) @ weight(module).T).topk(k).indices


# What is really applied, family by family: how a class or module name ends, and the expert ids computed or
# taken from its input.
ORACLES: dict[str, tuple[str, Callable[[nn.Module, Any], Any]]] = {
    "dbrx": ("DbrxRouter", top_k_of_linear(lambda m: m.layer.weight, 2)),
    "doge": ("down_embed", lambda module, args: args[0]),
    "jetmoe": ("JetMoeTopKGating", top_k_of_linear(lambda m: m.layer.weight, 2)),
    "llama4": ("Llama4Router", top_k_of_linear(lambda m: m.weight, 2)),
    "switch_transformers": (
        "SwitchTransformersTop1Router",
        top_k_of_linear(lambda m: m.classifier.weight, 1),
    ),
}


def watch(model: nn.Module, family: str) -> dict[str, list[torch.Tensor]]:
    """Expert ids by the name of the module that they were seen at, filled as the model runs."""
    where, ids_of = ORACLES.get(family, ("Experts", lambda module, args: args[1]))
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if not type(module).__name__.endswith(where) and not name.endswith(where):
            continue
        if ".self_attention." in name or name.endswith(
            "shared_experts"
        ):  # JetMoe's attention has routers too
            continue

        def keep(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            ids = ids_of(module, (*args, *kwargs.values()))
            seen.setdefault(name, []).append(ids.detach().clone())

        module.register_forward_pre_hook(keep, with_kwargs=True)
    return seen


def counts_by_source(ids_TK: torch.Tensor, sources_B: torch.Tensor, num_experts: int) -> torch.Tensor:
    rows = sources_B.repeat_interleave(ids_TK.shape[0] // len(sources_B))
    counts = torch.zeros(2, num_experts, dtype=torch.int64)
    for source, picks in zip(rows.tolist(), ids_TK.tolist(), strict=True):
        for expert in picks:
            counts[source, expert] += 1
    return counts


def record(model: nn.Module, path: Path) -> list[torch.Tensor]:
    """Two micro-batches forward and backward, each sequence of another source; the sources of each."""
    sources = [torch.tensor([0, 1]), torch.tensor([1, 1])]
    torch.manual_seed(1)
    with Recorder.attach(model, path, ["code", "prose"]) as recorder:
        for sources_B in sources:
            with recorder.microbatch(sources=sources_B):
                forward(model, torch.randint(3, 60, (2, 6))).backward()
        recorder.step(1)
    return sources


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_what_the_experts_got(family: str, tmp_path: Path) -> None:
    model = build(family)
    if family in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[family]):
            Recorder.attach(model, tmp_path / "routing.db")
        return
    seen = watch(model, family)
    sources = record(model, tmp_path / "routing.db")
    run = open_run(tmp_path / "routing.db")
    assert len(run.layers) == len(seen) > 0
    for layer, (name, ids) in zip(run.layers, seen.items(), strict=True):
        counts = torch.from_numpy(run.counts(layer.layer).sum(0))
        assert layer.name.split(".")[:-1] == name.split(".")[: layer.name.count(".")], (layer.name, name)
        expected = sum(counts_by_source(i, s, layer.num_experts) for i, s in zip(ids, sources, strict=True))
        if family == "zaya":  # its experts see "skip" as expert 0 of weight 0
            counts[:, 0] += counts[:, -1]
            counts[:, -1] = 0
        assert torch.equal(counts, expected), layer.name


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in REFUSED])
def test_full_scores_are_what_the_weights_come_from(family: str) -> None:
    """Weights are the gate's scores at the picks, up to one factor a token: so the gate is the right one."""
    model = build(family).eval()
    observed = []
    for router in find_routers(model):
        if router.adapter.hook == "forward":
            router.module.register_forward_hook(
                lambda module, args, kwargs, output, router=router: observed.append(
                    (router, router.adapter.observe(module, args, kwargs, output))
                ),
                with_kwargs=True,
            )
    with torch.no_grad():
        forward(model, torch.randint(3, 60, (2, 6)))
    for router, seen in observed:
        assert (seen.full_TE is not None) == (family != "doge")
        if (
            seen.full_TE is None or seen.weights_TK is None or family == "phimoe"
        ):  # which masks before its softmax
            continue
        scores = seen.full_TE.float()
        if seen.full_kind == "logits":
            scores = scores.sigmoid() if router.info.gating == "sigmoid" else scores.softmax(-1)
        picked = scores.gather(-1, seen.indices_TK)
        weights = seen.weights_TK.float()
        if family == "zaya":
            weights = torch.where(seen.indices_TK == 8, picked, weights)
        elif family in ("gemma4", "diffusion_gemma"):  # the weights have a factor for each expert
            weights = weights / router.module.per_expert_scale[seen.indices_TK]
        torch.testing.assert_close(
            picked / picked.sum(-1, keepdim=True),
            weights / weights.sum(-1, keepdim=True),
            atol=1e-4,
            rtol=1e-3,
        )


def test_checkpointing_counts_once(tmp_path: Path) -> None:
    model = build("mixtral")
    model.gradient_checkpointing_enable()
    model.train()
    record(model, tmp_path / "routing.db")
    run = open_run(tmp_path / "routing.db")
    assert [run.counts(layer.layer).sum() for layer in run.layers] == [2 * 12 * 2] * 3


def test_encoder_and_decoder_are_numbered_apart() -> None:
    found = find_routers(build("switch_transformers"))
    assert [router.info.layer for router in found] == sorted({router.info.layer for router in found})
    assert {router.info.name.split(".")[0] for router in found} == {"encoder", "decoder"}


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen3_moe"])
def test_experts_are_observed_where_routers_were_not_settled(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5.0 returned probabilities as the first element, DeepSeek-V3 bare logits until 5.10."""
    model = build(family)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.3.0")
    assert version() == (5, 3)
    found = find_routers(model)
    assert {router.adapter.hook for router in found} == {"pre"}
    assert [router.info.name.rpartition(".")[2] for router in found] == ["experts"] * len(found)
    seen = watch(model, family)
    sources = record(model, tmp_path / "routing.db")
    run = open_run(tmp_path / "routing.db")
    for layer, ids in zip(run.layers, seen.values(), strict=True):
        expected = sum(counts_by_source(i, s, 8) for i, s in zip(ids, sources, strict=True))
        assert torch.equal(torch.from_numpy(run.counts(layer.layer).sum(0)), expected)


class RouterAlone(nn.Module):
    """One router of a model, which can be compiled where its experts cannot."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.router = find_routers(model)[-1].module
        self._can_record_outputs = model._can_record_outputs

    def forward(self, x: torch.Tensor) -> Any:
        return self.router(x)


@pytest.mark.parametrize(
    "family", ["mixtral", "gpt_oss", "deepseek_v3", "deepseek_v4", "longcat_flash", "doge"]
)
def test_observing_compiles_into_one_graph(family: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    router = RouterAlone(build(family))
    with Recorder.attach(router, tmp_path / "routing.db") as recorder:
        compiled = torch.compile(router, backend="eager", fullgraph=True)
        for step in (1, 2):
            compiled(torch.randn(2, 6, 32))
            recorder.step(step)
    assert open_run(tmp_path / "routing.db").counts(0).sum() == 2 * 2 * 12
