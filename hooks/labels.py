"""The rows of the tokens of the open micro-batch, and what follows from them for every layer.

Shape suffixes: T tokens that reached the router, E experts, R rows: the named sources, then unlabelled
tokens, then excluded (masked) tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_audit.hooks.context import token_rows

# Cells behind the tokens per row: calls, those that brought probabilities, logits, drops; wrong source ids.
TALLY = 5

Key = tuple[torch.device, int, Literal["batch", "sequence"], int, int]


def call_tallies(num_rows: int, device: torch.device) -> Tensor:
    """int64 [8, R + TALLY]: one call that brings picks; in row 4 a + 2 b + c also probabilities (a), logits
    (b) and drops (c)."""
    tally_8X = torch.zeros(8, num_rows + TALLY, dtype=torch.int64)
    tally_8X[:, num_rows] = 1
    for bit in range(3):
        tally_8X[:, num_rows + 1 + bit] = torch.arange(8) >> (2 - bit) & 1
    return tally_8X.to(device)


@dataclass(eq=False)
class Labels:
    """The rows of the T tokens of one router forward, and what follows from them for layers of E experts.

    Attributes:
        row_T: int64 row of each token, R - 1 where it is masked.
        first_T1: int64 place of expert 0 in the flat counts of the token's row.
        onehot_RT: float32, 1 where token t is in row r: sums rows by a matrix product, in a fixed order and
            without atomics. None on the host, where adding row by row takes a ninth of the time.
        counted_T: float32, 1 where the token is not masked.
        tally_8X: int64 [8, R + TALLY]: tokens per row and wrong source ids, added to `call_tallies`.
    """

    row_T: Tensor
    first_T1: Tensor
    onehot_RT: Tensor | None
    counted_T: Tensor
    tally_8X: Tensor

    @classmethod
    def of(cls, row_T: Tensor, call_8X: Tensor, num_experts: int, checked: bool = False) -> Labels:
        """From row ids; those outside [0, R) are wrong source ids: unlabelled, and told in the tally.

        Args:
            call_8X: `call_tallies`.
            checked: There are no wrong ones, as in ids that came from the host.
        """
        device, num_rows = row_T.device, call_8X.shape[1] - TALLY
        if checked and device.type == "cpu":
            tally_X = torch.bincount(row_T, minlength=num_rows + TALLY)
        else:
            tally_X = torch.zeros(num_rows + TALLY, dtype=torch.int64, device=device)
            bad_T = row_T.clamp(0, num_rows - 1) != row_T
            row_T = row_T.masked_fill(bad_T, num_rows - 2)
            tally_X[-1] = bad_T.sum()
            tally_X.scatter_add_(0, row_T, torch.ones_like(row_T))
        onehot_RT = None
        if device.type != "cpu":
            onehot_RT = torch.zeros(num_rows, len(row_T), dtype=torch.float32, device=device)
            onehot_RT.scatter_(0, row_T.unsqueeze(0), 1.0)
        first_T1 = row_T.mul(num_experts + 2).add_(1).unsqueeze(1)
        return cls(row_T, first_T1, onehot_RT, (row_T != num_rows - 1).float(), call_8X + tally_X)

    def tally(self, probabilities: bool, logits: bool, drops: bool) -> Tensor:
        """int64 [R + TALLY]: what a call that brings these adds."""
        return self.tally_8X[4 * probabilities + 2 * logits + drops]

    def copy_(self, other: Labels) -> None:
        """Takes over other labels of the same size in place: a captured CUDA graph reads these addresses."""
        for mine, new in zip(vars(self).values(), vars(other).values(), strict=True):
            if mine is not None:
                mine.copy_(new)


class LabelCache:
    """Labels of the open micro-batch for each size and order of tokens that routers see.

    Args:
        num_rows: Sources, and one row each for unlabelled and excluded tokens.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.rows: Tensor | None = None
        self.chunks = 1
        self._labels: dict[Key, Labels] = {}
        # What CUDA graphs read is kept, and renewed in place as soon as new rows are known.
        self._captured: dict[Key, Labels] = {}
        self._calls: dict[torch.device, Tensor] = {}

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs count: on replay no Python of ours runs."""
        return bool(self._captured)

    def set_rows(self, rows: Tensor | None, chunks: int = 1) -> None:
        """A new micro-batch: what was known about tokens is stale."""
        self.rows, self.chunks = rows, chunks
        for key, labels in self._captured.items():
            labels.copy_(self._make(key))
        self._labels = dict(self._captured)

    def get(
        self,
        device: torch.device,
        num_tokens: int,
        layout: Literal["batch", "sequence"],
        chunk: int,
        num_experts: int,
    ) -> Labels:
        """The labels of `num_tokens` tokens of the given chunk of the micro-batch."""
        key = (device, num_tokens, layout, chunk, num_experts)
        labels = self._labels.get(key)
        if labels is None:
            labels = self._labels[key] = self._make(key)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured[key] = labels
        return labels

    def _make(self, key: Key) -> Labels:
        device, num_tokens, layout, chunk, num_experts = key
        if device not in self._calls:
            self._calls[device] = call_tallies(self.num_rows, device)
        if self.rows is None:
            rows_T = torch.full((num_tokens,), self.num_rows - 2, dtype=torch.int64, device=device)
        else:
            rows = self.rows if self.chunks == 1 else self.rows.tensor_split(self.chunks)[chunk]
            rows_T = token_rows(rows.to(device, non_blocking=True), num_tokens, layout)
        return Labels.of(rows_T, self._calls[device], num_experts, self._is_checked())

    def _is_checked(self) -> bool:
        """Whether ids were looked at when the micro-batch was opened, as those on the host are."""
        return self.rows is None or self.rows.device.type == "cpu"
