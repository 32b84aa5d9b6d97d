"""Gates on probabilities and on the router's health: flattening, confidence, ids, logits, forced balance.

Shapes: W windows, S sources, E experts.
"""

from __future__ import annotations

import math

import numpy as np

from moe_audit import formulas as m
from moe_audit.column import Column, Looks, counts, effective_tokens, scaled
from moe_audit.frame import LayerFrame
from moe_audit.thresholds import floors


def f_p_gap(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    if f.prob_WSE is None:
        return "gate probabilities were not recorded"
    n_WE = counts(f, source)
    prob_WE = f.prob_WSE.sum(1) if source is None else f.prob_WSE[:, source]
    m_W = n_WE.sum(-1)
    # A second window of endless size stands for P: only the picks f are noisy.
    floor_W, _ = floors.shift_floor(f.N, f.k, np.full(m_W.shape, np.inf), m_W, f.phi1_W, looks.z(f.N))
    return Column(
        m.f_p_gap(n_WE, prob_WE),
        floor_W,
        effective_tokens(f, source),
        scaled(floor_W, m_W / f.k, lambda limit: limit),
        lambda w, limit: np.argsort(-np.abs(m.shares(n_WE[w]) - m.shares(prob_WE[w])))[:3],
        lambda w: (
            f"the balancing loss N*sum f*P is {float(m.switch_loss(n_WE[w], prob_WE[w])):.3f} (1 is even)"
        ),
    )


def top1_gap(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
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
        scaled(floor_W, f.tokens_W(), lambda limit: limit),
        note=note,
    )


# -- router health


def invalid_ids(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    if source is not None:
        return "invalid ids are not split by source"
    # A window in which every pick was invalid has no counts, and still is a cell.
    value_W = np.where((f.m_W > 0) | (f.invalid_W > 0), f.invalid_W, np.nan)
    return Column(
        value_W,
        None,
        effective_tokens(f, None),
        note=lambda w: "router logits not finite, or ids out of range",
    )


def logit_bias(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    if f.logit_mean_WE is None or f.logit_std_WE is None:
        return "router logits were not recorded"
    if source is not None:
        return "router logits are not split by source"
    mean_WE = f.logit_mean_WE
    return Column(
        m.divide(mean_WE.std(-1), f.logit_std_WE.mean(-1)),
        None,
        effective_tokens(f, None),
        experts=lambda w, limit: np.argsort(-np.abs(mean_WE[w] - mean_WE[w].mean()))[:3],
    )


def uniform_counts(gate: str, f: LayerFrame, looks: Looks, source: int | None) -> Column | str:
    if f.k >= f.N:
        return "every token uses every expert"
    n_WE = counts(f, source)
    m_W = n_WE.sum(-1)
    same_W = np.where(m_W > 0, (n_WE == n_WE[:, :1]).all(-1), np.nan)
    # The chance that a perfect router hits exactly even counts (normal density at the mean).
    variance_W = np.maximum(m_W / f.N * (1 - f.k / f.N), 1 / (2 * math.pi))
    chance_W = math.sqrt(f.N) * (2 * math.pi * variance_W) ** (-(f.N - 1) / 2)
    chances = looks.windows * looks.layers / looks.alpha
    lucky_W = chance_W * chances > 1
    variance = (math.sqrt(f.N) * chances) ** (2 / (f.N - 1)) / (2 * math.pi)  # with it they are not lucky
    enough = variance * f.N / (1 - f.k / f.N) / f.k
    return Column(
        same_W,
        lucky_W.astype(np.float64),
        effective_tokens(f, source),
        lambda w, limit: enough - m_W[w] / f.k,
        note=lambda w: "every expert has the same count: forced balancing, or experts that choose tokens",
    )
