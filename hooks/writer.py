"""The writer thread: it takes records from training and puts them into the store, whatever the disk does.

Training calls `submit` and goes on; nothing that goes wrong here reaches it. While the store cannot be written
(locked, full, read-only, gone) records wait in memory, later in a spill file, and go in at the next success.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_audit.spill import Item, absorb, spill, write_item
from moe_audit.store import (
    UNLABELLED,
    LayerInfo,
    Record,
    Store,
    check_layers,
    check_sources,
    connect,
    encode,
    publish,
)
from moe_audit.thresholds.errors import StoreError, UsageError

logger = logging.getLogger("moe_audit")

BUSY_TIMEOUT = (
    1.0  # seconds inside SQLite before a lock counts as a failure; a fork waits no longer than this
)
FIRST_RETRY, LAST_RETRY = 0.1, 5.0  # seconds between tries
SPILL_AFTER = 10.0  # seconds of failure after which waiting records go to the spill file, safe from a kill
CLOSE_TIMEOUT = 60.0  # seconds that close() goes on trying before it spills

RecordOrMaker = Record | Callable[[], Record]


@dataclass(frozen=True)
class WriterReport:
    """What became of the records that were submitted."""

    written: int  # in the store
    waiting: int  # in memory, not yet in the store
    spilled: int  # in `spill_path`, taken in at the next resume or by `moe-audit import --format spill`
    lost: int  # could not be kept; see `error`
    spill_path: Path | None
    error: str | None  # the first failure, None where there was none


@dataclass(frozen=True)
class _Event:
    step: int | None
    kind: str
    detail: Mapping[str, Any]


class Writer:
    """Writes the records of one attempt from a daemon thread.

    The store is made (or looked at, with `resume`) by the constructor, so that a wrong path is an error at once;
    the connection that writes is opened by the thread, at the first record, and closed around a fork. A forked child
    that goes on submitting is an attempt of its own.

    Args:
        path: The store's file.
        layers: The layers to be recorded.
        sources: Names of the sources, in the order of the rows.
        resume: Continue the store that is there; without one a new store is made.
        meta: Further keys for `meta`.
        world_size: Ranks of the training.

    Raises:
        UsageError: the store exists and `resume` is not set, or it has other layers or sources.
        StoreError: what is there cannot be resumed: no routing store, or damaged.
    """

    def __init__(
        self,
        path: str | Path,
        layers: Sequence[LayerInfo],
        sources: Sequence[str],
        *,
        resume: bool = False,
        meta: Mapping[str, Any] | None = None,
        world_size: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.layers = list(layers)
        self.sources = list(sources)
        self.meta = dict(meta or {})
        self.world_size = world_size
        self._prepare(resume)
        self._reset()
        _writers.add(self)

    def begin(self, start_step: int) -> None:
        """The first step of this attempt: earlier attempts count no longer from it on. Before the first `submit`;
        without it, the first record's first step is taken."""
        self._start_step = int(start_step)

    def submit(self, record: RecordOrMaker) -> None:
        """Hands over a record, or a function that makes it (called in the thread, where it may wait for a copy)."""
        self._put(record)

    def submit_event(self, step: int | None, kind: str, detail: Mapping[str, Any]) -> None:
        """Hands over an event: an alert, an action on the learning rate."""
        self._put(_Event(step, kind, dict(detail)))

    def add_source(self, name: str) -> None:
        """A further source, behind those there are, for the records that are submitted from now on."""
        self.sources.append(name)

    def flush(self, timeout: float | None = 30.0) -> bool:
        """Waits until all that was submitted is in the store. False: it is not, `timeout` seconds on."""
        with self._state:
            if self._thread is None:
                return True
            return self._state.wait_for(lambda: not self._pending and self._spill_path is None, timeout)

    def report(self) -> WriterReport:
        """Where the records are now."""
        with self._state:
            return WriterReport(
                written=self._written,
                waiting=len(self._pending),
                spilled=self._spilled,
                lost=self._lost,
                spill_path=self._spill_path,
                error=self._error,
            )

    def close(self, timeout: float = CLOSE_TIMEOUT) -> WriterReport:
        """Waits until everything is in the store; what is not after `timeout` seconds goes to the spill file."""
        with self._state:
            thread, self._stop_at = self._thread, time.monotonic() + timeout
            self._state.notify_all()
        if thread is not None:
            thread.join(timeout + 2 * BUSY_TIMEOUT + 5.0)
        atexit.unregister(self._at_exit)
        report = self.report()
        if report.spilled or report.waiting or report.lost:
            logger.warning(
                "%s: %d records are in %s, %d are lost (%s)",
                self.path, report.spilled, report.spill_path, report.lost + report.waiting, report.error,
            )  # fmt: skip
        return report

    # -- the calling side

    def _prepare(self, resume: bool) -> None:
        """Makes the store, or sees that it can be resumed, and takes in what an earlier attempt had spilled."""
        check_sources(self.sources)
        check_layers(self.layers)
        if not (resume and self.path.exists()):
            Store.create(self.path, self.layers, self.sources, self.meta).close()
            return
        store = Store.open(self.path)
        try:
            _check_same(store, self.layers, self.sources)
            absorb(store)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"{self.path} cannot be resumed: {error}", "free the lock, the disk or the permission"
            ) from error
        finally:
            store.close()

    def _reset(self) -> None:
        """The state of a process in which nothing was submitted yet."""
        self._state = threading.Condition()
        self._io = threading.RLock()  # held while the connection is in use; a fork takes it
        self._thread: threading.Thread | None = None
        self._pending: deque[RecordOrMaker | _Event | Item] = deque()
        self._store: Store | None = None
        self._inode: tuple[int, int] | None = None
        self._name = uuid.uuid4().hex
        self._start_step: int | None = None
        self._seq = self._written = self._spilled = self._lost = 0
        self._spill_path: Path | None = None
        self._error: str | None = None
        self._failing_since: float | None = None
        self._stop_at: float | None = None

    def _put(self, item: RecordOrMaker | _Event) -> None:
        with self._state:
            if self._stop_at is not None:
                raise UsageError(f"{self.path} is closed", "submit before close()")
            self._pending.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="moe-audit writer", daemon=True)
                self._thread.start()
                atexit.register(self._at_exit)
            self._state.notify_all()

    def _at_exit(self) -> None:
        self.close(timeout=5.0)

    # -- the thread

    def _work(self) -> None:
        delay = FIRST_RETRY
        while True:
            self._wait(delay)
            try:
                with self._io:
                    self._write_pending()
                delay = FIRST_RETRY
            except Exception as error:  # whatever the disk does, the thread lives and training goes on
                delay = min(2 * delay, LAST_RETRY)
                self._failed(error)
            stop_at = self._stop_at
            if stop_at is not None and not self._pending and self._spill_path is None:
                break
            if stop_at is not None and time.monotonic() >= stop_at:
                self._spill_pending(last=True)
                break
        with self._io:
            self._close_store()

    def _wait(self, delay: float) -> None:
        """Until there is something to do; after a failure `delay` seconds, or until close() is called."""
        with self._state:
            if self._failing_since is None:
                self._state.wait_for(lambda: self._pending or self._stop_at is not None)
            elif self._stop_at is None:
                self._state.wait_for(lambda: self._stop_at is not None, delay)
            else:
                self._state.wait(max(0.0, min(delay, self._stop_at - time.monotonic())))

    def _write_pending(self) -> None:
        """Puts all that waits into the store, oldest first, each item in one transaction."""
        if not self._pending and self._spill_path is None:
            return
        store = self._open_store()
        if self._spill_path is not None:
            absorb(store)
            with self._state:
                self._written, self._spilled, self._spill_path = self._written + self._spilled, 0, None
        while self._pending:
            item = self._ready(0)
            if item is not None:
                for name in self.sources[store.num_sources :]:
                    store.add_source(name)
                write_item(store, item)
            with self._state:
                self._pending.popleft()
                self._written += item is not None and item.record is not None
                self._state.notify_all()
        if self._failing_since is not None:
            self._recovered(store)

    def _ready(self, i: int) -> Item | None:
        """The i-th waiting thing in the form that is written; None: it cannot be made or is not valid."""
        waiting = self._pending[i]
        if isinstance(waiting, Item):
            return waiting
        try:
            if isinstance(waiting, _Event):
                item = self._item(event=(waiting.step, waiting.kind, json_safe(waiting.detail)))
            else:
                record = waiting() if callable(waiting) else waiting
                encoded = encode(record)
                if self._start_step is None:
                    self._start_step = record.first_step
                item = self._item(record=encoded)
        except Exception as error:
            with self._state:
                self._lost += 1
                self._error = self._error or str(error)
            logger.warning("%s: a record is lost, it cannot be made: %s", self.path, error)
            return None
        self._pending[i] = item
        return item

    def _item(self, **content: Any) -> Item:
        seq = self._seq
        self._seq += self._start_step is not None
        return Item(self._name, seq, self._start_step, self.world_size, **content)

    # -- when the store cannot be written

    def _failed(self, error: Exception) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            logger.warning(
                "%s cannot be written (%s): records are kept and tried again, training goes on",
                self.path,
                error,
            )
        with self._state:
            self._error = self._error or str(error)
        if (
            self.path.exists()
        ):  # a fresh connection may do; of a file that is gone, only the open one knows the content
            with self._io:
                self._close_store()
        if now - self._failing_since >= SPILL_AFTER:
            self._spill_pending(last=False)

    def _spill_pending(self, *, last: bool) -> None:
        """Moves all that waits to the spill file, where a kill cannot reach it; if that fails too, it stays here."""
        items = [item for i in range(len(self._pending)) if (item := self._ready(i)) is not None]
        if not items:
            return
        records = sum(item.record is not None for item in items)
        try:
            path = spill(self.path, items)
        except OSError as error:
            if last:
                with self._state:
                    self._lost += records
                    self._pending.clear()
                logger.warning("%s: %d records are lost, no disk takes them: %s", self.path, records, error)
            return
        with self._state:
            for _ in range(len(items)):
                self._pending.popleft()
            self._spilled += records
            self._spill_path = path
            self._state.notify_all()

    def _recovered(self, store: Store) -> None:
        """Says in `meta` and in an event that the store could not be written for a while, and why."""
        seconds = round(time.monotonic() - (self._failing_since or 0.0), 1)
        self._failing_since = None
        with store.transaction():
            store.insert_event(None, "store_unavailable", {"seconds": seconds, "error": self._error})
        store.set_meta({"store_unavailable": f"{seconds} s: {self._error}"})
        logger.warning("%s can be written again after %.0f s, nothing is missing", self.path, seconds)

    # -- the connection

    def _open_store(self) -> Store:
        """The store, open and still the file that `path` names."""
        if self._store is not None:
            if _inode(self.path) == self._inode:
                return self._store
            if self.path.exists():  # another file has taken its place
                self._close_store()
        if not self.path.exists():
            self._replace_vanished()
        self._store = Store.open(self.path, timeout=BUSY_TIMEOUT)
        self._inode = _inode(self.path)
        return self._store

    def _replace_vanished(self) -> None:
        """A new file for one that is gone, with all that the open connection still sees of it.

        A path can come back (a disk mounted again, a folder renamed back): it is given `SPILL_AFTER` seconds.
        """
        waited = 0.0 if self._failing_since is None else time.monotonic() - self._failing_since
        if self._stop_at is None and waited < SPILL_AFTER:
            raise FileNotFoundError(f"{self.path} is gone")
        if self._store is None:
            Store.create(self.path, self.layers, self.sources, self.meta).close()
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.new-{os.getpid()}")
        with contextlib.closing(connect(draft)) as copy:
            self._store.connection.backup(copy)
        # Closed before the new file is there: closing removes the log by its name.
        self._close_store()
        publish(draft, self.path)
        draft.unlink(missing_ok=True)

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(sqlite3.Error):
                store.close()


