"""The shape of a policy file, as pydantic models: a slip is an error, and the JSON Schema comes free."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from moe_audit.thresholds import expressions
from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.gate_names import GATES, Op, nearest

NO_LIMIT = "none"  # as a limit: drops the one of the policy that is extended


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


LimitText = Annotated[
    float | str,
    Field(description="A number, an expression over N, k, CF, c, g with min, max, log2, clip, or 'none'."),
]


def _check_limit(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a limit is a number or an expression, not true or false")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a limit is a finite number, not {value}")
    if isinstance(value, str) and value != NO_LIMIT:
        try:
            expressions.parse(value)
        except UsageError as error:
            raise ValueError(str(error)) from error
    return value


class GateRule(_Model):
    """Limits of one gate. What is left out comes from the policy that is extended."""

    enabled: bool | None = Field(default=None, description="false switches the gate off.")
    op: Op | None = Field(
        default=None, description="When a value breaches its limit; the gate's own side by default."
    )
    warn: LimitText | None = None
    fail: LimitText | None = None

    _limits = field_validator("warn", "fail", mode="before")(_check_limit)

    def merged(self, later: GateRule) -> GateRule:
        """This rule with what `later` sets laid over it."""
        return self.model_copy(update={k: getattr(later, k) for k in later.model_fields_set})


Gates = Annotated[dict[str, GateRule], Field(description="One table a gate: [gates.max_load]")]


class _Scope(_Model):
    layers: Annotated[
        str | int | list[int | str] | None, Field(description="3, '0-3', or a list of those; all by default.")
    ] = None
    sources: Annotated[
        list[str] | None, Field(description='Names of sources, or "all" for the sum over sources.')
    ] = None

    @field_validator("layers")
    @classmethod
    def _layer_ranges(cls, value: Any) -> Any:
        ranges(value)
        return value

    def covers(self, layer: int, source: str) -> bool:
        wanted = ranges(self.layers)
        in_layers = wanted is None or any(first <= layer <= last for first, last in wanted)
        return in_layers and (self.sources is None or source in self.sources)


class Override(_Scope):
    """Limits for some layers or some sources. The last that covers a cell wins."""

    gates: Gates = {}

    @field_validator("gates")
    @classmethod
    def _known_gates(cls, value: dict[str, GateRule]) -> dict[str, GateRule]:
        return _known_gates(value)


class Waiver(_Scope):
    """A failure that somebody answers for until a day. It is listed with the verdict, and expires."""

    gate: str
    owner: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    expires: dt.date = Field(description="The last day on which it holds.")

    @field_validator("gate")
    @classmethod
    def _known_gate(cls, value: str) -> str:
        _known_gates({value: GateRule()})
        return value

    def expired(self, today: dt.date) -> bool:
        return today > self.expires


class Provenance(_Model):
    """Where calibrated limits come from, and what a run must look like for them to hold."""

    references: list[str]
    created: str
    method: str
    num_experts: int
    top_k: int | None = None
    capacity_factor: float | None = None
    source_mix: dict[str, float] = {}
    microbatch_tokens: float | None = None
    disjoint_windows: int
    alpha: float
    attainable_alpha: float
    calibrated: bool = Field(description="false: too few disjoint windows for alpha.")
    notes: list[str] = []


class PolicyFile(_Model):
    """The contents of a policy file; every key may be left out."""

    name: str | None = None
    description: str | None = None
    extends: str | None = Field(default=None, description="A preset, or a file relative to this one.")
    alpha: float | None = Field(
        None, gt=0, le=0.5, description="False alarms allowed over all cells of a run."
    )
    noise_aware: bool | None = Field(
        default=None, description="Whether sampling floors decide between FAIL and INSUFFICIENT."
    )
    lag: int | Literal["disjoint"] | None = Field(
        None,
        description="Windows between the two that stability compares; 'disjoint': the last without overlap.",
    )
    effect: Literal["router", "total"] | None = Field(
        default=None, description="What stability gates judge: the router's part of a swing, or all of it."
    )
    count_windows: Literal["disjoint", "consecutive"] | None = Field(
        default=None, description="Which windows count towards min_windows and escalation."
    )
    min_windows: int | None = Field(default=None, ge=1)
    length: int | None = Field(default=None, ge=1, description="Window length in steps.")
    stride: int | None = Field(default=None, ge=1, description="Steps between the ends of windows.")
    required: list[str] | None = Field(default=None, description="Gates that must have a decided cell.")
    gates: Gates = {}
    overrides: list[Override] = []
    waivers: list[Waiver] = []
    provenance: Provenance | None = None

    @field_validator("gates")
    @classmethod
    def _known(cls, value: dict[str, GateRule]) -> dict[str, GateRule]:
        return _known_gates(value)

    @field_validator("required")
    @classmethod
    def _known_required(cls, value: list[str] | None) -> list[str] | None:
        _known_gates(dict.fromkeys(value or [], GateRule()))
        return value

    @field_validator("lag")
    @classmethod
    def _positive_lag(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"lag is {value}: it must be 1 or more, or 'disjoint'")
        return value

    @model_validator(mode="after")
    def _no_gap_between_windows(self) -> PolicyFile:
        if self.length and self.stride and self.stride > self.length:
            raise ValueError(
                f"stride {self.stride} exceeds length {self.length}: steps between windows go unjudged"
            )
        return self


def stricter(op: Op, warn: float, fail: float) -> bool:
    return warn < fail if op.startswith(">") else warn > fail


def _known_gates(rules: dict[str, GateRule]) -> dict[str, GateRule]:
    for name in rules:
        if name not in GATES:
            raise ValueError(f"unknown gate {name!r}: {nearest(name, GATES)}")
    for name, rule in rules.items():
        if rule.op is not None and rule.op[0] != GATES[name].op:
            raise ValueError(f"gate {name} has its bad side at {GATES[name].op!r}, not {rule.op!r}")
        _check_order(name, rule)
    return rules


def _check_order(name: str, rule: GateRule) -> None:
    if isinstance(rule.warn, float) and isinstance(rule.fail, float) and rule.warn != rule.fail:
        op = rule.op or GATES[name].op
        if not stricter(op, rule.warn, rule.fail):
            side = "below" if op.startswith(">") else "above"
            raise ValueError(f"gate {name}: warn {rule.warn:g} must lie {side} fail {rule.fail:g}")


def ranges(layers: str | int | Sequence[int | str] | None) -> list[tuple[int, int]] | None:
    """Inclusive ranges of layers; None: all."""
    if layers is None:
        return None
    items = [layers] if isinstance(layers, int | str) else layers
    out = []
    for item in items:
        first, _, last = str(item).partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise ValueError(f"{item!r} is no layer or range of layers, such as 3 or '0-3'")
        low, high = int(first), int(last or first)
        if high < low:
            raise ValueError(f"the range of layers {item!r} runs backwards")
        out.append((low, high))
    return out
