"""OLMo-core trainer: a callback that records every step, sources from the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from olmo_core.train.callbacks import Callback

from moe_audit.hooks.forwards import ForwardMicrobatches
from moe_audit.hooks.gate import TrainingGate
from moe_audit.hooks.recorder import Recorder


@dataclass
class RoutingCallback(Callback):  # type: ignore[misc]
    """Records the routing of a run. Add it to the trainer's callbacks.

    The data loader may put `source_ids` into the batch, (B,) or (B, S): the trainer splits them into
    micro-batches like everything else, and they are taken out before the model sees them. The dry-run batch
    is not recorded. A record ends where a checkpoint does, and the gate's state is in it.

    Attributes:
        path: The store to write, `….db`.
        sources: Names of the sources; None: everything is unlabelled.
        gate: Arguments of a `TrainingGate` on the train module's optimizer; None: none.
        options: Of `Recorder.attach`.
        recorder: From the start of training on.
    """

    priority: ClassVar[int] = 2  # above the checkpointer's 1: a step is told before its checkpoint is taken

    path: str = "routing.db"
    sources: list[str] | None = None
    gate: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.recorder: Any = None
        self._forwards: Any = None
        self._training_gate: Any = None
        self._saved_gate: Any = None  # of a checkpoint, which is loaded before training begins

    def pre_train(self) -> None:
        """Attaches, before the model is compiled by its first (dry-run) batch."""
        module = self.trainer.train_module
        self.recorder = Recorder.attach(module.model, self.path, self.sources, **(self.options or {}))
        self._forwards = ForwardMicrobatches(self.recorder, module.model)
        self._forwards.enabled = False
        if self.gate is not None:
            self._training_gate = TrainingGate(self.recorder, module.optim, **self.gate)
            if self._saved_gate is not None:
                self._training_gate.load_state_dict(self._saved_gate)

    def pre_step(self, batch: dict[str, Any]) -> None:
        """From the first real batch on, forwards count."""
        self._forwards.enabled = True

    def post_train_batch(self) -> None:
        """One optimizer step is done."""
        loss, self._forwards.loss = self._forwards.loss, None
        group, gate = self.trainer.train_module.optim.param_groups[0], self._training_gate
        lr = float(group["lr"]) if gate is None else gate.rate(group)
        self.recorder.step(self.step, lr=lr, loss=loss)
        if gate is not None and gate.pause_requested:
            self.trainer.cancel_run("the training gate requests a pause")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the gate's state. The trainer asks for it when it begins to save."""
        if self.recorder is not None:
            self.recorder.flush()
        return {} if self._training_gate is None else {"gate": self._training_gate.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the gate's state for the beginning of training."""
        self._saved_gate = state_dict.get("gate")

    def close(self) -> None:
        """Writes the rest, also after an error."""
        if self.recorder is not None:
            self.recorder.close()
            self._forwards.remove()
