"""What the HTML report shows, as one compact binary block: a header in JSON, then typed arrays, gzip, base64.

Shapes: W windows, L layers, R records, S sources, E experts, F frames of the source map.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_audit.metrics import shares, split_shift
from moe_audit.reports.json import plain
from moe_audit.reports.wording import (
    breach,
    clean,
    error_of,
    headline,
    op_of,
    ranked,
    scope,
    status_name,
)

if TYPE_CHECKING:
    from moe_audit.run import Run
    from moe_audit.verdict import Cell, Verdict

WORST_CELLS = 500  # listed one by one; the rest are counted
LOAD_BUDGET = 1_600_000  # values of all load maps together: what keeps the file and its opening small
SOURCE_BUDGET = 1_200_000  # values of all source maps together; more windows than fit are thinned evenly
LOAD_TOP = 65_534  # loads travel as u2 from 0 to c = E/k, the largest possible
NO_VALUE = 65_535
SHARE_TOP = 254  # source maps travel as u1 on a square-root scale, so that small shares keep their digits

Arrays = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]
Span = tuple[
    Ints, Ints, Ints, Ints
]  # first and last step, first record and the one behind the last, each [W]


def pack(header: dict[str, Any], arrays: Arrays) -> str:
    """Base64 of gzip of: length of the header (u4), the header, the arrays back to back, each 8-aligned."""
    index: dict[str, dict[str, Any]] = {}
    body = bytearray()
    for name, array in arrays.items():
        body += b"\0" * (-len(body) % 8)
        code = array.dtype.str.lstrip("<|")
        index[name] = {"at": len(body), "type": code, "shape": array.shape}
        body += np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    text = json.dumps(header | {"arrays": index}, allow_nan=False).encode("ascii")
    text += b" " * (-(len(text) + 4) % 8)
    block = len(text).to_bytes(4, "little") + text + bytes(body)
    return base64.b64encode(gzip.compress(block, 6, mtime=0)).decode("ascii")


def collect(run: Run, verdict: Verdict) -> tuple[dict[str, Any], Arrays]:
    """Header and arrays of the page. Where no window was cut, single records stand in, unjudged."""
    first_W, last_W, status_WL = _windows(run, verdict)
    layers = [_layer_info(run, layer) for layer in range(len(run.layers))]
    arrays: Arrays = {"first": first_W, "last": last_W, "status": status_WL}
    W, S = len(first_W), len(run.sources)
    step_R = np.array([r.last_step for r in run.records], dtype=np.int64)
    lo_W = np.searchsorted(step_R, first_W, "left").astype(np.int64)
    hi_W = np.searchsorted(step_R, last_W, "right").astype(np.int64)
    experts = sum(info["experts"] for info in layers)
    load_at = thin(W, LOAD_BUDGET // max(experts, 1))
    frame_at = thin(W, SOURCE_BUDGET // max(experts * S, 1))
    arrays |= {"load_at": load_at, "frame_at": frame_at}
    for index, info in enumerate(layers):
        arrays |= _layer_arrays(run, index, info, (first_W, last_W, lo_W, hi_W), load_at, frame_at)
    for name in ("loss", "lr", "router_lr"):
        values = np.array([np.nan if getattr(r, name) is None else getattr(r, name) for r in run.records])
        if np.isfinite(values).any():
            arrays[name] = values.astype(np.float64)
    arrays["step"] = step_R
    header = {
        "status": status_name(verdict),
        "layers": layers,
        "sources": [clean(s) for s in run.sources],
        "events": [_event(e) for e in run.events[:2000]],
        "cells": [_cell(c, op_of(verdict)) for c in ranked(verdict.cells)[:WORST_CELLS] if c.status],
    }
    return header, arrays


def summary(verdict: Verdict) -> dict[str, Any]:
    """What the template prints without any script: the sentence, the gates, the worst cells, the notes."""
    ops = op_of(verdict)
    cells = [c for c in ranked(verdict.cells) if c.status]
    rest: dict[tuple[str, str], int] = {}
    for cell in cells[WORST_CELLS:]:
        key = (clean(cell.gate), cell.status.name)
        rest[key] = rest.get(key, 0) + 1
    return {
        "status": status_name(verdict),
        "headline": headline(verdict),
        "scope": scope(verdict),
        "run": {k: clean(v, 200) for k, v in verdict.run.items() if isinstance(v, str | int)},
        "policy": {k: clean(v, 80) for k, v in verdict.policy.items() if v is not None},
        "totals": verdict.totals,
        "gates": [
            {
                "gate": clean(g.gate),
                "status": g.status.name,
                "op": g.op,
                "warn": g.warn,
                "fail": g.fail,
                "worst": None if g.worst is None else _cell(g.worst, ops),
            }
            for g in sorted(verdict.gates, key=lambda g: -g.status)
        ],
        "cells": [_cell(c, ops) for c in cells[:WORST_CELLS]],
        "rest": [{"gate": g, "status": s, "count": n} for (g, s), n in sorted(rest.items())],
        "skipped": [{k: clean(v, 300) for k, v in s.items()} for s in verdict.skipped],
        "waived": [{clean(k): clean(v, 300) for k, v in w.items() if v is not None} for w in verdict.waived],
        "problems": [{k: clean(v, 400) for k, v in p.items()} for p in verdict.problems],
        "error": error_of(verdict),
    }


def thin(count: int, most: int) -> Ints:
    """At most `most` (but one at least) of `count` indices, evenly spread, the last one always among them."""
    if count <= max(most, 1):
        return np.arange(count, dtype=np.int64)
    every = -(-count // max(most, 1))
    return np.arange(count - 1, -1, -every, dtype=np.int64)[::-1].copy()


def _windows(run: Run, verdict: Verdict) -> tuple[Ints, Ints, npt.NDArray[np.int8]]:
    grid = verdict.grid
    if grid is not None and len(grid.first_step_W):
        column = {layer: i for i, layer in enumerate(grid.layers)}
        status_WL = np.full((len(grid.first_step_W), len(run.layers)), -1, dtype=np.int8)
        for i, info in enumerate(run.layers):
            if info.layer in column:
                status_WL[:, i] = grid.status_WL[:, column[info.layer]]
        return np.asarray(grid.first_step_W, np.int64), np.asarray(grid.last_step_W, np.int64), status_WL
    first = np.array([r.first_step for r in run.records], dtype=np.int64)
    last = np.array([r.last_step for r in run.records], dtype=np.int64)
    return first, last, np.full((len(first), len(run.layers)), -1, dtype=np.int8)


def _layer_info(run: Run, index: int) -> dict[str, Any]:
    info = run.layers[index]
    return {
        "layer": info.layer,
        "name": clean(info.name),
        "experts": info.num_experts,
        "top_k": info.top_k,
        "capacity_factor": plain(info.capacity_factor),
        "top": info.num_experts / (info.top_k or 1),
        "tags": [clean(t) for t in info.tags],
    }


def _layer_arrays(
    run: Run,
    index: int,
    info: dict[str, Any],
    span: Span,
    load_at: Ints,
    frame_at: Ints,
) -> Arrays:
    layer, E = info["layer"], info["experts"]
    first_W, last_W, lo_W, hi_W = span
    counts_RSE = run.counts(layer)
    sums = np.concatenate([np.zeros((1, *counts_RSE.shape[1:]), np.int64), np.cumsum(counts_RSE, axis=0)])
    counts_WSE = sums[hi_W] - sums[lo_W]
    share_WE = shares(counts_WSE.sum(axis=1))
    out: Arrays = {f"load{index}": _u2(share_WE[load_at].T * E, info["top"])}
    share_FSE = shares(counts_WSE[frame_at])
    out[f"source{index}"] = np.where(
        np.isnan(share_FSE), 255, np.rint(np.sqrt(np.nan_to_num(share_FSE)) * SHARE_TOP)
    ).astype(np.uint8)
    out[f"weight{index}"] = shares(counts_WSE.sum(axis=2)).astype(np.float32)
    before_W = np.searchsorted(last_W, first_W, "left") - 1  # the last window that does not overlap
    router_WE, mix_WE = split_shift(counts_WSE[np.maximum(before_W, 0)], counts_WSE)
    for name, effect_WE in (("router", router_WE), ("mix", mix_WE)):
        size_W = 0.5 * np.abs(effect_WE).sum(axis=1)
        out[f"{name}{index}"] = np.where(before_W < 0, np.nan, size_W).astype(np.float32)
    peak_RE = run.stat(layer, "peak")
    if peak_RE is not None:
        out[f"peak{index}"] = np.array(
            [peak_RE[a:b].max() if b > a else np.nan for a, b in zip(lo_W, hi_W)], dtype=np.float32
        )
    return out


def _u2(values: npt.NDArray[np.float64], top: float) -> npt.NDArray[np.uint16]:
    scaled = np.rint(np.clip(np.nan_to_num(values) / top, 0, 1) * LOAD_TOP)
    return np.where(np.isnan(values), NO_VALUE, scaled).astype(np.uint16)


def _cell(cell: Cell, ops: dict[str, str]) -> dict[str, Any]:
    return {
        "gate": clean(cell.gate),
        "status": cell.status.name,
        "layer": int(cell.layer),
        "name": clean(cell.layer_name),
        "first": int(cell.first_step),
        "last": int(cell.last_step),
        "source": clean(cell.source),
        "breach": breach(cell, ops.get(cell.gate, "")),
        "value": plain(cell.value),
        "limit": plain(cell.limit),
        "floor": plain(cell.floor),
        "tokens": plain(cell.effective_tokens),
        "experts": [int(e) for e in cell.experts[:64]],
    }


def _event(event: Any) -> dict[str, Any]:
    return {
        "step": event.step,
        "kind": clean(event.kind),
        "detail": clean(", ".join(f"{k} {v}" for k, v in event.detail.items()), 160),
    }
