"""Reading a run: one snapshot, clear messages, and never a number that was not written."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from moe_audit import read_only
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.run import open_run
from moe_audit.scan import scan
from moe_audit.spill import spill_paths
from moe_audit.store import Store
from moe_audit.thresholds.errors import AuditError, StoreError, UsageError


@pytest.fixture
def run_file(tmp_path, make_record):
    """A finished run of 30 records, 2 layers, 2 sources, 4 experts."""
    path = tmp_path / "run" / "routing.db"
    store = Store.create(path, [LayerInfo(i, f"l{i}", 4, 2) for i in range(2)], ["a", "b"])
    store.begin_attempt(1)
    store.extend([make_record(step) for step in range(1, 31)])
    store.insert_event(3, "alert", {"kind": "test"})
    store.close()
    return path


def read_everything(path):
    """All that a verdict may depend on."""
    with open_run(path) as run:
        arrays = [run.counts(k.layer) for k in run.layers]
        arrays += [f(k.layer) for k in run.layers for f in (run.prob_sum, run.tokens, run.top1, run.present)]
        names = ("peak", "sq_over_t", "dropped", "logit_mean", "logit_std")
        arrays += [run.stat(k.layer, name) for k in run.layers for name in names]
        steps = [(r.first_step, r.last_step, r.tokens, r.phase) for r in run.records]
        return arrays, steps, len(run.events)


def change(path, sql, *values):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(sql, values)


def test_the_folder_and_the_file_open_the_same(run_file):
    for path in (run_file, run_file.parent, str(run_file)):
        with open_run(path) as run:
            assert run.path == run_file and len(run.records) == 30 and run.phases == ["train"]


@pytest.mark.parametrize("name", ["a b", "ü%20x", "q?uery#1", "semi;colon'quote"])
def test_odd_names_open(run_file, tmp_path, name):
    path = tmp_path / name
    shutil.copy(run_file, path)
    assert len(read_everything(path)[1]) == 30


def test_what_is_no_store_is_said_in_one_line(tmp_path, run_file, unprivileged):
    empty, text, foreign = tmp_path / "empty.db", tmp_path / "text.db", tmp_path / "foreign.db"
    empty.touch()
    text.write_text("step,layer,source,expert,count\n" * 100)
    change(foreign, "CREATE TABLE load (record, layer, counts)")
    newer = tmp_path / "newer.db"
    shutil.copy(run_file, newer)
    change(newer, "PRAGMA user_version = 99")
    stripped = tmp_path / "stripped.db"
    shutil.copy(run_file, stripped)
    change(stripped, "DROP VIEW live_record")
    for path, kind, code, words in [
        (tmp_path / "none", UsageError, 2, "does not exist"),
        (tmp_path, UsageError, 2, "does not exist"),
        (empty, StoreError, 4, "is empty"),
        (text, StoreError, 4, "no SQLite database"),
        (foreign, StoreError, 4, "not a routing store"),
        (newer, StoreError, 4, "schema version 99"),
        (stripped, StoreError, 4, "live_record"),
    ]:
        with pytest.raises(kind, match=words) as caught:
            open_run(path)
        assert caught.value.exit_code == code and "\n" not in str(caught.value)
    with unprivileged(), pytest.raises(StoreError, match="cannot be read"):
        open_run(run_file)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE load SET counts = substr(counts, 1, 16) WHERE record = 7",  # a row short
        "UPDATE load SET counts = substr(counts, 1, 30) WHERE record = 7",
        "UPDATE load SET counts = x'' WHERE record = 7",
        "UPDATE load SET counts = CAST(counts || x'00000000' AS BLOB) WHERE record = 7",
        "UPDATE load SET counts = zeroblob(32) WHERE record = 7",  # the right size, other numbers
        "UPDATE load SET counts = (SELECT counts FROM load WHERE record = 8 AND layer = 0) WHERE record = 7",
        "UPDATE load SET counts = substr(counts, 1, 16), crc = NULL WHERE record = 7",
        "UPDATE load SET tokens = zeroblob(16) WHERE record = 7",
        "UPDATE layer_stat SET peak = zeroblob(16) WHERE record = 7",
        "UPDATE layer SET num_experts = 8 WHERE layer = 0",
        "UPDATE layer SET num_experts = 1099511627776 WHERE layer = 0",
        "UPDATE layer SET tags = 'x' WHERE layer = 0",
        "UPDATE record SET last_step = last_step + 1000 WHERE record = 7",
        "UPDATE record SET phase = 'train', tokens = tokens + 1 WHERE record = 7",
        "UPDATE event SET detail = '['",
    ],
)
def test_values_that_were_not_written_are_damage(run_file, sql):
    change(run_file, sql)
    with pytest.raises(StoreError) as caught:
        read_everything(run_file)
    assert str(run_file) in str(caught.value) and "\n" not in str(caught.value)


def test_blobs_where_integers_belong_are_refused(run_file):
    """STRICT tables keep them out; a table that someone has rebuilt without it does not."""
    with closing(sqlite3.connect(run_file)) as db:
        with pytest.raises(sqlite3.IntegrityError):
            db.execute("UPDATE record SET tokens = ?", (np.int64(5),))
        db.executescript(
            "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET sql = replace(sql, ') STRICT', ')');"
            "PRAGMA writable_schema = 0"
        )
    change(run_file, "UPDATE record SET tokens = ? WHERE record = 3", np.int64(5))
    with pytest.raises(StoreError, match="record 3"):
        open_run(run_file)


def test_no_damage_passes_for_other_numbers(run_file, tmp_path, soak):
    """Bytes flipped, zeroed and cut off all over the file: an error in one line, or what was written."""
    good = run_file.read_bytes()
    arrays, steps, events = read_everything(run_file)
    rng = np.random.default_rng(5)
    path = tmp_path / "damaged.db"
    found = 0
    for trial in range(100 * soak):
        data = bytearray(good)
        at = int(rng.integers(0, len(data)))
        if trial % 5 == 4:
            data = data[:at]
        elif trial % 5 == 3:
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        else:
            data[at] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        try:
            got_arrays, got_steps, got_events = read_everything(path)
        except AuditError as error:
            found += 1
            assert "\n" not in str(error)
            continue
        assert got_steps == steps and got_events == events, f"trial {trial}, byte {at}"
        for got, wanted in zip(got_arrays, arrays, strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=f"trial {trial}, byte {at}")
    assert found > 50


def scanned(path):
    """Sums of all that one sweep over the file finds."""
    with open_run(path) as run:
        rows = np.arange(len(run.records))
        return [
            (table, name, None if array is None else float(array.sum()))
            for table in ("load", "layer_stat")
            for slab in scan(run, table, run.layers, rows)
            for name, array in slab.arrays.items()
        ]


def test_a_page_that_lost_rows_is_not_a_shorter_run(tmp_path, make_record):
    """The number of cells in a page's header, lowered: SQLite itself sees nothing."""
    path, damaged = tmp_path / "routing.db", tmp_path / "damaged.db"
    store = Store.create(path, [LayerInfo(i, f"l{i}", 64, 2) for i in range(4)], ["a", "b"])
    store.begin_attempt(1)
    store.extend([make_record(step, layers=4, experts=64) for step in range(1, 61)])
    store.close()
    good = path.read_bytes()
    page_size = int.from_bytes(good[16:18], "big") or 65536
    wanted, seen = scanned(path), 0
    for page in range(0, len(good), page_size):
        header = page or 100  # the first page begins with the file's own header
        if good[header] not in (2, 5, 10, 13):  # no b-tree page
            continue
        cells = int.from_bytes(good[header + 3 : header + 5], "big")
        for fewer in {0, cells // 2, max(cells - 1, 0)} - {cells}:
            data = bytearray(good)
            data[header + 3 : header + 5] = fewer.to_bytes(2, "big")
            damaged.write_bytes(data)
            try:
                assert scanned(damaged) == wanted
                read_everything(damaged)
            except StoreError:
                seen += 1
    assert seen > 20


def test_a_page_that_was_overwritten_is_told(run_file, tmp_path):
    """Any page, also those that hold no counts."""
    good, damaged = run_file.read_bytes(), tmp_path / "damaged.db"
    page_size = int.from_bytes(good[16:18], "big") or 65536
    for at in range(0, len(good), page_size):
        for rubbish in (bytes(page_size), np.random.default_rng(at).bytes(page_size)):
            damaged.write_bytes(good[:at] + rubbish + good[at + page_size :])
            with pytest.raises(StoreError):
                read_everything(damaged)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("num_experts = 2 * num_experts", "has {double} experts"),
        ("num_experts = num_experts / 2", "has {half} experts"),
        ("top_k = num_experts + 1", "top-k {more}"),
    ],
)
@pytest.mark.parametrize("counts_only", [False, True])
def test_a_layer_table_that_was_changed_is_told(make_run, change, named, counts_only):
    """Twice the experts in half the sources fit the same bytes."""
    path = make_run(np.full((3, 2, 2, 8), 40), 2, tokens=not counts_only)
    db = sqlite3.connect(path)
    db.execute(f"UPDATE layer SET {change} WHERE layer = 1")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match="layer 1") as caught:
        open_run(path)
    assert named.format(double=16, half=4, more=9) in str(caught.value)


