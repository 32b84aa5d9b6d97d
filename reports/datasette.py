"""What makes `datasette FOLDER` show a run at once: the verdict as tables, and saved queries on the loads.

Beside the run's `routing.db` come `verdict.db` (tables verdict, gate, cell, note), `metadata.json` (titles,
facets, saved queries) and `settings.json`. The store itself is only read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_audit.reports.json import cell_dict, plain
from moe_audit.reports.wording import clean, op_of, sentence, status_name
from moe_audit.thresholds.errors import UsageError

if TYPE_CHECKING:
    from moe_audit.run import Run
    from moe_audit.verdict import Verdict

DATABASE_NAME = "verdict.db"
SOURCE = "moe-audit"  # marks a metadata.json as ours, so that nobody else's is overwritten
SETTINGS = {"sql_time_limit_ms": 20_000, "max_returned_rows": 5000}

# expert_load explodes every matrix, so each query says which steps it means before it adds them up.
STEPS = "(:first_step = '' OR first_step >= :first_step) AND (:last_step = '' OR last_step <= :last_step)"
QUERIES = {
    "expert_load_by_layer": (
        "Load of each expert in fair shares (1: even), over the steps given or all",
        f"""WITH picks AS (
  SELECT layer, expert, sum(count) AS picks FROM expert_load
  WHERE phase = 'train' AND {STEPS} GROUP BY layer, expert
)
SELECT layer, expert, picks,
  round(1.0 * picks * count(*) OVER (PARTITION BY layer) / sum(picks) OVER (PARTITION BY layer), 4) AS load
FROM picks ORDER BY layer, expert""",
    ),
    "who_feeds_whom": (
        "Share of each source's picks that goes to each expert, in fair shares, over the steps given or all",
        f"""WITH picks AS (
  SELECT layer, source, expert, sum(count) AS picks FROM expert_load
  WHERE phase = 'train' AND {STEPS} GROUP BY layer, source, expert
)
SELECT layer, source, expert, picks, round(1.0 * picks * count(*) OVER (PARTITION BY layer, source)
  / sum(picks) OVER (PARTITION BY layer, source), 4) AS load
FROM picks ORDER BY layer, source, load DESC""",
    ),
    "largest_load_by_record": (
        "Largest and smallest load of each layer, record by record, in fair shares",
        f"""WITH picks AS (
  SELECT first_step, last_step, layer, expert, sum(count) AS picks FROM expert_load
  WHERE phase = 'train' AND {STEPS} GROUP BY record, layer, expert
)
SELECT first_step, last_step, layer,
  round(1.0 * max(picks) * count(*) / sum(picks), 4) AS largest_load,
  round(1.0 * min(picks) * count(*) / sum(picks), 4) AS smallest_load
