"""The recorder: attaches to every router of a model, counts on the device, cuts records into the store.

Micro-batches: counts join the record when the micro-batch has ended well. One that ends with an exception is
dropped whole, in all layers. Without `microbatch()` a forward of the attached model is a micro-batch of
unlabelled tokens; a router that is called outside of both is counted at once.
"""

from __future__ import annotations

import platform
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from moe_audit.hooks.accumulator import Accumulator, LabelCache, check_observation
from moe_audit.hooks.adapters import Adapter, FoundRouter, Observation, find_routers
from moe_audit.hooks.attach import RootHook, RouterHook, check_compiled, check_model
from moe_audit.hooks.context import row_ids
from moe_audit.hooks.flush import Cut, Layout, pack, reduce
from moe_audit.hooks.ranks import Ranks
from moe_audit.hooks.steps import LearningRate, StepClock
from moe_audit.hooks.writer import Writer
from moe_audit.store import UNLABELLED, LayerInfo, check_sources
from moe_audit.thresholds.errors import AuditError, UsageError

PHASES = ("train", "eval")
MAX_COUNT = 2**32 - 1  # counts are stored as u4


class Microbatch:
    """One micro-batch (or `chunks` of them in a pipeline schedule) while it is open; a context manager."""

    def __init__(self, recorder: Recorder, rows: Tensor | None, masked: bool, chunks: int) -> None:
        self._recorder = recorder
        self.rows, self.masked, self.chunks = rows, masked, chunks
        self.calls = [0] * len(recorder.local_layers)

    def __enter__(self) -> Microbatch:
        self._recorder._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder._end(self, failed=kind is not None)


class _LayerReceiver:
    """Passes what one router chose to the recorder."""

    def __init__(self, recorder: Recorder, layer: int) -> None:
        self.recorder, self.layer = recorder, layer

    def observe(self, seen: Observation, training: bool) -> None:
        self.recorder._observe(self.layer, seen, training)

    def mark(self, begin: bool) -> None:
        self.recorder._mark(begin)


