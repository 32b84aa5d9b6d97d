"""The hooks themselves, and which models they cannot be put on."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_audit.hooks import ops
from moe_audit.hooks.adapters.base import Adapter
from moe_audit.thresholds.errors import UsageError


def inert(*args: Any, **kwargs: Any) -> None:
    """What a hook turns into when its model is copied or pickled: the copy is not recorded."""


class Hook:
    """A copy of the model, deep or pickled, does without it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return inert

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _inert, ()


def _inert() -> Any:
    return inert


class RouterHook(Hook):
    """Forward hook, or with the adapter's hook "pre" forward-pre-hook, of one router.

    It does the same in the recompute of a checkpoint as in the forward (selective checkpointing matches
    operators by their order); the recorder tells them apart.
    """

    def __init__(self, module: nn.Module, adapter: Adapter, anchor: Tensor, receiver: ops.Receiver) -> None:
        self.module = module
        self.adapter = adapter
        self.anchor = anchor
        self.receiver = receiver
        self.handle = ops.new_handle(receiver)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        if module is not self.module:
            raise UsageError(
                f"{type(module).__name__} is a replica of the module that the recorder is attached to",
                "nn.DataParallel is not supported: use DistributedDataParallel",
            )
        if not ops.opaque():
            # What torch.no_grad() does, in a sixth of its time.
            enabled = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)
            try:
                seen = self.adapter.observe(module, args, kwargs, output)
                if seen is not None:
                    self.receiver.observe(seen, module.training)
            finally:
                torch._C._set_grad_enabled(enabled)
            return
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
                    seen.gated_TE,
                    seen.complete,
                    self.handle,
                    module.training,
                )


class RootHook(Hook):
    """Marks begin and end of a forward of the attached model."""

    def __init__(self, anchor: Tensor, receiver: ops.Receiver, begin: bool) -> None:
        self.anchor = anchor
        self.receiver = receiver
        self.begin = begin
        self.handle = ops.new_handle(receiver)

    def __call__(self, *args: Any) -> None:
        if not ops.opaque():
            self.receiver.mark(self.begin)
            return
        with torch.no_grad():
            torch.ops.moe_audit.mark(self.anchor, self.handle, self.begin)


def check_model(model: nn.Module) -> None:
    """Raises UsageError for models whose hooks would run in several threads."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UsageError(
            "nn.DataParallel is not supported: its replicas share hooks between threads",
            "use DistributedDataParallel",
        )


def check_compiled(model: nn.Module, routers: Sequence[nn.Module]) -> None:
    """Compiled code does not see hooks that come later: refuses a model that has run compiled, and makes
    torch.compile look at hooks from now on, also where a model of the same classes was compiled before.

    Raises:
        UsageError: the model, or a part of it that holds a router, was compiled and run.
    """
    found = {id(router) for router in routers}
    holders = [module for module in model.modules() if any(id(part) in found for part in module.modules())]
    dynamo = importlib.import_module("torch._dynamo")
    stale = {code for module in holders if (code := _compiled_code(module)) is not None}
    if stale and any(_is_compiled(module) for module in holders):
        raise UsageError(
            f"{type(model).__name__} was compiled and run before: compiled code does not see new hooks",
            "attach before the first call, or call torch._dynamo.reset() before attaching",
        )
    for code in stale:
        dynamo.reset_code(code)
    dynamo.config.skip_nnmodule_hook_guards = False
    # Layers that are compiled one by one share their code, and each has a hook of its own: a version a layer.
    versions = 8 * (len(found) + 1)
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, versions)
    dynamo.config.accumulated_recompile_limit = max(dynamo.config.accumulated_recompile_limit, 4 * versions)


def _compiled_code(module: nn.Module) -> Any:
    """The code of the module's forward if torch.compile has compiled it, for this or another instance."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    code = getattr(type(module).forward, "__code__", None)
    if eval_frame is None or code is None or not eval_frame._debug_get_cache_entry_list(code):
        return None
    return code


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was applied to this very module."""
    if module._compiled_call_impl is not None:
        return True
    optimized = sys.modules["torch._dynamo.eval_frame"].OptimizedModule
    return isinstance(module, optimized) or any(
        type(x) is optimized and x._orig_mod is module for x in gc.get_objects()
    )
