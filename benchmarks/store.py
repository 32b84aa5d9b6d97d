"""The routing store beside other ways to keep counts. Ratios of one run, side by side.

    python benchmarks/store.py                 # 20 records of 60 layers x 20 sources x 256 experts
    python benchmarks/store.py --large         # and 1,000 records, 307 million counts, read layer by layer
    python benchmarks/store.py --repeat 5      # medians of five

1. Layouts: the same counts as BLOBs per (record, layer) in SQLite (ours), a row an expert in SQLite, a row
   with JSON a (record, layer), a row an expert in DuckDB and in Parquet: time to write a record, to read it
   all back into arrays per layer, bytes a count.
2. A record as the recorder writes it, with all arrays: time per layer, bytes against those of its arrays.
3. `expert_load`: rows a second in plain SQL.
4. With --large: reading all counts, against reading the bytes of the file.
"""

from __future__ import annotations

import argparse
import json
import resource
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.run import open_run
from moe_audit.store import Store

Counts = npt.NDArray[np.int64]  # [records, layers, sources, experts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    counts = np.random.default_rng(0).poisson(6, (options.records, 60, 20, 256))
    with tempfile.TemporaryDirectory() as folder:
        layouts(Path(folder), counts, options.repeat)
        for shape in ((16, 8, 64), (60, 20, 256), (32, 1, 64), (24, 16, 128)):
            full_records(Path(folder), *shape, records=200 if shape[1] * shape[2] < 2000 else 50)
        view(Path(folder))
        if options.large:
            large(Path(folder), counts)


