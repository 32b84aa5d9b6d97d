"""The verdict as JSON, in the published shape (`schemas/verdict.schema.json`)."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from moe_audit.reports.wording import error_of, status_name

if TYPE_CHECKING:
    from moe_audit.verdict import Cell, GateResult, Verdict

SCHEMA_VERSION = 1
RUN_KEYS = (
    "path", "run_id", "first_step", "last_step", "layers", "num_experts", "top_k", "sources", "attempts",
)  # fmt: skip
WINDOW_KEYS = ("length", "stride", "count", "disjoint", "origin")


def render(verdict: Verdict, all_cells: bool = False) -> str:
    """JSON text; `all_cells`: those that pass too. ASCII, so that no name can reach a terminal as codes."""
    return json.dumps(to_dict(verdict, all_cells), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def to_dict(verdict: Verdict, all_cells: bool = False) -> dict[str, Any]:
    """The verdict as plain data: only dict, list, str, int, float, bool and None; every key always there."""
    return {
        "schema_version": SCHEMA_VERSION,
        "status": status_name(verdict),
        "exit_code": int(verdict.exit_code),
        "run": {key: plain(verdict.run.get(key)) for key in RUN_KEYS},
        "policy": {key: plain(verdict.policy.get(key)) for key in ("name", "sha256")},
        "windows": {key: plain(verdict.windows.get(key)) for key in WINDOW_KEYS},
        "totals": {s: int(verdict.totals.get(s, 0)) for s in ("PASS", "WARN", "FAIL", "INSUFFICIENT")},
        "gates": [gate_dict(gate) for gate in verdict.gates],
        "cells": [cell_dict(c) for c in verdict.cells if all_cells or c.status.name != "PASS"],
        "skipped": plain(verdict.skipped),
        "waived": plain(verdict.waived),
        "problems": plain(verdict.problems),
        "error": error_of(verdict),
    }


def cell_dict(cell: Cell) -> dict[str, Any]:
    """One CELL; a number that is not finite is null, and `value_reason` says what it was."""
    out = {f.name: plain(getattr(cell, f.name)) for f in dataclasses.fields(cell)}
    out["status"] = cell.status.name
    reasons = [cell.value_reason] if cell.value_reason else []
    for name in ("value", "limit", "floor", "effective_tokens"):
        number = getattr(cell, name)
        if number is not None and not math.isfinite(number):
            word = "not a number" if math.isnan(number) else "infinite"
            if name != "value" or not reasons:
                reasons.append(word if name == "value" else f"{name} is {word}")
    out["value_reason"] = "; ".join(reasons) or None
    return out


def gate_dict(gate: GateResult) -> dict[str, Any]:
    """One of `gates`."""
    return {
        "gate": gate.gate,
        "status": gate.status.name,
        "op": gate.op,
        "warn": plain(gate.warn),
        "fail": plain(gate.fail),
        "worst": None if gate.worst is None else cell_dict(gate.worst),
    }


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy unwrapped, paths as text, numbers that are not finite as None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # a numpy scalar or array
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
