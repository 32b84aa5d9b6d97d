"""Writing the store: exact, whole, small, readable by anything that reads SQLite."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import sqlite_utils
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_audit import store as store_module
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.run import Gap, open_run
from moe_audit.store import UNLABELLED, Store
from moe_audit.thresholds.errors import UsageError

LAYERS = [LayerInfo(0, "layers.0", 4, 2), LayerInfo(3, "layers.3", 6, 1)]


def counts_record(step, counts, first=None, phase="train"):
    return Record(phase, first or step, step, {0: LayerRecord(np.asarray(counts))})


def one_layer(path, experts=2, sources=("a",)):
    return Store.create(path, [LayerInfo(0, "layers.0", experts, 1)], sources)


def test_a_record_comes_back_as_it_was_written(tmp_path, make_record):
    store = Store.create(
        tmp_path / "a/routing.db", [LayerInfo(i, f"l{i}", 4, 2) for i in range(2)], ["a", "b"], {"answer": 42}
    )
    store.begin_attempt(1, world_size=3)
    records = [make_record(step) for step in (1, 2, 3)]
    for record in records:
        store.append(record)
    store.close()
    with open_run(tmp_path / "a") as run:
        assert run.meta["answer"] == 42
        assert run.attempts[0].world_size == 3
        assert [(r.first_step, r.tokens, r.lr, r.loss) for r in run.records] == [
            (r.first_step, r.tokens, r.lr, r.loss) for r in records
        ]
        for layer in range(2):
            parts = [record.layers[layer] for record in records]
            for got, name in [
                (run.counts(layer), "counts_SE"), (run.prob_sum(layer), "prob_sum_SE"),
                (run.tokens(layer), "tokens_S"), (run.top1(layer), "top1_S2"),
                (run.stat(layer, "peak"), "peak_E"), (run.stat(layer, "sq_over_t"), "sq_over_t_E"),
                (run.stat(layer, "dropped"), "dropped_E"), (run.stat(layer, "logit_mean"), "logit_mean_E"),
                (run.stat(layer, "logit_std"), "logit_std_E"),
            ]:  # fmt: skip
                np.testing.assert_array_equal(got, np.stack([getattr(part, name) for part in parts]))
            assert run.present(layer).all() and run.calls(layer).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint16, np.uint32])
def test_integers_of_every_type_are_integers_in_sql(tmp_path, dtype):
    """SQLite takes numpy integers for BLOBs without a word (cpython issue 106878)."""
    store = one_layer(tmp_path / "routing.db")
    store.begin_attempt(np.int64(1))
    store.append(
        Record(
            "train", dtype(5), dtype(5),
            {np.int64(0): LayerRecord(np.array([[5, 7]], dtype), invalid=dtype(3))},
            tokens=dtype(15), microbatches=np.int32(1), lr=np.float32(0.5), loss=np.float64(2.5),
        )
    )  # fmt: skip
    store.close()
    db = sqlite3.connect(tmp_path / "routing.db")
    types = "typeof(first_step), typeof(tokens), typeof(microbatches), typeof(lr), typeof(loss)"
    assert db.execute(f"SELECT {types} FROM record").fetchone() == ("integer",) * 3 + ("real",) * 2
    assert db.execute("SELECT typeof(invalid), invalid FROM load").fetchone() == ("integer", 3)
    assert db.execute("SELECT typeof(count), sum(count) FROM expert_load").fetchall() == [("integer", 12)]
    db.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_the_view_decodes_every_count_exactly(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("view") / "routing.db"
    store = one_layer(path, 3, ("a", "b"))
    store.begin_attempt(1)
    store.append(counts_record(1, np.reshape(values, (2, 3))))
    store.close()
    db = sqlite3.connect(path)
    rows = db.execute("SELECT source, expert, count FROM expert_load ORDER BY source, expert").fetchall()
    db.close()
    assert rows == [(s, e, values[3 * i + e]) for i, s in enumerate("ab") for e in range(3)]


@pytest.mark.parametrize(
    "counts", [[[2**32, 0]], [[-1, 0]], [[0.5, 1]], [[1.0, 2.0]], [[1, 2, 3]], [1, 2], [[[1, 2]]]]
)
def test_counts_that_cannot_be_right_are_refused_and_nothing_is_written(tmp_path, counts):
    store = one_layer(tmp_path / "routing.db")
    store.begin_attempt(1)
    with pytest.raises(UsageError):
        store.append(counts_record(1, counts))
    assert store.connection.execute("SELECT count(*) FROM record").fetchone() == (0,)
    store.close()


def test_other_tools_read_the_view(tmp_path):
    path = tmp_path / "routing.db"
    store = Store.create(path, LAYERS, ["code", "prose"])
    store.begin_attempt(1)
    counts = {0: np.arange(8).reshape(2, 4), 3: np.arange(12).reshape(2, 6)}
    store.append(Record("train", 1, 10, {k: LayerRecord(v) for k, v in counts.items()}))
    store.close()
    total = sum(int(c.sum()) for c in counts.values())
    db = sqlite3.connect(path)
    frame = pd.read_sql("SELECT * FROM expert_load", db)
    db.close()
    assert list(frame) == ["record", "first_step", "last_step", "phase", "layer", "source", "expert", "count"]
    assert frame["count"].sum() == total and len(frame) == 20
    utils = sqlite_utils.Database(path)
    assert sum(row["count"] for row in utils["expert_load"].rows) == total
    utils.close()
    if shutil.which("sqlite3"):
        sql = "SELECT sum(count) FROM expert_load WHERE layer = 3 AND source = 'prose'"
        out = subprocess.run(["sqlite3", path, sql], capture_output=True, text=True, check=True)
        assert int(out.stdout) == counts[3][1].sum()


def test_a_resume_from_an_older_checkpoint_replaces_steps(tmp_path):
    """Case C67: 1-150 with [10, 0] after 100, then 101-200 again with [5, 5]."""
    path = tmp_path / "routing.db"
    store = one_layer(path)
    store.begin_attempt(1)
    store.extend([counts_record(step, [[5, 5]] if step <= 100 else [[10, 0]]) for step in range(1, 151)])
    store.begin_attempt(101)
    store.extend([counts_record(step, [[5, 5]]) for step in range(101, 201)])
    store.close()
    with open_run(path) as run:
        assert len(run.records) == 200 and run.superseded == 50 and run.gaps == []
        assert run.counts(0).sum((0, 1)).tolist() == [1000, 1000]
    db = sqlite3.connect(path)
    by_expert = "SELECT sum(count) FROM {} GROUP BY expert ORDER BY expert"
    assert db.execute(by_expert.format("expert_load")).fetchall() == [(1000,), (1000,)]
    assert db.execute(by_expert.format("expert_load_all")).fetchall() == [(1500,), (1000,)]
    db.close()
    with pytest.raises(UsageError, match="exists already"):
        one_layer(path)


@pytest.mark.parametrize("name", ["", "."])
def test_a_folder_is_no_store(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is a folder.*routing\.db"):
        one_layer(name)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([1, 105], [Gap(101, 104)]),  # inside the record 101-110, which goes as a whole
        ([1, 101], []),  # at its edge
        ([1, 141], [Gap(121, 140)]),  # steps 121 to 140 were lost in a crash
        ([1, 105, 91], []),  # a later attempt covers the gap again
        ([1, 5], [Gap(1, 4)]),  # inside the first record
    ],
)
def test_gaps_that_a_resume_leaves_are_reported(tmp_path, starts, expected):
    store = one_layer(tmp_path / "routing.db")
    for start in starts:
        store.begin_attempt(start)
        end = 120 if start == 1 else start + 19
        store.extend([counts_record(min(s + 9, end), [[1, 1]], first=s) for s in range(start, end, 10)])
    store.close()
    with open_run(tmp_path) as run:
        assert run.gaps == expected


def test_a_source_that_comes_later_is_zero_before(tmp_path):
    store = one_layer(tmp_path / "routing.db")
    store.begin_attempt(1)
    store.append(counts_record(1, [[1, 2]]))
    store.add_source(UNLABELLED)
    store.append(counts_record(2, [[3, 4], [5, 6]]))
    store.close()
    with open_run(tmp_path) as run:
        assert run.sources == ["a", UNLABELLED]
        assert run.counts(0).tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


@pytest.mark.parametrize(
    ("layers", "sources", "message"),
    [
        ([], ["a"], "no layer"),
        (LAYERS, ["a", "a"], "named twice"),
        (LAYERS, ["all"], "'all'"),
        (LAYERS, [""], "''"),
        (LAYERS, [], "empty"),
        ([LAYERS[0], LayerInfo(0, "x", 4)], ["a"], "layer 0"),
        ([LAYERS[0], LayerInfo(1, "layers.0", 4)], ["a"], "layers.0"),
    ],
)
def test_what_a_store_cannot_be_made_of(tmp_path, layers, sources, message):
    with pytest.raises(UsageError, match=message):
        Store.create(tmp_path / "routing.db", layers, sources)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(public_path, tmp_path, unprivileged):
    with unprivileged():
        for path in (public_path / "routing.db", tmp_path / "routing.db"):
            with pytest.raises(UsageError, match=f"{path} cannot be made"):
                one_layer(path)


def test_without_shared_memory_the_journal_is_used_and_named(tmp_path, monkeypatch):
    """A file system that refuses write-ahead logging, as SQLite's dotfile locking does."""
    path = tmp_path / "routing.db"

    def connect(file: Path, timeout: float = 5.0) -> sqlite3.Connection:
        uri = f"{file.as_uri()}?vfs=unix-dotfile"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)

    monkeypatch.setattr(store_module, "connect", connect)
    store = one_layer(path)
    store.begin_attempt(1)
    store.append(counts_record(1, [[1, 2]]))
    assert store.journal_mode == "delete"
    store.close()
    with open_run(path) as run:
        assert run.meta["journal_mode"] == "delete"
        assert run.counts(0).tolist() == [[[1, 2]]]


def test_the_file_is_small(tmp_path):
    """At most 1.15 times the raw bytes: 8 a source and expert, 24 an expert."""
    path, L, S, E, R = tmp_path / "routing.db", 16, 8, 64, 200
    store = Store.create(path, [LayerInfo(i, f"l{i}", E, 8) for i in range(L)], [f"s{i}" for i in range(S)])
    store.begin_attempt(1)
    part = LayerRecord(
        np.ones((S, E), np.int64), np.ones(S, np.int64), np.ones((S, E)), np.ones((S, 2)), 0,
        np.ones(E), np.ones(E), np.ones(E, np.int64), np.ones(E), np.ones(E), 1,
    )  # fmt: skip
    store.extend([Record("train", r, r, dict.fromkeys(range(L), part)) for r in range(1, R + 1)])
    store.close()
    assert [p.name for p in tmp_path.iterdir()] == ["routing.db"]  # no log is left beside it
    assert path.stat().st_size <= 1.15 * R * L * (8 * S * E + 24 * E)
