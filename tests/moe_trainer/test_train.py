"""The training loop: repeatable, resumable, and it stops clearly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_audit.thresholds.errors import UsageError
from moe_trainer import train
from moe_trainer.config import load_config
from moe_trainer.facts import balancing_rule
from moe_trainer.runs import build_stream, resume, run
from moe_trainer.train import DivergedError

NO_RECORDER = "recorder.enabled=false"


def loss_lines(folder: Path) -> list[str]:
    """The log's steps and losses, without times and pace."""
    lines = (folder / "train.log").read_text().splitlines()
    return [" ".join(line.split()[2:6]) for line in lines if "  loss " in line]


def assert_equal_state(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_state(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_equal_state(x, y)
    else:
        assert a == b


def assert_equal_checkpoints(a: Path, b: Path) -> None:
    assert a.name == b.name
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert_equal_state(torch.load(a / "state.pt"), torch.load(b / "state.pt"))


def test_two_runs_are_equal_bit_for_bit_and_another_seed_is_not(tiny: Path, tmp_path: Path) -> None:
    config = load_config(tiny, [NO_RECORDER])
    first, second = run(config, tmp_path / "a"), run(config, tmp_path / "b")
    assert_equal_checkpoints(first, second)
    assert loss_lines(tmp_path / "a") == loss_lines(tmp_path / "b") != []
    other = run(load_config(tiny, [NO_RECORDER, "train.seed=2"]), tmp_path / "c")
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


@pytest.mark.parametrize("at", [4, 7])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.moe.router.bias_gamma=1e-2", "model.moe.router.gating_function=sigmoid"],
        ["data.shard_order=round_robin", "data.shuffle=shard", "data.shard_tokens=100"],
    ],
    ids=["plain", "score_bias", "shards"],
)
def test_a_resumed_run_equals_one_that_never_stopped(
    tiny: Path, tmp_path: Path, interrupted: Any, at: int, overrides: list[str]
) -> None:
    overrides = [NO_RECORDER, *overrides]
    whole = run(load_config(tiny, overrides), tmp_path / "whole")
    interrupted(tiny, tmp_path / "parts", at + 1, overrides)
    resumed = resume(tmp_path / "parts")
    assert_equal_checkpoints(whole, resumed)
    assert loss_lines(tmp_path / "parts")[-1] == loss_lines(tmp_path / "whole")[-1]


def test_micro_batches_do_not_change_the_step(tiny: Path, tmp_path: Path) -> None:
    """Accumulating two halves gives the gradients of the whole (no jitter; the balancing loss is local)."""
    plain = [
        NO_RECORDER,
        "model.moe.router.jitter_eps=none",
        "model.moe.lb_loss_weight=none",
        "model.moe.z_loss_weight=0.1",
        "model.moe.orth_loss_weight=10",
    ]
    gradients = []
    for sizes in (["train.micro_batch_sequences=3", "train.accumulation=2"],
                  ["train.micro_batch_sequences=6", "train.accumulation=1"]):  # fmt: skip
        config = load_config(tiny, [*plain, *sizes])
        folder = tmp_path / str(config.train.accumulation)
        folder.mkdir()
        trainer = train.Trainer(config, folder, build_stream(config))
        trainer.forward_backward()
        gradients.append({n: p.grad for n, p in trainer.model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


def test_gradient_norm_is_clipped_over_all_parameters(tiny: Path, tmp_path: Path) -> None:
    config = load_config(tiny, [NO_RECORDER, "optim.max_grad_norm=1e-3"])
    trainer = train.Trainer(config, tmp_path, build_stream(config))
    norms = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.nn.utils.get_total_norm(p.grad for p in trainer.model.parameters()))
    )
    trainer.update(trainer.forward_backward())
    assert float(norms[0]) == pytest.approx(1e-3, rel=1e-3)


