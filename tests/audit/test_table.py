"""`metrics` as a DataFrame and as rows for JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import moe_audit
from moe_audit.table import KEYS, METRICS, metric_rows


def test_one_row_for_each_window_layer_and_source(make_run) -> None:  # type: ignore[no-untyped-def]
    counts = np.random.default_rng(0).integers(50, 100, (6, 3, 2, 4))
    path = make_run(counts, sources=["code", "prose"])
    table = moe_audit.metrics(path, length=2, stride=1)
    assert list(table.columns) == [*KEYS, *METRICS]
    assert len(table) == 5 * 3 * 3
    row = table.query("first_step == 3 and layer == 1 and source == 'prose'").iloc[0]
    n = counts[2:4, 1, 1].sum(0)
    assert (row.last_step, row.tokens) == (4, n.sum())
    assert row.cv == pytest.approx(n.std() / n.mean())
    assert row.source_entropy == row.norm_entropy
    before = counts[0:2, 1, 1].sum(0)
    assert row.tv == pytest.approx(0.5 * np.abs(n / n.sum() - before / before.sum()).sum())
    pooled = table.query("first_step == 3 and layer == 1 and source == 'all'").iloc[0]
    assert pooled.router_shift + pooled.mix_shift >= pooled.tv - 1e-12
    assert math.isnan(pooled.source_entropy) and math.isnan(row.cramers_v)
    assert table[table.first_step < 3].tv.isna().all(), "the first windows have nothing to compare with"


def test_json_rows_have_every_key_and_no_infinity(make_run) -> None:  # type: ignore[no-untyped-def]
    path = make_run(np.array([[[[9, 0, 3]], [[0, 0, 0]]]] * 3), capacity_factor=1.25)
    with moe_audit.open_run(path) as run:
        windows, rows = metric_rows(run, length=1, stride=1)
    assert windows == {"length": 1, "stride": 1, "count": 3, "disjoint": 3, "origin": "command line"}
    assert all(set(row) == {*KEYS, *METRICS} for row in rows)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    hot = next(row for row in rows if row["layer"] == 0)
    assert (hot["lir"], hot["dead_experts"], hot["min_share"]) == (None, 1.0, 0.0)
    empty = next(row for row in rows if row["layer"] == 1)
    assert empty["lir"] is None and empty["dead_experts"] is None and empty["cv"] is None


def test_mix_and_equal_weights_differ(make_run) -> None:  # type: ignore[no-untyped-def]
    n = np.array([[9000, 1000], [50, 950]])
    row = moe_audit.metrics(make_run(n[None, None])).iloc[0]
    assert row.cramers_v > row.cramers_v_mix
    assert row.association_rel == pytest.approx(row.association / math.log(2))


def test_one_step_is_enough_to_look_at(make_run) -> None:  # type: ignore[no-untyped-def]
    path = make_run(np.array([[[[30, 10]]]]), start=700)
    row = moe_audit.metrics(path).iloc[0]
    assert (row.first_step, row.last_step, row.lir) == (700, 700, 3.0)
    assert moe_audit.check(path).exit_code in (1, 3), "to look at, not to accept"
