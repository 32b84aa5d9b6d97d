"""How fast `check` is, against the disk, pandas and DuckDB. Ratios of one run, side by side.

    python benchmarks/check.py   # 100,000 steps recorded every 10, 32 layers, 64 experts, 8 sources
    python benchmarks/check.py --records 2000   # a smaller run

1. `check` with all gates of the `default` policy, against reading the file's bytes and summing the counts
   once in numpy; and its peak memory.
2. The six classic metrics (LIR, CV, min share, entropy in all and per source, share shift), the same windows:
   `check` with `classic`, against pandas rolling sums and DuckDB SQL over long rows, on a quarter of the run.
   Each begins in a warm process, its modules imported, and ends with its results in Python. `check` and
   DuckDB open a file of their own format, in the system's cache, within the time; DuckDB's is a native table
   of the long rows, and in further rows it has that table in memory. pandas has the rows in memory.
3. The training gate's look at the last five windows, early and late in the run.

1 and 3 are seconds of the processor, which other work on the machine disturbs least; 2 is time on the clock,
each with the threads that it takes, and seconds of the processor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.store import Store

TOP_K, STEPS, TOKENS = 8, 10, 10_000  # tokens per source and record
LENGTH = 2000  # steps of a window


def make_store(path: Path, records: int, layers: int, sources: int, experts: int, *, full: bool) -> None:
    """A store as the recorder writes it; without `full` counts and tokens only, as an import."""
    rng = np.random.default_rng(0)
    infos = [LayerInfo(i, f"layers.{i}.moe", experts, TOP_K) for i in range(layers)]
    store = Store.create(path, infos, [f"source{s}" for s in range(sources)], {"window_length": LENGTH})
    store.begin_attempt(1)
    # A pool of draws, mixed anew for each record: 164 million draws would take longer than the rest.
    pool = rng.multinomial(TOP_K * TOKENS, np.full(experts, 1 / experts), size=(64, sources))
    tokens = np.full(sources, TOKENS)
    top1 = np.stack([tokens * 0.3, tokens * 0.12], axis=1)
    for first in range(0, records, 500):
        batch = []
        for r in range(first, min(first + 500, records)):
            rows = {}
            for layer in range(layers):
                counts = pool[rng.integers(64)]
                rows[layer] = LayerRecord(counts, tokens, **(_extras(counts, top1) if full else {}))
            batch.append(
                Record(
                    "train",
                    r * STEPS + 1,
                    (r + 1) * STEPS,
                    rows,
                    microbatches=160,
                    tokens=TOKENS * sources,
                    excluded_tokens=0,
                    lr=1e-3,
                    loss=2.0,
                )
            )
        store.extend(batch)
    store.close()


def _extras(counts: np.ndarray, top1: np.ndarray) -> dict[str, Any]:
    """All that a router with probabilities and logits gives besides counts."""
    n, experts = counts.sum(0), counts.shape[1]
    return {
        "prob_sum_SE": counts / TOP_K,
        "top1_S2": top1,
        "peak_E": np.full(experts, 1.2),
        "sq_over_t_E": n.astype(float) ** 2 / (TOKENS * len(counts)),
        "logit_mean_E": np.zeros(experts),
        "logit_std_E": np.ones(experts),
        "calls": 160,
    }


def read_and_sum(path: Path, shape: tuple[int, ...]) -> float:
    """Seconds to read the file's bytes, and to sum as many counts once in numpy."""
    records, layers, sources, experts = shape
    part = np.ones((max(records // 20, 1), layers * sources * experts), np.uint32)
    start = time.process_time()
    data = path.read_bytes()
    seconds = time.process_time() - start
    del data
    start = time.process_time()
    for _ in range(20):
        part.sum(axis=0, dtype=np.int64)
    return seconds + time.process_time() - start


CHECK = """
import json, re, sys, time
from pathlib import Path
import moe_audit
from moe_audit.thresholds.policy import load_policy
policy, times = load_policy(sys.argv[2]), []
moe_audit.check  # imported before the clock starts
for _ in range(int(sys.argv[3])):
    start = time.process_time(), time.perf_counter()
    verdict = moe_audit.check(sys.argv[1], policy, **json.loads(sys.argv[4]))
    times.append((time.process_time() - start[0], time.perf_counter() - start[1]))
# Not ru_maxrss, which a process inherits from the one that started it.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(json.dumps({"processor": min(t[0] for t in times), "clock": min(t[1] for t in times),
                  "mb": int(peak[1]) / 1024,
                  "status": verdict.status.name, "cells": sum(verdict.totals.values())}))
"""


def run_check(path: Path, policy: str, *, repeats: int = 3, **options: Any) -> dict[str, Any]:
    """`check` in a process of its own, so that its peak memory is its own."""
    command = [sys.executable, "-c", CHECK, str(path), policy, str(repeats), json.dumps(options)]
    result: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return result


def long_rows(path: Path) -> Any:
    """The counts as a DataFrame of one row per (record, layer, source, expert), zeros included."""
    import pandas as pd

    import moe_audit

    with moe_audit.open_run(path) as run:
        R, S = len(run.records), len(run.sources)
        step = np.array([r.last_step for r in run.records], np.int32)
        parts = []
        for info in run.layers:
            E = info.num_experts
            parts.append(
                pd.DataFrame(
                    {
                        "step": np.repeat(step, S * E),
                        "layer": np.full(R * S * E, info.layer, np.int16),
                        "source": np.tile(np.repeat(np.arange(S, dtype=np.int16), E), R),
                        "expert": np.tile(np.arange(E, dtype=np.int16), R * S),
                        "count": run.counts(info.layer).ravel(),
                    }
                )
            )
        return pd.concat(parts, ignore_index=True)


def by_pandas(frame: Any, length: int, stride: int) -> dict[str, float]:
    """The six metrics by rolling sums: the worst of each."""
    in_records, step = length // STEPS, stride // STEPS
    log_n = np.log(float(frame["expert"].max() + 1))
    table = frame.pivot_table(index=["layer", "step"], columns="expert", values="count", aggfunc="sum")
    sums = (
        table.groupby(level=0)
        .rolling(in_records)
        .sum()
        .droplevel(0)
        .groupby(level=0)
        .nth(slice(in_records - 1, None, step))
    )
    p = sums.div(sums.sum(axis=1), axis=0)
    by_source = frame.pivot_table(
        index=["layer", "source", "step"], columns="expert", values="count", aggfunc="sum"
    )
    rolled = by_source.groupby(level=[0, 1]).rolling(in_records).sum().droplevel([0, 1])
    each = rolled.groupby(level=[0, 1]).nth(slice(in_records - 1, None, step))
    q = each.div(each.sum(axis=1), axis=0)
    return {
        "lir": float((sums.max(axis=1) / sums.min(axis=1)).max()),
        "cv": float((sums.std(axis=1, ddof=0) / sums.mean(axis=1)).max()),
        "min_share": float(p.min(axis=1).min()),
        "norm_entropy": float((-(p * np.log(p)).sum(axis=1) / log_n).min()),
        "source_entropy": float((-(q * np.log(q)).sum(axis=1) / log_n).min()),
        "share_shift": float(p.groupby(level=0).diff().abs().max(axis=1).max()),
    }


ROLLING = """
WITH rolled AS (
  SELECT step, layer, source, expert,
         sum(count) OVER (PARTITION BY layer, source, expert ORDER BY step
                          ROWS BETWEEN {before} PRECEDING AND CURRENT ROW) AS n
  FROM rows
),
s AS (
  SELECT (step - {length}) // {stride} AS w, layer, source, expert, n
  FROM rolled WHERE step >= {length} AND (step - {length}) % {stride} = 0
),"""
JOINED = """
WITH w AS (
  SELECT range AS w, range * {stride} + 1 AS a, range * {stride} + {length} AS z
  FROM range(CAST((SELECT (max(step) - {length}) // {stride} + 1 FROM rows) AS BIGINT))
),
s AS (
  SELECT w, layer, source, expert, sum(count) AS n FROM rows JOIN w ON step BETWEEN a AND z GROUP BY ALL
),"""
CLASSIC = """
n AS (SELECT w, layer, expert, sum(n) AS n FROM s GROUP BY ALL),
p AS (SELECT *, n / sum(n) OVER (PARTITION BY w, layer) AS p FROM n),
d AS (SELECT *, abs(p - lag(p) OVER (PARTITION BY layer, expert ORDER BY w)) AS d FROM p),
m AS (
  SELECT w, layer, max(n) / min(n) AS lir, stddev_pop(n) / avg(n) AS cv, min(p) AS min_share,
         -sum(p * ln(p)) / ln({experts}) AS h, max(d) AS d
  FROM d GROUP BY ALL
),
q AS (SELECT *, n / sum(n) OVER (PARTITION BY w, layer, source) AS p FROM s),
h AS (SELECT w, layer, source, -sum(p * ln(p)) / ln({experts}) AS h FROM q GROUP BY ALL)
SELECT max(lir), max(cv), min(min_share), min(m.h), (SELECT min(h) FROM h), max(d) FROM m
"""


def duckdb_query(sums: str, length: int, stride: int, experts: int) -> str:
    """The six metrics in SQL; ROLLING sums as one would write it, JOINED knows the windows beforehand."""
    return (sums + CLASSIC).format(length=length, stride=stride, experts=experts, before=length // STEPS - 1)


def by_duckdb(table: Path | Any, sql: str) -> dict[str, float]:
    """The query over long rows: in a file that is opened first, or by an open connection."""
    import duckdb

    connection = duckdb.connect(str(table), read_only=True) if isinstance(table, Path) else table
    row = connection.execute(sql).fetchone()
    if isinstance(table, Path):
        connection.close()
    names = ("lir", "cv", "min_share", "norm_entropy", "source_entropy", "share_shift")
    return dict(zip(names, row, strict=True))


def timed(action: Callable[[], Any], repeats: int = 3) -> tuple[float, float, Any]:
    """(seconds on the clock, of the processor, result), the least of a few."""
    clock, processor = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        result = action()
        clock.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    return min(clock), min(processor), result


def compare_classic(store: Path, database: Path, shape: tuple[int, ...]) -> None:
    """Point 2 over one store. The three programs must agree on every metric."""
    import duckdb

    ours = run_check(store, "classic", length=LENGTH, stride=LENGTH // 2, repeats=5)
    frame = long_rows(store)
    with duckdb.connect(str(database)) as connection:
        connection.execute("CREATE TABLE rows AS SELECT * FROM frame")
    memory = duckdb.connect()
    memory.execute("CREATE TABLE rows AS SELECT * FROM frame")
    windows = (LENGTH, LENGTH // 2)
    rolling, joined = (duckdb_query(sums, *windows, shape[-1]) for sums in (ROLLING, JOINED))
    others = {
        "pandas rolling": timed(lambda: by_pandas(frame, *windows), 1),
        "DuckDB rolling, from its file": timed(lambda: by_duckdb(database, rolling)),
        "DuckDB rolling, in memory": timed(lambda: by_duckdb(memory, rolling)),
        "DuckDB by window, from its file": timed(lambda: by_duckdb(database, joined)),
        "DuckDB by window, in memory": timed(lambda: by_duckdb(memory, joined)),
    }
    first = others["pandas rolling"][2]
    for name, (_, _, found) in others.items():
        for metric, value in found.items() if isinstance(found, dict) else ():
            assert abs(value - first[metric]) < 1e-9, (name, metric, value)
    print(
        f"classic metrics over {len(frame) / 1e6:.1f} M long rows, seconds on the clock and of the processor:"
    )
    print(f"  check: {ours['clock']:.2f}, {ours['processor']:.2f}")
    for name, (clock, processor, _) in others.items():
        ratios = f"{clock / ours['clock']:.1f} x, {processor / ours['processor']:.1f} x"
        print(f"  {name}: {clock:.2f}, {processor:.2f} = {ratios}")
    seconds = min(read_and_sum(store, shape) for _ in range(3))
    print(f"  to read the bytes of the store and sum its counts once in numpy: {seconds:.2f}, no metric yet")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("records", 10_000), ("layers", 32), ("sources", 8), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    shape = (args.records, args.layers, args.sources, args.experts)
    with tempfile.TemporaryDirectory() as folder:
        for full in (False, True):
            path = Path(folder) / f"full{full}.db"
            make_store(path, *shape, full=full)
            size = path.stat().st_size / 1e6
            baseline = min(read_and_sum(path, shape) for _ in range(3))
            result = run_check(path, "default")
            print(
                f"{'all arrays' if full else 'counts only'}: {int(np.prod(shape)) / 1e6:.0f} M counts,"
                f" {size:.0f} MB; read and sum {baseline:.2f} s; check {result['processor']:.2f} s"
                f" = {result['processor'] / baseline:.1f} x ({result['clock']:.2f} s on the clock),"
                f" peak {result['mb']:.0f} MB, {result['cells']} cells, {result['status']}"
            )
        end = args.records * STEPS
        for step in (end // 10, end):
            look = run_check(path, "default", checkpoint=step)
            print(f"training gate at step {step}: {look['processor'] * 1000:.0f} ms")
        small = Path(folder) / "small.db"
        records = max(args.records // 4, 2 * LENGTH // STEPS)
        make_store(small, records, *shape[1:], full=False)
        compare_classic(small, Path(folder) / "rows.duckdb", (records, *shape[1:]))


if __name__ == "__main__":
    main()
