"""Records that could not reach the store, kept in a side file until they can.

One line a record: the CRC-32 of the rest of the line in hexadecimal, a space, JSON with the arrays in base64.
A line is whole or it is ignored, so a file torn by a full disk or a kill gives back all that was finished.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_audit.record import EncodedRecord
from moe_audit.store import Store


@dataclass(frozen=True)
class Item:
    """A record, an event or keys of `meta` on the way to the store. `seq` numbers a writer's items from 0."""

    writer: str
    seq: int
    start_step: int | None  # None: of no attempt, from before the first step is known
    world_size: int | None
    record: EncodedRecord | None = None
    event: tuple[int | None, str, dict[str, Any]] | None = None
    meta: dict[str, Any] | None = None


def spill_paths(store: Path) -> tuple[Path, Path]:
    """Where records of `store` are spilled: beside it, or where that fails, in the temporary folder."""
    key = hashlib.sha256(str(store.absolute()).encode()).hexdigest()[:16]
    return store.with_name(f"{store.name}.spill"), Path(tempfile.gettempdir()) / f"moe-audit-{key}.spill"


def spill(store: Path, records: Sequence[Item]) -> Path:
    """Appends records to the spill file of `store`, all or none, and onto the disk. Returns the file.

    Raises:
        OSError: neither place takes them.
    """
    data = b"".join(_line(r) for r in records)
    beside, elsewhere = spill_paths(store)
    try:
        return _append(beside, data)
    except OSError:
        return _append(elsewhere, data)


def read_spill(path: Path) -> Iterator[Item]:
    """The whole records of a spill file, in order; torn lines are passed over."""
    with path.open("rb") as lines:
        for line in lines:
            crc, _, text = line.rstrip(b"\n").partition(b" ")
            if len(crc) == 8 and crc == b"%08x" % zlib.crc32(text):
                yield _parse(text)


def spilled_records(store: Path) -> int:
    """How many whole records wait beside `store`, unread."""
    path = spill_paths(store)[0]
    return sum(1 for _ in read_spill(path)) if path.is_file() else 0


def absorb(store: Store) -> int:
    """Moves the spilled records of a store into it, each once, and removes the spill files. Returns how many.

    A file in the temporary folder is read only if it belongs to this user.

    Raises:
        sqlite3.Error, OSError: it failed; what was spilled is still there.
    """
    total = 0
    beside, elsewhere = spill_paths(store.path)
    for path in (beside, elsewhere):
        if not path.is_file() or (path == elsewhere and path.stat().st_uid != _user()):
            continue
        current = store.attempt
        moved = sum(write_item(store, item) for item in read_spill(path))
        store.attempt = current
        path.unlink()
        total += moved
    if total:
        store.set_meta({"recovered_records": int(store.get_meta("recovered_records") or 0) + total})
    return total


def write_item(store: Store, item: Item) -> bool:
    """Puts one item into the store in one transaction, under its writer's attempt. False: it was there."""
    if item.start_step is None:
        store.attempt = None
    else:
        store.begin_attempt(item.start_step, item.world_size, writer=item.writer)
    with store.transaction():
        if store.attempt is not None and not store.take(item.seq):
            return False
        if item.record is not None:
            store.insert(item.record)
        if item.event is not None:
            store.insert_event(*item.event)
        if item.meta is not None:
            store.insert_meta(item.meta)
    return True


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _append(path: Path, data: bytes) -> Path:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(path, flags, 0o600)
    try:
        end = os.fstat(handle).st_size
        # A torn line may stand at the end, left by a kill: a newline closes it.
        data = b"\n" + data if end else data
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            os.fsync(handle)
        except OSError:
            with suppress(OSError):
                os.ftruncate(handle, end)
            if not end:
                path.unlink()
            raise
    finally:
        os.close(handle)
    return path


def _line(item: Item) -> bytes:
    text = json.dumps(asdict(item), default=lambda b: base64.b64encode(b).decode()).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse(text: bytes) -> Item:
    fields: dict[str, Any] = json.loads(text)
    record, event = fields.pop("record"), fields.pop("event")
    if record is None:
        return Item(**fields, event=None if event is None else tuple(event))

    def rows(name: str) -> tuple[Any, ...]:
        return tuple(
            (layer, tuple(None if b is None else base64.b64decode(b) for b in blobs), last)
            for layer, blobs, last in record[name]
        )

    return Item(
        **fields,
        record=EncodedRecord(
            scalars=tuple(record["scalars"]),
            loads=rows("loads"),
            stats=rows("stats"),
            events=tuple((step, kind, detail) for step, kind, detail in record["events"]),
        ),
    )
