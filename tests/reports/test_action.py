"""The GitHub Action's own shell steps and the other CI examples, run as their services run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())

# What stands in for `moe-audit`: it writes every --output that it is given, and leaves with the code told.
STAND_IN = """#!{python}
import json, os, sys
args = sys.argv[1:]
json.dump(args, open(os.environ["SEEN"], "w"))
code, status = int(os.environ["CODE"]), os.environ["STATUS"]
pairs = [(args[i + 1], args[i + 3]) for i, a in enumerate(args) if a == "--format"]
for format, path in pairs if status else []:
    text = json.dumps({{"status": status}}) if format == "json" else format + "\\n"
    sys.stdout.write(text) if path == "-" else open(path, "w").write(text)
sys.exit(code)
"""


def run_action(tmp: Path, inputs: dict[str, str], **env: str) -> tuple[int, dict[str, str], str, str]:
    """(exit code, outputs, step summary, log) of the action: each step as the runner starts `shell: bash`."""
    values = {name: str(spec.get("default", "")) for name, spec in ACTION["inputs"].items()} | inputs
    output, summary = tmp / "output", tmp / "summary"
    output.touch()
    summary.touch()
    files = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary)}
    log = ""
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash", "a step that is no plain shell cannot be tested here"
        assert "${{" not in step["run"], "expressions belong into env: in a script they are an injection"

        def fill(match: re.Match[str]) -> str:
            name = match.group(1).strip()
            return str(ROOT) if name == "github.action_path" else values[name.removeprefix("inputs.")]

        filled = {k: re.sub(r"\$\{\{(.*?)\}\}", fill, v) for k, v in step["env"].items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env=os.environ | filled | files | env,
            cwd=tmp,
            capture_output=True,
            text=True,
            timeout=120,
        )
        log += done.stdout + done.stderr
        if done.returncode:
            break
    outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
    return done.returncode, outputs, summary.read_text(), log


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """The environment in which `moe-audit` is the stand-in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "moe-audit").write_text(STAND_IN.format(python=sys.executable))
    (folder / "moe-audit").chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen.json")}


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        (0, "PASS", 0),
        (0, "WARN", 0),
        (1, "FAIL", 1),
        (3, "INSUFFICIENT", 3),
        (4, "INVALID", 4),
        (2, "ERROR", 2),
        (0, "", 5),  # nothing was written: that is no success, whatever the exit code says
        (127, "", 127),  # nothing was started
    ],
)
def test_the_action_ends_as_the_check_does(
    tmp_path: Path, stand_in: dict[str, str], code: int, status: str, expected: int
) -> None:
    ended, outputs, summary, log = run_action(
        tmp_path, {"run": "runs/a"}, **stand_in, CODE=str(code), STATUS=status
    )
    assert ended == expected
    assert outputs == {"status": status or "ERROR", "exit-code": str(expected)}
    assert ("::error" in log) == (expected >= 2)
    assert summary == ("markdown\n" if status else "")


def test_inputs_reach_the_check_as_single_arguments(tmp_path: Path, stand_in: dict[str, str]) -> None:
    inputs = {
        "run": 'runs/a b; touch "owned" $(touch owned)',
        "policy": "po licy.toml",
        "checkpoint": "500",
        "args": "--fail-on warn",
    }
    run_action(tmp_path, inputs, **stand_in, CODE="0", STATUS="PASS")
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen[:2] == ["check", inputs["run"]]
    assert seen[2:8] == ["--fail-on", "warn", "--policy", "po licy.toml", "--checkpoint", "500"]
    assert not (tmp_path / "owned").exists()


def test_an_earlier_report_is_not_taken_for_this_one(tmp_path: Path, stand_in: dict[str, str]) -> None:
    run_action(tmp_path, {"run": "a"}, **stand_in, CODE="0", STATUS="PASS")
    ended, outputs, _, _ = run_action(tmp_path, {"run": "a"}, **stand_in, CODE="0", STATUS="")
    assert (ended, outputs["status"]) == (5, "ERROR")


def test_the_action_with_the_real_command_on_nothing(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended, outputs, summary, log = run_action(tmp_path, {"run": "runs/none"}, PATH=path)
    assert ended == 2
    assert outputs == {"status": "ERROR", "exit-code": "2"}
    assert "does not exist" in log + summary


def gitlab() -> Any:
    return yaml.safe_load((ROOT / "examples/ci/gitlab-ci.yml").read_text())["routing"]


@pytest.mark.parametrize(("code", "status"), [(0, "PASS"), (1, "FAIL"), (3, "INSUFFICIENT"), (0, "")])
def test_the_gitlab_job_ends_as_the_check_does(
    tmp_path: Path, stand_in: dict[str, str], code: int, status: str
) -> None:
    job = gitlab()
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", "\n".join(job["script"])],
        env=os.environ | job["variables"] | stand_in | {"CODE": str(code), "STATUS": status},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (code or (0 if status else 1))
    assert job["artifacts"]["reports"]["junit"] in job["script"][1] + job["script"][2]
    assert "--checkpoint" not in json.loads((tmp_path / "seen.json").read_text())


def test_the_examples_call_commands_and_options_that_exist() -> None:
    from moe_audit.cli import cli

    known = {option for parameter in cli.commands["check"].params for option in parameter.opts}
    for path in [ROOT / "action.yml", *(ROOT / "examples/ci").iterdir()]:
        for call in re.findall(r"moe-audit check .*?(?:\n\n|\|\| code|\Z)", path.read_text(), re.DOTALL):
            assert set(re.findall(r"(?<!\S)--[a-z-]+", call)) <= known


def test_the_pre_commit_hooks_are_well_formed() -> None:
    config = yaml.safe_load((ROOT / "examples/ci/pre-commit-config.yaml").read_text())
    for hook in config["repos"][0]["hooks"]:
        assert {"id", "name", "language", "entry", "files"} <= set(hook)
        re.compile(hook["files"])
