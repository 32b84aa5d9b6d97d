"""The routing store: one SQLite file of exact expert counts. This module writes it; `run.py` reads it.

Shapes: S sources, E experts of a layer.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from moe_audit.thresholds.errors import StoreError, UsageError

APPLICATION_ID = 0x4D4F4541  # "MOEA", so that `file` and other tools can tell the format
SCHEMA_VERSION = 1
UNLABELLED = "unlabelled"  # tokens without a source; also the one source of a run without sources
MAX_COUNT = 2**32 - 1  # counts are stored as u4: a record is cut before a count could pass it
BUSY_TIMEOUT = 5.0  # seconds that SQLite waits for another process's lock

# The arrays of a row in `load` and `layer_stat`, in column order, with their element types.
LOAD_DTYPES = {"counts": "<u4", "prob_sum": "<f4", "tokens": "<i8", "top1": "<f4"}
STAT_DTYPES = {
    "peak": "<f4", "sq_over_t": "<f8", "dropped": "<u4", "logit_mean": "<f4", "logit_std": "<f4",
}  # fmt: skip
RECORD_COLUMNS = (
    "attempt", "phase", "first_step", "last_step", "microbatches", "tokens", "excluded_tokens", "ranks",
    "lr", "router_lr", "loss", "written_at",
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
    """A record as what SQLite binds: Python integers, floats, text and bytes; checked, and ready to insert."""

    scalars: tuple[Any, ...]  # phase … written_at: `RECORD_COLUMNS` without the attempt
    loads: tuple[tuple[int, Blobs, int], ...]  # layer, its arrays in the order of LOAD_DTYPES, invalid
    stats: tuple[tuple[int, Blobs, int | None], ...]  # layer, its arrays in the order of STAT_DTYPES, calls
    events: tuple[tuple[int | None, str, dict[str, Any]], ...]


def encode(record: Record) -> EncodedRecord:
    """Checks a record and turns its arrays into bytes.

    Raises:
        UsageError: a count that does not fit, is negative or is no integer; a step range that runs backwards.
    """
    if record.last_step < record.first_step:
        raise UsageError(
            f"a record from step {record.first_step} to {record.last_step}", "steps must not run backwards"
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
        events=tuple(record.events),
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


def record_crc(values: Sequence[Any]) -> int:
    """The CRC-32 of a record's scalars, `RECORD_COLUMNS` in order."""
    return zlib.crc32(json.dumps(list(values)).encode())


