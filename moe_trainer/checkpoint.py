"""Checkpoints: a folder per step, complete or not there at all.

checkpoints/step_00000100/model.safetensors   weights
                          state.pt            optimizer, random numbers, position in the data
                          config.toml         the configuration they belong to
                          checkpoint.json     step, loss, status of the routing
                          routing.json        the verdict on the routing up to here, where a gate judges
checkpoints/last                              link to the newest
checkpoints/best                              link to the one with the lowest loss

Where a gate judges, neither link points at a checkpoint whose routing failed while there is one that did not.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe_audit.thresholds.errors import UsageError
from moe_trainer.runs import LAST

BEST = "best"  # the link to the checkpoint with the lowest loss


@dataclass(frozen=True)
class Standing:
    """How a checkpoint compares with others; `checkpoint.json` in its folder.

    Attributes:
        loss: Mean loss of the steps since the checkpoint before it.
        routing: Status of the gate's verdict up to this step; None where no gate judges.
    """

    step: int
    loss: float
    routing: str | None

    @property
    def failed(self) -> bool:
        return self.routing in ("FAIL", "INVALID")


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    state: dict[str, Any],
    config_toml: str,
    standing: Standing,
    verdict: dict[str, Any] | None,
    keep: int,
) -> Path:
    """Write the checkpoint of one step below `folder`, set the links, drop all but the newest `keep` and
    those that are linked.

    Everything is written into a hidden folder that is renamed when it is complete and on the disk, so
    that a run killed at any moment leaves only whole checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".*"):
        _remove(left_over)
    target = folder / f"step_{standing.step:08d}"
    partial = folder / f".{target.name}"
    partial.mkdir()
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, partial / "model.safetensors")
    torch.save({"step": standing.step, **state}, partial / "state.pt")
    (partial / "config.toml").write_text(config_toml, encoding="utf-8")
    (partial / "checkpoint.json").write_text(json.dumps(asdict(standing)), encoding="utf-8")
    if verdict is not None:
        (partial / "routing.json").write_text(json.dumps(verdict, indent=1), encoding="utf-8")
    for path in [*partial.iterdir(), partial]:
        _sync(path)
    if target.exists():  # an earlier attempt of a resumed run was here
        shutil.rmtree(target)
    partial.rename(target)
    # Later ones are from before a resume that went back: this attempt has not come that far.
    known = [path for path in sorted(folder.glob("step_*")) if path.name <= target.name]
    linked = _link(folder, known)
    _sync(folder)
    for old in known[:-keep]:
        if old.name not in linked:
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


def _link(folder: Path, checkpoints: Sequence[Path]) -> set[str]:
    """Points `last` and `best` at theirs of the checkpoints; returns the names of these."""
    standings = {
        path.name: Standing(**json.loads((path / "checkpoint.json").read_text(encoding="utf-8")))
        for path in checkpoints
    }
    last = max(standings, key=lambda name: (not standings[name].failed, standings[name].step))
    best = min(standings, key=lambda name: (standings[name].failed, standings[name].loss))
    _point(folder / LAST, last)
    _point(folder / BEST, best)
    return {last, best}


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
