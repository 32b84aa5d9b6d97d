"""Attaching to a model: adapters, recorder, writer, training gate. Everything here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_audit.hooks.gate import TrainingGate
    from moe_audit.hooks.recorder import Recorder

__all__ = ["Recorder", "TrainingGate"]


def __getattr__(name: str) -> Any:
    """Imports torch only when the recorder or the gate is asked for."""
    if name == "Recorder":
        from moe_audit.hooks.recorder import Recorder

        return Recorder
    if name == "TrainingGate":
        from moe_audit.hooks.gate import TrainingGate

        return TrainingGate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
