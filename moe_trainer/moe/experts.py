"""Experts as stacked weights, applied to rows that are sorted by expert.

Shape suffixes: E experts, N rows, D input width, H hidden units, U = H or 2H columns of the first matmul.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_trainer.moe import grouped
from moe_trainer.moe.activations import activate
from moe_trainer.moe.blocked import blocked_forward
from moe_trainer.moe.config import UP_FACTOR
from moe_trainer.moe.router import DTYPES


class Experts(nn.Module):
    """E feed-forward experts: y = act(x W_up_gate[e]^T + b) W_down[e] + b.

    Args:
        num_experts, width, hidden_size: E, D, H.
        activation, alpha, limit: See `MoEConfig`.
        bias: Biases on both matmuls.
        backend: See `moe_trainer.moe.grouped`.

    Attributes:
        matmul: The seam for other precisions: a function (x_ND, w_EDH, offs_E) -> y_NH that replaces the
            backend's grouped matmul; None: the backend's.
        w_up_gate: (E, U, D); for swiglu the first half of U is the value, the second the gate; for
            gpt_oss_swiglu they are interleaved, the gate first.
        w_down: (E, H, D).
        b_up_gate, b_down: (E, U) and (E, D), or None.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        hidden_size: int,
        *,
        activation: str = "swiglu",
        alpha: float = 1.702,
        limit: float | None = None,
        bias: bool = False,
        backend: str = "auto",
        dtype: str = "float32",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.alpha, self.limit = activation, alpha, limit
        self.num_experts = num_experts
        self.backend = backend
        self.matmul: grouped.GroupedMatmul | None = None
        up = UP_FACTOR[activation] * hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=DTYPES[dtype], device=device))

        self.w_up_gate = parameter(num_experts, up, width)
        self.w_down = parameter(num_experts, hidden_size, width)
        self.b_up_gate = parameter(num_experts, up) if bias else None
        self.b_down = parameter(num_experts, width) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Truncated normal weights (cut at 3 std), zero biases."""
        for weight in (self.w_up_gate, self.w_down):
            nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std, generator=generator)
        for bias in (self.b_up_gate, self.b_down):
            if bias is not None:
                bias.zero_()

    def forward(self, x_ND: Tensor, offs_E: Tensor) -> Tensor:
        """Apply expert e to rows offs[e-1]:offs[e]; every row belongs to an expert."""
        matmul = self.matmul or (grouped.BACKENDS[self._backend(x_ND, len(x_ND))])
        dtype = _compute_dtype(x_ND)
        w_up_gate, w_down = self.w_up_gate.to(dtype), self.w_down.to(dtype)
        up_NU = matmul(x_ND.to(dtype), w_up_gate.transpose(1, 2), offs_E)
        if self.b_up_gate is not None:
            up_NU = up_NU + grouped.expand_rows(self.b_up_gate.to(dtype), offs_E, len(x_ND))
        act_NH = activate(up_NU, self.activation, self.alpha, self.limit)
        y_ND = matmul(act_NH, w_down, offs_E)
        if self.b_down is not None:
            y_ND = y_ND + grouped.expand_rows(self.b_down.to(dtype), offs_E, len(x_ND))
        return y_ND

    def combine(self, x_TD: Tensor, weights_TK: Tensor, slots_N: Tensor, offs_E: Tensor) -> Tensor:
        """Each token's weighted sum of the experts it was dispatched to, in the dtype of x.

        Args:
            x_TD: Tokens.
            weights_TK: Weight of each slot.
            slots_N: Slots t*K + j in expert order; a slot that is left out contributes nothing.
            offs_E: int32 end of each expert's slots.
        """
        if self.matmul is None and self._backend(x_TD, len(slots_N)) == "loop":
            dtype = _compute_dtype(x_TD)
            params = (self.w_up_gate, self.w_down, self.b_up_gate, self.b_down)
            cast = [None if p is None else p.to(dtype) for p in params]
            differentiable = (x_TD, weights_TK, *self.parameters())
            keep = torch.is_grad_enabled() and any(value.requires_grad for value in differentiable)
            settings = self.activation, self.alpha, self.limit, keep
            x, weights = x_TD.to(dtype).contiguous(), weights_TK.contiguous()
            y_TD, *_ = blocked_forward(x, weights, slots_N, offs_E, *cast, *settings)
            out: Tensor = y_TD.to(x_TD.dtype)
            return out
        rows_N = slots_N // weights_TK.shape[-1]
        y_ND = self(x_TD.index_select(0, rows_N), offs_E)
        y_ND = y_ND * weights_TK.reshape(-1, 1).index_select(0, slots_N).to(y_ND.dtype)
        return torch.zeros_like(x_TD).index_add(0, rows_N, y_ND.to(x_TD.dtype))

    def _backend(self, x: Tensor, rows: int) -> str:
        if self.backend != "auto":
            return self.backend
        hidden, width = self.w_down.shape[1:]
        return grouped.choose(x.device.type, _compute_dtype(x), rows, width, hidden)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The autocast dtype where autocast is on (grouped matmuls are not covered by it), else that of x."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
