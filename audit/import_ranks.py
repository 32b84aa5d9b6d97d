"""Joins the files of ranks (`Recorder.attach(..., mode="per_rank")`) into one store.

Ranks that make different numbers of micro-batches end their records in different steps. A joined record then
reaches to the next step in which those of all ranks end.

Shapes: S sources, E experts of a layer, K ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from moe_audit.importers import ImportReport, write_store
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.run import RecordInfo, Run, open_run
from moe_audit.store import UNLABELLED
from moe_audit.thresholds.errors import NoDataError, UsageError

Group = list[tuple[Run, RecordInfo]]  # what makes one joined record: of each rank those of the same steps


def import_ranks(files: Sequence[Path], output: Path) -> ImportReport:
    """See `import_files`. Only live records are joined; one that a rank lacks is kept with fewer `ranks`.

    Raises:
        UsageError: ranks are missing or there twice, or do not belong to one run.
        NoDataError: there is no record.
    """
    with ExitStack() as stack:
        runs = [stack.enter_context(open_run(file)) for file in files]
        _check_ranks(runs)
        layers, sources = _merged_layers(runs), _merged_sources(runs)
        groups: list[Group] = []
        for phase in {phase for run in runs for phase in run.phases}:
            opened = [stack.enter_context(open_run(file, phase)) for file in files]
            groups += _groups([(run, record) for run in opened for record in run.records])
        groups.sort(key=lambda group: (*_steps(group)[::-1], group[0][1].phase))  # as they are written
        if not groups:
            raise NoDataError(f"{files[0]} and the files of the other ranks hold no record", "record a flush")
        joined = (_joined(group, layers, sources) for group in groups)
        meta = {k: v for k, v in runs[0].meta.items() if k not in ("rank", "created", "journal_mode")}
        attempt = (min(_steps(group)[0] for group in groups), joined)
        count = write_store(output, layers, sources, [attempt], meta | {"mode": "ranks"}, counts_only=False)
        partial = sum(_ranks(group) < len(runs) for group in groups)
        notes = [f"{partial} of {count} records are not in the file of every rank"] if partial else []
        return ImportReport(output, count, len(layers), tuple(sources), tuple(notes))


def _check_ranks(runs: Sequence[Run]) -> None:
    seen: dict[int, Path] = {}
    sizes = {run.meta.get("world_size") for run in runs}
    for run in runs:
        rank = run.meta.get("rank")
        if not isinstance(rank, int) or not isinstance(run.meta.get("world_size"), int):
            raise UsageError(f"{run.path} is not the file of one rank", 'record with mode="per_rank"')
        if rank in seen:
            raise UsageError(f"rank {rank} is there twice: {seen[rank]} and {run.path}", "name each once")
        seen[rank] = run.path
    if len(sizes) > 1:
        listed = ", ".join(f"{run.path} of {run.meta['world_size']}" for run in runs)
        raise UsageError(f"the files are of runs with different numbers of ranks: {listed}", "name one run's")
    size = int(runs[0].meta["world_size"])
    missing = sorted(set(range(size)) - set(seen))
    if missing:
        which = ", ".join(map(str, missing))
        raise UsageError(f"rank {which} of {size} is missing", "name the files of all ranks")


def _merged_layers(runs: Sequence[Run]) -> list[LayerInfo]:
    merged: dict[int, LayerInfo] = {}
    for run in runs:
        for info in run.layers:
            if merged.setdefault(info.layer, info) != info:
                raise UsageError(
                    f"layer {info.layer} of {run.path} is not that of {runs[0].path}",
                    "name the files of one run",
                )
    return [merged[layer] for layer in sorted(merged)]


def _merged_sources(runs: Sequence[Run]) -> list[str]:
    """All sources in the order of the first rank; `unlabelled` stays the last."""
    names = list(dict.fromkeys(name for run in runs for name in run.sources))
    return [n for n in names if n != UNLABELLED] + [n for n in names if n == UNLABELLED]


def _groups(found: Group) -> list[Group]:
    """The records of all ranks, those together whose steps overlap."""
    groups: list[Group] = []
    for run, record in sorted(found, key=lambda one: one[1].first_step):
        if groups and record.first_step <= _steps(groups[-1])[1]:
            groups[-1].append((run, record))
        else:
            groups.append([(run, record)])
    return groups


def _steps(group: Group) -> tuple[int, int]:
    """First and last step."""
    return min(r.first_step for _, r in group), max(r.last_step for _, r in group)


def _ranks(group: Group) -> int:
    """The ranks that have all of these steps."""
    covered: dict[Path, int] = {}
    for run, record in group:
        covered[run.path] = covered.get(run.path, 0) + record.last_step - record.first_step + 1
    return sum(steps == max(covered.values()) for steps in covered.values())


def _joined(group: Group, layers: Sequence[LayerInfo], sources: Sequence[str]) -> Record:
    """One record, summed over the ranks; with the events that belong to it."""
    infos = [info for _, info in group]
    losses = [(info.loss, info.last_step - info.first_step + 1) for info in infos if info.loss is not None]
    parts: dict[int, LayerRecord] = {}
    for layer in layers:
        rows = [
            _with_sources(part, run.sources, sources)
            for run, info in group
            if layer in run.layers and (part := run.layer_record(info.record, layer.layer)) is not None
        ]
        if rows:
            parts[layer.layer] = _sum_layers(rows)
    first_step, last_step = _steps(group)
    return Record(
        infos[0].phase,
        first_step,
        last_step,
        parts,
        microbatches=_total([info.microbatches for info in infos]),
        tokens=_total([info.tokens for info in infos]),
        excluded_tokens=_total([info.excluded_tokens for info in infos]),
        ranks=_ranks(group),
        lr=infos[0].lr,
        router_lr=infos[0].router_lr,
        loss=sum(x * steps for x, steps in losses) / sum(steps for _, steps in losses) if losses else None,
        events=[
            (last_step, event.kind, event.detail | {"rank": run.meta["rank"]})
            for run, info in group
            for event in run.events
            if event.detail.get("record") == info.record
        ],
    )


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _with_sources(part: LayerRecord, own: Sequence[str], sources: Sequence[str]) -> LayerRecord:
    """The same with a row for each of `sources`."""
    rows = [sources.index(name) for name in own]

    def spread(values: Any) -> Any:
        if values is None:
            return None
        out = np.zeros((len(sources), *values.shape[1:]), values.dtype)
        out[rows] = values
        return out

    part.counts_SE, part.tokens_S = spread(part.counts_SE), spread(part.tokens_S)
    part.prob_sum_SE, part.top1_S2 = spread(part.prob_sum_SE), spread(part.top1_S2)
    return part


def _sum_layers(parts: Sequence[LayerRecord]) -> LayerRecord:
    """Sums over the ranks; the peak is the largest, since capacity is counted on each rank."""

    def total(name: str) -> Any:
        arrays = [getattr(part, name) for part in parts]
        return None if any(a is None for a in arrays) else np.sum(arrays, axis=0)

    peaks: list[Any] = [part.peak_E for part in parts]
    mean_E, std_E = _pooled(parts)
    return LayerRecord(
        counts_SE=total("counts_SE"),
        tokens_S=total("tokens_S"),
        prob_sum_SE=total("prob_sum_SE"),
        top1_S2=total("top1_S2"),
        invalid=sum(part.invalid for part in parts),
        peak_E=None if any(p is None for p in peaks) else np.max(peaks, axis=0),
        sq_over_t_E=total("sq_over_t_E"),
        dropped_E=total("dropped_E"),
        logit_mean_E=mean_E,
        logit_std_E=std_E,
        calls=_total([part.calls for part in parts]),
    )


def _pooled(parts: Sequence[LayerRecord]) -> tuple[Any, Any]:
    """Mean and standard deviation of the logits over the tokens of all ranks: law of total variance."""
    columns: list[list[Any]] = [
        [p.tokens_S for p in parts], [p.logit_mean_E for p in parts], [p.logit_std_E for p in parts]
    ]  # fmt: skip
    if any(x is None for column in columns for x in column):
        return None, None
    share_K1 = np.array([[tokens.sum()] for tokens in columns[0]], dtype=np.float64)
    share_K1 /= max(share_K1.sum(), 1.0)
    mean_KE, std_KE = np.stack(columns[1]), np.stack(columns[2])
    mean_E = (share_K1 * mean_KE).sum(0)
    square_E = (share_K1 * (std_KE**2 + mean_KE**2)).sum(0)
    return mean_E, np.sqrt(np.maximum(square_E - mean_E**2, 0.0))
