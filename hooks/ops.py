"""The recorder's two operators. They are opaque: torch.compile calls them at run time (fullgraph too), and
selective checkpointing sees one call, the same in forward and recompute, instead of our arithmetic.

The counts live in the recorder behind `handle`; `anchor` is only there to keep a compiler from removing or
reordering the calls.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from moe_audit.hooks.adapters.base import Observation


class Receiver(Protocol):
    """Who gets the calls of one handle: `observe` for a router, `mark` for the model."""

    def observe(self, seen: Observation, training: bool) -> None: ...

    def mark(self, begin: bool) -> None: ...


_receivers: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()
_handles = itertools.count()


def new_handle(receiver: Receiver) -> int:
    """A number that compiled code may carry for `receiver`; it holds no reference."""
    handle = next(_handles)
    _receivers[handle] = receiver
    return handle


def _observe(
    anchor: Tensor,
    indices_TK: Tensor,
    full_TE: Tensor | None,
    kept_TK: Tensor | None,
    full_kind: str,
    layout: str,
    gated_TE: Tensor | None,
    complete: bool,
    handle: int,
    training: bool,
) -> None:
    receiver = _receivers.get(handle)
    if receiver is not None:
        kind = cast(Literal["logits", "probs"], full_kind) if full_TE is not None else None
        order = cast(Literal["batch", "sequence"], layout)
        seen = Observation(indices_TK, None, full_TE, kind, kept_TK, order, gated_TE, complete)
        with torch.no_grad():  # compiled code may call with gradients on
            receiver.observe(seen, training)


_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack


def opaque() -> bool:
    """Whether calls must go through the operators: in code that is compiled, under modes that see every
    operator (selective checkpointing, tracing) and under torch.func. Elsewhere operators only cost time."""
    return torch.compiler.is_compiling() or _modes() > 0 or _transforms() is not None


def _mark(anchor: Tensor, handle: int, begin: bool) -> None:
    receiver = _receivers.get(handle)
    if receiver is not None:
        receiver.mark(begin)


_SCHEMAS: dict[str, tuple[str, Callable[..., None]]] = {
    "observe": (
        "(Tensor(a!) anchor, Tensor indices, Tensor? full, Tensor? kept, str full_kind, str layout,"
        " Tensor? gated, bool complete, int handle, bool training) -> ()",
        _observe,
    ),
    "mark": ("(Tensor(a!) anchor, int handle, bool begin) -> ()", _mark),
}
_library: Any = torch.library.Library("moe_audit", "DEF")  # type: ignore[no-untyped-call]
for _name, (_schema, _function) in _SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_audit::{_name}", lambda *args: None, lib=_library)
