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
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.arrays import COLUMNS, Column, decode
from moe_audit.joined import Rows, ahead, can_read_ahead, checksums, chunks
from moe_audit.read_only import damaged
from moe_audit.record import LOAD_DTYPES, STAT_DTYPES, LayerInfo, crc_seeds
from moe_audit.run import Run

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

APART_ROWS = 512  # fetched at once where rows are fetched one by one
AHEAD_ROWS = 10_000  # a thread is worth its start from so many rows on
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
    if not len(rows) or not layers:
        return
    scanner = _Scanner(run, table, layers, rows)
    # By the index where only a small part of the run is wanted.
    whole = run.tail is None and 4 * len(rows) * len(layers) > len(run.records) * len(run.layers)
    yield from scanner.whole() if whole else scanner.part()


class _Scanner:
    """Reads the rows of one table, of some layers of the same size.

    Together where they are what writers make: record after record, all layers in order, the same columns.
    """

    def __init__(self, run: Run, table: str, layers: Sequence[LayerInfo], rows: Ints) -> None:
        self.run, self.table = run, table
        self.dtypes, self.scalar = _TABLES[table]
        self.numbers = np.array([run.records[r].record for r in rows], np.int64)
        self.row_of_record = np.full(int(self.numbers.max()) + 2, -1, np.int64)  # the last: numbers beyond
        self.row_of_record[self.numbers] = rows
        self.order = np.array([info.layer for info in layers])
        self.decoder = _Decoder(run, layers[0].num_experts, self.dtypes, self.scalar)

    def whole(self) -> Iterator[Slab]:
        """All rows in file order, those of other records left out."""
        run, L = self.run, len(self.order)
        among = f"layer IN ({', '.join(map(str, self.order))})" if len(run.layers) > L else "true"
        reading = chunks(run, self.table, [*self.dtypes, "crc"], self.scalar, among, len(run.layers))
        expected, met = run.num_rows(self.table, self.order.tolist()), 0
        if expected > AHEAD_ROWS and can_read_ahead():
            reading = ahead(reading)
        for chunk in reading:
            met += chunk.count
            slab = self._together(chunk.rows) if chunk.rows else None
            if slab is None:
                yield from self._apart(f"{among} AND rowid BETWEEN ? AND ?", chunk.first, chunk.last)
            elif len(slab.rows):
                yield slab
        if met != expected:
            raise damaged(run.path, f"{self.table} gives {met} rows of {expected}")

    def part(self) -> Iterator[Slab]:
        """By the index the rows of records from the first to the last that is wanted."""
        low, high = int(self.numbers.min()), int(self.numbers.max())
        for layer in self.order.tolist():
            yield from self._apart("layer = ? AND record BETWEEN ? AND ?", layer, low, high)

    def _together(self, rows: Rows) -> Slab | None:
        """The rows as one slab; None where they lie in another order, or are not what was written."""
        L = len(self.order)
        if len(rows.record_n) % L:
            return None
        record_nL, layer_nL = rows.record_n.reshape(-1, L), rows.layer_n.reshape(-1, L)
        if not ((record_nL == record_nL[:, :1]).all() and (layer_nL == self.order).all()):
            return None
        arrays = self.decoder.together(rows)
        if arrays is None:
            return None
        row_n = self._rows(record_nL[:, 0])
        keep = row_n >= 0
        some = {name: _some(array, keep, L) for name, array in arrays.items()}
        return Slab(slice(0, L), row_n[keep], some)

    def _apart(self, where: str, *values: int) -> Iterator[Slab]:
        """Rows fetched one by one, in slabs of one layer and of the same columns."""
        columns = ", ".join([*self.dtypes, self.scalar, "crc"])
        cursor = self.run.query(f"SELECT record, layer, {columns} FROM {self.table} WHERE {where}", *values)
        while chunk := list(islice(cursor, APART_ROWS)):
            record_n, layer_n, *columns_n = zip(*chunk, strict=True)
            record_c, layer_c = np.array(record_n), np.array(layer_n)
            if record_c.dtype.kind != "i" or layer_c.dtype.kind != "i":
                raise damaged(self.run.path, f"the keys of {self.table} are no integers")
            row_c = self._rows(record_c)
            for i, layer in enumerate(self.order):
                mine = np.flatnonzero((layer_c == layer) & (row_c >= 0))
                for place in _alike(columns_n, mine):
                    picked = [_pick(column, place) for column in columns_n]
                    arrays = self.decoder.apart(record_c[place], layer_c[place], picked)
                    one = {k: None if a is None else a[:, None] for k, a in arrays.items()}
                    yield Slab(slice(i, i + 1), row_c[place], one)

    def _rows(self, record_n: Ints) -> Ints:
        """Places in `run.records`; -1: not wanted."""
        beyond = (record_n < 0) | (record_n >= len(self.row_of_record))
        return np.asarray(self.row_of_record[np.where(beyond, -1, record_n)])


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

    def together(self, rows: Rows) -> dict[str, Array | None] | None:
        """From joined BLOBs; None where a size or a checksum is wrong, or there are no checksums."""
        n = len(rows.record_n)
        crcs = rows.blobs["crc"]
        if crcs is None or len(crcs) != 4 * n * len(self.dtypes):
            return None
        crc_nC = np.frombuffer(crcs, "<u4").reshape(n, -1)
        seeds = crc_seeds(rows.record_n, rows.layer_n)
        arrays: dict[str, Array | None] = {self.scalar: rows.scalar_n}
        for place, name in enumerate(self.dtypes):
            joined = rows.blobs[name]
            if joined is None:
                arrays[name] = None
                continue
            column, shape = self._shape(name)
            size = column.dtype.itemsize * math.prod(shape)
            if len(joined) != n * size or checksums(joined, seeds) != crc_nC[:, place].tolist():
                return None
            arrays[name] = np.frombuffer(joined, column.dtype).reshape(n, *shape)
        return arrays

    def apart(
        self, record_n: Array, layer_n: Array, columns: Sequence[tuple[Any, ...]]
    ) -> dict[str, Array | None]:
        """From BLOBs one by one.

        Raises:
            StoreError: one is not what was written.
        """
        *blobs, scalars, crcs = columns
        key_n = _Keys(self.run, record_n, layer_n)
        stored: Array | None = None
        if crcs[0] is not None:
            stored = np.frombuffer(_join(key_n, "crc", crcs), "<u4")
            if len(stored) != len(crcs) * len(self.dtypes):
                raise key_n.damaged(0, "crc")
            stored = stored.reshape(len(crcs), -1)
        arrays: dict[str, Array | None] = {}
        for place, name in enumerate(self.dtypes):
            expected = None if stored is None else stored[:, place]
            values = blobs[place]
            arrays[name] = None if values[0] is None else self._stack(key_n, name, values, crcs, expected)
        arrays[self.scalar] = scalar_n = None if scalars[0] is None else np.array(scalars)
        if scalar_n is not None and scalar_n.dtype != np.int64:
            raise key_n.damaged(0, self.scalar)
        return arrays

    def _stack(
        self, key_n: _Keys, name: str, values: tuple[Any, ...], crcs: tuple[Any, ...], expected: Array | None
    ) -> Array:
        """The blobs of one column as one array [n, ...]; together, or one by one where something is odd."""
        (column, shape), n = self._shape(name), len(values)
        size = column.dtype.itemsize * math.prod(shape)
        joined = _join(key_n, name, values)
        if expected is None:
            right = all(len(v) == size for v in values)
        else:  # no need to look at each length: the checksums would not match
            found = list(map(zlib.crc32, values, key_n.seeds))
            right = len(joined) == size * n and found == expected.tolist()
        if right:
            return np.frombuffer(joined, column.dtype).reshape(n, *shape)
        keys = zip(key_n.record_n.tolist(), key_n.layer_n.tolist(), values, crcs, strict=True)
        path, S = self.run.path, len(self.run.sources)
        return np.stack([decode(path, S, self.num_experts, name, *row) for row in keys])

    def _shape(self, name: str) -> tuple[Column, tuple[int, ...]]:
        column = COLUMNS[name]
        sources = (len(self.run.sources),) if column.per_source else ()
        return column, (*sources, *column.shape(self.num_experts))


class _Keys:
    """Which rows of the table a batch holds."""

    def __init__(self, run: Run, record_n: Array, layer_n: Array) -> None:
        self.run, self.record_n, self.layer_n = run, record_n, layer_n
        self.seeds = crc_seeds(record_n, layer_n)

    def damaged(self, n: int, name: str) -> Exception:
        place = f"record {self.record_n[n]}, layer {self.layer_n[n]}"
        return damaged(self.run.path, f"{place}: {name} is not what was written")


def _join(key_n: _Keys, name: str, values: tuple[Any, ...]) -> bytes:
    try:
        return b"".join(values)
    except TypeError as error:
        raise key_n.damaged(0, name) from error
