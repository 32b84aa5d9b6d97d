"""A run over its windows: the arrays that gates, reports and explanations work on.

    analysis = analyse(run, length=None, stride=None)
    for frame in analysis.frames():          # streamed: one layer at a time is in memory
        frame.counts_WSE, frame.n_WE         # exact integers: per source, and summed over sources
        frame.phi_W, frame.router_WE ...     # see `LayerFrame`
    analysis.windows.first_step_W, analysis.windows.judged_W
    analysis.loss_W, analysis.lr_W, analysis.router_lr_W

Shapes: W windows, S sources, E experts (N of them), R records. NaN: not known, or nothing was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit import formulas as m
from moe_audit.blocks import LayerBlocks, read_blocks
from moe_audit.record import POST_DROP, LayerInfo
from moe_audit.run import RecordInfo, Run, no_records
from moe_audit.thresholds import floors
from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.gate_names import nearest
from moe_audit.thresholds.policy import Policy
from moe_audit.windows import Windows, choose_layout, lay_out, warmup_steps

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass
class LayerFrame:
    """One layer over the windows of a run. Arrays that the store lacks are None.

    Attributes:
        counts_WSE: Router picks per window, source and expert; sources that were not chosen are left out.
        invalid_W: Picks whose id is no expert.
        layer_picks_W, layer_tokens_W: Picks and tokens of all sources, chosen or not: what micro-batches and
            drops, which are not split by source, refer to.
        tokens_WS: Tokens that reached the router.
        prob_WSE: Sums of gate probabilities, each token's a distribution.
        top1_WS2: Sum and sum of squares of the largest probability.
        batches_W: Micro-batches (router forwards) in the window; 0 where not known.
        peak_WE: Largest load in one micro-batch, in fair shares.
        dropped_WE: Assignments dropped for capacity.
        logit_mean_WE, logit_std_WE: Router logits over the tokens of the window.
        phi_W: Design effect; NaN where it cannot be told (fewer than two micro-batches, an import).
        series: Picks per record [R, E] and per record and source [R, S], where asked for.
    """

    info: LayerInfo
    windows: Windows
    sources: Sequence[str]
    counts_WSE: Ints
    invalid_W: Ints
    layer_picks_W: Ints
    tokens_WS: Ints | None = None
    prob_WSE: Floats | None = None
    top1_WS2: Floats | None = None
    batches_W: Floats | None = None
    peak_WE: Floats | None = None
    dropped_WE: Ints | None = None
    logit_mean_WE: Floats | None = None
    logit_std_WE: Floats | None = None
    phi_W: Floats = field(default_factory=lambda: np.zeros(0))
    layer_tokens_W: Ints | None = None
    series: tuple[Array, Array] | None = field(default=None, repr=False)

    @property
    def N(self) -> int:
        return self.info.num_experts

    @property
    def k(self) -> int:
        """Picks per token; 1 where it varies, which gives the widest sampling floors."""
        return self.info.top_k or 1

    @cached_property
    def n_WE(self) -> Ints:
        """Picks summed over sources."""
        return np.asarray(self.counts_WSE.sum(1))

    @cached_property
    def m_W(self) -> Ints:
        """Assignments M of the window."""
        return np.asarray(self.n_WE.sum(-1))

    @cached_property
    def m_WS(self) -> Ints:
        """Assignments M_s of each source."""
        return np.asarray(self.counts_WSE.sum(-1))

    @property
    def source_mix(self) -> dict[str, float]:
        """Share of each source in the assignments of all windows."""
        m_S = self.m_WS.sum(0)
        return dict(zip(self.sources, (m_S / max(int(m_S.sum()), 1)).tolist(), strict=True))

    @cached_property
    def p_WE(self) -> Floats:
        """Shares of the experts, all sources together."""
        return m.shares(self.n_WE)

    @property
    def phi1_W(self) -> Floats:
        """The design effect as verdicts use it: 1 where it is not known."""
        return np.where(np.isnan(self.phi_W), 1.0, self.phi_W)

    def tokens_W(self) -> Floats:
        """Tokens of the window, M/k where they were not recorded."""
        return np.asarray(self.m_W / self.k if self.tokens_WS is None else self.tokens_WS.sum(-1), np.float64)

    def batch_tokens_W(self) -> Floats:
        """Mean tokens of a micro-batch, M/k where tokens were not recorded; NaN where batches were not."""
        tokens_W = self.layer_picks_W / self.k if self.layer_tokens_W is None else self.layer_tokens_W
        return m.divide(tokens_W, 0.0 if self.batches_W is None else self.batches_W)

    def drop_rate_W(self) -> Floats:
        """Dropped assignments over those demanded; NaN where drops were not recorded."""
        if self.dropped_WE is None:
            return np.full(len(self.windows), np.nan)
        dropped_W = self.dropped_WE.sum(-1)
        return m.divide(dropped_W, self.layer_picks_W + (dropped_W if POST_DROP in self.info.tags else 0))

    def source_tokens_WS(self) -> Floats:
        """Tokens of each source, M_s/k where they were not recorded."""
        return np.asarray(self.m_WS / self.k if self.tokens_WS is None else self.tokens_WS, np.float64)

    @cached_property
    def shift_WE(self) -> tuple[Floats, Floats]:
        """(router effect, mix effect) of the shares' change since `windows.previous_W`; NaN without one."""
        previous = self.windows.previous_W
        router, mix = m.split_shift(self.counts_WSE[previous], self.counts_WSE)
        known = (previous >= 0) & (self.m_W > 0) & (self.m_W[previous] > 0)
        return np.where(known[:, None], router, np.nan), np.where(known[:, None], mix, np.nan)


