"""The writer: training never waits and never fails for the disk's sake, and no record is lost."""

from __future__ import annotations

import logging
import multiprocessing
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing

import numpy as np
import pytest

from moe_audit import spill as spill_module
from moe_audit.hooks import store_file, writer
from moe_audit.hooks.writer import Writer
from moe_audit.importers import import_files
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.run import open_run
from moe_audit.spill import absorb, read_spill, spill_paths
from moe_audit.store import Store
from moe_audit.thresholds.errors import StoreError, UsageError

LAYERS = [LayerInfo(i, f"layers.{i}", 4, 2) for i in range(2)]
SOURCES = ["a", "b"]


@pytest.fixture(autouse=True)
def hurried(monkeypatch, tmp_path):
    """The same behaviour in tenths of seconds; the temporary folder is the test's own."""
    monkeypatch.setattr(writer, "FIRST_RETRY", 0.02)
    monkeypatch.setattr(writer, "LAST_RETRY", 0.1)
    monkeypatch.setattr(writer, "SPILL_AFTER", 0.3)
    monkeypatch.setattr(store_file, "BUSY_TIMEOUT", 0.05)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o777)
    monkeypatch.setattr(spill_module.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))


def steps_of(path, phase="train"):
    with open_run(path, phase) as run:
        for layer in run.layers:
            assert run.present(layer.layer).all()
        return [record.last_step for record in run.records]


def check_whole(path, make_record):
    """Every record holds what its step stands for."""
    with open_run(path) as run:
        for layer in run.layers:
            wanted = [make_record(r.last_step).layers[layer.layer].counts_SE for r in run.records]
            np.testing.assert_array_equal(run.counts(layer.layer), np.array(wanted).reshape(-1, 2, 4))


def check_sound(path):
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_everything_submitted_is_written_in_order(tmp_path, make_record):
    path = tmp_path / "run" / "routing.db"
    w = Writer(path, LAYERS, SOURCES, meta={"run_id": "x"}, world_size=2)
    w.submit_event(None, "note", {"n": np.int64(1)})  # of no attempt yet
    w.begin(5)
    for step in range(5, 15):
        w.submit((lambda s: lambda: make_record(s))(step) if step % 2 else make_record(step))
    w.set_meta({"window_length": 500, "nothing": None})
    w.submit_event(14, "alert", {"share": np.float32(0.5)})
    assert w.flush()
    report = w.close()
    assert (report.written, report.spilled, report.lost, report.waiting) == (10, 0, 0, 0)
    assert steps_of(path) == list(range(5, 15))
    check_whole(path, make_record)
    with open_run(path) as run:
        assert run.attempts[0].start_step == 5 and run.attempts[0].world_size == 2
        assert run.meta["window_length"] == 500 and run.meta["run_id"] == "x"
        assert [(e.step, e.kind, e.detail) for e in run.events] == [
            (None, "note", {"n": 1}), (14, "alert", {"share": 0.5})
        ]  # fmt: skip
    assert [p.name for p in path.parent.iterdir()] == ["routing.db"]
    assert w.close() == report
    with pytest.raises(UsageError, match="closed"):
        w.submit(make_record(15))


def test_what_cannot_be_resumed_or_made_is_an_error_at_once(tmp_path, make_record):
    path = tmp_path / "routing.db"
    Writer(path, LAYERS, SOURCES).close()
    with pytest.raises(UsageError, match="exists already"):
        Writer(path, LAYERS, SOURCES)
    with pytest.raises(UsageError, match="layer 1"):
        Writer(path, LAYERS[:1], SOURCES, resume=True)
    with pytest.raises(UsageError, match="layer 0"):
        Writer(path, [LayerInfo(0, "layers.0", 8, 2), LAYERS[1]], SOURCES, resume=True)
    with pytest.raises(UsageError, match="sources a, b, not b, a"):
        Writer(path, LAYERS, ["b", "a"], resume=True)
    path.write_text("something else")
    with pytest.raises(StoreError):
        Writer(path, LAYERS, SOURCES, resume=True)
    w = Writer(tmp_path / "new" / "routing.db", LAYERS, SOURCES, resume=True)  # nothing there: a new run
    w.submit(make_record(1))
    assert w.close().written == 1


def test_a_record_that_cannot_be_made_is_lost_alone(tmp_path, make_record, caplog):
    w = Writer(tmp_path / "routing.db", LAYERS, SOURCES)

    def broken():
        raise RuntimeError("the copy failed")

    for item in (make_record(1), broken, Record("train", 2, 2, {0: LayerRecord(np.array([[-1, 0, 0, 0]]))})):
        w.submit(item)
    w.submit(make_record(3))
    report = w.close()
    assert (report.written, report.lost) == (2, 2) and "the copy failed" in report.error
    assert steps_of(tmp_path) == [1, 3]
    assert "the copy failed" in caplog.text


