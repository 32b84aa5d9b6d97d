"""Callbacks under what real training loops do around a step: packing, decoding, saving, resuming."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_audit.run import open_run
from moe_audit.thresholds.errors import UsageError

pytestmark = pytest.mark.parity

ROWS = [
    {"input_ids": list(range(3, 7 + i % 5)), "source": "code" if i % 3 == 0 else "prose"} for i in range(16)
]
TOKENS = {name: sum(len(r["input_ids"]) for r in ROWS if r["source"] == name) for name in ("code", "prose")}


def pad_left(rows: list[dict[str, Any]]) -> dict[str, Any]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row["input_ids"]) :] = torch.as_tensor(row["input_ids"])
        mask[i, width - len(row["input_ids"]) :] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture
def make_trainer(mixtral: Callable[[], Any], trainer_args: Callable[..., Any]) -> Callable[..., Any]:
    """A trainer on `rows`, its arguments changed as given."""

    def make(folder: Path, collate: Any = pad_left, rows: Any = ROWS, **changed: Any) -> Any:
        model = mixtral()
        from transformers import Trainer

        rows = [{**row, "labels": row["input_ids"]} for row in rows]
        return Trainer(
            model=model, args=trainer_args(folder, **changed), train_dataset=rows, data_collator=collate
        )

    return make


def audit(trainer: Any, folder: Path, **options: Any) -> Any:
    from moe_audit.hooks.transformers_callback import audit_trainer

    return audit_trainer(trainer, folder / "routing.db", ["code", "prose"], flush_every=2, **options)


def assert_every_token_once(folder: Path) -> None:
    run = open_run(folder / "routing.db")
    for layer in run.layers:
        assert run.counts(layer.layer).sum((0, 2))[:2].tolist() == [2 * n for n in TOKENS.values()]


def test_rows_that_the_collator_packs_keep_their_sources(tmp_path: Path, make_trainer: Any) -> None:
    """Sequences of unequal length one after the other in one row; T may be a multiple of the rows."""
    transformers = pytest.importorskip("transformers")
    trainer = make_trainer(tmp_path, transformers.DataCollatorWithFlattening())
    audit(trainer, tmp_path)
    trainer.train()
    assert_every_token_once(tmp_path)


def test_ids_per_token_follow_the_mask_not_the_side(tmp_path: Path, make_trainer: Any) -> None:
    rows = [row | {"ids": [int(row["source"] == "prose")] * len(row["input_ids"])} for row in ROWS]
    trainer = make_trainer(tmp_path, rows=rows)  # pads on the left, and has no tokenizer to say so
    audit(trainer, tmp_path, source_column="ids")
    trainer.train()
    assert_every_token_once(tmp_path)


def test_rows_that_the_collator_drops_are_an_error(tmp_path: Path, make_trainer: Any) -> None:
    trainer = make_trainer(tmp_path, lambda rows: pad_left(rows[:1]))
    with pytest.raises(UsageError, match="of 2 rows with"), audit(trainer, tmp_path):
        trainer.train()


def test_decoding_with_a_cache_inside_training(tmp_path: Path, make_trainer: Any) -> None:
    """The mask grows with the cache; the router sees one token a sequence."""
    transformers = pytest.importorskip("transformers")

    class Sample(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.eval()
            mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
            model.generate(
                input_ids=torch.arange(8).view(2, 4),
                attention_mask=mask,
                max_new_tokens=5,
                min_new_tokens=5,
                pad_token_id=0,
            )
            model.train()

    trainer = make_trainer(tmp_path)
    trainer.add_callback(Sample)
    audit(trainer, tmp_path)
    trainer.train()
    assert_every_token_once(tmp_path)
    decoded = open_run(tmp_path / "routing.db", phase="eval")
    assert {(record.tokens, record.excluded_tokens) for record in decoded.records} == {(7 + 2 * 4, 1)}


def test_nothing_is_left_after_training_or_a_crash(tmp_path: Path, make_trainer: Any) -> None:
    transformers = pytest.importorskip("transformers")
    trainer = make_trainer(tmp_path)
    callbacks = len(trainer.callback_handler.callbacks)
    audit(trainer, tmp_path)
    trainer.train()
    assert len(trainer.callback_handler.callbacks) == callbacks

    class Crash(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    trainer.add_callback(Crash)
    with pytest.raises(KeyboardInterrupt), audit(trainer, tmp_path / "second"):
        trainer.train()
    trainer.remove_callback(Crash)
    trainer.train()  # not recorded, and not disturbed
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in trainer.model.modules())
    assert trainer.data_collator is pad_left


@pytest.mark.parametrize("saves", [{"save_strategy": "steps", "save_steps": 4}, {"save_strategy": "epoch"}])
def test_a_resumed_trainer_continues_a_freeze(
    saves: dict[str, Any], tmp_path: Path, make_trainer: Any
) -> None:
    """Equal tokens go to two of four experts: the gate fails them, and its freeze outlasts the checkpoint."""
    policy = tmp_path / "policy.toml"
    policy.write_text('extends = "default"\nlength = 2\nstride = 1\nmin_windows = 1\n')
    gate = {"action": "scale", "factor": 0.25, "cooldown": 5, "policy": policy}

    def rates(folder: Path, resume_from: Path | None, steps: int, store: Path) -> list[float]:
        rows = [{"input_ids": [5] * 64, "source": "code"}] * 16
        trainer = make_trainer(folder, rows=rows, max_steps=steps, lr_scheduler_type="constant", **saves)
        audit(trainer, store, gate=gate, resume=resume_from is not None)
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        return [record.lr for record in open_run(store / "routing.db").records]

    whole = rates(tmp_path / "a", None, 8, tmp_path / "a")
    rate = whole[0]
    assert whole.count(rate / 4) == 5 and whole[-1] == rate, whole
    rates(tmp_path / "b", None, 4, tmp_path / "b")
    checkpoint = tmp_path / "b" / "out" / "checkpoint-4"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]["moe_audit_gate"]
    assert rates(tmp_path / "b", checkpoint, 8, tmp_path / "b") == whole


class TestOlmoCore:
    """The example's trainer, with checkpoints."""

    @pytest.fixture
    def train(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        pytest.importorskip("olmo_core")
        from olmo_core.train import Duration, TrainerConfig
        from olmo_core.train.callbacks import CheckpointerCallback

        from moe_audit.hooks.olmo_core_callback import RoutingCallback

        monkeypatch.chdir(tmp_path)
        example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "olmo_core_trainer.py"))
        names = example["main"].__globals__

        def train(
            folder: str, steps: int, resume: bool = False, flush_every: int = 1, gate: Any = None
        ) -> Any:
            options = {"flush_every": flush_every, "resume": resume}
            routing = RoutingCallback(f"{folder}/routing.db", ["code", "prose"], gate=gate, options=options)
            saving = CheckpointerCallback(save_interval=4, ephemeral_save_interval=None, save_async=False)
            names["RoutingCallback"] = lambda *_, **__: routing
            names["TrainerConfig"] = lambda **_: TrainerConfig(
                save_folder=folder,
                load_path=folder if resume else None,
                save_overwrite=True,
                max_duration=Duration.steps(steps),
                device="cpu",
                callbacks={"saving": saving, "routing": routing},
            )
            example["main"]()
            return open_run(f"{folder}/routing.db").records

        names["Loader"].get_mock_batch = lambda self: {"input_ids": torch.full((8, 16), 5)}
        return train

    def test_a_record_ends_where_a_checkpoint_does(self, train: Any) -> None:
        """Two micro-batches a step, five a record: saving after step 4 ends the second one early."""
        records = train("run", steps=6, flush_every=5)
        assert [(r.first_step, r.last_step, r.tokens) for r in records] == [
            (1, 3, 384),
            (4, 4, 128),
            (5, 6, 256),
        ]

    def test_a_resumed_run_continues_a_freeze(self, train: Any, tmp_path: Path) -> None:
        policy = tmp_path / "policy.toml"
        policy.write_text('extends = "default"\nlength = 2\nstride = 1\nmin_windows = 1\n')
        gate = {"action": "scale", "factor": 0.25, "cooldown": 6, "policy": policy}
        whole = [record.lr for record in train("whole", steps=10, gate=gate)]
        assert whole.count(whole[0] / 4) >= 6
        train("parts", steps=4, gate=gate)
        assert [record.lr for record in train("parts", steps=10, resume=True, gate=gate)] == whole
