"""`plan`: windows that cover the data's cycle, effects that match a simulation, a size that a store has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_audit.plan import plan, render
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.store import Store
from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.policy import policy_from_dict

SMALL: dict[str, Any] = {"experts": 8, "top_k": 2, "tokens_per_step": 2048}


@pytest.mark.parametrize(
    ("cycle", "steps", "length"),
    [(20, 10_000, 200), (20, 600, 200), (20, 500, 160), (20, 300, 100), (20, 250, 100), (None, 300, 100),
     (None, None, 2000), (50, None, 500)],
)  # fmt: skip
def test_window_covers_the_cycle(cycle: int | None, steps: int | None, length: int) -> None:
    made = plan(**SMALL, shard_cycle=cycle, steps=steps)
    assert made.length == length
    if cycle:
        assert made.length >= 5 * cycle
    short = steps is not None and steps // length < 3
    assert any("INSUFFICIENT" in note or "do not hold" in note for note in made.notes) is short


def test_records_stay_a_twentieth_of_a_window() -> None:
    for micro_batches in (1, 8, 64):
        made = plan(**SMALL, shard_cycle=40, steps=4000, micro_batches=micro_batches)
        assert made.record_steps <= made.length / 20
        assert made.stride % made.record_steps == 0
        assert made.flush_every == made.record_steps * micro_batches
    assert plan(**SMALL, shard_cycle=5000).flush_every == 200


def test_effects_against_simulation() -> None:
    """A perfect router shows less than the smallest detectable effect, but for alpha of the runs."""
    made = plan(experts=16, top_k=2, tokens_per_step=40, shard_cycle=1, steps=10, policy="default")
    tokens = made.window_tokens
    rng = np.random.default_rng(0)
    worst = []
    for _ in range(300):
        picks = np.argpartition(rng.random((tokens, 16)), 2, axis=1)[:, :2]
        n = np.bincount(picks.ravel(), minlength=16)
        worst.append(16 * n.max() / n.sum())
    assert np.mean(np.array(worst) > made.detectable["max_load"]) <= 0.03
    assert made.detectable["max_load"] < 3


def test_design_effect_widens_what_is_seen() -> None:
    tight, wide = (plan(**SMALL, steps=3000, design_effect=phi) for phi in (1.0, 100.0))
    assert wide.detectable["cv"] == pytest.approx(10 * tight.detectable["cv"])
    assert "design effect" in " ".join(tight.notes)
    few = plan(experts=256, top_k=8, tokens_per_step=64, steps=30, policy="default", design_effect=50)
    assert "max_load" in few.undecidable
    assert few.undecidable["max_load"] > few.window_tokens


def test_policy_length_wins() -> None:
    policy = policy_from_dict({"extends": "default", "length": 60, "stride": 20})
    made = plan(**SMALL, shard_cycle=20, steps=600, policy=policy)
    assert (made.length, made.stride, made.origin) == (60, 20, "policy")
    assert any("covers the shard cycle" in note for note in made.notes)


def test_size_of_the_store(tmp_path: Path) -> None:
    made = plan(experts=16, top_k=2, tokens_per_step=4096, layers=4, sources=3, steps=6000)
    layers = [LayerInfo(i, f"layers.{i}.moe", 16, 2) for i in range(4)]
    store = Store.create(tmp_path / "routing.db", layers, ["a", "b", "c"])
    store.begin_attempt(1)
    rng = np.random.default_rng(0)
    for r in range(made.records or 0):
        rows = {
            i: LayerRecord(
                rng.integers(0, 9999, (3, 16)), rng.integers(0, 9999, 3), rng.random((3, 16), np.float32),
                rng.random((3, 2), np.float32), 0, *(rng.random(16, np.float32) for _ in range(2)),
                rng.integers(0, 9, 16), *(rng.random(16, np.float32) for _ in range(2)), calls=1,
            )
            for i in range(4)
        }  # fmt: skip
        store.append(Record("train", r + 1, r + 1, rows))
    store.close()
    size = (tmp_path / "routing.db").stat().st_size
    assert made.store_bytes == pytest.approx(size, rel=0.25)


def test_numbers_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="exceeds"):
        plan(experts=4, top_k=5, tokens_per_step=10)
    with pytest.raises(UsageError, match="shard cycle"):
        plan(**SMALL, shard_cycle=100, steps=50)


def test_forms() -> None:
    made = plan(**SMALL, shard_cycle=20, steps=1000, sources=4)
    content = json.loads(render(made, "json"))
    assert content["length"] == made.length
    assert all(v is None or math.isfinite(v) for v in content["detectable"].values())
    assert f"flush_every={made.flush_every}" in render(made, "text")
