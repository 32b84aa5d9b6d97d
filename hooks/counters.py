"""Counting on the device: the fused count of one router forward, and the accumulators it adds to.

Nothing here synchronises, allocates by data, or looks at values on the host; every shape is static.

Shape suffixes: T tokens that reached the router, K picks per token, E experts, L layers of one bank,
R rows: the named sources, then unlabelled tokens, then excluded (masked) tokens. C = E + 2 columns: ids
below 0, the experts, ids above. A layer's fields lie one behind the other in one flat row, so that a whole
bank is committed, reduced and copied by a handful of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_audit.hooks.adapters.base import NO_PICK

TALLY = (
    4  # per-layer cells behind the tokens per row: calls, calls with probabilities, with logits, with kept
)


@dataclass(frozen=True)
class Labels:
    """The rows of the T tokens of one router forward, and what follows from them for every layer.

    Attributes:
        row_T: int64 row of each token, R - 1 where it is masked.
        onehot_RT: float32, 1 where token t is in row r: sums rows by a matrix product, in a fixed order and
            without atomics. None on the host, where adding row by row takes a ninth of the time.
        counted_T: float32, 1 where the token is not masked.
        tokens_R: int64 tokens per row.
        bad: int64 scalar: source ids outside [-1, sources).
    """

    row_T: Tensor
    onehot_RT: Tensor | None
    counted_T: Tensor
    tokens_R: Tensor
    bad: Tensor

    @classmethod
    def of(cls, row_T: Tensor, num_rows: int) -> Labels:
        """From row ids; those outside [0, R) become unlabelled and are reported in `bad`."""
        bad_T = (row_T < 0) | (row_T >= num_rows)
        row_T = torch.where(bad_T, num_rows - 2, row_T)
        onehot_RT = None
        if row_T.device.type != "cpu":
            onehot_RT = torch.zeros(num_rows, len(row_T), dtype=torch.float32, device=row_T.device)
            onehot_RT.scatter_(0, row_T.unsqueeze(0), 1.0)
        tokens_R = torch.zeros(num_rows, dtype=torch.int64, device=row_T.device)
        tokens_R.scatter_add_(0, row_T, torch.ones_like(row_T))
        return cls(row_T, onehot_RT, (row_T != num_rows - 1).float(), tokens_R, bad_T.sum())

    def copy_(self, other: Labels) -> None:
        """Takes over other labels of the same size in place: a captured CUDA graph reads these addresses."""
        for mine, new in zip(vars(self).values(), vars(other).values(), strict=True):
            if mine is not None:
                mine.copy_(new)


def count_picks(counts: Tensor, indices_TK: Tensor, row_T: Tensor, one: Tensor) -> None:
    """Adds one router forward to counts [R * C], in one scatter over the combined (row, expert) index.

    Picks of masked tokens and `NO_PICK` land in the last row, invalid ids in the first and last column.
    """
    num_columns = counts.shape[-1]
    indices_TK = indices_TK.to(torch.int64)
    key_TK = indices_TK.clamp(-1, num_columns - 2).add_((row_T * num_columns + 1).unsqueeze(1))
    key_TK = torch.where(indices_TK == NO_PICK, counts.numel() - 1, key_TK)
    counts.view(-1).scatter_add_(0, key_TK.view(-1), one.expand(key_TK.numel()))


def count_dropped(dropped: Tensor, indices_TK: Tensor, kept_TK: Tensor, labels: Labels) -> None:
    """Adds the picks of counted tokens that were dropped to dropped [C]."""
    lost_TK = ~kept_TK & (labels.row_T != labels.tokens_R.shape[0] - 1).unsqueeze(1) & (indices_TK != NO_PICK)
    column_TK = indices_TK.to(torch.int64).clamp(-1, dropped.shape[0] - 2).add_(1)
    dropped.scatter_add_(0, column_TK.view(-1), lost_TK.view(-1).to(torch.int64))


def probabilities(
    full_TE: Tensor, kind: Literal["logits", "probs"], gating: str | None, out: Tensor | None = None
) -> Tensor:
    """Rows normalised to distributions, float32, into `out` if given; rows that are not finite become zeros."""
    if kind == "logits" and gating != "sigmoid":
        p_TE = torch.softmax(full_TE, -1, dtype=torch.float32, out=out)
    else:
        p_TE = full_TE.float() if out is None else out.copy_(full_TE)
        p_TE = p_TE.sigmoid() if kind == "logits" else p_TE
        p_TE = p_TE / p_TE.sum(-1, keepdim=True).clamp_min(1e-20)
    return p_TE.nan_to_num_(0.0, 0.0, 0.0)


def sum_probabilities(prob_RE: Tensor, top1_R2: Tensor, p_TE: Tensor, labels: Labels) -> None:
    """Adds the probabilities per row, and the sum and sum of squares of each token's largest."""
    top1_T = p_TE.amax(-1)
    top1_T2 = torch.stack((top1_T, top1_T.square()), dim=-1)
    for sum_RX, x_TX in ((prob_RE, p_TE), (top1_R2, top1_T2)):
        if labels.onehot_RT is None:
            sum_RX.index_add_(0, labels.row_T, x_TX)
        else:
            sum_RX.addmm_(labels.onehot_RT, x_TX)


