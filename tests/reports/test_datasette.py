"""`datasette FOLDER` with the real datasette: verdict, loads and every saved query."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_audit import check, open_run
from moe_audit.reports.datasette import QUERIES, VERDICT_QUERIES, write_datasette
from moe_audit.thresholds.errors import UsageError

Make = Callable[..., Any]


def get(folder: Path, path: str) -> str:
    """A page as the real `datasette FOLDER` serves it."""
    command = [sys.executable, "-m", "datasette", str(folder), "--get", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import numpy as np

    from moe_audit.store import LayerInfo, LayerRecord, Record, Store

    folder = tmp_path_factory.mktemp("datasette")
    store = Store.create(
        folder / "routing.db", [LayerInfo(i, f"l{i}<b>", 4, 1) for i in (0, 1)], ["a", "<i>b"]
    )
    store.begin_attempt(1)
    counts = np.array([[40, 30, 20, 10], [97, 1, 1, 1]])
    for r in range(30):
        rows = {i: LayerRecord(counts * 50, tokens_S=counts.sum(1) * 50, calls=4) for i in (0, 1)}
        store.append(Record("train", 10 * r + 1, 10 * r + 10, rows, microbatches=4, tokens=10_000, loss=1.0))
    store.close()
    with open_run(folder) as run:
        write_datasette(run, check(run))
    return folder


def test_the_first_page_has_the_verdict(folder: Path) -> None:
    page = get(folder, "/")
    assert "FAIL" in page
    assert "routing" in page and "verdict" in page


@pytest.mark.parametrize("name", QUERIES)
def test_saved_queries_on_the_store_run(folder: Path, name: str) -> None:
    out = json.loads(get(folder, f"/routing/{name}.json?_shape=objects&first_step=&last_step="))
    assert out["rows"]


@pytest.mark.parametrize("name", VERDICT_QUERIES)
def test_saved_queries_on_the_verdict_run(folder: Path, name: str) -> None:
    assert json.loads(get(folder, f"/verdict/{name}.json?_shape=objects"))["rows"]


def test_the_loads_are_right(folder: Path) -> None:
    out = json.loads(
        get(folder, "/routing/expert_load_by_layer.json?_shape=objects&first_step=11&last_step=30")
    )
    rows = [r for r in out["rows"] if r["layer"] == 0]
    assert [r["picks"] for r in rows] == [137 * 100, 31 * 100, 21 * 100, 11 * 100]
    assert [r["load"] for r in rows] == [2.74, 0.62, 0.42, 0.22]
    who = json.loads(get(folder, "/routing/who_feeds_whom.json?_shape=objects&first_step=&last_step="))
    assert max(r["load"] for r in who["rows"] if r["source"] == "<i>b") == 3.88


def test_names_are_escaped(folder: Path) -> None:
    page = get(folder, "/verdict/cell")
    assert "l0&lt;b&gt;" in page and "l0<b>" not in page
    page = get(folder, "/routing/who_feeds_whom?first_step=&last_step=")
    assert "<i>b" not in page


def test_it_is_renewed_but_overwrites_nobody_else(folder: Path, tmp_path: Path) -> None:
    with open_run(folder) as run:
        verdict = check(run)
        write_datasette(run, verdict)
        (tmp_path / "metadata.json").write_text('{"title": "mine"}')
        with pytest.raises(UsageError, match=r"metadata\.json"):
            write_datasette(run, verdict, tmp_path)
