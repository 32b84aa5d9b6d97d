"""Opening an SQLite file without ever writing to it: live, copied, on read-only media, or left by a kill."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_audit.store import BUSY_TIMEOUT, check_format, one_line
from moe_audit.thresholds.errors import StoreError

SIDECARS = ("-wal", "-journal")
DAMAGE = (sqlite3.Error, UnicodeDecodeError)  # the latter where SQLite's own message quotes damaged text


class ReadOnly:
    """A read transaction on a routing store: one consistent snapshot, while a writer may go on.

    Raises:
        StoreError: the file is no routing store, is damaged or locked, or has a newer schema.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._connection = self._open()
        try:
            check_format(self._connection, path)
            self._connection.execute("BEGIN")
        except BaseException:
            self.close()
            raise

    def rows(self, sql: str, *values: object) -> Iterator[Any]:
        """The rows of a query, one by one.

        Raises:
            StoreError: the file is damaged, or locked.
        """
        try:
            yield from self._connection.execute(sql, values)
        except DAMAGE as error:
            if "locked" in str(error):
                raise StoreError(f"{self.path} is locked", "try again when its writer is done") from error
            raise damaged(self.path, error) from error

    def close(self) -> None:
        """Ends the snapshot."""
        self._connection.close()
        if self._copy is not None:
            self._copy.cleanup()

    def _open(self) -> sqlite3.Connection:
        """Read-only where that works; a log cannot be read in a folder that takes no index file beside it."""
        connection = _connect(self.path, "mode=ro")
        if _readable(connection):
            return connection
        connection.close()
        left = [side for side in SIDECARS if self.path.with_name(self.path.name + side).exists()]
        if not left:
            return _connect(self.path, "mode=ro&immutable=1")
        # Records may be in the log only: it is read from a copy, which SQLite may recover.
        self._copy = tempfile.TemporaryDirectory(prefix="moe-audit-")
        copy = Path(self._copy.name) / self.path.name
        for side in ("", *left):
            shutil.copyfile(self.path.with_name(self.path.name + side), copy.with_name(copy.name + side))
        return _connect(copy, "mode=rw")


def damaged(path: Path, what: object) -> StoreError:
    """The error for a store whose content is not what was written."""
    remedy = "the store is damaged: restore it from a copy"
    return StoreError(f"{path} cannot be read: {one_line(what)}", remedy)


def _connect(path: Path, options: str) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?{options}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)


def _readable(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError as error:
        # Locked, or a damaged schema: another way of opening would not help.
        return not any(word in str(error) for word in ("unable to open", "readonly"))
    except DAMAGE:
        return True
    return True
