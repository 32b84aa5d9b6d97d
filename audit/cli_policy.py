"""The commands `moe-audit policy …`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_audit import cli_io as io
from moe_audit import cli_options as opt

if TYPE_CHECKING:
    from moe_audit.thresholds.policy import Policy
    from moe_audit.thresholds.proofs import Finding

STARTER = """\
# A policy for moe-audit: what is left out is as in the policy that it extends.
# `moe-audit policy show` prints the limits, `moe-audit policy check` says what they imply.
extends = "{base}"

# [gates.max_load]          # limits are numbers or expressions over N, k, CF, c = N/k and g
# warn = 1.8
# fail = "min(2.5, 1 + 0.6*(c - 1))"

# [[overrides]]             # for some layers, or for some sources
# layers = "0-1"
# gates.cv = {{ warn = 0.5, fail = 0.9 }}

# [[waivers]]               # a failure that somebody answers for until a day
# gate = "min_load"
# layers = "3"
# owner = "name"
# reason = "known, fixed in the next run"
# expires = 2030-01-31
"""
KINDS = {
    "contradiction": "contradicts itself",
    "always": "always fires",
    "never": "never fires",
    "noise": "drowns in noise",
    "blind": "does not see",
}


@click.group("policy", cls=io.Group)
def policy_group() -> None:
    """Show, start, describe and check policies."""


layer_options = opt.options(
    click.option("--experts", type=opt.POSITIVE, help="Experts N of a layer."),
    click.option("--top-k", type=opt.POSITIVE, help="Picks k per token."),
    click.option(
        "--capacity-factor",
        type=opt.Number(0, open_low=True),
        help="Capacity factor CF; leave out where dropless.",
    ),
)


@policy_group.command(epilog="\b\nExample: moe-audit policy show classic --experts 64 --top-k 8")
@click.argument("name", required=False, metavar="[NAME|FILE]")
@layer_options
@opt.output_options("text", "json")
def show(
    name: str | None,
    experts: int | None,
    top_k: int | None,
    capacity_factor: float | None,
    no_color: bool,
    **_: Any,
) -> int:
    """Print a resolved policy; with --experts and --top-k, its limits as numbers."""
    from moe_audit.thresholds.errors import UsageError
    from moe_audit.thresholds.policy import load_policy

    if (experts is None) != (top_k is None):
        raise UsageError("--experts and --top-k belong together", "give both, or neither")
    if experts is not None and top_k is not None and top_k > experts:
        raise UsageError(f"--top-k {top_k} exceeds --experts {experts}", "a token picks an expert once")
    places = io.destinations()
    policy = load_policy(name)
    for format, path in places:
        if format == "json":
            data = policy.as_dict() | {"origin": policy.origin, "sha256": policy.sha256}
            io.write(json.dumps(data, indent=1, default=str) + "\n", path)
        else:
            io.write(policy_text(policy, experts, top_k, capacity_factor), path)
    return 0


@policy_group.command(epilog="\b\nExample: moe-audit policy init --extends specialised")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("moe-audit.toml"),
    show_default=True,
    metavar="FILE",
    help="Where to write it.",
)
@click.option(
    "--extends",
    "base",
    default="default",
    show_default=True,
    metavar="PRESET",
    help="The policy to start from.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def init(output: Path, base: str, force: bool) -> int:
    """Write a first policy file that extends a preset."""
    from moe_audit.thresholds.policy import preset_text

    preset_text(base)
    io.refuse_overwrite(output, force)
    io.write(STARTER.format(base=base), str(output))
    click.echo(str(output))
    return 0


@policy_group.command()
def schema() -> int:
    """Print the JSON Schema of policy files, for editors."""
    from moe_audit.thresholds.policy import policy_schema

    io.write(json.dumps(policy_schema(), indent=1) + "\n", io.STDOUT)
    return 0


@policy_group.command(
    "check",
    epilog="\b\nExample: moe-audit policy check --policy classic --experts 8 "
    "--top-k 2 --tokens 4096 --micro-batches 2000 --capacity-factor 1.25",
)
@click.argument("names", nargs=-1, metavar="[NAME|FILE]...")
@opt.policy_option
@layer_options
@click.option(
    "--tokens", type=opt.POSITIVE, help="Tokens T of one micro-batch; without it nothing is said on noise."
)
@click.option("--micro-batches", type=opt.POSITIVE, help="Micro-batches B of one window.")
@click.option("--sources", type=opt.POSITIVE, default=4, show_default=True, help="Data sources S.")
@opt.output_options("text", "json")
def policy_check(
    names: tuple[str, ...],
    policy: str | None,
    experts: int | None,
    top_k: int | None,
    no_color: bool,
    _formats: Any,
    _outputs: Any,
    **layer: Any,
) -> int:
    """Prove which gates can never fire, always fire, contradict each other or see nothing.

    Limits depend on the layer: without --experts and --top-k it is only checked that the policies load.
    Exit code 1 where a gate always fails or contradicts the rest, so that no run could pass.
    """
    from moe_audit.thresholds.errors import UsageError
    from moe_audit.thresholds.policy import load_policy
    from moe_audit.thresholds.proofs import check_policy

    if (experts is None) != (top_k is None):
        raise UsageError("--experts and --top-k belong together", "limits depend on both")
    places = io.destinations()
    loaded = [load_policy(name) for name in (*names, *([policy] if policy else []))] or [load_policy()]
    reports = []
    for each in loaded:
        findings = (
            None
            if experts is None or top_k is None
            else check_policy(
                each,
                num_experts=experts,
                top_k=top_k,
                tokens=layer["tokens"],
                micro_batches=layer["micro_batches"],
                capacity_factor=layer["capacity_factor"],
                num_sources=layer["sources"],
            )
        )
        reports.append((each, findings))
    for format, path in places:
        if format == "json":
            io.write(json.dumps(_findings_json(reports, experts, top_k), indent=1) + "\n", path)
        else:
            texts = [findings_text(each, experts, top_k, findings) for each, findings in reports]
            io.write("\n".join(texts), path)
    fatal = [
        f
        for _, findings in reports
        for f in findings or ()
        if f.kind == "contradiction" or (f.kind == "always" and f.level != "warn")
    ]
    return 1 if fatal else 0


def _findings_json(
    reports: list[tuple[Policy, list[Finding] | None]], experts: int | None, top_k: int | None
) -> dict[str, Any]:
    policies = [
        {
            "policy": {"name": each.name, "origin": each.origin, "sha256": each.sha256},
            "findings": None if findings is None else [vars(f) for f in findings],
        }
        for each, findings in reports
    ]
    return {"schema_version": 1, "num_experts": experts, "top_k": top_k, "policies": policies}


def policy_text(policy: Policy, experts: int | None, top_k: int | None, capacity_factor: float | None) -> str:
    """The limits of a policy as a table: as written, or as numbers for one layer."""
    from moe_audit.thresholds.gate_names import GATES

    noise = "decides" if policy.noise_aware else "is shown only"
    before = "the last disjoint window" if policy.lag is None else f"the window {policy.lag} back"
    head = [
        f"{policy.name} ({policy.origin}): {policy.description}".rstrip(": "),
        f"sha256 {policy.sha256}",
        f"alpha {policy.alpha:g}; noise {noise}; stability: {policy.effect} effect against {before};"
        f" at least {policy.min_windows} {policy.count_windows} windows",
        "",
    ]
    rows = [("gate", "", "warn", "fail", "formula")]
    for gate in policy.gates:
        rule = policy.rule(gate)
        op = (rule.op if rule else None) or GATES[gate].op
        warn, fail = (rule.warn, rule.fail) if rule else (None, None)
        if experts is not None:
            limit = policy.limit(
                gate,
                num_experts=experts,
                top_k=top_k,
                capacity_factor=capacity_factor,
                source="any source" if GATES[gate].per_source else "all",
            )
            warn, fail = (limit.warn, limit.fail) if limit else (None, None)
        rows.append((gate, op, _shown(warn), _shown(fail), GATES[gate].formula))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[4]]).rstrip() for row in rows]
    tail = [
        f"override {i}: { {k: v for k, v in dataclasses.asdict(o).items() if v is not None} }"
        for i, o in enumerate(policy.overrides, 1)
    ]
    tail += [f"waiver: {w.gate}, {w.owner}, until {w.expires}: {w.reason}" for w in policy.waivers]
    return "\n".join([*head, *table, *([""] if tail else []), *tail]) + "\n"


def findings_text(
    policy: Policy, experts: int | None, top_k: int | None, findings: list[Finding] | None
) -> str:
    """Findings for people: what, then why."""
    if findings is None:
        return (
            f"policy {policy.name} ({policy.origin}) is sound: {len(policy.gates)} gates;"
            " --experts and --top-k show what its limits imply\n"
        )
    lines = [f"policy {policy.name} ({policy.origin}) at {experts} experts, top-{top_k}:"]
    for kind, title in KINDS.items():
        for finding in (f for f in findings if f.kind == kind):
            lines += ["", f"{title}: {finding.message}", f"    because {finding.inequality}"]
    if not findings:
        lines += ["", "every gate can fire, none fires on even routing, and none makes another idle"]
    return "\n".join(lines) + "\n"


def _shown(limit: float | str | None) -> str:
    return "-" if limit is None else limit if isinstance(limit, str) else f"{limit:.4g}"
