"""Does the training gate help? The same sick start without it and with each of its actions, side by side.

    moe-train prepare demo -o runs/text
    python examples/freeze_ab.py --text runs/text --output runs/freeze_ab

No action on the learning rate mends what caused the collapse. The last arm does what a pause is for: it
resumes the paused run with a balancing loss and the routers at the rate of all else.

The sick start is that of `demo_sick.toml`, smaller: nothing balances the load, and the routers learn ten
times as fast as all else. Runs of one seed are equal to the bit until the gate acts. A table cell is the
median over the seeds and, in brackets, the range.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import moe_trainer
from moe_audit import check, open_run
from moe_trainer.config import load_config
from moe_trainer.runs import resume, run

SICK = Path(moe_trainer.__file__).parent / "configs" / "demo_sick.toml"
SMALL = (
    "model.num_layers=2", "model.d_model=64", "model.moe.hidden_size=64",
    "data.sequence_length=64", "train.micro_batch_sequences=8", "train.log_every=50",
    "recorder.flush_every=5", "optim.warmup_steps=20",
)  # fmt: skip
# The gate and the final judgement use the same windows: 20 steps, a new one every 10.
POLICY = 'name = "freeze_ab"\nextends = "default"\nlength = 20\nstride = 10\n'
ARMS = {
    "no gate": (),
    "hold": ("gate.action=hold",),
    "scale x0.1": ("gate.action=scale", "gate.factor=0.1"),
    "scale x0.1, router only": ("gate.action=scale", "gate.factor=0.1", "gate.groups=router"),
    "zero_router": ("gate.action=zero_router",),
    "pause": ("gate.action=pause",),
    "pause, mended, resumed": ("gate.action=pause",),
}
MEND = ("model.moe.lb_loss_weight=0.05", "optim.router_lr_multiplier=1.0", "gate.action=none")
KINDS = ("lr_action", "lr_return", "pause_requested")
WORST = ("max_load", "min_load", "tv")  # of the cells of all layers in the last five windows
COLUMNS = (*WORST, "failing cells", "loss", "loss - no gate", "first action", "steps acted on", "last step")


@dataclass(frozen=True)
class Outcome:
    """What one run came to; `values` by the names of COLUMNS."""

    values: dict[str, float]
    loss_at: dict[int, float]  # by the last step of each record


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--text", type=Path, required=True, help="folder of `moe-train prepare demo`")
    options.add_argument("--output", type=Path, required=True, help="folder for the runs")
    options.add_argument("--steps", type=int, default=160)
    options.add_argument("--cooldown", type=int, default=50, help="steps that an action lasts")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    chosen = options.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    policy = chosen.output / "policy.toml"
    policy.write_text(POLICY)
    common = [
        *SMALL,
        f"train.steps={chosen.steps}",
        f"gate.policy={policy}",
        f"gate.cooldown={chosen.cooldown}",
        *(f"data.sources.{folder.name}={folder}" for folder in sorted(chosen.text.iterdir())),
    ]
    outcomes: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
    for seed in chosen.seeds:
        for arm, settings in ARMS.items():
            folder = chosen.output / f"{arm.replace(' ', '_').replace(',', '')}_{seed}"
            run(load_config(SICK, [*common, f"train.seed={seed}", *settings]), folder, overwrite=True)
            if arm.endswith("resumed"):
                resume(folder, MEND)
            outcomes[arm].append(judge(folder, policy))
    for outcome_by_seed in zip(*outcomes.values(), strict=True):
        compare(outcome_by_seed)
    print("\n".join(table(outcomes)))


def judge(folder: Path, policy: Path) -> Outcome:
    """The routing of the last five windows, the loss of their last, and what the gate did."""
    with open_run(folder) as recorded:
        last = recorded.records[-1].last_step
        loss_at = {r.last_step: r.loss for r in recorded.records if r.loss is not None}
        steps = {kind: [e.step or 0 for e in recorded.events if e.kind == kind] for kind in KINDS}
        verdict = check(recorded, policy, checkpoint=last)
    worst = {g.gate: float(g.worst.value) for g in verdict.gates if g.worst and g.worst.value is not None}
    begun, ended = steps["lr_action"], [*steps["lr_return"], last]
    acts = begun + steps["pause_requested"]
    return Outcome(
        {
            **{gate: worst[gate] for gate in WORST if gate in worst},
            "failing cells": verdict.totals["FAIL"],
            "loss": statistics.fmean(loss for step, loss in loss_at.items() if step > last - 20),
            **({"first action": acts[0]} if acts else {}),
            "steps acted on": sum(end - begin for begin, end in zip(begun, ended, strict=False)),
            "last step": last,
        },
        loss_at,
    )


def compare(of_one_seed: Sequence[Outcome]) -> None:
    """Adds to each outcome how its loss differs from that of the run without the gate at the same steps."""
    reference = of_one_seed[0]
    for outcome in of_one_seed[1:]:
        both = outcome.loss_at.keys() & reference.loss_at.keys()  # a pause cuts a record early
        steps = [step for step in both if step > max(both) - 20]
        differences = [outcome.loss_at[step] - reference.loss_at[step] for step in steps]
        outcome.values["loss - no gate"] = statistics.fmean(differences)


def table(outcomes: dict[str, list[Outcome]]) -> list[str]:
    """Markdown: one row an arm, median and range over the seeds."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for arm, runs in outcomes.items():
        cells = [_cell([r.values[column] for r in runs if column in r.values]) for column in COLUMNS]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.3g}" if low == high else f"{middle:.3g} ({low:.3g} to {high:.3g})"


if __name__ == "__main__":
    main()
