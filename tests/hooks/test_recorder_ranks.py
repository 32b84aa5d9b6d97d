"""Several ranks (torchrun, gloo): totals are those of one process that sees all micro-batches."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from moe_audit.run import open_run

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.fixture(scope="module")
def worker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranks_worker", WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., None]
) -> tuple[int, Path]:
    """All scenarios once, with this many ranks; the folder of the stores."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    torchrun(request.param, WORKER, folder)
    return request.param, folder


@pytest.fixture(scope="module")
def reference(worker: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The store of one process that trains on the micro-batches of so many ranks."""

    def reference(ranks: int) -> Path:
        path = tmp_path_factory.mktemp("reference") / "routing.db"
        model = worker.Model()
        with worker.Recorder.attach(
            model, path, worker.SOURCES, flush_every=2 * ranks, adapter=worker.ADAPTER
        ) as recorder:
            for step in range(1, worker.STEPS + 1):
                losses = []
                for rank in range(ranks):
                    x, sources, mask = worker.batch(rank, step)
                    with recorder.microbatch(sources=sources, mask=mask):
                        losses.append(model(x).item())
                recorder.step(step, lr=0.1, loss=sum(losses) / ranks)
        return path

    return reference


def contents(path: Path, phase: str = "train") -> dict[str, Any]:
    with open_run(path, phase) as run:
        assert [e for e in run.events if e.kind == "invariant"] == []
        facts: dict[str, Any] = {
            "sources": run.sources,
            "layers": [(i.layer, i.name) for i in run.layers],
            "records": [
                (r.first_step, r.last_step, r.microbatches, r.tokens, r.excluded_tokens, r.lr)
                for r in run.records
            ],
        }
        for layer in (info.layer for info in run.layers):
            facts[f"counts{layer}"] = run.counts(layer).tolist()
            facts[f"tokens{layer}"] = run.tokens(layer).tolist()
            facts[f"close{layer}"] = [run.prob_sum(layer), run.top1(layer)] + [
                run.stat(layer, name) for name in ("peak", "sq_over_t", "logit_mean", "logit_std")
            ]
        facts["close_loss"] = [np.array([r.loss or 0.0 for r in run.records])]
        return facts


def assert_same(got: Path, want: Path) -> None:
    mine, theirs = contents(got), contents(want)
    for key, value in theirs.items():
        if key.startswith("close"):
            for a, b in zip(mine[key], value, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=key)
        else:
            assert mine[key] == value, key


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["plain", "ddp", "ddp_first", "fsdp"])
def test_totals_equal_one_process(ranks, reference, name):
    """C61: data parallel in each form; integers are summed first."""
    number, folder = ranks
    assert_same(folder / f"{name}.db", reference(number))
    with open_run(folder / f"{name}.db") as run:
        assert [r.ranks for r in run.records] == [number] * 2


@pytest.mark.distributed
def test_expert_parallel_counts_global_ids_once(ranks):
    """The ids at the router are global; those of the dispatched rows are local and count nothing."""
    _, folder = ranks
    facts, plain = contents(folder / "ep.db"), contents(folder / "plain.db")
    assert facts["records"] == plain["records"]
    assert facts["counts0"] == plain["counts0"]


@pytest.mark.distributed
def test_one_file_a_rank(ranks, reference):
    number, folder = ranks
    whole = contents(reference(number))
    parts = [contents(folder / f"per_rank.rank{rank}.db") for rank in range(number)]
    assert not (folder / "per_rank.db").exists()
    total = sum(np.array(part["counts1"])[:, :2] for part in parts)
    assert total.tolist() == np.array(whole["counts1"])[:, :2].tolist()
    with open_run(folder / "per_rank.rank1.db") as run:
        assert (run.meta["rank"], run.meta["world_size"], run.records[0].ranks) == (1, number, 1)


@pytest.mark.distributed
def test_ranks_that_repeat_tokens_do_not_count(ranks, reference):
    number, folder = ranks
    assert_same(folder / "tp.db", reference(number // 2))


@pytest.mark.distributed
def test_pipeline_stages_fill_the_layers_of_one_store(ranks, reference):
    number, folder = ranks
    got, want = contents(folder / "pp.db"), contents(reference(number // 2))
    for key in ("layers", "records", "counts0", "counts1", "counts2", "tokens2"):
        assert got[key] == want[key], key


@pytest.mark.distributed
def test_only_one_rank_evaluates(ranks):
    _, folder = ranks
    assert sum(tokens for *_, tokens, _, _ in contents(folder / "eval.db", "eval")["records"]) == 40


@pytest.mark.distributed
def test_a_crash_does_not_hang_the_others(ranks):
    number, folder = ranks
    assert len(list(folder.glob("crashed.*"))) == number


def run_two(scenario: str, folder: Path) -> list[tuple[int, str]]:
    """Exit code and errors of both ranks, started by hand: torchrun ends all ranks with the first."""
    command = [sys.executable, str(WORKER.with_name("unequal_ranks_worker.py")), scenario]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


@pytest.mark.distributed
def test_ranks_with_unequal_microbatches_end_records_together(tmp_path):
    """Where a record is nearly full too they neither hang nor lose a pick, whatever each of them counted."""
    assert [code for code, _ in run_two("full", tmp_path)] == [0, 0]
    with open_run(tmp_path / "routing.db") as run:
        picks = run.counts(0).sum((1, 2))
        assert (int(picks.sum()), int(picks.max()) <= 500) == (12 * 10 + (12 + 6) * 30, True)
        assert len(run.records) > 2 and {r.ranks for r in run.records} == {2}
        assert [event for event in run.events if event.kind == "invariant"] == []


@pytest.mark.distributed
def test_a_rank_that_is_gone_leaves_no_record_that_looks_whole(tmp_path):
    (code, error), (lost, _) = run_two("lost", tmp_path)
    assert (code, lost) == (1, 1)
    assert "moe-audit: the record of steps 3 to 4 could not be summed" in error, error[-2000:]
    with open_run(tmp_path / "routing.db") as run:
        assert [(r.first_step, r.last_step, r.ranks) for r in run.records] == [(1, 2, 2)]