class Recorder:
    """Counts what the routers of one model choose. Make it with `attach`; a context manager that closes.

    Attributes:
        path: The store's file.
        layers: What is recorded, in model order; of all ranks of the group.
        sources: Names of the sources.
        records: The records cut so far in this process, without their arrays' owner: newest last.
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
        self.local_layers = [router.info for router in found]
        self._ranks = ranks
        self._writer = writer
        self._silent_layers = silent_layers
        self._num_rows = len(self.sources) + 2
        self._layout = Layout(self.layers, self._num_rows)
        self._labels = LabelCache(self._num_rows)
        self._accumulators: dict[str, Accumulator] = {}
        self._fired = [False] * len(found)
        self._open: Microbatch | None = None
        self._implicit = False
        self._phase: str | None = None
        self._paused = 0
        self._clock = StepClock()
        self._cut_waiting: Cut | None = None
        self._callbacks: list[Callable[[int], None]] = []
        self._warned: set[str] = set()
        self._receivers: list[_LayerReceiver] = []
        self._handles: list[RemovableHandle] = []
        self._modules = [router.module for router in found]
        self._routers = [router.router for router in found]
        self._closed = False
        if ranks.is_member:
            self._hook(model, found)

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
            flush_every: Micro-batches per record; a record ends at the first step end with that many.
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
        writer, error = None, None
        if ranks.writes:
            try:
                writer = Writer(
                    file, layers, names, resume=resume, meta=_meta(ranks, flush_every), world_size=ranks.size
                )
            except Exception as caught:
                error = caught
        ranks.share_error(error)
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
        for handle in self._handles:
            handle.remove()
        try:
            self._settle(raising=False)
            if last_record and self._has_counts():
                self._cut(raising=False)
                self._settle(raising=False)
        finally:
            self._handles, self._receivers, self._modules, self._routers = [], [], [], []
            self._accumulators = {}
            if self._writer is not None:
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
        return Microbatch(self, rows, mask is not None, chunks)

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
        train = self._accumulators.get("train")
        if train is not None and (train.microbatches >= self.flush_every or self._nearly_full(train)):
            self._cut()

    def flush(self, timeout: float | None = 30.0) -> bool:
        """Cuts a record of what is there and waits until it is in the store. False: it waits for the disk."""
        if self._closed or not self._ranks.is_member:
            return True
        self._settle()
        if self._has_counts():
            self._cut()
        return self.written(timeout)

    @contextmanager
    def phase(self, name: Literal["train", "eval"]) -> Iterator[None]:
        """Forwards inside count as `name`, whatever `module.training` says."""
        if name not in PHASES:
            raise UsageError(f"{name!r} is no phase", f"phases are {' and '.join(PHASES)}")
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forwards inside (warm-up, dummy batches) are not recorded at all."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

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

    def router_parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's routers."""
        return list(dict.fromkeys(p for router in self._routers for p in router.parameters()))

    def written(self, timeout: float | None = 30.0) -> bool:
        """Waits until all records cut so far are in the store. False: they are not, `timeout` seconds on."""
        self._settle()
        return self._writer.flush(timeout) if self._writer is not None else True

    # -- what hooks call

    def _hook(self, model: nn.Module, found: Sequence[FoundRouter]) -> None:
        anchors: dict[torch.device, Tensor] = {}

        def anchor(module: nn.Module) -> Tensor:
            device = _device_of(module)
            return anchors.setdefault(device, torch.zeros((), dtype=torch.int64, device=device))

        def receiver(i: int) -> _LayerReceiver:
            made = _LayerReceiver(self, i)
            self._receivers.append(made)
            return made

        for i, (_, module, adapter, _) in enumerate(found):
            hook = RouterHook(module, adapter, anchor(module), receiver(i))
            if adapter.hook == "pre":
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        if found:
            root = receiver(0)
            at = anchor(found[0].module)
            self._handles.append(model.register_forward_pre_hook(RootHook(at, root, True)))
            self._handles.append(model.register_forward_hook(RootHook(at, root, False)))

    def _off(self) -> bool:
        # A running backward pass: this is the recompute of a checkpoint, counted already in the forward.
        return self._paused > 0 or self._closed or torch._C._current_graph_task_id() != -1

    def _mark(self, begin: bool) -> None:
        """A forward of the model begins or ends: a micro-batch, if training opened none."""
        if self._off():
            return
        if begin and (self._open is None or self._implicit):
            self._drop_open()
            self._begin(Microbatch(self, None, False, 1))
            self._implicit = True
        elif not begin and self._implicit and self._open is not None:
            self._end(self._open, failed=False)

    def _observe(self, i: int, seen: Observation, training: bool) -> None:
        device = seen.indices_TK.device
        if self._off() or device.type == "meta":
            return
        info = self.local_layers[i]
        check_observation(info, seen)
        phase = self._phase or ("train" if training else "eval")
        accumulator = self._accumulator(phase, device)
        self._fired[i] = True
        accumulator.follow(i, device)
        if phase == "eval":
            self._clock.evaluated()
        scope = self._open
        chunk = 0
        if scope is not None and scope.chunks > 1:
            chunk = scope.calls[i]
            if chunk >= scope.chunks:
                raise UsageError(
                    f"{info.name} fired {chunk + 1} times in a micro-batch of chunks={scope.chunks}",
                    "give the number of micro-batches that the schedule makes",
                )
            if chunk:
                accumulator.end_chunk(i)
        if scope is not None:
            scope.calls[i] += 1
        elif self._labels.rows is not None:
            self._labels.set_rows(None)
        accumulator.observe(i, seen, self._labels.get(device, seen.indices_TK.shape[0], seen.layout, chunk))
        if scope is None:
            accumulator.commit(1, masked=False, only=i)

    def _accumulator(self, phase: str, device: torch.device) -> Accumulator:
        if phase not in self._accumulators:
            devices = [_device_of(module, device) for module in self._modules]
            self._accumulators[phase] = Accumulator(self.local_layers, devices, self._num_rows)
        return self._accumulators[phase]

    def _begin(self, scope: Microbatch) -> None:
        self._drop_open()
        if self._open is not None:
            raise UsageError("a micro-batch inside a micro-batch", "close the first one before the next")
        self._open = scope
        self._labels.set_rows(scope.rows, scope.chunks)

    def _drop_open(self) -> None:
        """Forgets a forward of the model that began and never ended: it crashed."""
        if self._implicit and self._open is not None:
            self._end(self._open, failed=True)

    def _end(self, scope: Microbatch, failed: bool) -> None:
        self._open, self._implicit = None, False
        for accumulator in self._accumulators.values():
            if accumulator.dirty:
                if failed:
                    accumulator.discard()
                else:
                    accumulator.commit(scope.chunks, scope.masked)

    # -- cutting records

    def _has_counts(self) -> bool:
        """Whether there may be something to write. Ranks that reduce always agree: all of them cut."""
        return (
            self._ranks.reduces
            or self._clock.first is not None
            or any(a.microbatches for a in self._accumulators.values())
        )

    def _nearly_full(self, train: Accumulator) -> bool:
        """Whether another such step could take a count past what the store holds."""
        steps = max(1, self._clock.steps_since_cut())
        picks = train.most_picks * self._ranks.expected
        return picks + 2 * picks // steps > MAX_COUNT

    def _check_fired(self, first: bool) -> None:
        """Raises where a layer was silent. When none was heard (replayed CUDA graphs) the record tells."""
        heard = sum(self._fired)
        if first and not heard:  # a whole step replayed from CUDA graphs shows on the device only
            heard = max((a.fired() for a in self._accumulators.values()), default=0)
            self._fired = [heard == len(self._fired)] * len(self._fired)
        silent = [info.name for info, fired in zip(self.local_layers, self._fired, strict=True) if not fired]
        self._fired = [False] * len(self._fired)
        if silent and self._silent_layers == "raise" and (first or heard):
            raise UsageError(
                f"attached {len(self.local_layers)}, fired {heard}: silent were {', '.join(silent[:8])}",
                "the model goes round these modules (a fused kernel, or code compiled before attach); pass"
                ' silent_layers="mark" to go on and mark the run invalid',
            )

    def _cut(self, raising: bool = True) -> None:
        """Packs and reduces the accumulators, begins a new record, and starts the copy to the host."""
        self._drop_open()
        span = self._clock.cut()
        spans = {"train": span.train, "eval": span.eval}
        # Ranks must pack alike, whatever phases each of them saw.
        names = [n for n in PHASES if self._ranks.reduces or n == "train" or n in self._accumulators]
        device = self._ranks.device(_device_of(self._modules[0]) if self._modules else torch.device("cpu"))
        packed = pack(
            self._layout,
            [self._accumulators.get(name) for name in names],
            owner=bool(self.local_layers) and self.local_layers[0].layer == self.layers[0].layer,
            loss=(span.loss, span.losses),
            device=device,
        )
        if self._ranks.reduces:
            reduce(packed, self._ranks.group)
        self._cut_waiting = Cut(
            self._layout, packed, [(name, spans[name]) for name in names], self.sources, self._ranks.expected
        )
        for accumulator in self._accumulators.values():
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


def _device_of(module: nn.Module, default: torch.device | None = None) -> torch.device:
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type == "meta":
        return default or torch.device("cpu")
    return parameter.device


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
