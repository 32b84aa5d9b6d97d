"""The `moe-train` command, as a process: exit codes, one clear line, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOE_TRAIN = str(Path(sys.executable).with_name("moe-train"))


def moe_train(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MOE_TRAIN, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=120
    )


def test_help_and_plan_do_not_import_torch(tiny: Path) -> None:
    code = (
        "import sys; from moe_trainer.cli import main\nmain(sys.argv[1:])\nsys.exit('torch' in sys.modules)"
    )
    for arguments in (["--help"], ["run", "--help"], ["plan", str(tiny)]):
        result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_plan_prints_total_and_active_parameters_per_part(tiny: Path) -> None:
    result = moe_train("plan", tiny, "model.moe.num_experts=8")
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert rows["moe.experts"] == ["12,288", "3,072"]  # 2 layers x 8 (2 active) x 3 x 16 x 16
    assert rows["moe.router"] == ["256", "256"]
    parts = [row for name, row in rows.items() if name not in ("part", "total")]
    for column in (0, 1):
        total = sum(int(row[column].replace(",", "")) for row in parts)
        assert rows["total"][column] == f"{total:,}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "TINY", "--save-folder", "r", "optim.lrr=1"], "did you mean 'optim.lr'?"),
        (["run", "TINY", "--save-folder", "r", "train.steps=x"], "train.steps = 'x'"),
        (["run", "TINY", "--save-folder", "r", "data.sources.code=absent"], "no such folder"),
        (["run", "absent.toml", "--save-folder", "r"], "no such configuration file: absent.toml"),
        (["run", "TINY", "--save-folder", "TINY"], "is a file"),
        (["run", "TINY", "--save-folder", "r", "train.device=cuda"], "no CUDA device"),
        (["run", "TINY"], "--save-folder"),
        (["resume", "absent"], "absent is not a run folder"),
        (["plan", "TINY", "model.moe.num_experts=1"], "top_k = 2"),
        (["prepare", "other", "-o", "x"], "demo"),
        (["prepare", "demo", "-o", "."], "exists and is not empty"),
        (["trian"], "trian"),
    ],
)
def test_a_user_error_is_exit_code_2_and_no_traceback(
    tiny: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    result = moe_train(*(str(tiny) if a == "TINY" else a for a in arguments), cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
