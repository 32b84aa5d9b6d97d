"""Configuration of a training run: one class per part, read from TOML, changed by dotted overrides.

`load_config` is the only way in. It resolves the file and the overrides into a `TrainConfig`, or raises
one `UsageError` that names the setting, the value and what would be right. No torch here, so that
`moe-train --help` and `moe-train plan` start fast.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.gate_names import nearest
from moe_trainer.data import VOCAB_SIZE, ShardOrder, ShuffleGrain
from moe_trainer.moe.config import Config, ConfigError, MoEConfig


class ModelConfig(Config):
    """The decoder-only transformer.

    Attributes:
        num_layers, d_model: Depth and width.
        num_heads, num_kv_heads: Query heads, and the fewer key and value heads that they share.
        rope_theta: Base of the rotary position angles.
        norm_eps: Epsilon of every RMSNorm.
        moe_every: Every n-th block has a MoE feed-forward (1: all), the others a dense SwiGLU.
        dense_hidden_size: Hidden units of the dense SwiGLU blocks.
        attend_within_documents: Attention stops at the start of a packed document. Off, a token also
            sees the documents before its own in the sequence: plain causal attention is faster, and in
            short sequences of small documents the difference is not visible in the routing.
        moe: The MoE layers.
    """

    num_layers: int = Field(default=4, ge=1)
    d_model: int = Field(default=128, ge=2)
    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    moe_every: int = Field(default=1, ge=1)
    dense_hidden_size: int = Field(default=512, ge=1)
    attend_within_documents: bool = False
    moe: MoEConfig = MoEConfig(num_experts=8, hidden_size=256)

    @model_validator(mode="after")
    def _check(self) -> Self:
        need = self._require
        need(self.d_model % self.num_heads == 0, "num_heads", f"must divide d_model = {self.d_model}")
        need(self.head_dim % 2 == 0, "num_heads", f"head width {self.head_dim} must be even (rotary)")
        need(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            f"must divide num_heads = {self.num_heads}",
        )
        need(
            self.moe_every <= self.num_layers,
            "moe_every",
            f"no block of {self.num_layers} would be a MoE block",
        )
        self.moe.check(self.d_model)
        return self

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the blocks with a MoE feed-forward."""
        return list(range(self.moe_every - 1, self.num_layers, self.moe_every))

    def num_params_per_part(self) -> dict[str, tuple[int, int]]:
        """(all, active for one token) parameters of each part of the model."""
        d, layers, moe_layers = self.d_model, self.num_layers, self.num_layers // self.moe_every
        kv = self.num_kv_heads * self.head_dim
        shared_parts = {
            "embedding": VOCAB_SIZE * d,
            "attention": layers * (2 * d * d + 2 * d * kv),
            "norms": (2 * layers + 1) * d,
            "dense": (layers - moe_layers) * 3 * d * self.dense_hidden_size,
            "output": VOCAB_SIZE * d,
        }
        parts = {name: (count, count) for name, count in shared_parts.items()}
        total, active = self.moe.num_params_per_part(d), self.moe.num_active_params_per_part(d)
        for name in total:
            parts[f"moe.{name}"] = (moe_layers * total[name], moe_layers * active[name])
        return parts


class DataConfig(Config):
    """Text with sources.

    Attributes:
        sources: Name of each source and its folder of text files.
        sequence_length: Tokens of a packed sequence.
        max_document_bytes: A longer file becomes several documents.
        shard_tokens: Size of a shard: a run of documents of one source.
        shard_order: interleaved | round_robin | sequential, see `moe_trainer.data.epoch_order`.
        shuffle: Grain of the shuffle: document | shard | none.
    """

    sources: dict[str, str] = Field(default_factory=dict)
    sequence_length: int = Field(default=128, ge=1)
    max_document_bytes: int = Field(default=1024, ge=1)
    shard_tokens: int = Field(default=20_480, ge=1)
    shard_order: ShardOrder = "interleaved"
    shuffle: ShuffleGrain = "document"


class OptimConfig(Config):
    """AdamW with parameter groups, and the learning-rate schedule.

    Attributes:
        lr: Peak learning rate.
        router_lr_multiplier, expert_lr_multiplier: Learning rate of the routers' and of the experts' own
            parameters, relative to `lr`. A router at 1/5 to 1/3 is the usual remedy for oscillation.
        weight_decay: Of matrices; norms and biases have none.
        beta1, beta2, eps: Of AdamW.
        warmup_steps: Linear warm-up from 0. The audit does not judge windows that begin within it.
        min_lr_ratio: The cosine ends at this fraction of `lr`.
        max_grad_norm: Gradients are clipped to this norm over all parameters.
    """

    lr: float = Field(default=3e-3, gt=0)
    router_lr_multiplier: float = Field(default=1.0, ge=0)
    expert_lr_multiplier: float = Field(default=1.0, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    warmup_steps: int = Field(default=30, ge=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0)


class LoopConfig(Config):
    """The training loop.

    Attributes:
        steps: Optimizer steps of the run.
        micro_batch_sequences: Sequences of a micro-batch.
        accumulation: Micro-batches of an optimizer step.
        seed: Of the initial weights, the order of the text, and router jitter.
        device: cpu, cuda, or auto (cuda where there is one).
        log_every: Steps between log lines and TensorBoard points.
    """

    steps: int = Field(default=300, ge=1)
    micro_batch_sequences: int = Field(default=16, ge=1)
    accumulation: int = Field(default=1, ge=1)
    seed: int = Field(default=1, ge=0, lt=2**63)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_every: int = Field(default=10, ge=1)


class RecorderConfig(Config):
    """The routing recorder.

    Attributes:
        enabled: Record the routing in `routing.db`.
        flush_every: Micro-batches of a record.
    """

    enabled: bool = True
    flush_every: int = Field(default=10, ge=1)


class GateConfig(Config):
    """The training gate, `moe_audit.hooks.TrainingGate`; off without an action.

    Attributes:
        action: hold | scale | zero_router | pause, or none.
        policy: Preset or path.
        groups: Parameter groups that hold and scale govern: all | router.
        check_every: Steps between checks; none: one stride of the windows.
        cooldown: Steps that an action lasts.
        factor: What scale multiplies the learning rate with.
        dry_run: Judge and tell, leave the learning rate alone.
        pause_when_severe: Stop also after three disjoint failing windows in a row.
        notify: apprise addresses that alerts go to.
    """

    action: Literal["hold", "scale", "zero_router", "pause"] | None = None
    policy: str = "default"
    groups: Literal["all", "router"] = "all"
    check_every: int | None = Field(default=None, ge=1)
    cooldown: int = Field(default=200, ge=1)
    factor: float = Field(default=0.1, ge=0, lt=1)
    dry_run: bool = False
    pause_when_severe: bool = False
    notify: tuple[str, ...] = Field(default=(), strict=False)


class CheckpointConfig(Config):
    """Checkpoints.

    Attributes:
        save_every: Steps between checkpoints; the last step is always saved.
        keep: How many of the newest checkpoints stay on disk.
    """

    save_every: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)


