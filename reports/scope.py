"""The windows that a verdict was reached on, laid out again so that reports can show what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moe_audit.frame import Analysis, analyse

if TYPE_CHECKING:
    from moe_audit.run import Run
    from moe_audit.verdict import Verdict


def analysis_of(run: Run, verdict: Verdict) -> Analysis:
    """The same records, layers, sources and windows as the verdict's, with those that were not judged."""
    return analyse(
        run,
        length=verdict.windows.get("length"),
        stride=verdict.windows.get("stride"),
        first_step=verdict.run.get("first_step"),
        last_step=verdict.run.get("last_step"),
        layers=verdict.run.get("layers"),
        sources=verdict.run.get("sources"),
    )


def status_of(analysis: Analysis, verdict: Verdict) -> npt.NDArray[np.int8]:
    """The verdict's grid over all windows of the analysis, int8 [W, L]; -1 where nothing was judged."""
    windows = analysis.windows
    status_WL = np.full((len(windows), len(analysis.layers)), -1, dtype=np.int8)
    if verdict.grid is None:
        return status_WL
    rows = {
        span: w for w, span in enumerate(zip(windows.first_step_W.tolist(), windows.last_step_W.tolist()))
    }
    columns = {info.layer: i for i, info in enumerate(analysis.layers)}
    grid = verdict.grid
    for g, span in enumerate(zip(grid.first_step_W.tolist(), grid.last_step_W.tolist())):
        for column, layer in enumerate(grid.layers):
            if span in rows and layer in columns:
                status_WL[rows[span], columns[layer]] = grid.status_WL[g, column]
    return status_WL
