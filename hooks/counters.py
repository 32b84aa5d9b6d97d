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

# Cells behind the tokens per row: calls, those that brought probabilities, logits, drops; wrong source ids.
TALLY = 5


@dataclass
class Labels:
    """The rows of the T tokens of one router forward, and what follows from them for every layer.

    Attributes:
        row_T: int64 row of each token, R - 1 where it is masked.
        onehot_RT: float32, 1 where token t is in row r: sums rows by a matrix product, in a fixed order and
            without atomics. None on the host, where adding row by row takes a ninth of the time.
        counted_T: float32, 1 where the token is not masked.
        tally: int64 [R + TALLY]: tokens per row, one call, wrong source ids.
    """

    row_T: Tensor
    onehot_RT: Tensor | None
    counted_T: Tensor
    tally: Tensor

    @classmethod
    def of(cls, row_T: Tensor, num_rows: int) -> Labels:
        """From row ids; those outside [0, R) are wrong source ids: unlabelled, and told in the tally."""
        device = row_T.device
        bad_T = (row_T < 0) | (row_T >= num_rows)
        row_T = torch.where(bad_T, num_rows - 2, row_T)
        onehot_RT = None
        if device.type != "cpu":
            onehot_RT = torch.zeros(num_rows, len(row_T), dtype=torch.float32, device=device)
            onehot_RT.scatter_(0, row_T.unsqueeze(0), 1.0)
        tally = torch.zeros(num_rows + TALLY, dtype=torch.int64, device=device)
        tally.scatter_add_(0, row_T, torch.ones_like(row_T))
        tally[num_rows] = 1
        tally[-1] = bad_T.sum()
        return cls(row_T, onehot_RT, (row_T != num_rows - 1).float(), tally)

    def copy_(self, other: Labels) -> None:
        """Takes over other labels of the same size in place: a captured CUDA graph reads these addresses."""
        for mine, new in zip(vars(self).values(), vars(other).values(), strict=True):
            if mine is not None:
                mine.copy_(new)


def count_picks(
    counts_RC: Tensor, indices_TK: Tensor, row_T: Tensor, one: Tensor, broken_T: Tensor | None = None
) -> None:
    """Adds one router forward, in one scatter over the combined (row, expert) index.

    Picks of masked tokens and `NO_PICK` land in the last row, invalid ids in the first and last column; so do
    the picks of tokens in `broken_T` (their logits are not finite), whatever ids the kernel made of them.
    """
    num_columns = counts_RC.shape[-1]
    indices_TK = indices_TK.to(torch.int64)
    ids_TK = indices_TK if broken_T is None else torch.where(broken_T.unsqueeze(1), -1, indices_TK)
    first_T1 = torch.add(1, row_T, alpha=num_columns).unsqueeze(1)
    key_TK = ids_TK.clamp(-1, num_columns - 2).add_(first_T1)
    key_TK = torch.where(indices_TK == NO_PICK, counts_RC.numel() - 1, key_TK)
    counts_RC.view(-1).scatter_add_(0, key_TK.view(-1), one.expand(key_TK.numel()))


def count_dropped(dropped: Tensor, indices_TK: Tensor, kept_TK: Tensor, labels: Labels) -> None:
    """Adds the picks of counted tokens that were dropped to dropped [C]."""
    lost_TK = ~kept_TK & labels.counted_T.bool().unsqueeze(1) & (indices_TK != NO_PICK)
    column_TK = indices_TK.to(torch.int64).clamp(-1, dropped.shape[0] - 2).add_(1)
    dropped.scatter_add_(0, column_TK.view(-1), lost_TK.view(-1).to(torch.int64))


def probabilities(
    full_TE: Tensor, kind: Literal["logits", "probs"], gating: str | None, out: Tensor | None = None
) -> Tensor:
    """Rows normalised to distributions, float32, into `out` if given; NaN where logits are not finite."""
    if kind == "logits" and gating != "sigmoid":
        if out is not None and full_TE.shape[-1] < 16:
            # On the host so few values a row take eight times as long as the same values in columns.
            p_TE = torch.softmax(full_TE.t().contiguous(), 0, dtype=torch.float32).t()
        else:
            p_TE = torch.softmax(full_TE, -1, dtype=torch.float32, out=out)
    else:
        p_TE = full_TE.float() if out is None else out.copy_(full_TE)
        p_TE = p_TE.sigmoid() if kind == "logits" else p_TE
        p_TE = p_TE / p_TE.sum(-1, keepdim=True).clamp_min(1e-20)
    return p_TE


def sum_probabilities(prob_RE: Tensor, top1_R2: Tensor, p_TE: Tensor, labels: Labels) -> None:
    """Adds the probabilities per row, and the sum and sum of squares of each token's largest; NaN adds 0."""
    p_TE = p_TE.nan_to_num_(0.0, 0.0, 0.0)
    top1_T = p_TE.amax(-1)
    top1_T2 = torch.stack((top1_T, top1_T.square()), dim=-1)
    for sum_RX, x_TX in ((prob_RE, p_TE), (top1_R2, top1_T2)):
        if labels.onehot_RT is None:
            sum_RX.index_add_(0, labels.row_T, x_TX)
        else:
            sum_RX.addmm_(labels.onehot_RT, x_TX)


def sum_logits(logits_2E: Tensor, full_TE: Tensor, labels: Labels, out: Tensor | None = None) -> None:
    """Adds sum and sum of squares of the logits of counted tokens; values that are not finite count as 0."""
    x_TE = torch.nan_to_num(full_TE.float(), 0.0, 0.0, 0.0, out=out)
    logits_2E[0].addmv_(x_TE.t(), labels.counted_T)
    logits_2E[1].addmv_(x_TE.square_().t(), labels.counted_T)


