"""Sums over blocks of records, read in one pass: add records into blocks once, then add blocks into windows.

Shapes: R records of the run, n records of one read, B blocks, L layers of one size, S sources, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.record import LayerInfo
from moe_audit.run import Run
from moe_audit.scan import Slab, scan

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GROUP_BYTES = 400_000_000  # sums held at once; with more, layers are read in several passes


@dataclass
class LayerBlocks:
    """One layer's sums over blocks of records. None: the store has none of it.

    Attributes:
        counts_BSE, invalid_B, tokens_BS, prob_BSE, top1_BS2, sq_over_t_BE, dropped_BE: Sums of the stored.
        peak_BE: Largest load in one micro-batch.
        calls_B: Router forwards, or micro-batches where those are not known.
        logits_B3E: Sums over records of w, w x mean, w x (deviation^2 + mean^2), w the tokens of the record.
        rows_R: Which records have a row of this layer.
        picks_R, tokens_R, calls_R: Picks with invalid ids, tokens and forwards of each record.
        series: Per-record picks [R, E] and picks per source [R, S], where asked for.
    """

    info: LayerInfo
    counts_BSE: Ints
    invalid_B: Ints
    rows_R: npt.NDArray[np.bool_]
    picks_R: Ints
    tokens_R: Ints
    calls_R: Ints
    tokens_BS: Ints | None = None
    prob_BSE: Floats | None = None
    top1_BS2: Floats | None = None
    calls_B: Ints | None = None
    peak_BE: Floats | None = None
    sq_over_t_BE: Floats | None = None
    dropped_BE: Ints | None = None
    logits_B3E: Floats | None = None
    series: tuple[Array, Array] | None = None


def read_blocks(
    run: Run, layers: Sequence[LayerInfo], block_R: Ints, num_blocks: int, *, series: bool = False
) -> Iterator[LayerBlocks]:
    """Block sums of each layer, in the order of `layers` but for those of another size.

    Args:
        block_R: The block of each record of `run.records`, -1 to leave it out.
        num_blocks: B.
        series: Whether the picks of each record are wanted too.

    Raises:
        StoreError: an array is damaged.
    """
    for group in _groups(layers, num_blocks * len(run.sources)):
        sums = _Sums(run, group, block_R, num_blocks, series)
        rows = np.flatnonzero(block_R >= 0)
        for slab in scan(run, "load", group, rows):
            sums.add_load(slab)
        for slab in scan(run, "layer_stat", group, rows):
            sums.add_stat(slab)
        yield from sums.layers()


def _groups(layers: Sequence[LayerInfo], cells_per_expert: int) -> Iterator[list[LayerInfo]]:
    """Layers with the same number of experts, as many as memory should hold at once."""
    for num_experts in dict.fromkeys(info.num_experts for info in layers):
        same = [info for info in layers if info.num_experts == num_experts]
        most = max(1, GROUP_BYTES // (16 * num_experts * cells_per_expert))
        for start in range(0, len(same), most):
            yield same[start : start + most]


class _Sums:
    """Sums of a group of layers, stacked: [L, B, ...] and, per record, [L, R]."""

    def __init__(
        self, run: Run, layers: Sequence[LayerInfo], block_R: Ints, num_blocks: int, series: bool
    ) -> None:
        L, R = len(layers), len(run.records)
        self.infos, self.block_R, self.B = layers, block_R, num_blocks
        self.weight_R = np.array([r.tokens or 1 for r in run.records], np.float64)
        self.batches_R = np.array([r.microbatches or 0 for r in run.records], np.int64)
        S, E = len(run.sources), layers[0].num_experts
        self.block_sums: dict[str, Array] = {
            "counts": np.zeros((L, num_blocks, S, E), np.int64),
            "invalid": np.zeros((L, num_blocks), np.int64),
        }
        self.held: dict[str, npt.NDArray[np.bool_]] = {}  # which layers have an array of that name
        self.rows_LR = np.zeros((L, R), bool)
        self.picks_LR, self.tokens_LR, self.calls_LR = (np.zeros((L, R), np.int64) for _ in range(3))
        self.series = (np.zeros((L, R, E), np.uint32), np.zeros((L, R, S), np.int64)) if series else None

    def add_load(self, slab: Slab) -> None:
        """Takes in rows of `load`."""
        counts, invalid, tokens = slab.arrays["counts"], slab.arrays["invalid"], slab.arrays["tokens"]
        assert counts is not None and invalid is not None  # NOT NULL in the schema
        where = (slab.layers, slab.rows)
        self.rows_LR[where] = True
        self.picks_LR[where] = (counts.sum((-2, -1), dtype=np.int64) + invalid).T
        if tokens is not None:
            self.tokens_LR[where] = tokens.sum(-1).T
        if self.series is not None:
            self.series[0][where] = counts.sum(2, dtype=np.int64).swapaxes(0, 1)
            self.series[1][where] = counts.sum(-1, dtype=np.int64).swapaxes(0, 1)
        for name, array in slab.arrays.items():
            if array is not None:
                self._add(name, slab, array)

    def add_stat(self, slab: Slab) -> None:
        """Takes in rows of `layer_stat`."""
        calls = slab.arrays["calls"]
        if calls is None:
            calls = np.broadcast_to(self.batches_R[slab.rows][:, None], self._shape(slab))
        else:
            self.calls_LR[slab.layers, slab.rows] = calls.T
        self._add("calls", slab, calls)
        for name in ("sq_over_t", "dropped"):
            if (array := slab.arrays[name]) is not None:
                self._add(name, slab, array)
        if (peak := slab.arrays["peak"]) is not None:
            self._add("peak", slab, peak, largest=True)
        mean, std = slab.arrays["logit_mean"], slab.arrays["logit_std"]
        if mean is not None and std is not None:
            weight = self.weight_R[slab.rows][:, None, None]
            mean, std = mean.astype(np.float64), std.astype(np.float64)
            parts = [np.broadcast_to(weight, mean.shape), weight * mean, weight * (std**2 + mean**2)]
            self._add("logits", slab, np.stack(parts, axis=2))

    def layers(self) -> Iterator[LayerBlocks]:
        """The sums of each layer."""
        for i, info in enumerate(self.infos):
            sums = {name: array[i] for name, array in self.block_sums.items() if self._holds(name, i)}
            yield LayerBlocks(
                info,
                sums["counts"],
                sums["invalid"],
                self.rows_LR[i],
                self.picks_LR[i],
                self.tokens_LR[i],
                self.calls_LR[i],
                sums.get("tokens"),
                sums.get("prob_sum"),
                sums.get("top1"),
                sums.get("calls"),
                sums.get("peak"),
                sums.get("sq_over_t"),
                sums.get("dropped"),
                sums.get("logits"),
                None if self.series is None else (self.series[0][i], self.series[1][i]),
            )

    def _holds(self, name: str, layer: int) -> bool:
        """Sums of a layer without such an array would be zeros, which mean something else than not known."""
        return name in ("counts", "invalid") or bool(self.held[name][layer])

    def _shape(self, slab: Slab) -> tuple[int, int]:
        return len(slab.rows), slab.layers.stop - slab.layers.start

    def _add(self, name: str, slab: Slab, array: Array, *, largest: bool = False) -> None:
        """Adds rows [n, L, ...] into their blocks; integers stay exact, floats are summed as float64."""
        dtype = np.int64 if array.dtype.kind in "iu" else np.float64
        if name not in self.block_sums:
            self.block_sums[name] = np.zeros((len(self.infos), self.B, *array.shape[2:]), dtype)
        self.held.setdefault(name, np.zeros(len(self.infos), bool))[slab.layers] = True
        sums = self.block_sums[name]
        block_n = self.block_R[slab.rows]
        cuts = [0, *(np.flatnonzero(np.diff(block_n)) + 1).tolist(), len(block_n)]
        for start, stop in pairwise(cuts):
            place = (slab.layers, int(block_n[start]))
            if largest:
                sums[place] = np.maximum(sums[place], array[start:stop].max(0))
            else:
                sums[place] += array[start:stop].sum(0, dtype=dtype)