class TrainConfig(Config):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: LoopConfig = LoopConfig()
    recorder: RecorderConfig = RecorderConfig()
    gate: GateConfig = GateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gate.action is not None and not self.recorder.enabled:
            raise ConfigError("gate.action", self.gate.action, "a gate needs recorder.enabled = true")
        return self

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.train.micro_batch_sequences * self.data.sequence_length

    @property
    def tokens_per_step(self) -> int:
        return self.train.accumulation * self.tokens_per_micro_batch

    def to_toml(self) -> str:
        """The resolved configuration; `load_config` reads it back to an equal object."""
        return _to_toml(self.model_dump())

    def sha256(self) -> str:
        """Hash of the resolved configuration."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file and apply overrides of the form `optim.lr=3e-4`.

    A value is read as TOML; what is not TOML is a string, so `data.shuffle=shard` needs no quotes.
    `none` clears a setting that may be absent. Folders of `data.sources` become absolute paths.

    Raises:
        UsageError: file missing or not TOML, unknown setting (the nearest one is named), bad value.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no such configuration file: {path}", "give a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from None
    for override in overrides:
        _apply_override(raw, override)
    try:
        config = TrainConfig.model_validate(_known(raw, TrainConfig))
    except ConfigError as error:
        raise UsageError(f"{_dotted(error.field)} = {error.value!r}: {error.rule}") from None
    folders = {name: str(Path(folder).absolute()) for name, folder in config.data.sources.items()}
    return config.model_copy(update={"data": config.data.model_copy(update={"sources": folders})})


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UsageError(f"not an override: '{override}'", "write it as section.setting=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = raw
    for depth, part in enumerate(parts[:-1]):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"{'.'.join(parts[: depth + 1])} is a value, not a section, in '{override}'")
    table[parts[-1]] = value


def _known(raw: dict[str, Any], model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """`raw` without unknown keys (an error), `none` turned into None where a setting may be absent."""
    known: dict[str, Any] = {}
    for key, value in raw.items():
        field = model.model_fields.get(key)
        if field is None:
            raise UsageError(f"unknown setting: {prefix}{key}", _suggestion(prefix, key, model))
        section = _section(field.annotation)
        if section is not None and isinstance(value, dict):
            value = _known(value, section, f"{prefix}{key}.")
        elif section is not None and not (value == "none" and _may_be_none(field.annotation)):
            raise UsageError(
                f"{prefix}{key} = {value!r}: this is a section with settings of its own",
                f"set one of {', '.join(prefix + key + '.' + name for name in section.model_fields)}",
            )
        elif value == "none" and _may_be_none(field.annotation):
            value = None
        known[key] = value
    return known


def _suggestion(prefix: str, key: str, model: type[BaseModel]) -> str:
    """The setting of that name in another section, or the nearest one of this section."""
    elsewhere = [name for name in _settings(TrainConfig) if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    return nearest(prefix + key, [prefix + name for name in model.model_fields])


def _settings(model: type[BaseModel], prefix: str = "") -> dict[str, type[BaseModel]]:
    """Dotted name of every setting, with the class that holds it."""
    settings: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            settings[prefix + name] = model
        else:
            settings |= _settings(section, f"{prefix}{name}.")
    return settings


def _dotted(field: str) -> str:
    """`OptimConfig.lr` -> `optim.lr`, where the class stands in one place only."""
    owner, _, rest = field.partition(".")
    sections = {
        name.rpartition(".")[0] for name, model in _settings(TrainConfig).items() if model.__name__ == owner
    }
    return f"{sections.pop()}.{rest}" if len(sections) == 1 and rest else field


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _may_be_none(annotation: Any) -> bool:
    return type(None) in _alternatives(annotation)


def _section(annotation: Any) -> type[BaseModel] | None:
    for option in _alternatives(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _to_toml(table: dict[str, Any], prefix: str = "") -> str:
    values = [f"{_toml_key(k)} = {_toml_value(v)}" for k, v in table.items() if type(v) is not dict]
    blocks = ["\n".join([f"[{prefix}]", *values] if prefix else values)] if values or prefix else []
    for key, value in table.items():
        if isinstance(value, dict):
            blocks.append(_to_toml(value, f"{prefix}.{_toml_key(key)}" if prefix else _toml_key(key)))
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


def _toml_key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "").isalnum() and key.isascii()
    return key if bare else json.dumps(key)


def _toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    return json.dumps(value)
