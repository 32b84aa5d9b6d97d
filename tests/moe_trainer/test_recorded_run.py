"""What a run leaves in `routing.db`: exact counts, the same after a resume, and what the trainer knows."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_trainer.config import load_config
from moe_trainer.runs import build_stream, resume, run

TOKENS_PER_STEP, TOP_K = 3 * 2 * 16, 2


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{folder / 'routing.db'}?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()


def expert_loads(folder: Path) -> list[tuple[Any, ...]]:
    return query(
        folder,
        "SELECT first_step, last_step, layer, source, expert, count FROM expert_load "
        "ORDER BY first_step, layer, source, expert",
    )


def test_counts_are_exact_and_equal_in_two_runs(tiny: Path, tmp_path: Path) -> None:
    config = load_config(tiny)
    for name in "ab":
        run(config, tmp_path / name)
    assert expert_loads(tmp_path / "a") == expert_loads(tmp_path / "b")
    sums = query(
        tmp_path / "a",
        "SELECT first_step, last_step, layer, sum(count) FROM expert_load GROUP BY record, layer",
    )
    spans = [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12)]
    assert sums == [
        (first, last, layer, 2 * TOKENS_PER_STEP * TOP_K) for first, last in spans for layer in (0, 1)
    ]


def test_counts_by_source_are_those_of_the_text(tiny: Path, tmp_path: Path) -> None:
    config = load_config(tiny)
    run(config, tmp_path / "a")
    stream = build_stream(config)
    batches = [stream.next_batch(3) for _ in range(24)]
    sources = torch.cat([torch.from_numpy(b.sources_BS).flatten() for b in batches])
    expected = torch.bincount(sources, minlength=2) * TOP_K
    found = query(
        tmp_path / "a",
        "SELECT source, sum(count) FROM expert_load WHERE layer = 1 GROUP BY source ORDER BY source",
    )
    assert dict(found) == {"code": int(expected[0]), "prose": int(expected[1])}


def test_recording_does_not_change_training(tiny: Path, tmp_path: Path) -> None:
    with_it = run(load_config(tiny), tmp_path / "with")
    without = run(load_config(tiny, ["recorder.enabled=false"]), tmp_path / "without")
    assert not (tmp_path / "without" / "routing.db").exists()
    assert (with_it / "model.safetensors").read_bytes() == (without / "model.safetensors").read_bytes()


@pytest.mark.parametrize("killed_at", [5, 7, 11])
def test_a_resumed_run_has_the_records_of_one_that_never_stopped(
    tiny: Path, tmp_path: Path, interrupted: Any, killed_at: int
) -> None:
    run(load_config(tiny), tmp_path / "whole")
    interrupted(tiny, tmp_path / "parts", killed_at, [])
    resume(tmp_path / "parts")
    assert expert_loads(tmp_path / "parts") == expert_loads(tmp_path / "whole")
    columns = "SELECT first_step, last_step, microbatches, tokens, lr, router_lr, loss FROM record "
    live = "WHERE record IN (SELECT record FROM expert_load) ORDER BY first_step"
    assert query(tmp_path / "parts", columns + live) == query(tmp_path / "whole", columns + live)
    assert query(tmp_path / "parts", "SELECT count(*) FROM attempt") == [(2,)]


def test_learning_rates_and_facts_of_the_run_are_written(tiny: Path, tmp_path: Path) -> None:
    config = load_config(tiny, ["optim.router_lr_multiplier=0.25", "data.shard_order=round_robin"])
    run(config, tmp_path / "a")
    for lr, router_lr in query(tmp_path / "a", "SELECT lr, router_lr FROM record"):
        assert router_lr == pytest.approx(0.25 * lr) and 0 < lr <= 1e-2
    meta = dict(query(tmp_path / "a", "SELECT key, value FROM meta"))
    expected = {
        "framework": "moe_trainer",
        "config_hash": config.sha256(),
        "balancing": "local_batch loss 0.01",
        "warmup_steps": 3,
        "world_size": 1,
    }
    assert {key: meta.get(key) for key in expected} == expected
    assert meta["shard_cycle_steps"] >= 1 and meta["run_id"] and "window_length" not in meta
    run(load_config(tiny), tmp_path / "b")
    assert "shard_cycle_steps" not in dict(query(tmp_path / "b", "SELECT key, value FROM meta"))


def test_a_killed_process_is_continued_exactly(tiny: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("moe-train"))]
    more = ["train.steps=100", "checkpoint.save_every=8"]
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, "run", str(tiny), "--save-folder", str(folder), *more], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 300
        while not list(folder.glob("checkpoints/last")) and time.monotonic() < deadline:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    resumed = subprocess.run([*command, "resume", str(folder)], capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    run(load_config(tiny, more), tmp_path / "whole")
    assert expert_loads(folder) == expert_loads(tmp_path / "whole")
    weights = "checkpoints/last/model.safetensors"
    assert (folder / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
