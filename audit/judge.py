"""Statuses: columns of values against the limits of a policy, and the cells that are worth naming.

Columns stay arrays; a `Cell` is made only for what is not PASS, and for each gate's worst.
Shapes: W windows, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.column import MAX_EXPERTS, Column
from moe_audit.record import LayerInfo
from moe_audit.thresholds.gate_names import GATES, breaches
from moe_audit.thresholds.policy import Limit, Policy
from moe_audit.verdict import Cell, GateResult, Status
from moe_audit.windows import Windows

Floats = npt.NDArray[np.float64]
NOT_JUDGED = -1
# Of two gates in one window and layer the grid shows the one that decides: a gate that cannot tell does not
# hide one that can. Indexed by status; the last entry is NOT_JUDGED.
GRID_ORDER = np.array([2, 3, 1, 4, 5, 0])  # PASS, WARN, INSUFFICIENT, FAIL, INVALID, NOT_JUDGED
GATE_ORDER = np.array(
    [0, 2, 1, 3, 4, -1]
)  # of the cells of one gate the worst: not being able to tell is no warning


@dataclass(frozen=True)
class Judged:
    """One gate in one layer and source over all windows, judged.

    Attributes:
        status_W: -1 where there is no cell.
        limit_W: The limit that decided.
        blind_W: Noise alone would fail: to pass there is luck, and says nothing.
    """

    gate: str
    info: LayerInfo
    source: str
    limit: Limit
    column: Column
    status_W: npt.NDArray[np.int8]
    limit_W: Floats
    blind_W: npt.NDArray[np.bool_]

    def badness_W(self) -> Floats:
        """Sorts cells by status first, by distance past the limit next."""
        value = np.where(np.isnan(self.column.value_W), 0.0, self.column.value_W)
        bounded = np.clip(value, -1e12, 1e12)
        past = bounded - self.limit_W if self.limit.op[0] == ">" else self.limit_W - bounded
        scaled = past / np.maximum(np.abs(self.limit_W), 1e-9)
        return np.where(self.status_W >= 0, GATE_ORDER[self.status_W] * 4.0 + np.arctan(scaled), -np.inf)

    def cell(self, w: int, windows: Windows) -> Cell:
        """The cell of window w, as reports show it."""
        column, status, limit = self.column, Status(int(self.status_W[w])), float(self.limit_W[w])
        value = float(column.value_W[w])
        experts: tuple[int, ...] = ()
        if column.experts and status != Status.PASS:
            experts = tuple(int(e) for e in column.experts(w, limit)[:MAX_EXPERTS])
        reasons = [column.note(w)] if column.note and status != Status.PASS else []
        if status == Status.INSUFFICIENT and column.needed:
            reasons.insert(0, _needs(column, w, limit))
        if not math.isfinite(value):
            reasons.insert(0, "infinite" if math.isinf(value) else "undefined")
        return Cell(
            int(windows.first_step_W[w]),
            int(windows.last_step_W[w]),
            self.info.layer,
            self.info.name,
            self.source,
            self.gate,
            status,
            value,
            "; ".join(r for r in reasons if r) or None,
            limit,
            None if column.floor_W is None else float(column.floor_W[w]),
            float(column.tokens_W[w]),
            experts,
        )


def _needs(column: Column, w: int, limit: float) -> str:
    assert column.needed is not None  # asked by the caller
    needed = column.needed(w, limit)
    if not math.isfinite(needed):
        return "sampling noise alone exceeds the limit, however many tokens"
    return f"within sampling noise: needs {max(1, math.ceil(needed)):,} more {column.unit}".replace(",", " ")


def judge_column(
    gate: str,
    info: LayerInfo,
    source: str,
    limit: Limit,
    column: Column,
    judged_W: npt.NDArray[np.bool_],
    *,
    noise_aware: bool,
) -> Judged:
    """FAIL or WARN where a limit is breached; INSUFFICIENT where noise alone would breach it too."""
    value_W = column.value_W
    status_W = np.where(judged_W & ~np.isnan(value_W), Status.PASS, NOT_JUDGED).astype(np.int8)
    first = limit.warn if limit.warn is not None else limit.fail
    limit_W = np.full(len(value_W), np.nan if first is None else first)
    blind_W = np.zeros(len(value_W), bool)
    for level, status in ((limit.warn, Status.WARN), (limit.fail, Status.FAIL)):
        if level is None:
            continue
        breached_W = (status_W >= 0) & breaches(limit.op, value_W, level)
        if noise_aware and column.floor_W is not None:
            blind_W = breaches(limit.op, column.floor_W, level)
        status_W[breached_W] = status
        status_W[breached_W & blind_W] = Status.INSUFFICIENT
        limit_W[breached_W] = level
    return Judged(gate, info, source, limit, column, status_W, limit_W, blind_W)


@dataclass
class Tally:
    """Collects judged columns: totals, each gate's worst, cells to name, the worst per window and layer."""

    windows: Windows
    policy: Policy
    all_cells: bool = False
    totals: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(Status, 0))
    cells: list[Cell] = field(default_factory=list)
    worst: dict[str, tuple[float, Judged, int]] = field(default_factory=dict)
    unwaived: dict[str, Status] = field(default_factory=dict)
    decided: set[str] = field(default_factory=set)
    waived: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    status_WL: dict[int, npt.NDArray[np.int8]] = field(default_factory=dict)

    def add(self, judged: Judged) -> None:
        """Takes in one judged column."""
        status_W = judged.status_W
        count_of = np.bincount(status_W[status_W >= 0], minlength=len(Status)).tolist()
        if not any(count_of):
            return
        for status in Status:
            self.totals[status] += count_of[status]
        passed_W = (status_W == Status.PASS) & ~judged.blind_W
        if passed_W.any() or count_of[Status.WARN] or count_of[Status.FAIL]:
            self.decided.add(judged.gate)
        badness_W = judged.badness_W()
        w = int(badness_W.argmax())
        if judged.gate not in self.worst or badness_W[w] > self.worst[judged.gate][0]:
            self.worst[judged.gate] = (float(badness_W[w]), judged, w)
        self.cells += [judged.cell(int(w), self.windows) for w in np.flatnonzero(self._named(status_W))]
        self._settle(judged)
        grid = self.status_WL.setdefault(judged.info.layer, np.full(len(self.windows), NOT_JUDGED, np.int8))
        worse_W = GRID_ORDER[status_W] > GRID_ORDER[grid]
        grid[worse_W] = status_W[worse_W]

    def gate_results(self, order: Iterable[str]) -> list[GateResult]:
        """One result a gate, in the given order: its worst cell, and the limits that hold there."""
        results = []
        for gate in order:
            if gate in self.worst:
                _, judged, w = self.worst[gate]
                cell, limit = judged.cell(w, self.windows), judged.limit
                results.append(GateResult(gate, cell.status, limit.op, limit.warn, limit.fail, cell))
        return results

    def _named(self, status_W: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
        return status_W >= 0 if self.all_cells else status_W > Status.PASS

    def _settle(self, judged: Judged) -> None:
        """Waivers take failures and warnings out of what decides; they are listed, never silent."""
        top = Status(max(0, int(_hard(judged.status_W).max())))
        waiver = self.policy.waiver(judged.gate, judged.info.layer, judged.source) if top else None
        if waiver is None:
            self.unwaived[judged.gate] = max(self.unwaived.get(judged.gate, Status.PASS), top)
            return
        entry = self.waived.setdefault(
            (judged.gate, judged.info.layer, judged.source),
            {
                "gate": judged.gate,
                "layer": judged.info.layer,
                "source": judged.source,
                "owner": waiver.owner,
                "reason": waiver.reason,
                "expires": waiver.expires.isoformat(),
                "cells": 0,
            },
        )
        entry["cells"] += int((_hard(judged.status_W) > Status.PASS).sum())


def _hard(status_W: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """Statuses that decide: INSUFFICIENT cells are listed and do not change the code."""
    return np.where(status_W == Status.INSUFFICIENT, Status.PASS, status_W).astype(np.int8)


def limits(
    policy: Policy, gate: str, info: LayerInfo, sources: Iterable[str]
) -> Iterator[tuple[int | None, str, Limit]]:
    """(index of the source or None, its name, limit) of every place in which a layer is judged by a gate."""
    places: list[tuple[int | None, str]] = [(None, "all"), *enumerate(sources)]
    if not policy.overrides:  # without them only one kind of place has limits
        places = places[1:] if GATES[gate].per_source else places[:1]
    for index, source in places:
        limit = policy.limit(
            gate,
            num_experts=info.num_experts,
            top_k=info.top_k,
            capacity_factor=info.capacity_factor,
            layer=info.layer,
            source=source,
        )
        if limit is not None:
            yield index, source, limit
