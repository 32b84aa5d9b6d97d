"""The value of each gate over the windows of one layer, with what sampling noise alone would show.

`column(gate, frame, looks, source)`: a `Column` over W windows, or a sentence why the gate does not apply.
Gates on probabilities and router health are in `health.py`, those that follow a run over many windows or
records in `series.py`.
Shapes: W windows, S sources, E experts (N of them).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit import formulas as m
from moe_audit import health
from moe_audit.attribution import shift_note
from moe_audit.column import MAX_EXPERTS, Column, Looks, counts, effective_tokens, scaled
from moe_audit.frame import LayerFrame
from moe_audit.record import POST_DROP
from moe_audit.thresholds import floors

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def column(gate: str, frame: LayerFrame, looks: Looks, source: int | None = None) -> Column | str:
    """The `Column` of a gate; `source`: index of one source, None for all together.

    A sentence instead where the layer lacks what the gate needs.
    """
    if POST_DROP in frame.info.tags and gate in _DEMAND:
        return "the router shows picks only after the drop, so demand is not known"
    if frame.N == 1 and gate in _DEMAND:
        return "there is a single expert"
    return _COLUMNS[gate](gate, frame, looks, source)


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
    n_WE = counts(f, source)
    m_W = n_WE.sum(-1)
    z = looks.z(f.N, per_source=source is not None)
    noise_W = floors.noise(gate, f.N, f.k, m_W, f.phi1_W, z)
    tokens_W = m_W / f.k
    return Column(
        _EVENNESS[gate](n_WE),
        floors.floor(gate, noise_W, f.N),
        effective_tokens(f, source),
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
    n_WE = counts(f, source)
    tokens_W = effective_tokens(f, source)
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
    n_WE = counts(f, source)
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
        effective_tokens(f, source),
        scaled(floor_W, m_W / f.k, lambda limit: limit),
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
        effective_tokens(f, None),
        scaled(noise_W, f.m_W / f.k, excess),
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
    per_batch_W = f.batch_tokens_W()
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
    capacity = f.info.capacity_factor is not None
    if f.dropped_WE is None:
        return "drops were not recorded" if capacity else "no capacity factor (dropless)"
    if not capacity and not f.dropped_WE.any():  # a router that drops has a capacity, named or not
        return "no capacity factor (dropless)"
    if source is not None:
        return "drops are not split by source"
    dropped_WE = f.dropped_WE
    return Column(
        f.drop_rate_W(),
        None,
        effective_tokens(f, None),
        experts=lambda w, limit: np.argsort(-dropped_WE[w])[: min(3, int((dropped_WE[w] > 0).sum()))],
    )


_COLUMNS: dict[str, Callable[[str, LayerFrame, Looks, int | None], Column | str]] = {
    **dict.fromkeys(_EVENNESS, _evenness),
    "dead_experts": _dead,
    **dict.fromkeys(("tv", "load_shift", "share_shift"), _stability),
    **dict.fromkeys(("cramers_v", "association_rel", "max_lift", "max_monopoly"), _cutting),
    "capacity_use": _capacity_use,
    "drop_rate": _drop_rate,
    "f_p_gap": health.f_p_gap,
    "top1_gap": health.top1_gap,
    "invalid_ids": health.invalid_ids,
    "logit_bias": health.logit_bias,
    "uniform_counts": health.uniform_counts,
}
