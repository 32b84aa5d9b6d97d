"""The last resort, where no adapter knows a router of the model: modules that are named like one.

What such a module returns is told apart by form alone, and what is not clear is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from moe_audit.hooks.adapters.base import Adapter, Observation, class_name, parent_of
from moe_audit.hooks.adapters.form import EXPERT_COUNTS, PICK_COUNTS, by_form, number
from moe_audit.store import LayerInfo
from moe_audit.thresholds.errors import UsageError

_NAME = re.compile(r"(Router|Gate|Gating)$")


class RouterLike(Adapter):
    """One module whose class is called …Router, …Gate or …Gating.

    Args:
        num_experts, top_k: E and K, as the module, the block around it or their configurations say.
    """

    def __init__(self, num_experts: int | None, top_k: int | None) -> None:
        self.num_experts, self.top_k = num_experts, top_k

    def match(self, module: nn.Module) -> bool:
        """Whether the class is named like a router."""
        return bool(_NAME.search(type(module).__name__))

    def describe(self, name: str, module: nn.Module, parent: nn.Module) -> LayerInfo:
        """The layer.

        Raises:
            UsageError: E or K is not known.
        """
        if self.num_experts is None or self.top_k is None:
            what, names = ("experts", EXPERT_COUNTS) if self.num_experts is None else ("picks", PICK_COUNTS)
            raise UsageError(
                f"{name} ({class_name(module)}) looks like a router, but its number of {what} is not known:"
                f" none of {', '.join(names)} is set on it or on the block around it",
                "give Recorder.attach an adapter, see moe_audit.hooks.adapters.generic",
            )
        return LayerInfo(-1, name, self.num_experts, self.top_k)

    def observe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Observation:
        """The one integer tensor with last dimension K."""
        assert self.num_experts is not None and self.top_k is not None  # describe() made sure
        return by_form(output, self.num_experts, self.top_k, class_name(module))


def router_likes(model: nn.Module) -> Iterator[tuple[str, nn.Module, RouterLike]]:
    """Modules of `model` that are named like a router and have a number of experts or of picks."""
    for name, module in model.named_modules():
        block = parent_of(name, model)
        places = [module, getattr(module, "config", None), block, getattr(block, "config", None)]
        adapter = RouterLike(number(tuple(places), EXPERT_COUNTS), number(tuple(places), (*PICK_COUNTS, "k")))
        if adapter.match(module) and (adapter.num_experts or adapter.top_k):
            yield name, module, adapter
