"""The command `moe-audit`: each command is a thin face of one function, imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from moe_audit import cli_data, cli_reports
from moe_audit import cli_io as io
from moe_audit import cli_options as opt
from moe_audit.cli_policy import policy_group

EXAMPLES = """\b
Examples:
  moe-audit check runs/a                         judge a run, also while it trains
  moe-audit check runs/a --checkpoint 5000 --format junit --output audit.xml
  moe-audit explain runs/a                       why it failed, and what to look at
  moe-audit policy check --experts 64 --top-k 8  what the limits imply
\b
Exit codes: 0 pass, 1 a gate failed, 2 usage or configuration error, 3 insufficient
or no data, 4 invalid or unreadable run, 5 internal error (--debug shows where).
Shell completion: eval "$(_MOE_AUDIT_COMPLETE=bash_source moe-audit)" (or zsh_source, fish_source).
"""


@click.group(cls=io.Group, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moe-audit", prog_name="moe-audit")
def cli() -> None:
    """Acceptance tests for the routers of mixture-of-experts models."""


for command in (policy_group, *cli_data.COMMANDS, *cli_reports.COMMANDS):
    cli.add_command(command)


@cli.command(epilog="\b\nExample: moe-audit check runs/a --policy classic --last 5 --fail-on warn")
@opt.run_argument
@opt.policy_option
@opt.scope_options
@opt.checkpoint_option
@click.option(
    "--fail-on",
    type=opt.OneOf(("fail", "warn", "never")),
    default="fail",
    show_default=True,
    help="What gives exit code 1; codes 2 to 5 stay.",
)
@opt.output_options("text", *io.VERDICT_FORMS)
@click.option("--all-cells", is_flag=True, help="Also list the cells that pass (JSON).")
@click.option("--quiet", "-q", is_flag=True, help="One line of text.")
def check(
    run: Path,
    policy: str | None,
    fail_on: str,
    all_cells: bool,
    quiet: bool,
    no_color: bool,
    **scope: Any,
) -> int:
    """Judge every window of RUN and set the exit code.

    RUN is a folder that holds routing.db, or the file itself; training may still be writing it.
    """
    places = io.destinations()
    every = all_cells or any(format == "junit" for format, _ in places)  # a test case for what passes, too
    verdict = opt.judge(run, policy, scope, all_cells=every, fail_on=fail_on)
    io.deliver(verdict, places, all_cells=all_cells, quiet=quiet, color=not no_color)
    if verdict.exit_code >= 2 and all(format != "text" or path != io.STDOUT for format, path in places):
        from moe_audit.reports.wording import sentence

        click.echo(f"moe-audit: {verdict.status.name}: {sentence(verdict)}", err=True)
    return verdict.exit_code


@cli.command(
    epilog="\b\nExample: moe-audit metrics runs/a --layer 3 --metric max_load --metric cv --format csv"
)
@opt.run_argument
@opt.scope_options
@click.option("--metric", "names", multiple=True, metavar="NAME", help="Only this column; repeatable.")
@opt.output_options("text", "json", "csv")
def metrics(run: Path, names: tuple[str, ...], no_color: bool, **scope: Any) -> int:
    """Print every metric of RUN by window, layer and source."""
    from moe_audit.cli_tables import metrics_texts

    places = io.destinations()
    with opt.open_run(run, scope["phase"]) as opened:
        texts = metrics_texts(opened, names, [f for f, _ in places], opt.judge_options(opened, scope))
    for text, (_, path) in zip(texts, places):
        io.write(text, path)
    return 0


@cli.command(epilog="\b\nExample: moe-audit explain runs/sick --policy default --format markdown -o why.md")
@opt.run_argument
@opt.policy_option
@opt.scope_options
@opt.checkpoint_option
@opt.output_options("text", "json", "markdown")
def explain(run: Path, policy: str | None, no_color: bool, **scope: Any) -> int:
    """Say why RUN fails, with evidence and remedies.

    For each failing pattern: the symptom, likely causes in the order to check them, what this run says for
    and against each, what to look at, and usual remedies.
    """
    from moe_audit import explain as explaining

    places = io.destinations()
    with opt.open_run(run, scope["phase"]) as opened:
        found = explaining.explain(opened, policy, **opt.judge_options(opened, scope))
    for format, path in places:
        io.write(explaining.render(found, format), path)
    return 0


@cli.command(
    epilog="\b\nExamples: moe-audit compare runs/before runs/after\n          "
    "moe-audit compare runs/a runs/a --range-a 0-5000 --range-b 20000-25000"
)
@click.argument("a", type=click.Path(path_type=Path), metavar="A")
@click.argument("b", type=click.Path(path_type=Path), metavar="B")
@opt.policy_option
@click.option("--range-a", metavar="FIRST-LAST", help="Only these steps of A.")
@click.option("--range-b", metavar="FIRST-LAST", help="Only these steps of B.")
@click.option("--phase", default="train", show_default=True, help="Which phase of the records to read.")
@opt.output_options("text", "json", "markdown")
def compare(
    a: Path,
    b: Path,
    policy: str | None,
    range_a: str | None,
    range_b: str | None,
    phase: str,
    no_color: bool,
    **_: Any,
) -> int:
    """Compare two runs, or two ranges of steps.

    For a model before and after fine-tuning, or two stages of one run: how far the router and the data mix
    moved each layer, what moved most, and whether the limits of the policy accept it (exit code 1: no).
    """
    from moe_audit import compare as comparing

    places = io.destinations()
    with opt.open_run(a, phase) as run_a, opt.open_run(b, phase) as run_b:
        result = comparing.compare(
            run_a,
            run_b,
            policy,
            steps_a=opt.step_range(range_a, "--range-a"),
            steps_b=opt.step_range(range_b, "--range-b"),
        )
    for format, path in places:
        io.write(comparing.render(result, format), path)
    return result.exit_code


@cli.command(epilog="\b\nExample: moe-audit calibrate runs/good1 runs/good2 -o policy.toml --alpha 0.05")
@click.argument(
    "references", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="REFERENCE..."
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="The policy to write.",
)
@click.option(
    "--alpha",
    type=opt.Number(0, 0.5, open_low=True),
    default=0.05,
    show_default=True,
    help="False alarms allowed per gate and window.",
)
@click.option(
    "--extends",
    "base",
    default="default",
    show_default=True,
    metavar="NAME|FILE",
    help="The policy whose gates are calibrated.",
)
@click.option("--length", type=opt.POSITIVE, metavar="STEPS", help="Window length in steps.")
@opt.layer_option
@click.option(
    "--allow-mismatch",
    is_flag=True,
    help="Accept references that differ in experts, top-k, capacity or source mix.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def calibrate(
    references: tuple[Path, ...],
    output: Path,
    alpha: float,
    base: str,
    length: int | None,
    layers: tuple[str, ...],
    allow_mismatch: bool,
    force: bool,
) -> int:
    """Take limits from healthy runs.

    Conformal quantiles over disjoint windows, of the worst layer and source of each.
    """
    from moe_audit.reference import calibrate as calibrate_runs

    io.refuse_overwrite(output, force)
    runs = [opt.open_run(path) for path in references]
    result = calibrate_runs(
        runs,
        base=base,
        alpha=alpha,
        length=length,
        layers=opt.layer_numbers(runs[0], layers),
        allow_mismatch=allow_mismatch,
        name=output.stem,
        folder=output.parent,
    )
    for opened in runs:
        opened.close()
    io.write(result.toml, str(output))
    for line in result.lines:
        click.echo(line)
    click.echo(str(output))
    return 0


@cli.command(
    epilog="\b\nExample: moe-audit plan --experts 64 --top-k 8 --tokens-per-step "
    "65536 --layers 16 --sources 4 --shard-cycle 200 --steps 100000"
)
@click.option("--experts", type=opt.POSITIVE, required=True, help="Experts of a layer.")
@click.option("--top-k", type=opt.POSITIVE, required=True, help="Picks per token.")
@click.option(
    "--tokens-per-step", type=opt.POSITIVE, required=True, help="Tokens of one optimizer step, all ranks."
)
@click.option("--layers", type=opt.POSITIVE, default=1, show_default=True, help="MoE layers.")
@click.option("--sources", type=opt.POSITIVE, default=1, show_default=True, help="Data sources.")
@click.option(
    "--shard-cycle",
    type=opt.POSITIVE,
    metavar="STEPS",
    help="Steps in which the data goes once through its shards.",
)
@click.option("--steps", type=opt.POSITIVE, help="Steps of the whole run.")
@click.option(
    "--micro-batches", type=opt.POSITIVE, default=1, show_default=True, help="Micro-batches of a step."
)
@click.option(
    "--design-effect",
    type=opt.Number(1),
    default=1.0,
    show_default=True,
    metavar="PHI",
    help="How much more counts vary than with independent tokens.",
)
@opt.policy_option
@opt.output_options("text", "json")
def plan(no_color: bool, _formats: Any, _outputs: Any, policy: str | None, **sizes: Any) -> int:
    """Choose windows and records before a run.

    Says what size of effect they can detect, and how large the store gets.
    """
    from moe_audit import plan as planning

    places = io.destinations()
    made = planning.plan(policy=policy, **sizes)
    for format, path in places:
        io.write(planning.render(made, format), path)
    return 0


def main(argv: list[str] | None = None) -> None:
    """The console command."""
    io.run_command(cli, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