def test_a_live_run_is_read_as_one_snapshot(run_file, make_record):
    store = Store.open(run_file)
    store.begin_attempt(31)
    store.append(make_record(31))
    with open_run(run_file) as run:
        before = run.counts(0)
        store.append(make_record(32))
        store.begin_attempt(5)  # supersedes most of what the snapshot holds
        np.testing.assert_array_equal(run.counts(0), before)
        assert len(run.records) == 31 == len(run.counts(1))
    with open_run(run_file) as run:
        assert len(run.records) == 4
    store.close()


def left_by_a_kill(run_file, make_record, folder):
    """A copy of a run whose last records are in the log alone."""
    store = Store.open(run_file)
    store.begin_attempt(31)
    store.append(make_record(31))
    for side in ("", "-wal"):
        shutil.copy(f"{run_file}{side}", folder / f"routing.db{side}")
    store.close()


@pytest.mark.parametrize("killed", [False, True])
def test_read_only_media(run_file, make_record, public_path, unprivileged, killed):
    """Nothing can be written beside the file; the records in a log count too, and nothing is left behind."""
    if killed:
        left_by_a_kill(run_file, make_record, public_path)
    else:
        shutil.copy(run_file, public_path)
    names = sorted(p.name for p in public_path.iterdir())
    for file in public_path.iterdir():
        file.chmod(0o444)
    public_path.chmod(0o555)
    with unprivileged():
        assert len(read_everything(public_path)[1]) == 30 + killed
    assert sorted(p.name for p in public_path.iterdir()) == names


