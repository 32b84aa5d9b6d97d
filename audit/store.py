"""The routing store: one SQLite file of exact expert counts. This module writes it; `run.py` reads it.

Shapes: S sources, E experts of a layer.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from moe_audit.thresholds.errors import StoreError, UsageError

APPLICATION_ID = 0x4D4F4541  # "MOEA", so that `file` and other tools can tell the format
SCHEMA_VERSION = 1
PAGE_SIZE = 8192
UNLABELLED = "unlabelled"  # tokens without a source; also the one source of a run without sources
MAX_COUNT = 2**32 - 1  # counts are stored as u4: a record is cut before a count could pass it

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


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def schema_sql() -> str:
    """The schema as SQL; the 256 bytes that the views decode with are filled in."""
    text = files("moe_audit").joinpath("schema.sql").read_text(encoding="utf-8")
    return text.replace("@ALL_BYTES@", bytes(range(256)).hex())


class Store:
    """A store open for writing. One writer a file; each record is one transaction, all layers or none.

    Open it in the process that writes: an SQLite connection must not cross a fork.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        self.path = path
        self.attempt: int | None = None
        self._num_sources = connection.execute("SELECT count(*) FROM source").fetchone()[0]

    @classmethod
    def create(
        cls,
        path: str | Path,
        layers: Sequence[LayerInfo],
        sources: Sequence[str] = (UNLABELLED,),
        meta: Mapping[str, Any] | None = None,
    ) -> Store:
        """A new store at `path`; its folder is made if need be.

        Raises:
            UsageError: the file exists, a source name is taken twice or is reserved, or there is no layer.
        """
        path = Path(path)
        check_sources(sources)
        if path.exists():
            raise UsageError(f"{path} exists already", "resume it with resume=True, or choose another path")
        if not layers:
            raise UsageError(f"no layer to record in {path}", "a store needs at least one MoE layer")
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = _connect(path)
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")  # before WAL: it cannot change afterwards
        journal_mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        connection.executescript(
            f"BEGIN IMMEDIATE; {schema_sql()}"
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
        store = cls(connection, path)
        with store.transaction():
            connection.executemany(
                "INSERT INTO layer VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        i.layer,
                        i.name,
                        i.num_experts,
                        i.top_k,
                        i.capacity_factor,
                        i.gating,
                        json.dumps(i.tags),
                    )
                    for i in layers
                ],
            )
            connection.executemany("INSERT INTO source VALUES (?, ?)", enumerate(sources))
        store._num_sources = len(sources)
        store.set_meta({"created": now(), "journal_mode": journal_mode, **(meta or {})})
        return store

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """An existing store, for further records.

        Raises:
            StoreError: the file is no routing store, or one of a newer schema.
        """
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"{path} does not exist", "nothing to resume: leave resume=False")
        connection = _connect(path)
        check_format(connection, path)
        return cls(connection, path)

    def transaction(self) -> _Immediate:
        """BEGIN IMMEDIATE … COMMIT: a transaction that reads first and writes later can fail at once on the upgrade."""
        return _Immediate(self.connection)

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Sets keys of `meta`; text, integers and floats keep their type, anything else becomes JSON text."""
        rows = [
            (k, v if isinstance(v, str | int | float) else json.dumps(v))
            for k, v in values.items()
            if v is not None
        ]
        with self.transaction():
            self.connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def add_source(self, name: str) -> int:
        """A further source, behind those there are; records written before have no row for it, which reads as zeros."""
        with self.transaction():
            self.connection.execute("INSERT INTO source VALUES (?, ?)", (self._num_sources, name))
        self._num_sources += 1
        return self._num_sources - 1

    def begin_attempt(self, start_step: int, world_size: int | None = None) -> int:
        """A new attempt from `start_step` on; records of earlier attempts at or after it count no longer."""
        with self.transaction():
            cursor = self.connection.execute(
                "INSERT INTO attempt (start_step, started_at, world_size) VALUES (?, ?, ?)",
                (int(start_step), now(), world_size),
            )
        self.attempt = cursor.lastrowid
        assert self.attempt is not None
        return self.attempt

    def append(self, record: Record) -> int:
        """Writes one record with all its layers and events, or nothing. Returns its number."""
        with self.transaction():
            return self.insert(record)

    def insert(self, record: Record) -> int:
        """As `append`, inside a transaction of the caller."""
        if self.attempt is None:
            raise UsageError("a record without an attempt", "call begin_attempt(start_step) first")
        execute = self.connection.execute
        number = execute(
            "INSERT INTO record (attempt, phase, first_step, last_step, microbatches, tokens, excluded_tokens,"
            " ranks, lr, router_lr, loss, written_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self.attempt, record.phase, record.first_step, record.last_step, record.microbatches, record.tokens,
                record.excluded_tokens, record.ranks, record.lr, record.router_lr, record.loss, now(),
            ),
        ).lastrowid  # fmt: skip
        assert number is not None
        self.connection.executemany(
            "INSERT INTO load VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (number, layer, _blob(x.counts_SE, "<u4"), _blob(x.prob_sum_SE, "<f4"), _blob(x.tokens_S, "<i8"),
                 _blob(x.top1_S2, "<f4"), int(x.invalid))
                for layer, x in record.layers.items()
            ],
        )  # fmt: skip
        self.connection.executemany(
            "INSERT INTO layer_stat VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (number, layer, _blob(x.peak_E, "<f4"), _blob(x.sq_over_t_E, "<f8"), _blob(x.dropped_E, "<u4"),
                 _blob(x.logit_mean_E, "<f4"), _blob(x.logit_std_E, "<f4"), x.calls)
                for layer, x in record.layers.items()
                if x.calls is not None
            ],
        )  # fmt: skip
        for step, kind, detail in record.events:
            self.insert_event(step, kind, detail | {"record": number})
        return number

    def insert_event(self, step: int | None, kind: str, detail: Mapping[str, Any]) -> None:
        """An alert, a learning-rate action, a broken invariant; inside a transaction of the caller."""
        self.connection.execute(
            "INSERT INTO event (step, kind, detail) VALUES (?, ?, ?)",
            (step, kind, json.dumps(detail)),
        )

    def close(self) -> None:
        self.connection.close()


class _Immediate:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def __enter__(self) -> sqlite3.Connection:
        self.connection.execute("BEGIN IMMEDIATE")
        return self.connection

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.connection.execute("COMMIT" if kind is None else "ROLLBACK")


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


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raises StoreError unless `connection` is a routing store that this version reads."""
    try:
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
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


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _blob(array: npt.NDArray[Any] | None, dtype: str) -> bytes | None:
    """The bytes of an array in the store's element type; u4 refuses what does not fit."""
    if array is None:
        return None
    if dtype == "<u4" and array.size and (int(array.min()) < 0 or int(array.max()) > MAX_COUNT):
        raise UsageError(
            f"a count of {int(array.max())} (smallest {int(array.min())}) does not fit 0 to {MAX_COUNT}",
            "cut records more often",
        )
    return np.ascontiguousarray(array, dtype=dtype).tobytes()
