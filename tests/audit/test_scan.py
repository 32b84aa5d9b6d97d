"""The one pass over a store agrees with reading layer by layer, and finds the same damage."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from moe_audit import joined, open_run, scan
from moe_audit.blocks import read_blocks
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.run import Run
from moe_audit.store import Store
from moe_audit.thresholds.errors import StoreError


def make(path: Path, *, ragged: bool = False, R: int = 37) -> Path:
    """Layers of two sizes; with `ragged`, arrays, layers and sources come and go, phases alternate."""
    rng = np.random.default_rng(0)
    infos = [LayerInfo(i, f"layers.{i}", E, 2) for i, E in [(0, 4), (1, 4), (2, 6), (5, 4)]]
    store = Store.create(path, infos, ["code", "prose"])
    store.begin_attempt(1)
    S = 2
    for r in range(R):
        if ragged and r == 20:
            store.add_source("unlabelled")
            S = 3
        if ragged and r == 30:
            store.begin_attempt(25)
        rows = {}
        for info in infos:
            E = info.num_experts
            some = not ragged or r % 3 > 0
            if ragged and r % 7 == info.layer:
                continue
            n = rng.integers(0, 1000, (S, E))
            rows[info.layer] = LayerRecord(
                n,
                rng.integers(0, 100, S),
                rng.random((S, E)) if some else None,
                rng.random((S, 2)) if some else None,
                int(rng.integers(3)),
                rng.random(E),
                rng.random(E),
                rng.integers(0, 9, E) if some else None,
                rng.random(E),
                rng.random(E),
                4,
            )
        first = r + 1 if not ragged or r < 30 else r - 5
        store.append(Record("eval" if ragged and r % 5 == 4 else "train", first, first, rows, tokens=50))
    store.close()
    return path


def assert_agrees(run: Run, rows: np.ndarray) -> None:
    """Block sums, blocks of four records, against `Run`'s own arrays of each layer."""
    R = len(run.records)
    block_R = np.full(R, -1, np.int64)
    block_R[rows] = np.arange(len(rows)) // 4
    B = int(block_R.max()) + 1
    seen = []
    for blocks in read_blocks(run, run.layers, block_R, B, series=True):
        layer = blocks.info.layer
        seen.append(layer)
        counts = run.counts(layer)
        calls, present = run.calls(layer), run.present(layer)
        stats = {
            "peak_BE": run.stat(layer, "peak"),
            "sq_over_t_BE": run.stat(layer, "sq_over_t"),
            "dropped_BE": run.stat(layer, "dropped"),
            "tokens_BS": run.tokens(layer),
            "prob_BSE": run.prob_sum(layer),
            "top1_BS2": run.top1(layer),
            "counts_BSE": counts,
            "invalid_B": run.invalid(layer),
            "calls_B": calls,
        }
        for name, array in stats.items():
            assert array is not None
            for b in range(B):
                mine = block_R == b
                expect = array[mine].max(0) if name == "peak_BE" else array[mine].sum(0)
                assert getattr(blocks, name)[b] == pytest.approx(expect), (name, b)
        assert (blocks.rows_R[rows] == present[rows]).all()
        assert (blocks.picks_R[rows] == (counts.sum((1, 2)) + run.invalid(layer))[rows]).all()
        assert blocks.series is not None
        assert (blocks.series[0][rows] == counts.sum(1)[rows]).all()
        assert (blocks.series[1][rows] == counts.sum(2)[rows]).all()
    assert sorted(seen) == [info.layer for info in run.layers]


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks, and with `ahead` a thread that reads them, as it does for long runs."""
    monkeypatch.setattr(joined, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(scan, "APART_ROWS", 20)
    monkeypatch.setattr(scan, "AHEAD_ROWS", 0 if request.param else 10**9)


@pytest.mark.parametrize("ragged", [False, True])
def test_one_pass_agrees_with_layer_by_layer(tmp_path: Path, ragged: bool, ahead: None) -> None:
    with open_run(make(tmp_path / "routing.db", ragged=ragged)) as run:
        assert_agrees(run, np.arange(len(run.records)))
        assert_agrees(run, np.arange(10, 14))  # few records: by the index
        assert_agrees(run, np.array([3, 8, 9]))


@pytest.mark.parametrize("column", ["counts", "prob_sum", "tokens", "top1", "peak", "logit_std"])
def test_a_flipped_bit_is_found(tmp_path: Path, column: str, ahead: None) -> None:
    path = make(tmp_path / "routing.db")
    table = "layer_stat" if column in ("peak", "logit_std") else "load"
    connection = sqlite3.connect(path)
    blob = bytearray(
        connection.execute(f"SELECT {column} FROM {table} WHERE record = 9 AND layer = 1").fetchone()[0]
    )
    blob[5] ^= 16
    connection.execute(f"UPDATE {table} SET {column} = ? WHERE record = 9 AND layer = 1", (bytes(blob),))
    connection.commit()
    connection.close()
    with open_run(path) as run, pytest.raises(StoreError, match=f"record 9, layer 1: {column}"):
        list(read_blocks(run, run.layers, np.zeros(len(run.records), np.int64), 1))


@pytest.mark.parametrize("value", [b"", b"\0" * 5])
def test_an_array_of_a_wrong_size_is_damage(tmp_path: Path, value: bytes, ahead: None) -> None:
    path = make(tmp_path / "routing.db")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE load SET counts = ? WHERE record = 9 AND layer = 1", (value,))
    connection.commit()
    connection.close()
    with open_run(path) as run, pytest.raises(StoreError):
        list(read_blocks(run, run.layers, np.zeros(len(run.records), np.int64), 1))


def test_arrays_of_two_rows_exchanged_are_damage(tmp_path: Path, ahead: None) -> None:
    """Joined, the arrays of a chunk have the right size and the right checksums, each at another row."""
    path = make(tmp_path / "routing.db")
    connection = sqlite3.connect(path)
    select = "SELECT counts, crc FROM load WHERE record = 9 AND layer = ?"
    rows = [connection.execute(select, (layer,)).fetchone() for layer in (0, 1)]
    for layer, row in zip((1, 0), rows):
        connection.execute(
            "UPDATE load SET counts = ?, crc = ? WHERE record = 9 AND layer = ?", (*row, layer)
        )
    connection.commit()
    connection.close()
    with open_run(path) as run, pytest.raises(StoreError, match=r"record 9, layer [01]"):
        list(read_blocks(run, run.layers, np.zeros(len(run.records), np.int64), 1))


def test_stores_without_checksums_and_with_far_row_numbers_are_read(tmp_path: Path, ahead: None) -> None:
    """Others may write by the schema: checksums may be missing, rows may have any number."""
    path = make(tmp_path / "routing.db")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE load SET crc = NULL WHERE record > 20")
    connection.execute("UPDATE load SET rowid = rowid - 5000000000 WHERE record < 10")
    connection.execute("UPDATE load SET rowid = rowid + 5000000000 WHERE record > 30")
    connection.commit()
    connection.close()
    with open_run(path) as run:
        assert_agrees(run, np.arange(len(run.records)))
