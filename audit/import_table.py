"""CSV and Parquet with the columns step, layer, source, expert, count: one record per step.

A (layer, expert) without a row in a step that has other rows is 0; a step without any row was not recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_audit.importers import DenseCounts, ImportReport, PerLayer, declared_layers, write_store
from moe_audit.record import MAX_COUNT, LayerInfo, Record
from moe_audit.store import check_sources
from moe_audit.thresholds.errors import NoDataError, UsageError

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("step", "layer", "source", "expert", "count")
OPTIONAL = ("first_step", "phase", "attempt")  # what an export holds beyond them

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """The rows of all files, column by column; `where` names a row."""

    step: Ints
    layer: Ints
    expert: Ints
    count: Ints
    first_step: Ints
    attempt: Ints
    source: Ints  # index into `sources`
    phase: Ints  # index into `phases`
    sources: list[str]
    phases: list[str]
    files: list[Path]
    file: Ints
    line: Ints

    def where(self, i: int) -> str:
        return f"{self.files[self.file[i]]}, line {self.line[i]}"


def import_table(
    files: Sequence[Path], format: str, num_experts: PerLayer | None, top_k: PerLayer | None, output: Path
) -> ImportReport:
    """See `import_files`."""
    table = read_tables(files, format)
    check_sources(table.sources)
    layers = declared_layers([int(k) for k in np.unique(table.layer)], num_experts, top_k)
    _check_experts(table, layers)
    _check_doubles(table)
    attempts = [
        (
            int(table.step[table.attempt == number].min()),
            _records(table, layers, np.flatnonzero(table.attempt == number)),
        )
        for number in np.unique(table.attempt)
    ]
    meta = {"framework": f"import {format}", "imported_from": str(files[0])}
    records = write_store(output, layers, table.sources, attempts, meta, counts_only=True)
    return ImportReport(output, records, len(layers), tuple(table.sources))


def read_tables(files: Sequence[Path], format: str) -> Table:
    """All rows of all files, checked one by one.

    Raises:
        UsageError: a column is missing or unknown, a value is no integer or negative; the line is named.
        NoDataError: there is no row.
    """
    import pandas as pd

    frames = [_read_csv(f) if format == "csv" else _read_parquet(f) for f in files]
    for frame, file in zip(frames, files, strict=True):
        _check_columns([str(c) for c in frame.columns], file)
    file_of_row = np.repeat(np.arange(len(files)), [len(frame) for frame in frames])
    lines = np.concatenate([frame.index.to_numpy(dtype=np.int64) for frame in frames])
    if not len(lines):
        raise NoDataError(f"{files[0]} holds no rows", "export the counts again")
    frame = pd.concat(frames, ignore_index=True)

    def integers(column: str) -> Ints:
        values, bad = _integers(frame[column])
        if bad is not None:
            raise UsageError(
                f"{files[file_of_row[bad]]}, line {lines[bad]}: {column} is {str(frame[column].iloc[bad])!r}",
                f"{column} is an integer from 0 to {MAX_COUNT}",
            )
        return values

    step = integers("step")
    codes = {}
    for column, default in (("source", ""), ("phase", "train")):
        cells = frame[column] if column in frame else pd.Series([default] * len(frame))
        code, names = pd.factorize(cells.astype(str).where(cells.notna(), ""))
        codes[column] = (code.astype(np.int64), [str(n) for n in names])
        if "" in names and column in frame:
            bad = int(np.flatnonzero(code == list(names).index(""))[0])
            raise UsageError(f"{files[file_of_row[bad]]}, line {lines[bad]}: {column} is empty", "name it")
    return Table(
        step=step,
        layer=integers("layer"),
        expert=integers("expert"),
        count=integers("count"),
        first_step=integers("first_step") if "first_step" in frame else step,
        attempt=integers("attempt") if "attempt" in frame else np.ones_like(step),
        source=codes["source"][0],
        phase=codes["phase"][0],
        sources=codes["source"][1],
        phases=codes["phase"][1],
        files=list(files),
        file=file_of_row,
        line=lines,
    )


def _read_csv(file: Path) -> pd.DataFrame:
    """Cells by line; lines that are empty altogether are passed over. A column stays text if one cell is.

    Cells are separated by the first of comma, semicolon and tab that the header has.
    """
    import pandas as pd

    options: dict[str, Any] = {"dtype": {"source": str, "phase": str}, "encoding": "utf-8-sig"}
    options |= {"na_filter": False, "skip_blank_lines": False, "index_col": False, "low_memory": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # cells beyond the header's would be lost
            with file.open(encoding="utf-8-sig") as lines:
                header = lines.readline()
            separator = next((mark for mark in ",;\t" if mark in header), ",")
            frame: pd.DataFrame = pd.read_csv(file, sep=separator, skipinitialspace=True, **options)
    except pd.errors.ParserWarning:
        raise UsageError(
            f"{file} has lines with more cells than the header", "quote what holds commas"
        ) from None
    except pd.errors.EmptyDataError:
        raise NoDataError(f"{file} is empty", f"it needs the columns {', '.join(COLUMNS)}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is no UTF-8 text: {error.reason}", "save it as UTF-8") from None
    except (pd.errors.ParserError, ValueError, OSError) as error:
        raise UsageError(f"{file} is no CSV: {str(error).strip()}", "see that line") from None
    frame.columns = [str(column).strip() for column in frame.columns]
    frame.index += 2  # the header is line 1
    frame = frame.fillna("")  # a line with too few cells
    if not any(kind.kind in "iuf" for kind in frame.dtypes):  # an empty line makes all columns text
        frame = frame.loc[(frame != "").any(axis=1)]
    return frame


def _read_parquet(file: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        frame = pd.read_parquet(file)
    except ImportError:
        raise UsageError("reading Parquet needs pyarrow", "pip install 'moe-audit[parquet]'") from None
    except (ValueError, OSError) as error:
        raise UsageError(f"{file} is no Parquet: {str(error).strip()}", "see that it is whole") from None
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    return frame


def _check_columns(found: list[str], file: Path) -> None:
    missing = [c for c in COLUMNS if c not in found]
    if missing:
        raise UsageError(
            f"{file} has no column {', '.join(missing)}; its columns are {', '.join(found)}",
            f"it needs {', '.join(COLUMNS)}",
        )
    unknown = [c for c in found if c not in COLUMNS + OPTIONAL]
    if unknown:
        raise UsageError(
            f"{file} has a column {', '.join(unknown)} that an import would lose",
            f"leave it out; {', '.join(OPTIONAL)} are read beside the five",
        )
    double = [c for c in found if found.count(c) > 1]
    if double:
        raise UsageError(f"{file} has the column {double[0]} twice", "leave one of them out")


def _integers(values: pd.Series[Any]) -> tuple[Ints, int | None]:
    """The values as integers, and the place of the first that is none or is negative."""
    if values.dtype.kind in "iu":
        array = values.to_numpy()
        ok = (array >= 0) & (array <= MAX_COUNT)
    elif values.dtype.kind == "f":
        floats = values.to_numpy()
        ok = np.isfinite(floats) & (floats >= 0) & (floats <= MAX_COUNT) & (floats == np.floor(floats))
        array = np.where(ok, floats, 0)
    else:
        text = values.astype(str).str.strip()
        ok = text.str.fullmatch(r"\+?\d{1,15}(\.0*)?").to_numpy(dtype=bool)
        array = text.where(ok, "0").str.partition(".")[0].to_numpy().astype(np.int64)
        ok = ok & (array <= MAX_COUNT)
    bad = np.flatnonzero(~ok)
    return array.astype(np.int64), int(bad[0]) if len(bad) else None


def _check_experts(table: Table, layers: Sequence[LayerInfo]) -> None:
    numbers = np.array([info.layer for info in layers])
    experts = np.array([info.num_experts for info in layers])
    limit = experts[np.searchsorted(numbers, table.layer)]
    bad = np.flatnonzero(table.expert >= limit)
    if len(bad):
        i = int(bad[0])
        raise UsageError(
            f"{table.where(i)}: expert {table.expert[i]} of layer {table.layer[i]},"
            f" which has {limit[i]} experts",
            "experts are numbered from 0; see --num-experts",
        )
    bad = np.flatnonzero(table.first_step > table.step)
    if len(bad):
        i = int(bad[0])
        raise UsageError(
            f"{table.where(i)}: first_step {table.first_step[i]} after step {table.step[i]}",
            "first_step is the first step of a record, step its last",
        )


def _check_doubles(table: Table) -> None:
    """Raises UsageError where two rows stand for one count: adding them up could count a log twice."""
    keys = (table.expert, table.source, table.layer, table.step, table.phase, table.attempt)
    order = np.lexsort(keys)
    same = np.ones(len(order) - 1, dtype=bool)
    for key in keys:
        same &= key[order][1:] == key[order][:-1]
    pairs = np.flatnonzero(same)
    if len(pairs):
        at = pairs[np.argmin(order[pairs + 1])]
        first, second = int(order[at]), int(order[at + 1])
        raise UsageError(
            f"{table.where(second)}: step {table.step[second]}, layer {table.layer[second]}, source"
            f" {table.sources[table.source[second]]}, expert {table.expert[second]} is there a second time"
            f" ({table.where(first)})",
            "leave one out, or add them up; a resumed run needs a column `attempt`",
        )


def _records(table: Table, layers: Sequence[LayerInfo], rows: Ints) -> Iterator[Record]:
    """One record for each (step, phase) of these rows, by step."""
    dense = DenseCounts(layers, len(table.sources))
    numbers = np.array([info.layer for info in layers])
    place = np.searchsorted(numbers, table.layer[rows])
    experts = np.array([info.num_experts for info in layers])[place]
    cell = dense.offsets[place] + table.source[rows] * experts + table.expert[rows]
    order = np.lexsort((table.phase[rows], table.step[rows]))
    step, phase = table.step[rows][order], table.phase[rows][order]
    cuts = np.flatnonzero((np.diff(step) != 0) | (np.diff(phase) != 0)) + 1
    for group in np.split(order, cuts):
        counts = np.zeros(dense.offsets[-1], dtype=np.int64)
        counts[cell[group]] = table.count[rows[group]]
        i = rows[group[0]]
        yield dense.record(
            counts, table.phases[table.phase[i]], int(table.first_step[rows[group]].min()), int(table.step[i])
        )
