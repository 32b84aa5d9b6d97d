"""Options that commands share, and the check of the names in them against a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.gate_names import MAX_WHOLE, nearest

if TYPE_CHECKING:
    from moe_audit.run import Run
    from moe_audit.verdict import Verdict

F = TypeVar("F", bound=Callable[..., Any])


def options(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several option decorators as one, in reading order."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


class Whole(click.ParamType[int]):
    """A whole number from `low` to MAX_WHOLE."""

    name = "number"

    def __init__(self, low: int) -> None:
        self.low = low

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = self.low - 1
        if number < self.low:
            self.fail(f"{value!r} is no whole number of at least {self.low}", param, ctx)
        if number > MAX_WHOLE:
            self.fail(f"{value!r} exceeds {MAX_WHOLE}", param, ctx)
        return number


POSITIVE = Whole(1)
STEP = Whole(0)


class OneOf(click.ParamType[str]):
    """A choice whose error names the nearest one."""

    name = "name"

    def __init__(self, values: Sequence[str]) -> None:
        self.values = tuple(values)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "[" + "|".join(self.values) + "]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.values:
            hint = nearest(str(value), self.values)
            self.fail(f"{value!r} is none of {', '.join(self.values)} ({hint})", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(v) for v in self.values if v.startswith(incomplete)]


class Number(click.ParamType[float]):
    """A finite number within limits; click's own FloatRange lets NaN and infinity through."""

    name = "number"

    def __init__(self, low: float, high: float = float("inf"), *, open_low: bool = False) -> None:
        self.low, self.high, self.open_low = low, high, open_low

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is no number", param, ctx)
        inside = (number > self.low if self.open_low else number >= self.low) and number <= self.high
        if not inside or number in (float("inf"), float("-inf")):
            side = "above" if self.open_low else "of at least"
            top = "" if self.high == float("inf") else f" and at most {self.high:g}"
            self.fail(f"{value!r} is no finite number {side} {self.low:g}{top}", param, ctx)
        return number


def _complete_policy(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from moe_audit.thresholds.policy import PRESETS

    names = [*PRESETS, *(str(p) for p in Path().glob("*.toml"))]
    return [name for name in names if name.startswith(incomplete)]


def policy_option(function: F) -> F:
    return click.option(
        "--policy",
        metavar="NAME|FILE",
        shell_complete=_complete_policy,
        help="A preset (classic, default, specialised) or a TOML file. Otherwise moe-audit.toml here,"
        " [tool.moe-audit] in pyproject.toml, or the preset default.",
    )(function)


run_argument = click.argument("run", type=click.Path(path_type=Path), metavar="RUN")

checkpoint_option = click.option(
    "--checkpoint",
    type=STEP,
    metavar="STEP",
    help="Judge the last 5 windows (or --last) that end at or before STEP.",
)

layer_option = click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="LAYER",
    help="Only this layer: number, range 0-3 or name; repeatable.",
)

scope_options = options(
    click.option("--length", type=POSITIVE, metavar="STEPS", help="Window length in steps."),
    click.option("--stride", type=POSITIVE, metavar="STEPS", help="Steps between the ends of two windows."),
    click.option("--last", type=POSITIVE, metavar="N", help="Judge the last N windows only."),
    click.option(
        "--from", "first", type=STEP, metavar="STEP", help="Only records that begin at STEP or after."
    ),
    click.option("--to", "until", type=STEP, metavar="STEP", help="Only records that end by STEP."),
    layer_option,
    click.option(
        "--source",
        "sources",
        multiple=True,
        metavar="NAME",
        help="Only this source; repeatable. Pooled values are over those named.",
    ),
    click.option("--phase", default="train", show_default=True, help="Which phase of the records to read."),
)


def output_options(*formats: str) -> Callable[[F], F]:
    return options(
        click.option(
            "--format",
            "-f",
            "_formats",
            multiple=True,
            type=OneOf(formats),
            help="Output format; repeatable, each with its own --output.",
        ),
        click.option(
            "--output",
            "-o",
            "_outputs",
            multiple=True,
            metavar="FILE",
            help="Where the --format before it goes; '-' is standard output.",
        ),
        click.option("--no-color", is_flag=True, help="No colours, also on a terminal."),
    )


# -- names in a run


def open_run(path: Path, phase: str = "train") -> Run:
    """`moe_audit.open_run`, imported when a command needs it."""
    from moe_audit.run import open_run

    return open_run(path, phase)


def layer_numbers(run: Run, wanted: Sequence[str]) -> list[int] | None:
    """Layers named by number, range or name; None: all.

    Raises:
        UsageError: the run has no such layer.
    """
    known = [info.layer for info in run.layers]
    by_name = {info.name: info.layer for info in run.layers}
    out: set[int] = set()
    for text in wanted:
        if text in by_name:
            out.add(by_name[text])
            continue
        first, _, last = text.partition("-")
        chosen = []
        if first.isdigit() and (not last or last.isdigit()):
            chosen = [n for n in known if int(first) <= n <= int(last or first)]
        if not chosen:
            raise UsageError(
                f"{run.path} has no layer {text!r}",
                nearest(text, by_name) if not text[:1].isdigit() else "layers: " + ", ".join(map(str, known)),
            )
        out.update(chosen)
    return sorted(out) or None


def source_names(run: Run, wanted: Sequence[str]) -> list[str] | None:
    """Sources as named; None: all, which "all" stands for as it does in cells.

    Raises:
        UsageError: the run has no such source.
    """
    if "all" in wanted:
        return None
    for name in wanted:
        if name not in run.sources:
            raise UsageError(f"{run.path} has no source {name!r}", nearest(name, run.sources))
    return list(wanted) or None


def check_range(first: int | None, until: int | None) -> None:
    if first is not None and until is not None and first > until:
        raise UsageError(f"--from {first} lies after --to {until}", "swap them")


def step_range(text: str | None, option: str) -> tuple[int, int] | None:
    """ "100-2000" as a pair of steps.

    Raises:
        UsageError: no such range.
    """
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdigit() or not last.isdigit() or int(first) > int(last):
        raise UsageError(f"{option} {text!r} is no range of steps", "write it as 1000-2000")
    return int(first), int(last)


def judge_options(run: Run, scope: dict[str, Any]) -> dict[str, Any]:
    """The options of `check` from a command line, with the names in them checked against the run."""
    check_range(scope["first"], scope["until"])
    return {
        "length": scope["length"],
        "stride": scope["stride"],
        "checkpoint": scope.get("checkpoint"),
        "last": scope["last"],
        "first_step": scope["first"],
        "last_step": scope["until"],
        "layers": layer_numbers(run, scope["layers"]),
        "sources": source_names(run, scope["sources"]),
    }


def judge(path: Path, policy: str | None, scope: dict[str, Any], **how: Any) -> Verdict:
    """`moe_audit.check` for a command line."""
    from moe_audit.checking import check
    from moe_audit.thresholds.policy import load_policy

    loaded = load_policy(policy)
    with open_run(path, scope["phase"]) as run:
        return check(run, loaded, **judge_options(run, scope), **how)
