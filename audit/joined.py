"""Rows of a table in file order, a few hundred at a time, each column's BLOBs joined to one by SQLite.

One Python object a row and column would cost more than reading the file; and SQLite joins without holding
Python's lock, so that the next rows are read while these are summed.
Shapes: n rows.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_audit.run import Run

Ints = npt.NDArray[np.int64]
CHUNK_BYTES = 2_000_000  # more would not stay in the processor's cache, nor in the process between two chunks
THREADSAFE = 3  # of `sqlite3.threadsafety`: a connection may be used by another thread


@dataclass(frozen=True)
class Rows:
    """Rows of which every column is NULL throughout or nowhere, and every integer an integer.

    Attributes:
        record_n, layer_n: Their keys.
        scalar_n: The integer column; None where it is NULL.
        blobs: The BLOBs of a column one behind the other; None where they are NULL.
    """

    record_n: Ints
    layer_n: Ints
    scalar_n: Ints | None
    blobs: dict[str, bytes | None]


@dataclass(frozen=True)
class Chunk:
    """Rows of the file: `count` of those with a rowid from `first` to `last`."""

    first: int
    last: int
    count: int
    rows: Rows | None  # None: they have no common form


def chunks(
    run: Run, table: str, arrays: Sequence[str], scalar: str, where: str, multiple: int
) -> Iterator[Chunk]:
    """The rows of a table in the order of the file.

    Args:
        run: An open run.
        table: `load` or `layer_stat`.
        arrays: Its columns of BLOBs.
        scalar: Its integer column beside the keys.
        where: An SQL condition.
        multiple: Of rowids: a chunk spans so many times n of them. The first is a small one, the others hold
            about CHUNK_BYTES where rowids have no gaps, as writers leave none.
    """
    columns = ["count(*)", "group_concat(record)", "group_concat(layer)"]
    columns += [f"count({scalar})", f"group_concat({scalar})"]
    for name in arrays:
        columns += [f"count({name})", f"CAST(group_concat({name}, '') AS BLOB)"]
    # A range, not LIMIT: rows that pass through a subquery are copied once more.
    joined = f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED WHERE rowid BETWEEN ? AND ? AND {where}"
    following = f"SELECT min(rowid) FROM {table} WHERE rowid > ?"
    last, size = -(2**63), multiple
    while (first := next(run.query(following, last))[0]) is not None:
        last = min(first + size - 1, 2**63 - 1)
        count, *values = next(run.query(joined, first, last))
        if count:
            yield Chunk(first, last, count, _rows(count, values, arrays))
            row_bytes = sum(len(v) for v in values if isinstance(v, bytes)) // count
            size = max(1, CHUNK_BYTES // (multiple * max(row_bytes, 1))) * multiple


def _rows(n: int, values: Sequence[object], arrays: Sequence[str]) -> Rows | None:
    record, layer, scalars, scalar, *blobs = values
    known = (scalars, *blobs[::2])
    if any(count not in (0, n) for count in known):
        return None
    record_n, layer_n = _integers(record, n), _integers(layer, n)
    scalar_n = _integers(scalar, n) if scalars else None
    if record_n is None or layer_n is None or (scalars and scalar_n is None):
        return None
    joined = {name: blob if isinstance(blob, bytes) else None for name, blob in zip(arrays, blobs[1::2])}
    return Rows(record_n, layer_n, scalar_n, joined)


def _integers(text: object, n: int) -> Ints | None:
    """n integers from a text of them; None where it is no such text."""
    if not isinstance(text, str) or not text.replace(",", "").isdigit():
        return None
    numbers = np.fromstring(text, np.int64, sep=",")
    return numbers if len(numbers) == n else None


def checksums(joined: bytes, seeds: Sequence[int]) -> list[int]:
    """The CRC-32 of each of as many equal parts as there are seeds."""
    size, view, crc32 = len(joined) // len(seeds), memoryview(joined), zlib.crc32
    return [crc32(view[at : at + size], seed) for at, seed in zip(range(0, len(joined), size), seeds)]


def ahead(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The same chunks, the next two read by a thread while the caller works on one."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as reader:
        coming = deque(reader.submit(next, chunks, None) for _ in range(2))
        while (chunk := coming.popleft().result()) is not None:
            coming.append(reader.submit(next, chunks, None))
            yield chunk


def can_read_ahead() -> bool:
    """Whether SQLite was built so that one connection may be used by two threads."""
    return sqlite3.threadsafety == THREADSAFE
