"""The examples and the callbacks, with the real packages, on CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_audit.run import Run, open_run

pytestmark = pytest.mark.parity
EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, folder: Path) -> Run:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (store,) = folder.glob("runs/*/routing.db")
    return open_run(store)


@pytest.mark.parametrize(
    ("name", "package", "steps", "tokens"),
    [
        ("huggingface", "transformers", 30, {"code": 30 * (2 * 16 - 4), "prose": 30 * 2 * 16}),
        ("huggingface_trainer", "accelerate", 12, {"code": 24 * 16, "prose": 72 * 16}),
        ("olmo_core_trainer", "olmo_core", 12, {"code": 12 * 2 * 16, "prose": 12 * 6 * 16}),
        ("torchtitan_recipe", "torchtitan", 12, {"code": 24 * 2 * 16, "prose": 24 * 6 * 16}),
    ],
)
def test_example(name: str, package: str, steps: int, tokens: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip(package)
    run = run_example(name, tmp_path)
    assert (run.records[0].first_step, run.records[-1].last_step) == (1, steps)
    assert len(run.layers) == 2 and list(run.sources) == ["code", "prose"]
    for layer in run.layers:
        counted = run.counts(layer.layer).sum((0, 2))
        if name == "huggingface_trainer":  # shuffled: one in four rows overall, not in every 12 steps
            assert counted.sum() == layer.top_k * sum(tokens.values())
            assert counted[0] > 0
        else:
            assert counted.tolist() == [layer.top_k * n for n in tokens.values()]


class TestTrainer:
    """The Hugging Face Trainer with what a real one does: padding, packing, evaluation, saving, a gate."""

    @pytest.fixture
    def model(self, mixtral: Callable[[], Any]) -> Any:
        return mixtral()

    @pytest.fixture
    def train(self, model: Any, trainer_args: Callable[..., Any]) -> Callable[..., Any]:
        from datasets import Dataset
        from transformers import Trainer

        from moe_audit.hooks.transformers_callback import audit_trainer

        def train(rows: list[dict[str, Any]], folder: Path, args: Any = None, **more: Any) -> Any:
            data = Dataset.from_list([{**row, "labels": row["input_ids"], "note": "unused"} for row in rows])
            trainer = Trainer(
                model=model,
                args=trainer_args(folder, **(args or {})),
                train_dataset=data,
                eval_dataset=data,
                data_collator=self.collate,
            )
            audit_trainer(trainer, folder / "routing.db", ["code", "prose"], flush_every=2, **more)
            trainer.train()
            return trainer

        return train

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Pads on the right; knows nothing of sources."""
        assert all(set(row) == {"input_ids", "labels"} for row in rows)
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row["input_ids"])] = torch.as_tensor(row["input_ids"])
            mask[i, : len(row["input_ids"])] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def test_padding_is_not_counted_and_evaluation_stays_apart(self, train: Any, tmp_path: Path) -> None:
        rows = [{"input_ids": list(range(3, 3 + 4 + i % 5)), "source": "prose"} for i in range(16)]
        rows[0]["source"] = rows[5]["source"] = "code"
        more = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        train(rows, tmp_path, args=more)
        run = open_run(tmp_path / "routing.db")
        # Four steps of two micro-batches of two: the whole set once.
        sums = {name: sum(len(r["input_ids"]) for r in rows if r["source"] == name) for name in run.sources}
        for layer in run.layers:
            assert run.counts(layer.layer).sum((0, 2)).tolist() == [2 * sums["code"], 2 * sums["prose"]]
        assert [record.last_step for record in run.records] == [1, 2, 3, 4]
        evaluated = open_run(tmp_path / "routing.db", phase="eval")
        assert evaluated.counts(0).sum() == 2 * 2 * sum(sums.values())

    def test_packed_rows_have_an_id_per_token(self, train: Any, tmp_path: Path) -> None:
        rows = [{"input_ids": [5] * (6 + i % 3), "ids": [0] * 4 + [1] * (2 + i % 3)} for i in range(16)]
        train(rows, tmp_path, source_column="ids")
        run = open_run(tmp_path / "routing.db")
        prose = sum(row["ids"].count(1) for row in rows)
        assert run.counts(1).sum((0, 2)).tolist() == [2 * 4 * 16, 2 * prose]

    def test_a_gate_can_be_put_on_the_trainers_optimizer(
        self, model: Any, train: Any, tmp_path: Path
    ) -> None:
        rows = [{"input_ids": [3, 4, 5, 6], "source": 1} for _ in range(16)]
        before = [len(module._forward_hooks) for module in model.modules()]
        trainer = train(rows, tmp_path, gate={"action": "hold", "check_every": 2})
        assert open_run(tmp_path / "routing.db").counts(0).sum() == 2 * 4 * 16
        # After training nothing is left, and the trainer still works.
        assert [len(module._forward_hooks) for module in model.modules()] == before
        assert trainer.data_collator == self.collate and trainer.args.remove_unused_columns
        assert trainer.evaluate()["eval_loss"] > 0

    def test_an_unknown_source_and_a_missing_column_are_named(self, train: Any, tmp_path: Path) -> None:
        from moe_audit.thresholds.errors import UsageError

        with pytest.raises(UsageError, match="'poetry' in column 'source' is not a source"):
            train([{"input_ids": [3, 4], "source": "poetry"}] * 16, tmp_path / "a")
        with pytest.raises(UsageError, match="no column 'origin'"):
            train([{"input_ids": [3, 4]}] * 16, tmp_path / "b", source_column="origin")
