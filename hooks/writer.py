"""The writer thread: it takes records from training and puts them into the store, whatever the disk does.

Training calls `submit` and goes on; nothing that goes wrong here reaches it. While the store cannot be
written (locked, full, read-only, gone) records wait in memory, then in a spill file, and go in at the next
success.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_audit.hooks.store_file import StoreFile
from moe_audit.record import encode, plain_json
from moe_audit.spill import Item, absorb, spill, write_item
from moe_audit.store import LayerInfo, Record, Store
from moe_audit.thresholds.errors import UsageError

logger = logging.getLogger("moe_audit")

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
    lost: int  # could not be made, or no disk took them; see `error`
    spill_path: Path | None
    error: str | None  # the first failure, None where there was none


@dataclass(frozen=True)
class _Note:
    """An event or keys of `meta`: the argument of `Item` with its value."""

    name: str
    value: Any


class _Queue:
    """What one process has submitted, and what became of it."""

    def __init__(self) -> None:
        self.state = threading.Condition()
        self.io = threading.RLock()  # held while the connection is in use; a fork takes it
        self.thread: threading.Thread | None = None
        self.pending: deque[RecordOrMaker | _Note | Item] = deque()
        self.writer = uuid.uuid4().hex
        self.start_step: int | None = None
        self.seq = self.written = self.spilled = self.lost = 0
        self.spill_path: Path | None = None
        self.error: str | None = None
        self.failing_since: float | None = None
        self.stop_at: float | None = None

    def idle(self) -> bool:
        return not self.pending and self.spill_path is None


class Writer:
    """Writes the records of one attempt from a daemon thread.

    The store is made (or looked at, with `resume`) by the constructor, so that a wrong path is an error at
    once; the connection that writes is opened by the thread, at the first record, and closed around a fork. A
    forked child that goes on submitting is an attempt of its own.

    Args:
        path: The store's file.
        layers: The layers to be recorded.
        sources: Names of the sources, in the order of the rows.
        resume: Continue the store if there is one; without it a store that exists is an error.
        meta: Further keys for `meta`.
        world_size: Ranks of the training.

    Raises:
        UsageError: the store exists and `resume` is not set, it has other layers or sources, or cannot be
            made.
        StoreError: what is there cannot be resumed: no routing store, damaged, or locked.
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
        self.world_size = world_size
        self._file = StoreFile(self.path, layers, sources, meta or {})
        self._num_experts = {info.layer: info.num_experts for info in layers}
        spilled = self._file.prepare(resume=resume)
        self._queue = _Queue()
        self._queue.spill_path = spilled
        _writers.add(self)

    def begin(self, start_step: int) -> None:
        """The first step of this attempt, before the first `submit`: from it on, no earlier attempt counts.

        Without it, the first step of the first record is taken.
        """
        self._queue.start_step = int(start_step)

    def submit(self, record: RecordOrMaker) -> None:
        """Hands over a record, or a function that makes it; the thread calls it, so it may wait."""
        self._put(record)

    def submit_event(self, step: int | None, kind: str, detail: Mapping[str, Any]) -> None:
        """Hands over an event: an alert, an action on the learning rate."""
        self._put(_Note("event", (None if step is None else int(step), kind, dict(detail))))

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Hands over keys of `meta` to be set."""
        self._put(_Note("meta", {key: value for key, value in values.items() if value is not None}))

    @property
    def sources(self) -> list[str]:
        """Names of the sources, in the order of the rows of the next record."""
        return list(self._file.sources)

    def add_source(self, name: str) -> None:
        """A further source, behind those there are, for the records that are submitted from now on."""
        self._file.sources.append(name)

    def flush(self, timeout: float | None = 30.0) -> bool:
        """Waits until all that was submitted is in the store. False: it is not, `timeout` seconds on."""
        queue = self._queue
        with queue.state:
            return queue.thread is None or queue.state.wait_for(queue.idle, timeout)

    def report(self) -> WriterReport:
        """Where the records are now."""
        q = self._queue
        with q.state:
            return WriterReport(q.written, len(q.pending), q.spilled, q.lost, q.spill_path, q.error)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> WriterReport:
        """Waits until everything is in the store; what is not after `timeout` seconds goes to the spill file.

        The report says what was spilled or lost; a warning does too. A second call changes nothing.
        """
        queue = self._queue
        with queue.state:
            first = queue.stop_at is None
            queue.stop_at = time.monotonic() + timeout
            queue.state.notify_all()
        if queue.thread is not None:
            queue.thread.join(timeout + 5.0)
        atexit.unregister(self._at_exit)
        report = self.report()
        if first and (report.spilled or report.waiting or report.lost):
            logger.warning(
                "%s: %d records are in the store, %d in %s, %d are lost (%s)",
                self.path, report.written, report.spilled, report.spill_path, report.lost + report.waiting,
                report.error,
            )  # fmt: skip
        return report

    def _put(self, waiting: RecordOrMaker | _Note) -> None:
        queue = self._queue
        with queue.state:
            if queue.stop_at is not None:
                raise UsageError(f"the writer of {self.path} is closed", "submit before close()")
            queue.pending.append(waiting)
            if queue.thread is None:
                queue.thread = threading.Thread(target=self._work, name="moe-audit writer", daemon=True)
                queue.thread.start()
                atexit.register(self._at_exit)
            queue.state.notify_all()

    def _at_exit(self) -> None:
        self.close(timeout=5.0)

    # -- the thread

    def _work(self) -> None:
        queue, delay = self._queue, FIRST_RETRY
        while True:
            self._wait(delay)
            try:
                with queue.io:
                    self._write_pending()
                delay = FIRST_RETRY
            except Exception as error:  # whatever the disk does, the thread lives and training goes on
                delay = min(2 * delay, LAST_RETRY)
                self._failed(error)
            if queue.stop_at is not None:
                if queue.idle():
                    break
                if time.monotonic() >= queue.stop_at:
                    self._spill_pending(last=True)
                    break
        with queue.io:
            self._file.close()

    def _wait(self, delay: float) -> None:
        """Until there is something to do; after a failure `delay` seconds, or until close() is called."""
        queue = self._queue
        with queue.state:
            if queue.failing_since is None:
                queue.state.wait_for(lambda: queue.pending or queue.stop_at is not None)
            elif queue.stop_at is None:
                queue.state.wait_for(lambda: queue.stop_at is not None, delay)
            else:
                queue.state.wait(max(0.0, min(delay, queue.stop_at - time.monotonic())))

    def _write_pending(self) -> None:
        """Puts all that waits into the store, oldest first, each item in one transaction."""
        queue = self._queue
        if queue.idle():
            return
        failed_for = 0.0 if queue.failing_since is None else time.monotonic() - queue.failing_since
        store = self._file.open(replace=queue.stop_at is not None or failed_for >= SPILL_AFTER)
        if queue.spill_path is not None:
            absorb(store)
            if queue.spill_path.exists():
                raise OSError(f"{queue.spill_path} cannot be taken in")
            with queue.state:
                queue.written += queue.spilled
                queue.spilled, queue.spill_path = 0, None
                queue.state.notify_all()
        while queue.pending:
            item = self._ready(0)
            if item is not None:
                for name in self._file.sources[store.num_sources :]:
                    store.add_source(name)
                write_item(store, item)
            with queue.state:
                queue.pending.popleft()
                queue.written += item is not None and item.record is not None
                queue.state.notify_all()
        if queue.failing_since is not None:
            self._recovered(store, failed_for)

    def _ready(self, i: int) -> Item | None:
        """The i-th waiting thing in the form that is written; None: it cannot be made, or is not valid."""
        queue = self._queue
        waiting = queue.pending[i]
        if isinstance(waiting, Item):
            return waiting
        try:
            if isinstance(waiting, _Note):
                plain = json.loads(json.dumps(waiting.value, default=plain_json))
                item = self._item(**{waiting.name: plain})
            else:
                record = waiting() if callable(waiting) else waiting
                encoded = encode(record, self._num_experts)
                if queue.start_step is None:
                    queue.start_step = int(record.first_step)
                item = self._item(record=encoded)
        except Exception as error:
            with queue.state:
                queue.lost += 1
                queue.error = queue.error or str(error)
            logger.warning("%s: a record is lost, it cannot be made: %s", self.path, error)
            return None
        queue.pending[i] = item
        return item

    def _item(self, **content: Any) -> Item:
        queue = self._queue
        seq = queue.seq
        queue.seq += queue.start_step is not None
        return Item(queue.writer, seq, queue.start_step, self.world_size, **content)

    # -- when the store cannot be written

    def _failed(self, error: Exception) -> None:
        queue, now = self._queue, time.monotonic()
        with queue.state:
            queue.error = queue.error or str(error)
        if queue.failing_since is None:
            queue.failing_since = now
            logger.warning("%s cannot be written (%s): records are kept, training goes on", self.path, error)
        with queue.io:
            self._file.close(keep_vanished=True)  # a fresh connection may do
        if now - queue.failing_since >= SPILL_AFTER:
            self._spill_pending(last=False)

    def _spill_pending(self, *, last: bool) -> None:
        """Moves all that waits to the spill file, where a kill cannot reach it; failing that, it stays."""
        queue = self._queue
        waiting = len(queue.pending)
        items = [item for i in range(waiting) if (item := self._ready(i)) is not None]
        records = sum(item.record is not None for item in items)
        try:
            path = spill(self.path, items) if items else queue.spill_path
        except Exception as error:  # mostly OSError; the thread outlives all of them
            if not last:
                return
            logger.warning("%s: %d records are lost, no disk takes them: %s", self.path, records, error)
            path, records, lost = queue.spill_path, 0, records
        else:
            lost = 0
        with queue.state:
            for _ in range(waiting):
                queue.pending.popleft()
            queue.spilled += records
            queue.lost += lost
            queue.spill_path = path
            queue.state.notify_all()

    def _recovered(self, store: Store, seconds: float) -> None:
        """Says in `meta` and in an event that the store could not be written for a while, and why."""
        queue = self._queue
        detail = {"seconds": round(seconds, 1), "error": queue.error}
        with store.transaction():
            store.insert_event(None, "store_unavailable", detail)
        store.set_meta({"store_unavailable": detail})
        queue.failing_since = None
        logger.warning("%s can be written again after %.0f s, nothing is missing", self.path, seconds)


# No connection crosses a fork: before one, each writer closes its own; the child starts with empty hands.
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
_forking: list[Writer] = []


def _before_fork() -> None:
    for writer in list(_writers):
        writer._queue.io.acquire()
        writer._file.close()
        _forking.append(writer)


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop()._queue.io.release()


def _after_fork_in_child() -> None:
    while _forking:
        _forking.pop()._queue = _Queue()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
