"""What `check` prints: ten seconds to read, and a published JSON shape."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from moe_audit import reports
from moe_audit.reports.json import plain
from moe_audit.thresholds.errors import NoDataError, StoreError, UsageError
from moe_audit.verdict import Status, Verdict

Make = Callable[..., Any]
SCHEMAS = Path(__file__).parents[2] / "reports" / "schemas"


def published(verdict: Verdict, **options: Any) -> dict[str, Any]:
    """The JSON, parsed strictly and checked against the published schema."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    out = json.loads(reports.render(verdict, "json", **options), parse_constant=refuse)
    schema = json.loads((SCHEMAS / "verdict.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(out)
    return out


@pytest.mark.parametrize("status", list(Status))
def test_json_has_the_published_shape_for_every_status(verdict: Make, status: Status) -> None:
    out = published(verdict(status))
    assert out["status"] == status.name
    assert list(out) == [
        "schema_version", "status", "exit_code", "run", "policy", "windows", "totals", "gates", "cells",
        "skipped", "waived", "problems", "error",
    ]  # fmt: skip
    assert (out["error"] is None) == (out["exit_code"] < 2)


def test_cells_are_those_that_do_not_pass_unless_all_are_asked_for(verdict: Make, cell: Make) -> None:
    cells = [cell(status=Status.PASS), cell(), cell(status=Status.INSUFFICIENT)]
    assert [c["status"] for c in published(verdict(cells=cells))["cells"]] == ["FAIL", "INSUFFICIENT"]
    assert len(published(verdict(cells=cells), all_cells=True)["cells"]) == 3


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, np.float64("inf")])
@pytest.mark.parametrize("field", ["value", "limit", "floor", "effective_tokens"])
def test_a_number_that_is_not_finite_is_null_with_a_reason(
    verdict: Make, cell: Make, field: str, value: float
) -> None:
    [out] = published(verdict(cells=[cell(**{field: value})]))["cells"]
    assert out[field] is None
    assert out["value_reason"]


def test_the_reason_of_the_engine_is_kept(verdict: Make, cell: Make) -> None:
    [out] = published(verdict(cells=[cell(value=math.inf, value_reason="2 dead experts")]))["cells"]
    assert out["value_reason"] == "2 dead experts"


def test_numpy_and_paths_become_plain_json(verdict: Make, cell: Make) -> None:
    v = verdict(cells=[cell(value=np.float32(0.5), experts=(np.int64(3),), layer=np.int64(1))])
    v.run |= {"path": Path("runs/a"), "layers": np.arange(2), "first_step": np.int64(1)}
    out = published(v)
    assert out["cells"][0]["experts"] == [3]
    assert out["run"]["path"] == "runs/a"
    assert plain({"a": (np.bool_(True), None, math.nan)}) == {"a": [True, None, None]}


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (UsageError("runs/x does not exist", "name a run"), 2, "ERROR"),
        (NoDataError("no records", "train first"), 3, "INSUFFICIENT"),
        (StoreError("damaged", "restore it"), 4, "INVALID"),
        (ZeroDivisionError("division by zero"), 5, "ERROR"),
    ],
)
def test_an_error_is_the_same_object_in_every_format(error: Exception, code: int, status: str) -> None:
    v = reports.error_verdict(error, "runs/x")
    out = published(v)
    assert (out["exit_code"], out["status"]) == (code, status)
    assert out["error"]["message"] and out["error"]["remedy"]
    for name in reports.FORMATS:
        text = reports.render(v, name)
        assert out["error"]["message"] in text
        assert "PASS" not in text.replace('"PASS"', "")


def test_an_unknown_format_is_a_usage_error(verdict: Make) -> None:
    with pytest.raises(UsageError, match="yaml"):
        reports.render(verdict(), "yaml")


def test_text_names_the_worst_cell_on_the_first_lines(verdict: Make) -> None:
    head = " ".join(reports.render(verdict()).splitlines()[:2])
    for word in (
        "FAIL",
        "runs/sick",
        "min_load",
        "0.0123 < 0.25",
        "layer 2",
        "steps 101-150",
        "experts 3, 5",
    ):
        assert word in head


@pytest.mark.parametrize("width", [80, 100, 160])
def test_text_keeps_its_width_and_cuts_no_figure(verdict: Make, cell: Make, width: int) -> None:
    cells = [
        cell(
            gate=gate, first_step=1_234_001, last_step=1_236_000, experts=tuple(range(40)), source="wikipedia"
        )
        for gate in ("max_load", "min_load", "source_entropy", "cv")
    ]
    text = reports.render(verdict(cells=cells), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("1234001-1236000") >= 4
    assert text.count("0.0123 < 0.25") >= 1
    assert "\x1b" not in text


def test_colour_only_where_asked(verdict: Make) -> None:
    assert "\x1b[" in reports.render(verdict(), color=True)
    assert "\x1b" not in reports.render(verdict(), color=False)


def test_quiet_is_one_line(verdict: Make) -> None:
    assert reports.render(verdict(), quiet=True).count("\n") == 1


def test_skipped_waived_and_problems_are_never_silent(verdict: Make) -> None:
    v = verdict(
        Status.PASS,
        waived=[{"gate": "cv", "owner": "ann", "reason": "known", "expires": "2030-01-01"}],
        problems=[{"kind": "gap", "message": "steps 40-50 were lost"}],
    )
    text = reports.render(v)
    for word in ("no capacity factor", "ann", "2030-01-01", "steps 40-50 were lost"):
        assert word in text


def test_hostile_names_leave_one_line_of_plain_text(hostile: Verdict) -> None:
    plain_text = reports.render(hostile)
    allowed = {"\n"}
    assert all(c.isprintable() or c in allowed for c in plain_text)
    assert max(map(len, plain_text.splitlines())) <= 100
    assert len(plain_text.splitlines()) < 60


def test_hostile_names_survive_json_exactly(hostile: Verdict, nasty: str) -> None:
    out = published(hostile)
    assert out["cells"][0]["source"] == nasty
    assert reports.render(hostile, "json").isascii()


def test_plain_check_imports_nothing_heavy() -> None:
    code = (
        "import sys; from moe_audit import reports; e = reports.error_verdict(ValueError('x'));"
        "[reports.render(e, f) for f in ('text', 'json')];"
        "print({'pandas', 'plotly', 'jinja2', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
