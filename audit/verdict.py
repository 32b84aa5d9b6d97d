"""The verdict: plain data that reports render and exit codes come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.windows import Tail


class Status(IntEnum):
    """Status of a cell, a gate or a run. A number, so that arrays can hold it; shown as its name.

    It equals its name too, so that Python reads as the JSON does: `verdict.status == "FAIL"`.
    """

    PASS = 0
    WARN = 1
    INSUFFICIENT = 2
    FAIL = 3
    INVALID = 4

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)

    def __eq__(self, other: object) -> bool:
        return self.name == other if isinstance(other, str) else int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = IntEnum.__hash__


@dataclass(frozen=True)
class Cell:
    """One (window, layer, gate, source), judged. `source` is "all" for pooled cells."""

    first_step: int
    last_step: int
    layer: int
    layer_name: str
    source: str
    gate: str
    status: Status
    value: float | None
    value_reason: str | None = None
    limit: float | None = None
    floor: float | None = None
    effective_tokens: float | None = None
    experts: tuple[int, ...] = ()


@dataclass(frozen=True)
class GateResult:
    """One gate over the whole run: its limits and its worst cell."""

    gate: str
    status: Status
    op: str
    warn: float | None
    fail: float | None
    worst: Cell | None


@dataclass(frozen=True)
class Grid:
    """The status that decides per window and layer, for timelines.

    `status_WL` is int8 of `Status`, -1 where nothing was judged.
    """

    first_step_W: npt.NDArray[np.int64]
    last_step_W: npt.NDArray[np.int64]
    layers: tuple[int, ...]
    status_WL: npt.NDArray[np.int8]


@dataclass
class Verdict:
    """The whole judgement of one run under one policy. Contract: `design.md`, Verdicts and exit codes."""

    status: Status
    exit_code: int
    run: dict[str, Any]
    policy: dict[str, Any]
    windows: dict[str, Any]
    totals: dict[str, int]
    gates: Sequence[GateResult] = ()
    cells: Sequence[Cell] = ()  # those that are not PASS; all of them where asked
    skipped: Sequence[dict[str, str]] = ()
    waived: Sequence[dict[str, Any]] = ()
    problems: Sequence[dict[str, str]] = ()
    error: dict[str, str] | None = None
    grid: Grid | None = field(default=None, repr=False)
    tail: Tail | None = field(default=None, repr=False)  # what the next check of the last windows must read
