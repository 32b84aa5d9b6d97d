"""Cutting a record: accumulators of all layers packed, summed over the ranks, copied to the host, checked.

At most three collectives a flush: a sum of integers, a sum of doubles, a maximum. Ranks that lack a layer
(pipeline stages) add zeros for it.

Shape suffixes: see `counters.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from moe_audit.hooks.accumulator import Accumulator
from moe_audit.hooks.labels import TALLY
from moe_audit.hooks.steps import Steps
from moe_audit.store import UNLABELLED, LayerInfo, LayerRecord, Record

HEADER = 5  # ranks, micro-batches, those with a mask, tokens, excluded tokens


@dataclass(frozen=True)
class LayerField:
    """Where one layer lies in the packed arrays."""

    info: LayerInfo
    ints: slice
    floats: slice
    peaks: slice


class Layout:
    """The packed form of one phase: a header, then every layer of every rank in order of its number."""

    def __init__(self, layers: Sequence[LayerInfo], num_rows: int) -> None:
        self.num_rows = num_rows
        self.fields: list[LayerField] = []
        ints, floats, peaks = HEADER, 0, 0
        for info in layers:
            R, E = num_rows, info.num_experts
            num_ints, num_floats = R * (E + 2) + R + TALLY + E + 2, R * E + 2 * R + 3 * E
            self.fields.append(
                LayerField(
                    info,
                    slice(ints, ints + num_ints),
                    slice(floats, floats + num_floats),
                    slice(peaks, peaks + E),
                )
            )
            ints, floats, peaks = ints + num_ints, floats + num_floats, peaks + E
        self.num_ints, self.num_floats, self.num_peaks = ints, floats, peaks


@dataclass
class Packed:
    """The packed arrays of several phases, one behind the other; two cells before the floats are the loss."""

    ints: Tensor
    floats: Tensor
    peaks: Tensor


@torch.no_grad()
def pack(
    layout: Layout,
    phases: Sequence[Accumulator | None],
    owner: bool,
    loss: tuple[Tensor | float, int],
    device: torch.device,
) -> Packed:
    """The accumulators of all phases in packed form; None stands for a phase that this rank did not see.

    Args:
        owner: Whether this rank has the first layer of the model: it reports micro-batches and tokens.
        loss: Sum and number of the losses since the last record.
    """
    packed = Packed(
        torch.zeros(layout.num_ints * len(phases), dtype=torch.int64, device=device),
        torch.zeros(2 + layout.num_floats * len(phases), dtype=torch.float64, device=device),
        torch.zeros(layout.num_peaks * len(phases), dtype=torch.float32, device=device),
    )
    packed.floats[0] = loss[0]
    packed.floats[1] = loss[1]
    for p, accumulator in enumerate(phases):
        ints = packed.ints[p * layout.num_ints :]
        ints[0] = 1
        if accumulator is None:
            continue
        for bank in accumulator.banks:
            bank.join()
        if owner:
            seen_R = accumulator.seen()
            ints[1], ints[2] = accumulator.microbatches, accumulator.masked
            ints[3], ints[4] = seen_R[:-1].sum(), seen_R[-1]
        floats, peaks = packed.floats[2 + p * layout.num_floats :], packed.peaks[p * layout.num_peaks :]
        local = {info.layer: i for i, info in enumerate(accumulator.layers)}
        sums = {bank: (bank.floats(), bank.peaks()) for bank in accumulator.banks}
        for field in layout.fields:
            if field.info.layer in local:
                bank, j = accumulator.place[local[field.info.layer]]
                ints[field.ints] = bank.total_ints[j]
                floats[field.floats], peaks[field.peaks] = sums[bank][0][j], sums[bank][1][j]
    return packed


def reduce(packed: Packed, group: dist.ProcessGroup | None) -> None:
    """Sums (peaks: maximum) over the ranks of `group`, in place: three collectives."""
    dist.all_reduce(packed.ints, dist.ReduceOp.SUM, group=group)
    dist.all_reduce(packed.floats, dist.ReduceOp.SUM, group=group)
    dist.all_reduce(packed.peaks, dist.ReduceOp.MAX, group=group)


class Cut:
    """One flush on its way to the host; `records` waits for the copy."""

    def __init__(
        self,
        layout: Layout,
        packed: Packed,
        phases: Sequence[tuple[str, Steps]],
        sources: Sequence[str],
        ranks: int,
    ) -> None:
        self._layout, self._phases, self._sources, self._ranks = layout, phases, sources, ranks
        tensors = (packed.ints, packed.floats, packed.peaks)
        self._copied: torch.cuda.Event | None = None
        if packed.ints.device.type == "cuda":
            pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
            for target, x in zip(pinned, tensors, strict=True):
                target.copy_(x, non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event()
            tensors = (pinned[0], pinned[1], pinned[2])
        self._host = tensors
        self.broken: list[dict[str, Any]] = []

    def records(self) -> list[Record | None]:
        """One record per phase in the order given, None for a phase without a forward. Fills `broken`."""
        if self._copied is not None:
            self._copied.synchronize()
        ints, floats, peaks = (x.numpy() for x in self._host)
        per_phase = ints.reshape(len(self._phases), self._layout.num_ints)
        extra = any(has_unlabelled(self._layout, x) for x in per_phase)
        return [
            self._record(p, phase, steps, extra, ints, floats, peaks)
            for p, (phase, steps) in enumerate(self._phases)
        ]

    def _record(
        self,
        p: int,
        phase: str,
        steps: Steps,
        extra: bool,
        ints: npt.NDArray[np.int64],
        floats: npt.NDArray[np.float64],
        peaks: npt.NDArray[np.float32],
    ) -> Record | None:
        layout = self._layout
        loss_sum, losses = floats[0], floats[1]
        ints = ints[p * layout.num_ints :][: layout.num_ints]
        floats = floats[2 + p * layout.num_floats :][: layout.num_floats]
        peaks = peaks[p * layout.num_peaks :][: layout.num_peaks]
        ranks, microbatches, masked, tokens, excluded = (int(x) for x in ints[:HEADER])
        if not (steps.due or microbatches or ints[HEADER:].any()):
            return None
        layers = {
            f.info.layer: unpack_layer(
                ints[f.ints], floats[f.floats], peaks[f.peaks], f.info.num_experts, self._sources, extra
            )
            for f in layout.fields
        }
        record = Record(
            phase=phase,
            first_step=steps.first,
            last_step=steps.last,
            layers=layers,
            microbatches=microbatches,
            tokens=tokens,
            excluded_tokens=excluded if masked else None,
            ranks=ranks,
            lr=steps.lr,
            router_lr=steps.router_lr,
            loss=float(loss_sum / losses) if losses and phase == "train" else None,
        )
        broken = broken_invariants(record, [f.info for f in layout.fields], self._ranks)
        bad = max(wrong_sources(layout, ints))
        if bad:
            broken.append(
                {"invariant": "source ids", "message": f"{bad} tokens have a source id out of range"}
            )
        record.events = [(steps.last, "invariant", detail) for detail in broken]
        self.broken += broken
        return record


def unpack_layer(
    ints: npt.NDArray[np.int64],
    floats: npt.NDArray[np.float64],
    peaks: npt.NDArray[np.float32],
    num_experts: int,
    sources: Sequence[str],
    extra: bool,
) -> LayerRecord:
    """One layer out of the packed form; with `extra`, unlabelled tokens have a row behind the sources."""
    S, E = len(sources), num_experts
    R = S + 2
    C = R * (E + 2)
    counts, tokens, dropped = ints[:C].reshape(R, E + 2), ints[C : C + R + TALLY], ints[C + R + TALLY :]
    prob, logits, square = floats[:C].reshape(R, E + 2), floats[C : C + 2 * E], floats[C + 2 * E :]
    calls, with_prob, with_logits, with_kept, _ = (int(x) for x in tokens[R:])
    counted = int(tokens[: R - 1].sum())
    mean, std = None, None
    if with_logits and counted:
        total, squares = logits.reshape(2, E)
        mean = total / counted
        std = np.sqrt(np.maximum(squares / counted - mean**2, 0.0))

    def rows(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if UNLABELLED not in sources:
            return values[: S + extra]
        named = values[:S].copy()
        named[list(sources).index(UNLABELLED)] += values[S]
        return named

    return LayerRecord(
        counts_SE=rows(counts[:, 1:-1]),
        tokens_S=rows(tokens[:R]),
        prob_sum_SE=rows(prob[:, :E]) if with_prob else None,
        top1_S2=rows(prob[:, E:]) if with_prob else None,
        invalid=int(counts[:-1, 0].sum() + counts[:-1, -1].sum()),
        peak_E=peaks.astype(np.float64),
        sq_over_t_E=square,
        dropped_E=dropped[1:-1] if with_kept else None,
        logit_mean_E=mean,
        logit_std_E=std,
        calls=calls,
    )


def has_unlabelled(layout: Layout, ints: npt.NDArray[np.int64]) -> bool:
    """Whether any layer saw tokens without a source."""
    R = layout.num_rows
    return any(ints[f.ints][R * (f.info.num_experts + 2) + R - 2] > 0 for f in layout.fields)


def wrong_sources(layout: Layout, ints: npt.NDArray[np.int64]) -> list[int]:
    """Tokens whose source id was out of range, as each layer saw them."""
    R = layout.num_rows
    return [int(ints[f.ints][R * (f.info.num_experts + 2) + R + TALLY - 1]) for f in layout.fields]


def broken_invariants(record: Record, layers: Sequence[LayerInfo], ranks: int) -> list[dict[str, Any]]:
    """What must hold in every record and does not, as details of `invariant` events.

    Every layer fired, and some layer in every micro-batch; picks + invalid ids = k x tokens where k is fixed
    and the picks are those before the drop; all ranks took part.
    """
    broken: list[dict[str, Any]] = []
    for info in layers:
        x = record.layers[info.layer]
        if not x.calls:
            message = f"layer {info.layer} ({info.name}) was attached but never fired"
            broken.append({"invariant": "silent layer", "layer": info.layer, "message": message})
        elif info.top_k is not None and "post_drop" not in info.tags and x.tokens_S is not None:
            picks, expected = int(x.counts_SE.sum()) + x.invalid, info.top_k * int(x.tokens_S.sum())
            if picks != expected:
                message = (
                    f"layer {info.layer} ({info.name}): {picks} picks where {info.top_k} x"
                    f" {expected // info.top_k} tokens make {expected}"
                )
                broken.append({"invariant": "conservation", "layer": info.layer, "message": message})
    calls = max((x.calls or 0 for x in record.layers.values()), default=0)
    if record.microbatches is not None and 0 < calls < record.microbatches:
        message = f"no layer fired in {record.microbatches - calls} of {record.microbatches} micro-batches"
        broken.append({"invariant": "silent layer", "message": message})
    if record.ranks != ranks:
        message = f"{record.ranks} ranks took part, {ranks} were expected"
        broken.append({"invariant": "ranks", "message": message})
    return broken