def layouts(folder: Path, counts: Counts, repeat: int) -> None:
    """The first table. The slow ones see fewer records; every figure is for one record."""
    few = counts[: max(2, len(counts) // 10)]
    ways: list[tuple[str, Counts, Callable[[Path, Counts], None], Callable[[Path], int]]] = [
        ("BLOB a (record, layer), SQLite (ours)", counts, write_store, read_store),
        ("row an expert, SQLite", few, write_rows, read_rows),
        ("JSON a (record, layer), SQLite", few, write_json, read_json),
        ("row an expert, DuckDB, one bulk load", few, write_duckdb, read_duckdb),
        ("row an expert, Parquet zstd, one bulk write", few, write_parquet, read_parquet),
    ]
    print(
        "| layout | write ms a record | read ms a record | bytes a count | write, read, size against ours |"
    )
    print("| --- | --- | --- | --- | --- |")
    times: dict[str, list[tuple[float, float, int]]] = {name: [] for name, *_ in ways}
    for trial in range(repeat):
        for i, (name, data, write, read) in enumerate(ways):
            path = folder / f"layout{i}.{trial}"
            start = time.perf_counter()
            write(path, data)
            written = time.perf_counter() - start
            start = time.perf_counter()
            total = read(path)
            seconds = time.perf_counter() - start
            if total != data.sum():
                raise RuntimeError(f"{name} read {total}, not {data.sum()}")
            times[name].append((written / len(data), seconds / len(data), path.stat().st_size))
            path.unlink()
    ours = [statistics.median(column) for column in zip(*times[ways[0][0]], strict=True)]
    ours[2] /= ways[0][1].size
    for name, data, *_ in ways:
        write_s, read_s, size = (statistics.median(column) for column in zip(*times[name], strict=True))
        size /= data.size
        print(
            f"| {name} | {write_s * 1e3:.1f} | {read_s * 1e3:.1f} | {size:.2f} |"
            f" {write_s / ours[0]:.1f}, {read_s / ours[1]:.1f}, {size / ours[2]:.2f} |"
        )


def write_store(path: Path, counts: Counts) -> None:
    R, L, S, E = counts.shape
    layers, sources = [LayerInfo(k, f"l{k}", E, 8) for k in range(L)], [f"s{s}" for s in range(S)]
    store = Store.create(path, layers, sources, counts_only=True)
    store.begin_attempt(1)
    for r in range(R):
        store.append(Record("train", r + 1, r + 1, {k: LayerRecord(counts[r, k]) for k in range(L)}))
    store.close()


def read_store(path: Path) -> int:
    with open_run(path) as run:
        return sum(int(run.counts(info.layer).sum()) for info in run.layers)


def keys(counts: Counts) -> list[npt.NDArray[np.int64]]:
    return [index.ravel() for index in np.indices(counts.shape)]


def write_rows(path: Path, counts: Counts) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(
            "CREATE TABLE load (step INTEGER, layer INTEGER, source INTEGER, expert INTEGER, count INTEGER)"
        )
        for r in range(len(counts)):
            db.execute("BEGIN")
            _, *rest = keys(counts[r : r + 1])
            rows = zip(*(k.tolist() for k in rest), counts[r].ravel().tolist(), strict=True)
            db.executemany(f"INSERT INTO load VALUES ({r}, ?, ?, ?, ?)", rows)
            db.execute("COMMIT")
        db.execute("CREATE INDEX load_layer ON load (layer)")


def read_rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        layers = [layer for (layer,) in db.execute("SELECT DISTINCT layer FROM load")]
        sql = "SELECT step, source, expert, count FROM load WHERE layer = ?"
        return sum(int(np.array(db.execute(sql, (k,)).fetchall())[:, 3].sum()) for k in layers)


def write_json(path: Path, counts: Counts) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE load (step INTEGER, layer INTEGER, counts TEXT)")
        for r, record in enumerate(counts):
            db.execute("BEGIN")
            rows = [(r, k, json.dumps(layer.tolist())) for k, layer in enumerate(record)]
            db.executemany("INSERT INTO load VALUES (?, ?, ?)", rows)
            db.execute("COMMIT")


def read_json(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return sum(int(np.array(json.loads(text)).sum()) for (text,) in db.execute("SELECT counts FROM load"))


def frame(counts: Counts) -> pd.DataFrame:
    names = ("step", "layer", "source", "expert")
    return pd.DataFrame(dict(zip(names, keys(counts), strict=True)) | {"count": counts.ravel()})


def write_duckdb(path: Path, counts: Counts) -> None:
    table = frame(counts)
    with closing(duckdb.connect(str(path))) as db:
        db.register("rows", table)
        db.execute("CREATE TABLE load AS SELECT * FROM rows")


def read_duckdb(path: Path) -> int:
    with closing(duckdb.connect(str(path), read_only=True)) as db:
        layers = db.execute("SELECT DISTINCT layer FROM load").fetchnumpy()["layer"]
        sql = "SELECT count FROM load WHERE layer = ? ORDER BY step, source, expert"
        return sum(int(db.execute(sql, [int(k)]).fetchnumpy()["count"].sum()) for k in layers)


def write_parquet(path: Path, counts: Counts) -> None:
    table = pa.Table.from_pandas(frame(counts), preserve_index=False)
    pq.write_table(table, path, compression="zstd")


def read_parquet(path: Path) -> int:
    table = pq.read_table(path, columns=["layer", "count"])
    layer, count = table["layer"].to_numpy(), table["count"].to_numpy()
    return sum(int(count[layer == k].sum()) for k in np.unique(layer))


def full_records(folder: Path, layers: int, sources: int, experts: int, records: int) -> None:
    """A line of the second table: all arrays of a record, each record committed by itself."""
    path = folder / "full.db"
    infos = [LayerInfo(k, f"l{k}", experts, 8) for k in range(layers)]
    store = Store.create(path, infos, [f"s{s}" for s in range(sources)])
    store.begin_attempt(1)
    rng = np.random.default_rng(0)
    part = LayerRecord(
        rng.integers(0, 5000, (sources, experts)),
        tokens_S=np.ones(sources, np.int64),
        prob_sum_SE=rng.random((sources, experts), np.float32),
        top1_S2=np.ones((sources, 2)),
        peak_E=np.ones(experts),
        sq_over_t_E=np.ones(experts),
        dropped_E=np.ones(experts, np.int64),
        logit_mean_E=np.ones(experts),
        logit_std_E=np.ones(experts),
        calls=1,
    )
    times = []
    for r in range(1, records + 1):
        record = Record("train", r, r, dict.fromkeys(range(layers), part))
        start = time.perf_counter()
        store.append(record)
        times.append((time.perf_counter() - start) / layers * 1e3)
    store.close()
    raw = records * layers * (8 * sources * experts + 24 * experts)
    worst = float(np.quantile(times, 0.99))
    print(
        f"full record, {layers} layers x {sources} sources x {experts} experts: written in"
        f" {statistics.median(times):.3f} ms a layer (99 %: {worst:.3f}),"
        f" {path.stat().st_size / raw:.3f} x the bytes of its arrays"
    )
    path.unlink()


def view(folder: Path) -> None:
    """A million experts through the view."""
    path = folder / "view.db"
    write_store(path, np.random.default_rng(0).integers(0, 5000, (125, 16, 8, 64)))
    with closing(sqlite3.connect(path)) as db:
        for sql in (
            "SELECT sum(count), count(*) FROM expert_load",
            "SELECT layer, source, sum(count) FROM expert_load GROUP BY layer, source",
            "SELECT sum(count) FROM expert_load WHERE layer = 3 AND record = 7",
        ):
            start, cpu = time.perf_counter(), time.process_time()
            db.execute(sql).fetchall()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            print(f"expert_load of 1,024,000 rows: {seconds:.3f} s ({cpu:.3f} s of processor) for {sql}")
    path.unlink()


def large(folder: Path, counts: Counts) -> None:
    """All counts of 1,000 full records, layer by layer, against the bytes of the file."""
    path, (_, L, S, E) = folder / "large.db", counts.shape
    store = Store.create(path, [LayerInfo(k, f"l{k}", E, 8) for k in range(L)], [f"s{s}" for s in range(S)])
    store.begin_attempt(1)
    extra = {"prob_sum_SE": np.ones((S, E)), "peak_E": np.ones(E), "sq_over_t_E": np.ones(E), "calls": 1}
    for r in range(1000):
        rows = {k: LayerRecord(counts[r % len(counts), k], **extra) for k in range(L)}
        store.append(Record("train", r + 1, r + 1, rows))
    store.close()
    ratios = []
    for _ in range(5):
        start = time.perf_counter()
        size = len(path.read_bytes())
        whole = time.perf_counter() - start
        start = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(1 << 20)
            while file.readinto(buffer):
                pass
        chunks = time.perf_counter() - start
        start = time.perf_counter()
        with open_run(path) as run:
            for info in run.layers:
                run.counts(info.layer)
        ours = time.perf_counter() - start
        ratios.append((ours / whole, ours / chunks, whole, chunks, ours))
    whole_ratio, chunk_ratio, whole, chunks, ours = (statistics.median(c) for c in zip(*ratios, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{1000 * L * S * E / 1e6:.0f} million counts of a file of {size / 1e9:.2f} GB, layer by layer:"
        f" {ours:.2f} s, {whole_ratio:.2f} x read_bytes ({whole:.2f} s), {chunk_ratio:.2f} x in chunks"
        f" ({chunks:.2f} s); peak memory of all this {peak:.1f} GB"
    )


if __name__ == "__main__":
    main()
