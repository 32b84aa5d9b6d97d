"""Where a router can be observed, and one observation in the normal form that the recorder counts.

Shape suffixes: T tokens that reached the router, K picks per token, E experts of the layer.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from moe_audit.store import LayerInfo
from torch import Tensor, nn

NO_PICK = torch.iinfo(torch.int32).min  # an unused slot of indices_TK: no pick at all, so not an invalid one


class Observation(NamedTuple):
    """What one router forward chose, in normal form. Any integer type; the recorder detaches.

    Attributes:
        indices_TK: Chosen experts, global ids. `NO_PICK` marks unused slots (routers whose number of picks
            varies, experts of other ranks, fused shared experts); any other id outside [0, E) is invalid
            (NaN logits, sentinels) and is counted as such.
        weights_TK: Combine weights of the picks, or None.
        full_TE: One value for every expert, or None.
        full_kind: "logits" (the layer's gating makes them probabilities) or "probs" (non-negative scores;
            rows are normalised). None where there is no full_TE.
        kept_TK: False where a pick was dropped for capacity; None where nothing is dropped or not known.
        layout: Order of the T tokens where they come from a (B, S) batch: "batch" is row-major over (B, S),
            "sequence" over (S, B).
    """

    indices_TK: Tensor
    weights_TK: Tensor | None = None
    full_TE: Tensor | None = None
    full_kind: Literal["logits", "probs"] | None = None
    kept_TK: Tensor | None = None
    layout: Literal["batch", "sequence"] = "batch"


class Adapter(ABC):
    """How to observe one class of router. Subclass it and decorate the class with `register`.

    Attributes:
        hook: "forward" observes after the module's forward, "pre" before it (`output` is then None).
    """

    hook: ClassVar[Literal["forward", "pre"]] = "forward"

    @abstractmethod
    def match(self, module: nn.Module) -> bool:
        """Whether `module` is one that this adapter observes."""

    @abstractmethod
    def describe(self, name: str, module: nn.Module) -> LayerInfo:
        """The layer as the store keeps it. `layer` is `block_index(name)`, or -1 where the name tells none."""

    @abstractmethod
    def observe(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Observation | None:
        """One observation; None for a call that routes nothing. No synchronisation, nothing kept."""

    def find(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules to hook, by name."""
        for name, module in model.named_modules():
            if self.match(module):
                yield name, module


class FoundRouter(NamedTuple):
    """One router of a model, and how to observe it."""

    info: LayerInfo
    module: nn.Module
    adapter: Adapter


AdapterClass = TypeVar("AdapterClass", bound=type[Adapter])
_registry: list[Adapter] = []


def register(adapter: AdapterClass) -> AdapterClass:
    """Class decorator: makes an adapter known. The last one registered is asked first."""
    _registry.insert(0, adapter())
    return adapter


def find_routers(model: nn.Module) -> list[FoundRouter]:
    """The routers of `model` in model order, each once, with layer numbers.

    A module that contains another matched one is left out: it would count the same tokens again.
    """
    order = {id(module): i for i, module in enumerate(model.modules())}
    found: dict[int, tuple[str, nn.Module, Adapter]] = {}
    for adapter in _registry:
        for name, module in adapter.find(model):
            found.setdefault(id(module), (name, module, adapter))
    inner = [
        (name, module, adapter)
        for name, module, adapter in found.values()
        if not any(id(part) in found for part in module.modules() if part is not module)
    ]
    inner.sort(key=lambda item: order[id(item[1])])
    infos = [adapter.describe(canonical_name(name), module) for name, module, adapter in inner]
    numbers = [info.layer for info in infos]
    if -1 in numbers or len(set(numbers)) < len(numbers):  # encoder and decoder, or names without a number
        infos = [replace(info, layer=i) for i, info in enumerate(infos)]
    return [
        FoundRouter(info, module, adapter) for info, (_, module, adapter) in zip(infos, inner, strict=True)
    ]


_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)|^module\.")


def canonical_name(name: str) -> str:
    """A module's name without the prefixes that compile, FSDP, DDP and checkpoint wrappers add."""
    before = None
    while before != name:
        before, name = name, _WRAPPERS.sub(r"", name).removeprefix(".")
    return name


def block_index(name: str) -> int:
    """The number of the block in a canonical module name, -1 if it has none: `model.layers.3.mlp.gate` -> 3."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else -1
