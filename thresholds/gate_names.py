"""The gates by name: which side is bad, what a gate needs, and the formula that is printed beside the name.

One definition for the policies, which set limits, and for the engine, which computes values. A gate bears the
name of the metric it judges.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Op = Literal[">", ">=", "<", "<="]
Need = Literal[
    "sources",  # at least two sources
    "three_sources",
    "probabilities",
    "top1",
    "capacity_factor",
    "peak",
    "drops",
    "earlier_window",  # a window that does not overlap, `lag` windows back
    "many_windows",
    "shard_cycle",
    "logits",
]


@dataclass(frozen=True)
class GateInfo:
    """One gate. A cell breaches its limit where `value op limit` holds."""

    name: str
    op: Literal[">", "<"]
    family: str
    formula: str
    needs: tuple[Need, ...] = ()
    per_source: bool = False  # one cell a source; the others judge the sum over sources


def _gates() -> Iterable[GateInfo]:
    yield GateInfo("max_load", ">", "evenness", "max over experts of N*p_e, in fair shares")
    yield GateInfo("min_load", "<", "evenness", "min over experts of N*p_e, in fair shares")
    yield GateInfo("dead_experts", ">", "evenness", "experts without a single pick")
    yield GateInfo("cv", ">", "evenness", "std(n)/mean(n) over experts, ddof 0")
    yield GateInfo("lir", ">", "evenness", "max n / min n over experts")
    yield GateInfo("min_share", "<", "evenness", "min over experts of n_e/M, share of assignments")
    yield GateInfo("norm_entropy", "<", "evenness", "-sum p ln p / ln N over all declared experts")
    yield GateInfo(
        "capacity_use",
        ">",
        "capacity",
        "largest micro-batch load in fair shares / capacity factor",
        ("capacity_factor", "peak"),
    )
    yield GateInfo(
        "drop_rate", ">", "capacity", "dropped assignments / assignments", ("capacity_factor", "drops")
    )
    yield GateInfo(
        "tv", ">", "stability", "0.5*sum abs(dp_e) against the last disjoint window", ("earlier_window",)
    )
    yield GateInfo("load_shift", ">", "stability", "max abs(N*dp_e), in fair shares", ("earlier_window",))
    yield GateInfo(
        "share_shift", ">", "stability", "max abs(dp_e), a fraction of assignments", ("earlier_window",)
    )
    yield GateInfo(
        "cramers_v",
        ">",
        "cutting",
        "Cramer's V of source and expert, bias-corrected, equal source weights",
        ("sources",),
    )
    yield GateInfo(
        "association_rel", ">", "cutting", "I(source;expert) / H(source), equal source weights", ("sources",)
    )
    yield GateInfo("max_lift", ">", "cutting", "max over s,e of P(e given s)/P(e)", ("sources",))
    yield GateInfo(
        "max_monopoly",
        ">",
        "cutting",
        "max over e of max_s P(s given e), equal source weights",
        ("three_sources",),
    )
    yield GateInfo(
        "source_entropy", "<", "cutting", "-sum p ln p / ln N of P(expert given source)", per_source=True
    )
    yield GateInfo(
        "f_p_gap",
        ">",
        "flattening",
        "0.5*sum abs(f_e - P_e), dispatch share against mean probability",
        ("probabilities",),
    )
    yield GateInfo(
        "top1_gap",
        ">",
        "confidence",
        "mean top-1 probability, commonest source less rarest",
        ("sources", "top1"),
    )
    yield GateInfo("drift", ">", "drift", "CUSUM in standard deviations, layer maximum", ("many_windows",))
    yield GateInfo(
        "periodicity",
        ">",
        "drift",
        "autocorrelation of the loads at the shard cycle",
        ("many_windows", "shard_cycle"),
    )
    yield GateInfo("invalid_ids", ">", "health", "picks whose id is no expert")
    yield GateInfo(
        "logit_bias",
        ">",
        "health",
        "spread of the mean router logits over experts / their mean deviation",
        ("logits",),
    )
    yield GateInfo("uniform_counts", ">", "health", "1 where every expert has exactly the same count, else 0")
    yield GateInfo(
        "static_router",
        ">",
        "health",
        "1 where the router did not change over 20 windows, else 0",
        ("many_windows",),
    )


GATES: dict[str, GateInfo] = {gate.name: gate for gate in _gates()}


MAX_WHOLE = 2**53  # of steps and sizes: exact as a float, and sums of them stay within 64 bits
TOLERANCE = 1e-12  # a value at the limit, but for the rounding of its arithmetic, is at the limit


@overload
def breaches(op: Op, value: float, limit: float) -> bool: ...
@overload
def breaches(op: Op, value: npt.NDArray[np.float64], limit: float) -> npt.NDArray[np.bool_]: ...
def breaches(op: Op, value: Any, limit: float) -> Any:
    """Where `value op limit` holds, for a number or an array; NaN breaches nothing.

    >>> breaches(">", 0.1 + 0.2, 0.3), breaches(">=", 0.1 + 0.2, 0.3), breaches("<", float("nan"), 1.0)
    (False, True, False)
    """
    slack = TOLERANCE * max(1.0, abs(limit))
    match op:
        case ">":
            return value > limit + slack
        case ">=":
            return value >= limit - slack
        case "<":
            return value < limit - slack
        case "<=":
            return value <= limit + slack


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, or all of them where none is near."""
    known = list(known)
    lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    if close:
        return f"did you mean {lower[close[0]]!r}?"
    return "known: " + ", ".join(known) if known else "there are none"
