"""What must hold in a run for its counts to mean anything. One broken makes the audit INVALID."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from moe_audit.blocks import LayerBlocks
from moe_audit.record import POST_DROP
from moe_audit.run import RecordInfo, Run

Problem = dict[str, str]
INVARIANT = "invariant"  # the kind of a problem, and of an event, that makes a run INVALID


def problem(kind: str, message: str) -> Problem:
    """One entry of `Verdict.problems`."""
    return {"kind": kind, "message": message}


@dataclass
class Inspector:
    """Looks at each layer's records as they are read, in model order; `problems` holds what it found."""

    records: Sequence[RecordInfo]
    rows: Sequence[int]  # of run.records, in the order of `records`
    problems: list[Problem] = field(default_factory=list)
    unchecked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known = np.array([r.tokens is not None for r in self.records])  # an import knows no tokens
        self._tokens = np.array([r.tokens or 0 for r in self.records])
        self._batches = np.array([r.microbatches or 0 for r in self.records])
        self._encoder = False  # whether a layer of one was seen
        self._decoder_tokens: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None

    def __call__(self, blocks: LayerBlocks) -> None:
        self.problems += self._layer(blocks)

    def _layer(self, blocks: LayerBlocks) -> Iterator[Problem]:
        info, rows = blocks.info, np.asarray(self.rows)
        known, per_record, batches = self._known, self._tokens, self._batches
        name = f"layer {info.layer} ({info.name})"
        missing = np.flatnonzero(~blocks.rows_R[rows] & known)
        if len(missing):
            yield problem(
                INVARIANT,
                f"{name} did not fire in {_steps(self.records, missing)}: the hook was bypassed or came off",
            )
        if blocks.tokens_BS is None or info.top_k is None or POST_DROP in info.tags:
            self.unchecked.append(info.layer)
            return
        tokens, picks, calls = (x[rows] for x in (blocks.tokens_R, blocks.picks_R, blocks.calls_R))
        counted = blocks.rows_R[rows] & ((tokens > 0) | known)
        broken = np.flatnonzero(counted & (picks != info.top_k * tokens))
        if len(broken):
            r = broken[0]
            yield problem(
                INVARIANT,
                f"{name}: picks and invalid ids are not k x tokens in {_steps(self.records, broken)}: first"
                f" {picks[r]} where {info.top_k} x {tokens[r]} belong",
            )
        calls = np.where(calls > 0, calls, batches)
        repeats = np.where(
            (batches > 0) & (calls % np.maximum(batches, 1) == 0), calls // np.maximum(batches, 1), 1
        )
        parts = info.name.split(".")
        if "decoder" in parts and self._encoder:  # whose sequences have a length of their own
            if self._decoder_tokens is None:
                self._decoder_tokens = tokens // np.maximum(repeats, 1)
            per_record = self._decoder_tokens
        self._encoder |= "encoder" in parts
        twice = np.flatnonzero(counted & known & (tokens != per_record * np.maximum(repeats, 1)))
        if len(twice):
            r = twice[0]
            yield problem(
                INVARIANT,
                f"{name}: {tokens[r]} tokens reached the router where the record has {per_record[r]}, in"
                f" {_steps(self.records, twice)}: tokens were counted twice (recompute) or not at all",
            )


def run_problems(run: Run, records: Sequence[RecordInfo]) -> Iterator[Problem]:
    """What the records themselves show, without their arrays."""
    numbers = {r.record for r in records}
    for event in run.events:
        if event.kind == INVARIANT and event.detail.get("record") in numbers | {None}:
            yield problem(INVARIANT, str(event.detail.get("message", event.detail)))
    by_attempt: dict[int, RecordInfo] = {}
    for record in sorted(records, key=lambda r: r.record):
        before = by_attempt.get(record.attempt)
        if before is not None and record.first_step <= before.last_step:
            yield problem(
                INVARIANT,
                f"attempt {record.attempt}: steps {record.first_step}-{record.last_step} follow steps"
                f" {before.first_step}-{before.last_step}: the step counter went back without a resume",
            )
            break
        by_attempt[record.attempt] = record
    world = {a.attempt: a.world_size for a in run.attempts}
    for record in records:
        expected = world.get(record.attempt)
        if record.ranks is not None and expected is not None and record.ranks != expected:
            yield problem(
                INVARIANT,
                f"steps {record.first_step}-{record.last_step}: {record.ranks} of {expected} ranks counted",
            )
            break


def notes(run: Run, records: Sequence[RecordInfo], length: int) -> Iterator[Problem]:
    """What a reader of the verdict should know, and what does not make it invalid."""
    yield from _gaps(run, records)
    if run.spilled:
        yield problem(
            "spilled", f"{run.spilled} records wait in a spill file beside the store, not judged here"
        )
    longest = max(records, key=lambda r: r.last_step - r.first_step)
    steps = longest.last_step - longest.first_step + 1
    if steps > length:
        yield problem(
            "coarse_records", f"a record of {steps} steps is longer than a window of {length} steps"
        )
    elif 20 * steps > length and len(records) > 1:
        share = 100 * steps / length
        yield problem(
            "coarse_records",
            f"a record of {steps} steps is {share:.0f} % of a window: its edges are that coarse",
        )
    if any(r.tokens is not None for r in records) and all(r.excluded_tokens is None for r in records):
        yield problem("padding", "no token mask was given: padding, if there was any, is counted")


def _gaps(run: Run, records: Sequence[RecordInfo]) -> Iterator[Problem]:
    """Steps without a record: what a resume left, and what was never written."""
    between = [(a.last_step + 1, b.first_step - 1) for a, b in pairwise(records)]
    gaps = [(first, last) for first, last in between if first <= last]
    gaps += [(g.first_step, g.last_step) for g in run.gaps if g.last_step < records[0].first_step]
    if 2 * len(gaps) > len(records):
        recorded = sum(r.last_step - r.first_step + 1 for r in records)
        span = records[-1].last_step - records[0].first_step + 1
        yield problem("sparse", f"{recorded} of {span} steps were recorded; swings between them are not seen")
    elif gaps:
        named = ", ".join(f"{first}-{last}" for first, last in gaps[:3])
        more = f" and {len(gaps) - 3} gaps more" if len(gaps) > 3 else ""
        yield problem("gap", f"steps {named}{more} are not recorded")


def _steps(records: Sequence[RecordInfo], rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    """The records by their steps, the first few."""
    named = [f"{records[r].first_step}-{records[r].last_step}" for r in rows[:3]]
    more = f" and {len(rows) - 3} records more" if len(rows) > 3 else ""
    return f"steps {', '.join(named)}{more}"
