"""The training loop: one `Trainer`, whose `fit` reads in one look.

Shapes: B sequences of a micro-batch, S tokens of a sequence, V vocabulary, L MoE layers, E experts.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_audit.hooks import Recorder, TrainingGate
from moe_audit.reports.json import to_dict
from moe_audit.reports.notify import Notifier
from moe_audit.reports.wording import sentence, status_name
from moe_audit.thresholds.errors import AuditError, UsageError
from moe_trainer.checkpoint import Standing, load_checkpoint, save_checkpoint
from moe_trainer.config import TrainConfig
from moe_trainer.data import Batch, TokenStream
from moe_trainer.facts import run_facts
from moe_trainer.model import Transformer
from moe_trainer.moe.layer import MoE, orthogonal_losses, post_step
from moe_trainer.optim import build_optimizer, build_scheduler, load_optimizer_state
from moe_trainer.runlog import RunLog


class DivergedError(AuditError):
    """The loss or a gradient is not finite: training stopped before it could spoil the weights."""

    exit_code = 1


class Trainer:
    """One attempt of a run: from its start, or from a checkpoint, to its last step.

    Args:
        config: The resolved configuration.
        folder: The run folder.
        stream: The tokens to train on.
        resume_from: Checkpoint to continue from; None starts at step 0.
        reset_routers: Draw the routers' weights anew after loading the checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        stream: TokenStream,
        resume_from: Path | None = None,
        *,
        reset_routers: bool = False,
    ) -> None:
        self.config, self.folder, self.stream = config, folder, stream
        self.device = pick_device(config.train.device)
        torch.manual_seed(config.train.seed)
        self.model = Transformer(config.model).to(self.device)
        self.moe_layers = [module for module in self.model.modules() if isinstance(module, MoE)]
        self.optimizer = build_optimizer(self.model, config.optim)
        restored = self._restore(resume_from) if resume_from else {}
        if reset_routers:
            self._reset_routers()
        self.step = int(restored.get("step", 0))
        self.scheduler = build_scheduler(self.optimizer, config.optim, config.train.steps, done=self.step)
        if self.step >= config.train.steps:
            raise UsageError(
                f"{folder} is complete: {self.step} of {config.train.steps} steps are done",
                f"for more steps: moe-train resume {folder} train.steps=N",
            )
        (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        self.recorder = self._attach_recorder(resume=resume_from is not None)
        self.gate = self._attach_gate(restored.get("gate"))
        self.rates = self.learning_rates()  # of the last update
        self.action_ends = None if self.gate is None else self.gate.action_ends  # as the log has told it
        self.losses_since_save: list[float] = []
        self.counts_LE = self._zero_counts()  # assignments since the last report

    def fit(self) -> Path:
        """Train to the last step, or until the gate asks for a pause; returns the last checkpoint."""
        steps = self.config.train.steps
        with self._recorder_closed_after(), RunLog(self.folder, steps, self.step + 1) as log:
            log.message(self._opening_line())
            started, first = time.perf_counter(), self.step
            while self.step < steps and not self._paused():
                loss = self.forward_backward()
                self.update(loss)
                log.advance(self.step, float(loss))
                if self._due(self.config.checkpoint.save_every) or self._paused():
                    checkpoint = self.save()  # judges, and so may begin an action
                self._tell_gate(log)
                if self._due(self.config.train.log_every):
                    pace = (self.step - first) / (time.perf_counter() - started)
                    self.report(log, float(loss), pace)
            end = "done" if self.step == steps else "paused by the training gate"
            log.message(f"{end}: step {self.step}, {checkpoint}")
        return checkpoint

    def forward_backward(self) -> Tensor:
        """Gradients of one optimizer step over all its micro-batches; returns the text's mean loss."""
        config = self.config
        total = torch.zeros((), device=self.device)
        for remaining in reversed(range(config.train.accumulation)):
            batch = self.stream.next_batch(config.train.micro_batch_sequences)
            with self._recording(batch):
                loss, router_loss = self.losses(batch)
                if remaining == 0:  # they depend on the weights only: once a step
                    router_loss = router_loss + orthogonal_losses(self.moe_layers)
                torch.autograd.backward(loss + router_loss)
            total += loss.detach()
        return total

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(cross-entropy, router losses) of a micro-batch, as its part of the whole step's mean."""
        inputs_BS = torch.from_numpy(batch.inputs_BS).to(self.device)
        targets_BS = torch.from_numpy(batch.targets_BS).to(self.device)
        divisor = self.config.tokens_per_step
        logits_BSV, router_loss = self.model(inputs_BS, loss_divisor=divisor)
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="sum")
        return loss / divisor, router_loss

    def update(self, loss: Tensor) -> None:
        """Clip, take the optimizer step, move the schedule and the routers' score biases on."""
        optim = self.config.optim
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.max_grad_norm)
        self._stop_unless_finite(loss=float(loss), gradient_norm=float(norm))
        self.losses_since_save.append(float(loss))
        self.rates = self.learning_rates()
        for i, stats in enumerate(post_step(self.moe_layers)):
            self.counts_LE[i] += stats.counts_E
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.step += 1
        if self.recorder is not None:
            self.recorder.step(self.step, lr=self.rates, loss=loss)

    def learning_rates(self) -> dict[str, float]:
        """Learning rate of the coming update: `all` (the dense part) and `router`."""
        rate = self.gate.rate if self.gate is not None else lambda group: float(group["lr"])
        rates = {group["name"]: rate(group) for group in self.optimizer.param_groups}
        return {"all": rates["dense"], "router": rates["router"]}

    def report(self, log: RunLog, loss: float, steps_per_second: float) -> None:
        """One log line and one point on every curve: loss, pace, and how the routers stand."""
        max_load, min_load = self._worst_loads()
        health = "not judged" if self.gate is None else self.gate.line()
        tokens_per_second = steps_per_second * self.config.tokens_per_step
        log.message(
            f"step {self.step}/{self.config.train.steps}  loss {loss:.4f}  lr {self.rates['all']:.2e}  "
            f"{tokens_per_second:,.0f} tokens/s  routing {health}, load {min_load:.2f} to {max_load:.2f}"
        )
        log.scalars(
            self.step,
            {
                "train/loss": loss,
                "train/lr": self.rates["all"],
                "train/router_lr": self.rates["router"],
                "train/tokens_per_second": tokens_per_second,
                "routing/worst_max_load": max_load,
                "routing/worst_min_load": min_load,
                "routing/gate_action": float(self.action_ends is not None),
            },
        )
        self.counts_LE = self._zero_counts()

    def save(self) -> Path:
        """Write a checkpoint; the counts up to this step go to disk first, and are judged for it."""
        if self.recorder is not None:
            self.recorder.flush()
        routing = self.gate.check(self.step) if self.gate is not None else None
        verdict = self.gate.verdict if self.gate is not None else None
        state: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
            "gate": self.gate.state_dict() if self.gate is not None else None,
        }
        loss = sum(self.losses_since_save) / len(self.losses_since_save)
        self.losses_since_save = []
        return save_checkpoint(
            self.folder / "checkpoints",
            self.model,
            state,
            self.config.to_toml(),
            Standing(self.step, loss, routing),
            to_dict(verdict) if verdict is not None else None,
            self.config.checkpoint.keep,
        )

    def _restore(self, checkpoint: Path) -> dict[str, Any]:
        state = load_checkpoint(checkpoint, self.model)
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.stream.load_state_dict(state["stream"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"])
        return state

    def _reset_routers(self) -> None:
        """New weights, score biases at zero, and no moments of the old weights in the optimizer."""
        for layer in self.moe_layers:
            layer.router.reset_parameters()
            for parameter in layer.router.parameters():
                self.optimizer.state.pop(parameter, None)

    def _attach_gate(self, state: dict[str, Any] | None) -> TrainingGate | None:
        settings = self.config.gate
        if settings.action is None or self.recorder is None:
            return None
        gate = TrainingGate(
            self.recorder,
            self.optimizer,
            settings.policy,
            settings.action,
            settings.groups,
            settings.check_every,
            settings.cooldown,
            factor=settings.factor,
            dry_run=settings.dry_run,
            pause_when_severe=settings.pause_when_severe,
            notify=Notifier(settings.notify) if settings.notify else None,
        )
        if state is not None:
            gate.load_state_dict(state)
        return gate

    def _paused(self) -> bool:
        return self.gate is not None and self.gate.pause_requested

    def _tell_gate(self, log: RunLog) -> None:
        """A line in the log for each check; a mark where an action of the gate begins or ends."""
        if self.gate is None:
            return
        if self.gate.judged_step == self.step and self.gate.verdict is not None:
            verdict = self.gate.verdict
            log.note(f"step {self.step}: checked, {status_name(verdict)}: {sentence(verdict)}")
        if self.gate.action_ends != self.action_ends:
            self.action_ends = self.gate.action_ends
            log.mark(self.step, f"training gate: routing {self.gate.line()}")

    def _attach_recorder(self, resume: bool) -> Recorder | None:
        if not self.config.recorder.enabled:
            return None
        recorder = Recorder.attach(
            self.model,
            self.folder / "routing.db",
            sources=self.stream.corpus.sources,
            flush_every=self.config.recorder.flush_every,
            resume=resume,
        )
        recorder.set_meta(run_facts(self.config, self.stream))
        return recorder

    def _recording(self, batch: Batch) -> contextlib.AbstractContextManager[Any]:
        if self.recorder is None:
            return contextlib.nullcontext()
        sources_BS = torch.from_numpy(batch.sources_BS)
        # Packed sequences have no padding; the mask says so, or the audit could only assume it.
        everything_BS = torch.ones_like(sources_BS, dtype=torch.bool)
        return self.recorder.microbatch(sources=sources_BS, mask=everything_BS)

    def _recorder_closed_after(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.recorder is None else self.recorder

    def _stop_unless_finite(self, **values: float) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                raise DivergedError(
                    f"training stopped at step {self.step + 1}: the {name.replace('_', ' ')} is "
                    f"{value}; {self.folder} keeps its last checkpoint",
                    "lower optim.lr, or look at the text of this step",
                )

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.train.steps

    def _zero_counts(self) -> Tensor:
        shape = (len(self.moe_layers), self.config.model.moe.num_experts)
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _worst_loads(self) -> tuple[float, float]:
        """Largest and smallest expert load over all layers since the last report, in fair shares."""
        load_LE = self.counts_LE / self.counts_LE.double().mean(dim=1, keepdim=True)
        return float(load_LE.max()), float(load_LE.min())

    def _opening_line(self) -> str:
        parts = self.config.model.num_params_per_part().values()
        return (
            f"{self.folder}: steps {self.step + 1} to {self.config.train.steps} on {self.device}, "
            f"{sum(total for total, _ in parts):,} parameters "
            f"({sum(active for _, active in parts):,} active), sources "
            + ", ".join(f"{k} {v:,}" for k, v in self.stream.corpus.source_tokens().items())
            + " tokens"
        )


def pick_device(name: str) -> torch.device:
    """The device of a setting; `auto` is cuda where there is one.

    Raises:
        UsageError: cuda is asked for and absent.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("train.device = 'cuda': no CUDA device here", "use train.device=cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
