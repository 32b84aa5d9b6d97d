"""The gate on several ranks (torchrun, gloo): one decision, all act in the same step, none waits for ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_audit.run import open_run

WORKER = Path(__file__).with_name("gate_ranks_worker.py")
STEPS, COOLDOWN = 40, 8  # as there
SCHEDULE = [0.5 + 0.5 * step / STEPS for step in range(STEPS)]

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=[2, 4])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., None]
) -> Path:
    """All scenarios once, with this many ranks."""
    folder = tmp_path_factory.mktemp(f"gate_ranks{request.param}")
    torchrun(request.param, WORKER, folder)
    return folder


def told(folder: Path, name: str) -> dict[str, Any]:
    """What all ranks told alike."""
    of_rank = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.?.json"))]
    assert len(of_rank) in (2, 4) and all(told == of_rank[0] for told in of_rank)
    first: dict[str, Any] = of_rank[0]
    return first


def events(path: Path, kind: str) -> list[int]:
    with open_run(path) as run:
        return [event.step or 0 for event in run.events if event.kind == kind]


@pytest.mark.parametrize("name", ["all", "without_first", "without_last"])
def test_all_ranks_act_in_the_step_of_the_event(folder: Path, name: str) -> None:
    out = told(folder, name)
    begins, returns = (events(folder / f"{name}.db", kind) for kind in ("lr_action", "lr_return"))
    assert begins and 9 < begins[0] <= 20 and len(returns) in (len(begins), len(begins) - 1)
    acted = {s for begin in begins for s in range(begin, begin + COOLDOWN)}
    changed = {s for s in range(STEPS) if out["rates"][s] != pytest.approx(SCHEDULE[s])}
    assert changed <= acted and (name == "without_first" or changed == acted & set(range(STEPS)))
    assert events(folder / f"{name}.db", "routing_failed")[0] == begins[0]
    if name == "without_last":  # zero_router
        assert all(
            out["weights"][s] == out["weights"][begins[0] - 1] for s in range(begins[0], begins[0] + 8)
        )


def test_all_ranks_pause_in_the_same_step(folder: Path) -> None:
    assert events(folder / "pause.db", "pause_requested") == [len(told(folder, "pause")["rates"])]
