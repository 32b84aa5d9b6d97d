"""Hugging Face `Trainer`: records every step of it, sources from a column of the data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from moe_audit.hooks.forwards import ForwardMicrobatches
from moe_audit.hooks.gate import TrainingGate
from moe_audit.hooks.recorder import Recorder
from moe_audit.thresholds.errors import UsageError

SOURCE_KEY = "source_ids"
GATE_KEY = "moe_audit_gate"  # in the trainer's state, which is saved with each checkpoint


def audit_trainer(
    trainer: Any,
    path: str | Path,
    sources: Sequence[str] | None = None,
    *,
    source_column: str = "source",
    gate: Mapping[str, Any] | None = None,
    **options: Any,
) -> Recorder:
    """Records the training of a `Trainer`. Call it before `trainer.train()`.

    The column is kept although the trainer removes what the model's forward does not take. A two-dimensional
    attention mask excludes padding.

    Args:
        trainer: A `transformers.Trainer`.
        path: The store to write, `….db`.
        sources: Names of the sources; None: everything is unlabelled and no column is read.
        source_column: Holds one source per sequence (a name or an id), or one id per token.
        gate: Arguments of a `TrainingGate` on the trainer's optimizer, such as {"action": "hold"}. Its state
            is kept in the trainer's checkpoints.
        **options: Of `Recorder.attach`.

    Returns:
        The recorder. It is closed at the end of training. Once it is closed, model and trainer are as they
        were.

    Raises:
        UsageError: See `Recorder.attach`.
    """
    recorder = Recorder.attach(trainer.model, path, sources, **options)
    forwards = ForwardMicrobatches(recorder, trainer.model, SOURCE_KEY)
    collator, removes = trainer.data_collator, trainer.args.remove_unused_columns
    if sources is not None:
        columns = _columns(trainer)
        trainer.data_collator = SourceCollator(
            trainer.data_collator, recorder.sources, source_column, columns
        )
        trainer.args.remove_unused_columns = False  # the collator does it, and keeps the sources

    callback = RoutingCallback(recorder, forwards, gate)

    def restore() -> None:
        forwards.remove()
        trainer.data_collator, trainer.args.remove_unused_columns = collator, removes
        handler = trainer.callback_handler  # a new list: the trainer may be going through the old one
        handler.callbacks = [other for other in handler.callbacks if other is not callback]

    recorder.on_close(restore)
    trainer.add_callback(callback)
    return recorder


class SourceCollator:
    """Wraps a collator: takes the sources out of the rows, and puts their ids into the batch.

    Args:
        collate: The collator to wrap; it sees the rows without the column.
        sources: Names of the sources.
        column: Name of the column.
        columns: The other columns to keep; None: all.

    Raises:
        UsageError: A row without the column, an unknown name, or ids per token that do not fit the batch.
    """

    def __init__(
        self,
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
        sources: Sequence[str],
        column: str,
        columns: Sequence[str] | None = None,
    ) -> None:
        self.collate = collate
        self.sources = list(sources)
        self.column = column
        self.columns = columns

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The collated batch, with `source_ids` (B,) or (B, S)."""
        if any(self.column not in row for row in rows):
            raise UsageError(f"a row has no column {self.column!r}", "name the column that holds the sources")
        labels = [row[self.column] for row in rows]
        keep = set(rows[0]) if self.columns is None else set(self.columns)
        batch = self.collate(
            [{k: v for k, v in row.items() if k in keep and k != self.column} for row in rows]
        )
        batch[SOURCE_KEY] = self._ids(labels, rows, batch)
        return batch

    def _ids(self, labels: list[Any], rows: list[dict[str, Any]], batch: dict[str, Any]) -> torch.Tensor:
        """Ids (B,), or (B, S) where a row has one for each token or the collator packs rows into one."""
        per_row = all(isinstance(label, str | int) for label in labels)
        tokens = batch.get("input_ids")
        if per_row and (tokens is None or len(tokens) == len(rows)):
            return torch.tensor([self._id(label) for label in labels])
        if tokens is None:
            raise UsageError("the batch has no input_ids", "name one source a sequence, not one a token")
        if per_row:
            labels = [
                [self._id(label)] * len(row["input_ids"]) for label, row in zip(labels, rows, strict=True)
            ]
        if len(tokens) != len(rows):
            labels = [[one for label in labels for one in label]]
            if tokens.shape != (1, len(labels[0])):
                raise UsageError(
                    f"the collator makes input_ids {tuple(tokens.shape)} of {len(rows)} rows with"
                    f" {len(labels[0])} source ids",
                    "a collator may pad rows or put them one after the other",
                )
        ids = torch.full(tokens.shape, -1)
        for i, label in enumerate(labels):
            ids[i, self._places(i, len(label), batch)] = torch.as_tensor(label)
        return ids

    def _places(self, i: int, length: int, batch: dict[str, Any]) -> torch.Tensor | slice:
        """Where the `length` tokens of row i stand in the batch, among its padding."""
        width = batch["input_ids"].shape[1]
        if length > width:
            raise UsageError(f"{length} source ids for a sequence of {width} tokens")
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and int((mask[i] > 0).sum()) == length:
            return mask[i] > 0
        tokenizer = getattr(self.collate, "tokenizer", None) or getattr(
            self.collate, "processing_class", None
        )
        left = getattr(tokenizer, "padding_side", "right") == "left"
        return slice(width - length, width) if left else slice(length)

    def _id(self, label: str | int) -> int:
        if isinstance(label, int):
            return label
        if label not in self.sources:
            known = ", ".join(self.sources)
            raise UsageError(f"{label!r} in column {self.column!r} is not a source", f"sources are {known}")
        return self.sources.index(label)


class RoutingCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the recorder when a step is done; cuts a record before each save; closes it in the end."""

    def __init__(
        self,
        recorder: Recorder,
        forwards: ForwardMicrobatches,
        gate: Mapping[str, Any] | None = None,
    ) -> None:
        self.recorder = recorder
        self.forwards = forwards
        self.gate_options = gate
        self.gate: TrainingGate | None = None
        self._lr: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Puts the gate on the optimizer; with the state of the checkpoint that training resumes from."""
        if self.gate_options is not None:
            self.gate = TrainingGate(self.recorder, kwargs["optimizer"], **self.gate_options)
            if GATE_KEY in state.stateful_callbacks:
                self.gate.load_state_dict(state.stateful_callbacks[GATE_KEY])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keeps the learning rate of this step; the scheduler moves on before the step has ended."""
        group = kwargs["optimizer"].param_groups[0]
        self._lr = float(group["lr"]) if self.gate is None else self.gate.rate(group)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One optimizer step is done."""
        loss, self.forwards.loss = self.forwards.loss, None
        self.recorder.step(state.global_step, lr=self._lr, loss=loss)
        if self.gate is not None:
            state.stateful_callbacks[GATE_KEY] = self.gate.state_dict()
            if self.gate.pause_requested:
                control.should_save = control.should_training_stop = True
        self._before_save(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The end of an epoch may be saved too."""
        self._before_save(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is evaluated may be found to be the best, and saved."""
        if args.save_strategy == "best":
            self.recorder.flush()

    def _before_save(self, control: Any) -> None:
        """A record ends where a checkpoint does."""
        if control.should_save:
            self.recorder.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the rest and leaves model and trainer as they were."""
        self.recorder.close()


def _columns(trainer: Any) -> list[str] | None:
    """The columns that the trainer would keep."""
    if not trainer.args.remove_unused_columns:
        return None
    model = trainer.model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return [*inspect.signature(inner.forward).parameters, "label", "label_ids", *trainer.label_names]