class Store:
    """A store open for writing. Each record is one transaction, all layers or none.

    Open it in the process that writes: an SQLite connection must not cross a fork.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, journal_mode: str) -> None:
        self.connection = connection
        self.path = path
        self.journal_mode = journal_mode
        self.attempt: int | None = None
        self.num_sources = connection.execute("SELECT count(*) FROM source").fetchone()[0]

    @classmethod
    def create(
        cls,
        path: str | Path,
        layers: Sequence[LayerInfo],
        sources: Sequence[str] = (UNLABELLED,),
        meta: Mapping[str, Any] | None = None,
    ) -> Store:
        """A new store at `path`; its folder is made if need be. The file appears whole or not at all.

        Raises:
            UsageError: the file exists, a source name is taken twice or is reserved, there is no layer, or
                two layers share a number or a name.
        """
        from moe_audit.schema import create_schema

        path = Path(path)
        check_sources(sources)
        check_layers(layers)
        if path.exists():
            raise UsageError(f"{path} exists already", "resume it with resume=True, or choose another path")
        draft = path.with_name(f"{path.name}.new-{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(connect(draft)) as connection:
                create_schema(connection, layers, sources, {"created": now(), **(meta or {})})
            publish(draft, path)
        except (OSError, sqlite3.OperationalError) as error:
            raise UsageError(
                f"{path} cannot be made: {error}", "choose a folder that can be written"
            ) from error
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path, *, timeout: float = BUSY_TIMEOUT) -> Store:
        """An existing store, for further records.

        Raises:
            UsageError: there is no such file.
            StoreError: the file is no routing store, or one of a newer schema.
        """
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"{path} does not exist", "nothing to resume: leave resume=False")
        connection = connect(path, timeout)
        try:
            check_format(connection, path)
            store = cls(connection, path, write_ahead(connection))
            if store.get_meta("journal_mode") != store.journal_mode:
                store.set_meta({"journal_mode": store.journal_mode})
        except BaseException:
            connection.close()
            raise
        return store

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """BEGIN IMMEDIATE … COMMIT: a transaction that reads first and writes later can fail on the upgrade."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    def get_meta(self, key: str) -> Any:
        """The value of a key of `meta`; None where there is none."""
        row = self.connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def layer_shapes(self) -> dict[int, tuple[str, int]]:
        """Name and number of experts of each layer."""
        rows = self.connection.execute("SELECT layer, name, num_experts FROM layer")
        return {layer: (name, experts) for layer, name, experts in rows}

    def source_names(self) -> list[str]:
        """The sources in the order of the rows of a matrix."""
        return [name for (name,) in self.connection.execute("SELECT name FROM source ORDER BY source")]

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Sets keys of `meta`: text, integers and floats keep their type, anything else becomes JSON text."""
        rows = meta_rows(values)
        with self.transaction():
            self.connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def add_source(self, name: str) -> int:
        """A further source behind those there are; earlier records have no row for it, which reads as zeros."""
        with self.transaction():
            self.connection.execute("INSERT INTO source VALUES (?, ?)", (self.num_sources, name))
        self.num_sources += 1
        return self.num_sources - 1

    def begin_attempt(
        self, start_step: int, world_size: int | None = None, *, writer: str | None = None
    ) -> int:
        """A new attempt from `start_step` on; records of earlier attempts at or after it count no longer.

        `writer`: a name for the attempt; where it is in the store already, that attempt goes on.
        """
        find = "SELECT attempt FROM attempt WHERE writer = ?"
        row = self.connection.execute(find, (writer,)).fetchone()
        if row is None:
            with self.transaction():
                row = self.connection.execute(
                    "INSERT INTO attempt (start_step, started_at, world_size, writer) VALUES (?, ?, ?, ?)"
                    " RETURNING attempt",
                    (int(start_step), now(), world_size, writer),
                ).fetchone()
        self.attempt = int(row[0])
        return self.attempt

    def take(self, seq: int) -> bool:
        """Marks item `seq` of the attempt's writer as written, in the caller's transaction. False: it was already."""
        changed = self.connection.execute(
            "UPDATE attempt SET written = ? WHERE attempt = ? AND written <= ?", (seq + 1, self.attempt, seq)
        )
        return changed.rowcount == 1

    def append(self, record: Record) -> int:
        """Writes one record with all its layers and events, or nothing. Returns its number."""
        encoded = encode(record)
        with self.transaction():
            return self.insert(encoded)

    def insert(self, record: EncodedRecord) -> int:
        """As `append`, inside a transaction of the caller."""
        if self.attempt is None:
            raise UsageError("a record without an attempt", "call begin_attempt(start_step) first")
        connection = self.connection
        number = connection.execute("SELECT coalesce(max(record), 0) + 1 FROM record").fetchone()[0]
        values = (self.attempt, *record.scalars)
        connection.execute(
            f"INSERT INTO record VALUES (?, {', '.join('?' * len(values))}, ?)",
            (number, *values, record_crc(values)),
        )
        connection.executemany(
            "INSERT INTO load VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(number, k, *blobs, invalid, row_crcs(number, k, blobs)) for k, blobs, invalid in record.loads],
        )
        connection.executemany(
            "INSERT INTO layer_stat VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(number, k, *blobs, calls, row_crcs(number, k, blobs)) for k, blobs, calls in record.stats],
        )
        for step, kind, detail in record.events:
            self.insert_event(step, kind, detail | {"record": number})
        return int(number)

    def insert_event(self, step: int | None, kind: str, detail: Mapping[str, Any]) -> None:
        """An alert, a learning-rate action, a broken invariant; inside a transaction of the caller."""
        self.connection.execute(
            "INSERT INTO event (step, kind, detail) VALUES (?, ?, ?)",
            (None if step is None else int(step), kind, json.dumps(detail, default=_plain)),
        )

    def close(self) -> None:
        """Closes it; the last writer leaves one file without a log beside it, readable on read-only media."""
        with suppress(sqlite3.Error):
            if self.journal_mode == "wal":
                self.connection.execute("PRAGMA busy_timeout = 0")
                self.connection.execute("PRAGMA journal_mode = DELETE")  # refused while others have it open
        self.connection.close()


def meta_rows(values: Mapping[str, Any]) -> list[tuple[str, str | int | float]]:
    """Rows of `meta`: text, integers and floats keep their type, anything else becomes JSON text; no NULLs."""
    return [
        (k, v if isinstance(v, str | int | float) else json.dumps(v, default=_plain))
        for k, v in values.items()
        if v is not None
    ]


def check_sources(sources: Sequence[str]) -> None:
    """Raises UsageError where the names of the sources are not usable."""
    if not sources:
        raise UsageError("sources is empty", "leave it out for one source `unlabelled`")
    for name in sources:
        if not isinstance(name, str) or not name or name == "all":
            raise UsageError(f"{name!r} is no source name", 'a name is text, not empty and not "all"')
    if len(set(sources)) < len(sources):
        double = next(s for s in sources if list(sources).count(s) > 1)
        raise UsageError(f"source {double!r} is named twice", "names must differ")


def check_layers(layers: Sequence[LayerInfo]) -> None:
    """Raises UsageError where there is no layer, or two share a number or a name."""
    if not layers:
        raise UsageError("no layer to record", "a store needs at least one MoE layer")
    for what, values in (("layer", [i.layer for i in layers]), ("layer name", [i.name for i in layers])):
        if len(set(values)) < len(values):
            double = next(v for v in values if values.count(v) > 1)
            raise UsageError(f"{what} {double!r} is there twice", "number and name of a layer must differ")


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raises StoreError unless `connection` is a routing store that this version reads."""
    try:
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.OperationalError as error:  # locked, no permission: a disk's matter, not the format's
        raise StoreError(
            f"{path} cannot be opened: {error}", "see that it is readable and not locked"
        ) from error
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"{path} is no SQLite database: {error}",
            "name a routing.db or the run folder that holds it",
        ) from error
    if application_id != APPLICATION_ID:
        raise StoreError(
            f"{path} is an SQLite database, but not a routing store",
            "name a routing.db written by moe-audit; `moe-audit import` makes one from other formats",
        )
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, newer than {SCHEMA_VERSION}",
            "update moe-audit to read it",
        )


def connect(path: Path, timeout: float = BUSY_TIMEOUT) -> sqlite3.Connection:
    """A connection without implicit transactions, usable from any one thread at a time."""
    return sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)


def write_ahead(connection: sqlite3.Connection) -> str:
    """Turns write-ahead logging on where the file system has it. Returns the journal mode in force."""
    try:
        mode = str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
    except sqlite3.OperationalError:  # no shared memory, as on network file systems; or locked just now
        mode = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
    # A rollback journal needs FULL to survive a power cut whole, the log does not.
    connection.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
    return mode


def publish(draft: Path, path: Path) -> None:
    """Gives the finished draft its name; never over a file that is there."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise UsageError(f"{path} exists already", "another process has just made it") from None
    except OSError:  # a file system without hard links
        draft.rename(path)


def _plain(value: Any) -> Any:
    """JSON for numpy and tensor scalars and arrays."""
    return value.tolist()


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
