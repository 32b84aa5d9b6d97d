"""Reading a run: live records of one phase, layer by layer, as numpy arrays.

Shapes: R records, S sources, E experts of a layer.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from moe_audit.store import UNLABELLED, Floats, Ints, LayerInfo, check_format
from moe_audit.thresholds.errors import StoreError, UsageError

STORE_NAME = "routing.db"


@dataclass(frozen=True)
class Attempt:
    """One start of the training process; a resume is a new attempt."""

    attempt: int
    start_step: int
    started_at: str
    world_size: int | None


@dataclass(frozen=True)
class RecordInfo:
    """One record without its arrays; None: not known."""

    record: int
    attempt: int
    phase: str
    first_step: int
    last_step: int
    microbatches: int | None
    tokens: int | None
    excluded_tokens: int | None
    ranks: int | None
    lr: float | None
    router_lr: float | None
    loss: float | None
    written_at: str


@dataclass(frozen=True)
class Event:
    """An alert, an action on the learning rate, a waiver, a broken invariant."""

    event: int
    step: int | None
    kind: str
    detail: dict[str, Any]


class Run:
    """A routing store, open for reading. Open it with `open_run`; it is a context manager.

    `records` are the live ones (not superseded by a later attempt) of `phase`, by step; every array
    method returns its rows in that order.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, phase: str) -> None:
        self.path = path
        self.phase = phase
        self._connection = connection
        self.meta: dict[str, Any] = dict(self._rows("SELECT key, value FROM meta"))
        self.layers = [
            LayerInfo(*row[:-1], tuple(json.loads(row[-1])))
            for row in self._rows(
                "SELECT layer, name, num_experts, top_k, capacity_factor, gating, tags FROM layer ORDER BY layer"
            )
        ]
        self.sources = [name for (name,) in self._rows("SELECT name FROM source ORDER BY source")]
        self.attempts = [
            Attempt(*row)
            for row in self._rows(
                "SELECT attempt, start_step, started_at, world_size FROM attempt ORDER BY attempt"
            )
        ]
        self.records = [
            RecordInfo(*row)
            for row in self._rows(
                "SELECT record, attempt, phase, first_step, last_step, microbatches, tokens, excluded_tokens,"
                " ranks, lr, router_lr, loss, written_at FROM live_record WHERE phase = ? ORDER BY last_step, record",
                phase,
            )
        ]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @cached_property
    def events(self) -> list[Event]:
        """All events of the run, in the order in which they were written."""
        return [
            Event(number, step, kind, json.loads(detail))
            for number, step, kind, detail in self._rows(
                "SELECT event, step, kind, detail FROM event ORDER BY event"
            )
        ]

    def layer_info(self, layer: int) -> LayerInfo:
        for info in self.layers:
            if info.layer == layer:
                return info
        known = ", ".join(str(info.layer) for info in self.layers)
        raise UsageError(f"{self.path} has no layer {layer}", f"its layers are {known}")

    def counts(self, layer: int) -> Ints:
        """Router picks before any drop, int64 [R, S, E]; a record without this layer is all zeros."""
        E = self.layer_info(layer).num_experts
        out = np.zeros((len(self.records), len(self.sources), E), dtype=np.int64)
        for r, blob in self._blobs("load", "counts", layer):
            out[r] = self._per_source(blob, "<u4", (E,), layer, r)
        return out

    def prob_sum(self, layer: int) -> Floats | None:
        """Sums of gate probabilities (each row a distribution), float64 [R, S, E]; None where none were recorded."""
        return self._optional(
            "load", "prob_sum", layer, "<f4", (self.layer_info(layer).num_experts,), per_source=True
        )

    def tokens(self, layer: int) -> Ints | None:
        """Tokens that reached the router, int64 [R, S]; None where not known."""
        out = self._optional("load", "tokens", layer, "<i8", (), per_source=True)
        return None if out is None else out.astype(np.int64)

    def top1(self, layer: int) -> Floats | None:
        """Sum and sum of squares of the largest probability, float64 [R, S, 2]; None where none were recorded."""
        return self._optional("load", "top1", layer, "<f4", (2,), per_source=True)

    def stat(self, layer: int, name: str) -> Floats | None:
        """One of peak, sq_over_t, dropped, logit_mean, logit_std: float64 [R, E]; None where none were recorded."""
        dtype = {
            "peak": "<f4",
            "sq_over_t": "<f8",
            "dropped": "<u4",
            "logit_mean": "<f4",
            "logit_std": "<f4",
        }[name]
        return self._optional(
            "layer_stat",
            name,
            layer,
            dtype,
            (self.layer_info(layer).num_experts,),
            per_source=False,
        )

    def invalid(self, layer: int) -> Ints:
        """Picks whose id is no expert, int64 [R]."""
        out = np.zeros(len(self.records), dtype=np.int64)
        for r, value in self._blobs("load", "invalid", layer):
            out[r] = value
        return out

    def present(self, layer: int) -> npt.NDArray[np.bool_]:
        """Whether the layer has a row in each record, bool [R]."""
        out = np.zeros(len(self.records), dtype=bool)
        out[[r for r, _ in self._blobs("load", "invalid", layer)]] = True
        return out

    def query(self, sql: str, *values: Any) -> sqlite3.Cursor:
        """Rows of a statement as they come, for passes over more than memory should hold."""
        return self._connection.execute(sql, values)

    # -- SQL, with SQLite's errors turned into one clear message

    def _rows(self, sql: str, *values: Any) -> list[Any]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{self.path} cannot be read: {error}", "restore the file from a copy"
            ) from error

    @cached_property
    def _row_of_record(self) -> dict[int, int]:
        return {info.record: r for r, info in enumerate(self.records)}

    def _blobs(self, table: str, column: str, layer: int) -> Iterator[tuple[int, Any]]:
        """(row, value) of one column of one layer, for the records of this run."""
        row_of_record = self._row_of_record
        for record, value in self._rows(f"SELECT record, {column} FROM {table} WHERE layer = ?", layer):
            if record in row_of_record:
                yield row_of_record[record], value

    def _optional(
        self,
        table: str,
        column: str,
        layer: int,
        dtype: str,
        shape: tuple[int, ...],
        *,
        per_source: bool,
    ) -> Floats | None:
        lead = (len(self.sources),) if per_source else ()
        out = np.zeros((len(self.records), *lead, *shape), dtype=np.float64)
        seen = False
        for r, blob in self._blobs(table, column, layer):
            if blob is None:
                continue
            seen = True
            if per_source:
                out[r] = self._per_source(blob, dtype, shape, layer, r)
            else:
                out[r] = self._decode(blob, dtype, int(np.prod(shape)), layer, r).reshape(shape)
        return out if seen else None

    def _per_source(
        self, blob: bytes, dtype: str, shape: tuple[int, ...], layer: int, r: int
    ) -> npt.NDArray[Any]:
        """A [S, …] matrix; one written before the source `unlabelled` was added lacks that last row: zeros."""
        per_source = int(np.prod(shape, dtype=np.int64))
        S = len(self.sources)
        short = (S - 1) * per_source
        if S > 1 and self.sources[-1] == UNLABELLED and len(blob) == short * np.dtype(dtype).itemsize:
            known = np.frombuffer(blob, dtype).reshape(S - 1, *shape)
            return np.concatenate([known, np.zeros((1, *shape), dtype)])
        return self._decode(blob, dtype, S * per_source, layer, r).reshape(S, *shape)

    def _decode(self, blob: bytes, dtype: str, size: int, layer: int, r: int) -> npt.NDArray[Any]:
        if len(blob) != size * np.dtype(dtype).itemsize:
            raise StoreError(
                f"{self.path}: record {self.records[r].record}, layer {layer} holds {len(blob)} bytes"
                f" where {size * np.dtype(dtype).itemsize} belong",
                "the store is damaged: restore it from a copy",
            )
        return np.frombuffer(blob, dtype)


def open_run(path: str | Path, phase: str = "train") -> Run:
    """Opens a run folder that holds `routing.db`, or the file itself, read-only.

    Raises:
        UsageError: nothing is there.
        StoreError: it is no routing store, is damaged, or has a newer schema.
    """
    path = Path(path)
    file = path / STORE_NAME if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{file} does not exist", f"name a run folder that holds {STORE_NAME}, or the file")
    if file.stat().st_size == 0:
        raise StoreError(f"{file} is empty", "no run was recorded in it")
    connection = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
    try:
        check_format(connection, file)
        return Run(file, connection, phase)
    except Exception:
        connection.close()
        raise
