"""One micro-batch per forward of the model, for trainers that keep the batch to themselves.

The sources travel with the batch, as a keyword argument that the model does not know: it is taken out before
the model sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_audit.hooks.attach import Hook
from moe_audit.hooks.recorder import Recorder


class _Hook(Hook):
    """Compiled code calls it as it is: what it does is not for tracing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class ForwardMicrobatches:
    """Opens a micro-batch of `recorder` before each forward of `model` and closes it after.

    Args:
        recorder: Attached to `model`.
        model: The module that the trainer calls, without DDP or compile around it.
        source_key: Keyword argument with the source ids, (B,) or (B, S), taken out. Missing: unlabelled.
        mask_key: Keyword argument with a mask, True or 1 where a token counts; it stays. It counts only where
            it has two dimensions: attention masks of four say nothing about padding alone. Of one that is
            longer than the input (decoding with a cache) the last columns count. That of an encoder-decoder
            is the encoder's alone and is not read.

    Attributes:
        enabled: False: forwards are not recorded at all (warm-up, dummy batches).
        loss: Sum of the losses that training forwards have returned since it was last set; None: none did.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        source_key: str = "source_ids",
        mask_key: str = "attention_mask",
    ) -> None:
        self.recorder = recorder
        self.source_key = source_key
        self.mask_key = mask_key
        self.enabled = True
        self.loss: Tensor | None = None
        self._open: Any = None
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._before), prepend=True, with_kwargs=True),
            model.register_forward_hook(_Hook(self._after), always_call=True),
        ]

    def remove(self) -> None:
        """Takes the hooks off the model; the model then must not be given sources any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sources = kwargs.get(self.source_key)
        mask = _mask_of_input(module, args, kwargs, self.mask_key)
        self._open = self.recorder.microbatch(sources, mask) if self.enabled else self.recorder.paused()
        self._open.__enter__()
        return args, {key: value for key, value in kwargs.items() if key != self.source_key}

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        scope, self._open = self._open, None
        if scope is None:
            return
        if output is None:  # the forward failed: its micro-batch is dropped
            scope.__exit__(RuntimeError, RuntimeError("the forward failed"), None)
            return
        scope.__exit__(None, None, None)
        loss = getattr(output, "loss", None)
        if self.enabled and module.training and isinstance(loss, Tensor) and loss.numel() == 1:
            self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()


def _mask_of_input(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: str
) -> Tensor | None:
    """The mask (B, S) of the tokens that this forward is given; None where none tells."""
    mask = kwargs.get(key)
    config = getattr(model, "config", None)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or getattr(config, "is_encoder_decoder", False):
        return None
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    tokens = next((x for x in given if isinstance(x, Tensor) and x.dim() >= 2), None)
    return mask if tokens is None else mask[:, -tokens.shape[1] :]
