"""Importers that need torch: expert-distribution dumps of SGLang, router logits of Hugging Face models.

Files are loaded with weights only: nothing in them is executed.
Shapes: T tokens, S sources, E experts, K picks a token, L layers, P physical experts (replicas count apart).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_audit.hooks.adapters.form import is_integer
from moe_audit.importers import (
    TENSOR_FORMATS,
    ImportReport,
    PerLayer,
    check_once,
    declared_layers,
    expand,
    write_store,
)
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.store import UNLABELLED
from moe_audit.thresholds.errors import NoDataError, UsageError

Steps = Mapping[int, Tensor]  # step -> counts [L, E]


def import_tensors(
    paths: Sequence[str | Path],
    format: str,
    *,
    num_experts: PerLayer | None = None,
    top_k: PerLayer | None = None,
    output: str | Path,
) -> ImportReport:
    """As `moe_audit.importers.import_files`, for `sglang` and `hf`.

    - `sglang`: `expert_distribution_recorder_*.pt` of the modes stat, per_pass and per_token; one record per
      forward pass, ranks summed, replicas of an expert added to it.
    - `hf`: files saved by `torch.save`, one record each, in the order given: the `router_logits` that a model
      returns (a tuple of [T, E] or [B, S, E], one per layer), or a dict of `router_logits` and, if wanted,
      `attention_mask` (1 = counted) and `source_ids`, both with a value per token or per sequence. The picks
      are the top-k of the logits: right for a router without bias and groups.

    Raises:
        UsageError: a file is no such dump or cannot be loaded with weights only, numbers do not go together.
        NoDataError: there is no count in the files.
    """
    files = [Path(p) for p in paths]
    for file in files:
        if not file.exists():
            raise UsageError(f"{file} does not exist", "name the files to import")
    files = expand(files, "*.pt")
    check_once(files)
    if format == "sglang":
        return _import_sglang(files, num_experts, top_k, Path(output))
    if format == "hf":
        return _import_logits(files, num_experts, top_k, Path(output))
    raise UsageError(f"no format {format!r}", f"formats with tensors are {', '.join(TENSOR_FORMATS)}")


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no pickle can fail in any way
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{file} cannot be loaded with weights only: {reason}",
            "it must hold tensors, numbers and text only",
        ) from None


# -- SGLang


def _import_sglang(
    files: Sequence[Path], num_experts: PerLayer | None, top_k: PerLayer | None, output: Path
) -> ImportReport:
    steps: dict[int, Tensor] = {}
    for file in files:
        dump = _load(file)
        if isinstance(dump, dict) and "logical_count" in dump:
            for counts_LE in _passes(dump["logical_count"], file):
                steps[len(steps) + 1] = counts_LE
        elif isinstance(dump, dict) and "records" in dump:
            for step, counts_LE in _detailed(dump, file, num_experts).items():
                steps[step] = steps[step] + counts_LE if step in steps else counts_LE
        else:
            raise UsageError(f"{file} is no expert-distribution dump", "it holds logical_count or records")
        sizes = {tuple(counts_LE.shape) for counts_LE in steps.values()}
        if len(sizes) > 1:
            listed = " and ".join(map(str, sorted(sizes)))
            raise UsageError(f"{file}: counts [layers, experts] of {listed}", "import dumps of one model")
    fired = [
        step for step in sorted(steps) if steps[step].any()
    ]  # a ring buffer that was not full has rows of 0
    if not fired:
        raise NoDataError(f"{files[0]} counts nothing", "record some forward passes")
    total_LE = torch.stack([steps[step] for step in fired]).sum(0)
    numbers = torch.nonzero(total_LE.sum(1)).flatten().tolist()  # dense layers count nothing
    experts = total_LE.shape[1]
    layers = declared_layers(numbers, experts if num_experts is None else num_experts, top_k)
    wrong = next((info for info in layers if info.num_experts != experts), None)
    if wrong is not None:
        raise UsageError(
            f"{wrong.num_experts} experts declared, the dump has {experts}", "leave --num-experts out"
        )
    records = (
        Record(
            "train",
            step,
            step,
            {info.layer: LayerRecord(steps[step][info.layer].numpy()[None]) for info in layers},
        )
        for step in fired
    )
    meta = {"framework": "SGLang expert distribution", "imported_from": str(files[0])}
    count = write_store(output, layers, (UNLABELLED,), [(fired[0], records)], meta, counts_only=True)
    left_out = [n for n in range(total_LE.shape[0]) if n not in numbers]
    notes = [f"{len(left_out)} layers count nothing and are left out"] if left_out else []
    return ImportReport(output, count, len(layers), (UNLABELLED,), tuple(notes))


def _passes(counts: Any, file: Path) -> Iterator[Tensor]:
    """The passes of a stat dump, int64 [L, E] each."""
    if not isinstance(counts, Tensor) or counts.ndim not in (2, 3) or not is_integer(counts):
        raise UsageError(
            f"{file}: logical_count is no integer tensor [passes, layers, experts]", "see its mode"
        )
    yield from (counts if counts.ndim == 3 else counts[None]).long()


def _detailed(dump: dict[str, Any], file: Path, num_experts: PerLayer | None) -> dict[int, Tensor]:
    """Counts [L, E] of each forward pass of a per_pass or per_token dump."""
    logical_LP = dump.get("last_physical_to_logical_map")
    if not isinstance(logical_LP, Tensor) or logical_LP.ndim != 2:
        raise UsageError(
            f"{file} has no last_physical_to_logical_map", "replicas cannot be told apart without"
        )
    experts = num_experts if isinstance(num_experts, int) else int(logical_LP.max()) + 1
    out: dict[int, Tensor] = {}
    if not isinstance(dump["records"], list | tuple):
        raise UsageError(f"{file}: records are no list", "see its mode")
    for entry in dump["records"]:
        try:
            step = int(entry["forward_pass_id"])
            if "global_physical_count" in entry:
                physical_LP = _integers(entry["global_physical_count"])
            else:
                physical_LP = _count_ids(_integers(entry["topk_ids_of_layer"]), logical_LP.shape[1])
            if physical_LP.shape != logical_LP.shape:
                raise ValueError(f"{tuple(physical_LP.shape)} counts, a map of {tuple(logical_LP.shape)}")
            if physical_LP[logical_LP < 0].any():
                raise ValueError("picks of a physical expert that the map leaves empty")
            counts_LE = torch.zeros(logical_LP.shape[0], experts, dtype=torch.int64)
            counts_LE.scatter_add_(1, logical_LP.long().clamp_min(0), physical_LP)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise UsageError(f"{file}: a record cannot be read: {error!r}", "see its mode") from None
        out[step] = out[step] + counts_LE if step in out else counts_LE
    return out


def _integers(values: Any) -> Tensor:
    """int64, of integers only.

    Raises:
        ValueError: they are something else.
    """
    tensor = torch.as_tensor(values)
    if not is_integer(tensor):
        raise ValueError(f"{tensor.dtype} where integers belong")
    return tensor.long()


def _count_ids(ids_LTK: Tensor, num_physical: int) -> Tensor:
    """Picks per physical expert [L, P]; -1 fills up."""
    flat = ids_LTK.flatten(1)
    counts = torch.zeros(len(flat), num_physical + 1, dtype=torch.int64)
    counts.scatter_add_(1, torch.where(flat >= 0, flat, num_physical), torch.ones_like(flat))
    return counts[:, :num_physical]


# -- router logits


def _import_logits(
    files: Sequence[Path], num_experts: PerLayer | None, top_k: PerLayer | None, output: Path
) -> ImportReport:
    if top_k is None:
        raise UsageError("logits do not say how many experts a token picks", "add --top-k")
    first = _logits(_load(files[0]), files[0])
    sizes = {layer: logits.shape[-1] for layer, logits in first.items()}
    layers = declared_layers(sorted(first), sizes if num_experts is None else num_experts, top_k)
    for info in layers:
        if info.num_experts != sizes[info.layer]:
            raise UsageError(
                f"layer {info.layer}: {info.num_experts} experts declared, {sizes[info.layer]} logits",
                "leave --num-experts out",
            )
    named = max(_num_sources(_load(file), file) for file in files)
    sources = [f"source {i}" for i in range(named)] if named else [UNLABELLED]
    records = (
        _logit_record(_load(file), file, step, layers, len(sources)) for step, file in enumerate(files, 1)
    )
    meta = {"framework": "router logits", "imported_from": str(files[0])}
    count = write_store(output, layers, sources, [(1, records)], meta, counts_only=False)
    notes = ("picks are the top-k of the logits: not those of a router with bias or groups",)
    return ImportReport(output, count, len(layers), tuple(sources), notes)


def _logits(content: Any, file: Path) -> dict[int, Tensor]:
    """Logits [..., E] by layer; blocks without a router hold none."""
    found = content.get("router_logits") if isinstance(content, dict) else content
    if isinstance(found, Tensor) and found.ndim >= 3:
        found = list(found)
    if not isinstance(found, list | tuple):
        raise UsageError(f"{file} holds no router_logits", "save the tuple that the model returns")
    logits = {i: x.detach() for i, x in enumerate(found) if isinstance(x, Tensor) and x.numel()}
    if not logits or any(x.ndim < 2 or not x.is_floating_point() for x in logits.values()):
        raise UsageError(
            f"{file} holds no router_logits [tokens, experts]", "save the tuple the model returns"
        )
    return logits


def _per_token(content: Any, key: str, tokens: int, file: Path) -> Tensor | None:
    """`attention_mask` or `source_ids`, one value a token [T]; a value per sequence is repeated."""
    values = content.get(key) if isinstance(content, dict) else None
    if values is None:
        return None
    values = torch.as_tensor(values).flatten()
    if not len(values) or tokens % len(values):
        raise UsageError(f"{file}: {len(values)} values of {key} for {tokens} tokens", "give one a token")
    return values.repeat_interleave(tokens // len(values))


def _num_sources(content: Any, file: Path) -> int:
    ids = content.get("source_ids") if isinstance(content, dict) else None
    if ids is None:
        return 0
    try:
        ids = _integers(ids)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{file}: source_ids are no integers: {error}", "number the sources") from None
    if not ids.numel() or int(ids.min()) < 0:
        raise UsageError(f"{file}: source_ids are not integers from 0", "number the sources")
    return int(ids.max()) + 1


def _logit_record(
    content: Any, file: Path, step: int, layers: Sequence[LayerInfo], num_sources: int
) -> Record:
    logits = _logits(content, file)
    out, tokens, excluded = {}, 0, 0
    sizes = {info.layer: info.num_experts for info in layers}
    differ = {number for number, _ in sizes.items() ^ {(i, x.shape[-1]) for i, x in logits.items()}}
    if differ:
        raise UsageError(
            f"{file}: layer {min(differ)} is not as in the first file", "save one model's logits"
        )
    for info in layers:
        logits_TE = logits[info.layer].reshape(-1, info.num_experts).float()
        mask_T = _per_token(content, "attention_mask", len(logits_TE), file)
        source_T = _per_token(content, "source_ids", len(logits_TE), file)
        if mask_T is not None and bool((mask_T < 0).any()):
            raise UsageError(
                f"{file}: attention_mask has negative values", "1 is a token that counts, 0 none"
            )
        keep_T = torch.ones(len(logits_TE), dtype=torch.bool) if mask_T is None else mask_T > 0
        tokens, excluded = int(keep_T.sum()), int((~keep_T).sum())
        source_T = torch.zeros(len(logits_TE), dtype=torch.int64) if source_T is None else source_T.long()
        out[info.layer] = _count_logits(logits_TE[keep_T], source_T[keep_T], num_sources, info.top_k or 1)
    return Record("train", step, step, out, tokens=tokens, excluded_tokens=excluded, microbatches=1)


def _count_logits(logits_TE: Tensor, source_T: Tensor, S: int, K: int) -> LayerRecord:
    """What a softmax router picks for these logits; the picks of a token with NaN or infinity are invalid."""
    E = logits_TE.shape[1]
    good_T = ~(logits_TE.isnan() | logits_TE.isposinf()).any(1)
    picks_TK = logits_TE[good_T].topk(K, dim=1).indices
    cell = (source_T[good_T, None] * E + picks_TK).flatten()
    probs_TE = logits_TE[good_T].softmax(1)
    prob_SE = torch.zeros(S, E).index_add_(0, source_T[good_T], probs_TE)
    best_T = probs_TE.amax(1)
    top1_S2 = torch.zeros(S, 2).index_add_(0, source_T[good_T], torch.stack([best_T, best_T**2], 1))
    return LayerRecord(
        torch.bincount(cell, minlength=S * E).reshape(S, E).numpy(),
        tokens_S=torch.bincount(source_T, minlength=S).numpy(),
        prob_sum_SE=prob_SE.numpy(),
        top1_S2=top1_S2.numpy(),
        invalid=K * int((~good_T).sum()),
        calls=1,
    )
