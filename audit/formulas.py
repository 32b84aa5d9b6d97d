"""Metrics of routing: each name has its one definition here. Pure numpy, vectorised over leading axes.

Shapes: W windows, S sources, E experts (N of them), `...` any leading axes.
`n` are router picks before any drop (assignments), p = n / sum n their shares, 1/N the fair share and
u = N p the load in fair shares. Where nothing was picked a metric is NaN: no data is never a value.
Integers are summed first, ratios are taken last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def divide(a: Array | float, b: Array | float) -> Floats:
    """a / b as float64; NaN where b is 0."""
    b = np.asarray(b, np.float64)
    return np.asarray(np.asarray(a, np.float64) / np.where(b == 0, np.nan, b))


def shares(n: Array) -> Floats:
    """p_e = n_e / sum n over the last axis.

    >>> shares(np.array([3, 1])).tolist()
    [0.75, 0.25]
    """
    return divide(n, n.sum(axis=-1, keepdims=True))


# -- evenness: n [..., E] -> [...]


def lir(n: Array) -> Floats:
    """Load imbalance ratio, max n / min n; inf with a dead expert.

    >>> lir(np.array([[30, 10], [5, 0]])).tolist()
    [3.0, inf]
    """
    low, high = n.min(axis=-1), n.max(axis=-1)
    return np.where((low == 0) & (high > 0), np.inf, divide(high, low))


def max_load(n: Array) -> Floats:
    """Largest load in fair shares, N max p: OLMo-core's "load imbalance", and 1 + MaxVio (Wang et al. 2024).

    >>> float(max_load(np.array([2, 1, 1, 0])))
    2.0
    """
    return float(n.shape[-1]) * divide(n.max(axis=-1), n.sum(axis=-1))


def min_load(n: Array) -> Floats:
    """Smallest load in fair shares, N min p.

    >>> float(min_load(np.array([3, 1])))
    0.5
    """
    return float(n.shape[-1]) * min_share(n)


def min_share(n: Array) -> Floats:
    """Smallest share of the assignments (fair: 1/N).

    >>> float(min_share(np.array([3, 1])))
    0.25
    """
    return divide(n.min(axis=-1), n.sum(axis=-1))


def cv(n: Array) -> Floats:
    """Coefficient of variation, std (ddof 0) / mean; N sum p^2 = 1 + cv^2.

    >>> float(cv(np.array([100, 0])))
    1.0
    """
    return divide(n.std(axis=-1), n.mean(axis=-1))


def entropy(p: Array) -> Floats:
    """-sum p ln p over the last axis, in nats; zeros contribute 0.

    >>> float(entropy(np.array([1.0, 0.0])))
    0.0
    """
    logs = np.zeros(np.shape(p))
    np.log(p, out=logs, where=np.asarray(p) > 0)
    return np.asarray(0.0 - (p * logs).sum(axis=-1))  # 0.0 - x: a single hot expert is 0.0, not -0.0


def norm_entropy(n: Array) -> Floats:
    """Entropy of the shares over ln N, in [0, 1]; N = 1 gives 1.

    >>> norm_entropy(np.array([[5, 5], [7, 0]])).tolist(), float(norm_entropy(np.array([7])))
    ([1.0, 0.0], 1.0)
    """
    N, total = n.shape[-1], n.sum(axis=-1)
    value = np.ones(n.shape[:-1]) if N == 1 else entropy(shares(n)) / np.log(N)
    return np.where(total > 0, value, np.nan)


def effective_experts(n: Array) -> Floats:
    """exp(entropy) / N: the fraction of experts that would carry this entropy evenly.

    >>> float(effective_experts(np.array([5, 5, 0, 0])))
    0.5
    """
    return np.where(n.sum(axis=-1) > 0, np.exp(entropy(shares(n))) / n.shape[-1], np.nan)


def dead_experts(n: Array) -> Floats:
    """Number of experts that nothing picked.

    >>> float(dead_experts(np.array([5, 0, 0])))
    2.0
    """
    return np.where(n.sum(axis=-1) > 0, (n == 0).sum(axis=-1), np.nan)


def saturation(n: Array, top_k: int) -> Floats:
    """Share of the tokens that use the busiest expert, k max p; 1 is the ceiling that top-k allows.

    >>> float(saturation(np.array([100, 100, 0, 0]), 2))
    1.0
    """
    return top_k * divide(n.max(axis=-1), n.sum(axis=-1))


# -- change between two windows: shares p, q [..., E] -> [...]


def total_variation(p: Array, q: Array) -> Floats:
    """Half the summed absolute difference of two share vectors, in [0, 1].

    >>> float(total_variation(np.array([1.0, 0.0]), np.array([0.0, 1.0])))
    1.0
    """
    return np.asarray(0.5 * np.abs(p - q).sum(axis=-1))


def split_shift(before_SE: Array, after_SE: Array) -> tuple[Floats, Floats]:
    """Splits the change of the pooled shares exactly into (router effect, mix effect), each [..., E].

    dp = sum_s dw_s P(e|s) [mix: other data came by] + sum_s w_s dP(e|s) [router: it moved its boundary],
    with P and w at the midpoint of both windows, so that the two add up to dp. A source absent from one
    window takes the other's P(e|s), so all of its part is mix.

    >>> router, mix = split_shift(np.array([[80, 20], [0, 100]]), np.array([[40, 10], [0, 150]]))
    >>> np.abs(router).max().item(), mix.round(6).tolist()
    (0.0, [-0.2, 0.2])
    """
    w0, w1 = (divide(n.sum(-1), n.sum((-2, -1))[..., None]) for n in (before_SE, after_SE))
    p0, p1 = shares(before_SE), shares(after_SE)
    p0, p1 = np.where(np.isnan(p0), p1, p0), np.where(np.isnan(p1), p0, p1)
    p0, p1 = np.nan_to_num(p0), np.nan_to_num(p1)  # absent from both: its weights are 0
    mix = np.einsum("...s,...se->...e", w1 - w0, (p0 + p1) / 2)
    router = np.einsum("...s,...se->...e", (w0 + w1) / 2, p1 - p0)
    return router, mix


# -- sources against experts: n [..., S, E] -> [...]


def _joint(n_SE: Array, equal_weights: bool) -> tuple[Floats, Floats, Floats]:
    """(P(e|s) with zeros for absent sources, weights of the sources, how many are present)."""
    m_S = n_SE.sum(-1)
    present = m_S > 0
    S = present.sum(-1)
    weights = divide(present, S[..., None]) if equal_weights else divide(m_S, m_S.sum(-1)[..., None])
    return np.nan_to_num(shares(n_SE)), weights, S.astype(np.float64)


def balanced_assignments(n_SE: Array) -> Floats:
    """M for the bias terms at equal source weights: S times the harmonic mean of the M_s present."""
    m_S = n_SE.sum(-1)
    return divide((m_S > 0).sum(-1) ** 2, np.nansum(divide(1.0, m_S), axis=-1))


def _assignments(n_SE: Array, equal_weights: bool) -> Floats:
    return balanced_assignments(n_SE) if equal_weights else n_SE.sum((-2, -1)).astype(np.float64)


def association(
    n_SE: Array, top_k: int = 1, phi: Array | float = 1.0, *, equal_weights: bool = True
) -> Floats:
    """Mutual information of source and expert in nats, less the bias phi (S-1)(N-k) / (2M), at least 0.

    NaN with fewer than two sources present, or one expert. `phi` [...] is the design effect.

    >>> float(association(np.array([[10**9, 0], [0, 10**9]])).round(6)), float(np.log(2).round(6))
    (0.693147, 0.693147)
    """
    N = n_SE.shape[-1]
    p_SE, w_S, S = _joint(n_SE, equal_weights)
    p_E = np.einsum("...s,...se->...e", w_S, p_SE)
    information = entropy(p_E) - (w_S * entropy(p_SE)).sum(-1)
    bias = phi * divide((S - 1) * (N - top_k), 2 * _assignments(n_SE, equal_weights))
    return np.where((S > 1) & (N > 1), np.maximum(0.0, information - bias), np.nan)


def association_rel(
    n_SE: Array, top_k: int = 1, phi: Array | float = 1.0, *, equal_weights: bool = True
) -> Floats:
    """`association` over the entropy of the sources: the part of "which source" that the expert gives away.

    >>> float(association_rel(np.array([[10**9, 0], [0, 10**9]])).round(6))
    1.0
    """
    _, w_S, _ = _joint(n_SE, equal_weights)
    return divide(association(n_SE, top_k, phi, equal_weights=equal_weights), entropy(w_S))


def cramers_v(n_SE: Array, top_k: int = 1, phi: Array | float = 1.0, *, equal_weights: bool = True) -> Floats:
    """Cramer's V of source and expert, bias-corrected (Bergsma 2013, with N-k for top-k without replacement).

    0: the expert says nothing of the source; 1: each source has its own experts.
    NaN with fewer than two sources present, or one expert. `phi` [...] is the design effect.

    >>> float(cramers_v(np.array([[10**9, 0], [0, 10**9]])).round(6))
    1.0
    """
    N = n_SE.shape[-1]
    p_SE, w_S, S = _joint(n_SE, equal_weights)
    p_E = np.einsum("...s,...se->...e", w_S, p_SE)
    excess = np.nan_to_num(divide((p_SE - p_E[..., None, :]) ** 2, p_E[..., None, :])).sum(-1)
    chi2_over_m = (w_S * excess).sum(-1)
    m = np.maximum(_assignments(n_SE, equal_weights) / phi - 1, 1e-9)
    numerator = np.maximum(0.0, chi2_over_m - (S - 1) * (N - top_k) / m)
    rows, columns = (S - 1) - (S - 1) ** 2 / m, (N - 1) - (N - top_k) ** 2 / m
    scale = np.minimum(rows, columns)
    value = np.sqrt(divide(numerator, np.where(scale > 0, scale, 0)))
    value = np.where((scale <= 0) & (numerator <= 0), 0.0, value)  # too few picks for any association
    return np.where((S > 1) & (N > 1), np.minimum(value, 1.0), np.nan)


def lift(n_SE: Array) -> Floats:
    """P(e|s) / P(e) at the observed mix, [..., S, E]; NaN for dead experts and absent sources."""
    return divide(shares(n_SE), shares(n_SE.sum(-2))[..., None, :])


def monopoly(n_SE: Array) -> Floats:
    """P(s|e) at equal source weights, [..., S, E]; NaN for dead experts."""
    p_SE, w_S, _ = _joint(n_SE, equal_weights=True)
    joint = w_S[..., None] * p_SE
    return divide(joint, joint.sum(-2, keepdims=True))


def nanmax(x: Array, axis: int | tuple[int, ...]) -> Floats:
    """Maximum without the NaN; NaN where there is nothing else."""
    top = np.max(np.where(np.isnan(x), -np.inf, x), axis=axis)
    return np.where(np.isneginf(top), np.nan, top)


def max_lift(n_SE: Array) -> Floats:
    """Largest lift of an expert by a source; NaN with fewer than two sources present.

    >>> float(max_lift(np.array([[3, 1], [1, 3]])))
    1.5
    """
    return np.where((n_SE.sum(-1) > 0).sum(-1) > 1, nanmax(lift(n_SE), (-2, -1)), np.nan)


def max_monopoly(n_SE: Array) -> Floats:
    """Largest part that one source has of an expert, at equal source weights; NaN with one source.

    >>> float(max_monopoly(np.array([[3, 1], [1, 3]])))
    0.75
    """
    return np.where((n_SE.sum(-1) > 0).sum(-1) > 1, nanmax(monopoly(n_SE), (-2, -1)), np.nan)


def source_headroom(n_SE: Array, capacity_factor: float) -> Floats:
    """Share of the traffic at which each source makes an expert overflow its capacity, [..., S].

    With fraction b more of source s the load is p + b (P(e|s) - p); an expert overflows at CF/N. 0: one is
    over already; NaN: never, or the source is absent.

    >>> source_headroom(np.array([[60, 40], [40, 60]]), 1.1).round(3).tolist()
    [0.75, 0.75]
    """
    N = n_SE.shape[-1]
    p_SE, p_E = shares(n_SE), shares(n_SE.sum(-2))[..., None, :]
    w_S = divide(n_SE.sum(-1), n_SE.sum((-2, -1))[..., None])
    with np.errstate(invalid="ignore"):
        grows = p_SE > p_E
        b_SE = np.where(grows, divide(capacity_factor / N - p_E, np.where(grows, p_SE - p_E, 0)), np.inf)
        b_S = b_SE.min(-1)
        over = (p_E > capacity_factor / N).any(-1)
        share = np.where(b_S > 1, np.nan, b_S + (1 - b_S) * w_S)
    return np.where(n_SE.sum(-1) == 0, np.nan, np.where(over, 0.0, share))


# -- probabilities


def f_p_gap(n: Array, prob_sum: Array) -> Floats:
    """Total variation of the dispatch shares f and the mean gate probabilities P, [..., E] -> [...].

    Large: P smooth, f skewed (flattening), the case in which the balancing loss N sum f P looks fine.

    >>> float(f_p_gap(np.array([97, 1, 1, 1]), np.array([26, 74 / 3, 74 / 3, 74 / 3])).round(4))
    0.71
    """
    return total_variation(shares(n), shares(prob_sum))


def switch_loss(n: Array, prob_sum: Array) -> Floats:
    """Switch-style balancing loss N sum f P of a window's means; 1 when either is uniform.

    >>> float(switch_loss(np.array([97, 1, 1, 1]), np.array([26, 74 / 3, 74 / 3, 74 / 3])).round(4))
    1.0384
    """
    return np.asarray(n.shape[-1] * (shares(n) * shares(prob_sum)).sum(-1))


def confidence(top1: Array, tokens: Array) -> tuple[Floats, Floats]:
    """(mean, spread) of the largest gate probability, from sum and sum of squares [..., 2] over tokens [...].

    >>> [float(x) for x in confidence(np.array([1.0, 0.5]), np.array(2))]
    [0.5, 0.0]
    """
    mean = divide(top1[..., 0], tokens)
    return mean, np.sqrt(np.maximum(0.0, divide(top1[..., 1], tokens) - mean**2))


def confidence_gap(top1_S2: Array, tokens_S: Array) -> Floats:
    """Mean top-1 probability of the common sources less that of the rare ones.

    Common: at least an even share 1/S of the tokens; rare: less than half of one. NaN without a rare source.

    >>> float(confidence_gap(np.array([[810.0, 0.0], [40.0, 0.0]]), np.array([900, 100])).round(4))
    0.5
    """
    w_S = divide(tokens_S, tokens_S.sum(-1)[..., None])
    S = tokens_S.shape[-1]
    means = [
        divide((top1_S2[..., 0] * chosen).sum(-1), (tokens_S * chosen).sum(-1))
        for chosen in (w_S >= 1 / S, (w_S < 0.5 / S) & (tokens_S > 0))
    ]
    return np.asarray(means[0] - means[1])