@dataclass(frozen=True)
class Pending:
    """The open micro-batch of one layer: views into its bank. Counts, tally and what calls brought (a part of
    it), drops, sums of probabilities, top-1 moments, sums and sums of squares of logits."""

    counts_RC: Tensor
    tally: Tensor
    brought_3: Tensor
    dropped_C: Tensor
    prob_RE: Tensor
    top1_R2: Tensor
    logits_2E: Tensor


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
        # Largest load of a micro-batch, and sum of squares over tokens; of the open one where it has chunks.
        self.pending_peak_LE, self.total_peak_LE = (
            torch.zeros(L, E, dtype=torch.float32, device=device) for _ in range(2)
        )
        self.pending_square_LE = torch.zeros(L, E, dtype=torch.float64, device=device)
        # What of the open micro-batch was folded into these already; nothing unless it has chunks.
        self.folded_LE = torch.zeros(L, E, dtype=torch.int64, device=device)
        self.folded_tokens_L = torch.zeros(L, dtype=torch.int64, device=device)
        self.has_folds = False
        self.varies = None in top_k
        self.fixed_k_L = torch.tensor([k or 0 for k in top_k], dtype=torch.float32, device=device)
        self.one = torch.ones(1, dtype=torch.int64, device=device)
        self._workspace: Tensor | None = None
        self._brings: dict[tuple[bool, bool, bool], Tensor] = {}
        self.pending = self._views()

    def brings(self, probabilities: bool, logits: bool, drops: bool) -> Tensor:
        """Ones for what a call brings besides picks, to be added to `brought_3`."""
        key = (probabilities, logits, drops)
        if key not in self._brings:
            self._brings[key] = torch.tensor(key, dtype=torch.int64, device=self.device)
        return self._brings[key]

    def workspace(self, tokens: int) -> Tensor | None:
        """Room for [T, E] values on the host, where fresh pages cost more than the arithmetic."""
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
        self._workspace, self._brings = None, {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self.pending = self._views()

    def _views(self) -> list[Pending]:
        L, R, E = len(self.fixed_k_L), self.num_rows, self.num_experts
        counts, self.tokens_LR, dropped_LC = torch.split(self.pending_ints, self.int_sizes, dim=1)
        self.counts_LRC = counts.view(L, R, E + 2)
        prob, top1, logits = torch.split(self.pending_floats, self.float_sizes, dim=1)
        fields = (
            self.counts_LRC, self.tokens_LR, self.tokens_LR[:, R + 1 : R + 4], dropped_LC,
            prob.view(L, R, E), top1.view(L, R, 2), logits.view(L, 2, E),
        )  # fmt: skip
        return [Pending(*(field[i] for field in fields)) for i in range(L)]

    def fold(self, i: int) -> None:
        """Ends a chunk of layer i, a micro-batch of its own, inside the open one."""
        part = slice(i, i + 1)
        peak_LE, square_LE = self._measure(part)
        torch.maximum(self.pending_peak_LE[part], peak_LE, out=self.pending_peak_LE[part])
        self.pending_square_LE[part] += square_LE
        self.folded_LE[part] = self.counts_LRC[part, :-1, 1:-1].sum(1)
        self.folded_tokens_L[part] = self.tokens_LR[part, : self.num_rows - 1].sum(1)
        self.has_folds = True

    def _measure(self, i: slice) -> tuple[Tensor, Tensor]:
        """Loads in fair shares and squares over tokens of what layers i have counted since the last fold."""
        load_LE = self.counts_LRC[i, :-1, 1:-1].sum(1)
        tokens_L = self.tokens_LR[i, : self.num_rows - 1].sum(1)
        if self.has_folds:
            load_LE = load_LE - self.folded_LE[i]
            tokens_L = tokens_L - self.folded_tokens_L[i]
        load_LE = load_LE.double()
        picks_L = tokens_L * self.fixed_k_L[i]
        if self.varies:
            picks_L = torch.where(self.fixed_k_L[i] > 0, picks_L, load_LE.sum(1))
        peak_LE = (load_LE * (self.num_experts / picks_L.clamp_min(1.0)).unsqueeze(1)).float()
        return peak_LE, load_LE.square_() / tokens_L.clamp_min(1).unsqueeze(1)

    def commit(self, i: slice) -> None:
        """The open micro-batch of layers i becomes part of the record."""
        peak_LE, square_LE = self._measure(i)
        if self.has_folds:
            peak_LE = torch.maximum(peak_LE, self.pending_peak_LE[i])
            square_LE = square_LE + self.pending_square_LE[i]
        torch.maximum(self.total_peak_LE[i], peak_LE, out=self.total_peak_LE[i])
        self.total_ints[i] += self.pending_ints[i]
        self.total_floats[i, : -self.num_experts] += self.pending_floats[i]
        self.total_floats[i, -self.num_experts :] += square_LE
        self.discard(i)

    def discard(self, i: slice) -> None:
        """Forgets the open micro-batch of layers i."""
        self.pending_ints[i].zero_()
        self.pending_floats[i].zero_()
        if self.has_folds:
            for x in (self.pending_peak_LE, self.pending_square_LE, self.folded_LE, self.folded_tokens_L):
                x[i].zero_()
            self.has_folds = i != slice(None)

    def reset(self) -> None:
        """Begins a new record."""
        for x in (self.total_ints, self.total_floats, self.total_peak_LE):
            x.zero_()