FROM picks GROUP BY first_step, last_step, layer ORDER BY last_step, layer""",
    ),
    "training": (
        "Loss, learning rate and tokens of each record that counts",
        "SELECT first_step, last_step, phase, tokens, loss, lr, router_lr FROM live_record"
        " ORDER BY last_step",
    ),
}
VERDICT_QUERIES = {
    "what_fails": (
        "Cells that do not pass, those of the worst status first",
        "SELECT status, gate, layer, source, first_step, last_step, value, op, limit_value, experts FROM cell"
        " WHERE status <> 'PASS' ORDER BY CASE status WHEN 'FAIL' THEN 0 WHEN 'WARN' THEN 1 ELSE 2 END,"
        " gate, layer, first_step",
    ),
    "layers": (
        "How many cells of each layer have which status",
        "SELECT layer, sum(status = 'FAIL') AS fail, sum(status = 'WARN') AS warn,"
        " sum(status = 'INSUFFICIENT') AS insufficient FROM cell GROUP BY layer"
        " ORDER BY fail DESC, warn DESC",
    ),
}


def write_datasette(run: Run, verdict: Verdict, folder: str | Path | None = None) -> list[Path]:
    """Writes the three files into `folder`, beside the store by default; then `datasette FOLDER` shows all.

    Raises:
        UsageError: `folder` cannot be written, or holds a `metadata.json` that is not ours.
    """
    folder = run.path.parent if folder is None else Path(folder)
    database, metadata, settings = (folder / n for n in (DATABASE_NAME, "metadata.json", "settings.json"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if metadata.exists() and _source(metadata) != SOURCE:
            raise UsageError(f"{metadata} is not of moe-audit", "choose another folder, or move it away")
        _write_verdict(verdict, database)
        metadata.write_text(json.dumps(_metadata(run, verdict), indent=1) + "\n", encoding="ascii")
        settings.write_text(json.dumps(SETTINGS, indent=1) + "\n", encoding="ascii")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}", "choose another folder") from error
    return [database, metadata, settings]


def _source(metadata: Path) -> Any:
    try:
        return json.loads(metadata.read_text(encoding="utf-8")).get("source")
    except (ValueError, AttributeError):
        return None


def _write_verdict(verdict: Verdict, path: Path) -> None:
    """The verdict as SQLite tables, whole or not at all."""
    import sqlite_utils

    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    db = sqlite_utils.Database(draft)
    head = {"status": status_name(verdict), "exit_code": verdict.exit_code, "sentence": sentence(verdict)}
    head |= {f"policy_{k}": plain(v) for k, v in verdict.policy.items()}
    head |= {f"window_{k}": plain(v) for k, v in verdict.windows.items()}
    head |= verdict.totals
    db.table("verdict").insert({k: _sql(v) for k, v in head.items()})
    ops = op_of(verdict)
    gates = [
        {"gate": g.gate, "status": g.status.name, "op": g.op, "warn": plain(g.warn), "fail": plain(g.fail),
         "worst_value": plain(g.worst.value) if g.worst else None}
        for g in verdict.gates
    ]  # fmt: skip
    cells = []
    for cell in verdict.cells:
        row = cell_dict(cell)
        row["limit_value"] = row.pop("limit")  # LIMIT is a word of SQL
        cells.append({k: _sql(v) for k, v in row.items()} | {"op": ops.get(cell.gate)})
    kinds = (("skipped", verdict.skipped), ("waived", verdict.waived), ("problem", verdict.problems))
    notes = [{"kind": kind, "note": json.dumps(plain(n))} for kind, found in kinds for n in found]
    db.table("gate").create(
        {"gate": str, "status": str, "op": str, "warn": float, "fail": float, "worst_value": float}, pk="gate"
    )
    db.table("gate").insert_all(gates)
    db.table("cell").create(
        {"status": str, "gate": str, "layer": int, "layer_name": str, "source": str, "first_step": int,
         "last_step": int, "value": float, "value_reason": str, "op": str, "limit_value": float,
         "floor": float, "effective_tokens": float, "experts": str}
    )  # fmt: skip
    db.table("cell").insert_all(cells)
    db.table("note").create({"kind": str, "note": str})
    db.table("note").insert_all(notes)
    db.close()
    draft.replace(path)


def _sql(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def _metadata(run: Run, verdict: Verdict) -> dict[str, Any]:
    def queries(named: dict[str, tuple[str, str]]) -> dict[str, Any]:
        return {name: {"title": title, "sql": sql} for name, (title, sql) in named.items()}

    status = status_name(verdict)
    return {
        "title": f"{status}: {clean(verdict.run.get('path') or run.path, 120)}",
        "description": sentence(verdict),
        "source": SOURCE,
        "databases": {
            run.path.stem: {
                "description": "The routing store: exact counts of the routers' picks.",
                "queries": queries(QUERIES),
                "tables": {
                    "expert_load": {"description": "One row per record, layer, source and expert."},
                    "load": {"hidden": True},
                    "layer_stat": {"hidden": True},
                },
            },
            Path(DATABASE_NAME).stem: {
                "description": sentence(verdict),
                "queries": queries(VERDICT_QUERIES),
                "tables": {"cell": {"facets": ["status", "gate", "layer"], "size": 50}},
            },
        },
    }
