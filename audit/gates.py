"""The value of each gate over the windows of one layer, with what sampling noise alone would show.

`column(gate, frame, looks, source)`: a `Column` over W windows, or a sentence why the gate does not apply.
Gates that follow a run over many windows or records are in `detectors.py`.
Shapes: W windows, S sources, E experts (N of them).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moe_audit import formulas as m
from moe_audit.attribution import shift_note
from moe_audit.frame import LayerFrame
from moe_audit.thresholds import floors

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
POST_DROP = "post_drop"  # tag of a layer whose router shows picks only after capacity has cut them
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


def column(gate: str, frame: LayerFrame, looks: Looks, source: int | None = None) -> Column | str:
    """The `Column` of a gate; `source`: index of one source, None for all together.

    A sentence instead where the layer lacks what the gate needs.
    """
    if POST_DROP in frame.info.tags and gate in _DEMAND:
        return "the router shows picks only after the drop, so demand is not known"
    if frame.N == 1 and gate in _DEMAND:
        return "there is a single expert"
    return _COLUMNS[gate](gate, frame, looks, source)


def _counts(frame: LayerFrame, source: int | None) -> Array:
    return frame.n_WE if source is None else frame.counts_WSE[:, source]


def _scaled(
    noise_W: Floats, tokens_W: Floats, excess: Callable[[float], float]
) -> Callable[[int, float], float]:
    """Tokens needed beyond the T there are: noise falls with 1/sqrt(T), so T (noise / excess)^2 in all."""

    def needed(w: int, limit: float) -> float:
        c = excess(limit)
        return float(tokens_W[w] * ((noise_W[w] / c) ** 2 - 1)) if c > 0 else math.inf

    return needed


def _effective_tokens(frame: LayerFrame, source: int | None) -> Floats:
    tokens_W = frame.tokens_W() if source is None else frame.source_tokens_WS()[:, source]
    return tokens_W / frame.phi1_W


# -- evenness

_EVENNESS: dict[str, Callable[[Array], Floats]] = {
    "max_load": m.max_load,
    "min_load": m.min_load,
    "min_share": m.min_share,
    "cv": m.cv,
    "lir": m.lir,
    "norm_entropy": m.norm_entropy,
    "source_entropy": m.norm_entropy,
}
_DEMAND = {
    *_EVENNESS,
    "dead_experts",
    "capacity_use",
    "max_monopoly",
    "max_lift",
    "cramers_v",
    "association_rel",
}


def _evenness(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    n_WE = _counts(f, source)
    m_W = n_WE.sum(-1)
    z = looks.z(f.N, per_source=source is not None)
    noise_W = floors.noise(gate, f.N, f.k, m_W, f.phi1_W, z)
    tokens_W = m_W / f.k
    return Column(
        _EVENNESS[gate](n_WE),
        floors.floor(gate, noise_W, f.N),
        _effective_tokens(f, source),
        lambda w, limit: float(floors.tokens_needed(gate, limit, f.N, f.k, f.phi1_W[w], z)) - tokens_W[w],
        lambda w, limit: _uneven(gate, n_WE[w], limit),
        lambda w: _saturation_note(n_WE[w], f.k, f.N),
    )


def _uneven(gate: str, n_E: Array, limit: float) -> Array:
    """The experts past the limit; for gates on the whole distribution those farthest from the fair share."""
    u_E = len(n_E) * m.shares(n_E)
    order = np.argsort(-u_E) if gate == "max_load" else np.argsort(u_E)
    if gate == "max_load":
        return order[u_E[order] > limit]
    if gate in ("min_load", "min_share"):
        least = limit if gate == "min_load" else limit * len(n_E)
        return order[u_E[order] < least]
    return np.argsort(-np.abs(u_E - 1))[:3]


def _saturation_note(n_E: Array, top_k: int, num_experts: int) -> str | None:
    notes = []
    full = np.flatnonzero(n_E * top_k >= n_E.sum())
    if top_k < num_experts and n_E.any() and len(full):
        notes.append(f"saturated: every token uses expert {', '.join(map(str, full))} (share 1/top_k)")
    dead = np.flatnonzero(n_E == 0)
    if len(dead):
        named = ", ".join(map(str, dead[:MAX_EXPERTS])) + (" ..." if len(dead) > MAX_EXPERTS else "")
        notes.append(f"{len(dead)} dead: {named}")
    return "; ".join(notes) or None


def _dead(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    n_WE = _counts(f, source)
    tokens_W = _effective_tokens(f, source)
    miss = 1 - f.k / f.N if f.k < f.N else 0.0
    expected_W = f.N * miss**tokens_W
    chances = looks.windows * looks.layers * (looks.sources if source is not None else 1)
    z = looks.z(1, per_source=source is not None)
    floor_W = np.where(expected_W * chances > looks.alpha, np.ceil(expected_W + z * np.sqrt(expected_W)), 0.0)
    all_hit = math.log(f.N * chances / looks.alpha) / -math.log(miss) if miss > 0 else 1.0
    return Column(
        m.dead_experts(n_WE),
        floor_W,
        tokens_W,
        lambda w, limit: (all_hit - tokens_W[w]) * float(f.phi1_W[w]),
        lambda w, limit: np.flatnonzero(n_WE[w] == 0),
    )


# -- stability, on the effect that the policy names


def _stability(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    previous = f.windows.previous_W
    if not (f.windows.judged_W & (previous >= 0)).any():
        return "no earlier window that does not overlap"
    n_WE = _counts(f, source)
    if source is not None or looks.effect == "total":
        p_WE = m.shares(n_WE)
        change_WE = np.where((previous >= 0)[:, None], p_WE - p_WE[previous], np.nan)
    else:
        change_WE = f.shift_WE[0]
    value_W = {
        "tv": 0.5 * np.abs(change_WE).sum(-1),
        "load_shift": f.N * np.abs(change_WE).max(-1),
        "share_shift": np.abs(change_WE).max(-1),
    }[gate]
    m_W = n_WE.sum(-1)
    phi_W = np.maximum(f.phi1_W, f.phi1_W[previous])
    z = looks.z(f.N, per_source=source is not None)
    tv_W, shift_W = floors.shift_floor(f.N, f.k, m_W[previous], m_W, phi_W, z)
    floor_W = {"tv": tv_W, "load_shift": shift_W, "share_shift": shift_W / f.N}[gate]
    return Column(
        value_W,
        floor_W,
        _effective_tokens(f, source),
        _scaled(floor_W, m_W / f.k, lambda limit: limit),
        lambda w, limit: np.argsort(-np.abs(change_WE[w]))[:3],
        None if source is not None else lambda w: shift_note(f, w),
    )


# -- semantic cutting: sources against experts


def _cutting(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    needed_sources = 3 if gate == "max_monopoly" else 2
    if source is not None:
        return "it compares sources, so it has no value for one"
    if f.counts_WSE.shape[1] < needed_sources:
        return "there is one source" if f.counts_WSE.shape[1] == 1 else "it needs three sources or more"
    present_W = (f.m_WS > 0).sum(-1)
    if not (present_W >= needed_sources).any():
        return f"no window has {needed_sources} sources"
    n_WSE, z = f.counts_WSE, looks.z(f.N)
    least_W = np.where(f.m_WS > 0, f.m_WS, np.iinfo(np.int64).max).min(
        -1
    )  # the smallest source is the noisiest
    noise_W = floors.cv_floor(f.N, f.k, least_W, f.phi1_W) * z
    v_W = floors.association_floor(f.N, f.k, present_W, m.balanced_assignments(n_WSE), f.phi1_W, z)
    excess: Callable[[float], float] = lambda limit: limit  # noqa: E731
    if gate == "cramers_v":
        value_W, floor_W, noise_W = m.cramers_v(n_WSE, f.k, f.phi1_W), v_W, v_W
    elif gate == "association_rel":  # I is about chi2 / (2M)
        value_W = m.association_rel(n_WSE, f.k, f.phi1_W)
        scale_W = np.minimum(present_W - 1, f.N - 1) / (2 * np.log(np.maximum(present_W, 2)))
        floor_W, noise_W = v_W**2 * scale_W, v_W * np.sqrt(scale_W)
        excess = math.sqrt
    elif gate == "max_lift":
        value_W, floor_W = m.max_lift(n_WSE), 1 + noise_W
        excess = lambda limit: limit - 1  # noqa: E731
    else:
        value_W = m.max_monopoly(n_WSE)
        even_W = 1 / np.maximum(present_W, 1)
        noise_W = noise_W * even_W * np.sqrt(1 - even_W)
        floor_W = np.minimum(1.0, even_W + noise_W)
        even = 1 / n_WSE.shape[1]
        excess = lambda limit: limit - even  # noqa: E731
    value_W = np.where(present_W >= needed_sources, value_W, np.nan)
    return Column(
        value_W,
        floor_W,
        _effective_tokens(f, None),
        _scaled(noise_W, f.m_W / f.k, excess),
        lambda w, limit: _cut_experts(gate, n_WSE[w], limit),
        lambda w: _cut_note(n_WSE[w], f.sources),
    )


def _cut_experts(gate: str, n_SE: Array, limit: float) -> Array:
    """The experts that sources share least."""
    part_E = m.nanmax(m.monopoly(n_SE), -2)
    order = np.argsort(-np.nan_to_num(part_E))
    return order[np.nan_to_num(part_E)[order] > limit] if gate == "max_monopoly" else order[:3]


def _cut_note(n_SE: Array, sources: Any) -> str | None:
    """The source that cuts itself off most, with its lift."""
    lift_SE = np.nan_to_num(m.lift(n_SE))
    s, e = np.unravel_index(int(lift_SE.argmax()), lift_SE.shape)
    return f"{sources[s]} uses expert {e} {lift_SE[s, e]:.2g} times as much as all do"


# -- capacity


def _capacity_use(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    capacity = f.info.capacity_factor
    if capacity is None:
        return "no capacity factor (dropless)"
    if f.peak_WE is None:
        return "peak loads were not recorded"
    if source is not None:
        return "capacity is not split by source"
    peak_WE = f.peak_WE
    batches_W = np.zeros(len(f.m_W)) if f.batches_W is None else f.batches_W
    per_batch_W = m.divide(f.tokens_W(), batches_W)  # tokens of one micro-batch
    z = looks.z(f.N, draws=float(batches_W.max(initial=1)))
    noise_W = floors.max_vio_floor(f.N, f.k, np.nan_to_num(per_batch_W) * f.k, z=z)
    return Column(
        m.divide(peak_WE.max(-1), capacity),
        np.where(np.isfinite(noise_W), (1 + noise_W) / capacity, np.nan),
        np.nan_to_num(per_batch_W),
        lambda w, limit: (
            float(floors.tokens_needed("max_load", limit * capacity, f.N, f.k, z=z)) - per_batch_W[w]
        ),
        lambda w, limit: np.flatnonzero(peak_WE[w] > limit * capacity),
        unit="tokens in a micro-batch",
    )


def _drop_rate(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    if f.info.capacity_factor is None:
        return "no capacity factor (dropless)"
    if f.dropped_WE is None:
        return "drops were not recorded"
    if source is not None:
        return "drops are not split by source"
    dropped_WE = f.dropped_WE
    demand_W = f.m_W + (dropped_WE.sum(-1) if POST_DROP in f.info.tags else 0)
    return Column(
        m.divide(dropped_WE.sum(-1), demand_W),
        None,
        _effective_tokens(f, None),
        experts=lambda w, limit: np.argsort(-dropped_WE[w])[:3],
    )


# -- probabilities


def _f_p_gap(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    if f.prob_WSE is None:
        return "gate probabilities were not recorded"
    n_WE = _counts(f, source)
    prob_WE = f.prob_WSE.sum(1) if source is None else f.prob_WSE[:, source]
    m_W = n_WE.sum(-1)
    # A second window of endless size stands for P: only the picks f are noisy.
    floor_W, _ = floors.shift_floor(f.N, f.k, np.full(m_W.shape, np.inf), m_W, f.phi1_W, looks.z(f.N))
    return Column(
        m.f_p_gap(n_WE, prob_WE),
        floor_W,
        _effective_tokens(f, source),
        _scaled(floor_W, m_W / f.k, lambda limit: limit),
        lambda w, limit: np.argsort(-np.abs(m.shares(n_WE[w]) - m.shares(prob_WE[w])))[:3],
        lambda w: (
            f"the balancing loss N*sum f*P is {float(m.switch_loss(n_WE[w], prob_WE[w])):.3f} (1 is even)"
        ),
    )


def _top1_gap(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    if f.top1_WS2 is None or f.tokens_WS is None:
        return "top-1 probabilities were not recorded"
    if source is not None or f.counts_WSE.shape[1] < 2:
        return "it compares sources; there is one"
    value_W = m.confidence_gap(f.top1_WS2, f.tokens_WS)
    if np.isnan(value_W).all():
        return "no source is rare (under half an even share of the tokens)"
    tokens_WS, top1_WS2 = f.tokens_WS, f.top1_WS2
    least_W = np.where(tokens_WS > 0, tokens_WS, np.iinfo(np.int64).max).min(-1)
    floor_W = looks.z(1) * np.sqrt(0.25 * f.phi1_W / least_W)  # a probability deviates by at most 0.5

    def note(w: int) -> str:
        mean_S, spread_S = m.confidence(top1_WS2[w], tokens_WS[w])
        s, r = int(tokens_WS[w].argmax()), int(np.where(tokens_WS[w] > 0, tokens_WS[w], np.inf).argmin())
        return (
            f"{f.sources[s]} {mean_S[s]:.2f} (spread {spread_S[s]:.2f}),"
            f" {f.sources[r]} {mean_S[r]:.2f} (spread {spread_S[r]:.2f})"
        )

    return Column(
        value_W,
        floor_W,
        np.asarray(least_W / f.phi1_W, np.float64),
        _scaled(floor_W, f.tokens_W(), lambda limit: limit),
        note=note,
    )


# -- router health


def _invalid_ids(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    if source is not None:
        return "invalid ids are not split by source"
    # A window in which every pick was invalid has no counts, and still is a cell.
    value_W = np.where((f.m_W > 0) | (f.invalid_W > 0), f.invalid_W, np.nan)
    return Column(
        value_W,
        None,
        _effective_tokens(f, None),
        note=lambda w: "router logits not finite, or ids out of range",
    )


def _logit_bias(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    if f.logit_mean_WE is None or f.logit_std_WE is None:
        return "router logits were not recorded"
    if source is not None:
        return "router logits are not split by source"
    mean_WE = f.logit_mean_WE
    return Column(
        m.divide(mean_WE.std(-1), f.logit_std_WE.mean(-1)),
        None,
        _effective_tokens(f, None),
        experts=lambda w, limit: np.argsort(-np.abs(mean_WE[w] - mean_WE[w].mean()))[:3],
    )


def _uniform_counts(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    if f.k >= f.N:
        return "every token uses every expert"
    n_WE = _counts(f, source)
    m_W = n_WE.sum(-1)
    same_W = np.where(m_W > 0, (n_WE == n_WE[:, :1]).all(-1), np.nan)
    # The chance that a perfect router hits exactly even counts (normal density at the mean).
    variance_W = np.maximum(m_W / f.N * (1 - f.k / f.N), 1 / (2 * math.pi))
    chance_W = math.sqrt(f.N) * (2 * math.pi * variance_W) ** (-(f.N - 1) / 2)
    lucky_W = chance_W * looks.windows * looks.layers > looks.alpha
    return Column(
        same_W,
        lucky_W.astype(np.float64),
        _effective_tokens(f, source),
        note=lambda w: "every expert has the same count: forced balancing, or experts that choose tokens",
    )


_COLUMNS: dict[str, Callable[[str, LayerFrame, Looks, int | None], Column | str]] = {
    **dict.fromkeys(_EVENNESS, _evenness),
    "dead_experts": _dead,
    **dict.fromkeys(("tv", "load_shift", "share_shift"), _stability),
    **dict.fromkeys(("cramers_v", "association_rel", "max_lift", "max_monopoly"), _cutting),
    "capacity_use": _capacity_use,
    "drop_rate": _drop_rate,
    "f_p_gap": _f_p_gap,
    "top1_gap": _top1_gap,
    "invalid_ids": _invalid_ids,
    "logit_bias": _logit_bias,
    "uniform_counts": _uniform_counts,
}
