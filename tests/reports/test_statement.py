"""The routing statement: derived from the store, and any change to either is named."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from markdown_it import MarkdownIt

from moe_audit import check, open_run
from moe_audit.reports.statement import CARD_NAME, JSON_NAME, dump, statement, verify
from moe_audit.store import Store
from moe_audit.thresholds.errors import UsageError

Make = Callable[..., Any]
SCHEMA = Path(__file__).parents[2] / "reports/schemas/statement.schema.json"


@pytest.fixture
def release(tmp_path: Path, recorded: Make) -> Path:
    recorded(tmp_path / "run", layers=2, records=120, capacity_factor=1.5)
    with open_run(tmp_path / "run") as run:
        statement(run, 900, "default", tmp_path / "statement")
    return tmp_path


def again(release: Path) -> list[str]:
    with open_run(release / "run") as run:
        return verify(release / "statement", run)


def edit(release: Path, change: Callable[[Any], None]) -> None:
    path = release / "statement" / JSON_NAME
    content = json.loads(path.read_text())
    change(content)
    path.write_text(dump(content))


def test_it_has_the_published_shape_and_says_what_check_says(release: Path) -> None:
    content = json.loads((release / "statement" / JSON_NAME).read_text())
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(content)
    with open_run(release / "run") as run:
        verdict = check(run, "default", checkpoint=900)
        assert content["verdict"]["status"] == verdict.status.name
        assert content["verdict"]["exit_code"] == verdict.exit_code == 0
        last = content["windows"]["judged"][-1]
        rows = [
            i
            for i, r in enumerate(run.records)
            if last["first_step"] <= r.first_step <= r.last_step <= last["last_step"]
        ]
        picks = run.counts(1)[rows].sum(0)
    assert last["last_step"] == 900
    assert content["layers"][1]["last_window_picks"] == picks.tolist()
    load = picks.sum(0) * 8 / picks.sum()
    assert content["layers"][1]["max_load"][-1] == pytest.approx(load.max(), rel=1e-5)


def test_an_unchanged_statement_verifies_also_by_its_own_path(release: Path) -> None:
    assert again(release) == []
    assert verify(release / "statement") == []


def test_it_verifies_on_a_copy_elsewhere_and_after_training_went_on(release: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(release / "run", tmp_path / "copy")
    store = Store.open(tmp_path / "copy" / "routing.db")
    store.begin_attempt(1201)  # a resume after the checkpoint
    store.close()
    with open_run(tmp_path / "copy") as run:
        assert verify(release / "statement", run) == []


def test_a_changed_value_is_named_by_its_field(release: Path) -> None:
    def change(content: Any) -> None:
        content["layers"][1]["max_load"][2] = 1.01

    edit(release, change)
    found = again(release)
    assert found[0].startswith("layers[1].max_load[2]: the statement says 1.01, the store gives 1.")


def test_a_weaker_policy_is_named(release: Path) -> None:
    def change(content: Any) -> None:
        content["policy"]["resolved"]["gates"]["max_load"]["fail"] = 99.0

    edit(release, change)
    assert any(f.startswith("policy.sha256: ") for f in again(release))


def test_every_changed_byte_is_found(release: Path) -> None:
    """One bit of one byte at a time, in both files: every one is named by field or line."""
    chance = random.Random(0)
    for name in (JSON_NAME, CARD_NAME):
        path = release / "statement" / name
        original = path.read_bytes()
        for _ in range(25):
            at = chance.randrange(len(original))
            damaged = bytearray(original)
            damaged[at] ^= 1 << chance.randrange(7)
            path.write_bytes(damaged)
            found = again(release)
            assert found, f"byte {at} of {name}: {original[at : at + 1]!r} -> {bytes(damaged[at : at + 1])!r}"
            assert re.match(r"[\w.\[\]]+|policy, run", found[0])
        path.write_bytes(original)
    assert again(release) == []


@pytest.mark.parametrize("record", [1, 45, 90])
def test_a_removed_record_is_named(release: Path, record: int) -> None:
    with sqlite3.connect(release / "run" / "routing.db") as db:
        for table in ("load", "layer_stat", "record"):
            db.execute(f"DELETE FROM {table} WHERE record = ?", (record,))
    db.close()
    found = again(release)
    assert any(f.startswith("coverage.records: the statement says 90, the store gives 89") for f in found)
    assert any(f.startswith("coverage.spans") for f in found)
    assert any(f.startswith("hashes.store") for f in found)


def test_a_changed_count_is_named(release: Path) -> None:
    """The checksum is taken away as well, as somebody would who means it."""
    with sqlite3.connect(release / "run" / "routing.db") as db:
        [[blob]] = db.execute("SELECT counts FROM load WHERE record = 80 AND layer = 1")
        counts = np.frombuffer(blob, "<u4").copy()
        counts[0] += 1
        counts[1] -= 1
        change = "UPDATE load SET counts = ?, crc = NULL WHERE record = 80 AND layer = 1"
        db.execute(change, (counts.tobytes(),))
    db.close()
    found = again(release)
    assert any(f.startswith("layers[1].last_window_picks[0][0]") for f in found)
    assert any(f.startswith("hashes.store") for f in found)


def test_a_damaged_store_is_said_not_raised(release: Path) -> None:
    with sqlite3.connect(release / "run" / "routing.db") as db:
        db.execute("UPDATE load SET counts = x'00' WHERE record = 80 AND layer = 1")
    db.close()
    [found] = again(release)
    assert found.startswith("store: ")


def test_no_statement_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=JSON_NAME):
        verify(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema_version": 1}', '{"schema_version": 2}', "[" * 100_000, "\x00"]
)
def test_what_is_no_statement_does_not_verify(release: Path, text: str) -> None:
    (release / "statement" / JSON_NAME).write_text(text)
    assert len(again(release)) == 1


def test_a_run_that_fails_is_stated_as_failing(tmp_path: Path, recorded: Make) -> None:
    with open_run(recorded(tmp_path / "run", records=120, sick=True)) as run:
        content = statement(run, None, "default", tmp_path / "out")
        assert content["verdict"]["exit_code"] == 1
        assert verify(tmp_path / "out", run) == []
    assert "**FAIL** for the whole run" in (tmp_path / "out" / CARD_NAME).read_text()


def test_the_card_says_where_the_model_will_overflow(tmp_path: Path, recorded: Make) -> None:
    with open_run(recorded(tmp_path / "run", records=120, capacity_factor=1.2, sick=True)) as run:
        statement(run, 600, "default", tmp_path / "out")
    card = (tmp_path / "out" / CARD_NAME).read_text()
    assert re.search(r"An expert of layer \d (overflows once|is over its capacity)", card)
    for heading in ("Load and stability", "Gates", "Sources", "Healthy under these conditions", "Provenance"):
        assert f"### {heading}" in card


def test_hostile_names_are_literal_text_in_the_card(tmp_path: Path, recorded: Make, nasty: str) -> None:
    nasty = nasty.replace("\ud800", "")  # which no store can hold
    recorded(tmp_path / "run", names=[nasty, "b"], sources=[nasty, "prose"], records=60)
    with open_run(tmp_path / "run") as run:
        statement(run, None, "default", tmp_path / "out")
        assert verify(tmp_path / "out", run) == []
    card = (tmp_path / "out" / CARD_NAME).read_text(encoding="utf-8")
    tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(card)
    inline = [child.type for token in tokens for child in (token.children or [])]
    allowed = {"text", "strong_open", "strong_close", "code_inline", "text_special", "softbreak"}
    assert set(inline) <= allowed
    assert not any(token.type == "html_block" for token in tokens)
    assert len(card) < 20_000
