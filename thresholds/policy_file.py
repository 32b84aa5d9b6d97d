"""The shape of a policy file: plain dataclasses that check what they hold.

pydantic validates the files of users against them, types and unknown keys included, and derives the JSON
Schema. The presets are built without it, so that a plain `check` does not wait for it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from moe_audit.thresholds import expressions
from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.gate_names import GATES, Op, nearest

NO_LIMIT = "none"  # as a limit: drops the one of the policy that is extended
SAME_MIX = 0.05  # total variation between source mixes up to which they count as the same
SAME_BATCH = 1.25  # ratio of micro-batch tokens up to which they count as the same
STRICT: dict[str, Any] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True)
class GateRule:
    """Limits of one gate. What is left out comes from the policy that is extended."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    enabled: bool | None = None
    """false switches the gate off."""
    op: Op | None = None
    """When a value breaches its limit; the gate's own side by default."""
    warn: float | str | None = None
    """A number, an expression over N, k, CF, c, g with min, max, log2, clip, or 'none'."""
    fail: float | str | None = None
    """As warn; for a gate whose bad side is above, the larger of the two."""

    def __post_init__(self) -> None:
        for name in ("warn", "fail"):
            value = getattr(self, name)
            if isinstance(value, int):  # 5 and 5.0 are one limit, and one hash
                object.__setattr__(self, name, float(value))
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"a limit is a finite number, not {value}")
            if isinstance(value, str) and value != NO_LIMIT:
                try:
                    expressions.parse(value)
                except UsageError as error:
                    raise ValueError(str(error)) from error

    def merged(self, later: GateRule) -> GateRule:
        """This rule with what `later` sets laid over it."""
        given = {k: v for k, v in vars(later).items() if v is not None}
        return dataclasses.replace(self, **given)

    @property
    def limits(self) -> bool:
        return not (self.warn is None and self.fail is None)


@dataclass(frozen=True)
class Scope:
    """The cells that an override or a waiver is about."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    layers: int | str | list[int | str] | None = None
    """3, '0-3', or a list of those; all by default."""
    sources: list[str] | None = None
    """Names of sources, or "all" for the sum over sources."""

    def __post_init__(self) -> None:
        ranges(self.layers)

    def covers(self, layer: int, source: str) -> bool:
        wanted = ranges(self.layers)
        in_layers = wanted is None or any(first <= layer <= last for first, last in wanted)
        return in_layers and (self.sources is None or source in self.sources)


@dataclass(frozen=True)
class Override(Scope):
    """Limits for some layers or some sources. The last that covers a cell wins."""

    gates: dict[str, GateRule] = field(default_factory=dict)
    """One table a gate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.gates)


@dataclass(frozen=True, kw_only=True)
class Waiver(Scope):
    """A failure that somebody answers for until a day. It is listed with the verdict, and expires."""

    gate: str
    owner: str
    reason: str
    expires: dt.date
    """The last day on which it holds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules({self.gate: GateRule()})
        for name in ("owner", "reason"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty: a waiver names who answers for it, and why")

    def expired(self, today: dt.date) -> bool:
        return today > self.expires


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where calibrated limits come from, and what a run must look like for them to hold."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    references: list[str]
    created: str
    method: str
    num_experts: int
    top_k: int | None = None
    capacity_factor: float | None = None
    source_mix: dict[str, float] = field(default_factory=dict)
    microbatch_tokens: float | None = None
    disjoint_windows: int
    alpha: float
    attainable_alpha: float
    calibrated: bool
    """false: too few disjoint windows for alpha."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PolicyFile:
    """The contents of a policy file; every key may be left out."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    name: str | None = None
    description: str | None = None
    extends: str | None = None
    """A preset, or a file relative to this one."""
    alpha: float | None = None
    """False alarms allowed over all cells of a run, above 0 and at most 0.5."""
    noise_aware: bool | None = None
    """Whether sampling floors decide between FAIL and INSUFFICIENT."""
    lag: int | Literal["disjoint"] | None = None
    """Windows between the two that stability compares; 'disjoint': the last without overlap."""
    effect: Literal["router", "total"] | None = None
    """What stability gates judge: the router's part of a swing, or all of it."""
    count_windows: Literal["disjoint", "consecutive"] | None = None
    """Which windows count towards min_windows and escalation."""
    min_windows: int | None = None
    """Windows without which a run is INSUFFICIENT."""
    length: int | None = None
    """Window length in steps."""
    stride: int | None = None
    """Steps between the ends of two windows."""
    required: list[str] | None = None
    """Gates that must have a decided cell."""
    gates: dict[str, GateRule] = field(default_factory=dict)
    """One table a gate: [gates.max_load]"""
    overrides: list[Override] = field(default_factory=list)
    waivers: list[Waiver] = field(default_factory=list)
    provenance: Provenance | None = None

    def __post_init__(self) -> None:
        check_rules(self.gates)
        check_rules(dict.fromkeys(self.required or (), GateRule()))
        if self.alpha is not None and not 0 < self.alpha <= 0.5:
            raise ValueError(f"alpha is {self.alpha}: it must lie above 0 and at most at 0.5")
        for name in ("min_windows", "length", "stride", "lag"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if self.length and self.stride and self.stride > self.length:
            raise ValueError(
                f"stride {self.stride} exceeds length {self.length}: steps between windows go unjudged"
            )


def stricter(op: Op, warn: float, fail: float) -> bool:
    return warn < fail if op.startswith(">") else warn > fail


def check_rules(rules: dict[str, GateRule]) -> None:
    """Raises ValueError for an unknown gate, an op on the wrong side, or a warning beyond its limit."""
    for name, rule in rules.items():
        if name not in GATES:
            raise ValueError(f"unknown gate {name!r}: {nearest(name, GATES)}")
        if rule.op is not None and rule.op[0] != GATES[name].op:
            raise ValueError(f"gate {name} has its bad side at {GATES[name].op!r}, not {rule.op!r}")
        op: Op = rule.op or GATES[name].op
        numbers = [x for x in (rule.warn, rule.fail) if isinstance(x, int | float)]
        if len(numbers) == 2 and numbers[0] != numbers[1] and not stricter(op, *numbers):
            side = "below" if op.startswith(">") else "above"
            raise ValueError(f"gate {name}: warn {numbers[0]:g} must lie {side} fail {numbers[1]:g}")


def ranges(layers: str | int | Sequence[int | str] | None) -> list[tuple[int, int]] | None:
    """Inclusive ranges of layers; None: all.

    Raises:
        ValueError: one is no layer and no range.
    """
    if layers is None:
        return None
    out = []
    for item in [layers] if isinstance(layers, int | str) else layers:
        first, _, last = str(item).partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise ValueError(f"{item!r} is no layer or range of layers, such as 3 or '0-3'")
        low, high = int(first), int(last or first)
        if high < low:
            raise ValueError(f"the range of layers {item!r} runs backwards")
        out.append((low, high))
    return out


def mix_distance(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """Total variation between two source mixes.

    >>> mix_distance({"code": 0.5, "prose": 0.5}, {"code": 1.0})
    0.5
    """
    return 0.5 * sum(abs(a.get(name, 0) - b.get(name, 0)) for name in {*a, *b})


def same_batches(a: float | None, b: float | None) -> bool:
    """Whether two sizes of micro-batches count as the same; an unknown one does."""
    return not a or not b or 1 / SAME_BATCH <= a / b <= SAME_BATCH
