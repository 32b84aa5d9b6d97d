"""Running a command: where its output goes, and errors in one line with the right exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from moe_audit.printable import printable
from moe_audit.thresholds.errors import AuditError, UsageError
from moe_audit.thresholds.gate_names import nearest

if TYPE_CHECKING:
    from moe_audit.verdict import Verdict

EXTENSIONS = {".json": "json", ".md": "markdown", ".xml": "junit", ".sarif": "sarif", ".txt": "text"}
STDOUT = "-"
VERDICT_FORMS = ("json", "markdown", "junit", "sarif", "github")


class Command(click.Command):
    """A command that remembers the order of --format and --output, which decides what goes where."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["moe_audit.args"] = list(args)
        return super().parse_args(ctx, args)


class Group(click.Group):
    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(
                f"there is no command {args[0]!r} ({nearest(args[0], self.list_commands(ctx))})", ctx
            )
        return super().resolve_command(ctx, args)


Group.group_class = Group


def run_command(group: click.Group, argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and exits: 0 or 1 by the command, 2 to 4 for the user's errors, 5 for ours.

    Never a traceback. An error also stands in the JSON object, and in the other forms of a verdict, that the
    caller waits for: none of them may look like a pass.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    try:
        code = group.main(
            args=[a for a in args if a != "--debug"], prog_name="moe-audit", standalone_mode=False
        )
        _leave(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        _leave(2)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"`{context.command_path} --help` lists the options" if context else ""
        _fail(UsageError(error.format_message().replace("\n", " ").rstrip("."), hint), args)
    except (click.Abort, KeyboardInterrupt):
        click.echo("moe-audit: interrupted", err=True)
        _leave(130)
    except AuditError as error:
        _fail(error, args, debug)
    except BrokenPipeError:
        _leave(0)
    except Exception as error:
        _fail(error, args, debug)


def _fail(error: Exception, args: Sequence[str], debug: bool = False) -> NoReturn:
    from moe_audit.reports import error_verdict

    if debug:
        import traceback

        traceback.print_exception(error)
    verdict = error_verdict(error)
    assert verdict.error is not None
    remedy = verdict.error["remedy"]
    if verdict.exit_code == 5:
        remedy = "an internal error; the same command with --debug shows where"
    text = f"{verdict.error['message']} ({remedy})" if remedy else verdict.error["message"]
    click.echo(f"moe-audit: error: {printable(' '.join(text.split()))}", err=True)
    forms = VERDICT_FORMS if args[:1] == ["check"] else ("json",)
    for pair in _pairs(args):
        if pair[0] in forms:
            with contextlib.suppress(AuditError):  # a file that cannot be written: the text is out already
                deliver(verdict, [pair], quiet_text=True)
    _leave(verdict.exit_code)


def _leave(code: int) -> NoReturn:
    """Exits with `code` even where the reader of our output has gone away."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


# -- where output goes


def _pairs(args: Sequence[str]) -> list[tuple[str, str]]:
    """(format, path) in the order given. Equal numbers pair by position; else an --output belongs to the
    --format before it, and takes its format from its ending where there is none."""
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(args):
        name, equals, value = args[position].partition("=")
        if args[position][:2] in ("-f", "-o") and len(args[position]) > 2:  # -fjson
            name, equals, value = args[position][:2], "glued", args[position][2:]
        if name in ("--format", "--output", "-f", "-o"):
            if not equals:
                position += 1
                value = args[position] if position < len(args) else ""
            found.append(("format" if name in ("--format", "-f") else "output", value))
        position += 1
    formats = [v for kind, v in found if kind == "format"]
    outputs = [v for kind, v in found if kind == "output"]
    if len(formats) == len(outputs):
        return list(zip(formats, outputs))
    pairs: list[tuple[str, str]] = []
    waiting = False
    for kind, value in found:
        if kind == "format":
            pairs.append((value, STDOUT))
            waiting = True
        elif waiting:
            pairs[-1] = (pairs[-1][0], value)
            waiting = False
        else:
            pairs.append((EXTENSIONS.get(Path(value).suffix.lower(), "text"), value))
    return pairs


def destinations() -> list[tuple[str, str]]:
    """(format, path or "-") of this command line; text on standard output where nothing was said.

    Raises:
        UsageError: two formats would mix on standard output.
    """
    pairs = _pairs(click.get_current_context().meta["moe_audit.args"]) or [("text", STDOUT)]
    if sum(path == STDOUT for _, path in pairs) > 1:
        raise UsageError(
            "two formats would mix on standard output",
            "give each --format but one an --output FILE of its own",
        )
    return pairs


def write(text: str, path: str) -> None:
    """Text to a file, or to standard output for "-".

    Raises:
        UsageError: the file cannot be written.
    """
    if path == STDOUT:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def deliver(
    verdict: Verdict,
    pairs: Sequence[tuple[str, str]],
    *,
    all_cells: bool = False,
    quiet: bool = False,
    color: bool = False,
    quiet_text: bool = False,
) -> None:
    """Renders a verdict into each format. `quiet_text`: the text went to standard error already."""
    from moe_audit.reports import render

    for format, path in pairs:
        options: dict[str, Any] = {}
        if format == "json":
            options = {"all_cells": all_cells}
        elif format == "text":
            if quiet_text:
                continue
            terminal = path == STDOUT and sys.stdout.isatty()
            options = {"quiet": quiet, "color": color and terminal}
            if terminal:
                import shutil

                options["width"] = shutil.get_terminal_size().columns
        write(render(verdict, format, **options), path)


def refuse_overwrite(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise UsageError(f"{path} exists already", "choose another name, or --force")