def test_a_lock_stops_neither_training_nor_the_records(tmp_path, make_record, caplog):
    path = tmp_path / "routing.db"
    w = Writer(path, LAYERS, SOURCES)
    w.submit(make_record(1))
    assert w.flush()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        slowest = 0.0
        for step in range(2, 40):
            start = time.perf_counter()
            w.submit(make_record(step))
            slowest = max(slowest, time.perf_counter() - start)
            time.sleep(0.02)
        assert slowest < 0.1
        assert not w.flush(timeout=0.1)
        assert w.report().spilled > 0  # long enough for the side file
        other.execute("ROLLBACK")
    assert w.flush()
    report = w.close()
    assert (report.written, report.spilled, report.lost) == (39, 0, 0) and "locked" in report.error
    assert steps_of(path) == list(range(1, 40))
    check_whole(path, make_record)
    with open_run(path) as run:
        assert "locked" in run.meta["store_unavailable"] and run.meta["recovered_records"] > 0
        assert [event.kind for event in run.events] == ["store_unavailable"]
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and "cannot be written" in r.message]
    assert len(warned) == 1
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["routing.db"]


@pytest.mark.parametrize("way", ["resume", "import"])
def test_what_close_had_to_spill_comes_back(tmp_path, make_record, way):
    path = tmp_path / "routing.db"
    w = Writer(path, LAYERS, SOURCES)
    w.submit(make_record(1))
    assert w.flush()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for step in (2, 3, 4):
            w.submit(make_record(step))
        w.submit_event(4, "alert", {})
        report = w.close(timeout=0.2)
        other.execute("ROLLBACK")
    assert (report.written, report.spilled, report.lost) == (1, 3, 0)
    assert report.spill_path == spill_paths(path)[0]
    with open_run(path) as run:
        assert run.spilled == 4  # with the event
    copy = shutil.copy(report.spill_path, tmp_path / "copy")
    if way == "resume":
        w = Writer(path, LAYERS, SOURCES, resume=True)
        w.submit(make_record(5))
        assert w.close().written == 1
    else:
        assert import_files([report.spill_path], "spill", output=path).records == 4
        with pytest.raises(UsageError, match="not the spill file"):
            import_files([copy], "spill", output=path)
    assert not report.spill_path.exists()
    wanted = [1, 2, 3, 4] + [5] * (way == "resume")
    assert steps_of(path) == wanted
    check_whole(path, make_record)
    # A kill after the records were taken in and before the file was removed: nothing is counted twice.
    shutil.copy(copy, report.spill_path)
    with closing(Store.open(path)) as store:
        assert absorb(store) == 0
    assert steps_of(path) == wanted


def test_a_resume_while_the_store_is_locked(tmp_path, make_record, monkeypatch):
    """What waits in the spill file goes in before the records of the new attempt."""
    path = tmp_path / "routing.db"
    monkeypatch.setattr(Store.open.__func__, "__kwdefaults__", {"timeout": 0.1})
    w = Writer(path, LAYERS, SOURCES)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for step in range(1, 11):
            w.submit(make_record(step))
        assert w.close(timeout=0.1).spilled == 10
        w = Writer(path, LAYERS, SOURCES, resume=True)
        for step in range(6, 13):
            w.submit(make_record(step))
        assert not w.flush(timeout=0.3)
        other.execute("ROLLBACK")
    assert w.close().lost == 0
    assert steps_of(path) == list(range(1, 13))
    check_whole(path, make_record)
    with open_run(path) as run:
        assert [a.start_step for a in run.attempts] == [1, 6] and run.superseded == 5


def test_a_torn_spill_gives_back_its_whole_records(tmp_path, make_record):
    path = tmp_path / "routing.db"
    w = Writer(path, LAYERS, SOURCES)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for step in range(1, 6):
            w.submit(make_record(step))
        file = w.close(timeout=0.1).spill_path
        other.execute("ROLLBACK")
    data = file.read_bytes()
    lines = data.splitlines(keepends=True)
    assert len(lines) == 5
    for cut in range(0, len(data), 97):
        file.write_bytes(data[:cut])
        assert len(list(read_spill(file))) == sum(len(b"".join(lines[: n + 1])) - 1 <= cut for n in range(5))
    flipped = bytearray(data)
    flipped[len(lines[0]) + 50] ^= 1
    file.write_bytes(flipped)
    assert [item.seq for item in read_spill(file)] == [0, 2, 3, 4]


