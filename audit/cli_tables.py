"""Metrics of a run as text, JSON or CSV, for `moe-audit metrics`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from moe_audit.printable import printable
from moe_audit.run import Run
from moe_audit.table import KEYS, METRICS, metric_rows
from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.gate_names import nearest

SHOWN = (
    "tokens", "max_load", "min_load", "cv", "lir", "norm_entropy", "dead_experts", "router_shift",
    "mix_shift", "cramers_v",
)  # fmt: skip


def metrics_texts(
    run: Run, names: Sequence[str], formats: Sequence[str], options: dict[str, Any]
) -> list[str]:
    """The rows of `metric_rows` in each format; `names`: only these metrics.

    Raises:
        UsageError: a metric that does not exist.
    """
    for name in names:
        if name not in METRICS:
            raise UsageError(f"there is no metric {name!r}", nearest(name, METRICS))
    windows, rows = metric_rows(run, **options)
    if names:
        rows = [{key: row[key] for key in (*KEYS, *names)} for row in rows]
    return [_render(windows, rows, names or SHOWN, format) for format in formats]


def _render(windows: dict[str, Any], rows: list[dict[str, Any]], shown: Sequence[str], format: str) -> str:
    if format == "json":
        return json.dumps({"schema_version": 1, "windows": windows, "rows": rows}, indent=1) + "\n"
    if format == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]) if rows else list(KEYS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    head = f"{windows['count']} windows of {windows['length']} steps, stride {windows['stride']}"
    table = [["steps", "layer", "source", *shown]]
    for row in rows:
        steps = f"{row['first_step']}-{row['last_step']}"
        table.append(
            [steps, str(row["layer"]), printable(row["source"])[:24], *(_cell(row[n]) for n in shown)]
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths)) for line in table]
    return "\n".join([f"{head} ({windows['origin']}); all metrics: --format json", "", *lines]) + "\n"


def _cell(value: float | bool | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"
