"""The command line: help, outputs, exit codes, one clear line for every error, and what is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import jsonschema
import numpy as np
import pytest

import moe_audit
from moe_audit.cli import cli, main
from moe_audit.run import open_run
from moe_audit.thresholds.errors import NoDataError

UNIFORM = np.full((2, 8), 5000)  # [sources, experts]
HOT = np.tile([19000] + [3000] * 7, (2, 1))
EXECUTABLE = str(Path(sys.executable).with_name("moe-audit"))


def paths(command: click.Command, name: str = "") -> list[str]:
    """Every command of the tree, as it is typed."""
    if isinstance(command, click.Group):
        return [p for key, sub in command.commands.items() for p in paths(sub, f"{name} {key}".strip())]
    return [name]


@pytest.fixture
def audit(capsys: pytest.CaptureFixture[str]) -> Any:
    """audit(*args) -> (exit code, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in args])
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def store(make_run: Any, counts_SE: np.ndarray, records: int = 12, **options: Any) -> Path:
    counts = np.tile(counts_SE, (records, 2, 1, 1))
    path: Path = make_run(counts, 2, steps=10, sources=["code", "prose"], **options)
    return path


@pytest.fixture
def healthy(make_run: Any) -> Path:
    return store(make_run, UNIFORM + np.random.default_rng(0).integers(-60, 60, (2, 8)))


@pytest.fixture
def sick(make_run: Any) -> Path:
    return store(make_run, HOT + np.random.default_rng(0).integers(-60, 60, (2, 8)))


def one_line(err: str) -> bool:
    return err.count("\n") == 1 and "Traceback" not in err and err.startswith("moe-audit")


# -- help


