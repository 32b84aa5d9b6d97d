"""The `moe-train` command: each command is a thin face of one function."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from moe_audit.thresholds.errors import AuditError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moe-audit")
def cli() -> None:
    """Train small mixture-of-experts language models whose routing is recorded and judged."""


@cli.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--save-folder", required=True, type=click.Path(path_type=Path), help="Run folder.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is in the folder already.")
def run(config: Path, overrides: tuple[str, ...], save_folder: Path, overwrite: bool) -> None:
    """Train from CONFIG, a TOML file; OVERRIDES change settings, as in optim.lr=3e-4."""
    from moe_trainer.config import load_config
    from moe_trainer.moe.memory import keep_freed_memory
    from moe_trainer.runs import run as run_training

    keep_freed_memory()
    run_training(load_config(config, overrides), save_folder, overwrite=overwrite)


@cli.command()
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--checkpoint", type=int, metavar="STEP", help="Continue from this one; the last by default.")
@click.option(
    "--reset-routers",
    is_flag=True,
    help="Draw new router weights; their score biases and the optimizer's moments of them start at zero.",
)
def resume(run_folder: Path, overrides: tuple[str, ...], checkpoint: int | None, reset_routers: bool) -> None:
    """Continue the run in RUN_FOLDER from its last checkpoint whose routing did not fail."""
    from moe_trainer.moe.memory import keep_freed_memory
    from moe_trainer.runs import resume as resume_training

    keep_freed_memory()
    resume_training(run_folder, overrides, step=checkpoint, reset_routers=reset_routers)


@cli.command()
@click.argument("what", type=click.Choice(["demo"]))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder.")
def prepare(what: str, output: Path) -> None:
    """Write training text: one folder of text files per source.

    demo: Python code, English prose, C++ headers and docstrings that are on this machine already.
    """
    from moe_trainer.demo_data import write_demo

    for source, size in write_demo(output).items():
        click.echo(f"{output / source}  {size:,} bytes")


@cli.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def plan(config: Path, overrides: tuple[str, ...]) -> None:
    """Print the parameters of each part of the model of CONFIG: all, and active for one token."""
    from moe_trainer.config import load_config

    parts = load_config(config, overrides).model.num_params_per_part()
    rows = {name: counts for name, counts in parts.items() if counts[0]}
    rows["total"] = (sum(t for t, _ in parts.values()), sum(a for _, a in parts.values()))
    click.echo(f"{'part':<14}{'parameters':>18}{'active':>18}")
    for name, (total, active) in rows.items():
        click.echo(f"{name:<14}{total:>18,}{active:>18,}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: an error that is the user's to mend is one line on stderr and an exit code."""
    try:
        cli.main(args=arguments, prog_name="moe-train", standalone_mode=False)
    except AuditError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)
