"""Gates that follow a run over many windows or records: drift, periodic swings, a router that stands still.

Shapes: W windows, D disjoint windows, R records, S sources, E experts, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

BASELINE_WINDOWS = 5  # fewer disjoint windows do not say what is normal
CUSUM_SLACK = 0.5
STATIC_WINDOWS = 20
MOST_CYCLES, LAG_SLACK = 5, 0.1  # how many cycles a lag may span, and how much of one it may be off
SMALLEST_SWING = 0.05  # in fair shares: a smaller periodic swing harms nothing, however regular


@dataclass(frozen=True)
class Cusum:
    """Two-sided CUSUM of a series: its larger statistic, and where the change that it sees began."""

    value_D: Floats  # NaN within the baseline
    start_D: npt.NDArray[np.int64]  # index of the first window after the change
    upward_D: npt.NDArray[np.bool_]


def cusum(x_D: Floats, least_sigma: float = 0.0, alarm: float = 5.0) -> Cusum:
    """S_t = max(0, S_{t-1} + z_t - 0.5), upwards and downwards (Page 1954), self-starting (Hawkins 1987).

    z_t compares x_t with the mean and deviation of all values before it, and is brought from Student's t to
    the normal scale, so that the reference need not be known. Once the alarm is reached the reference stands.

    Args:
        x_D: The series over disjoint windows.
        least_sigma: Deviations below this count as this: a change that harms nothing, or is sampling noise,
            is no drift. Counts of a few tokens stay the same for long, and what leaves them is no surprise.
        alarm: Where the reference stops to learn.

    >>> x = np.array([1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.1, 0.9] + [1.0] * 4 + [2.0] * 4)
    >>> result = cusum(x)
    >>> int(result.start_D[-1]), bool(result.upward_D[-1]), bool(result.value_D[-1] > 5)
    (12, True, True)
    """
    D = len(x_D)
    value_D, start_D, upward_D = np.full(D, np.nan), np.zeros(D, np.int64), np.zeros(D, bool)
    sums, starts, n = [0.0, 0.0], [BASELINE_WINDOWS] * 2, BASELINE_WINDOWS
    for t in range(BASELINE_WINDOWS, D):
        n = t if max(sums) <= alarm else n
        sigma = max(float(x_D[:n].std(ddof=1)), least_sigma, 1e-12)
        student = (float(x_D[t]) - float(x_D[:n].mean())) / (sigma * math.sqrt(1 + 1 / n))
        z = _t_to_normal(student, n - 1)
        for side, signed in enumerate((z, -z)):
            grown = sums[side] + signed - CUSUM_SLACK
            if not grown > 0:
                sums[side], starts[side] = 0.0, t + 1
            else:
                sums[side] = grown
        side = int(sums[1] > sums[0])
        value_D[t], start_D[t], upward_D[t] = sums[side], min(starts[side], t), side == 0
    return Cusum(value_D, start_D, upward_D)


def _t_to_normal(t: float, df: int) -> float:
    """The normal quantile with the probability of Student's t (Wallace 1959)."""
    return math.copysign((8 * df + 1) / (8 * df + 3) * math.sqrt(df * math.log1p(t * t / df)), t)


def cycle_lag(cycle: float, records: int) -> int | None:
    """The lag in whole records at which a cycle of `cycle` records comes back: one cycle, or as few as bring
    it within a tenth of a cycle while `records` hold three such lags; None where a cycle has less than two
    records, which do not show it.

    >>> cycle_lag(4.0, 60), cycle_lag(2.5, 60), cycle_lag(2.4, 60), cycle_lag(2.4, 10), cycle_lag(1.5, 60)
    (4, 5, 5, 2, None)
    """
    if cycle < 2:
        return None
    lags = [round(n * cycle) for n in range(1, MOST_CYCLES + 1)]
    off = [abs(lag / cycle - n) for n, lag in enumerate(lags, 1) if n == 1 or 3 * lag <= records]
    return lags[next((n for n, x in enumerate(off) if x <= LAG_SLACK), off.index(min(off)))]


def periodicity(
    picks_RE: Array, source_picks_RS: Array, conditional_SE: Floats, lag: int
) -> tuple[float, float, Floats]:
    """(autocorrelation at `lag` records, swing in fair shares, swing per expert) of what the router did.

    The mix is taken out first: of each record's shares the mean conditional P(e|s) at the record's own mix is
    subtracted. A moving mean over the lag is taken out next, so that a slow trend is no cycle.
    NaN with fewer than three lags.

    Args:
        picks_RE: Picks per record and expert.
        source_picks_RS: Picks per record and source.
        conditional_SE: Mean P(e|s) of the run.
        lag: One cycle or a few (`cycle_lag`) in records, at least 2.
    """
    total_R = picks_RE.sum(-1)
    filled = total_R > 0
    R, E = int(filled.sum()), picks_RE.shape[-1]
    if lag < 2 or 3 * lag > R:
        return math.nan, math.nan, np.full(E, np.nan)
    p_RE = picks_RE[filled] / total_R[filled, None]
    w_RS = source_picks_RS[filled] / total_R[filled, None]
    x_RE = p_RE - w_RS @ np.nan_to_num(conditional_SE)
    sums = np.concatenate([np.zeros((1, E)), np.cumsum(x_RE, axis=0)])
    trend = (sums[lag:] - sums[:-lag]) / lag  # mean over records r .. r + lag - 1
    x = x_RE[lag // 2 : lag // 2 + len(trend)] - trend
    variance = float((x * x).mean(0).sum())
    if variance <= 0 or len(x) <= lag:
        return 0.0, 0.0, np.zeros(E)
    covariance_E = (x[:-lag] * x[lag:]).mean(0)
    swing_E = E * np.sqrt(np.maximum(0.0, covariance_E))
    return float(covariance_E.sum()) / variance, float(swing_E.max()), swing_E


def static_windows(counts_WSE: Array, judged_W: npt.NDArray[np.bool_]) -> Floats:
    """1.0 where the counts were the same in the last 20 judged windows, else 0; NaN where not judged."""
    value_W = np.full(len(judged_W), np.nan)
    rows = np.flatnonzero(judged_W)
    run = 1
    for i, w in enumerate(rows):
        same = i > 0 and counts_WSE[w].any() and np.array_equal(counts_WSE[w], counts_WSE[rows[i - 1]])
        run = run + 1 if same else 1
        value_W[w] = float(run >= STATIC_WINDOWS)
    return value_W


def worst_layer(x_LD: Floats, *, largest: bool = True) -> tuple[Floats, npt.NDArray[np.int64]]:
    """(worst value over layers, its layer's index) per window, NaN left out."""
    bad = -np.inf if largest else np.inf
    filled = np.where(np.isnan(x_LD), bad, x_LD)
    index_D = filled.argmax(0) if largest else filled.argmin(0)
    return np.take_along_axis(filled, index_D[None], 0)[0], index_D.astype(np.int64)
