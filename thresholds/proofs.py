"""Which gates of a policy can never fire, always fire, or contradict each other at given N, k, T, B and CF.

Each finding carries its inequality, so that a reader can check it. Gates are compared at their fail limits; a
warning level is mentioned only where it is on from the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_audit.thresholds import extremes, floors
from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.gate_names import GATES, Op, breaches
from moe_audit.thresholds.policy import ALL, Limit, Policy

Kind = Literal["never", "always", "contradiction", "noise", "blind"]
Level = Literal["warn", "fail", "both"]
SHIFTS = ("tv", "load_shift", "share_shift")


@dataclass(frozen=True)
class Finding:
    """One thing that the limits imply. `by`: the other gate of the argument."""

    kind: Kind
    gate: str
    level: Level
    message: str
    inequality: str
    by: str | None = None


@dataclass(frozen=True)
class Setting:
    """The layer that a policy is checked for."""

    num_experts: int
    top_k: int
    tokens: int | None = None  # a micro-batch
    micro_batches: int | None = None  # a window
    capacity_factor: float | None = None
    num_sources: int = 1

    @property
    def max_load(self) -> float:
        return self.num_experts / self.top_k

    @property
    def assignments(self) -> float | None:
        """Of one window."""
        return None if self.tokens is None else float(self.tokens * (self.micro_batches or 1) * self.top_k)


def check_policy(
    policy: Policy,
    *,
    num_experts: int,
    top_k: int,
    tokens: int | None = None,
    micro_batches: int | None = None,
    capacity_factor: float | None = None,
    num_sources: int = 1,
) -> list[Finding]:
    """What the limits of `policy` imply for a layer of `num_experts` experts with `top_k` picks a token.

    Args:
        policy: The policy.
        num_experts: N.
        top_k: k.
        tokens: T, tokens of one micro-batch; None leaves out what sampling noise does.
        micro_batches: B, micro-batches of one window.
        capacity_factor: CF; None: dropless.
        num_sources: S.

    Raises:
        UsageError: a number that no layer can have.
    """
    for name, value in {
        "num_experts": num_experts, "top_k": top_k, "tokens": tokens, "micro_batches": micro_batches,
        "num_sources": num_sources,
    }.items():  # fmt: skip
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}", "it must be at least 1")
    if top_k > num_experts:
        raise UsageError(f"top_k {top_k} exceeds num_experts {num_experts}", "a token picks an expert once")
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        raise UsageError(f"capacity_factor is {capacity_factor}", "it must be a positive number")
    setting = Setting(num_experts, top_k, tokens, micro_batches, capacity_factor, num_sources)
    written = _limits(policy, setting)
    limits = {gate: x._replace(warn=None) if x.warn_beyond_fail else x for gate, x in written.items()}
    findings = [
        *_contradictions(policy, limits, setting),
        *_ranges(limits, setting),
        *_dominated(policy, limits, setting),
        *_noise(policy, limits, setting),
        *_capacity(limits, setting),
        *_blind(policy, limits, setting),
    ]
    findings += _only_even(limits, findings)
    settled = {f.gate for f in findings if f.kind == "always" and f.level != "warn"}
    findings += [f for f in _buried(written) if f.gate not in settled]
    return [f for f in findings if f.kind != "noise" or f.gate not in settled]


def _limits(policy: Policy, s: Setting) -> dict[str, Limit]:
    found = {}
    for gate in policy.gates:
        source = "any source" if GATES[gate].per_source else ALL
        limit = policy.limit(
            gate,
            num_experts=s.num_experts,
            top_k=s.top_k,
            capacity_factor=s.capacity_factor,
            source=source,
            as_written=True,
        )
        if limit is not None:
            found[gate] = limit
    return found


def _contradictions(policy: Policy, limits: dict[str, Limit], s: Setting) -> Iterator[Finding]:
    """Required gates that cannot be decided: the run would be INSUFFICIENT whatever the router does."""
    missing = {
        "no capacity factor": "capacity_factor" if s.capacity_factor is None else None,
        "fewer than two sources": "sources" if s.num_sources < 2 else None,
        "fewer than three sources": "three_sources" if s.num_sources < 3 else None,
    }
    for gate in policy.required:
        if gate not in limits:
            message = f"{gate} is required but has no limit, so it is never decided"
            yield Finding("contradiction", gate, "both", message, "required and off")
            continue
        for reason, need in missing.items():
            if need in GATES[gate].needs:
                message = f"{gate} is required but skipped with {reason}, so no run can pass"
                yield Finding("contradiction", gate, "both", message, f"required and {reason}")


def _buried(written: dict[str, Limit]) -> Iterator[Finding]:
    """Warnings beyond the limit: one file may not say so, two of a chain or two formulas can."""
    for gate, x in written.items():
        if x.warn_beyond_fail and x.warn != x.fail:
            message = f"{gate} {x.op} {x.warn:.4g} can never warn: it fails at {x.fail:.4g} before"
            yield Finding("never", gate, "warn", message, f"warn {x.warn:.4g} lies beyond fail {x.fail:.4g}")


def _only_even(limits: dict[str, Limit], findings: list[Finding]) -> Iterator[Finding]:
    """A gate that passes exactly even counts only, beside the one that fails them."""
    even = limits.get("uniform_counts")
    if even is None or even.fail is None:
        return
    for finding in findings:
        if finding.kind == "always" and finding.level == "fail" and finding.inequality.startswith("limit ="):
            message = f"{finding.gate} passes only exactly even counts, which uniform_counts fails"
            bound = f"{finding.inequality}; uniform_counts {even.op} {even.fail:g}"
            yield Finding("contradiction", finding.gate, "fail", message, bound, by="uniform_counts")


def _range(gate: str, s: Setting) -> tuple[float, float] | None:
    """(perfect value, worst possible value) of a gate for any router; None: no such bounds."""
    N, k, c = s.num_experts, s.top_k, s.max_load
    if gate in extremes.METRICS:
        return extremes.PERFECT[gate](N), extremes.worst(gate, N, k)
    tv, load_shift = extremes.largest_swing(N, 0.0, c) if N > 1 else (0.0, 0.0)
    bounds = {
        "source_entropy": (1.0, extremes.worst("norm_entropy", N, k)),
        "tv": (0.0, tv),
        "load_shift": (0.0, load_shift),
        "share_shift": (0.0, load_shift / N),
        "cramers_v": (0.0, 1.0),
        "association_rel": (0.0, 1.0),
        "max_monopoly": (1 / s.num_sources, 1.0),
        "f_p_gap": (0.0, 1.0),
        "top1_gap": (0.0, 1.0),
        "drop_rate": (0.0, 1.0),
        "uniform_counts": (0.0, 1.0),
        "static_router": (0.0, 1.0),
    }
    if s.capacity_factor is not None:
        bounds["capacity_use"] = (1 / s.capacity_factor, c / s.capacity_factor)
        bounds["drop_rate"] = (0.0, max(0.0, 1 - s.capacity_factor / c))
    return bounds.get(gate)


_WHY_WORST = {
    "max_load": "no expert can take more than N/k fair shares, as a token picks it once",
    "cv": "k experts that take every token have cv sqrt(N/k - 1)",
    "norm_entropy": "k experts that take every token still have entropy ln k / ln N",
    "source_entropy": "k experts that take every token of a source still have entropy ln k / ln N",
    "share_shift": "no share of assignments exceeds 1/k",
    "load_shift": "no load exceeds N/k fair shares",
    "capacity_use": "no load exceeds N/k fair shares, so use is at most N/(k*CF)",
    "drop_rate": "at most 1 - CF*k/N can overflow",
}


def _ranges(limits: dict[str, Limit], s: Setting) -> Iterator[Finding]:
    """Limits beyond what any router can reach, or short of what a perfect one reaches."""
    for gate, limit in limits.items():
        bounds = _range(gate, s)
        levels: tuple[tuple[Level, float | None], ...] = (("fail", limit.fail), ("warn", limit.warn))
        for level, value in levels:
            if value is None or bounds is None:
                continue
            perfect, worst = bounds
            condition = f"{gate} {limit.op} {value:.4g}"
            if breaches(limit.op, perfect, value):
                message = f"{condition} {level}s for every router: perfectly even routing has {perfect:.4g}"
                bound = f"perfect {gate} = {perfect:.4g} {limit.op} {value:.4g}"
                yield Finding("always", gate, level, message, bound)
            elif (
                gate in _SMOOTH
                and math.isclose(perfect, value, rel_tol=1e-9)
                and not math.isclose(perfect, worst, rel_tol=1e-9, abs_tol=1e-12)
            ):
                message = f"{condition} {level}s for all but exactly even counts: no room for chance"
                yield Finding("always", gate, level, message, f"limit = perfect {gate} = {perfect:.4g}")
            elif not breaches(limit.op, worst, value):
                why = _WHY_WORST.get(gate, "no value beyond that exists")
                message = f"{condition} can never {level}: its worst possible value is {worst:.4g}"
                bound = f"{why}: {gate} {limit.op[0].translate(_FLIP)}= {worst:.4g}"
                yield Finding("never", gate, level, message, bound)


def _dominated(policy: Policy, limits: dict[str, Limit], s: Setting) -> Iterator[Finding]:
    """Gates that can only fail after another has: its limit already keeps them within theirs."""
    N, k = s.num_experts, s.top_k
    judged = {g: x.fail for g, x in limits.items() if x.fail is not None}
    for given, bound in judged.items():
        if given not in _NEEDED - {"source_entropy"} or not _has_room(given, limits[given].op, bound, N):
            continue
        keeps = f"{given} {_within(limits[given].op)} {bound:.4g}"
        for gate, value in judged.items():
            op = limits[gate].op
            if gate == given:
                continue
            if gate in extremes.METRICS:
                worst = extremes.worst(gate, N, k, given, bound)
                why = _WHY_DEAD if gate == "dead_experts" else _WHY.get((given, gate), _WHY_GIVEN[given])
            elif gate in SHIFTS and policy.effect == "total" and N > 1:
                # the router's part of a swing is not bounded by the loads: the mix may hide it
                low = extremes.worst("min_load", N, k, given, bound)
                high = extremes.worst("max_load", N, k, given, bound)
                tv, load_shift = extremes.largest_swing(N, low, high)
                worst = {"tv": tv, "load_shift": load_shift, "share_shift": load_shift / N}[gate]
                why = f"both windows have loads between {low:.3g} and {high:.3g} fair shares"
            else:
                continue
            perfect_fails = gate in extremes.METRICS and breaches(op, extremes.PERFECT[gate](N), value)
            if not breaches(op, worst, value) and not perfect_fails:
                yield Finding(
                    "never", gate, "fail",
                    f"{gate} {op} {value:.4g} can never fail first: {given} fails before it",
                    f"{keeps} implies {gate} {op[0].translate(_FLIP)}= {worst:.3g} ({why})",
                    by=given,
                )  # fmt: skip


def _noise(policy: Policy, limits: dict[str, Limit], s: Setting) -> Iterator[Finding]:
    """Gates whose limit a perfect router crosses by chance with this few tokens a window."""
    M = s.assignments
    if M is None or s.num_experts == 1:
        return
    N, k = s.num_experts, s.top_k
    z = floors.looks_z(policy.alpha, N)
    for gate, limit in limits.items():
        value = limit.fail if limit.fail is not None else limit.warn
        assignments = M / s.num_sources if gate == "source_entropy" else M
        if gate not in _FLOORS or value is None or breaches(limit.op, _floor(gate, N, k, 1e300, z), value):
            continue
        usual, rare = (_floor(gate, N, k, assignments, score) for score in (None, z))
        if not breaches(limit.op, rare, value):
            continue
        need = float(floors.tokens_needed(gate, value, N, k, z=z)) if gate in _NEEDED else math.nan
        more = f"; it needs {math.ceil(need):,} tokens a window" if math.isfinite(need) else ""
        shown = f"{gate} {limit.op} {value:.4g}"
        tokens = f"{int(assignments / k):,} tokens"
        if policy.noise_aware:
            message = f"{shown} is INSUFFICIENT where it is breached, at {tokens} a window{more}"
            bound = f"a perfect router reaches {rare:.4g} with probability {policy.alpha:g}"
            yield Finding("noise", gate, "fail", message, bound)
        elif breaches(limit.op, usual, value):
            message = f"{shown} fails for a perfect router in most windows of {tokens}{more}"
            yield Finding("always", gate, "fail", message, f"mean of a perfect router: {usual:.4g}")
        else:
            often = f"in more than {policy.alpha:g} of windows of {tokens}"
            message = f"{shown} fails for a perfect router {often}{more}"
            yield Finding("noise", gate, "fail", message, f"its {1 - policy.alpha:g} quantile: {rare:.4g}")


def _capacity(limits: dict[str, Limit], s: Setting) -> Iterator[Finding]:
    """The capacity margin on perfectly uniform routing: small micro-batches overflow by chance alone."""
    limit = limits.get("capacity_use")
    if limit is None or s.tokens is None or s.capacity_factor is None:
        return
    levels: tuple[tuple[Level, float | None], ...] = (("fail", limit.fail), ("warn", limit.warn))
    for level, value in levels:
        if value is None or breaches(limit.op, 1 / s.capacity_factor, value):
            continue
        chance = capacity_alarm(s, value, strict=limit.op == ">")
        if chance < 0.01:
            continue
        batches = s.micro_batches or 1
        fires = f"{level}s almost surely" if chance > 0.99 else f"{level}s with probability {chance:.2f}"
        message = (
            f"capacity_use {limit.op} {value:.4g} {fires} on perfectly uniform routing,"
            f" in {batches:,} micro-batches of {s.tokens:,} tokens"
        )
        count = value * s.capacity_factor * s.tokens * s.top_k / s.num_experts
        load = f"Binomial({s.tokens}, {s.top_k}/{s.num_experts})"
        bound = f"1 - P({load} {_within(limit.op)} {count:.6g})^(N*B) = {chance:.2f}"
        yield Finding("always" if chance > 0.99 else "noise", "capacity_use", level, message, bound)


def capacity_alarm(s: Setting, limit: float, *, strict: bool) -> float:
    """Probability that perfectly uniform routing crosses `limit` of capacity_use in B micro-batches.

    An expert's count is Binomial(T, k/N) exactly; the experts of a layer are taken as independent.
    """
    assert s.tokens is not None
    assert s.capacity_factor is not None
    count = limit * s.capacity_factor * s.tokens * s.top_k / s.num_experts
    first = math.floor(count + 1e-9) + 1 if strict else math.ceil(count - 1e-9)
    tail = extremes.binomial_tail(s.tokens, s.top_k / s.num_experts, first)
    if tail >= 1:
        return 1.0
    return -math.expm1(s.num_experts * (s.micro_batches or 1) * math.log1p(-tail))


def _blind(policy: Policy, limits: dict[str, Limit], s: Setting) -> Iterator[Finding]:
    """What a gate lets through although its name promises to catch it."""
    N = s.num_experts
    shift = limits.get("share_shift")
    value = shift and (shift.fail if shift.fail is not None else shift.warn)
    if shift and value and value * N > 1 + 1e-9:
        message = (
            f"share_shift {shift.op} {value:.4g} is {value * N:.3g} fair shares: an expert at its fair share"
            f" must grow {1 + value * N:.3g}-fold between two windows; only a collapse fires it"
        )
        yield Finding(
            "blind", "share_shift", "fail", message, f"{value:.4g} * N = {value * N:.3g} fair shares"
        )
    entropy = limits.get("source_entropy")
    value = entropy and (entropy.fail if entropy.fail is not None else entropy.warn)
    if not value or N < 2:
        return
    hot = max(1, round(0.3 * N))
    share = min(extremes.packed_share(N, hot, value), hot / s.top_k)  # a token picks an expert once
    if share <= hot / N * 1.5:
        return
    weight = min(0.3, hot / (N * share))  # the other sources can even the pooled load out up to this weight
    shown = math.floor(share * 20) / 20  # a round figure just below
    ties = extremes.packed_ties(N, hot, shown, weight, max(s.num_sources, 2))
    ties = {gate: x for gate, x in ties.items() if gate in limits}
    seen = [gate for gate, x in ties.items() if _fires(limits[gate], x)]
    evenness = ", ".join(g for g in limits if GATES[g].family == "evenness") or "the pooled gates"
    if seen:
        catch = f"of the limits here {' and '.join(seen)} would see it"
    elif ties:
        values = " or ".join(f"{gate} = {x:.2f}" for gate, x in ties.items())
        catch = f"nor is {values} beyond its limit, with {max(s.num_sources, 2)} sources"
    else:
        catch = "no gate of this policy looks at that: limit cramers_v"
    message = (
        f"source_entropy {value:.4g} lets {hot} of {N} experts take {math.floor(share * 100)} % of a source;"
        f" the other sources can fill the gaps, so that the pooled load stays uniform and {evenness} see"
        f" nothing; {catch}"
    )
    packed = extremes.packed_entropy(N, hot, shown)
    v = extremes.packed_v(N, hot, shown, weight)
    bound = (
        f"entropy of {hot} experts sharing {shown:.0%} and {N - hot} sharing the rest = {packed:.3f} >="
        f" {value:.4g}; with that source at {weight:.0%} of the tokens and a uniform pool:"
        f" pooled lir 1.0, Cramer's V {v:.2f}"
    )
    yield Finding("blind", "source_entropy", "fail", message, bound)


def _fires(limit: Limit, value: float) -> bool:
    """Whether a value warns or fails."""
    return any(level is not None and breaches(limit.op, value, level) for level in (limit.warn, limit.fail))


def _has_room(gate: str, op: Op, limit: float, num_experts: int) -> bool:
    """Whether uneven loads exist that keep the limit."""
    perfect = extremes.PERFECT[gate](num_experts)
    return not breaches(op, perfect, limit) and not math.isclose(perfect, limit, rel_tol=1e-9)


def _within(op: Op) -> str:
    """The sign that holds while a gate does not breach."""
    return {">": "<=", ">=": "<", "<": ">=", "<=": ">"}[op]


def _floor(gate: str, N: int, k: int, assignments: float, z: float | None) -> float:
    """What a perfect router shows: its mean (z = None) or its quantile at z."""
    if gate in SHIFTS:
        score = floors.blom_score(N) if z is None else z
        tv, load_shift = (float(x) for x in floors.shift_floor(N, k, assignments, assignments, 1.0, score))
        return {"tv": tv, "load_shift": load_shift, "share_shift": load_shift / N}[gate]
    metric = "norm_entropy" if gate == "source_entropy" else gate
    return float(floors.floor(metric, floors.noise(metric, N, k, assignments, z=z), N))


_FLIP = str.maketrans("<>", "><")
_NEEDED = frozenset({"max_load", "min_load", "min_share", "lir", "cv", "norm_entropy", "source_entropy"})
_FLOORS = _NEEDED | set(SHIFTS)
_SMOOTH = _FLOORS | {"cramers_v", "association_rel"}
_WHY = {
    ("lir", "cv"): "largest with 1/(1+r) of the experts at r times the others: (r-1)/(2*sqrt r) at most",
    ("lir", "min_share"): "1/(1 + r(N-1)): one expert low, the others at r times its load",
    ("lir", "min_load"): "N/(1 + r(N-1)): one expert low, the others at r times its load",
    ("lir", "max_load"): "rN/(r + N-1): one expert at r times the others",
    ("cv", "max_load"): "1 + v*sqrt(N-1): one hot expert, the others equal",
    ("cv", "min_load"): "1 - v*sqrt(N-1): one starved expert, the others equal",
    ("cv", "min_share"): "(1 - v*sqrt(N-1))/N: one starved expert, the others equal",
    ("cv", "lir"): "worst with one expert high, one low, the others equal",
    ("norm_entropy", "lir"): "worst with one expert high, one low, the others equal",
    ("cv", "norm_entropy"): "least entropy at that cv: all experts equal but one",
}
_WHY_DEAD = "most with as few experts in use as that allows, all at the same load"
_WHY_GIVEN = {
    "max_load": "worst with as many experts at the limit as fit, the rest empty",
    "min_load": "worst with one hot expert, the others at the limit",
    "min_share": "worst with one hot expert, the others at the limit",
    "lir": "worst with some experts at r times the load of the others",
    "cv": "worst with one expert off, the others equal",
    "norm_entropy": "worst with one expert off, the others equal",
}