@dataclass
class Analysis:
    """A run laid out in windows. Holds no counts: `frames()` reads them, one layer after the other."""

    run: Run
    windows: Windows
    layers: Sequence[LayerInfo]
    source_ids: Sequence[int]
    records: Sequence[RecordInfo]
    rows: Ints  # rows of run.records that the windows' lo_W and hi_W number

    @property
    def sources(self) -> list[str]:
        return [self.run.sources[s] for s in self.source_ids]

    @property
    def microbatch_tokens(self) -> float | None:
        """Mean tokens of a micro-batch; None where the store does not say."""
        known = [r for r in self.records if r.tokens and r.microbatches]
        batches = sum(r.microbatches or 0 for r in known)
        return sum(r.tokens or 0 for r in known) / batches if batches else None

    @cached_property
    def loss_W(self) -> Floats:
        """Loss, mean over the steps of the window."""
        return self._mean("loss")

    @cached_property
    def lr_W(self) -> Floats:
        """Learning rate at the start of the window, so that a restart of the schedule shows."""
        return self._first("lr")

    @cached_property
    def router_lr_W(self) -> Floats:
        """Learning rate of the routers at the start of the window; that of all where it is not told apart."""
        return np.where(np.isnan(self._first("router_lr")), self.lr_W, self._first("router_lr"))

    def frames(
        self, *, series: bool = False, inspect: Callable[[LayerBlocks], None] | None = None
    ) -> Iterator[LayerFrame]:
        """Each layer's `LayerFrame`. `inspect` sees the layer's raw sums and per-record totals first."""
        # not np.unique, which imports numpy.ma: a tenth of the time that a small check takes
        edges = np.array(sorted({*self.windows.lo_W.tolist(), *self.windows.hi_W.tolist()}), np.int64)
        row_block = np.searchsorted(edges, np.arange(len(self.records)), side="right") - 1
        # Records that are in no window get a block of their own, behind the others: nothing sums it, but the
        # invariants hold for every record.
        spare = len(edges) - 1
        row_block[row_block < 0] = spare
        block_R = np.full(len(self.run.records), -1, np.int64)
        block_R[self.rows] = row_block
        lo_W, hi_W = np.searchsorted(edges, self.windows.lo_W), np.searchsorted(edges, self.windows.hi_W)
        for blocks in read_blocks(self.run, self.layers, block_R, spare + 1, series=series):
            if inspect:
                inspect(blocks)
            yield self._frame(blocks, lo_W, hi_W)

    def _frame(self, blocks: LayerBlocks, lo_W: Ints, hi_W: Ints) -> LayerFrame:
        ids = list(self.source_ids)

        every = ids == list(range(len(self.run.sources)))

        def total(array: Array | None) -> Any:
            if array is None:
                return None
            return np.stack([array[lo:hi].sum(0) for lo, hi in zip(lo_W, hi_W, strict=True)])

        def chosen(total_WS: Any) -> Any:
            return total_WS if every or total_WS is None else total_WS[:, ids]

        counts_WSE, tokens_WS = total(blocks.counts_BSE), total(blocks.tokens_BS)
        frame = LayerFrame(
            blocks.info,
            self.windows,
            self.sources,
            chosen(counts_WSE),
            total(blocks.invalid_B),
            counts_WSE.sum((1, 2)),
            chosen(tokens_WS),
            chosen(total(blocks.prob_BSE)),
            chosen(total(blocks.top1_BS2)),
            total(blocks.calls_B),
            None
            if blocks.peak_BE is None
            else np.stack([blocks.peak_BE[lo:hi].max(0) for lo, hi in zip(lo_W, hi_W, strict=True)]),
            total(blocks.dropped_BE),
            series=None
            if blocks.series is None
            else (blocks.series[0][self.rows], blocks.series[1][self.rows][:, ids]),
        )
        if blocks.logits_B3E is not None:
            weight, mean, square = np.moveaxis(total(blocks.logits_B3E), 1, 0)
            frame.logit_mean_WE = m.divide(mean, weight)
            frame.logit_std_WE = np.sqrt(np.maximum(0.0, m.divide(square, weight) - frame.logit_mean_WE**2))
        frame.phi_W = np.full(len(self.windows), np.nan)
        if tokens_WS is not None:
            frame.layer_tokens_W = tokens_WS.sum(-1)
            if blocks.sq_over_t_BE is not None and frame.batches_W is not None:
                frame.phi_W = floors.design_effect(
                    total(blocks.sq_over_t_BE),
                    counts_WSE.sum(1),
                    frame.layer_tokens_W,
                    frame.batches_W,
                    frame.k,
                )
        return frame

    def _first(self, name: str) -> Floats:
        values = [getattr(self.records[lo], name) for lo in self.windows.lo_W]
        return np.array([np.nan if v is None else v for v in values], np.float64)

    def _mean(self, name: str) -> Floats:
        values = np.array([np.nan if (v := getattr(r, name)) is None else v for r in self.records])
        steps = np.array([r.last_step - r.first_step + 1 for r in self.records], np.float64)
        weight = np.where(np.isnan(values), 0.0, steps)
        sums = np.append(0.0, np.cumsum(np.nan_to_num(values) * weight))
        weights = np.append(0.0, np.cumsum(weight))
        lo, hi = self.windows.lo_W, self.windows.hi_W
        return m.divide(sums[hi] - sums[lo], weights[hi] - weights[lo])


