"""What the user says about a micro-batch (sources, mask), turned into one row id per token of a router.

Rows: the named sources 0..S-1, S = unlabelled tokens, S + 1 = excluded (masked) tokens.
Shape suffixes: B sequences, S positions in (B, S); T tokens at the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from moe_audit.store import UNLABELLED
from moe_audit.thresholds.errors import UsageError

UNLABELLED_ID = -1


def row_ids(sources: Any, mask: Any, names: Sequence[str]) -> Tensor | None:
    """Row ids of one micro-batch, (B,), (B, S) or (T,); None where nothing is said about it.

    Args:
        sources: Ids (B,) or (B, S) or (T,), -1 for unlabelled; B names; or None.
        mask: True or 1 = counted token; (B, S), (T,) or (B,); or None.
        names: The recorder's sources.

    Raises:
        UsageError: an unknown name, an id out of range (of host tensors: device ids are looked at with the
            record), or shapes that do not belong together; both are named.
    """
    rows = _source_rows(sources, names)
    keep = _keep(mask)
    if keep is None:
        return rows
    if rows is None:
        return torch.where(keep, len(names), len(names) + 1)
    if rows.device != keep.device:  # the smaller move, and never to the host
        rows, keep = (
            (rows.to(keep.device), keep) if rows.device.type == "cpu" else (rows, keep.to(rows.device))
        )
    rows, keep = _same_shape(rows, keep)
    return torch.where(keep, rows, len(names) + 1)


def token_rows(rows: Tensor, num_tokens: int, layout: Literal["batch", "sequence"]) -> Tensor:
    """Row id of each of the T tokens of one router forward, (T,).

    A (B, S) table is laid out in the router's order; B ids are spread over T / B tokens each; T ids are taken
    to stand in the router's own order.

    Raises:
        UsageError: T tokens do not fit the table; both shapes are named.
    """
    fits = rows.numel() == num_tokens if rows.dim() == 2 else rows.numel() and num_tokens % rows.numel() == 0
    if not fits:
        raise UsageError(
            f"a router saw {num_tokens} tokens, but sources and mask of this micro-batch have shape"
            f" {tuple(rows.shape)}",
            "pass the ids and mask of exactly the tokens of this forward",
        )
    if rows.dim() == 2:
        return (rows.t() if layout == "sequence" else rows).reshape(-1)
    repeats = num_tokens // rows.numel()
    return (
        rows.repeat(repeats)
        if layout == "sequence"
        else rows.repeat_interleave(repeats, output_size=num_tokens)
    )


def _source_rows(sources: Any, names: Sequence[str]) -> Tensor | None:
    """Ids as rows, in memory of their own: -1 becomes the row behind the named sources, wrong ids on a device
    stay out of range."""
    if sources is None:
        return None
    if isinstance(sources, str):
        raise UsageError(f"sources={sources!r} is one name", "pass one name per sequence, or ids")
    if not isinstance(sources, Tensor):
        table = np.asarray(sources)
        if table.dtype.kind in "UO":
            if table.ndim != 1:
                raise UsageError(
                    f"source names have shape {table.shape}", "pass one a sequence, or ids (B, S)"
                )
            numbers = [_id_of(name, names) for name in table.tolist()]
            sources = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        else:
            sources = _tensor(table)
    if sources.is_floating_point() or sources.is_complex() or sources.dtype == torch.bool:
        raise UsageError(f"source ids are {sources.dtype}", "pass integers, or names")
    if sources.dim() not in (1, 2) or sources.numel() == 0:
        raise UsageError(f"source ids have shape {tuple(sources.shape)}", "pass (B,), (B, S) or (T,)")
    ids: Tensor = sources.detach().to(torch.int64)
    if ids.device.type == "cpu":  # on the host a look costs nothing; device ids are looked at with the record
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < UNLABELLED_ID or high >= len(names):
            wrong = low if low < UNLABELLED_ID else high
            raise UsageError(
                f"source id {wrong} is outside -1 to {len(names) - 1}",
                f"the recorder has {len(names)} sources; -1 means unlabelled",
            )
        if low >= 0:
            return ids.clone()
    else:
        ids = torch.where(ids >= len(names), len(names) + 2, ids)  # not into the row of excluded tokens
    return torch.where(ids == UNLABELLED_ID, len(names), ids)


def _tensor(table: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    """A copy: torch takes no reversed arrays, and no byte order but its own."""
    return torch.from_numpy(np.array(table, table.dtype.newbyteorder("="), order="C"))


def _id_of(name: Any, names: Sequence[str]) -> int:
    if name in names:
        return list(names).index(name)
    if name == UNLABELLED:
        return UNLABELLED_ID
    raise UsageError(
        f"{name!r} is not a source of this recorder", f"its sources are {', '.join(names) or 'none'}"
    )


def _keep(mask: Any) -> Tensor | None:
    if mask is None:
        return None
    keep: Tensor = mask.detach() if isinstance(mask, Tensor) else _tensor(np.asarray(mask))
    if keep.dim() not in (1, 2) or keep.numel() == 0:
        raise UsageError(
            f"the mask has shape {tuple(keep.shape)}", "pass (B, S) or (T,), True or 1 where a token counts"
        )
    if keep.is_floating_point() and keep.device.type == "cpu" and bool((keep < 0).any()):
        raise UsageError(
            "the mask is additive (it has negative values)", "pass True or 1 where a token counts"
        )
    return keep if keep.dtype == torch.bool else keep > 0


def _same_shape(ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and mask on one shape: (B,) ids spread over the mask's positions, flat ones take the table's."""
    table = next((x.shape for x in (ids, keep) if x.dim() == 2), None)
    if table is None:
        n = ids.numel()
        if keep.numel() == n:
            return ids, keep
        if keep.numel() % n == 0:
            keep = keep.view(n, -1)
            return ids.unsqueeze(1).expand(keep.shape), keep
    else:
        B, S = table
        spread = []
        for x in (ids, keep):
            if x.shape == table:
                spread.append(x)
            elif x.dim() == 1 and x.numel() == B * S:
                spread.append(x.view(B, S))
            elif x.dim() == 1 and x.numel() == B:
                spread.append(x.unsqueeze(1).expand(B, S))
        if len(spread) == 2:
            return spread[0], spread[1]
    raise UsageError(
        f"source ids of shape {tuple(ids.shape)} do not belong to a mask of shape {tuple(keep.shape)}",
        "pass ids (B,) or (B, S) with a mask (B, S), or both of T tokens",
    )
