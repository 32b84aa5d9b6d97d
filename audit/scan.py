"""One pass over the arrays of a run: many rows at once, in the order in which they lie in the file.

`Run.counts(layer)` and its like give one layer whole; the judge needs all layers, and sums of records only.
Rows are turned into arrays a few hundred at a time: more would not stay in the processor's cache.
Shapes: n records, L layers, S sources, E experts of a layer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.arrays import COLUMNS, decode
from moe_audit.read_only import damaged
from moe_audit.record import LOAD_DTYPES, STAT_DTYPES, LayerInfo, crc_seed
from moe_audit.run import Run

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

CHUNK_ROWS = 512
_TABLES: dict[str, tuple[Mapping[str, str], str]] = {
    "load": (LOAD_DTYPES, "invalid"),
    "layer_stat": (STAT_DTYPES, "calls"),
}


@dataclass(frozen=True)
class Slab:
    """Rows of n records for L layers: `arrays[name]` is [n, L, ...], None where the records hold none.

    `layers` are places in the layers asked for; `rows` are places in `run.records`.
    """

    layers: slice
    rows: Ints
    arrays: dict[str, Array | None]


def scan(run: Run, table: str, layers: Sequence[LayerInfo], rows: Ints) -> Iterator[Slab]:
    """The rows of `load` or `layer_stat` for layers with the same number of experts.

    Records that differ in which arrays they hold come in slabs of their own; the order is not fixed.

    Raises:
        StoreError: the file is damaged.
    """
    dtypes, scalar = _TABLES[table]
    if not len(rows) or not layers:
        return
    numbers = np.array([run.records[r].record for r in rows], np.int64)
    row_of_record = np.full(int(numbers.max()) + 2, -1, np.int64)  # the last: numbers beyond
    row_of_record[numbers] = rows
    order = np.array([info.layer for info in layers])
    L = len(layers)
    # By the index where only a small part of the run is wanted.
    whole = run.tail is None and 4 * len(numbers) * len(layers) > len(run.records) * len(run.layers)
    cursor = _rows(run, table, [*dtypes, scalar, "crc"], layers, None if whole else numbers)
    met = 0
    decoder = _Decoder(run, layers[0].num_experts, dtypes, scalar)
    while chunk := list(islice(cursor, max(1, CHUNK_ROWS // L) * L)):
        met += len(chunk)
        record_n, layer_n, *columns = zip(*chunk, strict=True)
        record_c, layer_c = np.array(record_n), np.array(layer_n)
        if record_c.dtype.kind != "i" or layer_c.dtype.kind != "i":
            raise damaged(run.path, f"the keys of {table} are no integers")
        row_c = row_of_record[np.where((record_c < 0) | (record_c >= len(row_of_record)), -1, record_c)]
        if len(chunk) % L == 0 and _regular(record_c.reshape(-1, L), layer_c.reshape(-1, L), order, columns):
            arrays = decoder(record_c, layer_c, columns)
            keep = row_c[::L] >= 0
            if keep.any():
                yield Slab(slice(0, L), row_c[::L][keep], {k: _some(a, keep, L) for k, a in arrays.items()})
            continue
        for i, layer in enumerate(order):
            mine = np.flatnonzero((layer_c == layer) & (row_c >= 0))
            for place in _alike(columns, mine):
                picked = [_pick(column, place) for column in columns]
                arrays = decoder(record_c[place], layer_c[place], picked)
                one = {k: None if a is None else a[:, None] for k, a in arrays.items()}
                yield Slab(slice(i, i + 1), row_c[place], one)
    if whole and met != run.num_rows(table, order.tolist()):
        raise damaged(run.path, f"{table} gives {met} rows of {run.num_rows(table, order.tolist())}")


def _rows(
    run: Run, table: str, columns: list[str], layers: Sequence[LayerInfo], numbers: Ints | None
) -> Iterator[tuple[Any, ...]]:
    """All rows in file order, or by the index those of records from the first to the last of `numbers`."""
    select = f"SELECT record, layer, {', '.join(columns)} FROM {table}"
    if numbers is None:
        some = ""
        if len(layers) < len(run.layers):
            some = f" WHERE layer IN ({', '.join(str(info.layer) for info in layers)})"
        return run.query(f"{select} NOT INDEXED{some}")
    low, high = int(numbers.min()), int(numbers.max())
    between = f"{select} WHERE layer = ? AND record BETWEEN ? AND ?"
    return chain.from_iterable(run.query(between, info.layer, low, high) for info in layers)


def _regular(record: Array, layer: Array, order: Array, columns: Sequence[tuple[Any, ...]]) -> bool:
    """Whether the chunk is what writers make: record after record, all layers in order, the same columns."""
    return bool(
        (record == record[:, :1]).all()
        and (layer == order).all()
        and all(values[0] is not None or values.count(None) == len(values) for values in columns)
        and all(values[0] is None or None not in values for values in columns)
    )


def _some(array: Array | None, keep: Array, L: int) -> Array | None:
    if array is None:
        return None
    array = array.reshape(-1, L, *array.shape[1:])
    return array if keep.all() else array[keep]


def _alike(columns: Sequence[tuple[Any, ...]], mine: Ints) -> Iterator[Ints]:
    """Splits rows so that within a batch each column is NULL throughout or nowhere."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for n in mine.tolist():
        groups.setdefault(tuple([column[n] is None for column in columns]), []).append(n)
    yield from (np.array(group, np.int64) for group in groups.values())


