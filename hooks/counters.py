"""Counting on the device: the fused count of router forwards, and the accumulators they are added to.

Nothing here synchronises, allocates by data, or looks at values on the host; every shape is static.

Shape suffixes: T tokens that reached the router, K picks per token, E experts, L layers of one bank, N layers
that follow each other there and are counted together. R rows: the named sources, then unlabelled tokens, then
excluded (masked) tokens. C = E + 2 columns: ids below 0, the experts, ids above. X = E + 2 columns as well:
probabilities, the largest of them, its square. A layer's fields lie one behind the other, so that a bank is
committed, reduced and copied by a handful of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_audit.hooks.adapters.base import NO_PICK, Observation
from moe_audit.hooks.labels import TALLY, Labels

# Gates whose probabilities are a softmax of the logits over all experts.
SOFTMAX = ("softmax", "topk_softmax")
# On the host up to so many layers of up to so many bytes each are counted together: there an operation costs
# more than so few values.
JOINT_LAYERS, JOINT_BYTES = 8, 2**18
SLOTS_BYTES = 2**20  # of the counts of the micro-batches that are added up at a time


def pick_cells(
    indices_NTK: Tensor,
    first_T1: Tensor,
    num_columns: int,
    broken_NT: Tensor | None,
    unused: int | None,
) -> Tensor:
    """The cell of each pick in the flat counts [R, C] of its layer.

    Ids below 0 and from E on land in the first and last column of their row; those of tokens in `broken_NT`
    (their logits are not finite) in the first, whatever ids the kernel made of them. `NO_PICK` lands in the
    cell `unused`, unless that is None: there is no such id.
    """
    ids_NTK = indices_NTK.to(torch.int64)
    cell_NTK = ids_NTK.clamp(-1, num_columns - 2)
    if broken_NT is not None:
        cell_NTK.masked_fill_(broken_NT.unsqueeze(-1), -1)
    cell_NTK.add_(first_T1)
    return cell_NTK if unused is None else cell_NTK.masked_fill_(ids_NTK == NO_PICK, unused)


def count_dropped(dropped_C: Tensor, indices_TK: Tensor, kept_TK: Tensor, labels: Labels) -> None:
    """Adds the picks of counted tokens that were dropped."""
    lost_TK = ~kept_TK & labels.counted_T.bool().unsqueeze(1) & (indices_TK != NO_PICK)
    column_TK = indices_TK.to(torch.int64).clamp(-1, dropped_C.shape[0] - 2).add_(1)
    dropped_C.scatter_add_(0, column_TK.reshape(-1), lost_TK.reshape(-1).to(torch.int64))


def probabilities(
    full_NTE: Tensor, kind: Literal["logits", "probs"], gating: str | None, out: Tensor
) -> Tensor:
    """Rows normalised to distributions, float32, into `out` or not; NaN where logits are not finite."""
    if kind == "logits" and gating != "sigmoid":
        num_experts = full_NTE.shape[-1]
        if out.device.type == "cpu" and num_experts < 16:
            # On the host so few values a row take eight times as long as the same values in columns.
            columns = full_NTE.reshape(-1, num_experts).t().contiguous()
            return torch.softmax(columns, 0, dtype=torch.float32).t().view(full_NTE.shape)
        return torch.softmax(full_NTE, -1, dtype=torch.float32, out=out)
    p_NTE = out.copy_(full_NTE)
    p_NTE = p_NTE.sigmoid_() if kind == "logits" else p_NTE
    return p_NTE.div_(p_NTE.sum(-1, keepdim=True).clamp_min_(1e-20))


class Scratch(NamedTuple):
    """Room for the real numbers of one forward of N routers: logits, and what is summed per row with views of
    its parts (probabilities, the largest of them, its square)."""

    x_NTE: Tensor
    sum_TNX: Tensor  # a token's values of all layers side by side: added to its row at once
    p_NTE: Tensor
    top1_NT: Tensor
    square_NT: Tensor

    @classmethod
    def of(cls, layers: int, tokens: int, num_experts: int, device: torch.device) -> Scratch:
        x_NTE = torch.empty(layers, tokens, num_experts, dtype=torch.float32, device=device)
        sum_TNX = torch.empty(tokens, layers, num_experts + 2, dtype=torch.float32, device=device)
        sum_NTX = sum_TNX.transpose(0, 1)
        return cls(x_NTE, sum_TNX, sum_NTX[..., :-2], sum_NTX[..., -2], sum_NTX[..., -1])


def row_values(p_NTE: Tensor, room: Scratch) -> Tensor:
    """[T, N, X]: probabilities, the largest of each token and its square; NaN counts as 0."""
    torch.nan_to_num(p_NTE, 0.0, 0.0, 0.0, out=room.p_NTE)
    torch.amax(room.p_NTE, -1, out=room.top1_NT)
    torch.square(room.top1_NT, out=room.square_NT)
    return room.sum_TNX


def sum_logits(
    logit_N1E: Tensor, square_N1E: Tensor, full_NTE: Tensor, labels: Labels, room: Scratch
) -> None:
    """Adds sum and sum of squares of the logits of counted tokens; values that are not finite count as 0."""
    x_NTE = torch.nan_to_num(full_NTE.float(), 0.0, 0.0, 0.0, out=room.x_NTE)
    counted_N1T = labels.counted_T.expand(len(x_NTE), 1, -1)
    logit_N1E.baddbmm_(counted_N1T, x_NTE)
    square_N1E.baddbmm_(counted_N1T, x_NTE.square_())


class Form(NamedTuple):
    """What calls that are counted together have in common."""

    kind: Literal["logits", "probs"] | None
    gating: str | None
    drops: bool
    complete: bool
    tensors: tuple[tuple[torch.Size, torch.dtype] | None, ...]


class Bank:
    """Accumulators of the layers with E experts on one device.

    The open micro-batch lives apart (`pending`) and joins the record (`total`) only when it has ended well: a
    forward that crashes half way leaves no layer counted and none missing, and the largest load of a
    micro-batch can be read off before the two are added.

    Args:
        top_k: K of each layer, None where it varies.
        num_experts, num_rows: E and R.
        device: Where they are.
    """

    def __init__(
        self, top_k: Sequence[int | None], num_experts: int, num_rows: int, device: torch.device
    ) -> None:
        L, E, R = len(top_k), num_experts, num_rows
        self.num_experts, self.num_rows = E, R
        self.int_sizes = [R * (E + 2), R + TALLY, E + 2]
        ints = sum(self.int_sizes)
        # On the host a few micro-batches are added up at a time; a CUDA graph wants them at fixed addresses.
        self.num_slots = max(1, min(16, SLOTS_BYTES // (8 * L * ints))) if device.type == "cpu" else 1
        self.pending_ints = torch.zeros(self.num_slots * L, ints, dtype=torch.int64, device=device)
        self.total_ints = torch.zeros(L, ints, dtype=torch.int64, device=device)
        # Every type is named: the default may be bfloat16, which stops counting at 256. Behind the R rows of
        # sums lie one of the logits and one of their squares.
        self.pending_LQX = torch.zeros(self.num_slots * L, R + 2, E + 2, dtype=torch.float32, device=device)
        # Totals of floats in double: a record adds up millions of small terms.
        self.total_LQX = torch.zeros(L, R + 2, E + 2, dtype=torch.float64, device=device)
        # Largest load of a micro-batch per token (where k varies, per pick), and sum of squared loads over
        # tokens; of the open one where it has chunks.
        self.pending_peak_LE, self.total_peak_LE, self.pending_square_LE, self.total_square_LE = (
            torch.zeros(L, E, dtype=torch.float64, device=device) for _ in range(4)
        )
        # What of the open micro-batch was folded into these already; nothing unless it has chunks.
        self.folded_LE = torch.zeros(L, E, dtype=torch.int64, device=device)
        self.folded_tokens_L1 = torch.zeros(L, 1, dtype=torch.int64, device=device)
        self.has_folds = False
        self.varies = None in top_k
        self.varies_L1 = torch.tensor([[k is None] for k in top_k] * self.num_slots, device=device)
        # Loads per token, or per pick, to fair shares.
        self.fair_L1 = torch.tensor([[E / (k or 1)] for k in top_k], dtype=torch.float64, device=device)
        self.one = torch.ones(1, dtype=torch.int64, device=device)
        self.layer_L1 = torch.arange(L, dtype=torch.int64, device=device).unsqueeze(1)
        # The slot of the open micro-batch, and the first one that is not in the record yet.
        self._slot = self._joined = 0
        self._scratch: Scratch | None = None
        # Copies of what calls of `waiting` layers from `first` on brought, to be counted together.
        self._form: Form | None = None
        self._stage: tuple[Tensor | None, ...] | None = None
        self._places: list[list[Tensor]] = []
        self._waiting = self._first = 0
        self._labels: Labels | None = None
        self._make_views()

    @property
    def device(self) -> torch.device:
        return self.one.device

    def move(self, device: torch.device) -> None:
        """Follows a model that was moved."""
        self.count_waiting()
        self.join()
        self._scratch = self._form = None
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self._make_views()

    def _make_views(self) -> None:
        R, E = self.num_rows, self.num_experts
        counts, self.tokens_LR, self.dropped_LC = torch.split(self.pending_ints, self.int_sizes, dim=1)
        self.counts_LRC = counts.view(-1, R, E + 2)
        self.logit_L1E, self.square_L1E = self.pending_LQX[:, R : R + 1, :E], self.pending_LQX[:, R + 1 :, :E]

    # -- one forward

    def observe(self, j: int, seen: Observation, labels: Labels, gating: str | None) -> None:
        """Counts one forward of layer j, now or together with those of the layers behind it."""
        if seen.kept_TK is not None:
            count_dropped(
                self.dropped_LC[self._rows(slice(j, j + 1)).start], seen.indices_TK, seen.kept_TK, labels
            )
        full_TE = None if seen.full_kind is None else seen.full_TE
        gated_TE = seen.gated_TE if seen.full_kind == "logits" and gating in SOFTMAX else None
        call = (seen.indices_TK, full_TE, gated_TE)
        tensors = tuple(None if x is None else (x.shape, x.dtype) for x in call)
        form = Form(seen.full_kind, gating, seen.kept_TK is not None, seen.complete, tensors)
        if form != self._form:
            self.count_waiting()
            self._form, self._stage = form, self._new_stage(call)
            rooms = [room for room in self._stage or () if room is not None]
            self._places = [list(places) for places in zip(*rooms, strict=True)]
        if self._stage is None:
            self._count(j, tuple(None if x is None else x.unsqueeze(0) for x in call), labels, form)
            return
        if self._waiting and (labels is not self._labels or j != self._first + self._waiting):
            self.count_waiting()
        if not self._waiting:
            self._first, self._labels = j, labels
        for place, x in zip(self._places[self._waiting], [x for x in call if x is not None], strict=True):
            place.copy_(x)
        self._waiting += 1
        if self._waiting == JOINT_LAYERS or j == len(self.layer_L1) - 1:
            self.count_waiting()

    def _new_stage(self, call: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Room for copies of such calls: the model may go on and change its tensors. None: they are large."""
        if self.device.type != "cpu" or sum(x.nbytes for x in call if x is not None) > JOINT_BYTES:
            return None
        layers = min(JOINT_LAYERS, len(self.layer_L1))
        return tuple(None if x is None else x.new_empty(layers, *x.shape) for x in call)

    def count_waiting(self) -> None:
        """Counts what waits for layers behind it."""
        if self._waiting and self._stage is not None and self._labels is not None and self._form is not None:
            calls = tuple(None if room is None else room[: self._waiting] for room in self._stage)
            self._waiting = 0
            self._count(self._first, calls, self._labels, self._form)

    def _count(self, j: int, calls: tuple[Tensor | None, ...], labels: Labels, form: Form) -> None:
        """Adds one forward of layer j and those behind it."""
        indices_NTK, full_NTE, p_NTE = calls
        assert indices_NTK is not None
        part = self._rows(slice(j, j + len(indices_NTK)))
        broken_NT = None
        if full_NTE is not None and form.kind is not None:
            room = self._room(*full_NTE.shape[:2])
            if form.kind == "logits":
                sum_logits(self.logit_L1E[part], self.square_L1E[part], full_NTE, labels, room)
            if p_NTE is None:
                p_NTE = probabilities(full_NTE, form.kind, form.gating, room.x_NTE)
            broken_NT = p_NTE[..., 0].isnan()  # one value that is not finite makes its whole row NaN
            self._add_rows(part, row_values(p_NTE, room), labels)
        last_cell = self.int_sizes[0] - 1  # of the masked tokens, which nobody reads
        cell_NTK = pick_cells(
            indices_NTK,
            labels.first_T1,
            self.num_experts + 2,
            broken_NT,
            None if form.complete else last_cell,
        )
        ints_NI = self.pending_ints[part]
        if len(ints_NI) > 1:
            cell_NTK.add_(self.layer_L1[: len(ints_NI)].unsqueeze(2), alpha=ints_NI.shape[1])
        ints_NI.view(-1).scatter_add_(0, cell_NTK.reshape(-1), self.one.expand(cell_NTK.numel()))
        self.tokens_LR[part].add_(labels.tally(full_NTE is not None, form.kind == "logits", form.drops))

    def _add_rows(self, part: slice, value_TNX: Tensor, labels: Labels) -> None:
        sum_NRX = self.pending_LQX[part, : self.num_rows]
        if labels.onehot_RT is not None:
            onehot_NRT = labels.onehot_RT.expand(len(sum_NRX), -1, -1)
            sum_NRX.baddbmm_(onehot_NRT, value_TNX.transpose(0, 1))
            return
        sum_RNX = value_TNX.new_zeros(self.num_rows, *value_TNX.shape[1:])
        sum_RNX.flatten(1).index_add_(0, labels.row_T, value_TNX.flatten(1))
        sum_NRX.add_(sum_RNX.transpose(0, 1))

    def _room(self, layers: int, tokens: int) -> Scratch:
        """Kept on the host, where fresh pages cost more than the arithmetic."""
        if self.device.type != "cpu":
            return Scratch.of(layers, tokens, self.num_experts, self.device)
        if self._scratch is None or self._scratch.x_NTE.shape[:2] != (layers, tokens):
            self._scratch = Scratch.of(layers, tokens, self.num_experts, self.device)
        return self._scratch

    # -- micro-batches

    def fold(self, j: int) -> None:
        """Ends a chunk of layer j, a micro-batch of its own, inside the open one."""
        self.count_waiting()
        self.join()
        part, row = slice(j, j + 1), self._rows(slice(j, j + 1))
        load_LE, rate_LE, peak_LE = self._measure(row, part)
        torch.maximum(self.pending_peak_LE[part], peak_LE, out=self.pending_peak_LE[part])
        self.pending_square_LE[part].addcmul_(load_LE, rate_LE)
        self.folded_LE[part] = self.counts_LRC[row, :-1, 1:-1].sum(1)
        self.folded_tokens_L1[part] = self.tokens_LR[row, : self.num_rows - 1].sum(1, keepdim=True)
        self.has_folds = True

    def commit(self, layers: slice) -> None:
        """The open micro-batch of these layers becomes part of the record."""
        self.count_waiting()
        if layers != slice(None) or self.has_folds:
            self._join(self._rows(layers), layers, 1)
            self.discard(layers)
            return
        self._slot += 1
        if self._slot == self.num_slots:
            self.join()

    def join(self) -> None:
        """Adds up the micro-batches that have ended; the open one keeps its place."""
        L = len(self.fair_L1)
        if self._joined < self._slot:
            rows = slice(self._joined * L, self._slot * L)
            self._join(rows, slice(None), self._slot - self._joined)
            self.pending_ints[rows].zero_()
            self.pending_LQX[rows].zero_()
        self._joined = self._slot = self._slot % self.num_slots

    def _rows(self, layers: slice) -> slice:
        """Where the open micro-batch of these layers lies."""
        L = len(self.fair_L1)
        start, stop, _ = layers.indices(L)
        return slice(self._slot * L + start, self._slot * L + stop)

    def _measure(self, rows: slice, layers: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Loads since the last fold, loads per token, and per token or, where k varies, per pick."""
        load_LE = self.counts_LRC[rows, :-1, 1:-1].sum(1, dtype=torch.float64)
        tokens_L1 = self.tokens_LR[rows, : self.num_rows - 1].sum(1, keepdim=True)
        if self.has_folds:
            load_LE.sub_(self.folded_LE[layers])
            tokens_L1.sub_(self.folded_tokens_L1[layers])
        rate_LE = load_LE / tokens_L1.clamp_min_(1)
        if not self.varies:
            return load_LE, rate_LE, rate_LE
        picks_L1 = load_LE.sum(1, keepdim=True).clamp_min_(1.0)
        return load_LE, rate_LE, torch.where(self.varies_L1[rows], load_LE / picks_L1, rate_LE)

    def _join(self, rows: slice, layers: slice, microbatches: int) -> None:
        load_LE, rate_LE, peak_LE = self._measure(rows, layers)
        square_LE, ints, floats = load_LE.mul_(rate_LE), self.pending_ints[rows], self.pending_LQX[rows]
        if microbatches > 1:
            square_LE, ints, floats = (
                x.view(microbatches, -1, *x.shape[1:]).sum(0) for x in (square_LE, ints, floats.double())
            )
            peak_LE = peak_LE.view(microbatches, -1, self.num_experts).amax(0)
        if self.has_folds:
            peak_LE = torch.maximum(peak_LE, self.pending_peak_LE[layers])
            square_LE.add_(self.pending_square_LE[layers])
        torch.maximum(self.total_peak_LE[layers], peak_LE, out=self.total_peak_LE[layers])
        self.total_square_LE[layers].add_(square_LE)
        self.total_ints[layers].add_(ints)
        self.total_LQX[layers].add_(floats)

    def discard(self, layers: slice) -> None:
        """Forgets the open micro-batch of these layers."""
        self._waiting = 0
        rows = self._rows(layers)
        self.pending_ints[rows].zero_()
        self.pending_LQX[rows].zero_()
        if self.has_folds:
            for x in (self.pending_peak_LE, self.pending_square_LE, self.folded_LE, self.folded_tokens_L1):
                x[layers].zero_()
            self.has_folds = layers != slice(None)

    def reset(self) -> None:
        """Begins a new record."""
        for x in (self.total_ints, self.total_LQX, self.total_peak_LE, self.total_square_LE):
            x.zero_()

    def open_tokens(self, j: int) -> Tensor:
        """int64 [R]: tokens that layer j saw in the open micro-batch."""
        self.count_waiting()
        return self.tokens_LR[self._slot * len(self.fair_L1) + j, : self.num_rows]

    def tokens(self, j: int) -> Tensor:
        """int64 [R]: tokens that layer j saw in the record."""
        first = self.int_sizes[0]
        return self.total_ints[j, first : first + self.num_rows]

    def peaks(self) -> Tensor:
        """float64 [L, E]: the largest load of a micro-batch, in fair shares."""
        return self.total_peak_LE * self.fair_L1

    def floats(self) -> Tensor:
        """float64 [L, R (E + 2) + 3 E]: of each row sums of probabilities and top-1 moments, of all counted
        tokens sums of the logits and of their squares, and sums of squared loads over tokens."""
        R, E = self.num_rows, self.num_experts
        rows_LRX, logits_L2E = self.total_LQX[:, :R], self.total_LQX[:, R:, :E]
        return torch.cat((rows_LRX.flatten(1), logits_L2E.flatten(1), self.total_square_LE), 1)
