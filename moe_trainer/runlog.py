"""What a run tells people: a plain log file, TensorBoard events, and lines or a progress bar."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter

# One panel that shows the loss beside the routers' health.
PANEL = {
    "routing": {
        "loss and the worst layer": [
            "Multiline",
            ["train/loss", "routing/worst_max_load", "routing/worst_min_load", "routing/gate_action"],
        ]
    }
}


class RunLog:
    """Log of one run; a context manager.

    Args:
        folder: The run folder; `train.log` and `tensorboard/` go there.
        steps: Steps of the whole run.
        first_step: The first step of this attempt. From there on TensorBoard drops what earlier attempts
            wrote.
    """

    def __init__(self, folder: Path, steps: int, first_step: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self._file = (folder / "train.log").open("a", encoding="utf-8", buffering=1)
        self._tensorboard = SummaryWriter(
            str(folder / "tensorboard"), purge_step=first_step if first_step > 1 else None
        )
        self._tensorboard.add_custom_scalars(PANEL)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn(f"[bold]{escape(folder.name)}[/]"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._task = self._progress.add_task("train", total=steps, completed=first_step - 1, status="")
            self._progress.start()

    def message(self, text: str) -> None:
        """One line for the log file and the terminal."""
        self.note(text)
        self.console.print(text, markup=False)

    def note(self, text: str) -> None:
        """One line for the log file alone."""
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def advance(self, step: int, loss: float) -> None:
        """Move the progress bar, where there is one."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, status=f"loss {loss:.3f}")

    def mark(self, step: int, text: str) -> None:
        """A line for the log and the terminal that TensorBoard shows at its step too."""
        self.message(f"step {step}: {text}")
        self._tensorboard.add_text("routing/gate", text, step)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Points of TensorBoard curves."""
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.note(f"stopped: {str(error) or type(error).__name__}")
        if self._progress is not None:
            self._progress.stop()
        self._tensorboard.close()
        self._file.close()
