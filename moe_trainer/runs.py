"""Starting and resuming runs, and the folder a run lives in.

Torch is imported when training begins, so that a wrong folder, setting or text is reported at once.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from moe_audit.thresholds.errors import UsageError
from moe_trainer.config import TrainConfig, load_config
from moe_trainer.data import TokenStream, read_corpus

# What a run writes into its folder; the recorder has side files beside routing.db.
RUN_PATTERNS = ("config.toml", "routing*.db*", "train.log", "checkpoints", "checks", "tensorboard")
LAST = "last"  # the link to the checkpoint that a resume continues from


def run(config: TrainConfig, folder: Path, *, overwrite: bool = False) -> Path:
    """Train from the start into `folder`; returns the last checkpoint.

    Raises:
        UsageError: `folder` holds a run already (and not `overwrite`), or a setting or the text is wrong.
        DivergedError: the loss became NaN or infinite.
    """
    stream = build_stream(config)  # before anything of an old run is removed
    make_run_folder(folder, overwrite)
    from moe_trainer.train import Trainer

    return Trainer(config, folder, stream).fit()


def resume(
    folder: Path,
    overrides: tuple[str, ...] = (),
    *,
    step: int | None = None,
    reset_routers: bool = False,
) -> Path:
    """Continue a run from a checkpoint, as if it had never stopped; returns the last checkpoint.

    Args:
        overrides: Changed settings, as in "train.steps=500".
        step: Of the checkpoint; None takes the last one (whose routing did not fail, where a gate judges).
        reset_routers: Start the routers anew, for a run whose routing has collapsed.

    Raises:
        UsageError: nothing to resume, or the run is complete.
        DivergedError: the loss became NaN or infinite.
    """
    checkpoint = find_checkpoint(folder, step)
    config = load_config(folder / "config.toml", overrides)
    stream = build_stream(config)
    from moe_trainer.train import Trainer

    return Trainer(config, folder, stream, checkpoint, reset_routers=reset_routers).fit()


def make_run_folder(folder: Path, overwrite: bool) -> None:
    """Make the folder; with `overwrite`, remove the run that is in it and nothing else."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", "give a folder with --save-folder")
    present = [path for pattern in RUN_PATTERNS for path in sorted(folder.glob(pattern))]
    if present and not overwrite:
        raise UsageError(
            f"{folder} holds a run already",
            f"continue it with `moe-train resume {folder}`, or replace it with --overwrite",
        )
    for path in present:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    """The checkpoint of a step, or the last one, of a run folder.

    Raises:
        UsageError: `run` is no run folder, or has no such checkpoint.
    """
    if not (run / "config.toml").is_file():
        raise UsageError(f"{run} is not a run folder: it has no config.toml", "give the --save-folder")
    checkpoint = run / "checkpoints" / (LAST if step is None else f"step_{step:08d}")
    if (checkpoint / "state.pt").is_file():
        return checkpoint.resolve()
    saved = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
    if not saved:
        raise UsageError(
            f"{run} has no checkpoint to resume from", "start it again: moe-train run --overwrite"
        )
    raise UsageError(
        f"{run} has no checkpoint of step {step}", f"it has those of {', '.join(map(str, saved))}"
    )


def build_stream(config: TrainConfig) -> TokenStream:
    """The token stream of a configuration, at its start."""
    data = config.data
    return TokenStream(
        read_corpus(data.sources, data.max_document_bytes),
        sequence_length=data.sequence_length,
        shard_tokens=data.shard_tokens,
        shard_order=data.shard_order,
        shuffle=data.shuffle,
        seed=config.train.seed,
    )