@pytest.mark.parametrize("command", paths(cli))
def test_help_of_every_command(audit: Any, command: str) -> None:
    code, out, err = audit(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert "Usage: moe-audit" in out
    assert "Options:" in out


def test_version_and_no_command(audit: Any) -> None:
    code, out, _ = audit("--version")
    assert (code, out.split()[0]) == (0, "moe-audit,")
    assert audit()[0] == 2


# -- verdicts and exit codes


def test_exit_codes_of_check(audit: Any, healthy: Path, sick: Path) -> None:
    assert audit("check", healthy, "--length", 20)[0] == 0
    code, out, err = audit("check", sick, "--length", 20)
    assert (code, err) == (1, "")
    assert out.startswith("FAIL") and "max_load" in out
    assert audit("check", sick, "--length", 20, "--fail-on", "never")[0] == 0
    code, out, _ = audit("check", sick.parent, "--length", 20, "--quiet")
    assert (code, out.count("\n")) == (1, 1)


def test_warnings_fail_only_where_asked(audit: Any, make_run: Any) -> None:
    path = store(make_run, np.tile([9000] + [5000] * 7, (2, 1)))  # max_load 1.64: beyond 1.5
    assert audit("check", path, "--length", 20)[0] == 0
    assert audit("check", path, "--length", 20, "--fail-on", "warn")[0] == 1


def test_too_little_is_3_and_cannot_be_silenced(audit: Any, healthy: Path) -> None:
    code, out, err = audit("check", healthy, "--length", 120, "--fail-on", "never")
    assert code == 3
    assert out.startswith("INSUFFICIENT")
    code, out, err = audit("check", healthy, "--length", 120, "--format", "json", "--fail-on", "never")
    content = json.loads(out)
    assert (code, content["exit_code"], content["status"]) == (3, 3, "INSUFFICIENT")
    assert content["error"]["message"] and one_line(err)


@pytest.mark.parametrize(
    ("content", "expected"), [(None, 2), (b"", 4), (b"some text, no database\n" * 50, 4), ("sqlite", 4)]
)
def test_what_is_no_run(audit: Any, tmp_path: Path, content: Any, expected: int) -> None:
    path = tmp_path / "routing.db"
    if content == "sqlite":
        import sqlite3

        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE t (x)")
        connection.close()
    elif content is not None:
        path.write_bytes(content)
    for command in ("check", "metrics", "explain", "info", "report"):
        code, out, err = audit(command, path)
        assert (code, out) == (expected, "")
        assert one_line(err) and "routing.db" in err
    code, out, _ = audit("check", path, "--format", "json")
    error = json.loads(out)
    assert (code, error["exit_code"]) == (expected, expected)
    assert error["error"]["message"]
    assert set(error) >= {"run", "policy", "windows", "totals", "gates", "cells", "skipped", "problems"}


# -- bad input


BAD = [
    ("chek", "did you mean 'check'"),
    ("check", "RUN"),
    ("check RUN --lenght 3", "--length"),
    ("check RUN --length 0", "'0'"),
    ("check RUN --length 1000000000000000000000000000000", "exceeds"),
    ("check RUN --checkpoint 99999999999999999999", "exceeds"),
    ("check RUN --length nan", "'nan'"),
    ("check RUN --length -5", "'-5'"),
    ("check RUN --length 1.5", "'1.5'"),
    ("check RUN --stride 0", "--stride"),
    ("check RUN --length 20 --stride 40", "stride 40 exceeds"),
    ("check RUN --last 0", "--last"),
    ("check RUN --from 50 --to 20", "--from 50 lies after --to 20"),
    ("check RUN --from -1", "--from"),
    ("check RUN --layer 7", "layers: 0, 1"),
    ("check RUN --layer layers.0.mo", "did you mean 'layers.0.moe'"),
    ("check RUN --source cod", "did you mean 'code'"),
    ("check RUN --policy clasic", "did you mean 'classic'"),
    ("check RUN --format jsn", "did you mean 'json'"),
    ("check RUN --fail-on nevr", "did you mean 'never'"),
    ("metrics RUN --format text --format csv", "two formats"),
    ("check RUN --format json --output /dev/null/x.json", "/dev/null/x.json"),
    ("check /nowhere/run", "/nowhere/run"),
    ("metrics RUN --metric cvv", "did you mean 'cv'"),
    ("metrics RUN --format xml", "xml"),
    ("explain RUN --layer 9", "layers: 0, 1"),
    ("explain /nowhere", "/nowhere"),
    ("report RUN --length nan", "'nan'"),
    ("compare RUN", "B"),
    ("compare RUN /nowhere", "/nowhere"),
    ("compare RUN RUN --range-a 9-3", "'9-3'"),
    ("compare RUN RUN --range-a all", "'all'"),
    ("calibrate -o x.toml", "REFERENCE"),
    ("calibrate RUN -o /dev/null/x.toml", "/dev/null"),
    ("calibrate RUN -o TMP/x.toml --alpha nan", "'nan'"),
    ("calibrate RUN -o TMP/x.toml --alpha 0", "'0'"),
    ("calibrate RUN -o TMP/x.toml --alpha 0.9", "0.5"),
    ("calibrate RUN -o TMP/x.toml --extends clasic", "did you mean 'classic'"),
    ("policy chek", "did you mean 'check'"),
    ("policy show clasic", "did you mean 'classic'"),
    ("policy show --experts 8", "--top-k"),
    ("policy show --experts 4 --top-k 8", "exceeds"),
    ("policy init --extends clasic", "did you mean 'classic'"),
    ("policy check --experts 0 --top-k 1", "'0'"),
    ("policy check --experts 8", "--top-k"),
    ("policy check --experts 4 --top-k 8", "exceeds"),
    ("policy check --experts 8 --top-k 2 --capacity-factor nan", "'nan'"),
    ("policy check --experts 8 --top-k 2 --capacity-factor -1", "'-1'"),
    ("policy schema extra", "extra"),
    ("plan --experts 8 --top-k 2", "--tokens-per-step"),
    ("plan --experts 8 --top-k 9 --tokens-per-step 100", "exceeds"),
    ("plan --experts 8 --top-k 2 --tokens-per-step inf", "'inf'"),
    ("plan --experts 8 --top-k 2 --tokens-per-step 9 --design-effect nan", "'nan'"),
    ("plan --experts 8 --top-k 2 --tokens-per-step 9 --shard-cycle 50 --steps 10", "shard cycle"),
    ("statement", "RUN"),
    ("statement /nowhere -o TMP/s", "/nowhere"),
    ("statement --verify /nowhere", "/nowhere"),
    ("import -o TMP/x.db", "FILE"),
    ("import /nowhere.csv --num-experts 4 -o TMP/x.db", "/nowhere.csv"),
    ("import RUN --format csvv -o TMP/x.db", "did you mean 'csv'"),
    ("import RUN -o TMP/x.db", "--format"),
    ("import TMP/x.csv --num-experts 4 -o RUN", "choose another --output"),
    ("export RUN -o /dev/null/x.csv", "/dev/null/x.csv"),
    ("export RUN -o TMP/x.foo", "--format"),
    ("export RUN --format parqet -o TMP/x", "did you mean 'parquet'"),
    ("watch", "RUN"),
    ("watch RUN --interval nan", "'nan'"),
    ("watch RUN --policy clasic", "did you mean 'classic'"),
    ("info", "RUN"),
    ("info RUN --format yaml", "yaml"),
]


@pytest.mark.parametrize(("line", "named"), BAD)
def test_bad_input_is_one_clear_line(
    audit: Any, healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    args = [a.replace("RUN", str(healthy)).replace("TMP", str(tmp_path)) for a in line.split()]
    code, out, err = audit(*args)
    assert code == 2, err
    assert out == ""
    assert one_line(err), err
    assert named in err


def test_no_records_in_the_steps_asked_for(audit: Any, healthy: Path) -> None:
    for args in (("check", healthy, "--from", 5000), ("compare", healthy, healthy, "--range-b", "5000-6000")):
        code, _, err = audit(*args)
        assert code == 3
        assert one_line(err)


@pytest.mark.parametrize("command", ["check", "metrics", "explain", "report", "export -o TMP/x.csv"])
@pytest.mark.parametrize(
    ("phase", "named"), [("eval", "phases recorded: train"), ("trian", "did you mean 'train'")]
)
def test_a_phase_without_records_is_no_data(
    audit: Any, healthy: Path, tmp_path: Path, command: str, phase: str, named: str
) -> None:
    """The command line and Python tell the same."""
    name, *options = command.replace("TMP", str(tmp_path)).split()
    code, _, err = audit(name, healthy, "--phase", phase, *options)
    assert code == 3 and one_line(err) and named in err
    with moe_audit.open_run(healthy, phase=phase) as run, pytest.raises(NoDataError) as caught:
        moe_audit.check(run)
    assert str(caught.value.message) in err


@pytest.mark.parametrize(
    "line",
    [
        "check RUN -f json -o {}",
        "export RUN -o {}",
        "report RUN -o {}",
        "calibrate RUN -o {}",
        "policy init -o {}",
    ],
)
def test_folders_on_the_way_to_an_output_are_made(
    audit: Any, healthy: Path, tmp_path: Path, line: str
) -> None:
    file = tmp_path / "new" / "folder" / "out.csv"
    code, _, err = audit(*[a.replace("RUN", str(healthy)).format(file) for a in line.split()])
    assert code in (0, 1), err
    assert file.is_file()


def test_the_text_says_where_a_policy_was_found(
    audit: Any, healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "preset" not in audit("check", healthy)[1]
    file = tmp_path / "moe-audit.toml"
    file.write_text('name = "ours"\nextends = "default"\n')
    for args in ((), ("--policy", str(file))):
        out = audit("check", healthy, *args)[1]
        assert "under policy ours" in out and f"policy ours: {file}" in out.replace("\n", "")


def test_usage_errors_reach_those_who_wait_for_json(audit: Any, healthy: Path, tmp_path: Path) -> None:
    code, out, err = audit("check", healthy, "--format", "json", "--length", 0)
    assert (code, json.loads(out)["exit_code"]) == (2, 2)
    assert "'0'" in json.loads(out)["error"]["message"] and one_line(err)
    file = tmp_path / "v.json"
    code, out, _ = audit("check", "/nowhere", "--format", "json", "--output", file)
    assert (code, out, json.loads(file.read_text())["status"]) == (2, "", "ERROR")


@pytest.mark.parametrize("format", ["json", "junit", "sarif", "markdown", "github"])
def test_no_form_of_an_error_looks_like_a_pass(audit: Any, tmp_path: Path, format: str) -> None:
    file = tmp_path / "out"
    code, out, err = audit("check", "/nowhere/run", "--format", format, "--output", file, "--format", "text")
    assert (code, out) == (2, "")
    assert one_line(err)
    assert "nowhere" in file.read_text()
    assert "PASS" not in file.read_text().replace('"PASS": 0', "")


def test_names_cannot_reach_the_terminal_as_codes(audit: Any) -> None:
    _, _, err = audit("check", "/nowhere/\x1b[31mred")
    assert "\x1b" not in err


def test_a_fault_of_ours_is_one_line_and_5(
    audit: Any, healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("three\nlines\nlong")

    monkeypatch.setattr("moe_audit.checking.check", broken)
    code, out, err = audit("check", healthy, "--format", "json")
    assert (code, json.loads(out)["exit_code"]) == (5, 5)
    assert one_line(err) and "--debug" in err
    code, _, err = audit("check", healthy, "--debug")
    assert code == 5
    assert "Traceback" in err


# -- where output goes


def test_formats_and_their_files(audit: Any, sick: Path, tmp_path: Path) -> None:
    files = [tmp_path / "v.json", tmp_path / "v.md"]
    code, out, _ = audit(
        "check", sick, "--length", 20, "--format", "text", "--format", "json", "--output", files[0],
        "--format", "markdown", "--output", files[1],
    )  # fmt: skip
    assert code == 1
    assert out.startswith("FAIL")
    assert json.loads(files[0].read_text())["status"] == "FAIL"
    assert "FAIL" in files[1].read_text()
    audit("check", sick, "--length", 20, "--output", files[0], "--format", "markdown")  # in either order
    assert "| " in files[0].read_text()
    _, out, _ = audit("check", sick, "--length", 20, "-fjson")
    assert json.loads(out)["status"] == "FAIL"
    audit("check", sick, "--length", 20, "-o", tmp_path / "by_ending.json")
    assert json.loads((tmp_path / "by_ending.json").read_text())["exit_code"] == 1


def test_json_keeps_its_published_shape(audit: Any, sick: Path) -> None:
    schema = json.loads(
        (Path(__file__).parents[2] / "reports" / "schemas" / "verdict.schema.json").read_text()
    )
    _, out, _ = audit("check", sick, "--length", 20, "--format", "json")
    some = json.loads(out)
    _, out, _ = audit("check", sick, "--length", 20, "--format", "json", "--all-cells")
    every = json.loads(out)
    for content in (some, every):
        jsonschema.validate(content, schema)
    assert all(cell["status"] != "PASS" for cell in some["cells"])
    assert len(every["cells"]) == sum(every["totals"].values()) > len(some["cells"])


def test_metrics_rows(audit: Any, healthy: Path) -> None:
    code, out, _ = audit(
        "metrics", healthy, "--length", 40, "--stride", 40, "--format", "json", "--layer", "1"
    )
    content = json.loads(out)
    assert code == 0
    assert set(content) == {"schema_version", "windows", "rows"}
    rows = content["rows"]
    assert [(r["first_step"], r["layer"], r["source"]) for r in rows[:3]] == [
        (1, 1, "all"), (1, 1, "code"), (1, 1, "prose"),
    ]  # fmt: skip
    with open_run(healthy) as run:
        n = run.counts(1)[:4].sum((0, 1))
    assert rows[0]["max_load"] == pytest.approx(8 * n.max() / n.sum(), rel=1e-12)
    assert rows[0]["tv"] is None  # no earlier window
    _, out, _ = audit("metrics", healthy, "--length", 40, "--format", "csv", "--metric", "cv")
    assert out.splitlines()[0] == "first_step,last_step,layer,source,cv"
    _, out, _ = audit("metrics", healthy, "--length", 40)
    assert "max_load" in out


def test_scope_options_reach_the_engine(audit: Any, sick: Path) -> None:
    scope = ("--layer", "1", "--source", "code", "--from", 21, "--to", 100)
    _, out, _ = audit("check", sick, "--length", 20, *scope, "--format", "json")
    run = json.loads(out)["run"]
    assert (run["layers"], run["sources"], run["first_step"], run["last_step"]) == ([1], ["code"], 21, 100)
    _, out, _ = audit("check", sick, "--length", 20, "--last", 3, "--format", "json")
    assert json.loads(out)["windows"]["count"] == 3
    _, out, _ = audit("check", sick, "--length", 10, "--stride", 10, "--checkpoint", 80, "--format", "json")
    content = json.loads(out)
    assert content["windows"]["count"] == 5
    assert content["run"]["last_step"] == 80
    _, out, _ = audit("check", sick, "--length", 20, "--layer", "0-1", "--format", "json")
    assert json.loads(out)["run"]["layers"] == [0, 1]
    _, named, _ = audit("check", sick, "--length", 20, "--source", "all", "--format", "json")
    _, every, _ = audit("check", sick, "--length", 20, "--format", "json")
    assert named == every


def test_policy_of_the_folder_is_used_and_named(
    audit: Any, healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert audit("policy", "init", "--extends", "specialised")[0] == 0
    assert audit("policy", "init")[0] == 2  # never over a file that is there
    code, out, _ = audit("policy", "show")
    assert code == 0
    assert "moe-audit.toml" in out and "max_monopoly" in out
    _, out, _ = audit("check", healthy, "--length", 20, "--format", "json")
    assert json.loads(out)["policy"]["name"] == "moe-audit"
    assert audit("policy", "check", "moe-audit.toml")[0] == 0
    (tmp_path / "bad.toml").write_text("[gates.cv]\nwran = 1\n")
    code, _, err = audit("policy", "check", "moe-audit.toml", "bad.toml")
    assert code == 2
    assert "did you mean 'warn'" in err


def test_policy_check_says_why(audit: Any) -> None:
    code, out, _ = audit("policy", "check", "classic", "--experts", 10, "--top-k", 2)
    assert code == 0
    assert "3 of 10 experts take 70 %" in out and "0.853" in out
    code, out, _ = audit("policy", "check", "classic", "--experts", 64, "--top-k", 8, "--format", "json")
    assert code == 1  # min_share 5 % cannot be met
    findings = json.loads(out)["policies"][0]["findings"]
    assert ("always", "min_share") in {(f["kind"], f["gate"]) for f in findings}
    assert json.loads(audit("policy", "schema")[1])["title"] == "moe-audit policy"
    shown = json.loads(audit("policy", "show", "classic", "--format", "json")[1])
    assert shown["lag"] == 1


def test_names_of_an_import_stay_on_their_line(audit: Any, tmp_path: Path) -> None:
    table = tmp_path / "counts.csv"
    table.write_text('step,layer,source,expert,count\n1,0,"a\n\x1b[31mb",0,5\n')
    options = ("--format", "csv", "--num-experts", 2, "--top-k", 1, "-o", tmp_path / "routing.db")
    code, out, _ = audit("import", table, *options)
    assert code == 0 and "a??[31mb" in out and out.count("\n") == len(out.splitlines())


def test_counts_come_in_and_go_out(audit: Any, tmp_path: Path, healthy: Path) -> None:
    table = tmp_path / "counts.csv"
    assert audit("export", healthy, "-o", table)[0] == 0
    code, _, err = audit("import", table, "-o", tmp_path / "again.db")
    assert (code, "--num-experts" in err) == (2, True)
    assert audit("import", table, "--num-experts", 8, "--top-k", 2, "-o", tmp_path / "again.db")[0] == 0
    with open_run(healthy) as a, open_run(tmp_path / "again.db") as b:
        assert np.array_equal(a.counts(1), b.counts(1))
    code, out, _ = audit("info", healthy, "--format", "json")
    assert (code, json.loads(out)["sources"]) == (0, ["code", "prose"])


def test_statement_and_its_verification(audit: Any, healthy: Path, tmp_path: Path) -> None:
    release = tmp_path / "release"
    code, out, _ = audit("statement", healthy, "-o", release, "--policy", "default")
    assert code == 0
    assert "routing_statement.json" in out
    assert audit("statement", "--verify", release)[0] == 0
    file = release / "routing_statement.json"
    file.write_text(file.read_text().replace('"top_k": 2', '"top_k": 3', 1))
    code, out, _ = audit("statement", "--verify", release)
    assert code == 1
    assert "top_k" in out


# -- processes


LOADED = """
import sys
from moe_audit.cli import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"pandas", "plotly", "jinja2", "torch", "sqlite_utils", "pyarrow"}
    print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def test_check_loads_nothing_heavy(healthy: Path) -> None:
    args = [sys.executable, "-c", LOADED, "check", str(healthy), "--length", "20"]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_help_loads_no_numpy() -> None:
    code = (
        "import sys, runpy\nfrom moe_audit.cli import main\n"
        "try:\n    main(['check', '--help'])\nfinally:\n"
        "    print(sorted({'numpy', 'rich', 'pydantic'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_a_reader_that_goes_away_changes_no_exit_code(sick: Path) -> None:
    command = f"{EXECUTABLE} check {sick} --length 10 --format json --all-cells | head -c 10"
    script = f"set -o pipefail; {command}; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1].endswith("1")
    assert done.stderr == ""


def test_completion_of_the_shell() -> None:
    env = {
        "_MOE_AUDIT_COMPLETE": "bash_complete",
        "COMP_WORDS": "moe-audit check --fail-on n",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [EXECUTABLE], capture_output=True, text=True, check=False, env={**env, "PATH": "/usr/bin:/bin"}
    )
    assert "never" in done.stdout
