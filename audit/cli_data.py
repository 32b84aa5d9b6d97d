"""The commands that move counts in and out of stores: `moe-audit import | export | info`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_audit import cli_io as io
from moe_audit import cli_options as opt
from moe_audit.printable import printable

if TYPE_CHECKING:
    from moe_audit.run import Run

ROW_FORMATS = ("parquet", "csv", "sqlite")
VERDICT_FORMATS = ("tensorboard", "datasette")
IMPORT_FORMATS = ("csv", "parquet", "sglang", "megatron", "hf", "ranks", "spill")


@click.command(
    "import",
    epilog="\b\nExample: moe-audit import counts.csv --format csv --num-experts 64 --top-k 8 -o routing.db",
)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option(
    "--format",
    "format",
    type=opt.OneOf(IMPORT_FORMATS),
    help="What the files hold; by their ending where it says so.",
)
@click.option("--num-experts", metavar="N", help="Experts of a layer: 64, or by layer: 0:8,1-3:64.")
@click.option("--top-k", metavar="K", help="Picks per token: 8, or by layer: 0:2,1-3:8.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The store to make; for spill the store that the records belong to.",
)
def import_command(
    files: tuple[Path, ...], format: str | None, num_experts: str | None, top_k: str | None, output: Path
) -> int:
    """Make a store from counts that something else recorded.

    CSV and Parquet have the columns step, layer, source, expert, count; layer is the 0-based index of the MoE
    layer's block in model order. Experts that were never hit leave no row, so --num-experts has to say how
    many there are.
    """
    from moe_audit.importers import TENSOR_FORMATS, import_files, parse_per_layer
    from moe_audit.thresholds.errors import UsageError

    if format is None:
        format = {".csv": "csv", ".parquet": "parquet", ".spill": "spill"}.get(files[0].suffix.lower())
        if format is None:
            raise UsageError(
                f"{files[0]} does not tell its format", f"add --format: {', '.join(IMPORT_FORMATS)}"
            )
    if format != "spill" and output.exists():
        raise UsageError(f"{output} exists already", "choose another --output, or remove it first")
    experts = None if num_experts is None else parse_per_layer(num_experts, "--num-experts")
    picks = None if top_k is None else parse_per_layer(top_k, "--top-k")
    if format in TENSOR_FORMATS:
        try:
            from moe_audit.hooks.importers import import_tensors
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise UsageError(f"format {format} needs torch", "pip install 'moe-audit[train]'") from None
        report = import_tensors(files, format, num_experts=experts, top_k=picks, output=output)
    else:
        report = import_files(files, format, num_experts=experts, top_k=picks, output=output)
    click.echo(
        f"{report.output}: {report.records} records, {report.layers} layers,"
        f" sources {', '.join(printable(name) for name in report.sources)}"
    )
    for note in report.notes:
        click.echo(f"note: {printable(note)}")
    return 0


@click.command(
    "export",
    epilog="\b\nExamples: moe-audit export runs/a --format parquet -o counts.parquet\n"
    "          moe-audit export runs/a --format tensorboard -o runs/a/tensorboard\n"
    "          moe-audit export runs/a --format datasette -o runs/a && datasette runs/a",
)
@opt.run_argument
@click.option(
    "--format", "format", type=opt.OneOf((*ROW_FORMATS, *VERDICT_FORMATS)), help="By the ending of FILE."
)
@opt.policy_option
@click.option("--phase", default="train", show_default=True, help="Which phase of the records to read.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The file to make; a folder for tensorboard and datasette.",
)
def export_command(run: Path, format: str | None, policy: str | None, phase: str, output: Path) -> int:
    """Write RUN in the form of another program.

    parquet, csv, sqlite: the counts as rows: step, first_step, phase, layer, source, expert, count.
    tensorboard: events with the worst and mean value of each gate. datasette: the verdict and saved queries.
    """
    from moe_audit.thresholds.errors import UsageError

    endings = {".parquet": "parquet", ".csv": "csv", ".db": "sqlite", ".sqlite": "sqlite"}
    chosen = format or endings.get(output.suffix.lower())
    if chosen is None:
        known = ", ".join((*ROW_FORMATS, *VERDICT_FORMATS))
        raise UsageError(f"{output} does not tell its format", f"add --format: {known}")
    with opt.open_run(run, phase) as opened:
        if chosen in VERDICT_FORMATS:
            _export_verdict(opened, chosen, policy, output)
        else:
            from moe_audit.exporters import export

            click.echo(f"{output}: {export(opened, chosen, output):,} rows")
    return 0


def _export_verdict(run: Run, format: str, policy: str | None, output: Path) -> None:
    from moe_audit.checking import check
    from moe_audit.reports.datasette import write_datasette
    from moe_audit.reports.tensorboard import write_events

    verdict = check(run, policy, all_cells=True)
    if format == "tensorboard":
        click.echo(write_events(run, verdict, output))
    else:
        for path in write_datasette(run, verdict, output):
            click.echo(path)


@click.command("info", cls=io.Command, epilog="\b\nExample: moe-audit info runs/a --format json")
@opt.run_argument
@opt.output_options("text", "json")
def info_command(run: Path, **_: Any) -> int:
    """Say what RUN holds: steps, layers, sources, gaps."""
    from moe_audit.info import info, info_text

    places = io.destinations()
    content = info(run)
    for format, path in places:
        text = json.dumps(content, indent=1) if format == "json" else info_text(content)
        io.write(text.rstrip("\n") + "\n", path)
    return 0


COMMANDS = (import_command, export_command, info_command)
