"""The file behind the writer: made or resumed, opened to be written, followed when it vanishes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from moe_audit.spill import absorb, spill_paths
from moe_audit.store import (
    UNLABELLED,
    LayerInfo,
    Store,
    check_layers,
    check_sources,
    connect,
    publish,
)
from moe_audit.thresholds.errors import StoreError, UsageError

BUSY_TIMEOUT = (
    1.0  # seconds inside SQLite before a lock counts as a failure; a fork waits no longer than this
)


class StoreFile:
    """A path that should hold a store, and the connection to it while there is one. Not thread-safe.

    Args:
        path: The store's file.
        layers, sources, meta: What a new store is made with.
    """

    def __init__(
        self, path: Path, layers: Sequence[LayerInfo], sources: Sequence[str], meta: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.layers = list(layers)
        self.sources = list(sources)
        self.meta = dict(meta)
        self._store: Store | None = None
        self._inode: tuple[int, int] | None = None

    def prepare(self, *, resume: bool) -> Path | None:
        """Makes the store, or sees that it can be resumed and takes in what an earlier attempt had spilled.

        Returns:
            The spill file, if the store cannot be written just now: its records are to go in before others.

        Raises:
            UsageError: it exists and is not to be resumed, has other layers or sources, or cannot be made.
            StoreError: it is no routing store, damaged, locked or read-only.
        """
        check_sources(self.sources)
        check_layers(self.layers)
        if not (resume and self.path.exists()):
            Store.create(self.path, self.layers, self.sources, self.meta).close()
            return None
        try:
            with closing(Store.open(self.path)) as store:
                _check_same(store, self.layers, self.sources)
                try:
                    absorb(store)
                except sqlite3.OperationalError:
                    return next((path for path in spill_paths(self.path) if path.is_file()), None)
                return None
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"{self.path} cannot be resumed: {error}", "free the lock, the disk or the permission"
            ) from error

    def open(self, *, replace: bool) -> Store:
        """The store, open, and still the file that the path names.

        Args:
            replace: Whether a file that is gone is given up for lost. A path can come back (a disk mounted
                again, a folder renamed back), so the caller waits before it says so. Then a new file is made,
                with all that the open connection still sees of the old one.

        Raises:
            OSError, sqlite3.Error, AuditError: it cannot be had.
        """
        if self._store is not None:
            if _inode(self.path) == self._inode:
                return self._store
            if self.path.exists():  # another file has taken its place
                self.close()
        if not self.path.exists():
            if not replace:
                raise FileNotFoundError(f"{self.path} is gone")
            self._replace()
        self._store = Store.open(self.path, timeout=BUSY_TIMEOUT)
        self._inode = _inode(self.path)
        return self._store

    def close(self, *, keep_vanished: bool = False) -> None:
        """Closes the connection. `keep_vanished`: not if the file is gone, only it knows the content then."""
        if keep_vanished and not self.path.exists():
            return
        store, self._store = self._store, None
        if store is not None:
            with suppress(sqlite3.Error):
                store.close()

    def _replace(self) -> None:
        if self._store is None:
            Store.create(self.path, self.layers, self.sources, self.meta).close()
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.new-{os.getpid()}")
        with closing(connect(draft)) as copy:
            self._store.connection.backup(copy)
        self.close()  # before the new file is there: closing removes the log by its name
        publish(draft, self.path)
        draft.unlink(missing_ok=True)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _check_same(store: Store, layers: Sequence[LayerInfo], sources: Sequence[str]) -> None:
    """Raises UsageError where the store has other layers or sources than the model and the caller."""
    stored = store.layer_shapes()
    given = {info.layer: (info.name, info.num_experts) for info in layers}
    if stored != given:
        layer = min(k for k in stored.keys() | given.keys() if stored.get(k) != given.get(k))
        raise UsageError(
            f"{store.path} has layer {layer} as {stored.get(layer)}, the model has {given.get(layer)}",
            "resume with the model of that run, or record into another path",
        )
    names, wanted = store.source_names(), list(sources)
    # Further sources may follow; an `unlabelled` that was added on the way may be left out again.
    if wanted[: len(names)] != names and names != [*wanted, UNLABELLED]:
        raise UsageError(
            f"{store.path} has the sources {', '.join(names)}, not {', '.join(wanted)}",
            "resume with the same sources in the same order",
        )
