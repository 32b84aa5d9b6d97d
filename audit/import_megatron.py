"""Router traces of Megatron-LM (`--moe-routing-trace-path`): `router_trace_rank*.jsonl`, a line per call.

Each line holds step, block, layer, rank, num_tokens, topk and top_indices [num_tokens][topk]. Layers of the
multi-token-prediction block follow those of the decoder. A step that a rank's file repeats for a layer (its
micro-batches) is summed, and so are the ranks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit.importers import ImportReport, PerLayer, check_once, declared_layers, write_store
from moe_audit.record import MAX_COUNT, LayerInfo, LayerRecord, Record
from moe_audit.run import MAX_EXPERTS
from moe_audit.store import UNLABELLED
from moe_audit.thresholds.errors import NoDataError, UsageError

Place = tuple[str, int, int]  # block, index of the prediction head, layer in the block


@dataclass
class _Sum:
    """What the routers of one layer picked in one step."""

    picks_E: npt.NDArray[np.int64]
    tokens: int = 0
    invalid: int = 0
    calls: int = 0


def import_megatron(
    files: Sequence[Path], num_experts: PerLayer | None, top_k: PerLayer | None, output: Path
) -> ImportReport:
    """See `import_files`."""
    check_once(files)
    traced: dict[Place, int] = {}  # the top-k of each layer
    notes: list[str] = []
    ranks: set[int] = set()
    sums: dict[int, dict[Place, _Sum]] = defaultdict(dict)
    for file in files:
        for line, entry in _entries(file, notes):
            place, step, rank, indices = _parse(entry, file, line)
            if traced.setdefault(place, indices.shape[1]) != indices.shape[1]:
                raise UsageError(
                    f"{file}, line {line}: top-k {indices.shape[1]}, before it was {traced[place]}",
                    "import traces of one model at a time",
                )
            ranks.add(rank)
            _add(sums[step], place, indices)
    if not sums:
        raise NoDataError(f"{files[0]} holds no router call", "trace at least one step")
    places = sorted(traced)  # decoder before mtp
    numbers = _numbers(places)
    names = {numbers[place]: _name(place) for place in places}
    layers = declared_layers(
        sorted(names),
        num_experts,
        {numbers[p]: k for p, k in traced.items()} if top_k is None else top_k,
        names,
    )
    for place in places:
        info = next(info for info in layers if info.layer == numbers[place])
        if info.top_k != traced[place]:
            raise UsageError(
                f"top-k {info.top_k} for {info.name}, traced is {traced[place]}", "leave --top-k out"
            )
    meta = {"framework": "Megatron-LM trace", "imported_from": str(files[0]), "world_size": len(ranks)}
    records = _records(sums, numbers, layers, len(ranks))
    count = write_store(output, layers, (UNLABELLED,), [(min(sums), records)], meta, counts_only=True)
    return ImportReport(output, count, len(layers), (UNLABELLED,), tuple(notes))


def _entries(file: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    """Line number and content of each line; a last line that was cut off is noted and passed over."""
    with file.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                yield number, json.loads(text)
            except ValueError as error:
                if not text.endswith("\n"):
                    notes.append(f"{file}: line {number} is cut off and left out")
                    return
                raise UsageError(
                    f"{file}, line {number} is no JSON: {error}", "name router_trace files"
                ) from None


def _parse(entry: Any, file: Path, line: int) -> tuple[Place, int, int, npt.NDArray[np.int64]]:
    try:
        place = (str(entry.get("block", "decoder")), int(entry.get("mtp_idx", 0)), int(entry["layer"]))
        step, rank = int(entry["step"]), int(entry.get("rank", 0))
        if not (0 <= step <= MAX_COUNT and 0 <= place[2] <= MAX_COUNT):
            raise ValueError(f"step {step}, layer {place[2]}")
        indices = np.asarray(entry["top_indices"])
        if indices.size == 0:
            indices = np.zeros((0, int(entry["topk"])), dtype=np.int64)
        if indices.dtype.kind not in "iu":
            raise ValueError(f"top_indices are {indices.dtype}")
        if indices.ndim != 2 or len(indices) != int(entry.get("num_tokens", len(indices))):
            raise ValueError(f"top_indices {list(indices.shape)} for {entry.get('num_tokens')} tokens")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{file}, line {line} is no router call: {error!r}", "it needs step, layer and top_indices"
        ) from None
    return place, step, rank, indices


def _add(step: dict[Place, _Sum], place: Place, indices: npt.NDArray[np.int64]) -> None:
    picks = np.minimum(
        indices[indices >= 0], MAX_EXPERTS
    )  # which is no expert either: a sentinel may be huge
    picks_E = np.bincount(picks)
    total = step.setdefault(place, _Sum(np.zeros(0, dtype=np.int64)))
    size = max(len(total.picks_E), len(picks_E))
    total.picks_E = np.pad(total.picks_E, (0, size - len(total.picks_E)))
    total.picks_E[: len(picks_E)] += picks_E
    total.tokens += len(indices)
    total.invalid += indices.size - picks.size
    total.calls += 1


def _numbers(places: Sequence[Place]) -> dict[Place, int]:
    """Layer numbers: those of the decoder as they are, the others after the last of them."""
    decoder = {place: place[2] for place in places if place[0] == "decoder"}
    first = max(decoder.values(), default=-1) + 1
    others = [place for place in places if place not in decoder]
    return decoder | {place: first + i for i, place in enumerate(others)}


def _name(place: Place) -> str:
    block, head, layer = place
    return f"decoder.layers.{layer}" if block == "decoder" else f"{block}.{head}.layers.{layer}"


def _records(
    sums: dict[int, dict[Place, _Sum]], numbers: dict[Place, int], layers: Sequence[LayerInfo], ranks: int
) -> Iterator[Record]:
    by_number = {numbers[place]: place for place in numbers}
    for step in sorted(sums):
        out = {}
        for info in layers:
            total = sums[step].get(by_number[info.layer])
            if total is None:
                continue  # a layer that did not fire is a fault of the run, not a zero
            # An id that is no expert is a sentinel.
            counts_E = np.zeros(info.num_experts, dtype=np.int64)
            known = total.picks_E[: info.num_experts]
            counts_E[: len(known)] = known
            out[info.layer] = LayerRecord(
                counts_E[None],
                tokens_S=np.array([total.tokens]),
                invalid=total.invalid + int(total.picks_E[info.num_experts :].sum()),
                calls=total.calls,
            )
        tokens = max(total.tokens for total in sums[step].values())
        yield Record("train", step, step, out, tokens=tokens, ranks=ranks)
