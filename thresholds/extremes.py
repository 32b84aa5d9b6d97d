"""How uneven a load can be while one metric keeps its limit: the bounds that `policy check` argues with.

A load is a vector u of N loads in fair shares: mean 1, none above c = N/k, since a token picks an expert at
most once. Every bound is attained by one of a few shapes: as many experts at the top as fit and the rest at
the bottom (the most uneven vector between two bounds, by majorisation), one hot expert, one starved expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]


def cv(u: Loads) -> float:
    return float(np.std(u) / np.mean(u))


def lir(u: Loads) -> float:
    return float(u.max() / u.min()) if u.min() > 0 else math.inf


def norm_entropy(u: Loads) -> float:
    if len(u) == 1:
        return 1.0
    p = u[u > 0] / u.sum()
    return float(-(p * np.log(p)).sum() / math.log(len(u)))


METRICS: dict[str, Callable[[Loads], float]] = {
    "max_load": lambda u: float(u.max()),
    "min_load": lambda u: float(u.min()),
    "min_share": lambda u: float(u.min()) / len(u),
    "cv": cv,
    "lir": lir,
    "norm_entropy": norm_entropy,
    "dead_experts": lambda u: float((u <= 0).sum()),
}
LOWER_IS_WORSE = frozenset({"min_load", "min_share", "norm_entropy"})
PERFECT: dict[str, Callable[[int], float]] = {
    "max_load": lambda n: 1.0,
    "min_load": lambda n: 1.0,
    "min_share": lambda n: 1.0 / n,
    "cv": lambda n: 0.0,
    "lir": lambda n: 1.0,
    "norm_entropy": lambda n: 1.0,
    "dead_experts": lambda n: 0.0,
}


def worst(
    metric: str, num_experts: int, top_k: int, given: str | None = None, limit: float = math.nan
) -> float:
    """The worst value of `metric` over all loads on which `given` keeps `limit`, or over all loads.

    >>> round(worst("cv", 8, 2, "lir", 1.5), 3), round(worst("min_share", 8, 2, "lir", 1.5), 3)
    (0.204, 0.087)
    >>> round(worst("cv", 64, 1, "norm_entropy", 0.85), 2)
    2.23
    """
    c = num_experts / top_k
    if metric == "dead_experts":
        return float(num_experts - _least_alive(num_experts, c, given, limit))
    if metric == "lir" and given in ("cv", "norm_entropy") and num_experts > 2:
        if given == "cv":
            return _largest_lir(num_experts, c, lambda u: cv(u) <= limit)
        return _largest_lir(num_experts, c, lambda u: norm_entropy(u) >= limit)
    values = [METRICS[metric](u) for u in _shapes(num_experts, c, given, limit)]
    return min(values) if metric in LOWER_IS_WORSE else max(values)


def _least_alive(N: int, c: float, given: str | None, limit: float) -> int:
    """With how few experts in use `given` keeps its limit: equal loads on some experts are best for all."""
    least = N / c
    match given:
        case "max_load":
            least = N / min(limit, c)
        case "cv":
            least = max(least, N / (1 + limit * limit))
        case "norm_entropy":
            least = max(least, N**limit)
        case "dead_experts":
            least = max(least, N - limit)
        case "lir":
            least = N
        case "min_load" | "min_share" if limit > 0:
            least = N
    return min(math.ceil(least - 1e-9), N)


def _largest_lir(N: int, c: float, keeps: Callable[[Loads], bool]) -> float:
    """Largest max/min: one expert high, one low, the others equal, which leaves most room to these two."""

    def shape(high: float, low: float) -> Loads:
        u = np.full(N, (N - high - low) / (N - 2))
        u[0], u[1] = high, low
        return u

    def reach(low: float) -> float:
        """The ratio at the highest `high` that goes with `low`; 0 where nothing goes with it."""
        inside, outside = (N - low) / (N - 1), c
        if not keeps(shape(inside, low)):
            return 0.0
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if keeps(shape(middle, low)) else (inside, middle)
        return outside / low

    if keeps(shape(N / (N - 1), 0.0)):
        return math.inf
    lows = np.linspace(1 / 64, 1, 64)
    for _ in range(4):
        best = float(lows[int(np.argmax([reach(float(low)) for low in lows]))])
        step = float(lows[1] - lows[0])
        lows = np.linspace(max(best - step, step / 64), min(best + step, 1.0), 33)
    return max(reach(float(low)) for low in lows)


def most_uneven(num_experts: int, low: float, high: float) -> Loads:
    """The load with mean 1 between two bounds that majorises all others: top, one remainder, bottom."""
    u = np.full(num_experts, max(low, 0.0))
    spare = num_experts - u.sum()
    room = high - u[0]
    if room <= 0 or spare <= 0:
        return np.ones(num_experts)
    full = min(int(spare / room + 1e-9), num_experts)
    u[:full] += room
    if full < num_experts:
        u[full] += max(spare - full * room, 0.0)
    return u


def _shapes(N: int, c: float, given: str | None, limit: float) -> Iterator[Loads]:
    """The loads at which bounds under `given` are attained."""
    match given:
        case None:
            yield most_uneven(N, 0.0, c)
        case "max_load":
            yield most_uneven(N, 0.0, min(limit, c))
        case "min_load":
            yield most_uneven(N, min(limit, 1.0), c)
        case "min_share":
            yield most_uneven(N, min(limit * N, 1.0), c)
        case "dead_experts":
            alive = np.full(N, 1e-12)
            alive[: max(int(limit), 0)] = 0.0
            top = most_uneven(N, 0.0, c)[::-1]
            yield np.maximum(top, alive)
        case "lir":
            yield from _two_level(N, c, max(limit, 1.0))
        case "cv":
            yield _one_off(N, min(1 + limit * math.sqrt(N - 1), c))
            yield _one_off(N, max(1 - limit * math.sqrt(N - 1), 0.0))
            yield _least_entropy(N, limit)
        case "norm_entropy":
            yield _bisect(limit, lambda t: _hot(N, c, t), float(math.ceil(N / c)))
            yield _bisect(limit, lambda t: _one_off(N, 1 - t), 1.0)


def _two_level(N: int, c: float, r: float) -> Iterator[Loads]:
    """j experts at r times the load of the others: in each coordinate every metric is worst at an end."""
    if c / r <= 1:
        yield most_uneven(N, c / r, c)
    for j in range(1, N):
        x = N / (N + j * (r - 1))
        if r * x <= c + 1e-12:
            yield np.concatenate([np.full(j, r * x), np.full(N - j, x)])
    yield np.ones(N)


def _one_off(N: int, first: float) -> Loads:
    """One expert at `first`, the others equal."""
    if N == 1:
        return np.ones(1)
    u = np.full(N, (N - first) / (N - 1))
    u[0] = first
    return u


def _least_entropy(N: int, v: float) -> Loads:
    """Least entropy at cv = v: some experts equal, one smaller, the rest empty (Harremoes, Topsoe 2001)."""
    concentration = min((1 + v * v) / N, 1.0)  # sum of p^2
    m = min(int(1 / concentration + 1e-9), N)
    if m == N:
        return np.ones(N)
    # m equal shares p and one q = 1 - m p with m p^2 + q^2 = concentration; the larger root has q <= p
    p = (1 + math.sqrt(max(1 - (m + 1) * (1 - concentration) / m, 0.0))) / (m + 1)
    u = np.zeros(N)
    u[:m], u[m] = p * N, max(1 - m * p, 0.0) * N
    return u


def _hot(N: int, c: float, t: float) -> Loads:
    """From even (t = 0) to most uneven: one expert after another rises to c, the others stay equal."""
    j = min(int(t), N - 1, int(N / c + 1e-9))
    rest = (N - j * c) / (N - j)
    u = np.full(N, rest)
    u[:j] = c
    if j < N - 1:
        u[j] = rest + (t - j) * (min(c, N - j * c) - rest)
        u[j + 1 :] = max((N - u[: j + 1].sum()) / (N - j - 1), 0.0)
    return u


def _bisect(h: float, shape: Callable[[float], Loads], most: float) -> Loads:
    """The last load whose entropy is h or more, in a family that grows uneven with t from 0 to `most`."""
    if norm_entropy(shape(most)) >= h:
        return shape(most)
    inside, outside = 0.0, most
    for _ in range(60):
        middle = (inside + outside) / 2
        if norm_entropy(shape(middle)) >= h:
            inside = middle
        else:
            outside = middle
    return shape(inside)


def largest_swing(num_experts: int, low: float, high: float) -> tuple[float, float]:
    """Largest (tv, max abs du) between two loads that both lie between `low` and `high`, in fair shares.

    >>> tuple(round(x, 3) for x in largest_swing(8, 0.0, 8.0))
    (1.0, 8.0)
    """
    N = num_experts
    up, down = most_uneven(N, low, high), most_uneven(N, low, high)[::-1]
    best = 0.0
    for j in range(1, N):
        most = min(j * high, N - (N - j) * low)
        least = max(j * low, N - (N - j) * high)
        best = max(best, most - least)
    return min(best / N, 1.0), float(up.max() - down.min())


def binomial_tail(trials: int, p: float, at_least: int) -> float:
    """P(X >= at_least) for X ~ Binomial(trials, p), summed from the term outwards.

    >>> round(binomial_tail(10, 0.5, 5), 6)
    0.623047
    """
    if at_least <= 0:
        return 1.0
    if at_least > trials:
        return 0.0
    if p >= 1:
        return 1.0
    upward = at_least > trials * p
    n = at_least if upward else at_least - 1
    log_term = (
        math.lgamma(trials + 1) - math.lgamma(n + 1) - math.lgamma(trials - n + 1)
        + n * math.log(p) + (trials - n) * math.log1p(-p)
    )  # fmt: skip
    term = total = math.exp(log_term)
    while term > total * 1e-17 and (n < trials if upward else n > 0):
        if upward:
            term *= (trials - n) / (n + 1) * p / (1 - p)
            n += 1
        else:
            term *= n / (trials - n + 1) * (1 - p) / p
            n -= 1
        total += term
    return min(total, 1.0) if upward else max(1 - total, 0.0)


def packed_entropy(num_experts: int, hot: int, share: float) -> float:
    """Normalised entropy of a source that gives `share` of its assignments evenly to `hot` experts.

    >>> round(packed_entropy(10, 3, 0.7), 3)
    0.853
    """
    rest = num_experts - hot
    parts = [(hot, share), (rest, 1 - share)]
    return -sum(x * math.log(x / n) for n, x in parts if x > 0 and n) / math.log(num_experts)


def packed_share(num_experts: int, hot: int, entropy: float) -> float:
    """The largest share of a source that `hot` experts can take evenly while its entropy keeps `entropy`."""
    low, high = hot / num_experts, 1.0
    if packed_entropy(num_experts, hot, high) >= entropy:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if packed_entropy(num_experts, hot, middle) >= entropy else (low, middle)
    return low


def packed_v(num_experts: int, hot: int, share: float, weight: float) -> float:
    """Cramer's V of that source at `weight` of all assignments against the rest, where the pool is uniform.

    V^2 = chi2/M = sum_s w_s sum_e P(e|s)^2 / P(e) - 1 with two rows.

    >>> round(packed_v(10, 3, 0.7, 0.3), 2)
    0.57
    """
    N = num_experts
    chi2 = -1.0
    for n, p in ((hot, share / hot), (N - hot, (1 - share) / max(N - hot, 1))):
        other = (1 / N - weight * p) / (1 - weight)
        chi2 += n * N * (weight * p**2 + (1 - weight) * other**2)
    return math.sqrt(max(chi2, 0.0))


def packed_ties(
    num_experts: int, hot: int, share: float, weight: float, num_sources: int
) -> dict[str, float]:
    """What the gates on sources show of that source among `num_sources`, the others alike, the pool uniform.

    As the gates take them: at equal weights of the sources, `max_lift` at the mix itself.

    >>> {name: round(x, 2) for name, x in packed_ties(10, 3, 0.7, 0.3, 2).items()}
    {'cramers_v': 0.58, 'association_rel': 0.26, 'max_lift': 2.33, 'max_monopoly': 0.84}
    """
    N, S = num_experts, num_sources
    n_2 = np.array([hot, N - hot])  # experts of either kind
    own_2 = np.array([share / hot, (1 - share) / max(N - hot, 1)])
    other_2 = np.maximum(1 / N - weight * own_2, 0.0) / (1 - weight)
    p_S2 = np.stack([own_2, *[other_2] * (S - 1)])
    p_2 = p_S2.mean(0)
    used = (n_2 > 0) & (p_2 > 0)
    ratio_S2 = p_S2[:, used] / p_2[used]
    chi2 = float((n_2[used] * p_2[used] * (ratio_S2 - 1) ** 2).sum() / S)
    logs_S2 = np.log(np.where(ratio_S2 > 0, ratio_S2, 1.0))
    return {
        "cramers_v": math.sqrt(chi2 / min(S - 1, N - 1)),
        "association_rel": float((n_2[used] * p_S2[:, used] * logs_S2).sum() / S) / math.log(S),
        "max_lift": float(p_S2[:, used].max() * N),
        "max_monopoly": float(ratio_S2.max() / S),
    }
