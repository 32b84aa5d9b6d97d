"""What failing routing usually means: symptoms, causes in the order to check them, what to look at, remedies.

Plain data. Every `{name}` is filled with a fact of the run (`evidence.py`); a line whose facts the store does
not hold is left out. A cause's `holds` reads the facts: True moves it up, False down, None leaves its place.
Patterns stand in the order in which they are told: first those under which the others mean little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Facts = Mapping[str, Any]
LOW_BALANCING = 0.01  # weights up to this let an expert run away; 0.1 is what is raised to
HIGH_BALANCING = 0.05
CLUSTERED = 10.0  # design effect from which tokens of a micro-batch clearly hang together
COLLAPSED = 0.8  # mean top-1 probability of a router that no longer weighs its choice


@dataclass(frozen=True)
class Cause:
    """A likely cause: what it is, the evidence for or against it, and where to look."""

    text: str
    evidence: tuple[str, ...]
    holds: Callable[[Facts], bool | None] = lambda facts: None


@dataclass(frozen=True)
class Pattern:
    """A symptom that the gates name, and what is behind it in practice."""

    key: str
    title: str
    gates: tuple[str, ...]
    symptom: tuple[str, ...]
    causes: tuple[Cause, ...]
    look_at: tuple[str, ...]
    remedies: tuple[str, ...]


def _above(name: str, yes: float, no: float | None = None) -> Callable[[Facts], bool | None]:
    """True from `yes` on, False up to `no`, else None."""

    def holds(facts: Facts) -> bool | None:
        value = facts.get(name)
        if value is None:
            return None
        if value >= yes:
            return True
        return False if no is not None and value <= no else None

    return holds


def _weak_balancing(facts: Facts) -> bool | None:
    weight = facts.get("balancing_weight")
    if weight is None:
        return None
    return True if weight <= LOW_BALANCING else False if weight >= HIGH_BALANCING else None


BALANCING = Cause(
    "the balancing weight is too low to hold the router",
    ("the run says balancing is {balancing}", "the store does not say how the load is balanced"),
    _weak_balancing,
)
FAST_ROUTER = Cause(
    "the router learns much faster than the experts",
    (
        "at this window the router's rate is {router_lr:.3g}, {rate_ratio:.3g} "
        "times the {lr:.3g} of the rest",
        "the rate at this window is {lr:.3g}; the router's own was not recorded",
    ),
    _above("rate_ratio", 1.5, 0.5),
)
LOGITS = Cause(
    "the router's logits have run apart",
    (
        "mean logit of expert {expert} is {expert_logit:.3g}, of the others "
        "{other_logit:.3g}; a token's logit"
        " deviates by {logit_std:.3g}",
    ),
    _above("logit_gap", 1.0, 0.3),
)

PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "invalid_ids",
        "the router is not finite",
        ("invalid_ids",),
        ("{invalid:,.0f} picks name no expert: router logits are not finite, or ids are out of range",),
        (
            Cause("the loss diverged, or a low precision overflowed", ("loss in this window: {loss:.4g}",)),
            FAST_ROUTER,
        ),
        ("the first record with invalid ids, and the logits there",),
        ("go back to the checkpoint before it", "run the router in float32", "add or raise the z-loss"),
    ),
    Pattern(
        "uniform_counts",
        "counts are exactly even: this does not measure a router",
        ("uniform_counts",),
        ("every expert has the same count",),
        (
            Cause("routing is forced to be even, as benchmarks do", ()),
            Cause("experts choose their tokens (expert choice), so that load is even by construction", ()),
            Cause("counts were taken after padding to capacity", ()),
        ),
        ("the routing type of the layer: {gating}",),
        ("switch forced balancing off", "record router picks before padding"),
    ),
    Pattern(
        "static_router",
        "the router does not learn",
        ("static_router",),
        ("its counts are the same in 20 windows",),
        (
            Cause("the router has no gradient, or a rate of 0", ("the router's rate is {router_lr:.3g}",)),
            Cause("routing is by position or hash", ("the layer says its gating is {gating}",)),
        ),
        ("the gradient of the router's weight",),
        ("check that the router's parameters are in the optimizer and not detached",),
    ),
    Pattern(
        "hot_expert",
        "one expert far above the rest",
        ("max_load", "lir", "cv", "norm_entropy"),
        (
            "expert {expert} carries {load:.3g} fair shares ({share:.1%} of the "
            "assignments, fair is {fair:.1%})",
        ),
        (
            BALANCING,
            FAST_ROUTER,
            Cause(
                "a shard is repeated, or one source owns the expert",
                (
                    "expert {expert} gets {high_load:.3g} fair shares of {high_source} and {low_load:.3g} of"
                    " {low_source}; since the window before, the mix moved {mix:.3f} and the "
                    "router {router:.3f}",
                    "expert {expert} gets {high_load:.3g} fair shares of {high_source} and {low_load:.3g} of"
                    " {low_source}",
                ),
                _above("source_ratio", 2.0, 1.3),
            ),
            LOGITS,
        ),
        (
            "what changed at step {since}, where the first window beyond a limit begins",
            "the rows of each source: {by_source}",
            "router logit means per expert, over time",
            "the learning rate of the router against that of the experts",
        ),
        (
            "raise the balancing weight, 0.01 -> 0.1",
            "add or raise the z-loss, which keeps logits small",
            "reset the router's row of expert {expert}, or the router",
            "lower the router's learning rate to 1/5 to 1/3 of the experts'",
        ),
    ),
    Pattern(
        "starved_experts",
        "experts that starve",
        ("min_load", "min_share", "dead_experts"),
        (
            "{starved_count} of {num_experts} experts get less than a quarter of "
            "their fair share (least: expert"
            " {least_expert} with {least_load:.2g}); {dead} got nothing",
        ),
        (
            BALANCING,
            FAST_ROUTER,
            Cause(
                "the router is sure of itself and explores no more",
                ("mean top-1 probability is {top1_mean:.2f} (spread {top1_spread:.2f})",),
                _above("top1_mean", COLLAPSED, 0.5),
            ),
            Cause(
                "the router's logits have run apart",
                (
                    "mean logit of expert {least_expert} is {least_logit:.3g}, of the "
                    "busiest {expert_logit:.3g}",
                ),
                _above("logit_gap", 1.0, 0.3),
            ),
        ),
        (
            "what changed at step {since}, where the first window beyond a limit begins",
            "the rows of each source: {least_by_source}",
        ),
        (
            "raise the balancing weight, 0.01 -> 0.1, or let a score bias follow the load",
            "lower the router's learning rate to 1/5 to 1/3 of the experts'",
            "give the starved experts fresh router rows (experts {starved})",
        ),
    ),
    Pattern(
        "flattening",
        "the balancing loss looks fine, but dispatch is skewed (flattening)",
        ("f_p_gap",),
        (
            "dispatch shares and mean probabilities differ by {f_p_gap:.3f}: expert {gap_expert} gets"
            " {gap_share:.1%} of the picks at a mean probability of {gap_prob:.1%}; "
            "the balancing loss N*sum f*P is"
            " {switch_loss:.3f}, where 1 is even",
        ),
        (
            Cause(
                "probabilities are flat, and a small edge decides every pick",
                ("mean top-1 probability is {top1_mean:.2f}, where 1/N is {fair:.3f}",),
                lambda f: None if "top1_mean" not in f else f["top1_mean"] < 2 * f["fair"] * f["top_k"],
            ),
            Cause(
                "picks do not follow the probabilities: a score bias, groups, or a loss on other scores",
                ("the run says balancing is {balancing}",),
            ),
            Cause(
                "the loss is taken over a mean that hides single sources",
                ("entropy by source: {entropy_by_source}",),
                _above("entropy_gap", 0.1, 0.02),
            ),
        ),
        (
            "f and P side by side, expert by expert",
            "entropy of each source: {entropy_by_source}",
        ),
        (
            "use a balancing loss that sees dispatch (counts times probabilities, "
            "per sequence or per source)",
            "raise the balancing weight, or balance by a score bias",
        ),
    ),
    Pattern(
        "cutting",
        "experts are cut up among sources (semantic cutting)",
        ("cramers_v", "association_rel", "max_lift", "max_monopoly", "source_entropy"),
        (
            "source {cut_source} uses expert {cut_expert} {cut_lift:.3g} times as "
            "much as all do; Cramer's V is"
            " {cramers_v:.2f}; source {narrow_source} has entropy "
            "{narrow_entropy:.2f}, the pooled load {entropy:.2f}",
        ),
        (
            Cause(
                "micro-batches hold one source each, so that balancing acts within sources",
                ("design effect {phi:.3g}",),
                _above("phi", CLUSTERED, 2.0),
            ),
            Cause(
                "balancing looks at the pooled load only, which sources can share out among them",
                ("pooled entropy {entropy:.2f}; by source: {entropy_by_source}",),
                _above("entropy_gap", 0.1, 0.02),
            ),
            FAST_ROUTER,
        ),
        (
            "the matrix of sources and experts: {lifts}",
            "headroom: {headroom}",
        ),
        (
            "mix sources within micro-batches",
            "balance per sequence or per source, not over the pool alone",
            "if the experts are meant to specialise, judge with the preset `specialised`",
        ),
    ),
    Pattern(
        "overflow",
        "experts overflow their capacity: drops, and loss spikes with them",
        ("capacity_use", "drop_rate"),
        (
            "a micro-batch gave expert {peak_expert} {peak:.3g} fair shares at capacity {capacity_factor:g};"
            " {drop_rate:.2%} of the assignments were dropped",
            "a micro-batch gave expert {peak_expert} {peak:.3g} fair shares at capacity {capacity_factor:g}",
            "{drop_rate:.2%} of the assignments were dropped at capacity {capacity_factor:g}",
            "{drop_rate:.2%} of the assignments were dropped",
        ),
        (
            Cause(
                "the capacity factor leaves too little room",
                (
                    "the window's mean load of the busiest expert is {load:.3g} fair shares, "
                    "its peak {peak:.3g}",
                    "the window's mean load of the busiest expert is {load:.3g} fair shares",
                ),
                _above("mean_over_capacity", 0.8),
            ),
            Cause(
                "shards are clustered: one micro-batch holds one kind of text",
                ("design effect {phi:.3g}; peaks: {peak_timeline}", "peaks: {peak_timeline}"),
                _above("phi", CLUSTERED, 2.0),
            ),
            BALANCING,
        ),
        (
            "the timeline of peaks: {peak_timeline}",
            "the loss there: {loss:.3f}, in the window before {loss_before:.3f}",
            "headroom: {headroom}",
        ),
        (
            "shuffle finer, so that a micro-batch holds all sources",
            "raise the capacity factor to 1.35 to 1.5",
            "make micro-batches larger",
        ),
    ),
    Pattern(
        "after_restart",
        "routing changed where training restarted (resumed, fine-tuned, annealed)",
        (),
        (
            "{restart} and since then the router moved {router:.3f} of the "
            "assignments (the mix {mix:.3f}); most:"
            " experts {moved_experts}",
        ),
        (
            Cause(
                "the data mix is another one than before",
                ("sources now: {mix_now}; before: {mix_before}",),
                _above("mix", 0.05, 0.01),
            ),
            FAST_ROUTER,
        ),
        ("`moe-audit compare` of the ranges before and after",),
        (
            "bring the data mix closer to the one before, or warm it in",
            "add the z-loss for the new stage",
            "freeze the router, or some of the experts, at first",
        ),
    ),
    Pattern(
        "swinging",
        "shares swing between windows",
        ("tv", "load_shift", "share_shift"),
        (
            "between steps {before} and this window the router itself moved {router:.3f} of the assignments"
            " (the data mix {mix:.3f}); most: experts {moved_experts}, source {moved_source}",
            "between steps {before} and this window {router:.3f} of the assignments moved; most: experts"
            " {moved_experts}",
        ),
        (
            FAST_ROUTER,
            Cause(
                "batches are small or clustered, so that the router follows each of them",
                (
                    "design effect {phi:.3g}: {tokens_per_batch:,.0f} tokens of a micro-batch count as"
                    " {effective_per_batch:,.0f}",
                ),
                _above("phi", CLUSTERED, 2.0),
            ),
            Cause(
                "gate probabilities spread widely, so that small changes of logits move many tokens",
                ("top-1 probability {top1_mean:.2f}, spread {top1_spread:.2f} between tokens",),
                _above("top1_spread", 0.25, 0.1),
            ),
        ),
        ("router logit means per expert, over time", "the swing of source {moved_source} alone"),
        (
            "set the router's learning rate to 1/5 to 1/3 of the experts'",
            "use a larger batch, or accumulate more micro-batches",
            "add or raise the z-loss",
        ),
    ),
    Pattern(
        "drift",
        "the loads drift away from where they were",
        ("drift",),
        ("{note}",),
        (
            Cause(
                "the data changed at that step",
                ("between the windows there the mix moved {mix:.3f}, the router {router:.3f}",),
                _above("mix", 0.05, 0.01),
            ),
            FAST_ROUTER,
            BALANCING,
        ),
        ("`moe-audit compare` of the ranges before and after the step of change",),
        ("find what changed at that step: data, learning rate, code",),
    ),
    Pattern(
        "periodic",
        "the router swings with the shard cycle",
        ("periodicity",),
        ("{note}",),
        (
            Cause("shards come in long stretches of one source", ("the shard cycle is {shard_cycle} steps",)),
            FAST_ROUTER,
        ),
        ("loads per record over two cycles",),
        ("shuffle finer", "set the router's learning rate to 1/5 to 1/3 of the experts'"),
    ),
    Pattern(
        "overconfident",
        "the router is over-confident on common sources",
        ("top1_gap",),
        ("top-1 probability by source: {top1_by_source}",),
        (
            Cause(
                "rare sources see too few tokens to be learned",
                ("shares of the tokens: {mix_now}",),
            ),
            LOGITS,
        ),
        ("top-1 probability by source, over time",),
        ("sample rare sources more often", "add or raise the z-loss"),
    ),
    Pattern(
        "constant_bias",
        "the router prefers experts whatever the token",
        ("logit_bias",),
        (
            "mean logits differ between experts by {logit_spread:.3g}, while a token's logit deviates by"
            " {logit_std:.3g} only",
        ),
        (BALANCING, LOGITS),
        ("router bias and the norm of its rows",),
        ("add or raise the z-loss", "reset the router"),
    ),
)
OF_GATE = {gate: pattern for pattern in PATTERNS for gate in pattern.gates}
BY_KEY = {pattern.key: pattern for pattern in PATTERNS}
