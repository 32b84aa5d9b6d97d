"""The recorder: attaches to every router of a model, cuts records of what they chose into the store."""

from __future__ import annotations

import platform
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_audit.hooks.accumulator import Accumulator
from moe_audit.hooks.adapters import Adapter, FoundRouter, find_routers
from moe_audit.hooks.attach import check_compiled, check_model
from moe_audit.hooks.context import row_ids
from moe_audit.hooks.counting import PHASES, Counting, Microbatch
from moe_audit.hooks.flush import Cut, Layout, pack, reduce
from moe_audit.hooks.ranks import Ranks
from moe_audit.hooks.steps import LearningRate, StepClock
from moe_audit.hooks.writer import Writer
from moe_audit.record import ATTACHED, CLOSED, MAX_COUNT
from moe_audit.store import UNLABELLED, LayerInfo, check_sources
from moe_audit.thresholds.errors import AuditError, UsageError


class Recorder:
    """Counts what the routers of one model choose. Make it with `attach`; a context manager that closes.

    Attributes:
        path: The store's file.
        layers: What is recorded, in model order; of all ranks of the group.
        sources: Names of the sources.
        flush_every: Micro-batches per record.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Sequence[FoundRouter],
        layers: Sequence[LayerInfo],
        path: Path,
        sources: Sequence[str],
        flush_every: int,
        ranks: Ranks,
        writer: Writer | None,
        silent_layers: Literal["raise", "mark"],
    ) -> None:
        self.path = path
        self.layers = list(layers)
        self.sources = list(sources)
        self.flush_every = flush_every
        self._ranks = ranks
        self._writer = writer
        self._silent_layers = silent_layers
        self._layout = Layout(self.layers, len(self.sources) + 2)
        self._clock = StepClock()
        self._counting = Counting(found, len(self.sources), self._clock.evaluated)
        self._owner = bool(found) and found[0].info.layer == self.layers[0].layer
        self._routers = [router.router for router in found]
        self._cut_waiting: Cut | None = None
        self._callbacks: list[Callable[[int], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._warned: set[str] = set()
        self._closed = False
        self._steps_per_record = self._steps_in_record = 0  # of ranks that reduce
        if ranks.is_member:
            self._counting.attach(model, found)

    # -- making and ending one

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        path: str | Path,
        sources: Sequence[str] | None = None,
        *,
        flush_every: int = 100,
        resume: bool = False,
        group: ProcessGroup | None = None,
        mode: Literal["reduce", "per_rank"] = "reduce",
        silent_layers: Literal["raise", "mark"] = "raise",
        adapter: Adapter | None = None,
    ) -> Recorder:
        """Puts a hook on every router of `model`, before it is compiled for the first time.

        Args:
            model: What is trained; wrappers (DDP, FSDP, checkpoint) may be on it already or come later.
            path: The store to write, `….db`.
            sources: Names of the sources; None: one source, `unlabelled`.
            flush_every: Micro-batches per record; a record ends at the first step end with that many. Ranks
                that reduce all end theirs in the same step: that of the busiest one, by its first step.
            resume: Continue the store at `path` with a new attempt.
            group: Ranks that route different tokens; None: all. Ranks outside record nothing.
            mode: "reduce" sums over the group, its rank 0 writes; "per_rank" writes one file a rank.
            silent_layers: What to do about a layer that does not fire in a step: raise, or mark the run
                invalid and go on.
            adapter: How to observe the routers; None: all adapters that are registered.

        Raises:
            UsageError: the store exists and `resume` is not set, or it has other layers or sources; the model
                has no known router, is an nn.DataParallel, or was compiled and run before.
        """
        if not isinstance(flush_every, int) or flush_every < 1:
            raise UsageError(f"flush_every={flush_every!r}", "it is a number of micro-batches, 1 or more")
        if silent_layers not in ("raise", "mark"):
            raise UsageError(f"silent_layers={silent_layers!r}", 'it is "raise" or "mark"')
        if isinstance(sources, str):
            raise UsageError(f"sources={sources!r} is one name", "pass a list of names")
        names = [UNLABELLED] if sources is None else list(sources)
        check_sources(names)
        ranks = Ranks.of(group, mode)
        check_model(model)
        found, problem = [], None
        try:
            found = find_routers(model, adapter)
            check_compiled(model, [router.module for router in found])
        except AuditError as error:
            problem = error
        layers = ranks.gather_layers(
            [router.info for router in found], problem, {"sources": names, "flush_every": flush_every}
        )
        file = ranks.store_path(path)
        writer, failure = None, None
        if ranks.writes:
            try:
                writer = Writer(
                    file, layers, names, resume=resume, meta=_meta(ranks, flush_every), world_size=ranks.size
                )
            except Exception as caught:
                failure = caught
        ranks.share_error(failure)
        if writer is not None:
            writer.submit_event(None, ATTACHED, {"resume": resume, "world_size": ranks.size})
        return cls(model, found, layers, file, names, flush_every, ranks, writer, silent_layers)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error other ranks may never come to the collectives of a last record.
        self.close(last_record=kind is None or not self._ranks.reduces)

    def close(self, *, last_record: bool = True) -> None:
        """Writes what is left, and leaves the model as it was.

        Micro-batches after the last `step` are written as the step that follows it.

        Args:
            last_record: Without, what came after the last record is given up.
        """
        if self._closed:
            return
        self._closed = True
        self._counting.detach()
        for callback in self._at_close:
            callback()
        try:
            self._settle(raising=False)
            if last_record and self._ranks.is_member and self._has_counts():
                self._cut(raising=False)
                self._settle(raising=False)
        finally:
            self._counting.release()
            self._routers = []
            if self._writer is not None:
                self._writer.submit_event(self._clock.last, CLOSED, {})
                self._writer.close()

    # -- what training calls

    def microbatch(self, sources: Any = None, mask: Any = None, *, chunks: int = 1) -> Microbatch:
        """The context of one micro-batch, forward and backward.

        Args:
            sources: Source of each sequence or token: ids (B,), (B, S) or (T,), -1 = unlabelled, or B names.
            mask: True (or 1) where a token counts: (B, S), or (T,) in the router's order. None: all count.
            chunks: Micro-batches that a pipeline schedule makes of this batch, split along its first axis.

        Raises:
            UsageError: ids out of range, an unknown name, shapes that do not belong together.
        """
        if not isinstance(chunks, int) or chunks < 1:
            raise UsageError(f"chunks={chunks!r}", "it is a number of micro-batches, 1 or more")
        rows = row_ids(sources, mask, self.sources)
        return Microbatch(self._counting, rows, mask is not None, chunks)

    def step(self, step: int, *, lr: LearningRate | None = None, loss: Tensor | float | None = None) -> None:
        """An optimizer step is done; cuts a record when `flush_every` micro-batches are in.

        Args:
            step: Optimizer steps done, from 1.
            lr: The learning rate of this step, or one for each of "all" and "router".
            loss: The loss of this step; a device tensor stays there until the record is cut.

        Raises:
            UsageError: `step` does not increase; in the first step a layer did not fire.
        """
        if self._closed:
            raise UsageError(f"{self.path} is closed", "attach again with resume=True")
        first = self._clock.last is None
        self._clock.step(step, lr, loss)
        if self._ranks.is_member:
            self._record_step(step, first)
        for callback in self._callbacks:
            callback(step)

    def _record_step(self, step: int, first: bool) -> None:
        self._settle()
        if first and self._writer is not None:
            self._writer.begin(step)
        self._check_fired(first)
        if self._is_full(first):
            self._cut()

    def _is_full(self, first: bool) -> bool:
        """Whether a record ends with this step; ranks that reduce must agree, whatever each of them saw."""
        train = self._counting.accumulators.get("train")
        microbatches = 0 if train is None else train.microbatches
        if not self._ranks.reduces:
            return train is not None and (microbatches >= self.flush_every or self._nearly_full(train))
        if first:
            picks = 0 if train is None else train.most_picks
            self._steps_per_record = self._ranks.steps_per_record(microbatches, picks, self.flush_every)
        self._steps_in_record += 1
        return self._steps_in_record >= self._steps_per_record

    def flush(self, timeout: float | None = 30.0) -> bool:
        """Cuts a record of what is there and waits until it is in the store. False: it waits for the disk."""
        if self._closed or not self._ranks.is_member:
            return True
        self._settle()
        if self._has_counts():
            self._cut()
        return self.written(timeout)

    def phase(self, name: Literal["train", "eval"]) -> AbstractContextManager[None]:
        """Forwards inside count as `name`, whatever `module.training` says."""
        return self._counting.phase(name)

    def paused(self) -> AbstractContextManager[None]:
        """Forwards inside (warm-up, dummy batches) are not recorded at all."""
        return self._counting.paused()

    def event(self, step: int | None, kind: str, detail: Mapping[str, Any]) -> None:
        """Writes an event (an alert, an action on the learning rate), on the rank that has the store."""
        if self._writer is not None:
            self._writer.submit_event(step, kind, detail)

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Sets keys of the store's `meta`; on the rank that writes."""
        if self._writer is not None:
            self._writer.set_meta(values)

    def on_step(self, callback: Callable[[int], None]) -> None:
        """Calls `callback(step)` at the end of each `step`, on all ranks, those that record nothing too."""
        self._callbacks.append(callback)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls `callback()` when the recorder is closed."""
        self._at_close.append(callback)

    @property
    def writes(self) -> bool:
        """Whether this rank has a store of what is recorded."""
        return self._writer is not None

    @property
    def is_share(self) -> bool:
        """Whether its store holds the counts of one rank of several (`mode="per_rank"`)."""
        return self._ranks.size > 1 and not self._ranks.reduces

    @property
    def has_routers(self) -> bool:
        """Whether this rank has routers; a pipeline stage of dense blocks has none."""
        return bool(self._routers)

    def router_parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's routers."""
        return list(dict.fromkeys(p for router in self._routers for p in router.parameters()))

    def written(self, timeout: float | None = 30.0) -> bool:
        """Waits until all records cut so far are in the store. False: they are not, `timeout` seconds on."""
        self._settle()
        return self._writer.flush(timeout) if self._writer is not None else True

    # -- cutting records

    def _has_counts(self) -> bool:
        """Whether there may be something to write. Ranks that reduce always agree: all of them cut."""
        return (
            self._ranks.reduces
            or self._clock.first is not None
            or any(a.microbatches for a in self._counting.accumulators.values())
        )

    def _nearly_full(self, train: Accumulator) -> bool:
        """Whether another such step could take a count past what the store holds."""
        steps = max(1, self._clock.steps_since_cut())
        return train.most_picks + 2 * train.most_picks // steps > MAX_COUNT

    def _check_fired(self, first: bool) -> None:
        """Raises where a layer was silent; where CUDA graphs may have been replayed, the record tells."""
        heard, silent, unheard = self._counting.take_fired(look_at_device=first)
        if silent and self._silent_layers == "raise" and (first or heard or unheard):
            raise UsageError(
                f"attached {heard + len(silent)}, fired {heard}: silent were {', '.join(silent[:8])}",
                "the model goes round these modules (a fused kernel, or code compiled before attach); pass"
                ' silent_layers="mark" to go on and mark the run invalid',
            )

    def _cut(self, raising: bool = True) -> None:
        """Packs and reduces the accumulators, begins a new record, and starts the copy to the host."""
        self._steps_in_record = 0
        self._counting.drop_unfinished()
        span = self._clock.cut()
        spans = {"train": span.train, "eval": span.eval}
        # Ranks must pack alike, whatever phases each of them saw.
        names = [n for n in PHASES if self._ranks.reduces or n == "train" or n in self._counting.accumulators]
        device = self._ranks.device(self._counting.device)
        packed = pack(
            self._layout,
            [self._counting.accumulators.get(name) for name in names],
            owner=self._owner,
            loss=(span.loss, span.losses),
            device=device,
        )
        if self._ranks.reduces:
            try:
                reduce(packed, self._ranks.group)
            except RuntimeError as error:  # of the backend; training may know what to do about it
                steps = f"steps {span.train.first} to {span.train.last}"
                error.add_note(
                    f"moe-audit: the record of {steps} could not be summed over the ranks and is not written:"
                    " a rank has ended, or did not come to this step in time"
                )
                raise
        self._cut_waiting = Cut(
            self._layout, packed, [(name, spans[name]) for name in names], self.sources, self._ranks.expected
        )
        for accumulator in self._counting.accumulators.values():
            accumulator.reset()
        if device.type != "cuda":
            self._settle(raising)

    def _settle(self, raising: bool = True) -> None:
        """Hands a cut record to the writer; on a GPU one step later, when its copy has long arrived."""
        cut, self._cut_waiting = self._cut_waiting, None
        if cut is None:
            return
        records = [record for record in cut.records() if record is not None]
        if self._writer is not None:
            for record in records:
                rows = next(iter(record.layers.values())).counts_SE.shape[0]
                if rows > len(self._writer.sources):
                    self._writer.add_source(UNLABELLED)
                self._writer.submit(record)
        for detail in cut.broken:
            if detail["invariant"] not in self._warned:
                self._warned.add(detail["invariant"])
                warnings.warn(f"routing record is not valid: {detail['message']}", stacklevel=4)
        if raising:
            self._raise_broken(cut)

    def _raise_broken(self, cut: Cut) -> None:
        for detail in cut.broken:
            if detail["invariant"] == "source ids":
                raise UsageError(detail["message"], f"ids are -1 (unlabelled) to {len(self.sources) - 1}")
            if detail["invariant"] == "silent layer" and self._silent_layers == "raise":
                raise UsageError(detail["message"], 'pass silent_layers="mark" to go on with an invalid run')


def _meta(ranks: Ranks, flush_every: int) -> dict[str, Any]:
    return {
        "run_id": uuid.uuid4().hex,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "world_size": ranks.size,
        "rank": ranks.rank if ranks.mode == "per_rank" else None,
        "mode": ranks.mode,
        "flush_every": flush_every,
    }
