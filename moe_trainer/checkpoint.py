"""Checkpoints: a folder per step, complete or not there at all.

checkpoints/step_00000100/model.safetensors   weights
                          state.pt            optimizer, random numbers, position in the data
                          config.toml         the configuration they belong to
checkpoints/last                              link to the newest
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe_audit.thresholds.errors import UsageError
from moe_trainer.runs import LAST


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, state: dict[str, Any], config_toml: str, keep: int
) -> Path:
    """Write the checkpoint of `step` below `folder`, point `last` at it, drop all but the newest `keep`.

    Everything is written into a hidden folder that is renamed when it is complete and on the disk, so
    that a run killed at any moment leaves only whole checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".*"):
        _remove(left_over)
    target = folder / f"step_{step:08d}"
    partial = folder / f".{target.name}"
    partial.mkdir()
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, partial / "model.safetensors")
    torch.save({"step": step, **state}, partial / "state.pt")
    (partial / "config.toml").write_text(config_toml, encoding="utf-8")
    for path in [*partial.iterdir(), partial]:
        _sync(path)
    if target.exists():  # an earlier attempt of a resumed run was here
        shutil.rmtree(target)
    partial.rename(target)
    _point(folder / LAST, target.name)
    _sync(folder)
    for old in sorted(folder.glob("step_*"))[:-keep]:
        if old.name != target.name:
            shutil.rmtree(old)
    return target


def load_checkpoint(checkpoint: Path, model: nn.Module) -> dict[str, Any]:
    """Load the weights into `model`; returns the rest of the state.

    Raises:
        UsageError: the weights do not fit the model.
    """
    weights = load_file(checkpoint / "model.safetensors")
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if expected != found:
        name = next(n for n in [*expected, *found] if expected.get(n) != found.get(n))
        raise UsageError(
            f"{checkpoint} does not fit the model: {name} is {found.get(name, 'missing')}, "
            f"the configuration asks for {expected.get(name, 'none')}",
            "model settings cannot be overridden when a run is resumed",
        )
    model.load_state_dict(weights)
    state: dict[str, Any] = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
    return state


def _point(link: Path, name: str) -> None:
    temporary = link.with_name(f".{link.name}")
    temporary.symlink_to(name)
    temporary.replace(link)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
