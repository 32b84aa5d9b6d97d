"""Ways in without the recorder: tables of counts, and what the importers of all formats share.

The formats with tensors (sglang, hf) are in `moe_audit.hooks.importers`: they need torch.
Shapes: S sources, E experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.run import MAX_EXPERTS
from moe_audit.store import Store
from moe_audit.thresholds.errors import UsageError

FORMATS = ("csv", "parquet", "megatron", "ranks", "spill")
TENSOR_FORMATS = ("sglang", "hf")
RECORDS_A_TRANSACTION = 256

PerLayer = int | Mapping[int, int]


@dataclass(frozen=True)
class ImportReport:
    """What an import has written. `notes`: what the reader of the run should know about it."""

    output: Path
    records: int
    layers: int
    sources: tuple[str, ...]
    notes: tuple[str, ...] = ()


def import_files(
    paths: Sequence[str | Path],
    format: str,
    *,
    num_experts: PerLayer | None = None,
    top_k: PerLayer | None = None,
    output: str | Path,
) -> ImportReport:
    """Makes a store from counts that something else has recorded.

    Args:
        paths: The files; a folder stands for the files of that format in it.
        format: One of `FORMATS`; for one of `TENSOR_FORMATS` call `moe_audit.hooks.importers.import_tensors`,
            which has the same arguments.
        num_experts, top_k: One number, or one for each layer. Experts that were never hit leave no row, so
            their number has to be said where the format does not hold it; top_k may be left out.
        output: The store to be made; for `spill` the store that the records belong to.

    Raises:
        UsageError: no such file or format, a number that is missing, a row that cannot be right, `output`
            exists.
    """
    files = [Path(p) for p in paths]
    if not files:
        raise UsageError("no file to import", "name at least one")
    for file in files:
        if not file.exists():
            raise UsageError(f"{file} does not exist", "name the files to import")
    output = Path(output)
    if format in ("csv", "parquet"):
        from moe_audit.import_table import import_table

        return import_table(expand(files, f"*.{format}"), format, num_experts, top_k, output)
    if format == "megatron":
        from moe_audit.import_megatron import import_megatron

        return import_megatron(expand(files, "*.jsonl"), num_experts, top_k, output)
    if format == "ranks":
        from moe_audit.import_ranks import import_ranks

        return import_ranks(expand(files, "*.rank*.db"), output)
    if format == "spill":
        return import_spill(files, output)
    raise UsageError(f"no format {format!r}", f"formats are {', '.join(FORMATS + TENSOR_FORMATS)}")


def import_spill(files: Sequence[Path], output: Path) -> ImportReport:
    """Puts the records that wait in the spill file of a store into it.

    Raises:
        UsageError: the file does not belong to `output`.
    """
    from moe_audit.spill import absorb, spill_paths

    for file in files:
        if file.resolve() not in [path.resolve() for path in spill_paths(output)]:
            raise UsageError(f"{file} is not the spill file of {output}", f"that is {spill_paths(output)[0]}")
    store = Store.open(output)
    try:
        records = absorb(store)
        return ImportReport(output, records, len(store.layer_shapes()), tuple(store.source_names()))
    finally:
        store.close()


def parse_per_layer(text: str, option: str) -> PerLayer:
    """`64`, or `0:8,1-3:64`: one number, or one for each layer or range of layers.

    Raises:
        UsageError: it is neither.
    """
    if re.fullmatch(r"\d+", text):
        return int(text)
    out: dict[int, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?:(\d+)", part.strip())
        if match is None:
            raise UsageError(f"{option} {text!r}", "give one number, or layer:number pairs as in 0:8,1-3:64")
        first, last, number = match.groups()
        out.update(dict.fromkeys(range(int(first), int(last or first) + 1), int(number)))
    return out


def declared_layers(
    layers: Sequence[int],
    num_experts: PerLayer | None,
    top_k: PerLayer | None,
    names: Mapping[int, str] | None = None,
) -> list[LayerInfo]:
    """The layers with the declared numbers of experts and picks.

    Raises:
        UsageError: the number of experts is not given for a layer, or the numbers do not go together.
    """
    out = []
    for layer in layers:
        experts = num_experts.get(layer) if isinstance(num_experts, Mapping) else num_experts
        picks = top_k.get(layer) if isinstance(top_k, Mapping) else top_k
        if experts is None:
            raise UsageError(
                f"the number of experts of layer {layer} is not given",
                "add --num-experts: an expert that was never hit leaves no row behind",
            )
        if experts < 1 or (picks is not None and not 1 <= picks <= experts):
            raise UsageError(
                f"layer {layer}: {experts} experts, top-k {picks}", "top-k is 1 to the number of experts"
            )
        if experts > MAX_EXPERTS:
            raise UsageError(
                f"layer {layer}: {experts} experts", f"a store holds up to {MAX_EXPERTS} a layer"
            )
        out.append(LayerInfo(layer, (names or {}).get(layer, f"layers.{layer}"), experts, picks))
    return out


def expand(paths: Sequence[Path], pattern: str) -> list[Path]:
    """The files themselves, and of folders those that match, in natural order of their names.

    Raises:
        UsageError: a folder holds none.
    """
    out: list[Path] = []
    for path in paths:
        inside = sorted(path.glob(pattern), key=natural_key) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"{path} holds no {pattern}", "name the files themselves")
        out += inside
    return out


def check_once(files: Sequence[Path]) -> None:
    """For formats whose files are added up.

    Raises:
        UsageError: a file is there twice.
    """
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise UsageError(f"{file} is named twice", "name each file once")
        seen.add(file.resolve())


def natural_key(path: Path) -> list[tuple[int, str]]:
    """Sorts step2 before step10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path.name)]


def write_store(
    output: Path,
    layers: Sequence[LayerInfo],
    sources: Sequence[str],
    attempts: Iterable[tuple[int, Iterator[Record]]],
    meta: Mapping[str, object],
    *,
    counts_only: bool,
) -> int:
    """Writes the records of each attempt (start step, records), or nothing. Returns how many."""
    store = Store.create(output, layers, sources, meta, counts_only=counts_only)
    written = 0
    try:
        for start_step, records in attempts:
            store.begin_attempt(start_step)
            while batch := list(islice(records, RECORDS_A_TRANSACTION)):
                store.extend(batch)
                written += len(batch)
    except BaseException:
        store.close()
        with suppress(OSError):
            output.unlink()
        raise
    store.close()
    return written


class DenseCounts:
    """Sums picks of all layers in one vector, and makes records of it."""

    def __init__(self, layers: Sequence[LayerInfo], num_sources: int) -> None:
        self.layers = layers
        self.num_sources = num_sources
        sizes = [num_sources * info.num_experts for info in layers]
        self.offsets = np.concatenate([[0], np.cumsum(sizes)])

    def record(
        self, counts: np.ndarray[tuple[int], np.dtype[np.int64]], phase: str, first: int, last: int
    ) -> Record:
        """One record from the counts of all layers, [sum of S*E]; what is not in it is 0."""
        return Record(
            phase=phase,
            first_step=first,
            last_step=last,
            layers={
                info.layer: LayerRecord(part.reshape(self.num_sources, info.num_experts))
                for info, part in zip(self.layers, np.split(counts, self.offsets[1:-1]), strict=True)
            },
        )
