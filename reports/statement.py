"""The routing statement: what a release says about its routers, derived from the store and nothing else.

`statement` writes `routing_statement.json` (its shape: `schemas/statement.schema.json`) and
`routing_statement.md`, a section for a model card. `verify` derives both again and says what differs.
Shapes: W judged windows, S sources, E experts of a layer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_audit import formulas as m
from moe_audit.checking import check
from moe_audit.reports.json import gate_dict, plain
from moe_audit.reports.model_card import render_card
from moe_audit.reports.scope import analysis_of
from moe_audit.reports.wording import sentence
from moe_audit.thresholds.errors import AuditError, StoreError, UsageError
from moe_audit.thresholds.policy import Policy, load_policy, policy_from_dict

if TYPE_CHECKING:
    from moe_audit.frame import Analysis, LayerFrame
    from moe_audit.run import RecordInfo, Run
    from moe_audit.verdict import Verdict

SCHEMA_VERSION = 1
JSON_NAME = "routing_statement.json"
CARD_NAME = "routing_statement.md"
DIGITS = 6  # numbers are rounded to so many digits, so that another machine derives the same ones
MOST_DIFFERENCES = 50
CAUSES = (
    "schema_version",
    "checkpoint",
    "coverage.",
    "policy.",
    "hashes.store",
)  # named before their effects


def statement(
    run: Run,
    checkpoint: int | None = None,
    policy: Policy | str | Path | None = None,
    out_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Judges `run` (its last windows up to `checkpoint`, or all) and states what was found.

    Args:
        run: An open run.
        checkpoint: Step of the checkpoint that is to be released.
        policy: A policy, its name or path; None looks for one as `check` does.
        out_dir: Where the two files go, if anywhere; made if need be.

    Returns:
        The content of `routing_statement.json`. A run that fails gets a statement too: `verdict.exit_code`
        of it says whether the release may go on.

    Raises:
        UsageError, NoDataError, StoreError: as `check` does; or `out_dir` cannot be written.
    """
    if not isinstance(policy, Policy):
        policy = load_policy(policy)
    content = _derive(run, checkpoint, policy)
    if out_dir is not None:
        folder = Path(out_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / JSON_NAME).write_text(dump(content), encoding="ascii")
            (folder / CARD_NAME).write_text(render_card(content), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be written: {error}", "choose another folder with -o"
            ) from error
    return content


def verify(folder: str | Path, run: Run | None = None) -> list[str]:
    """Derives the statement in `folder` again and lists what differs, by field; empty: nothing does.

    Args:
        folder: Holds `routing_statement.json` and `routing_statement.md`.
        run: The run; by default the one at the path that the statement names.

    Raises:
        UsageError: there is no statement, or no run.
    """
    folder = Path(folder)
    text = _read(folder / JSON_NAME)
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [f"{JSON_NAME}: not JSON: {error}"]
    if not isinstance(stated, dict) or stated.get("schema_version") != SCHEMA_VERSION:
        return [f"schema_version: this is no statement of version {SCHEMA_VERSION}"]
    try:
        resolved = stated["policy"]["resolved"]
        path, checkpoint = stated["run"]["path"], stated["checkpoint"]
        policy = policy_from_dict(dict(resolved), "the statement")
        if checkpoint is not None and type(checkpoint) is not int:
            return [f"checkpoint: {checkpoint!r} is no step"]
    except (AuditError, KeyError, TypeError, ValueError) as error:
        return [f"policy, run or checkpoint of {JSON_NAME} cannot be read: {error}"]
    try:
        derived = _with_run(run, path, checkpoint, policy)
    except StoreError as error:
        return [f"store: {error}"]
    except AuditError as error:
        if run is None and isinstance(error, UsageError):
            raise
        return [f"run: {error}"]
    found = [f for f in _differences(stated, derived) if not f.startswith("run.path: ")]
    if isinstance(stated.get("hashes"), dict) and stated["hashes"].get("statement") != _own_hash(stated):
        found.append("hashes.statement: the statement is not the one that this hash was taken of")
    found.sort(key=lambda f: not f.startswith(CAUSES))
    if not found and text != dump(stated):
        line = _first_line(text, dump(stated))
        found.append(f"{JSON_NAME} line {line}: the same values, written another way")
    card = _read(folder / CARD_NAME)
    if card != (expected := render_card(stated if not found else derived)):
        found.append(f"{CARD_NAME} line {_first_line(card, expected)}: not what the statement says")
    more = len(found) - MOST_DIFFERENCES
    return found[:MOST_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])


def dump(content: dict[str, Any]) -> str:
    """The one way in which a statement is written."""
    return json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


# -- deriving


