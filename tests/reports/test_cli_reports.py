"""The report commands as a person types them, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from junitparser import JUnitXml

Make = Callable[..., Any]
SCHEMA = Path(__file__).parents[2] / "reports/schemas/verdict.schema.json"
COMMAND = str(Path(sys.executable).with_name("moe-audit"))


def audit(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tools: Any) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    tools.record_run(folder / "healthy", records=120)
    tools.record_run(folder / "sick", records=120, sick=True)
    return folder


def test_one_check_writes_every_format(runs: Path, tmp_path: Path) -> None:
    outputs = {"json": "v.json", "junit": "j.xml", "sarif": "s.sarif", "markdown": "c.md", "github": "-"}
    args = [a for format, name in outputs.items() for a in ("--format", format, "--output", name)]
    done = audit("check", runs / "sick", *args, cwd=tmp_path)
    assert done.returncode == 1
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert verdict["status"] == "FAIL"
    assert not [c for c in verdict["cells"] if c["status"] == "PASS"]
    junit = JUnitXml.fromfile(str(tmp_path / "j.xml"))
    windows = {(c["gate"], c["first_step"]) for c in verdict["cells"]}
    assert junit.tests > len(windows) + 1  # those that pass have a case too
    assert done.stdout.count("::error") <= 10


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["healthy"], 0),
        (["sick"], 1),
        (["sick", "--checkpoint", "900"], 1),
        (["nowhere"], 2),
        (["healthy", "--policy", "no such"], 2),
        (["healthy", "--no-such-option"], 2),
        (["healthy", "--length", "1000"], 3),
        (["healthy", "--phase", "eval"], 3),
        (["text"], 4),
    ],
)
def test_json_has_the_published_shape_whatever_happens(runs: Path, args: list[str], code: int) -> None:
    (runs / "text").write_text("this is no store\n" * 100)
    done = audit("check", *args, "--format", "json", cwd=runs)
    assert done.returncode == code, done.stderr
    content = json.loads(done.stdout)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(content)
    assert content["exit_code"] == code
    assert (content["error"] is None) == (code < 2)
    assert bool(done.stderr) == (code >= 2)


def test_report_statement_and_exports(runs: Path, tmp_path: Path) -> None:
    run = runs / "healthy"
    assert audit("report", run, "-o", "r.html", cwd=tmp_path).returncode == 0
    assert "<!doctype html>" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert audit("export", run, "--format", "tensorboard", "-o", "events", cwd=tmp_path).returncode == 0
    assert len(list((tmp_path / "events").iterdir())) == 1
    assert audit("export", run, "--format", "datasette", "-o", "ds", cwd=tmp_path).returncode == 0
    assert {p.name for p in (tmp_path / "ds").iterdir()} == {"verdict.db", "metadata.json", "settings.json"}


def test_a_release_is_blocked_or_passed_by_the_example(runs: Path, tmp_path: Path) -> None:
    """examples/release.sh from run to blocked and to passed release."""
    script = Path(__file__).parents[2] / "examples/release.sh"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"

    def release(run: str, step: int) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(script), str(runs / run), str(step), str(tmp_path / run)]
        return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=120)

    passed, blocked = release("healthy", 1200), release("sick", 1200)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "released" in passed.stdout
    assert (tmp_path / "healthy" / "routing_statement.json").exists()
    assert blocked.returncode == 1
    assert "released" not in blocked.stdout
    statement = tmp_path / "healthy" / "routing_statement.json"
    statement.write_text(statement.read_text().replace('"step', '"stop', 1).replace("1200", "1201", 1))
    again = audit("statement", "--verify", tmp_path / "healthy", cwd=tmp_path)
    assert again.returncode == 1
    assert again.stdout
