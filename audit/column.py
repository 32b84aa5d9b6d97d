"""What a gate gives: a column of values over windows, and what chance alone would show.

Shapes: W windows, S sources, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moe_audit.frame import LayerFrame
from moe_audit.thresholds import floors

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
MAX_EXPERTS = 8  # named in one cell


@dataclass(frozen=True)
class Looks:
    """How often chance gets a try: experts x layers x windows (x sources) go into the quantile of a floor."""

    alpha: float
    windows: int
    layers: int
    sources: int
    effect: Literal["router", "total"] = "router"

    def z(self, num_experts: int, *, per_source: bool = False, draws: float = 1) -> float:
        looks = num_experts * self.windows * self.layers * (self.sources if per_source else 1) * max(draws, 1)
        return floors.looks_z(self.alpha, max(int(looks), 1))


@dataclass(frozen=True)
class Column:
    """One gate in one layer and source over all windows.

    Attributes:
        value_W: NaN where there is no cell.
        floor_W: What a perfect router shows at most (at least, for lower limits) with probability 1 - alpha;
            None where chance plays no part.
        tokens_W: Effective tokens, T / phi.
        needed: (window, limit) -> how many tokens more keep noise within the limit.
        experts: (window, limit) -> the experts to look at.
        note: window -> a remark on the value.
        unit: What `needed` counts.
    """

    value_W: Floats
    floor_W: Floats | None
    tokens_W: Floats
    needed: Callable[[int, float], float] | None = None
    experts: Callable[[int, float], Array] | None = None
    note: Callable[[int], str | None] | None = None
    unit: str = "tokens in a window"


def counts(frame: LayerFrame, source: int | None) -> Array:
    return frame.n_WE if source is None else frame.counts_WSE[:, source]


def scaled(
    noise_W: Floats, tokens_W: Floats, excess: Callable[[float], float]
) -> Callable[[int, float], float]:
    """Tokens needed beyond the T there are: noise falls with 1/sqrt(T), so T (noise / excess)^2 in all."""

    def needed(w: int, limit: float) -> float:
        c = excess(limit)
        return float(tokens_W[w] * ((noise_W[w] / c) ** 2 - 1)) if c > 0 else math.inf

    return needed


def effective_tokens(frame: LayerFrame, source: int | None) -> Floats:
    tokens_W = frame.tokens_W() if source is None else frame.source_tokens_WS()[:, source]
    return tokens_W / frame.phi1_W