def _with_run(run: Run | None, path: str, checkpoint: int | None, policy: Policy) -> dict[str, Any]:
    from moe_audit.run import open_run

    if run is not None:
        return _derive(run, checkpoint, policy)
    with open_run(path) as opened:
        return _derive(opened, checkpoint, policy)


def _derive(run: Run, checkpoint: int | None, policy: Policy) -> dict[str, Any]:
    verdict = check(run, policy, checkpoint=checkpoint)
    analysis = analysis_of(run, verdict)
    rows = _judged(analysis, verdict)
    layers, headroom, mix = [], [], None
    for frame in analysis.frames():
        layers.append(_layer(frame, rows))
        headroom += _headroom(frame)
        mix = m.shares(frame.m_WS) if mix is None else mix
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "checkpoint": checkpoint,
        "verdict": _verdict(verdict),
        "run": {k: plain(v) for k, v in verdict.run.items() if k != "attempts"},
        "coverage": _coverage(run, analysis),
        "windows": plain(verdict.windows) | {"judged": _windows(analysis, rows, mix)},
        "layers": layers,
        "conditions": {
            "tokens_per_step": _tokens_per_step(analysis.records),
            "source_mix": _mix(analysis, rows, mix),
            "headroom": _smallest(headroom),
        },
        "policy": {
            "name": policy.name,
            "sha256": policy.sha256,
            "resolved": json.loads(json.dumps(policy.as_dict(), default=str)),
        },
        "hashes": {"store": store_hash(run, analysis.records), "policy": policy.sha256},
    }
    content = {key: _rounded(value) for key, value in content.items()}
    content["hashes"]["statement"] = _own_hash(content)
    return content


def store_hash(run: Run, records: Sequence[RecordInfo]) -> str:
    """SHA-256 over all that the store holds of `records`, so over what a verdict can rest on.

    Not over the file: that changes while training goes on, and with every copy through SQLite.
    """
    digest = hashlib.sha256()

    def take(*values: object) -> None:
        digest.update(json.dumps(values, default=str).encode() + b"\n")

    take(run.sources, [vars(info) for info in run.layers])
    wanted = {r.record: i for i, r in enumerate(records)}
    for record in records:
        take(*vars(record).values())
    for table, columns in (
        ("load", "counts, prob_sum, tokens, top1, invalid"),
        ("layer_stat", "peak, sq_over_t, dropped, logit_mean, logit_std, calls"),
    ):
        for info in run.layers:
            sql = f"SELECT record, {columns} FROM {table} WHERE layer = ? ORDER BY record"
            for record, *values in run.query(sql, info.layer):
                if record in wanted:
                    take(table, info.layer, record)
                    for value in values:
                        digest.update(value if isinstance(value, bytes) else repr(value).encode())
    return digest.hexdigest()


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "status": verdict.status.name,
        "exit_code": verdict.exit_code,
        "sentence": sentence(verdict),
        "totals": plain(verdict.totals),
        "gates": [gate_dict(gate) for gate in verdict.gates],
        "skipped": plain(verdict.skipped),
        "waived": plain(verdict.waived),
        "problems": plain(verdict.problems),
    }


def _coverage(run: Run, analysis: Analysis) -> dict[str, Any]:
    """What was recorded up to the last step judged; what training did after it does not change this.

    `spans`: first step, steps of a record, how many such records follow one another.
    """
    records = analysis.records
    end = records[-1].last_step
    sql = "SELECT count(*) FROM record WHERE phase = ? AND last_step <= ?"
    written = next(iter(run.query(sql, run.phase, end)))[0]
    live = sum(r.last_step <= end for r in run.records)
    spans = []
    for _, group in groupby(enumerate(records), key=lambda x: _span_key(records, x[0])):
        members = [r for _, r in group]
        spans.append([members[0].first_step, members[0].last_step - members[0].first_step + 1, len(members)])
    return {
        "records": len(records),
        "spans": spans,
        "superseded_records": written - live,
        "gaps": [[g.first_step, g.last_step] for g in run.gaps if g.last_step <= end],
        "unjudged_steps": analysis.windows.unjudged_steps,
        "tokens": sum(r.tokens or 0 for r in records),
        "excluded_tokens": sum(r.excluded_tokens or 0 for r in records),
        "attempts": [plain(vars(a)) for a in run.attempts if a.start_step <= end],
    }


def _span_key(records: Sequence[RecordInfo], index: int) -> tuple[int, int]:
    """Equal for neighbouring records of one length without a gap between them."""
    record = records[index]
    steps = record.last_step - record.first_step + 1
    return steps, record.first_step - index * steps


