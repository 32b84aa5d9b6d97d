"""Reading a run: live records of one phase, layer by layer, as numpy arrays.

Shapes: R records, S sources, E experts of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.arrays import Array, decode
from moe_audit.read_only import ReadOnly, damaged
from moe_audit.record import (
    ATTACHED,
    CLOSED,
    LOAD_DTYPES,
    RECORD_COLUMNS,
    STAT_DTYPES,
    Floats,
    Ints,
    LayerInfo,
    LayerRecord,
    record_crc,
)
from moe_audit.spill import spilled_records
from moe_audit.thresholds.errors import NoDataError, StoreError, UsageError
from moe_audit.thresholds.gate_names import nearest
from moe_audit.windows import Tail

STORE_NAME = "routing.db"
MAX_EXPERTS = 2**20  # more is damage: it keeps a flipped bit from asking for all memory


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


@dataclass(frozen=True)
class Gap:
    """Steps of which no live record is left: a resume began inside a record, or a crash took the last."""

    first_step: int
    last_step: int


class Run:
    """A routing store, open for reading. Open it with `open_run`; it is a context manager.

    One read transaction: what a writer adds meanwhile is not seen. `records` are the live ones (not
    superseded by a later attempt) of `phase`, by step; every array method returns its rows in that order.
    Every method raises StoreError where the file does not hold what was written: a damaged page, an array of
    a wrong size or checksum.

    Attributes:
        path, phase: What was opened.
        meta: Keys and values as the writer gave them.
        layers, sources, attempts: In the order of their numbers.
        records: See above.
        phases: Phases that have live records.
        superseded: How many records of `phase` a later attempt has replaced.
        spilled: How many records wait in the spill file beside the store, not counted here.
    """

    def __init__(self, path: Path, phase: str = "train", tail: Tail | None = None) -> None:
        self.path = path
        self.phase = phase
        self.tail = tail
        self._db = ReadOnly(path)
        self._rows_of_layer: dict[str, dict[int, int]] = {}
        try:
            if tail is None:
                self._check_rows()
            self._read_tables(phase)
        except BaseException:
            self._db.close()
            raise

    def _check_rows(self) -> None:
        """Pages that hold fewer rows than were written look sound to a query."""
        small = ("meta", "layer", "source", "attempt", "record", "event", "_sqlite_migrations")
        here = {name for (name,) in self._rows("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        for table in (name for name in small if name in here):
            for (found,) in self._rows(f"PRAGMA quick_check('{table}')"):
                if found != "ok":
                    raise damaged(self.path, str(found).splitlines()[-1])
        for table, column in (("load", "load_rows"), ("layer_stat", "stat_rows")):
            known, rows = self._rows(f"SELECT total({column} IS NULL) = 0, total({column}) FROM record")[0]
            by_layer = self._rows(f"SELECT layer, count(*) FROM {table} GROUP BY layer")
            found = sum(count for _, count in by_layer)
            self._rows_of_layer[table] = dict(by_layer)
            if len(self._rows_of_layer[table]) < len(by_layer) or (known and found != rows):
                raise damaged(self.path, f"{table} has {found} rows, {rows:.0f} were written")

    def _read_tables(self, phase: str) -> None:
        self.meta: dict[str, Any] = dict(self._rows("SELECT key, value FROM meta"))
        self.layers = [
            _layer_info(self.path, row)
            for row in self._rows(
                "SELECT layer, name, num_experts, top_k, capacity_factor, gating, tags FROM layer"
                " ORDER BY layer"
            )
        ]
        unknown = set().union(*self._rows_of_layer.values()) - {info.layer for info in self.layers}
        if unknown:
            raise damaged(self.path, f"it has rows of layers that it does not have: {unknown}")
        self.sources = [str(name) for (name,) in self._rows("SELECT name FROM source ORDER BY source")]
        if self.tail is None:
            self._check_layers()
        columns = "attempt, start_step, started_at, world_size"
        self.attempts = [
            Attempt(*_typed(self.path, "attempt", row, (int, int, str, int | None)))
            for row in self._rows(f"SELECT {columns} FROM attempt ORDER BY attempt")
        ]
        # All records, so that a damaged one cannot hide in another phase.
        columns = ", ".join(RECORD_COLUMNS)
        live = "EXISTS (SELECT 1 FROM live_record l WHERE l.record = r.record)"
        scope = "" if self.tail is None else f"WHERE record >= {self.tail.record}"
        rows = self._rows(
            f"SELECT record, {columns}, crc, {live} FROM record r {scope} ORDER BY last_step, record"
        )
        every = [(_record_info(self.path, row[:-1]), bool(row[-1])) for row in rows]
        self._known = {info.record for info, _ in every}
        own = [info for info, _ in every if info.phase == phase]
        self.records = [info for info, live in every if live and info.phase == phase]
        self.phases = sorted({info.phase for info, live in every if live})
        self.superseded = len(own) - len(self.records)
        self._first_step = min((info.first_step for info in own), default=0)
        self.spilled = spilled_records(self.path)
        self._row_of_record = {info.record: r for r, info in enumerate(self.records)}

    def _check_layers(self) -> None:
        """Arrays can be cut into rows of another length: the last ones of each layer show the true one."""
        last = "SELECT length(counts), length(tokens) FROM load WHERE layer = ? ORDER BY record DESC LIMIT 1"
        for info in self.layers:
            for counts, tokens in self._rows(last, info.layer):
                sources = len(self.sources) if tokens is None else tokens // 8
                if counts != 4 * sources * info.num_experts:
                    name = f"layer {info.layer} ({info.name})"
                    found = f"its counts are of {counts / (4 * max(sources, 1)):g}"
                    raise damaged(self.path, f"{name} has {info.num_experts} experts, {found}")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    @cached_property
    def events(self) -> list[Event]:
        """All events of the run, in the order in which they were written."""
        out = []
        for number, step, kind, text in self._rows(
            "SELECT event, step, kind, detail FROM event ORDER BY event"
        ):
            try:
                out.append(Event(number, step, kind, dict(json.loads(text))))
            except (TypeError, ValueError) as error:
                raise damaged(self.path, f"event {number}: {error}") from error
        return out

    @cached_property
    def gaps(self) -> list[Gap]:
        """Steps that a resume left without a live record; steps not recorded on purpose are none."""
        if not self.records:
            return []
        before = [(self.records[0].first_step, self._first_step - 1)]
        between = [(b.first_step, a.last_step) for a, b in pairwise(self.records) if a.attempt != b.attempt]
        return [Gap(last + 1, first - 1) for first, last in before + between if first > last + 1]

    @property
    def is_live(self) -> bool:
        """Whether a training process may still be recording: the last to attach has not closed."""
        last = [e.kind for e in self.events if e.kind in (ATTACHED, CLOSED)][-1:]
        just_made = not last and not self._known
        return just_made or last == [ATTACHED]

    def layer_info(self, layer: int) -> LayerInfo:
        """The layer of this number.

        Raises:
            UsageError: there is none.
        """
        for info in self.layers:
            if info.layer == layer:
                return info
        known = ", ".join(str(info.layer) for info in self.layers)
        raise UsageError(f"{self.path} has no layer {layer}", f"its layers are {known}")

    # -- arrays, layer by layer

    def counts(self, layer: int) -> Ints:
        """Router picks before any drop, int64 [R, S, E]; a record without this layer is all zeros."""
        out = self._stack("load", "counts", layer, np.int64)
        shape = (len(self.records), len(self.sources), self.layer_info(layer).num_experts)
        return np.zeros(shape, np.int64) if out is None else out

    def prob_sum(self, layer: int) -> Floats | None:
        """Sums of gate probabilities (each row a distribution), float64 [R, S, E]; None: not recorded."""
        return self._stack("load", "prob_sum", layer, np.float64)

    def tokens(self, layer: int) -> Ints | None:
        """Tokens that reached the router, int64 [R, S]; None where not known."""
        return self._stack("load", "tokens", layer, np.int64)

    def top1(self, layer: int) -> Floats | None:
        """Sum and sum of squares of the largest probability, float64 [R, S, 2]; None: not recorded."""
        return self._stack("load", "top1", layer, np.float64)

    def stat(self, layer: int, name: str) -> Floats | None:
        """One of peak, sq_over_t, dropped, logit_mean, logit_std: float64 [R, E]; None: not recorded."""
        return self._stack("layer_stat", name, layer, np.float64)

    def invalid(self, layer: int) -> Ints:
        """Picks whose id is no expert, int64 [R]."""
        return self._integers("load", "invalid", layer)

    def calls(self, layer: int) -> Ints:
        """Router forwards, int64 [R]; 0 where not known."""
        return self._integers("layer_stat", "calls", layer)

    def present(self, layer: int) -> npt.NDArray[np.bool_]:
        """Whether the layer has a row in each record, bool [R]."""
        out = np.zeros(len(self.records), dtype=bool)
        for (record,) in self._of_layer("load", "SELECT record FROM load WHERE layer = ?", layer):
            if record in self._row_of_record:
                out[self._row_of_record[record]] = True
        return out

    def layer_record(self, record: int, layer: int) -> LayerRecord | None:
        """One layer of one record with all its arrays; None where the layer has no row in it."""
        info = self.layer_info(layer)
        values: dict[str, Any] = {}
        for table, dtypes, last in (("load", LOAD_DTYPES, "invalid"), ("layer_stat", STAT_DTYPES, "calls")):
            for *blobs, scalar, crc in self.query(
                f"SELECT {', '.join(dtypes)}, {last}, crc FROM {table} WHERE layer = ? AND record = ?",
                layer,
                record,
            ):
                values[last] = scalar
                for name, blob in zip(dtypes, blobs, strict=True):
                    array = None if blob is None else self._array(name, info, record, blob, crc)
                    values[_FIELDS[name]] = array
        return LayerRecord(**values) if "counts_SE" in values else None

    def num_rows(self, table: str, layers: Sequence[int]) -> int:
        """How many rows `load` or `layer_stat` has of these layers, by its index; a scan meets as many."""
        return sum(self._rows_of_layer[table].get(layer, 0) for layer in layers)

    def query(self, sql: str, *values: Any) -> Iterator[Any]:
        """Rows of a query on the tables of schema.sql, within the snapshot."""
        return self._db.rows(sql, *values)

    # -- from SQL to arrays

    def _rows(self, sql: str, *values: Any) -> list[Any]:
        return list(self.query(sql, *values))

    def _of_layer(self, table: str, sql: str, layer: int) -> Iterator[Any]:
        """The rows (record, …) of a query on one layer, if they are all there and of known records."""
        count = 0
        for row in self.query(sql, layer):
            if row[0] not in self._known:
                raise damaged(self.path, f"{table} has rows of record {row[0]}, which is not there")
            count += 1
            yield row
        if count != self._rows_of_layer[table].get(layer, 0):
            raise damaged(self.path, f"{table} gives {count} rows of layer {layer}")

    def _stack(self, table: str, column: str, layer: int, dtype: type) -> Array | None:
        """A column of a layer over all records; None where every row is NULL."""
        info = self.layer_info(layer)
        out: Array | None = None
        sql = f"SELECT record, {column}, crc FROM {table} WHERE layer = ?"
        for record, blob, crc in self._of_layer(table, sql, layer):
            r = self._row_of_record.get(record)
            if r is None or (blob is None and column != "counts"):
                continue
            array = self._array(column, info, record, blob, crc)
            if out is None:  # only now: the first array has shown that the sizes in `layer` are right
                out = np.zeros((len(self.records), *array.shape), dtype)
            out[r] = array
        return out

    def _array(self, column: str, info: LayerInfo, record: int, blob: Any, crc: Any) -> Array:
        return decode(self.path, len(self.sources), info.num_experts, column, record, info.layer, blob, crc)

    def _integers(self, table: str, column: str, layer: int) -> Ints:
        out = np.zeros(len(self.records), dtype=np.int64)
        sql = f"SELECT record, {column} FROM {table} WHERE layer = ?"
        for record, value in self._of_layer(table, sql, layer):
            r = self._row_of_record.get(record)
            if r is not None and value is not None:
                if not isinstance(value, int):
                    raise damaged(self.path, f"record {record}, layer {layer}: {column} is no integer")
                out[r] = value
        return out


_FIELDS = {  # of `LayerRecord`
    "counts": "counts_SE", "prob_sum": "prob_sum_SE", "tokens": "tokens_S", "top1": "top1_S2",
    **{name: f"{name}_E" for name in STAT_DTYPES},
}  # fmt: skip


def store_file(path: Path) -> Path:
    """The store that a path names: the file, or `routing.db` in the folder."""
    return path / STORE_NAME if path.is_dir() else path


def open_run(path: str | Path, phase: str = "train", tail: Tail | None = None) -> Run:
    """Opens a run folder that holds `routing.db`, or the file itself, read-only.

    Args:
        path: See above.
        phase: Of the records.
        tail: Read no earlier records, and check their rows only; for `check(..., checkpoint=...)`.

    Raises:
        UsageError: nothing is there.
        StoreError: it is no routing store, is damaged, or has a newer schema.
    """
    path = Path(path)
    try:
        file = store_file(path)
        if not file.is_file():
            remedy = f"name a run folder that holds {STORE_NAME}, or the file"
            raise UsageError(f"{file} does not exist", remedy)
        with file.open("rb") as content:
            if not content.read(1):
                raise StoreError(f"{file} is empty", "no run was recorded in it")
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}", "see its permissions") from error
    return Run(file, phase, tail)


def no_records(run: Run, within: str = "") -> NoDataError:
    """The error where there is no record of the phase that was opened; `within`: of what was asked for."""
    message = f"{run.path} has no record of phase {run.phase!r}{within}"
    phases = ", ".join(run.phases) or "none"
    near = "" if run.phase in run.phases else f" ({nearest(run.phase, run.phases)})"
    return NoDataError(message, f"phases recorded: {phases}{near}; no data is never a pass")


def _typed(path: Path, what: str, row: Sequence[Any], types: Sequence[type | UnionType]) -> Sequence[Any]:
    """The row, if its values have these types; damage can change the type of a value."""
    if not all(map(isinstance, row, types)):  # a generator would take as long as the query
        raise damaged(path, f"{what} {row[0]!r} holds values of a wrong type")
    return row


def _layer_info(path: Path, row: Sequence[Any]) -> LayerInfo:
    _typed(path, "layer", row, (int, str, int, int | None, float | None, str | None, str))
    layer, name, num_experts, top_k, capacity_factor, gating, tags = row
    try:
        tags = tuple(str(tag) for tag in json.loads(tags))
    except (TypeError, ValueError) as error:
        raise damaged(path, f"layer {layer}: {error}") from error
    if not 0 < num_experts <= MAX_EXPERTS or (top_k is not None and not 0 < top_k <= num_experts):
        raise damaged(path, f"layer {layer} ({name}) has {num_experts} experts and top-k {top_k}")
    return LayerInfo(layer, name, num_experts, top_k, capacity_factor, gating, tags)


def _record_info(path: Path, row: Sequence[Any]) -> RecordInfo:
    *values, crc = row
    whole, real = int | None, float | None
    kinds = (int, int, str, int, int, *[whole] * 4, *[real] * 3, str, whole, whole, whole)
    _typed(path, "record", row, kinds)
    info = RecordInfo(*values[:-2])
    if info.last_step < info.first_step or (crc is not None and crc != record_crc(values[1:])):
        raise damaged(path, f"record {info.record} is not what was written (checksum)")
    return info
