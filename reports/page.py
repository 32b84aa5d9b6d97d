"""What the HTML report shows, as one compact binary block: a header in JSON, then typed arrays, gzip, base64.

Shapes: W windows, L layers, S sources, E experts, F windows that the source map is kept of.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_audit.formulas import shares
from moe_audit.reports.json import plain
from moe_audit.reports.scope import analysis_of, status_of
from moe_audit.reports.wording import (
    breach,
    clean,
    error_of,
    headline,
    note_label,
    op_of,
    ranked,
    scope,
    status_name,
)

if TYPE_CHECKING:
    from moe_audit.explain import Explanation
    from moe_audit.frame import LayerFrame
    from moe_audit.record import LayerInfo
    from moe_audit.run import Event, Run
    from moe_audit.verdict import Cell, Verdict

MOST_EVENTS = 2000
MOST_DIAGNOSES = 12
WORST_CELLS = 500  # listed one by one; the rest are counted
LOAD_BUDGET = 1_600_000  # values of all load maps together: what keeps the file and its opening small
SOURCE_BUDGET = 1_200_000  # values of all source maps together; more windows than fit are thinned evenly
LOAD_TOP = 65_534  # loads travel as u2 from 0 to the largest of the layer
NO_VALUE = 65_535
SHARE_TOP = 254  # source maps travel as u1 on a square-root scale, so that small shares keep their digits

Arrays = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]


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
    """Header and arrays of the page."""
    analysis = analysis_of(run, verdict)
    windows = analysis.windows
    experts = sum(info.num_experts for info in analysis.layers)
    arrays: Arrays = {
        "first": windows.first_step_W,
        "last": windows.last_step_W,
        "status": status_of(analysis, verdict),
        "load_at": thin(len(windows), LOAD_BUDGET // max(experts, 1)),
        "frame_at": thin(len(windows), SOURCE_BUDGET // max(experts * len(analysis.sources), 1)),
        "step": np.array([r.last_step for r in analysis.records], dtype=np.int64),
    }
    place = {info.layer: index for index, info in enumerate(analysis.layers)}
    for frame in analysis.frames():
        arrays |= _layer(place[frame.info.layer], frame, arrays["load_at"], arrays["frame_at"])
    for name in ("loss", "lr", "router_lr"):
        values = [np.nan if getattr(r, name) is None else getattr(r, name) for r in analysis.records]
        if np.isfinite(values).any():
            arrays[name] = np.array(values, dtype=np.float64)
    ops = op_of(verdict)
    header = {
        "layers": [_layer_info(info) for info in analysis.layers],
        "sources": [clean(s) for s in analysis.sources],
        "events": [_event(e) for e in run.events[:MOST_EVENTS]],
        "drift": min((c.first_step for c in verdict.cells if c.gate == "drift" and c.status), default=None),
        "cells": [_cell(c, ops) for c in ranked(verdict.cells)[:WORST_CELLS] if c.status],
    }
    return header, arrays


def summary(verdict: Verdict, explanation: Explanation | None = None) -> dict[str, Any]:
    """What the template prints without any script: the sentence, the gates, the worst cells, the notes."""
    ops = op_of(verdict)
    cells = [c for c in ranked(verdict.cells) if c.status]
    titles = {
        (gate, layer): clean(d.title, 200)
        for d in reversed(explanation.diagnoses if explanation else [])
        for gate in d.gates
        for layer in (d.layer, *d.also_layers)
    }
    rest: dict[tuple[str, str], int] = {}
    for cell in cells[WORST_CELLS:]:
        key = (clean(cell.gate), cell.status.name)
        rest[key] = rest.get(key, 0) + 1
    return {
        "status": status_name(verdict),
        "headline": headline(verdict),
        "scope": scope(verdict),
        "run": {k: clean(verdict.run.get(k) or "", 200) for k in ("path", "run_id")},
        "policy": {k: clean(verdict.policy.get(k) or "", 80) for k in ("name", "sha256")},
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
        "cells": [
            _cell(c, ops) | {"diagnosis": titles.get((c.gate, c.layer), "")} for c in cells[:WORST_CELLS]
        ],
        "diagnoses": _diagnoses(explanation),
        "rest": [{"gate": g, "status": s, "count": n} for (g, s), n in sorted(rest.items())],
        "skipped": [{k: clean(v, 300) for k, v in s.items()} for s in verdict.skipped],
        "waived": [{clean(k): clean(v, 300) for k, v in w.items() if v is not None} for w in verdict.waived],
        "problems": [
            {
                "label": note_label(p).capitalize(),
                "kind": clean(p["kind"]),
                "message": clean(p["message"], 400),
            }
            for p in verdict.problems
        ],
        "error": error_of(verdict),
    }


def _diagnoses(explanation: Explanation | None) -> list[dict[str, Any]]:
    """What `explain` found, with every text harmless and of bounded length."""
    found = explanation.diagnoses[:MOST_DIAGNOSES] if explanation is not None else []
    return [
        {
            "title": clean(d.title, 200),
            "status": clean(d.status),
            "layer": int(d.layer),
            "also": [int(layer) for layer in d.also_layers],
            "first": int(d.first_step),
            "last": int(d.last_step),
            "source": clean(d.source),
            "symptom": clean(d.symptom, 600),
            "breaches": [clean(b, 200) for b in d.breaches],
            "causes": [
                {
                    "cause": clean(c.cause, 400),
                    "evidence": clean(c.evidence or "", 400),
                    "supported": c.supported,
                }
                for c in d.causes
            ],
            "look_at": [clean(t, 400) for t in d.look_at],
            "remedies": [clean(t, 400) for t in d.remedies],
        }
        for d in found
    ]


def thin(count: int, most: int) -> Ints:
    """At most `most` (but one at least) of `count` indices, evenly spread, the last one always among them."""
    if count <= max(most, 1):
        return np.arange(count, dtype=np.int64)
    every = -(-count // max(most, 1))
    return np.arange(count - 1, -1, -every, dtype=np.int64)[::-1].copy()


def _layer_info(info: LayerInfo) -> dict[str, Any]:
    return {
        "layer": info.layer,
        "name": clean(info.name),
        "experts": info.num_experts,
        "capacity_factor": plain(info.capacity_factor),
    }


def _layer(index: int, frame: LayerFrame, load_at: Ints, frame_at: Ints) -> Arrays:
    share_FSE = shares(frame.counts_WSE[frame_at])
    router_WE, mix_WE = frame.shift_WE
    load_EW = frame.p_WE[load_at].T * frame.N
    top = max(1.0, float(np.nanmax(load_EW, initial=1.0)))
    root_FSE = np.rint(np.sqrt(np.nan_to_num(share_FSE)) * SHARE_TOP)
    out: Arrays = {
        f"top{index}": np.array([top]),
        f"load{index}": _u2(load_EW, top),
        f"source{index}": np.where(np.isnan(share_FSE), 255, root_FSE).astype(np.uint8),
        f"weight{index}": shares(frame.m_WS).astype(np.float32),
        f"router{index}": (0.5 * np.abs(router_WE).sum(-1)).astype(np.float32),
        f"mix{index}": (0.5 * np.abs(mix_WE).sum(-1)).astype(np.float32),
    }
    if frame.peak_WE is not None:
        out[f"peak{index}"] = frame.peak_WE.max(-1).astype(np.float32)
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
        "breach": breach(cell, ops.get(cell.gate, "")).replace("<=", "≤").replace(">=", "≥"),
        "value": plain(cell.value),
        "limit": plain(cell.limit),
        "floor": plain(cell.floor),
        "tokens": plain(cell.effective_tokens),
        "note": clean(cell.value_reason, 300) if cell.value_reason else "",
        "experts": [int(e) for e in cell.experts[:64]],
    }


def _event(event: Event) -> dict[str, Any]:
    return {
        "step": event.step,
        "kind": clean(event.kind),
        "detail": clean(", ".join(f"{k} {v}" for k, v in event.detail.items()), 160),
    }
