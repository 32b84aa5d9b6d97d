"""The hooks themselves, and which models they cannot be put on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_audit.hooks import ops
from moe_audit.hooks.adapters.base import Adapter
from moe_audit.thresholds.errors import UsageError


def inert(*args: Any, **kwargs: Any) -> None:
    """What a hook turns into when its model is copied or pickled: the copy is not recorded."""


class _Hook:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return inert

    def __reduce__(self) -> str:
        return "inert"


class RouterHook(_Hook):
    """Forward hook, or with the adapter's hook "pre" forward-pre-hook, of one router.

    It does the same in the recompute of a checkpoint as in the forward (selective checkpointing matches
    operators by their order); the recorder tells them apart.
    """

    def __init__(self, module: nn.Module, adapter: Adapter, anchor: Tensor, receiver: ops.Receiver) -> None:
        self.module = module
        self.adapter = adapter
        self.anchor = anchor
        self.handle = ops.new_handle(receiver)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        if module is not self.module:
            raise UsageError(
                f"{type(module).__name__} is a replica of the module that the recorder is attached to",
                "nn.DataParallel is not supported: use DistributedDataParallel",
            )
        with torch.no_grad():
            seen = self.adapter.observe(module, args, kwargs, output)
            if seen is not None:
                torch.ops.moe_audit.observe(
                    self.anchor,
                    seen.indices_TK,
                    seen.full_TE,
                    seen.kept_TK,
                    seen.full_kind or "none",
                    seen.layout,
                    self.handle,
                    module.training,
                )


class RootHook(_Hook):
    """Marks begin and end of a forward of the attached model."""

    def __init__(self, anchor: Tensor, receiver: ops.Receiver, begin: bool) -> None:
        self.anchor = anchor
        self.begin = begin
        self.handle = ops.new_handle(receiver)

    def __call__(self, *args: Any) -> None:
        with torch.no_grad():
            torch.ops.moe_audit.mark(self.anchor, self.handle, self.begin)


def check_model(model: nn.Module) -> None:
    """Raises UsageError for models whose hooks would not run, or run in several threads."""
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise UsageError(
                "nn.DataParallel is not supported: its replicas share hooks between threads",
                "use DistributedDataParallel",
            )


def allow_hooks_in_compiled_code() -> None:
    """By default compiled code is reused for modules whose hooks differ: a hook would silently not run."""
    import torch._dynamo.config

    torch._dynamo.config.skip_nnmodule_hook_guards = False