def test_a_store_that_turns_read_only(public_path, make_record, unprivileged, monkeypatch):
    folder, temporary = public_path / "run", public_path / "tmp"
    public_path.chmod(0o777)
    Writer(public_path / "other.db", LAYERS, SOURCES).close()  # imports all that nobody may not read
    monkeypatch.setattr(spill_module.tempfile, "gettempdir", lambda: str(temporary))
    path = folder / "routing.db"
    with unprivileged():  # all the way: the writer's thread has the rights of the process at every moment
        folder.mkdir()
        temporary.mkdir()
        w = Writer(path, LAYERS, SOURCES)
        path.chmod(0o444)
        folder.chmod(0o555)
        for step in range(1, 10):
            w.submit(make_record(step))
            time.sleep(0.06)
        assert w.report().spilled > 0 and w.report().spill_path.parent == temporary
        with open_run(folder) as run:
            assert run.records == []
        folder.chmod(0o777)
        path.chmod(0o666)
        assert w.flush()
        assert w.close().lost == 0
    assert steps_of(path) == list(range(1, 10))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_path_that_vanishes(tmp_path, make_record, comes_back):
    """Renamed away and back, or removed for good: then all that was recorded is written anew."""
    folder = tmp_path / "run"
    w = Writer(folder / "routing.db", LAYERS, SOURCES)
    for step in range(1, 6):
        w.submit(make_record(step))
    assert w.flush()
    if comes_back:
        folder.rename(tmp_path / "away")
    else:
        shutil.rmtree(folder)
    for step in range(6, 9):
        w.submit(make_record(step))
        time.sleep(0.05)
    if comes_back:
        (tmp_path / "away").rename(folder)
    assert w.flush()
    w.submit(make_record(9))
    report = w.close()
    assert (report.written, report.lost) == (9, 0)
    assert steps_of(folder) == list(range(1, 10))
    check_whole(folder, make_record)
    assert [p.name for p in folder.iterdir()] == ["routing.db"]


def run_script(text, *args, **options):
    script = textwrap.dedent(text)
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)], stdout=subprocess.PIPE, text=True, **options
    )


SCRIPT = """
import sys, time
import numpy as np
from moe_audit.hooks.writer import Writer
from moe_audit.record import LayerInfo, LayerRecord, Record
LAYERS = [LayerInfo(i, f"layers.{i}", 64, 2) for i in range(4)]
def record(step, n=8):
    counts = np.arange(n * 64).reshape(n, 64) + step
    return Record("train", step, step, {i: LayerRecord(counts + i, calls=1) for i in range(4)})
def writer(path, resume=False):
    return Writer(path, LAYERS, [f"s{i}" for i in range(8)], resume=resume)
"""


def test_a_full_disk(tmp_path):
    """The files may not grow for a while, neither the store nor the spill file: records wait in memory."""
    out = run_script(
        SCRIPT
        + """
import resource, signal
from pathlib import Path
from moe_audit.hooks import writer as module
module.SPILL_AFTER, module.LAST_RETRY = 0.2, 0.1
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
w = writer(path)
for step in range(1, 4):
    w.submit(record(step))
assert w.flush()
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
for step in range(4, 30):
    w.submit(record(step))
    time.sleep(0.02)
assert not w.flush(0.2)
waiting = w.report()
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
assert w.flush()
report = w.close()
print(waiting.waiting, report.written, report.spilled, report.lost)
""",
        tmp_path / "routing.db",
        stderr=subprocess.PIPE,
    )
    stdout, stderr = out.communicate(timeout=60)
    assert stdout.split() == ["26", "29", "0", "0"], stderr
    assert steps_of(tmp_path) == list(range(1, 30))
    check_sound(tmp_path / "routing.db")


def test_a_program_that_ends_without_close(tmp_path):
    out = run_script(
        SCRIPT + "w = writer(sys.argv[1])\nfor step in range(1, 20): w.submit(record(step))\n",
        tmp_path / "routing.db",
    )
    out.communicate(timeout=60)
    assert out.returncode == 0 and steps_of(tmp_path) == list(range(1, 20))


def test_fork(tmp_path, make_record):
    """Children of any fate, as of a data loader, harm nothing; one that submits has an attempt of its own."""
    path = tmp_path / "routing.db"
    w = Writer(path, LAYERS, SOURCES)

    def child(step):
        if step:
            w.submit(make_record(step))
            w.close()

    context = multiprocessing.get_context("fork")
    for step in range(1, 21):
        w.submit(make_record(step))
        if step % 4 == 0:
            process = context.Process(target=child, args=(0,))
            process.start()
            process.join()
    assert w.flush()
    process = context.Process(target=child, args=(100,))
    process.start()
    process.join()
    assert process.exitcode == 0
    w.submit(make_record(21))
    report = w.close()
    assert (report.written, report.lost, report.error) == (21, 0, None)
    check_sound(path)
    with open_run(path) as run:
        assert [a.start_step for a in run.attempts] == [1, 100]
    assert steps_of(path) == [*range(1, 22), 100]


