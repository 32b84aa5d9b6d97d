"""Windows: which records belong together, and which windows are judged.

Edges are laid out in steps and snap to records: a record is never split and belongs to the window that holds
its `last_step`. A window without a record is "not recorded" and left out, never zeros.
Shapes: W windows, R records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moe_audit.thresholds.errors import NoDataError, UsageError
from moe_audit.thresholds.gate_names import MAX_WHOLE

Ints = npt.NDArray[np.int64]
CHECKPOINT_WINDOWS = 5  # what `--checkpoint` and the training gate judge
AUTO_LENGTH, AUTO_WINDOWS = 2000, 3  # at most so many steps; at least so many windows
CYCLES_PER_WINDOW = 10
NO_WARMUP = -1  # steps may be counted from 0, and then step 0 is judged too


class Steps(Protocol):
    """What windows need to know of a record."""

    @property
    def first_step(self) -> int: ...
    @property
    def last_step(self) -> int: ...


@dataclass(frozen=True)
class Layout:
    """Length and stride in steps, and where they come from."""

    length: int
    stride: int
    origin: str


@dataclass(frozen=True)
class Tail:
    """The end of a run that grows, and where its windows are anchored: all that a later check must read.

    Attributes:
        record: Number of the first record.
        anchor: Step at which the windows of the whole run begin.
    """

    record: int
    anchor: int


@dataclass(frozen=True)
class Windows:
    """Windows by step over R records. Window w holds the records `lo_W[w]` to `hi_W[w] - 1`.

    Attributes:
        layout: Length, stride, origin.
        first_step_W, last_step_W: The steps it covers, snapped to its records.
        lo_W, hi_W: The records it holds.
        judged_W: False for windows that are only shown: they begin in the warm-up, or before the last few.
        previous_W: The last window that does not overlap (or `lag` windows back); -1 where there is none.
        unjudged_steps: Steps at the end of the run that fill no window yet.
        anchor: Step at which the first window after the warm-up begins.
    """

    layout: Layout
    first_step_W: Ints
    last_step_W: Ints
    lo_W: Ints
    hi_W: Ints
    judged_W: npt.NDArray[np.bool_]
    previous_W: Ints
    unjudged_steps: int
    anchor: int

    def __len__(self) -> int:
        return len(self.lo_W)

    @property
    def disjoint_W(self) -> npt.NDArray[np.bool_]:
        """The judged windows that do not overlap one another, taken from the first on."""
        chosen, end = np.zeros(len(self), dtype=bool), -1
        for w in np.flatnonzero(self.judged_W):
            if self.lo_W[w] >= end:
                chosen[w], end = True, self.hi_W[w]
        return chosen

    def select(self, first: int) -> Windows:
        """The windows from `first` on."""
        return replace(
            self,
            first_step_W=self.first_step_W[first:],
            last_step_W=self.last_step_W[first:],
            lo_W=self.lo_W[first:],
            hi_W=self.hi_W[first:],
            judged_W=self.judged_W[first:],
            previous_W=np.where(self.previous_W >= first, self.previous_W - first, -1)[first:],
        )

    def without(self, records: int) -> Windows:
        """The same windows once the first `records` records, which none of them holds, are gone."""
        return replace(self, lo_W=self.lo_W - records, hi_W=self.hi_W - records)


def choose_layout(
    records: Sequence[Steps],
    meta: Mapping[str, Any],
    *,
    length: int | None = None,
    stride: int | None = None,
    policy_length: int | None = None,
    policy_stride: int | None = None,
    anchor: int | None = None,
) -> Layout:
    """Length and stride from, in this order: the call, the policy, `meta`, auto.

    Auto: min(2000, judged steps // 3) rounded down to an even number of records, at least one record; the
    stride is half the length, at least one record.

    Raises:
        UsageError: a length or stride under 1, or a stride longer than the window.
    """
    for name, value in (("length", length), ("stride", stride)):
        if value is not None and positive_int(value) != value:
            raise UsageError(f"{name} {value!r} is no number of steps", "a whole number, at least 1")
    spacing = record_spacing(records)
    if length is not None:
        origin = "command line"
    elif policy_length is not None:
        length, origin = policy_length, "policy"
    elif (recorded := positive_int(meta.get("window_length"))) is not None:
        length, origin = recorded, "meta: window_length"
    elif (cycle := positive_int(meta.get("shard_cycle_steps"))) is not None:
        length, origin = CYCLES_PER_WINDOW * cycle, "meta: 10 x shard_cycle_steps"
    else:
        steps = min(AUTO_LENGTH, _judged_steps(records, warmup_steps(meta), anchor) // AUTO_WINDOWS)
        in_records = steps // spacing
        in_records -= in_records % 2 if in_records > 1 else 0
        length, origin = max(in_records, 1) * spacing, "auto"
    if length > MAX_WHOLE:
        raise UsageError(f"window length {length} ({origin}) exceeds {MAX_WHOLE}", "give it in steps")
    if stride is None and policy_stride is not None and policy_stride <= length:
        stride = policy_stride
    if stride is None:
        stride = min(max(length // 2, spacing), length)
    if stride > length:
        raise UsageError(
            f"stride {stride} exceeds window length {length}", "steps between windows would go unjudged"
        )
    return Layout(length, stride, origin)


def lay_out(
    records: Sequence[Steps],
    layout: Layout,
    *,
    warmup: int = NO_WARMUP,
    lag: int | None = None,
    until: int | None = None,
    last: int | None = None,
    anchor: int | None = None,
) -> Windows:
    """Windows over records in order of their steps.

    The windows are anchored at the first record that begins after the warm-up; earlier ones are laid out
    backwards from there and shown, not judged. Only full windows count; a run shorter than one window gives
    one partial window.

    Args:
        records: Records in order of `last_step`.
        layout: Length and stride.
        warmup: Last step of the warm-up.
        lag: How many windows back the stability metrics compare; None: the last that does not overlap.
        until: Step at which the last window may end, when more was recorded than `records`.
        last: Judge only so many windows, the last ones.
        anchor: Of the windows, where records before the first are left out.

    Raises:
        NoDataError: there is no record.
    """
    if not records:
        raise NoDataError("no records to lay windows over", "record some steps, or widen --from and --to")
    last_R = np.array([r.last_step for r in records], dtype=np.int64)
    first_R = np.array([r.first_step for r in records], dtype=np.int64)
    end = max(int(last_R[-1]), until or 0)
    after = first_R > warmup
    if anchor is None:
        anchor = _begin(records, int(after.argmax()))
    back = -(-max(anchor - int(first_R[0]), 0) // layout.stride)
    starts = np.arange(anchor - back * layout.stride, end - layout.length + 2, layout.stride, dtype=np.int64)
    starts = starts[starts + layout.length - 1 >= int(last_R[0])]
    lo_W = np.searchsorted(last_R, starts, side="left")
    hi_W = np.searchsorted(last_R, starts + layout.length - 1, side="right")
    full = hi_W > lo_W  # without a record: not recorded, never zeros
    new = np.append(True, (np.diff(lo_W) != 0) | (np.diff(hi_W) != 0))[: len(lo_W)]  # finer than the records
    lo_W, hi_W = lo_W[full & new], hi_W[full & new]
    judged_W = (first_R[lo_W] > warmup) if after.any() else np.zeros(len(lo_W), dtype=bool)
    if after.any() and not judged_W.any():  # shorter than one window: show and judge what there is
        lo_W = np.append(lo_W, np.flatnonzero(after)[0])
        hi_W = np.append(hi_W, len(records))
        judged_W = np.append(judged_W, True)
    if not len(lo_W):  # warm-up only
        lo_W, hi_W, judged_W = np.array([0]), np.array([len(records)]), np.array([False])
    if last is not None:
        judged_W &= np.cumsum(judged_W[::-1])[::-1] <= last
    return Windows(
        layout,
        first_R[lo_W],
        last_R[hi_W - 1],
        lo_W.astype(np.int64),
        hi_W.astype(np.int64),
        judged_W,
        _previous(lo_W, hi_W, first_R[lo_W] > warmup, lag),
        int(last_R[-1] - last_R[hi_W[-1] - 1]),
        anchor,
    )


def _previous(lo_W: Ints, hi_W: Ints, after_warmup_W: npt.NDArray[np.bool_], lag: int | None) -> Ints:
    """For each window the one to compare with: never one from the warm-up, unless the window is in it too."""
    W = len(lo_W)
    if lag is None:
        previous_W = np.searchsorted(hi_W, lo_W, side="right") - 1
    else:
        previous_W = np.arange(W) - lag
    previous_W = np.where(previous_W >= 0, previous_W, -1)
    mixed = (previous_W >= 0) & after_warmup_W & ~after_warmup_W[previous_W]
    return np.where(mixed, -1, previous_W).astype(np.int64)


def record_spacing(records: Sequence[Steps]) -> int:
    """Median number of steps from one record to the next, at least 1.

    That is the length of a record, or more where only some steps were recorded (every hundredth, say).
    """
    if len(records) < 2:
        return max((r.last_step - r.first_step + 1 for r in records), default=1)
    return max(1, int(np.median(np.diff([r.last_step for r in records]))))


def _begin(records: Sequence[Steps], r: int) -> int:
    """Where windows that begin with record r begin. Sparse records stand for the steps before them."""
    first, last = records[r].first_step, records[r].last_step
    median = int(np.median([record.last_step - record.first_step + 1 for record in records]))
    spacing = record_spacing(records)
    return last - spacing + 1 if spacing > median else first


def warmup_steps(meta: Mapping[str, Any]) -> int:
    """Last step of the warm-up as the trainer wrote it; NO_WARMUP where it did not."""
    return positive_int(meta.get("warmup_steps")) or NO_WARMUP


def positive_int(value: Any) -> int | None:
    """The value as a positive whole number, None where it is none: `meta` is written by others."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None


def _judged_steps(records: Sequence[Steps], warmup: int, anchor: int | None) -> int:
    if anchor is not None:
        return records[-1].last_step - anchor + 1
    r = next((r for r, record in enumerate(records) if record.first_step > warmup), None)
    return 0 if r is None else records[-1].last_step - _begin(records, r) + 1