def sum_logits(logits_2E: Tensor, full_TE: Tensor, labels: Labels, out: Tensor | None = None) -> None:
    """Adds sum and sum of squares of the logits of counted tokens; values that are not finite count as 0."""
    x_TE = full_TE.to(torch.float32, copy=True) if out is None else out.copy_(full_TE)
    x_TE.nan_to_num_(0.0, 0.0, 0.0).mul_(labels.counted_T.unsqueeze(1))
    logits_2E[0] += x_TE.sum(0)
    logits_2E[1] += x_TE.square_().sum(0)


class Bank:
    """Accumulators of the layers with E experts on one device.

    The open micro-batch lives apart (`pending`) and joins the record (`total`) only when it has ended well: a
    forward that crashes half way leaves no layer counted and none missing, and the largest load of a
    micro-batch needs its own counts anyway. Nothing is a buffer of the model: no cast touches it.
    """

    def __init__(
        self, top_k: Sequence[int | None], num_experts: int, num_rows: int, device: torch.device
    ) -> None:
        L, E, R = len(top_k), num_experts, num_rows
        self.num_experts, self.num_rows = E, R
        self.int_sizes = [R * (E + 2), R + TALLY, E + 2]
        self.float_sizes = [R * E, R * 2, 2 * E]
        ints, floats = sum(self.int_sizes), sum(self.float_sizes)
        self.pending_ints, self.total_ints = (
            torch.zeros(L, ints, dtype=torch.int64, device=device) for _ in range(2)
        )
        # Every type is named: the default may be bfloat16, which stops counting at 256.
        self.pending_floats = torch.zeros(L, floats, dtype=torch.float32, device=device)
        # Totals of floats in double: a record adds up millions of small terms.
        self.total_floats = torch.zeros(L, floats + E, dtype=torch.float64, device=device)
        # Measures of one micro-batch: in the open one, in the record.
        self.pending_peak_LE, self.total_peak_LE = (
            torch.zeros(L, E, dtype=torch.float32, device=device) for _ in range(2)
        )
        self.pending_square_LE = torch.zeros(L, E, dtype=torch.float64, device=device)
        # What of the open micro-batch was folded into these measures already.
        self.folded_LE = torch.zeros(L, E, dtype=torch.int64, device=device)
        self.folded_tokens_L = torch.zeros(L, dtype=torch.int64, device=device)
        self.fixed_k_L = torch.tensor([k or 0 for k in top_k], dtype=torch.float32, device=device)
        self.one = torch.ones(1, dtype=torch.int64, device=device)
        self._workspace: Tensor | None = None
        self._view()

    def workspace(self, tokens: int) -> Tensor | None:
        """Room for [T, E] values. On the host fresh pages cost ten times the arithmetic; a GPU has its own cache."""
        if self.device.type != "cpu":
            return None
        if self._workspace is None or self._workspace.shape[0] < tokens:
            self._workspace = torch.empty(tokens, self.num_experts, dtype=torch.float32, device=self.device)
        return self._workspace[:tokens]

    @property
    def device(self) -> torch.device:
        return self.one.device

    def move(self, device: torch.device) -> None:
        """Follows a model that was moved."""
        self._workspace = None
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self._view()

    def _view(self) -> None:
        """The fields of the open micro-batch, as views."""
        L, R, E = len(self.fixed_k_L), self.num_rows, self.num_experts
        counts, self.tokens_LR, self.dropped_LC = torch.split(self.pending_ints, self.int_sizes, dim=1)
        self.counts_LRC = counts.view(L, R, E + 2)
        prob, top1, logits = torch.split(self.pending_floats, self.float_sizes, dim=1)
        self.prob_LRE, self.top1_LR2 = prob.view(L, R, E), top1.view(L, R, 2)
        self.logits_L2E = logits.view(L, 2, E)

    def fold(self, i: int | slice) -> None:
        """Ends a micro-batch of layer(s) i: its loads enter the peak and the sum of squares over tokens."""
        n_LE = self.counts_LRC[i, ..., :-1, 1:-1].sum(-2)
        t_L = self.tokens_LR[i, ..., : self.num_rows - 1].sum(-1)
        load_LE = (n_LE - self.folded_LE[i]).float()
        new_t_L = (t_L - self.folded_tokens_L[i]).float()
        picks_L = torch.where(self.fixed_k_L[i] > 0, new_t_L * self.fixed_k_L[i], load_LE.sum(-1))
        fair_L1 = (picks_L / self.num_experts).clamp_min(1e-20).unsqueeze(-1)
        torch.maximum(self.pending_peak_LE[i], load_LE / fair_L1, out=self.pending_peak_LE[i])
        self.pending_square_LE[i] += load_LE.double().square() / new_t_L.clamp_min(1.0).unsqueeze(-1)
        self.folded_LE[i] = n_LE
        self.folded_tokens_L[i] = t_L

    def commit(self, i: slice) -> None:
        """The open micro-batch of layers i becomes part of the record."""
        self.fold(i)
        self.total_ints[i] += self.pending_ints[i]
        self.total_floats[i, : -self.num_experts] += self.pending_floats[i]
        self.total_floats[i, -self.num_experts :] += self.pending_square_LE[i]
        torch.maximum(self.total_peak_LE[i], self.pending_peak_LE[i], out=self.total_peak_LE[i])
        self.discard(i)

    def discard(self, i: slice) -> None:
        """Forgets the open micro-batch of layers i."""
        for x in (self.pending_ints, self.pending_floats, self.pending_peak_LE, self.pending_square_LE):
            x[i].zero_()
        self.folded_LE[i].zero_()
        self.folded_tokens_L[i].zero_()

    def reset(self) -> None:
        """Begins a new record."""
        for x in (self.total_ints, self.total_floats, self.total_peak_LE):
            x.zero_()
