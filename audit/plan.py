"""Planning an audit before a run: window, stride, records, what can be seen, how large the store gets."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from moe_audit.thresholds import floors
from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.policy import Policy, load_policy
from moe_audit.windows import AUTO_LENGTH, CYCLES_PER_WINDOW

LEAST_CYCLES = 5
RECORDS_PER_WINDOW = 20  # a record is then 5 % of a window, the most that windows take without a warning
MOST_MICRO_BATCHES = 200  # in one record
EVENNESS = ("max_load", "min_load", "cv", "lir", "norm_entropy")


@dataclass(frozen=True)
class Plan:
    """What to set before a run. Effects are those a perfect router exceeds with probability alpha.

    Attributes:
        length, stride: Of the windows, in steps.
        origin: Why this length.
        flush_every: Micro-batches of one record, the recorder's setting.
        record_steps: Steps of one record.
        records: Records of the whole run; None where its length is not given.
        windows, disjoint_windows: Of the whole run; None where its length is not given.
        window_tokens: Tokens of one window.
        detectable: Metric -> smallest value that can be told from chance, on one window.
        undecidable: Gate -> tokens a window needs before a breach of its fail limit is decided.
        store_bytes: Size of the store; None where the length of the run is not given.
        notes: What to think about.
    """

    length: int
    stride: int
    origin: str
    flush_every: int
    record_steps: int
    records: int | None
    windows: int | None
    disjoint_windows: int | None
    window_tokens: int
    detectable: dict[str, float]
    undecidable: dict[str, int]
    store_bytes: int | None
    notes: list[str]


def plan(
    *,
    experts: int,
    top_k: int,
    tokens_per_step: int,
    layers: int = 1,
    sources: int = 1,
    shard_cycle: int | None = None,
    steps: int | None = None,
    micro_batches: int = 1,
    design_effect: float = 1.0,
    policy: Policy | str | None = None,
) -> Plan:
    """Chooses windows and records for a run.

    Args:
        experts: N of a layer.
        top_k: k.
        tokens_per_step: Tokens of one optimizer step over all ranks.
        layers: MoE layers.
        sources: Data sources.
        shard_cycle: Steps in which the data goes once through its shards.
        steps: Steps of the whole run.
        micro_batches: Micro-batches of a step.
        design_effect: How much more counts vary than with independent tokens (phi; text: 15 to 260).
        policy: Whose limits have to be decidable.

    Raises:
        UsageError: numbers that do not go together.
    """
    if top_k > experts:
        raise UsageError(f"top_k {top_k} exceeds {experts} experts", "a token picks an expert once")
    if steps is not None and shard_cycle is not None and shard_cycle > steps:
        raise UsageError(f"the shard cycle of {shard_cycle} steps exceeds the run of {steps}")
    loaded = policy if isinstance(policy, Policy) else load_policy(policy)
    notes: list[str] = []
    length, origin = _length(loaded, shard_cycle, steps, notes)
    per_record = max(1, min(MOST_MICRO_BATCHES, length * micro_batches // RECORDS_PER_WINDOW))
    record_steps = math.ceil(per_record / micro_batches)
    flush_every = record_steps * micro_batches
    stride = max(length // 2 // record_steps, 1) * record_steps
    stride = min(loaded.stride or stride, length)
    windows = None if steps is None else max(0, (steps - length) // stride + 1)
    disjoint = None if steps is None else steps // length
    if disjoint is not None and disjoint < loaded.min_windows:
        notes.append(
            f"{steps} steps hold {disjoint} disjoint windows; policy {loaded.name} "
            f"wants {loaded.min_windows}:"
            " the verdict would be INSUFFICIENT"
        )
    looks = experts * layers * (windows or 1)
    z = floors.looks_z(loaded.alpha, looks)
    assignments = float(length * tokens_per_step * top_k)
    detectable = {
        metric: float(
            floors.floor(metric, floors.noise(metric, experts, top_k, assignments, design_effect, z), experts)
        )
        for metric in EVENNESS
    }
    tv, load_shift = floors.shift_floor(experts, top_k, assignments, assignments, design_effect, z)
    detectable |= {"tv": float(tv), "load_shift": float(load_shift)}
    if sources > 1:
        detectable["cramers_v"] = float(
            floors.association_floor(experts, top_k, sources, assignments, design_effect, z)
        )
    undecidable = {}
    for gate in EVENNESS:
        limit = loaded.limit(gate, num_experts=experts, top_k=top_k)
        if limit is None or limit.fail is None:
            continue
        needed = float(floors.tokens_needed(gate, limit.fail, experts, top_k, design_effect, z))
        if needed > length * tokens_per_step and math.isfinite(needed):
            undecidable[gate] = math.ceil(needed)
    if design_effect == 1.0:
        notes.append(
            "tokens are taken as independent (design effect 1); documents make it 15 "
            "to 260: see --design-effect"
        )
    records = None if steps is None else math.ceil(steps / record_steps)
    return Plan(
        length, stride, origin, flush_every, record_steps, records, windows, disjoint,
        length * tokens_per_step, detectable, undecidable,
        None if records is None else _store_bytes(experts, layers, sources, records), notes,
    )  # fmt: skip


def _length(policy: Policy, cycle: int | None, steps: int | None, notes: list[str]) -> tuple[int, str]:
    """Window length and its reason: it covers the data's cycle ten times, at least five times."""
    if policy.length is not None:
        if cycle is not None and policy.length < LEAST_CYCLES * cycle:
            notes.append(
                f"the policy's window of {policy.length} steps covers the shard cycle of {cycle} steps"
                f" {policy.length / cycle:.2g} times; 10 times is usual, 5 the least"
            )
        return policy.length, "policy"
    most = None if steps is None else max(steps // policy.min_windows, 1)
    if cycle is None:
        notes.append("no shard cycle given: a window that does not cover it swings with the data")
        return min(AUTO_LENGTH, most or AUTO_LENGTH), "auto"
    if most is None or CYCLES_PER_WINDOW * cycle <= most:
        return CYCLES_PER_WINDOW * cycle, f"{CYCLES_PER_WINDOW} x shard cycle"
    if LEAST_CYCLES * cycle <= most:
        return (
            most // cycle * cycle,
            f"{most // cycle} x shard cycle, so that {policy.min_windows} windows fit",
        )
    notes.append(
        f"{steps} steps do not hold {policy.min_windows} windows of 5 shard cycles ({cycle} steps each):"
        " shuffle finer, or train longer"
    )
    return LEAST_CYCLES * cycle, f"{LEAST_CYCLES} x shard cycle"


def _store_bytes(experts: int, layers: int, sources: int, records: int) -> int:
    from moe_audit.schema import best_page_size, store_bytes

    shape = [experts] * layers
    page = best_page_size(shape, sources, counts_only=False)
    return int(store_bytes(shape, sources, page, records, counts_only=False))


def render(made: Plan, format: str) -> str:
    """A plan as text or JSON."""
    if format == "json":
        finite = {k: v if math.isfinite(v) else None for k, v in made.detectable.items()}
        return json.dumps({"schema_version": 1, **asdict(made), "detectable": finite}, indent=1) + "\n"
    lines = [
        f"window     {made.length:,} steps ({made.origin}), {made.window_tokens:,} tokens",
        f"stride     {made.stride:,} steps",
        f"record     every {made.record_steps:,} steps: flush_every={made.flush_every}",
    ]
    if made.records is not None:
        assert made.store_bytes is not None
        lines += [
            f"windows    {made.windows:,}, of which {made.disjoint_windows:,} disjoint",
            f"store      {made.records:,} records, about {_size(made.store_bytes)}",
        ]
    lines += ["", "smallest effect that is not chance, in one window:"]
    lines += [f"  {name:<13}{value:.4g}" for name, value in made.detectable.items()]
    for gate, tokens in made.undecidable.items():
        lines.append(f"undecidable  {gate}: a breach of its fail limit needs {tokens:,} tokens a window")
    lines += [f"note       {note}" for note in made.notes]
    return "\n".join(lines) + "\n"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
