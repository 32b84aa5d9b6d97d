"""Ranks that make different numbers of micro-batches: records end in the same step, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moe_audit.checking import check
from moe_audit.importers import import_files
from moe_audit.run import open_run

WORKER = Path(__file__).with_name("uneven_ranks_worker.py")
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., None]
) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp(f"uneven{request.param}")
    torchrun(request.param, WORKER, folder)
    return request.param, folder


def assert_all_counted(path: Path, ranks: int) -> None:
    """By hand: 4 tokens in each of r + 1 micro-batches of 5 steps, but 4 steps of the last rank."""
    expected = [4 * (r + 1) * (5 - (r == ranks - 1)) for r in range(ranks)] + [0] * (4 - ranks)
    with open_run(path) as run:
        assert run.counts(0).sum((0, 1)).tolist() == expected
        steps = [step for r in run.records for step in range(r.first_step, r.last_step + 1)]
        assert steps == [1, 2, 3, 4, 5]
        assert {r.ranks for r in run.records} == {ranks}
        assert not [event for event in run.events if event.kind == "invariant"]


def test_reduced_records_end_in_the_same_step(ranks: tuple[int, Path]) -> None:
    size, folder = ranks
    assert_all_counted(folder / "reduce.db", size)
    with open_run(folder / "reduce.db") as run:  # the busiest rank makes `size` micro-batches a step
        assert run.records[0].last_step == 4 // size


def test_files_of_ranks_are_joined_where_all_records_end(ranks: tuple[int, Path]) -> None:
    size, folder = ranks
    files = [folder / f"per_rank.rank{rank}.db" for rank in range(size)]
    import_files(files, "ranks", output=folder / "joined.db")
    assert_all_counted(folder / "joined.db", size)
    assert check(folder / "joined.db").status != "INVALID"
