"""Reading a router's output by the form of its tensors, never by their place alone.

Shape suffixes: T tokens that reached the router, K picks per token, E experts of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_audit.hooks.adapters.base import Observation, class_name
from moe_audit.thresholds.errors import UsageError

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts")
PICK_COUNTS = ("top_k", "topk", "moe_top_k", "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def number(sources: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    """The first positive integer under one of `names` on one of `sources`, in the order of the sources."""
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def expert_count(module: nn.Module, *more: Any) -> int:
    """E, from the module, its configuration, then `more`; never from a number of picks per token.

    Raises:
        UsageError: None of them says.
    """
    found = number((module, getattr(module, "config", None), *more), EXPERT_COUNTS)
    if found is None:
        raise UsageError(
            f"the number of experts of {class_name(module)} is not known: none of {', '.join(EXPERT_COUNTS)} "
            "is set on it or its configuration",
            "give the adapter num_experts",
        )
    return found


def pick_count(module: nn.Module, *more: Any) -> int | None:
    """K, from the module, its configuration, then `more`; None if none of them says."""
    return number((module, getattr(module, "config", None), *more), PICK_COUNTS)


def local(x: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a router's output, in order, tuples and dictionaries opened."""
    if isinstance(output, Tensor):
        yield local(output)
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors(value)


def is_integer(x: Tensor) -> bool:
    """Whether x holds integers (bool does not count)."""
    return not x.is_floating_point() and not x.is_complex() and x.dtype is not torch.bool


def check_indices(indices: Tensor, num_experts: int, top_k: int | None, label: str) -> Tensor:
    """`indices` as (T, K), if they can be expert ids.

    Raises:
        UsageError: Not integers, not K of them a token, or of a type that cannot hold E ids.
    """
    indices = local(indices)
    if not is_integer(indices) or indices.dim() < 2:
        raise UsageError(
            f"{label}: expert ids must be integers (..., top_k), got {tuple(indices.shape)} {indices.dtype}"
        )
    if top_k is not None and indices.shape[-1] != top_k:
        raise UsageError(f"{label}: expert ids have last dimension {indices.shape[-1]}, not {top_k} picks")
    if num_experts - 1 > torch.iinfo(indices.dtype).max:
        raise UsageError(
            f"{label}: {indices.dtype} ids cannot name {num_experts} experts", "return int16 or wider"
        )
    return indices.reshape(-1, indices.shape[-1])


def check_map(chosen: Tensor, num_experts: int, label: str) -> Tensor:
    """A routing map as (T, E), if it is one.

    Raises:
        UsageError: Not bool, or its last dimension is not E.
    """
    chosen = local(chosen)
    if chosen.dtype is not torch.bool or chosen.shape[-1] != num_experts:
        raise UsageError(
            f"{label}: a routing map must be bool (..., {num_experts}), got {tuple(chosen.shape)} "
            f"{chosen.dtype}"
        )
    return chosen.reshape(-1, num_experts)


def by_form(
    output: Any,
    num_experts: int,
    top_k: int,
    label: str,
    full_kind: Literal["logits", "probs"] | None = None,
) -> Observation:
    """The ids, weights and full scores of a router's output, told apart by type and last dimension.

    Args:
        output: What the router returned: tensors in any order.
        num_experts, top_k: E and K.
        label: Named in errors.
        full_kind: What the float tensor with last dimension E holds; None: do not read it.

    Raises:
        UsageError: No integer tensor with last dimension K, or several.
    """
    found = list(tensors(output))
    ids = [x for x in found if x.dim() >= 2 and is_integer(x) and x.shape[-1] == top_k]
    if len(ids) != 1:
        forms = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in found) or "no tensor"
        raise UsageError(
            f"{label}: {len(ids) or 'no'} integer tensor{'s' if len(ids) > 1 else ''} with last dimension "
            f"top_k = {top_k} among {forms}",
            "give Recorder.attach an adapter that says where the expert ids are",
        )
    indices_TK = check_indices(ids[0], num_experts, top_k, label)
    floats = [x.reshape(-1, x.shape[-1]) for x in found if x.dim() >= 2 and x.is_floating_point()]
    floats = [x for x in floats if x.shape[0] == indices_TK.shape[0]]
    weights = [x for x in floats if x.shape[-1] == top_k != num_experts]
    full = [x for x in floats if x.shape[-1] == num_experts != top_k]
    return Observation(
        indices_TK,
        weights[0] if len(weights) == 1 else None,
        full[0] if len(full) == 1 and full_kind else None,
        full_kind if len(full) == 1 else None,
        complete=True,
    )
