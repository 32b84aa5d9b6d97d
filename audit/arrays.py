"""From a BLOB to an array: its type, its shape, and whether it is what was written."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.read_only import damaged
from moe_audit.record import LOAD_DTYPES, STAT_DTYPES, crc_seed

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Column:
    """An array of a row of `load` or `layer_stat`. `place`: of its checksum among the row's."""

    place: int
    dtype: np.dtype[Any]
    per_source: bool
    tail: tuple[int, ...]  # the shape behind the sources; -1: experts

    def shape(self, num_experts: int) -> tuple[int, ...]:
        """Its shape, without the sources."""
        return tuple(num_experts if n < 0 else n for n in self.tail)

    def row_bytes(self, num_experts: int) -> int:
        """Bytes of one source, or of all if it has none."""
        return self.dtype.itemsize * math.prod(self.shape(num_experts))


_TAILS = {"tokens": (), "top1": (2,)}
COLUMNS = {
    name: Column(place, np.dtype(dtype), dtypes is LOAD_DTYPES, _TAILS.get(name, (-1,)))
    for dtypes in (LOAD_DTYPES, STAT_DTYPES)
    for place, (name, dtype) in enumerate(dtypes.items())
}


def decode(
    path: Path, num_sources: int, num_experts: int, name: str, record: int, layer: int, blob: Any, crc: Any
) -> Array:
    """One BLOB as a read-only array, [sources, ...] or [...]. One from before the last sources gets zeros.

    Args:
        path: The store, for the message.
        name: The column.
        record, layer: The key of the row.
        crc: The checksums of the row; None: not checked.

    Raises:
        StoreError: it has not the size that it must have, or another checksum.
    """
    column, where = COLUMNS[name], f"record {record}, layer {layer}: {name}"
    if not isinstance(blob, bytes) or not isinstance(crc, bytes | None):
        raise damaged(path, f"{where} is no BLOB")
    if crc is not None:
        written = int.from_bytes(crc[4 * column.place : 4 * column.place + 4], "little")
        if written != zlib.crc32(blob, crc_seed(record, layer)):
            raise damaged(path, f"{where} is not what was written (checksum)")
    S, row = num_sources if column.per_source else 1, column.row_bytes(num_experts)
    have, rest = divmod(len(blob), row)
    if rest or not 0 < have <= S or (have < S and crc is None):
        raise damaged(path, f"{where} has {len(blob)} bytes where {S * row} belong")
    shape = column.shape(num_experts)
    array: Array = np.frombuffer(blob, column.dtype)
    if not column.per_source:
        return array.reshape(shape)
    array = array.reshape(have, *shape)
    return array if have == S else np.concatenate([array, np.zeros((S - have, *shape), column.dtype)])
