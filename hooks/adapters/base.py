"""Where a router can be observed, and one observation in the normal form that the recorder counts.

Shape suffixes: T tokens that reached the router, K picks per token, E experts of the layer.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from moe_audit.store import LayerInfo
from moe_audit.thresholds.errors import UsageError

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
        gated_TE: float32 [T, E], what the layer's gating made of the logits in full_TE, or None. Where the
            gating is a softmax over all experts the recorder takes it and computes none of its own.
        complete: No slot of indices_TK is `NO_PICK`: the recorder need not look.
    """

    indices_TK: Tensor
    weights_TK: Tensor | None = None
    full_TE: Tensor | None = None
    full_kind: Literal["logits", "probs"] | None = None
    kept_TK: Tensor | None = None
    layout: Literal["batch", "sequence"] = "batch"
    gated_TE: Tensor | None = None
    complete: bool = False


class Adapter(ABC):
    """How to observe one class of router. Subclass it and decorate the class with `register`.

    Attributes:
        classes: Qualified names (`package.module.Class`) of the router classes; subclasses match too.
        hook: "forward" observes after the module's forward, "pre" before it (`output` is then None).
        fallback: Whether to give way to any other adapter that matches under the same parent module.
    """

    classes: ClassVar[tuple[str, ...]] = ()
    hook: ClassVar[Literal["forward", "pre"]] = "forward"
    fallback: ClassVar[bool] = False

    def match(self, module: nn.Module) -> bool:
        """Whether `module` is one that this adapter observes."""
        return is_a(module, *self.classes)

    def find(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules to hook, by name."""
        for name, module in model.named_modules():
            if self.match(module):
                yield name, module

    @abstractmethod
    def describe(self, name: str, module: nn.Module, parent: nn.Module) -> LayerInfo:
        """The layer as the store keeps it; `layer` is -1 where `find_routers` is to number it by its name.

        Args:
            name: The module's name in the model, without wrapper prefixes.
            module: The module.
            parent: The module that holds it.

        Raises:
            UsageError: This router is known and cannot be recorded; says why, and what to do.
        """

    @abstractmethod
    def observe(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Observation | None:
        """One observation; None for a call that routes nothing. No synchronisation, nothing kept."""

    def router(self, module: nn.Module, parent: nn.Module) -> nn.Module:
        """What holds the router's weights: the observed module, unless that is a part beside the router."""
        if self.hook == "forward" and any(True for _ in module.parameters()):
            return module
        named = (getattr(parent, name, None) for name in ("router", "gate"))
        return next((part for part in named if isinstance(part, nn.Module)), module)


class FoundRouter(NamedTuple):
    """One router of a model, and how to observe it.

    Attributes:
        module: What the hook is put on.
        router: What holds the router's weights; mostly the same.
    """

    info: LayerInfo
    module: nn.Module
    adapter: Adapter
    router: nn.Module


class _Match(NamedTuple):
    rank: int  # of the adapter: 0 is asked first
    name: str
    module: nn.Module
    adapter: Adapter


AdapterClass = TypeVar("AdapterClass", bound=type[Adapter])
_registry: list[Adapter] = []


def add_adapter(adapter: Adapter) -> None:
    """Make an adapter known. The last one added is asked first."""
    _registry.insert(0, adapter)


def register(adapter: AdapterClass) -> AdapterClass:
    """Class decorator: `add_adapter` with one of the class."""
    add_adapter(adapter())
    return adapter


def find_routers(model: nn.Module, adapter: Adapter | None = None) -> list[FoundRouter]:
    """The routers of `model` in model order, each once, with layer numbers.

    Args:
        model: Any module; wrappers of compile, DDP, FSDP and checkpointing may be around it or inside.
        adapter: Ask only this one; None: all registered ones.

    Raises:
        UsageError: No router was found (says what was looked at), or one that cannot be recorded.
    """
    order = {id(module): i for i, module in enumerate(model.modules())}
    matches: dict[int, _Match] = {}
    for rank, candidate in enumerate(_registry if adapter is None else [adapter]):
        for name, module in candidate.find(model):
            matches.setdefault(id(module), _Match(rank, name, module, candidate))
    if not matches and adapter is None:
        from moe_audit.hooks.adapters.router_like import router_likes  # which builds on this module

        matches = {id(m): _Match(0, name, m, like) for name, m, like in router_likes(model)}
    matches = _without_nested(_without_covered(matches, model))
    if not matches:
        raise _nothing_found(model)
    found = sorted(matches.values(), key=lambda match: order[id(match.module)])
    numbers = layer_numbers([match.name for match in found], model)
    routers = []
    for number, (_, name, module, chosen) in zip(numbers, found, strict=True):
        parent = parent_of(name, model)
        info = chosen.describe(canonical_name(name), module, parent)
        info = info if info.layer >= 0 else replace(info, layer=number)
        routers.append(FoundRouter(info, module, chosen, chosen.router(module, parent)))
    double = [layer for layer, times in Counter(r.info.layer for r in routers).items() if times > 1]
    if double:
        names = ", ".join(r.info.name for r in routers if r.info.layer in double)
        raise UsageError(f"several routers claim layer {double[0]}: {names}", "give each its own number")
    return routers


def _without_nested(matches: dict[int, _Match]) -> dict[int, _Match]:
    """Of a match inside another one, which would count the same tokens again, keep one.

    The adapter that is asked first wins; matches of the same adapter are resolved to the inner one.
    """
    dropped: set[int] = set()
    for outer in matches.values():
        for part in outer.module.modules():
            inner = matches.get(id(part))
            if inner is not None and inner is not outer:
                dropped.add(id(inner.module if outer.rank < inner.rank else outer.module))
    return {key: match for key, match in matches.items() if key not in dropped}


def _without_covered(matches: dict[int, _Match], model: nn.Module) -> dict[int, _Match]:
    firm = {key for key, match in matches.items() if not match.adapter.fallback}

    def covered(match: _Match) -> bool:
        if not match.adapter.fallback:
            return False
        return any(id(part) in firm for part in parent_of(match.name, model).modules())

    return {key: match for key, match in matches.items() if not covered(match)}


class NoRouterError(UsageError):
    """No router was found; right for a pipeline stage of dense blocks, wrong for a whole model."""


def _nothing_found(model: nn.Module) -> NoRouterError:
    """The error of a model without a known router: what was looked at, and what looks like one."""
    classes = Counter(class_name(module) for module in model.modules())
    likely = [
        name for name in classes if re.search(r"rout|gat(e|ing)|moe|expert|mixture", name, re.IGNORECASE)
    ]
    listed = ", ".join(f"{classes[name]} x {name}" for name in likely[:8]) or "none"
    return NoRouterError(
        f"no router found in {class_name(model)} ({sum(classes.values())} modules of {len(classes)} classes "
        f"looked at); classes that look like part of a mixture of experts: {listed}",
        "a dense model has nothing to record; for a router of your own give Recorder.attach an adapter, "
        "see moe_audit.hooks.adapters.generic",
    )


def class_name(module: nn.Module) -> str:
    """The qualified name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_a(module: nn.Module, *names: str) -> bool:
    """Whether the class of `module`, or one of its bases, has one of these qualified names."""
    return any(f"{base.__module__}.{base.__qualname__}" in names for base in type(module).__mro__)


_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)|^module\.")


def canonical_name(name: str) -> str:
    """A module's name without the prefixes that compile, FSDP, DDP and checkpoint wrappers add."""
    before = None
    while before != name:
        before, name = name, _WRAPPERS.sub(r"", name).removeprefix(".")
    return name


def parent_of(name: str, model: nn.Module) -> nn.Module:
    """The module that holds the one of this name, wrappers around it not counted."""
    parts = name.split(".")
    while parts and canonical_name(".".join(parts)) == canonical_name(name):
        parts.pop()
    return model.get_submodule(".".join(parts))


def layer_numbers(names: list[str], model: nn.Module) -> list[int]:
    """One number per router: the index of its block, counted through the stacks of blocks in model order.

    `decoder.layers.3.mlp.router` is 3; where an encoder of 6 blocks also routes, it is 9. The second
    router of the same block is numbered after all first ones, and so on.
    """
    sizes: dict[tuple[int, str], int] = {}
    places: list[tuple[tuple[int, str], int]] = []
    taken: Counter[tuple[str, int]] = Counter()
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        stack, index = (name, 0) if at is None else (".".join(parts[:at]), int(parts[at]))
        slot = taken[stack, index]
        taken[stack, index] += 1
        places.append(((slot, stack), index))
        blocks = [index] if at is None else map(int, filter(str.isdigit, model.get_submodule(stack)._modules))
        sizes.setdefault((slot, stack), max(blocks) + 1)
    offsets: dict[tuple[int, str], int] = {}
    following = 0
    for key in sorted(sizes, key=lambda key: key[0]):  # stable: stacks stay in model order
        offsets[key] = following
        following += sizes[key]
    return [offsets[key] + index for key, index in places]