def test_kill_at_any_moment(tmp_path, soak):
    """The store is sound, holds each record whole, all that was flushed among them, and resumes."""
    path = tmp_path / "routing.db"
    script = (
        SCRIPT
        + """
w = writer(sys.argv[1], resume=True)
for step in range(int(sys.argv[2]), 100000):
    w.submit(record(step))
    if step % 7 == 0:
        w.flush()
        print(step, flush=True)
"""
    )
    draw = random.Random(1)
    start = 1
    for trial in range(soak):
        with run_script(script, path, start) as out:
            if trial % 3:
                out.stdout.readline()
            time.sleep(draw.random() * (0.3 if trial % 3 else 2.0))  # or while it starts
            out.send_signal(signal.SIGKILL)
            flushed = [int(line) for line in out.stdout.read().split()]
        if not path.exists():
            continue
        with open_run(path) as run:
            steps = [record.last_step for record in run.records]
            assert steps == list(range(1, len(steps) + 1))
            assert not flushed or steps[-1] >= flushed[-1]
            for layer in range(4):
                counts = run.counts(layer)
                assert (counts[:, 0, 0] == np.array(steps) + layer).all() and run.present(layer).all()
        check_sound(path)
        start = max(1, len(steps) - 3)  # the next attempt writes some steps again


MANY = """
from contextlib import closing
from moe_audit.store import Store
path, rank, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if sys.argv[4] == "shared":
    store = Store.open(path, timeout=60)
    store.attempt = 1
    for step in range(1, steps + 1):
        r = record(step)
        r.phase = f"rank {rank}"
        store.append(r)
    store.close()
else:
    w = writer(f"{path}.rank{rank}.db")
    for step in range(1, steps + 1):
        w.submit(record(step))
        time.sleep(0.005)
    assert w.close().written == steps
"""


@pytest.mark.parametrize("way", ["shared", "per_rank"])
def test_eight_writers_and_a_reader(tmp_path, soak, way):
    """Case C63: no error, no loss, nothing twice."""
    path, steps = tmp_path / "routing.db", 10 * soak
    store = Store.create(
        path, [LayerInfo(i, f"layers.{i}", 64, 2) for i in range(4)], [f"s{i}" for i in range(8)]
    )
    store.begin_attempt(1)
    store.close()
    children = [
        run_script(SCRIPT + MANY, path, rank, steps, way, stderr=subprocess.PIPE) for rank in range(8)
    ]
    seen = 0
    while any(child.poll() is None for child in children):
        for file in tmp_path.glob("*.db"):
            with open_run(file, "rank 3" if way == "shared" else "train") as run:
                counts = run.counts(2)
                assert len(counts) == len(run.records)
                seen += len(counts)
        time.sleep(0.05)
    for child in children:
        assert child.communicate()[1] == "" and child.returncode == 0
    assert seen > 0
    if way == "shared":
        with closing(sqlite3.connect(path)) as db:
            groups = "SELECT {} phase, last_step, layer FROM load JOIN record USING (record)"
            for every in ("ALL", "DISTINCT"):
                assert len(db.execute(groups.format(every)).fetchall()) == 8 * steps * 4
        check_sound(path)
    else:
        for rank in range(8):
            assert steps_of(f"{path}.rank{rank}.db") == list(range(1, steps + 1))


def test_tensors_and_odd_details_are_stored_as_what_they_mean(tmp_path):
    """Case C62 with torch; what an event carries survives the spill file as well."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "routing.db"
    w = Writer(path, LAYERS[:1], ["a"])
    detail = {"share": np.float32(0.5), "counts": torch.tensor([1, 2]), "where": tmp_path}
    counts = torch.tensor([[5, 7, 0, 2**32 - 1]])
    record = Record("train", torch.tensor(3), np.int32(3), {0: LayerRecord(counts)}, loss=torch.tensor(0.5))
    record.events = [(np.int64(3), "alert", detail)]
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        w.submit(record)
        w.submit_event(np.int64(3), "alert", detail)
        assert w.close(timeout=0.1).spilled == 1
        other.execute("ROLLBACK")
    Writer(path, LAYERS[:1], ["a"], resume=True).close()
    with open_run(path) as run:
        assert run.counts(0).tolist() == [[[5, 7, 0, 2**32 - 1]]] and run.records[0].loss == 0.5
        wanted = {"share": 0.5, "counts": [1, 2], "where": str(tmp_path)}
        assert [e.detail for e in run.events] == [wanted | {"record": 1}, wanted]
        assert [e.step for e in run.events] == [3, 3]
