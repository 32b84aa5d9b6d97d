"""Stores made from counts, for the tests of everything that judges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.store import Store

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run(counts [R, L, S, E], top_k, …) -> path of a store with one record per first index."""
    made = 0

    def make(
        counts: Any,
        top_k: int | None = 1,
        *,
        steps: int = 1,
        start: int = 1,
        sources: Sequence[str] | None = None,
        capacity_factor: float | None = None,
        tags: Sequence[str] = (),
        meta: Mapping[str, Any] | None = None,
        tokens: bool = False,
        extra: Callable[[int, int], Mapping[str, Any]] = lambda r, layer: {},
        record: Callable[[int], Mapping[str, Any]] = lambda r: {},
        world_size: int | None = None,
    ) -> Path:
        nonlocal made
        made += 1
        path = tmp_path / f"run{made}" / "routing.db"
        counts = np.asarray(counts)
        R, L, S, E = counts.shape
        layers = [
            LayerInfo(i, f"layers.{i}.moe", E, top_k, capacity_factor, None, tuple(tags)) for i in range(L)
        ]
        store = Store.create(path, layers, sources or [f"s{i}" for i in range(S)], meta)
        store.begin_attempt(start, world_size)
        for r in range(R):
            rows = {}
            for layer in range(L):
                fields: dict[str, Any] = {"counts_SE": counts[r, layer]}
                if tokens and top_k:
                    fields["tokens_S"] = counts[r, layer].sum(-1) // top_k
                rows[layer] = LayerRecord(**(fields | dict(extra(r, layer))))
            first = start + r * steps
            fields = {"tokens": int(counts[r, 0].sum()) // top_k} if tokens and top_k else {}
            store.append(Record("train", first, first + steps - 1, rows, **(fields | dict(record(r)))))
        store.close()
        return path

    return make