def _pick(column: tuple[Any, ...], place: Ints) -> tuple[Any, ...]:
    if len(place) == 1:
        return (column[int(place[0])],)
    return tuple(itemgetter(*place.tolist())(column))


@dataclass(frozen=True)
class _Decoder:
    """Turns the columns of many rows into arrays, once they are found to be what was written."""

    run: Run
    num_experts: int
    dtypes: Mapping[str, str]
    scalar: str

    def __call__(
        self, record_n: Array, layer_n: Array, columns: Sequence[tuple[Any, ...]]
    ) -> dict[str, Array | None]:
        *blobs, scalars, crcs = columns
        key_n = _Keys(self.run, record_n, layer_n)
        stored: Array | None = None
        if crcs[0] is not None:
            stored = np.frombuffer(_join(key_n, "crc", crcs), "<u4")
            if len(stored) != len(crcs) * len(self.dtypes):
                raise key_n.damaged(0, "crc")
            stored = stored.reshape(len(crcs), -1)
        arrays: dict[str, Array | None] = {}
        for column, name in enumerate(self.dtypes):
            expected = None if stored is None else stored[:, column]
            values = blobs[column]
            arrays[name] = None if values[0] is None else self._stack(key_n, name, values, crcs, expected)
        arrays[self.scalar] = scalar_n = None if scalars[0] is None else np.array(scalars)
        if scalar_n is not None and scalar_n.dtype != np.int64:
            raise key_n.damaged(0, self.scalar)
        return arrays

    def _stack(
        self, key_n: _Keys, name: str, values: tuple[Any, ...], crcs: tuple[Any, ...], expected: Array | None
    ) -> Array:
        """The blobs of one column as one array [n, ...]; together, or one by one where something is odd."""
        column, n = COLUMNS[name], len(values)
        sources = (len(self.run.sources),) if column.per_source else ()
        size = column.row_bytes(self.num_experts) * math.prod(sources)
        joined = _join(key_n, name, values)
        if expected is None:
            right = all(len(v) == size for v in values)
        else:  # no need to look at each length: the checksums would not match
            checksums = list(map(zlib.crc32, values, key_n.seeds))
            right = len(joined) == size * n and checksums == expected.tolist()
        if right:
            return np.frombuffer(joined, column.dtype).reshape(n, *sources, *column.shape(self.num_experts))
        keys = zip(key_n.record_n.tolist(), key_n.layer_n.tolist(), values, crcs, strict=True)
        path, S = self.run.path, len(self.run.sources)
        return np.stack([decode(path, S, self.num_experts, name, *row) for row in keys])


class _Keys:
    """Which rows of the table a batch holds."""

    def __init__(self, run: Run, record_n: Array, layer_n: Array) -> None:
        self.run, self.record_n, self.layer_n = run, record_n, layer_n
        self.seeds: list[int] = list(map(crc_seed, record_n.tolist(), layer_n.tolist()))

    def damaged(self, n: int, name: str) -> Exception:
        place = f"record {self.record_n[n]}, layer {self.layer_n[n]}"
        return damaged(self.run.path, f"{place}: {name} is not what was written")


def _join(key_n: _Keys, name: str, values: tuple[Any, ...]) -> bytes:
    try:
        return b"".join(values)
    except TypeError as error:
        raise key_n.damaged(0, name) from error
