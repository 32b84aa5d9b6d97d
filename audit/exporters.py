"""Ways out: the counts of a run as a table, a row for each (step, layer, source, expert), zeros included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_audit.run import Run, no_records
from moe_audit.thresholds.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("parquet", "csv", "sqlite")
ROWS_A_FRAME = 1_000_000


def export(run: Run, format: str, output: str | Path) -> int:
    """Writes the live records of the run's phase to a file; `moe-audit import` reads CSV and Parquet back.

    Args:
        run: An open run.
        format: `parquet`, `csv`, or `sqlite`: a table `expert_load` of the same columns.
        output: The file; it appears whole or not at all.

    Returns:
        The number of rows.

    Raises:
        UsageError: no such format, the file exists or cannot be written, pyarrow is missing.
        NoDataError: there is no record.
    """
    writers = {"parquet": _write_parquet, "csv": _write_csv, "sqlite": _write_sqlite}
    output = Path(output)
    if format not in writers:
        raise UsageError(f"no format {format!r}", f"formats are {', '.join(FORMATS)}")
    if output.exists():
        raise UsageError(f"{output} exists already", "choose another file")
    if not run.records:
        raise no_records(run)
    draft = output.with_name(f"{output.name}.new-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        rows = writers[format](run, draft)
        draft.rename(output)
    except OSError as error:
        remedy = "choose a folder that can be written"
        raise UsageError(f"{output} cannot be written: {error}", remedy) from error
    finally:
        with suppress(OSError):  # its folder could not be made
            draft.unlink(missing_ok=True)
    return rows


def frames(run: Run) -> Iterator[pd.DataFrame]:
    """The rows in data frames of about a million, layer by layer.

    Columns: step (the record's last), first_step, phase, layer, source, expert, count.
    """
    import pandas as pd

    step_R = np.array([record.last_step for record in run.records])
    first_R = np.array([record.first_step for record in run.records])
    sources = np.array(run.sources)
    for info in run.layers:
        counts_RSE = run.counts(info.layer)
        fired_R = np.flatnonzero(run.present(info.layer))
        S, E = counts_RSE.shape[1:]
        for chunk in np.array_split(fired_R, max(1, len(fired_R) * S * E // ROWS_A_FRAME)):
            n = len(chunk)
            yield pd.DataFrame(
                {
                    "step": np.repeat(step_R[chunk], S * E),
                    "first_step": np.repeat(first_R[chunk], S * E),
                    "phase": run.phase,
                    "layer": info.layer,
                    "source": np.tile(np.repeat(sources, E), n),
                    "expert": np.tile(np.arange(E), n * S),
                    "count": counts_RSE[chunk].ravel(),
                }
            )


def _write_csv(run: Run, path: Path) -> int:
    rows = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        for frame in frames(run):
            frame.to_csv(file, index=False, header=rows == 0)
            rows += len(frame)
    return rows


def _write_parquet(run: Run, path: Path) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError("writing Parquet needs pyarrow", "pip install 'moe-audit[parquet]'") from None
    rows, writer = 0, None
    try:
        for frame in frames(run):
            table = pa.Table.from_pandas(frame, preserve_index=False)
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
            rows += len(frame)
    finally:
        if writer is not None:
            writer.close()
    return rows


def _write_sqlite(run: Run, path: Path) -> int:
    from sqlite_utils import Database

    with closing(Database(path)) as db:
        table = db.table("expert_load")
        table.create(
            {
                "step": int, "first_step": int, "phase": str, "layer": int, "source": str, "expert": int,
                "count": int,
            },
            strict=True,
            not_null=("step", "layer", "source", "expert", "count"),
        )  # fmt: skip
        with db.atomic():
            for frame in frames(run):
                # Python integers: SQLite would take numpy's for BLOBs.
                rows = zip(*(frame[column].tolist() for column in frame), strict=True)
                db.conn.executemany("INSERT INTO expert_load VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        table.create_index(["layer", "step"])
        return int(table.count)