def _judged(analysis: Analysis, verdict: Verdict) -> list[int]:
    if verdict.grid is None:
        return []
    spans = set(zip(verdict.grid.first_step_W.tolist(), verdict.grid.last_step_W.tolist()))
    windows = analysis.windows
    every = zip(windows.first_step_W.tolist(), windows.last_step_W.tolist())
    return [w for w, span in enumerate(every) if span in spans]


def _windows(analysis: Analysis, rows: list[int], mix_WS: Any) -> list[dict[str, Any]]:
    windows, records = analysis.windows, analysis.records
    return [
        {
            "first_step": int(windows.first_step_W[w]),
            "last_step": int(windows.last_step_W[w]),
            "tokens": sum(r.tokens or 0 for r in records[windows.lo_W[w] : windows.hi_W[w]]),
            "loss": float(analysis.loss_W[w]),
            "source_mix": mix_WS[w].tolist(),
        }
        for w in rows
    ]


def _layer(frame: LayerFrame, rows: list[int]) -> dict[str, Any]:
    """Per window the load and its change; of the last window every pick, per source and expert."""
    router_WE, mix_WE = frame.shift_WE
    out: dict[str, Any] = {
        "layer": frame.info.layer,
        "name": frame.info.name,
        "num_experts": frame.N,
        "top_k": frame.info.top_k,
        "capacity_factor": frame.info.capacity_factor,
    }
    for name, values_W in (
        ("max_load", m.max_load(frame.n_WE)),
        ("min_load", m.min_load(frame.n_WE)),
        ("cv", m.cv(frame.n_WE)),
        ("router_shift", 0.5 * np.abs(router_WE).sum(-1)),
        ("mix_shift", 0.5 * np.abs(mix_WE).sum(-1)),
    ):
        out[name] = values_W[rows].tolist()
    last = frame.counts_WSE[rows[-1] if rows else -1]
    out["last_window_picks"] = last.tolist()
    return out


def _headroom(frame: LayerFrame) -> list[dict[str, Any]]:
    if frame.info.capacity_factor is None:
        return []
    share_S = m.source_headroom(frame.counts_WSE[-1], frame.info.capacity_factor)
    return [
        {"source": name, "layer": frame.info.layer, "share": float(share)}
        for name, share in zip(frame.sources, share_S)
        if not math.isnan(share)
    ]


def _smallest(headroom: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each source the layer in which an expert overflows first."""
    best: dict[str, dict[str, Any]] = {}
    for entry in headroom:
        if entry["source"] not in best or entry["share"] < best[entry["source"]]["share"]:
            best[entry["source"]] = entry
    return list(best.values())


def _mix(analysis: Analysis, rows: list[int], mix_WS: Any) -> list[dict[str, Any]]:
    """Least and largest share of the assignments that each source had in a judged window."""
    shares = mix_WS[rows] if rows else mix_WS
    return [
        {"source": name, "least": float(np.nanmin(shares[:, s])), "most": float(np.nanmax(shares[:, s]))}
        for s, name in enumerate(analysis.sources)
        if not np.isnan(shares[:, s]).all()
    ]


def _tokens_per_step(records: Sequence[RecordInfo]) -> float | None:
    known = [(r.tokens, r.last_step - r.first_step + 1) for r in records if r.tokens is not None]
    return sum(t for t, _ in known) / sum(s for _, s in known) if known else None


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return plain(value)


def _own_hash(content: dict[str, Any]) -> str:
    hashes = {k: v for k, v in content["hashes"].items() if k != "statement"}
    return hashlib.sha256(dump(content | {"hashes": hashes}).encode()).hexdigest()


# -- comparing


def _differences(stated: Any, derived: Any, place: str = "") -> Iterator[str]:
    """Field by field what two pieces of plain data have apart."""
    if isinstance(stated, dict) and isinstance(derived, dict):
        for key in dict.fromkeys([*derived, *stated]):
            here = f"{place}.{key}" if place else str(key)
            if key not in stated:
                yield f"{here}: missing from the statement"
            elif key not in derived:
                yield f"{here}: nothing that a store gives"
            elif here != "hashes.statement":
                yield from _differences(stated[key], derived[key], here)
    elif isinstance(stated, list) and isinstance(derived, list) and len(stated) == len(derived):
        for i, (a, b) in enumerate(zip(stated, derived)):
            yield from _differences(a, b, f"{place}[{i}]")
    elif stated != derived or type(stated) is not type(derived):
        yield f"{place}: the statement says {_short(stated)}, the store gives {_short(derived)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:119]}…"


def _first_line(a: str, b: str) -> int:
    pairs = enumerate(zip(a.splitlines(keepends=True), b.splitlines(keepends=True)), 1)
    return next((i for i, (x, y) in pairs if x != y), min(a.count("\n"), b.count("\n")) + 1)


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except OSError as error:
        remedy = "make it with moe-audit statement -o DIR"
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy) from error
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error}"
