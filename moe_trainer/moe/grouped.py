"""Grouped matmul: each expert's rows times its own matrix, by one of three backends.

Shape suffixes: E experts, N rows in expert order, D inner width, H outer width. `offs_E` holds the int32 end
of each expert's rows and ends at N: `F.grouped_mm` leaves rows beyond the last offset uninitialised.

- ``torch``: `torch.nn.functional.grouped_mm`. Rows must be multiples of 16 bytes.
- ``grouped_gemm``: the CUDA package of that name (extra `grouped-gemm`), for devices that torch's kernel
  does not cover.
- ``loop``: one matmul per expert, for every dtype and width; on a CPU the layer fuses it with gather and
  scatter (see `moe_trainer.moe.blocked`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_audit.thresholds.errors import UsageError

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_mm(x_ND: Tensor, w_EDH: Tensor, offs_E: Tensor) -> Tensor:
    """Grouped matmul of torch."""
    if torch.compiler.is_compiling() and x_ND.dtype != torch.bfloat16:
        y_NH: Tensor = traceable_grouped_mm(x_ND, w_EDH, offs_E)
    else:
        y_NH = _ContiguousGradient.apply(F.grouped_mm(x_ND, w_EDH, offs=offs_E))  # type: ignore[no-untyped-call]
    return y_NH


class _ContiguousGradient(torch.autograd.Function):
    """Identity. The backward pass of torch's kernel refuses expanded gradients, such as those of a sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _contiguous(grad)


def _contiguous(x: Tensor) -> Tensor:
    """Rows with strides of their own, also where there are none."""
    return x if x.numel() and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("moe_trainer::grouped_mm", mutates_args=())
def traceable_grouped_mm(a: Tensor, b: Tensor, offs_E: Tensor) -> Tensor:
    """`F.grouped_mm`, whose own description for `torch.compile` knows bf16 only, though its kernels do not.

    (N, D) times (E, D, H), or (D, N) times (N, H), which gives each expert's (D, H).
    """
    return F.grouped_mm(a, b, offs=offs_E)


@traceable_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, offs_E: Tensor) -> Tensor:
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (offs_E.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_ND, w_EDH, offs_E = ctx.saved_tensors
    grad_NH = _contiguous(grad_NH)
    needs_x, needs_w, _ = ctx.needs_input_grad
    grad_x = traceable_grouped_mm(grad_NH, w_EDH.transpose(1, 2), offs_E) if needs_x else None
    grad_w = traceable_grouped_mm(x_ND.T, grad_NH, offs_E) if needs_w else None
    return grad_x, grad_w, None


traceable_grouped_mm.register_autograd(_backward, setup_context=_save)


def grouped_gemm_mm(x_ND: Tensor, w_EDH: Tensor, offs_E: Tensor) -> Tensor:
    """Grouped matmul of the package grouped_gemm, which returns bf16 whatever went in."""
    try:
        from grouped_gemm import ops
    except ImportError:
        raise UsageError(
            "backend = 'grouped_gemm': the package is not installed", "pip install 'moe-audit[grouped-gemm]'"
        ) from None
    sizes_E = offs_E.diff(prepend=offs_E.new_zeros(1)).long().cpu()
    y_NH: Tensor = ops.gmm(x_ND, w_EDH.contiguous(), sizes_E)
    return y_NH.to(x_ND.dtype)


def loop_mm(x_ND: Tensor, w_EDH: Tensor, offs_E: Tensor) -> Tensor:
    """One matmul per expert; unbinding first keeps the backward pass linear in E."""
    offs = offs_E.tolist()
    sizes = [end - start for start, end in zip([0, *offs], offs, strict=False)]
    groups = zip(x_ND.split_with_sizes(sizes), w_EDH.unbind(0), strict=True)
    return torch.cat([x_nD @ w_DH for x_nD, w_DH in groups])


BACKENDS: dict[str, GroupedMatmul] = {
    "torch": torch_mm,
    "grouped_gemm": grouped_gemm_mm,
    "loop": loop_mm,
}


# Below this product of rows, width and hidden units the CPU loop's calls cost more than they save (measured).
SMALL = 2**27


def choose(device_type: str, dtype: torch.dtype, rows: int, width: int, hidden: int) -> str:
    """The backend for ``auto``, as measured: ``torch`` on CUDA and for little work on a CPU, else ``loop``.

    ``loop`` also where torch's grouped matmul has no kernel: widths that are no multiples of 16 bytes,
    float64, and fp32 under `torch.compile`.
    """
    if device_type != "cpu":
        return "torch"
    aligned = width * dtype.itemsize % 16 == 0 and hidden * dtype.itemsize % 16 == 0
    covered = dtype in (torch.float32, torch.bfloat16, torch.float16) and aligned
    if not covered or torch.compiler.is_compiling():
        return "loop"
    return "torch" if rows * width * hidden < SMALL else "loop"


def expand_rows(bias_EH: Tensor, offs_E: Tensor, rows: int) -> Tensor:
    """Each row's bias, (N, H)."""
    sizes_E = offs_E.diff(prepend=offs_E.new_zeros(1))
    return bias_EH.repeat_interleave(sizes_E, dim=0, output_size=rows)
