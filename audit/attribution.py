"""Who moved: a change of the loads, taken apart into router and mix, experts and sources.

Shapes: W windows, S sources, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit import formulas as m
from moe_audit.frame import LayerFrame

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shift:
    """The change of one layer's shares between two windows.

    Attributes:
        total, router, mix: 0.5 * sum abs of the change, of the router's part and of the mix's part. The parts
            add up expert by expert; their sums of absolute values need not.
        router_E, mix_E: The parts of each expert, as fractions of the assignments.
        by_source_S: What each source adds to the router's part, 0.5 * sum abs of w_s dP(e|s).
    """

    total: float
    router: float
    mix: float
    router_E: Floats
    mix_E: Floats
    by_source_S: Floats

    @property
    def experts(self) -> list[int]:
        """Experts by how far the router moved them, the most first."""
        return [int(e) for e in np.argsort(-np.abs(self.router_E))]

    @property
    def sources(self) -> list[int]:
        """Sources by how much of the router's part is theirs, the most first."""
        return [int(s) for s in np.argsort(-self.by_source_S)]


def attribute(before_SE: Array, after_SE: Array) -> Shift:
    """Takes the change between two windows apart. The split is exact: router_E + mix_E is the change.

    >>> shift = attribute(np.array([[50, 50], [50, 50]]), np.array([[80, 20], [50, 50]]))
    >>> round(shift.total, 3), round(shift.router, 3), round(shift.mix, 3), shift.sources[0]
    (0.15, 0.15, 0.0, 0)
    """
    router_E, mix_E = m.split_shift(before_SE, after_SE)
    w0, w1 = (m.divide(n.sum(-1), n.sum()) for n in (before_SE, after_SE))
    change_SE = m.shares(after_SE) - m.shares(before_SE)  # NaN where a source is absent: all of it is mix
    by_source_S = 0.5 * np.abs((w0 + w1)[:, None] / 2 * np.nan_to_num(change_SE)).sum(-1)
    total, router, mix = (0.5 * float(np.abs(x).sum()) for x in (router_E + mix_E, router_E, mix_E))
    return Shift(total, router, mix, router_E, mix_E, by_source_S)


def shift_note(frame: LayerFrame, w: int) -> str | None:
    """One line on the change since the window compared with: router, mix, and the source that moved."""
    previous = int(frame.windows.previous_W[w])
    if previous < 0:
        return None
    shift = attribute(frame.counts_WSE[previous], frame.counts_WSE[w])
    first, last = frame.windows.first_step_W[previous], frame.windows.last_step_W[previous]
    note = f"since steps {first}-{last} the router moved {shift.router:.3f}, the data mix {shift.mix:.3f}"
    if len(frame.sources) > 1 and shift.by_source_S.any():
        note += f"; most of it in source {frame.sources[shift.sources[0]]}"
    return note