def json_safe(detail: Mapping[str, Any]) -> dict[str, Any]:
    """The detail of an event as plain JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(detail), default=lambda value: value.tolist()))
    return plain


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _check_same(store: Store, layers: Sequence[LayerInfo], sources: Sequence[str]) -> None:
    """Raises UsageError where a store to be resumed has other layers or sources than the model and the caller."""
    stored = store.layer_shapes()
    given = {info.layer: (info.name, info.num_experts) for info in layers}
    if stored != given:
        layer = min(k for k in stored.keys() | given.keys() if stored.get(k) != given.get(k))
        raise UsageError(
            f"{store.path} has layer {layer} as {stored.get(layer)}, the model has {given.get(layer)}",
            "resume with the model of that run, or record into another path",
        )
    names = store.source_names()
    if not _continues(names, list(sources)):
        raise UsageError(
            f"{store.path} has the sources {names}, not {list(sources)}", "resume with the same sources"
        )


def _continues(stored: list[str], given: list[str]) -> bool:
    """The same sources, further ones behind them, or all but an `unlabelled` that was added on the way."""
    return given[: len(stored)] == stored or stored == [*given, UNLABELLED]


# No connection crosses a fork: before one, each writer closes its own; the child starts with empty hands.
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
_forking: list[Writer] = []


def _before_fork() -> None:
    for writer in list(_writers):
        writer._io.acquire()
        writer._close_store()
        _forking.append(writer)


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop()._io.release()


def _after_fork_in_child() -> None:
    while _forking:
        _forking.pop()._reset()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