def analyse(
    run: Run,
    *,
    policy: Policy | None = None,
    length: int | None = None,
    stride: int | None = None,
    first_step: int | None = None,
    last_step: int | None = None,
    checkpoint: int | None = None,
    last: int | None = None,
    layers: Sequence[int] | None = None,
    sources: Sequence[str] | None = None,
    judged_only: bool = False,
) -> Analysis:
    """Lays a run out in windows. Nothing but the list of records is read yet.

    Args:
        run: The run.
        policy: Gives length, stride and lag where it has them.
        length, stride: In steps; they come before those of the policy.
        first_step, last_step: Only records within these steps.
        checkpoint: Only records up to this step; the last window may end there.
        last: Judge only so many windows, the last ones.
        layers, sources: Only these; "all" among the sources: all of them.
        judged_only: Leave out windows that are neither judged nor compared with.

    Raises:
        UsageError: an unknown layer or source, or a bad length or stride.
        NoDataError: no record is left.
    """
    infos = run.layers if layers is None else [run.layer_info(layer) for layer in dict.fromkeys(layers)]
    ids = list(range(len(run.sources)))
    if sources is not None and "all" not in sources:
        for name in sources:
            if name not in run.sources:
                raise UsageError(f"{run.path} has no source {name!r}", nearest(name, run.sources))
        ids = [run.sources.index(name) for name in dict.fromkeys(sources)]
    low = -1 if first_step is None else first_step
    end = min((x for x in (last_step, checkpoint) if x is not None), default=None)
    rows = [
        r
        for r, record in enumerate(run.records)
        if record.first_step >= low and (end is None or record.last_step <= end)
    ]
    if not rows:
        has = len(run.records)
        raise no_records(run, f" within the steps asked for (it has {has})" if has else "")
    records = [run.records[r] for r in rows]
    anchor = None if run.tail is None else run.tail.anchor
    layout = choose_layout(
        records,
        run.meta,
        length=length,
        stride=stride,
        policy_length=policy.length if policy else None,
        policy_stride=policy.stride if policy else None,
        anchor=anchor,
    )
    beyond = end is not None and run.records[-1].last_step > end
    windows = lay_out(
        records,
        layout,
        warmup=warmup_steps(run.meta),
        lag=policy.lag if policy else None,
        until=end if beyond else None,
        last=last,
        anchor=anchor,
    )
    if judged_only and windows.judged_W.any():
        judged = np.flatnonzero(windows.judged_W)
        compared = windows.previous_W[judged]
        windows = windows.select(int(min(judged[0], compared[compared >= 0].min(initial=judged[0]))))
    if checkpoint is not None:  # what lies before costs nothing, however long the run
        skip = int(windows.lo_W[0])
        rows, records, windows = rows[skip:], records[skip:], windows.without(skip)
    return Analysis(run, windows, infos, ids, records, np.array(rows, dtype=np.int64))
