"""Facts of one layer in one window that speak for or against a cause.

Shapes: W windows, S sources, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit import formulas as m
from moe_audit.attribution import attribute
from moe_audit.frame import Analysis, LayerFrame
from moe_audit.record import POST_DROP

STARVED = 0.25  # in fair shares
MOST_NAMED = 6
RATE_JUMP = 2.0  # a learning rate that rises so far between windows has been restarted


def gather(analysis: Analysis, frame: LayerFrame, w: int) -> dict[str, Any]:
    """All facts of `frame` in window `w`, by the names that `diagnosis` fills in. None of them is NaN."""
    facts: dict[str, Any] = {"num_experts": frame.N, "top_k": frame.k, "fair": 1 / frame.N}
    if frame.info.gating:
        facts["gating"] = frame.info.gating
    facts |= _loads(frame, w) | _by_source(frame, w) | _logits(frame, w) | _probabilities(frame, w)
    facts |= _change(analysis, frame, w) | _rates(analysis, w) | _batches(frame, w)
    facts |= _capacity(analysis, frame, w) | _meta(analysis)
    facts["invalid"] = int(frame.invalid_W[w])
    return {k: v for k, v in facts.items() if not (isinstance(v, float) and math.isnan(v))}


def headroom_text(frame: LayerFrame, w: int) -> str | None:
    """How much of the traffic each source may become before an expert overflows its capacity."""
    if frame.info.capacity_factor is None or len(frame.sources) < 2 or POST_DROP in frame.info.tags:
        return None
    shares = m.source_headroom(frame.counts_WSE[w], frame.info.capacity_factor)
    if np.nanmax(shares, initial=-1) == 0:
        return "an expert is over its capacity at the mix as it is"
    parts = [
        f"once {name} exceeds {share:.0%} of the traffic"
        for name, share in zip(frame.sources, shares)
        if not math.isnan(share)
    ]
    return "an expert overflows " + ", or ".join(parts) if parts else None


def _loads(frame: LayerFrame, w: int) -> dict[str, Any]:
    p_E = frame.p_WE[w]
    if np.isnan(p_E).any():
        return {}
    u_E = frame.N * p_E
    hot, least = int(u_E.argmax()), int(u_E.argmin())
    starved = np.flatnonzero(u_E < STARVED)
    return {
        "expert": hot,
        "load": float(u_E[hot]),
        "share": float(p_E[hot]),
        "least_expert": least,
        "least_load": float(u_E[least]),
        "starved_count": len(starved),
        "starved": _named(starved),
        "dead": int((u_E == 0).sum()),
        "lir": float(m.lir(frame.n_WE[w])),
        "entropy": float(m.norm_entropy(frame.n_WE[w])),
    }


def _by_source(frame: LayerFrame, w: int) -> dict[str, Any]:
    n_SE = frame.counts_WSE[w]
    seen = [s for s in range(len(frame.sources)) if n_SE[s].any()]
    if len(seen) < 2:
        return {}
    names = [frame.sources[s] for s in seen]
    n_SE = n_SE[seen]
    p_SE = m.shares(n_SE)
    hot, least = int(n_SE.sum(0).argmax()), int(n_SE.sum(0).argmin())
    u_S = frame.N * p_SE[:, hot]
    entropy_S = m.norm_entropy(n_SE)
    lift_SE = np.nan_to_num(m.lift(n_SE))
    s, e = np.unravel_index(int(lift_SE.argmax()), lift_SE.shape)
    high, low = int(u_S.argmax()), int(u_S.argmin())
    top = [np.argsort(-row)[0] for row in lift_SE]
    return {
        "high_source": names[high],
        "high_load": float(u_S[high]),
        "low_source": names[low],
        "low_load": float(u_S[low]),
        "source_ratio": float(u_S[high] / max(u_S[low], 1e-9)),
        "by_source": _shares_of(hot, names, u_S),
        "least_by_source": _shares_of(least, names, frame.N * p_SE[:, least]),
        "entropy_by_source": ", ".join(f"{name} {h:.2f}" for name, h in zip(names, entropy_S)),
        "entropy_gap": float(m.norm_entropy(n_SE.sum(0)) - entropy_S.min()),
        "narrow_source": names[int(entropy_S.argmin())],
        "narrow_entropy": float(entropy_S.min()),
        "cut_source": names[int(s)],
        "cut_expert": int(e),
        "cut_lift": float(lift_SE[s, e]),
        "cramers_v": float(m.cramers_v(n_SE, frame.k, float(frame.phi1_W[w]))),
        "lifts": ", ".join(f"{name} {row[t]:.2g} x expert {t}" for name, row, t in zip(names, lift_SE, top)),
        "mix_now": _mix(frame, w),
    }


def _shares_of(expert: int, names: list[str], u_S: npt.NDArray[np.float64]) -> str:
    each = ", ".join(f"{name} {u:.2g}" for name, u in zip(names, u_S))
    return f"fair shares of expert {expert}: {each}"


def _logits(frame: LayerFrame, w: int) -> dict[str, Any]:
    if frame.logit_mean_WE is None or frame.logit_std_WE is None or not frame.n_WE[w].any():
        return {}
    mean_E, std_E = frame.logit_mean_WE[w], frame.logit_std_WE[w]
    hot, least = int(frame.n_WE[w].argmax()), int(frame.n_WE[w].argmin())
    others = np.delete(mean_E, hot)
    std = float(std_E.mean())
    return {
        "expert_logit": float(mean_E[hot]),
        "least_logit": float(mean_E[least]),
        "other_logit": float(others.mean()) if len(others) else math.nan,
        "logit_std": std,
        "logit_spread": float(mean_E.std()),
        "logit_gap": float((mean_E[hot] - others.mean()) / std) if len(others) and std > 0 else math.nan,
    }


def _probabilities(frame: LayerFrame, w: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if frame.prob_WSE is not None and frame.n_WE[w].any():
        n_E, prob_E = frame.n_WE[w], frame.prob_WSE[w].sum(0)
        f_E, P_E = m.shares(n_E), m.shares(prob_E)
        e = int(np.nan_to_num(f_E - P_E).argmax())
        facts |= {
            "f_p_gap": float(m.f_p_gap(n_E, prob_E)),
            "switch_loss": float(m.switch_loss(n_E, prob_E)),
            "gap_expert": e,
            "gap_share": float(f_E[e]),
            "gap_prob": float(P_E[e]),
        }
    if frame.top1_WS2 is not None:
        tokens_S = frame.source_tokens_WS()[w]
        mean, spread = m.confidence(frame.top1_WS2[w].sum(0), tokens_S.sum())
        mean_S, spread_S = m.confidence(frame.top1_WS2[w], tokens_S)
        facts |= {
            "top1_mean": float(mean),
            "top1_spread": float(spread),
            "top1_by_source": ", ".join(
                f"{name} {a:.2f} (spread {b:.2f})"
                for name, a, b in zip(frame.sources, mean_S, spread_S)
                if not math.isnan(a)
            ),
        }
    return facts


def _change(analysis: Analysis, frame: LayerFrame, w: int) -> dict[str, Any]:
    previous = int(frame.windows.previous_W[w])
    if previous < 0 or not frame.n_WE[w].any() or not frame.n_WE[previous].any():
        return {}
    windows = frame.windows
    shift = attribute(frame.counts_WSE[previous], frame.counts_WSE[w])
    facts: dict[str, Any] = {
        "before": f"{windows.first_step_W[previous]}-{windows.last_step_W[previous]}",
        "router": shift.router,
        "mix": shift.mix,
        "moved_experts": _named(shift.experts[:3]),
        "mix_before": _mix(frame, previous),
    }
    if len(frame.sources) > 1 and shift.by_source_S.any():
        facts["moved_source"] = frame.sources[shift.sources[0]]
    first, last = int(windows.first_step_W[previous]), int(windows.last_step_W[w])
    starts = [a.start_step for a in analysis.run.attempts if first < a.start_step <= last]
    rates = analysis.lr_W
    if starts:
        facts["restart"] = f"training was resumed at step {starts[-1]}"
    elif rates[previous] > 0 and rates[w] >= RATE_JUMP * rates[previous]:
        facts["restart"] = f"the learning rate rose from {rates[previous]:.3g} to {rates[w]:.3g}"
    loss = analysis.loss_W
    return facts | {"loss_before": float(loss[previous])}


def _rates(analysis: Analysis, w: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"lr": float(analysis.lr_W[w]), "loss": float(analysis.loss_W[w])}
    record = analysis.records[int(analysis.windows.lo_W[w])]
    if record.router_lr is not None:
        facts["router_lr"] = float(record.router_lr)
        if record.lr:
            facts["rate_ratio"] = record.router_lr / record.lr
    return facts


def _batches(frame: LayerFrame, w: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"phi": float(frame.phi_W[w])}
    if frame.batches_W is not None and frame.batches_W[w] > 0:
        per_batch = float(frame.batch_tokens_W()[w])
        facts["tokens_per_batch"] = per_batch
        facts["effective_per_batch"] = per_batch / float(frame.phi_W[w])
    return facts


def _capacity(analysis: Analysis, frame: LayerFrame, w: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    factor = frame.info.capacity_factor
    if factor is not None:
        facts["capacity_factor"] = factor
        if frame.n_WE[w].any():
            facts["mean_over_capacity"] = float(m.max_load(frame.n_WE[w])) / factor
        headroom = headroom_text(frame, w)
        if headroom:
            facts["headroom"] = headroom
    facts["drop_rate"] = float(frame.drop_rate_W()[w])
    if frame.peak_WE is not None:
        peak_W = frame.peak_WE.max(-1)
        facts |= {"peak": float(peak_W[w]), "peak_expert": int(frame.peak_WE[w].argmax())}
        loss_W = analysis.loss_W
        worst = sorted(np.argsort(-peak_W)[:4].tolist())
        facts["peak_timeline"] = ", ".join(
            f"steps {frame.windows.first_step_W[i]}-{frame.windows.last_step_W[i]} {peak_W[i]:.3g}"
            + ("" if math.isnan(loss_W[i]) else f" (loss {loss_W[i]:.3f})")
            for i in worst
        )
    return facts


def _meta(analysis: Analysis) -> dict[str, Any]:
    meta = analysis.run.meta
    facts: dict[str, Any] = {}
    if meta.get("shard_cycle_steps") is not None:
        facts["shard_cycle"] = meta["shard_cycle_steps"]
    if meta.get("balancing") is not None:
        rule = str(meta["balancing"])[:80]
        facts["balancing"] = rule
        numbers = [float(x) for x in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?", rule)]
        if rule == "none":
            facts["balancing_weight"] = 0.0
        elif numbers and "loss" in rule and "bias" not in rule:
            facts["balancing_weight"] = numbers[0]
    return facts


def _mix(frame: LayerFrame, w: int) -> str:
    share_S = m.divide(frame.m_WS[w], frame.m_WS[w].sum())
    return ", ".join(f"{name} {share:.0%}" for name, share in zip(frame.sources, share_S))


def _named(experts: Iterable[Any]) -> str:
    numbers = [str(int(e)) for e in experts]
    return (
        ", ".join(numbers[:MOST_NAMED]) + (" ..." if len(numbers) > MOST_NAMED else "") if numbers else "none"
    )