def test_a_kill_in_a_transaction_of_the_journal_is_rolled_back(run_file, public_path, unprivileged):
    """Without write-ahead logging a kill leaves a journal that has to be played back before reading."""
    db = sqlite3.connect(run_file, isolation_level=None)
    db.execute("PRAGMA cache_size = 1")
    db.execute("PRAGMA cache_spill = 1")
    db.execute("BEGIN")
    db.execute("UPDATE load SET counts = zeroblob(32), prob_sum = zeroblob(200000)")
    for side in ("", "-journal"):
        shutil.copy(f"{run_file}{side}", public_path / f"routing.db{side}")
    db.execute("ROLLBACK")
    db.close()
    public_path.chmod(0o555)
    with unprivileged():
        assert len(read_everything(public_path)[1]) == 30


def test_records_that_wait_beside_the_store_are_told(run_file):
    spill_paths(run_file)[0].write_text("00000000 {}\n")
    with open_run(run_file) as run:
        assert run.spilled == 0  # a torn line
    assert run_file.with_name("routing.db.spill").exists()


def test_a_store_without_records_opens(tmp_path):
    Store.create(tmp_path / "routing.db", [LayerInfo(0, "l", 4, 2)]).close()
    with open_run(tmp_path) as run:
        assert run.records == [] and run.phases == [] and run.gaps == []
        assert run.counts(0).shape == (0, 1, 4) and run.prob_sum(0) is None
        with pytest.raises(UsageError, match="no layer 7"):
            run.counts(7)


def test_phases_are_apart(tmp_path):
    store = Store.create(tmp_path / "routing.db", [LayerInfo(0, "l", 2, 1)])
    store.begin_attempt(1)
    for phase, counts in (("train", [[1, 2]]), ("eval", [[30, 40]])):
        store.append(Record(phase, 1, 1, {0: LayerRecord(np.array(counts))}))
    store.close()
    with open_run(tmp_path) as run, open_run(tmp_path, "eval") as evaluation:
        assert run.counts(0).tolist() == [[[1, 2]]] and evaluation.counts(0).tolist() == [[[30, 40]]]
        assert sorted(run.phases) == ["eval", "train"]


def test_a_locked_store_is_not_called_damaged(run_file, monkeypatch):
    """Without write-ahead logging a writer shuts readers out while it commits."""
    monkeypatch.setattr(read_only, "BUSY_TIMEOUT", 0.1)
    with closing(sqlite3.connect(run_file, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="locked") as caught:
            open_run(run_file)
        db.execute("ROLLBACK")
    assert "damaged" not in str(caught.value)
    assert len(read_everything(run_file)[1]) == 30