def test_loss_goes_down_on_text_with_a_pattern(tiny: Path, tmp_path: Path) -> None:
    run(load_config(tiny, [NO_RECORDER, "train.steps=40"]), tmp_path / "run")
    losses = [float(line.split()[3]) for line in loss_lines(tmp_path / "run")]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_weights_are_spoiled(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    losses = train.Trainer.losses

    def spoiled(self: train.Trainer, batch: Any) -> Any:
        loss, router_loss = losses(self, batch)
        return (loss * bad if self.step == 5 else loss), router_loss

    monkeypatch.setattr(train.Trainer, "losses", spoiled)
    with pytest.raises(DivergedError, match=r"stopped at step 6: the loss is (nan|inf)"):
        run(load_config(tiny, [NO_RECORDER]), tmp_path / "run")
    assert "stopped: training stopped at step 6" in (tmp_path / "run" / "train.log").read_text()
    checkpoints = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == ["best", "last", "step_00000004"]


def test_run_folder_holds_what_it_should(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = load_config(tiny, [NO_RECORDER, "checkpoint.keep=2"])
    last = run(config, folder)
    assert load_config(folder / "config.toml") == config
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert names == ["best", "last", "step_00000008", "step_00000012"]
    assert (folder / "checkpoints" / "last").resolve() == last.resolve()
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    with pytest.raises(UsageError, match=r"holds a run already.*--overwrite"):
        run(config, folder)
    (folder / "notes.txt").write_text("mine")
    run(config, folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "mine"


def test_overwrite_keeps_the_old_run_when_the_new_one_cannot_start(tiny: Path, tmp_path: Path) -> None:
    run(load_config(tiny, [NO_RECORDER]), tmp_path / "run")
    with pytest.raises(UsageError, match="no such folder"):
        run(load_config(tiny, ["data.sources.code=absent"]), tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.pt").is_file()


def test_resume_says_what_is_wrong(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UsageError, match="is not a run folder"):
        resume(folder)
    run(load_config(tiny, [NO_RECORDER]), folder)
    with pytest.raises(UsageError, match=r"complete: 12 of 12 steps.*train\.steps=N"):
        resume(folder)
    with pytest.raises(UsageError, match=r"does not fit the model: layers\.0\.moe"):
        resume(folder, ("train.steps=16", "model.moe.hidden_size=8"))
    with pytest.raises(UsageError, match="text differs"):
        resume(folder, ("train.steps=16", "data.max_document_bytes=20"))
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UsageError, match="no checkpoint to resume from"):
        resume(folder)


def test_resume_takes_overrides_and_writes_them_down(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(load_config(tiny, [NO_RECORDER]), folder)
    last = resume(folder, ("train.steps=16", "optim.lr=1e-3", "optim.min_lr_ratio=1"))
    assert last.name == "step_00000016"
    assert load_config(folder / "config.toml").optim.lr == 1e-3
    saved = torch.load(last / "state.pt")["optimizer"]["param_groups"]
    assert {group["lr"] for group in saved} == {1e-3}


def test_a_save_that_was_cut_off_leaves_the_last_one_whole(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny, [NO_RECORDER])
    whole = run(config, tmp_path / "whole")
    saved: list[int] = []
    torch_save = torch.save

    def failing(state: Any, path: Path) -> None:
        saved.append(state["step"])
        if len(saved) == 2:
            path.write_bytes(b"half")
            raise OSError("No space left on device")
        torch_save(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", failing)
        with pytest.raises(OSError):
            run(config, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "last").resolve().name == "step_00000004"
    assert_equal_checkpoints(whole, resume(tmp_path / "run"))


def test_balancing_rule_in_words(tiny: Path) -> None:
    assert balancing_rule(load_config(tiny)) == "local_batch loss 0.01"
    both = ["model.moe.router.bias_gamma=1e-3", "model.moe.lb_loss_weight=0.5"]
    assert balancing_rule(load_config(tiny, both)) == "local_batch loss 0.5 + score bias 0.001"
    assert balancing_rule(load_config(tiny, ["model.moe.lb_loss_weight=0"])) == "none"
