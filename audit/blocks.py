"""Sums over blocks of records, read in one pass: add records into blocks once, then add blocks into windows.

Shapes: R records of the run, n rows of one read, B blocks, S sources, E experts of a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.record import LayerInfo
from moe_audit.run import Run
from moe_audit.scan import scan

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BLOCK_BYTES = 400_000_000  # block sums held at once; with more, layers are read in several passes


@dataclass
class LayerBlocks:
    """One layer's sums over blocks of records. None: the store has none of it.

    Attributes:
        counts_BSE: Router picks.
        rows_R: Which records have a row of this layer.
        broken_R: Records in which picks + invalid ids are not k x tokens.
        row_calls_R: Router forwards per record; 0 where not known.
        calls_B: Router forwards, or micro-batches where those are not known.
        series: Per-record picks [R, E] and picks per source [R, S], where asked for.
    """

    info: LayerInfo
    counts_BSE: Ints
    invalid_B: Ints
    rows_R: npt.NDArray[np.bool_]
    broken_R: npt.NDArray[np.bool_]
    picks_R: Ints
    tokens_R: Ints
    row_calls_R: Ints
    has_tokens: bool = False
    tokens_BS: Ints | None = None
    prob_BSE: Floats | None = None
    top1_BS2: Floats | None = None
    calls_B: Floats | None = None
    peak_BE: Floats | None = None
    sq_over_t_BE: Floats | None = None
    dropped_BE: Ints | None = None
    logits_B3E: Floats | None = (
        None  # sums over records of weight, weight x mean, weight x (deviation^2 + mean^2)
    )
    series: tuple[Array, Array] | None = field(default=None, repr=False)


def read_blocks(
    run: Run, layers: Sequence[LayerInfo], block_R: Ints, num_blocks: int, *, series: bool = False
) -> Iterator[LayerBlocks]:
    """Block sums of each layer. `block_R`: the block of each record of `run.records`, -1 to leave it out.

    Raises:
        StoreError: a matrix is damaged.
    """
    S = len(run.sources)
    group: list[LayerInfo] = []
    size = 0
    for info in layers:
        bytes_needed = num_blocks * S * info.num_experts * 16
        if group and size + bytes_needed > BLOCK_BYTES:
            yield from _read_group(run, group, block_R, num_blocks, series)
            group, size = [], 0
        group.append(info)
        size += bytes_needed
    if group:
        yield from _read_group(run, group, block_R, num_blocks, series)


def _read_group(
    run: Run, layers: Sequence[LayerInfo], block_R: Ints, B: int, series: bool
) -> Iterator[LayerBlocks]:
    S, R = len(run.sources), len(run.records)
    out = {}
    for info in layers:
        E = info.num_experts
        out[info.layer] = LayerBlocks(
            info,
            np.zeros((B, S, E), np.int64),
            np.zeros(B, np.int64),
            np.zeros(R, bool),
            np.zeros(R, bool),
            np.zeros(R, np.int64),
            np.zeros(R, np.int64),
            np.zeros(R, np.int64),
            series=(np.zeros((R, E), np.uint32), np.zeros((R, S), np.int64)) if series else None,
        )
    rows = np.flatnonzero(block_R >= 0)
    for info, row_n, columns in scan(run, "load", layers, rows):
        _add_load(out[info.layer], row_n, block_R[row_n], columns)
    weight_R = np.array([r.tokens or 1 for r in run.records], np.float64)
    batches_R = np.array([r.microbatches or 0 for r in run.records], np.float64)
    for info, row_n, columns in scan(run, "layer_stat", layers, rows):
        _add_stat(out[info.layer], row_n, block_R[row_n], columns, weight_R, batches_R)
    yield from out.values()


def _segments(block_n: Ints) -> Iterator[tuple[int, slice]]:
    """(block, rows) of each stretch of rows in one block."""
    cuts = [0, *(np.flatnonzero(np.diff(block_n)) + 1).tolist(), len(block_n)]
    for start, stop in itertools.pairwise(cuts):
        yield int(block_n[start]), slice(start, stop)


def _add_load(blocks: LayerBlocks, row_n: Ints, block_n: Ints, columns: dict[str, Array | None]) -> None:
    counts_nSE = columns["counts"]
    assert counts_nSE is not None  # NOT NULL in the schema
    tokens_nS, prob_nSE, top1_nS2 = columns["tokens"], columns["prob_sum"], columns["top1"]
    invalid_n = columns["invalid"]
    assert invalid_n is not None
    picks_nS = counts_nSE.sum(-1, dtype=np.int64)
    picks_n = picks_nS.sum(-1) + invalid_n
    blocks.rows_R[row_n] = True
    blocks.picks_R[row_n] = picks_n
    if tokens_nS is not None:
        blocks.has_tokens = True
        blocks.tokens_R[row_n] = tokens_nS.sum(-1)
        if blocks.info.top_k is not None:
            blocks.broken_R[row_n] = picks_n != blocks.info.top_k * blocks.tokens_R[row_n]
    if blocks.series is not None:
        blocks.series[0][row_n] = counts_nSE.sum(1, dtype=np.int64)
        blocks.series[1][row_n] = picks_nS
    for b, rows in _segments(block_n):
        blocks.counts_BSE[b] += counts_nSE[rows].sum(0, dtype=np.int64)
        blocks.invalid_B[b] += int(invalid_n[rows].sum())
        if tokens_nS is not None:
            if blocks.tokens_BS is None:
                blocks.tokens_BS = np.zeros(blocks.counts_BSE.shape[:2], np.int64)
            blocks.tokens_BS[b] += tokens_nS[rows].sum(0)
        if prob_nSE is not None:
            if blocks.prob_BSE is None:
                blocks.prob_BSE = np.zeros(blocks.counts_BSE.shape)
            blocks.prob_BSE[b] += prob_nSE[rows].sum(0, dtype=np.float64)
        if top1_nS2 is not None:
            if blocks.top1_BS2 is None:
                blocks.top1_BS2 = np.zeros((*blocks.counts_BSE.shape[:2], 2))
            blocks.top1_BS2[b] += top1_nS2[rows].sum(0, dtype=np.float64)


def _add_stat(
    blocks: LayerBlocks,
    row_n: Ints,
    block_n: Ints,
    columns: dict[str, Array | None],
    weight_R: Floats,
    batches_R: Floats,
) -> None:
    B, _, E = blocks.counts_BSE.shape
    peak_nE, sq_nE, dropped_nE, mean_nE, std_nE, calls_n = (
        columns[c] for c in ("peak", "sq_over_t", "dropped", "logit_mean", "logit_std", "calls")
    )
    calls = batches_R[row_n] if calls_n is None else calls_n
    if calls_n is not None:
        blocks.row_calls_R[row_n] = calls_n
    if blocks.calls_B is None:
        blocks.calls_B = np.zeros(B)
    weight_n1 = weight_R[row_n][:, None]
    for b, rows in _segments(block_n):
        blocks.calls_B[b] += float(calls[rows].sum())
        if peak_nE is not None:
            if blocks.peak_BE is None:
                blocks.peak_BE = np.zeros((B, E))
            np.maximum(blocks.peak_BE[b], peak_nE[rows].max(0), out=blocks.peak_BE[b])
        if sq_nE is not None:
            if blocks.sq_over_t_BE is None:
                blocks.sq_over_t_BE = np.zeros((B, E))
            blocks.sq_over_t_BE[b] += sq_nE[rows].sum(0)
        if dropped_nE is not None:
            if blocks.dropped_BE is None:
                blocks.dropped_BE = np.zeros((B, E), np.int64)
            blocks.dropped_BE[b] += dropped_nE[rows].sum(0, dtype=np.int64)
        if mean_nE is not None and std_nE is not None:
            if blocks.logits_B3E is None:
                blocks.logits_B3E = np.zeros((B, 3, E))
            w, mean, std = weight_n1[rows], mean_nE[rows].astype(np.float64), std_nE[rows].astype(np.float64)
            blocks.logits_B3E[b, 0] += w.sum(0)
            blocks.logits_B3E[b, 1] += (w * mean).sum(0)
            blocks.logits_B3E[b, 2] += (w * (std**2 + mean**2)).sum(0)
