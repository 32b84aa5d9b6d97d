"""One pass over the arrays of a run: many rows at once, in the order in which they lie in the file.

`Run.counts(layer)` and its like give one layer whole; the judge needs all layers, and sums of records only.
Shapes: n rows of one batch, S sources, E experts of a layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.read_only import damaged
from moe_audit.record import LOAD_DTYPES, STAT_DTYPES, LayerInfo, crc_seed
from moe_audit.run import Run
from moe_audit.thresholds.errors import StoreError

Array = npt.NDArray[Any]
Batch = dict[str, Array | None]

BATCH_BYTES = 64_000_000  # blobs held while a batch grows, over all layers
MAX_BATCH_ROWS = 512
_TABLES = {"load": (LOAD_DTYPES, "invalid"), "layer_stat": (STAT_DTYPES, "calls")}


def scan(
    run: Run, table: str, layers: Sequence[LayerInfo], rows: npt.NDArray[np.int64]
) -> Iterator[tuple[LayerInfo, npt.NDArray[np.int64], Batch]]:
    """(layer, rows of `run.records`, arrays [n, ...]) of `load` or `layer_stat`, in batches of one layer.

    An array is None where none of the batch's records holds it; records that differ in that come in batches
    of their own. The order of the batches is not fixed.

    Raises:
        StoreError: the file is damaged.
    """
    dtypes, scalar = _TABLES[table]
    S = len(run.sources)
    row_of_record = {run.records[r].record: int(r) for r in rows}
    info_of_layer = {info.layer: info for info in layers}
    row_bytes = sum(16 * info.num_experts * (S + 1) for info in layers)
    limit = int(min(max(BATCH_BYTES // max(row_bytes, 1), 1), MAX_BATCH_ROWS))
    pending: dict[tuple[int, tuple[bool, ...]], list[Any]] = {}
    for row in _rows(run, table, [*dtypes, scalar, "crc"], layers, row_of_record):
        if row[0] in row_of_record and row[1] in info_of_layer:
            key = (row[1], tuple([value is None for value in row[2:]]))
            batch = pending.setdefault(key, [])
            batch.append(row)
            if len(batch) >= limit:
                yield _decode(run, info_of_layer[row[1]], dtypes, scalar, batch, row_of_record)
                del pending[key]
    for (layer, _), batch in pending.items():
        yield _decode(run, info_of_layer[layer], dtypes, scalar, batch, row_of_record)


def _rows(
    run: Run, table: str, columns: list[str], layers: Sequence[LayerInfo], row_of_record: dict[int, int]
) -> Iterator[tuple[Any, ...]]:
    """All rows in file order; by the index where only a small part of the run is wanted."""
    select = f"SELECT record, layer, {', '.join(columns)} FROM {table}"
    if not row_of_record:
        return
    if 4 * len(row_of_record) > len(run.records):
        marks = ", ".join("?" * len(layers))
        some = f" WHERE layer IN ({marks})" if len(layers) < len(run.layers) else ""
        yield from run.query(f"{select} NOT INDEXED{some}", *([i.layer for i in layers] if some else []))
        return
    low, high = min(row_of_record), max(row_of_record)
    for info in layers:
        yield from run.query(f"{select} WHERE layer = ? AND record BETWEEN ? AND ?", info.layer, low, high)


def _decode(
    run: Run,
    info: LayerInfo,
    dtypes: dict[str, str],
    scalar: str,
    batch: list[tuple[Any, ...]],
    row_of_record: dict[int, int],
) -> tuple[LayerInfo, npt.NDArray[np.int64], Batch]:
    S, E = len(run.sources), info.num_experts
    shapes = {"counts": (S, E), "prob_sum": (S, E), "tokens": (S,), "top1": (S, 2)}
    crcs = batch[0][-1] is not None
    if crcs:
        stored_nC = (
            np.frombuffer(b"".join([row[-1] for row in batch]), "<u4").reshape(len(batch), -1).tolist()
        )
        seeds = [crc_seed(row[0], info.layer) for row in batch]
    arrays: Batch = {}
    for column, (name, dtype) in enumerate(dtypes.items()):
        if batch[0][2 + column] is None:
            arrays[name] = None
            continue
        blobs = [row[2 + column] for row in batch]
        if crcs:
            for n, blob in enumerate(blobs):
                if zlib.crc32(blob, seeds[n]) != stored_nC[n][column]:
                    raise _damaged(run, info, batch[n][0], name)
        shape = shapes.get(name, (E,))
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        for n, blob in enumerate(blobs):
            if len(blob) != size:
                blobs[n] = _with_new_sources(run, info, batch[n], name, blob, size, name in shapes)
        arrays[name] = np.frombuffer(b"".join(blobs), dtype).reshape(len(blobs), *shape)
    values = [row[2 + len(dtypes)] for row in batch]
    arrays[scalar] = None if values[0] is None else np.array(values, dtype=np.int64)
    rows_n = np.array([row_of_record[row[0]] for row in batch], dtype=np.int64)
    return info, rows_n, arrays


def _with_new_sources(
    run: Run, info: LayerInfo, row: tuple[Any, ...], name: str, blob: bytes, size: int, per_source: bool
) -> bytes:
    """A matrix from before the last sources were added lacks their rows: zeros. Else it is damaged."""
    source_bytes = size // len(run.sources)
    checked = row[-1] is not None
    if per_source and checked and 0 < len(blob) < size and len(blob) % source_bytes == 0:
        return blob + bytes(size - len(blob))
    raise _damaged(run, info, row[0], name)


def _damaged(run: Run, info: LayerInfo, record: int, name: str) -> StoreError:
    return damaged(run.path, f"the {name} of record {record}, layer {info.layer} are not what was written")
