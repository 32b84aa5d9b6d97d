"""From the hooks to the accumulators: which calls of a router count, and to which micro-batch and phase.

Counts join the record when their micro-batch has ended well. One that ends with an exception is dropped
whole, in all layers. Where training opens none, a forward of the model is a micro-batch of unlabelled tokens;
a router that is called outside of both is counted at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_audit.hooks.accumulator import Accumulator, check_observation
from moe_audit.hooks.adapters import FoundRouter, Observation
from moe_audit.hooks.attach import RootHook, RouterHook
from moe_audit.hooks.labels import LabelCache
from moe_audit.thresholds.errors import UsageError

PHASES = ("train", "eval")


class Microbatch:
    """One micro-batch (or `chunks` of them in a pipeline schedule) while it is open; a context manager."""

    def __init__(self, counting: Counting, rows: Tensor | None, masked: bool, chunks: int) -> None:
        self._counting = counting
        self.rows, self.masked, self.chunks = rows, masked, chunks
        self.calls = [0] * len(counting.layers)
        self.heard = False  # whether a router fired, recorded or not

    def __enter__(self) -> Microbatch:
        self._counting.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._counting.end(self, failed=kind is not None)


class Fired(NamedTuple):
    """How many layers fired, the names of those that did not, and whether a micro-batch went by in which not
    one did, nor may have been replayed from a CUDA graph."""

    heard: int
    silent: list[str]
    unheard: bool


class _Receiver:
    """Passes the calls of the hooks of one router, or of the model, on."""

    def __init__(self, counting: Counting, layer: int) -> None:
        self.counting, self.layer = counting, layer

    def observe(self, seen: Observation, training: bool) -> None:
        self.counting.observe(self.layer, seen, training)

    def mark(self, begin: bool) -> None:
        self.counting.mark(begin)


class Counting:
    """The counts of this rank's routers since the last record.

    Args:
        found: This rank's routers.
        num_sources: Named sources.
        evaluated: Called when a router fires in evaluation.

    Attributes:
        layers: What is counted, in model order.
        accumulators: The counts of each phase that was seen.
    """

    def __init__(self, found: Sequence[FoundRouter], num_sources: int, evaluated: Callable[[], None]) -> None:
        self.layers = [router.info for router in found]
        self.accumulators: dict[str, Accumulator] = {}
        self._modules = [router.module for router in found]
        self._num_rows = num_sources + 2
        self._labels = LabelCache(self._num_rows)
        self._evaluated = evaluated
        self._fired = [False] * len(found)
        self._unheard = False
        self._open: Microbatch | None = None
        self._implicit = False
        self._phase: str | None = None
        self._paused = 0
        self._receivers = [_Receiver(self, i) for i in range(len(found))]
        self._handles: list[RemovableHandle] = []
        self._hooks: list[tuple[dict[int, Callable[..., Any]], int]] = []  # where each router's hook stands

    # -- the model's side

    def attach(self, model: nn.Module, found: Sequence[FoundRouter]) -> None:
        """Puts the hooks on the model and its routers."""
        anchors: dict[torch.device, Tensor] = {}
        for receiver, router in zip(self._receivers, found, strict=True):
            device = device_of(router.module)
            anchor = anchors.setdefault(device, torch.zeros((), dtype=torch.int64, device=device))
            hook = RouterHook(router.module, router.adapter, anchor, receiver)
            if router.adapter.hook == "pre":
                handle = router.module.register_forward_pre_hook(hook, with_kwargs=True)
                self._hooks.append((router.module._forward_pre_hooks, handle.id))
            else:
                handle = router.module.register_forward_hook(hook, with_kwargs=True)
                self._hooks.append((router.module._forward_hooks, handle.id))
            self._handles.append(handle)
        if found:
            anchor, receiver = anchors[device_of(found[0].module)], self._receivers[0]
            self._handles.append(model.register_forward_pre_hook(RootHook(anchor, receiver, True)))
            self._handles.append(model.register_forward_hook(RootHook(anchor, receiver, False)))

    def detach(self) -> None:
        """Takes the hooks off; a forward that is under way counts no more."""
        self._paused += 1
        for handle in self._handles:
            handle.remove()
        self._handles, self._hooks = [], []

    def release(self) -> None:
        """Gives up the model and the counts."""
        self._receivers, self._modules, self.accumulators = [], [], {}

    @property
    def device(self) -> torch.device:
        """Where the first router runs."""
        return device_of(self._modules[0]) if self._modules else torch.device("cpu")

    # -- what hooks call

    def mark(self, begin: bool) -> None:
        """A forward of the model begins or ends: a micro-batch, if training opened none."""
        if self._off():
            return
        if begin and (self._open is None or self._implicit):
            self.begin(Microbatch(self, None, False, 1))
            self._implicit = True
        elif not begin and self._implicit and self._open is not None:
            self.end(self._open, failed=False)

    def observe(self, i: int, seen: Observation, training: bool) -> None:
        """Layer i chose experts for some tokens."""
        if self._open is not None:
            self._open.heard = True
        device = seen.indices_TK.device
        if self._off() or device.type == "meta":
            return
        if torch.is_inference_mode_enabled():  # what is made there could not be added to outside
            with torch.inference_mode(False):
                self.observe(i, seen, training)
            return
        check_observation(self.layers[i], seen)
        phase = self._phase or ("train" if training else "eval")
        if phase == "eval":
            self._evaluated()
        accumulator = self._accumulator(phase, device)
        accumulator.follow(i, device)
        self._fired[i] = True
        chunk = self._next_chunk(i, accumulator)
        if self._open is None and self._labels.rows is not None:
            self._labels.set_rows(None)
        num_tokens, num_experts = seen.indices_TK.shape[0], self.layers[i].num_experts
        labels = self._labels.get(device, num_tokens, seen.layout, chunk, num_experts)
        accumulator.observe(i, seen, labels)
        if self._open is None:
            accumulator.commit(1, masked=False, only=i)

    def _off(self) -> bool:
        # A running backward pass: this is the recompute of a checkpoint, counted already in the forward.
        return self._paused > 0 or torch._C._current_graph_task_id() != -1

    def _next_chunk(self, i: int, accumulator: Accumulator) -> int:
        """The chunk of the open micro-batch that layer i is at; the one before is ended."""
        scope = self._open
        if scope is None:
            return 0
        chunk = scope.calls[i] if scope.chunks > 1 else 0
        scope.calls[i] += 1
        if chunk >= scope.chunks:
            raise UsageError(
                f"{self.layers[i].name} fired {chunk + 1} times in a micro-batch of chunks={scope.chunks}",
                "give the number of micro-batches that the schedule makes",
            )
        if chunk:
            accumulator.end_chunk(i)
        return chunk

    def _accumulator(self, phase: str, device: torch.device) -> Accumulator:
        if phase not in self.accumulators:
            devices = [device_of(module, device) for module in self._modules]
            self.accumulators[phase] = Accumulator(self.layers, devices, self._num_rows)
        return self.accumulators[phase]

    # -- micro-batches, phases, steps

    def begin(self, scope: Microbatch) -> None:
        """A micro-batch begins.

        Raises:
            UsageError: another one is open.
        """
        self.drop_unfinished()
        if self._open is not None:
            raise UsageError("a micro-batch inside a micro-batch", "close the first one before the next")
        self._open = scope
        self._labels.set_rows(scope.rows, scope.chunks)
        self._follow_later_hooks()

    def _follow_later_hooks(self) -> None:
        """Goes behind hooks that came later: one may replace the choice, as in replaying recorded routing."""
        for hooks, number in self._hooks:
            if number in hooks and not isinstance(hooks[next(reversed(hooks))], RouterHook):
                hooks[number] = hooks.pop(number)

    def end(self, scope: Microbatch, failed: bool) -> None:
        """A micro-batch ends: its counts join the record, or are dropped."""
        self._open, self._implicit = None, False
        replayed = (self._phase or "train") if self._labels.captured else None
        if not (failed or scope.heard or replayed):
            self._unheard = True
            if (silent := self.accumulators.get(self._phase or "train")) is not None:
                silent.microbatches += scope.chunks  # more than any layer's calls: the record tells
        for phase, accumulator in self.accumulators.items():
            if accumulator.dirty or phase == replayed:
                if failed:
                    accumulator.discard()
                else:
                    accumulator.commit(scope.chunks, scope.masked)

    def drop_unfinished(self) -> None:
        """Forgets a forward of the model that began and never ended: it crashed."""
        if self._implicit and self._open is not None:
            self.end(self._open, failed=True)

    @contextmanager
    def phase(self, name: Literal["train", "eval"]) -> Iterator[None]:
        """Forwards inside count as `name`, whatever `module.training` says.

        Raises:
            UsageError: there is no such phase.
        """
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

    def take_fired(self, look_at_device: bool) -> Fired:
        """Which layers fired since the last call.

        Args:
            look_at_device: When none was heard, count on the device, which waits for it: a step replayed from
                CUDA graphs runs no Python.
        """
        fired, self._fired = self._fired, [False] * len(self._fired)
        unheard, self._unheard = self._unheard, False
        if look_at_device and not any(fired) and self.accumulators:
            fired = [any(a.fired(i) for a in self.accumulators.values()) for i in range(len(fired))]
        silent = [info.name for info, heard in zip(self.layers, fired, strict=True) if not heard]
        return Fired(sum(fired), silent, unheard)


def device_of(module: nn.Module, default: torch.device | None = None) -> torch.device:
    """Where a module's parameters are; `default` (or the host) where it has none, or none yet."""
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type == "meta":
        return default or torch.device("cpu")
    return parameter.device
