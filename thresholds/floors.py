"""What a perfect router would show: sampling floors of the metrics, the design effect, tokens needed.

A perfect router sends each token to k of N experts, all equally likely. Its finite counts are still uneven:
E[cv^2] = (N-k)/(T k) = (N-k)/M exactly, M = T k assignments. Tokens of one document are not independent;
the design effect phi says by how much the variance grows, so M/phi assignments count (M_eff).

Two kinds of floor: the *mean* of a perfect router, for display (the default z), and the 1-alpha floor that
verdicts use, which covers all looks (experts x layers x windows x sources) at once: z = `looks_z(alpha, n)`.
Pure functions; M and phi may be arrays. N = 1 or k = N leaves no chance: every floor is perfect.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any] | float
Floats = npt.NDArray[np.float64]
ENTROPIES = ("norm_entropy", "source_entropy")
UPPER_TAIL = ("max_load", "max_vio")
_NORMAL = NormalDist()


def looks_z(alpha: float, looks: int) -> float:
    """z that the largest of `looks` standard normal draws exceeds with probability alpha.

    >>> round(looks_z(0.01, 64), 3)
    3.603
    """
    return -_NORMAL.inv_cdf(-math.expm1(math.log1p(-alpha) / looks))


def blom_score(num_draws: int) -> float:
    """Mean of the largest of n standard normal draws (Blom 1958); 0 for a single draw.

    >>> round(blom_score(8), 3)
    1.434
    """
    return _NORMAL.inv_cdf((num_draws - 0.375) / (num_draws + 0.25))


def chi2_quantile(df: float, z: float) -> float:
    """Quantile of chi-squared at the normal quantile z (Wilson and Hilferty 1931).

    >>> round(chi2_quantile(7, looks_z(0.01, 1)), 2)  # 18.48 by the table
    18.51
    """
    return df * max(0.0, 1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3


def cusum_floor(alpha: float, looks: int) -> float:
    """The CUSUM statistic (slack 0.5, standard deviations) that noise passes with probability alpha.

    Its one-sided run length without a change is 2 (e^(h+1.166) - 2.166 - h) (Siegmund 1985); h is where that
    is looks / alpha.

    Args:
        alpha: False alarms allowed over all looks.
        looks: Windows x series x sides.

    >>> round(cusum_floor(1.0, 938), 2)  # 938 windows at h = 5 by the table
    5.0
    """
    h = 0.0
    for _ in range(60):  # a contraction: the slope is below 1/3
        h = math.log(looks / alpha / 2 + 2.166 + h) - 1.166
    return max(h, 0.0)


def cv_floor(
    num_experts: int, top_k: int, assignments: Array, phi: Array = 1.0, z: float | None = None
) -> Floats:
    """cv of a perfect router: sqrt(phi (N-k)/M), or its quantile at z.

    >>> float(cv_floor(8, 2, 2 * 512).round(3))
    0.077
    """
    spread = _over(max(num_experts - top_k, 0), assignments, phi)
    if z is not None and num_experts > 1:
        spread = spread * chi2_quantile(num_experts - 1, z) / (num_experts - 1)
    return np.sqrt(spread)


def max_vio_floor(
    num_experts: int, top_k: int, assignments: Array, phi: Array = 1.0, z: float | None = None
) -> Floats:
    """Largest excess over the fair share, in fair shares (max_load - 1), of a perfect router.

    The mean is cv_floor * Blom score. At z the counts' skewness is added (Cornish and Fisher 1938), without
    which small windows would pass it far too often.

    >>> float(max_vio_floor(8, 2, 2 * 4096).round(4))
    0.0388
    """
    cv = cv_floor(num_experts, top_k, assignments, phi)
    if num_experts == 1:
        return np.zeros(np.shape(cv))
    if z is None:
        return np.asarray(cv * blom_score(num_experts))
    skewness = _skewness(num_experts, top_k, z)
    return np.asarray(z * cv + (skewness * cv**2 if skewness else 0.0))  # 0 * inf is no number


def _skewness(num_experts: int, top_k: int, z: float) -> float:
    """What skewness adds to a quantile at z, over cv^2: (z^2-1)/6 times skewness/cv of a binomial count."""
    q = top_k / num_experts
    return 0.0 if q >= 0.5 else (z * z - 1) / 6 * (1 - 2 * q) / (1 - q)


def noise(
    metric: str, num_experts: int, top_k: int, assignments: Array, phi: Array = 1.0, z: float | None = None
) -> Floats:
    """How far a perfect router strays in `metric`, on a scale that shrinks with 1/sqrt(M): see `excess`."""
    if metric == "cv":
        return cv_floor(num_experts, top_k, assignments, phi, z)
    if metric in ENTROPIES:
        scale = math.sqrt(2 * math.log(num_experts)) if num_experts > 1 else 1.0
        return cv_floor(num_experts, top_k, assignments, phi, z) / scale
    if metric in UPPER_TAIL or z is None:
        return max_vio_floor(num_experts, top_k, assignments, phi, z)
    return np.asarray(z * cv_floor(num_experts, top_k, assignments, phi))


def excess(metric: str, value: float, num_experts: int) -> float:
    """Distance of a value of `metric` from perfect on the scale of `noise`; it is lost where noise is more.

    value - 1 for max_load, value for max_vio and cv, (r-1)/(r+1) for lir, 1 - N value for min_share,
    1 - value for min_load, sqrt(1 - value) for entropies. 0 where the value is better than perfect.
    """
    match metric:
        case "max_load":
            x = value - 1
        case "lir":
            x = (value - 1) / (value + 1)
        case "min_load":
            x = 1 - value
        case "min_share":
            x = 1 - num_experts * value
        case name if name in ENTROPIES:
            x = math.sqrt(max(0.0, 1 - value))
        case _:
            x = value
    return max(0.0, x)


def floor(metric: str, noise: Array, num_experts: int) -> Floats:
    """The value of `metric` at a distance `noise` from perfect: the inverse of `excess`.

    >>> float(floor("lir", 0.2, 8).round(9))
    1.5
    """
    c = np.asarray(noise, np.float64)
    match metric:
        case "max_load":
            return 1 + c
        case "lir":
            return np.where(c < 1, (1 + c) / np.where(c < 1, 1 - c, 1), np.inf)
        case "min_load":
            return np.maximum(0.0, 1 - c)
        case "min_share":
            return np.maximum(0.0, 1 - c) / num_experts
        case name if name in ENTROPIES:
            return np.maximum(0.0, 1 - c**2)
        case _:
            return c


def lir_floor(
    num_experts: int, top_k: int, assignments: Array, phi: Array = 1.0, z: float | None = None
) -> Floats:
    """max n / min n of a perfect router, (1+a)/(1-a) with a = `max_vio_floor`; inf from a = 1 on.

    >>> float(lir_floor(64, 8, 8 * 4096).round(2))
    1.21
    """
    return floor("lir", noise("lir", num_experts, top_k, assignments, phi, z), num_experts)


def tokens_needed(
    metric: str, limit: float, num_experts: int, top_k: int, phi: Array = 1.0, z: float | None = None
) -> Floats:
    """Tokens from which noise stays within `limit`: T >= (N-k) z^2 phi / (k c^2) with c the `excess`
    of the limit; inf where the limit is no worse than perfect.

    >>> float(tokens_needed("lir", 1.5, 8, 2, z=3.0).round(6))
    675.0
    """
    c = excess(metric, limit, num_experts)
    if metric in UPPER_TAIL and z is not None:  # solved for cv: z cv + skew cv^2 = c
        skew = _skewness(num_experts, top_k, z)
        cv = (math.sqrt(z * z + 4 * skew * c) - z) / (2 * skew) if skew > 0 else c / z
    else:
        one = float(cv_floor(num_experts, top_k, top_k))
        cv = c * one / float(noise(metric, num_experts, top_k, top_k, 1.0, z)) if one > 0 else 1.0
    one_token = (num_experts - top_k) / top_k * np.asarray(phi, np.float64)
    return one_token / cv**2 if cv > 0 else np.full(one_token.shape, np.inf)


def association_floor(
    num_experts: int, top_k: int, num_sources: Array, assignments: Array, phi: Array, z: float
) -> Floats:
    """Quantile at z of the bias-corrected Cramer's V where sources and experts are independent.

    chi2 / phi is then (N-k)/(N-1) times chi-squared with (S-1)(N-1) degrees of freedom.
    """
    sources = np.asarray(num_sources, np.float64)
    if num_experts == 1:
        return np.zeros(np.shape(assignments))
    df = np.maximum((sources - 1) * (num_experts - 1), 1)
    quantile = df * np.maximum(0.0, 1 - 2 / (9 * df) + z * np.sqrt(2 / (9 * df))) ** 3
    excess = np.maximum(0.0, quantile - df) * max(num_experts - top_k, 0) / (num_experts - 1)
    return np.sqrt(_over(excess, assignments, phi) / np.maximum(np.minimum(sources - 1, num_experts - 1), 1))


def shift_floor(
    num_experts: int, top_k: int, before: Array, after: Array, phi: Array, z: float
) -> tuple[Floats, Floats]:
    """Quantiles at z of (total variation, largest change of load) between two windows of a perfect
    router with `before` and `after` assignments; z of the first is per window, so it is the safer one."""
    a, b = (cv_floor(num_experts, top_k, m, phi) for m in (before, after))
    load_sd = np.sqrt(a**2 + b**2)  # standard deviation of one expert's change, in fair shares
    mean = math.sqrt(2 / math.pi) * load_sd / 2
    sd = math.sqrt((1 - 2 / math.pi) / num_experts) * load_sd / 2
    return np.asarray(mean + z * sd), np.asarray(z * load_sd)


def design_effect(
    sq_over_t_E: npt.NDArray[Any], counts_E: npt.NDArray[Any], tokens: Array, batches: Array, top_k: int
) -> Floats:
    """phi of a window from B micro-batches: how much more the counts vary than with independent tokens.

    phi_e = [sum_b n_e(b)^2/T_b - (sum_b n_e(b))^2/sum_b T_b] / ((B-1) q_e (1-q_e)), q_e = k p_e;
    phi = max(1, median over experts). NaN with fewer than two micro-batches.

    Args:
        sq_over_t_E: Sums over micro-batches of n_e(b)^2 / T_b, [..., E].
        counts_E: Sums over micro-batches of n_e(b), [..., E].
        tokens: Sum of T_b, [...].
        batches: B, [...].
    """
    tokens_1, batches_1 = (np.asarray(x, np.float64)[..., None] for x in (tokens, batches))
    q_E = counts_E / np.where(tokens_1 > 0, tokens_1, np.nan)
    scale_E = (batches_1 - 1) * q_E * (1 - q_E)
    usable = (batches_1 > 1) & (scale_E > 0)
    between_E = sq_over_t_E - counts_E * q_E
    phi_E = np.divide(between_E, scale_E, out=np.full(scale_E.shape, np.nan), where=usable)
    some = usable.any(axis=-1)
    phi = np.full(some.shape, np.nan)
    if some.any():
        phi[some] = np.maximum(1.0, np.nanmedian(phi_E[some], axis=-1))
    return phi


def _over(a: Array, assignments: Array, phi: Array) -> Floats:
    """a phi / M; inf where nothing was assigned."""
    m = np.asarray(assignments, np.float64)
    return np.where(m > 0, a * np.asarray(phi, np.float64) / np.where(m > 0, m, 1), np.inf)
