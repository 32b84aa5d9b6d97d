"""The training gate in the trainer: a run that starves its experts is held, told of, and left by `last`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_audit.run import Run, open_run
from moe_audit.thresholds.errors import UsageError
from moe_trainer.config import TrainConfig, load_config
from moe_trainer.runs import find_checkpoint, resume, run

SICK = (
    "model.moe.lb_loss_weight=none",
    "optim.router_lr_multiplier=30",
    "train.steps=40",
    "train.accumulation=1",
    "recorder.flush_every=2",
    "checkpoint.save_every=10",
    "checkpoint.keep=9",
    "gate.check_every=4",
    "gate.cooldown=8",
)


@pytest.fixture
def sick(tiny: Path, tmp_path: Path) -> TrainConfig:
    """Routers without balance and far too fast, under a policy strict enough for some hundred tokens."""
    policy = tmp_path / "policy.toml"
    policy.write_text(
        'extends = "default"\nlength = 4\nstride = 2\nnoise_aware = false\n[gates.max_load]\nfail = 1.3\n'
    )
    return load_config(tiny, [*SICK, f"gate.policy={policy}", "gate.action=hold"])


def rates(run: Run) -> dict[int, float | None]:
    """First step of each record -> the learning rate it began with."""
    return {r.first_step: r.lr for r in run.records}


def test_a_sick_run_is_held_told_of_and_left_by_last(sick: TrainConfig, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(sick, folder)
    with open_run(folder) as stored:
        events = [e for e in stored.events if e.kind.startswith("lr_")]
        lr = rates(stored)
    begins = [e.step for e in events if e.kind == "lr_action"]
    ends = [e.step for e in events if e.kind == "lr_return"]
    assert begins and ends[: len(begins)] == [b + 8 for b in begins][: len(ends)]
    held = [value for step, value in lr.items() if begins[0] < step <= begins[0] + 8]
    assert len(set(held)) == 1 or held == sorted(held, reverse=True)
    log = (folder / "train.log").read_text()
    assert f"step {begins[0]}: training gate: routing FAIL, hold to step {begins[0] + 8}" in log
    assert "checked, FAIL: routing is not acceptable" in log
    assert "routing FAIL" in log and list((folder / "checks").glob("*.json"))
    saved = sorted((folder / "checkpoints").glob("step_*"))
    standings = {int(c.name[5:]): json.loads((c / "checkpoint.json").read_text()) for c in saved}
    failed = {step for step, standing in standings.items() if standing["routing"] == "FAIL"}
    assert failed
    for checkpoint in saved:
        verdict = json.loads((checkpoint / "routing.json").read_text())
        assert (verdict["status"] == "FAIL") == (int(checkpoint.name[5:]) in failed)
    for link in ("last", "best"):
        target = int((folder / "checkpoints" / link).resolve().name[5:])
        assert target not in failed or len(failed) == len(standings)


def test_a_resume_inside_a_freeze_keeps_it(sick: TrainConfig, tmp_path: Path) -> None:
    """The same steps at the same rates as the run that was never stopped, weights and all."""
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    run(sick, whole)
    run(sick, halved)
    resume(halved, (), step=20)
    with open_run(whole) as a, open_run(halved) as b:
        assert rates(a) == rates(b)
        assert [e.step for e in a.events if e.kind == "lr_action"]
    weights = [(f / "checkpoints/step_00000040/model.safetensors").read_bytes() for f in (whole, halved)]
    assert weights[0] == weights[1]


def test_pause_saves_and_stops(sick: TrainConfig, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = sick.model_copy(update={"gate": sick.gate.model_copy(update={"action": "pause"})})
    checkpoint = run(config, folder)
    assert int(checkpoint.name[5:]) < 40
    assert "paused by the training gate" in (folder / "train.log").read_text()


def test_a_checkpoint_is_named_or_refused(sick: TrainConfig, tmp_path: Path) -> None:
    run(sick, tmp_path / "run")
    assert find_checkpoint(tmp_path / "run", 20).name == "step_00000020"
    with pytest.raises(UsageError, match=r"no checkpoint of step 21.*10, 20, 30, 40"):
        find_checkpoint(tmp_path / "run", 21)


def test_a_gate_needs_the_recorder(tiny: Path) -> None:
    with pytest.raises(UsageError, match=r"gate.action.*recorder.enabled"):
        load_config(tiny, ["gate.action=hold", "recorder.enabled=false"])
