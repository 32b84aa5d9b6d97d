"""The routing store: one SQLite file of exact expert counts. This module writes it; `run.py` reads it.

Shapes: S sources, E experts of a layer.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from moe_audit.record import EncodedRecord, encode, now, plain_json, record_crc, row_crcs
from moe_audit.record import LayerInfo as LayerInfo
from moe_audit.record import LayerRecord as LayerRecord
from moe_audit.record import Record as Record
from moe_audit.thresholds.errors import StoreError, UsageError

APPLICATION_ID = 0x4D4F4541  # "MOEA", so that `file` and other tools can tell the format
SCHEMA_VERSION = 1
UNLABELLED = "unlabelled"  # tokens without a source; also the one source of a run without sources
BUSY_TIMEOUT = 5.0  # seconds that SQLite waits for another process's lock


class Store:
    """A store open for writing. Each record is one transaction, all layers or none.

    Open it in the process that writes: an SQLite connection must not cross a fork.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, journal_mode: str) -> None:
        self.connection = connection
        self.path = path
        self.journal_mode = journal_mode
        self.attempt: int | None = None
        self.num_sources: int = connection.execute("SELECT count(*) FROM source").fetchone()[0]

    @classmethod
    def create(
        cls,
        path: str | Path,
        layers: Sequence[LayerInfo],
        sources: Sequence[str] = (UNLABELLED,),
        meta: Mapping[str, Any] | None = None,
        *,
        counts_only: bool = False,
    ) -> Store:
        """A new store at `path`; its folder is made if need be. The file appears whole or not at all.

        `counts_only`: no other arrays will come; pages are laid out for that.

        Raises:
            UsageError: the file exists, a source name is taken twice or is reserved, there is no layer, or
                two layers share a number or a name.
        """
        from moe_audit.schema import create_schema

        path = Path(path)
        check_sources(sources)
        check_layers(layers)
        draft = path.parent / f"{path.name}.new-{os.getpid()}"
        try:
            if path.is_dir():
                raise UsageError(f"{path} is a folder", f"give a file in it, as {path / 'routing.db'}")
            if path.exists():
                remedy = "resume it with resume=True, or choose another path"
                raise UsageError(f"{path} exists already", remedy)
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(connect(draft)) as connection:
                values = {"created": now(), **(meta or {})}
                create_schema(connection, layers, sources, values, counts_only=counts_only)
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
                with suppress(sqlite3.OperationalError):  # locked just now: the next one to open it says so
                    store.set_meta({"journal_mode": store.journal_mode})
        except BaseException:
            connection.close()
            raise
        return store

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """BEGIN IMMEDIATE … COMMIT: one that reads first and writes later can fail on the upgrade."""
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
        with self.transaction():
            self.insert_meta(values)

    def insert_meta(self, values: Mapping[str, Any]) -> None:
        """As `set_meta`, inside a transaction of the caller."""
        self.connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta_rows(values))

    def add_source(self, name: str) -> None:
        """A further source behind those there are; earlier records have no row for it: zeros."""
        with self.transaction():
            self.connection.execute("INSERT INTO source VALUES (?, ?)", (self.num_sources, name))
        self.num_sources += 1

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
        """Marks item `seq` of the attempt's writer as written, in the caller's transaction. False: it was."""
        changed = self.connection.execute(
            "UPDATE attempt SET written = ? WHERE attempt = ? AND written <= ?", (seq + 1, self.attempt, seq)
        )
        return changed.rowcount == 1

    def append(self, record: Record) -> int:
        """Writes one record with all its layers and events, or nothing. Returns its number."""
        return self.extend([record])

    def extend(self, records: Sequence[Record]) -> int:
        """Writes all of these records in one transaction, or none. Returns the number of the last."""
        num_experts = {layer: experts for layer, (_, experts) in self.layer_shapes().items()}
        encoded = [encode(record, num_experts) for record in records]
        with self.transaction():
            return [self.insert(record) for record in encoded][-1]

    def insert(self, record: EncodedRecord) -> int:
        """As `append`, inside a transaction of the caller."""
        if self.attempt is None:
            raise UsageError("a record without an attempt", "call begin_attempt(start_step) first")
        connection = self.connection
        number = connection.execute("SELECT coalesce(max(record), 0) + 1 FROM record").fetchone()[0]
        values = (self.attempt, *record.scalars, len(record.loads), len(record.stats))
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
            (None if step is None else int(step), kind, json.dumps(detail, default=plain_json)),
        )

    def close(self) -> None:
        """Closes it; the last writer leaves one file without a log beside it, readable on read-only media."""
        with suppress(sqlite3.Error):
            if self.journal_mode == "wal":
                self.connection.execute("PRAGMA busy_timeout = 0")
                self.connection.execute("PRAGMA journal_mode = DELETE")  # refused while others have it open
        self.connection.close()


def meta_rows(values: Mapping[str, Any]) -> list[tuple[str, str | int | float]]:
    """Rows of `meta`: text, integers and floats keep their type, anything else becomes JSON; no NULLs."""
    return [
        (k, v if isinstance(v, str | int | float) else json.dumps(v, default=plain_json))
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
    """Raises UsageError where there is none, two share a number or name, or a top-k exceeds its experts."""
    if not layers:
        raise UsageError("no layer to record", "a store needs at least one MoE layer")
    numbers, names = [str(i.layer) for i in layers], [i.name for i in layers]
    for what, values in (("layer", numbers), ("layer name", names)):
        if len(set(values)) < len(values):
            double = next(v for v in values if values.count(v) > 1)
            raise UsageError(f"{what} {double} is there twice", "number and name of a layer must differ")
    for i in layers:
        if i.top_k is not None and not 0 < i.top_k <= i.num_experts:
            raise UsageError(
                f"layer {i.layer} ({i.name}) has top-k {i.top_k} of {i.num_experts} experts",
                "a token picks an expert once",
            )


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raises StoreError unless `connection` is a routing store that this version reads."""
    try:
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.OperationalError as error:  # locked, no permission: a disk's matter, not the format's
        raise StoreError(
            f"{path} cannot be opened: {one_line(error)}", "see that it is readable and not locked"
        ) from error
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise StoreError(
            f"{path} is no SQLite database: {one_line(error)}",
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


def one_line(error: object) -> str:
    """An error of SQLite without the SQL and the bytes that it may quote over many lines."""
    return " ".join(str(error).split())[:200]


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
