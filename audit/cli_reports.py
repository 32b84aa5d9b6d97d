"""The commands that show a run: `moe-audit report | statement | watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moe_audit import cli_options as opt


@click.command(epilog="\b\nExample: moe-audit report runs/a -o report.html --tensorboard runs/a/tb")
@opt.run_argument
@opt.policy_option
@opt.scope_options
@opt.checkpoint_option
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The HTML file; report.html beside the store by default.",
)
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Write TensorBoard events there as well.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def report(
    run: Path,
    policy: str | None,
    output: Path | None,
    tensorboard: Path | None,
    quiet: bool,
    **scope: Any,
) -> int:
    """Write an HTML page with pictures of RUN and its verdict."""
    from moe_audit.checking import check
    from moe_audit.explain import explain
    from moe_audit.reports.html import write_html
    from moe_audit.reports.wording import sentence, status_name
    from moe_audit.thresholds.policy import load_policy

    loaded = load_policy(policy)
    with opt.open_run(run, scope["phase"]) as opened:
        verdict = check(opened, loaded, all_cells=tensorboard is not None, **opt.judge_options(opened, scope))
        bad = verdict.totals["FAIL"] + verdict.totals["WARN"]
        why = explain(opened, loaded, **opt.judge_options(opened, scope)) if bad else None
        written = write_html(opened, verdict, output or opened.path.with_name("report.html"), why)
        lines = [f"{status_name(verdict)} {sentence(verdict)}", str(written)]
        if tensorboard is not None:
            from moe_audit.reports.tensorboard import write_events

            lines.append(str(write_events(opened, verdict, tensorboard)))
    if not quiet:
        click.echo("\n".join(lines))
    return 0


@click.command(
    epilog="\b\nExamples: moe-audit statement runs/a --checkpoint 5000 -o release\n"
    "          moe-audit statement --verify release"
)
@click.argument("run", required=False, type=click.Path(path_type=Path), metavar="[RUN]")
@opt.policy_option
@opt.checkpoint_option
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    show_default="the current folder",
    metavar="FOLDER",
    help="Where routing_statement.json and routing_statement.md go.",
)
@click.option(
    "--verify",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Derive the statement in FOLDER again, from RUN or the run that it names, and say what differs.",
)
def statement(
    run: Path | None, policy: str | None, checkpoint: int | None, output: Path, verify: Path | None
) -> int:
    """Write what a release says about its routers.

    routing_statement.json, and routing_statement.md as a section for the model card.

    Exit code as for `check`; with --verify 1 where something differs.
    """
    from moe_audit.reports import statement as stating
    from moe_audit.thresholds.errors import UsageError

    if verify is not None:
        if run is None:
            differences = stating.verify(verify)
        else:
            with opt.open_run(run) as opened:
                differences = stating.verify(verify, opened)
        for line in differences or [f"{verify}: the statement is what the store says"]:
            click.echo(line)
        return 1 if differences else 0
    if run is None:
        raise UsageError("statement needs a RUN", "or --verify FOLDER")
    with opt.open_run(run) as opened:
        content = stating.statement(opened, checkpoint, policy, output)
    for name in (stating.JSON_NAME, stating.CARD_NAME):
        click.echo(output / name)
    click.echo(f"{content['verdict']['status']}: {content['verdict']['sentence']}")
    return int(content["verdict"]["exit_code"])


@click.command(epilog="\b\nExample: moe-audit watch runs/a --notify mailto://user:password@example.org")
@opt.run_argument
@opt.policy_option
@click.option(
    "--interval",
    type=opt.Number(0, open_low=True),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--notify", multiple=True, metavar="URL", help="Send alerts there (apprise); repeatable.")
def watch(run: Path, policy: str | None, interval: float, notify: tuple[str, ...]) -> int:
    """Follow RUN while it trains: the verdict on its last windows, and an alert for each that fails.

    Ends with the run, or with Ctrl-C; the exit code is that of the last verdict.
    """
    from rich.console import Console

    from moe_audit.reports.notify import Notifier
    from moe_audit.reports.watch import watch as follow
    from moe_audit.thresholds.policy import load_policy

    notifier = Notifier(notify) if notify else None
    code = follow(run, load_policy(policy), Console(), interval=interval, notify=notifier)
    if notifier is not None:
        notifier.close()
    return code


COMMANDS = (report, statement, watch)
