"""What a record is: plain data with arrays, and its form in SQLite: integers, floats, text and bytes.

Shapes: S sources, E experts of a layer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.thresholds.errors import UsageError

MAX_COUNT = 2**32 - 1  # counts are stored as u4: a record is cut before a count could pass it
POST_DROP = "post_drop"  # tag of a layer whose router shows picks only after capacity has cut them
ATTACHED, CLOSED = "attached", "closed"  # events: a training process began, and ended, to record

# The arrays of a row in `load` and `layer_stat`, in column order, with their element types.
LOAD_DTYPES = {"counts": "<u4", "prob_sum": "<f4", "tokens": "<i8", "top1": "<f4"}
STAT_DTYPES = {
    "peak": "<f4", "sq_over_t": "<f8", "dropped": "<u4", "logit_mean": "<f4", "logit_std": "<f4",
}  # fmt: skip
RECORD_COLUMNS = (
    "attempt", "phase", "first_step", "last_step", "microbatches", "tokens", "excluded_tokens", "ranks",
    "lr", "router_lr", "loss", "written_at", "load_rows", "stat_rows",
)  # fmt: skip

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class LayerInfo:
    """One MoE layer: `layer` is the 0-based index of its block in model order."""

    layer: int
    name: str
    num_experts: int
    top_k: int | None = None
    capacity_factor: float | None = None
    gating: str | None = None
    tags: tuple[str, ...] = ()


@dataclass
class LayerRecord:
    """What one layer's router did in one record. None: not known."""

    counts_SE: Ints
    tokens_S: Ints | None = None
    prob_sum_SE: Floats | None = None
    top1_S2: Floats | None = None
    invalid: int = 0
    peak_E: Floats | None = None
    sq_over_t_E: Floats | None = None
    dropped_E: Ints | None = None
    logit_mean_E: Floats | None = None
    logit_std_E: Floats | None = None
    calls: int | None = None


@dataclass
class Record:
    """One flush: every layer's counts over the steps [first_step, last_step] of one phase."""

    phase: str
    first_step: int
    last_step: int
    layers: Mapping[int, LayerRecord]
    microbatches: int | None = None
    tokens: int | None = None
    excluded_tokens: int | None = None
    ranks: int | None = None
    lr: float | None = None
    router_lr: float | None = None
    loss: float | None = None
    events: Sequence[tuple[int, str, dict[str, Any]]] = field(default_factory=tuple)


Blobs = tuple[bytes | None, ...]


@dataclass(frozen=True)
class EncodedRecord:
    """A record as what SQLite binds: Python integers, floats, text and bytes; checked, ready to insert."""

    scalars: tuple[Any, ...]  # phase to written_at of `RECORD_COLUMNS`
    loads: tuple[tuple[int, Blobs, int], ...]  # layer, its arrays in the order of LOAD_DTYPES, invalid
    stats: tuple[tuple[int, Blobs, int | None], ...]  # layer, its arrays in the order of STAT_DTYPES, calls
    events: tuple[tuple[int, str, dict[str, Any]], ...]


def encode(record: Record, num_experts: Mapping[int, int]) -> EncodedRecord:
    """Checks a record against the number of experts of each layer and turns its arrays into bytes.

    Raises:
        UsageError: a count that does not fit, is negative or is no integer; a layer or shape that the store
            does not have; a step range that runs backwards.
    """
    if record.last_step < record.first_step:
        raise UsageError(
            f"a record from step {record.first_step} to {record.last_step}", "steps must not run backwards"
        )
    for layer, x in record.layers.items():
        shape = np.shape(x.counts_SE)
        if layer not in num_experts or len(shape) != 2 or shape[1] != num_experts[layer]:
            raise UsageError(
                f"counts {list(shape)} for layer {layer}, which has {num_experts.get(layer, 'no')} experts",
                "counts are [sources, experts] of a layer that the store has",
            )
    whole = (record.microbatches, record.tokens, record.excluded_tokens, record.ranks)
    real = (record.lr, record.router_lr, record.loss)
    return EncodedRecord(
        scalars=(
            str(record.phase), int(record.first_step), int(record.last_step),
            *(None if x is None else int(x) for x in whole),
            *(None if x is None or np.isnan(float(x)) else float(x) for x in real),
            now(),
        ),
        loads=tuple(
            (
                int(layer),
                _blobs(LOAD_DTYPES, x.counts_SE, x.prob_sum_SE, x.tokens_S, x.top1_S2),
                int(x.invalid),
            )
            for layer, x in record.layers.items()
        ),
        stats=tuple(
            (
                int(layer),
                _blobs(STAT_DTYPES, x.peak_E, x.sq_over_t_E, x.dropped_E, x.logit_mean_E, x.logit_std_E),
                None if x.calls is None else int(x.calls),
            )
            for layer, x in record.layers.items()
            if any(v is not None for v in (x.calls, x.peak_E, x.sq_over_t_E, x.dropped_E, x.logit_mean_E))
        ),
        events=tuple((int(step), kind, as_json(detail)) for step, kind, detail in record.events),
    )  # fmt: skip


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def row_crcs(record: int, layer: int, blobs: Blobs) -> bytes:
    """The CRC-32 of each array of a row, u4, seeded with the row's key; 0 where there is no array."""
    seed = crc_seed(record, layer)
    return np.array([0 if b is None else zlib.crc32(b, seed) for b in blobs], "<u4").tobytes()


def crc_seed(record: int, layer: int) -> int:
    """Ties a row's arrays to its key: an array found under another key is damage too."""
    return (record * 65537 + layer) & 0xFFFFFFFF


def crc_seeds(record_n: Ints, layer_n: Ints) -> list[int]:
    """`crc_seed` of many rows."""
    seeds: list[int] = ((record_n * 65537 + layer_n) & 0xFFFFFFFF).tolist()
    return seeds


def record_crc(values: Sequence[Any]) -> int:
    """The CRC-32 of a record's scalars, `RECORD_COLUMNS` in order."""
    return zlib.crc32(json.dumps(list(values)).encode())


def as_json(detail: Mapping[str, Any]) -> dict[str, Any]:
    """The detail of an event in plain JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(detail), default=plain_json))
    return plain


def plain_json(value: Any) -> Any:
    """JSON for scalars and arrays of numpy and torch; the text of anything else."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _blobs(dtypes: Mapping[str, str], *arrays: Any) -> Blobs:
    return tuple(None if a is None else _blob(a, d) for a, d in zip(arrays, dtypes.values(), strict=True))


def _blob(values: Any, dtype: str) -> bytes:
    """The bytes of an array in the store's element type; u4 refuses what does not fit."""
    array = np.asarray(values)
    if dtype == "<u4" and array.size:
        if array.dtype.kind not in "iu":
            raise UsageError(f"counts of type {array.dtype}", "counts are integers: sum them as int64")
        if int(array.min()) < 0 or int(array.max()) > MAX_COUNT:
            raise UsageError(
                f"a count of {int(array.max())} (smallest {int(array.min())}) does not fit 0 to {MAX_COUNT}",
                "cut records more often",
            )
    return np.ascontiguousarray(array, dtype=dtype).tobytes()
