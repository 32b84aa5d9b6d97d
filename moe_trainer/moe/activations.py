"""The activations of the experts and their derivatives, on blocks whose rows are hidden units.

Shape suffixes: H hidden units, U = H or 2H rows of the first matmul's result, N tokens. Blocks are transposed
(hidden units first) so that the halves of a gated activation are contiguous.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def activate(x_NU: Tensor, activation: str, alpha: float, limit: float | None) -> Tensor:
    """The activation of an expert, (..., U) -> (..., H).

    Args:
        x_NU: Result of the first matmul. ``swiglu``: first half value, second half gate, value * silu(gate).
            ``gpt_oss_swiglu``: gate and value interleaved, (value + 1) * gate * sigmoid(alpha * gate).
            ``relu2``: relu(x)^2.
        alpha: Slope of the sigmoid of gpt_oss_swiglu.
        limit: gpt_oss_swiglu: the gate is clamped to <= limit, the value to +-limit; None: no clamp.
    """
    if activation == "relu2":
        return x_NU.relu().square()
    if activation == "swiglu":
        value_NH, gate_NH = x_NU.chunk(2, dim=-1)
        return value_NH * F.silu(gate_NH)
    gate_NH, value_NH = x_NU[..., ::2], x_NU[..., 1::2]
    if limit is not None:
        gate_NH = gate_NH.clamp(max=limit)
        value_NH = value_NH.clamp(-limit, limit)
    return (value_NH + 1) * gate_NH * torch.sigmoid(alpha * gate_NH)


def block_forward(x_UN: Tensor, out_HN: Tensor, activation: str, alpha: float, limit: float | None) -> None:
    """`activate` on a transposed block, into `out_HN`."""
    if activation == "swiglu":
        hidden = len(out_HN)
        aten.silu.out(x_UN[hidden:], out=out_HN)
        out_HN.mul_(x_UN[:hidden])
    else:
        out_HN.copy_(activate(x_UN.T, activation, alpha, limit).T)


def block_backward(
    x_UN: Tensor,
    grad_HN: Tensor,
    weights_N: Tensor,
    *,
    act_HN: Tensor,
    grad_x_UN: Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
) -> Tensor:
    """Recompute the activation and differentiate it, with the combine weights in between.

    With a = act(x) and the loss depending on weights * a: `act_HN` becomes weights * a, `grad_x_UN` the
    gradient of x; `grad_HN` (the gradient of weights * a, not yet times the weights) is overwritten.

    Returns:
        The gradient of the weights, (N,), at least fp32.
    """
    hidden = len(act_HN)
    wide = torch.promote_types(x_UN.dtype, torch.float32)
    if activation != "swiglu":
        block_forward(x_UN, act_HN, activation, alpha, limit)
        grad_N = (act_HN * grad_HN).sum(0, dtype=wide)
        act_HN.mul_(weights_N)
        grad_HN.mul_(weights_N)
        if activation == "relu2":
            torch.mul(x_UN.relu().mul_(2), grad_HN, out=grad_x_UN)
        else:
            _gpt_oss_backward(x_UN, grad_HN, grad_x_UN, alpha, limit)
        return grad_N
    value_HN, gate_HN = x_UN[:hidden], x_UN[hidden:]
    # The two halves of the result serve as scratch until they are written.
    silu_HN, scratch_HN = grad_x_UN[:hidden], grad_x_UN[hidden:]
    aten.silu.out(gate_HN, out=silu_HN)
    torch.mul(silu_HN, value_HN, out=act_HN)
    grad_N = torch.mul(act_HN, grad_HN, out=scratch_HN).sum(0, dtype=wide)
    act_HN.mul_(weights_N)
    grad_HN.mul_(weights_N)
    silu_HN.mul_(grad_HN)
    aten.silu_backward.grad_input(grad_HN.mul_(value_HN), gate_HN, grad_input=scratch_HN)
    return grad_N


def _gpt_oss_backward(
    x_UN: Tensor, grad_HN: Tensor, grad_x_UN: Tensor, alpha: float, limit: float | None
) -> None:
    gate_HN, value_HN = x_UN[::2], x_UN[1::2]
    bound = torch.inf if limit is None else limit
    inside_gate, inside_value = gate_HN <= bound, value_HN.abs() <= bound
    gate_HN, value_HN = gate_HN.clamp(max=bound), value_HN.clamp(-bound, bound)
    sigmoid_HN = torch.sigmoid(alpha * gate_HN)
    slope_HN = sigmoid_HN * (1 + alpha * gate_HN * (1 - sigmoid_HN))
    grad_x_UN[::2] = grad_HN * (value_HN + 1) * slope_HN * inside_gate
    grad_x_UN[1::2] = grad_HN * gate_HN * sigmoid_HN * inside_value
