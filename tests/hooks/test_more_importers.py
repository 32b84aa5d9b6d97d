"""Files that are nearly right: what they mean is read, the rest is refused; nothing is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from moe_audit.hooks.importers import import_tensors
from moe_audit.importers import import_files
from moe_audit.run import open_run
from moe_audit.thresholds.errors import UsageError

LOGITS_TE = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
MAP_LP = torch.tensor([[0, 1, 2, 3, 0]])  # expert 0 has a replica


def counts(path: Path) -> list[list[int]]:
    run = open_run(path)
    return run.counts(run.layers[0].layer).sum(0).tolist()


def tensors(folder: Path, format: str, *contents: Any, **options: Any) -> Path:
    files = [folder / f"{i}.pt" for i in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        torch.save(content, file)
    import_tensors(files, format, output=folder / "routing.db", **options)
    return folder / "routing.db"


def test_logits_saved_while_they_need_gradients(tmp_path: Path) -> None:
    weight = torch.ones((), requires_grad=True)
    assert counts(tensors(tmp_path, "hf", (LOGITS_TE * weight,), top_k=1)) == [[1, 0, 0, 1]]


def test_infinite_logits_are_invalid_unless_they_mask(tmp_path: Path) -> None:
    logits = torch.cat([LOGITS_TE, LOGITS_TE])
    logits[0, 1], logits[1, 3] = torch.inf, -torch.inf
    path = tensors(tmp_path, "hf", (logits,), top_k=1)
    layer = open_run(path).layer_record(1, 0)
    assert layer.counts_SE.tolist() == [[1, 0, 1, 1]] and layer.invalid == 1
    assert layer.prob_sum_SE.sum() == pytest.approx(3)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ([(LOGITS_TE,), (LOGITS_TE, LOGITS_TE)], "layer 1 is not as in the first file"),
        ([(LOGITS_TE,), (LOGITS_TE[:, :3],)], "layer 0 is not as in the first file"),
        ([{"router_logits": (LOGITS_TE,), "attention_mask": [0.0, -1e9]}], "negative values"),
        ([{"router_logits": (LOGITS_TE,), "source_ids": ["a", "b"]}], "no integers"),
        ([{"router_logits": (LOGITS_TE,), "source_ids": torch.tensor([True, False])}], "no integers"),
    ],
)
def test_logits_that_do_not_go_together(tmp_path: Path, contents: list[Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tensors(tmp_path, "hf", *contents, top_k=1)
    assert not (tmp_path / "routing.db").exists()


def detailed(**record: Any) -> dict[str, Any]:
    return {"records": [{"forward_pass_id": 1} | record], "last_physical_to_logical_map": MAP_LP}


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ([{"logical_count": torch.ones(1, 2, 4, dtype=torch.bool)}], "no integer tensor"),
        (
            [{"logical_count": torch.ones(1, 2, e, dtype=torch.int64)} for e in (4, 5)],
            r"\(2, 4\) and \(2, 5\)",
        ),
        ([detailed() | {"records": 3}], "no list"),
        ([detailed(global_physical_count=torch.ones(1, 10, dtype=torch.int64))], r"map of \(1, 5\)"),
        ([detailed(global_physical_count=torch.full((1, 5), 1.5))], "where integers belong"),
        ([detailed(topk_ids_of_layer=torch.ones(1, 2, 2))], "where integers belong"),
        (
            [
                detailed(global_physical_count=torch.ones(1, 5, dtype=torch.int64))
                | {"last_physical_to_logical_map": torch.tensor([[0, 1, 2, 3, -1]])}
            ],
            "leaves empty",
        ),
    ],
)
def test_expert_distributions_that_cannot_be_right(tmp_path: Path, contents: list[Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tensors(tmp_path, "sglang", *contents)


CALL = {"step": 1, "layer": 0, "rank": 0, "topk": 2, "top_indices": [[0, 1], [2, 3]]}


def trace(folder: Path, *changes: dict[str, Any]) -> Path:
    file = folder / "router_trace_rank0.jsonl"
    file.write_text("".join(json.dumps(CALL | change) + "\n" for change in changes))
    import_files([file], "megatron", num_experts=4, output=folder / "routing.db")
    return folder / "routing.db"


def test_a_huge_sentinel_id_is_invalid_and_asks_for_no_memory(tmp_path: Path) -> None:
    path = trace(tmp_path, {"top_indices": [[0, 10**15], [-1, 3]]})
    assert counts(path) == [[1, 0, 0, 1]] and open_run(path).layer_record(1, 0).invalid == 2


@pytest.mark.parametrize(
    "change",
    [
        {"rank": None},
        {"rank": "x"},
        {"top_indices": [[0.5, 1.0], [2, 3]]},
        {"top_indices": [["0", "1"], ["2", "3"]]},
        {"layer": -1},
        {"step": -1},
        {"step": 10**30},
    ],
)
def test_a_call_that_cannot_be_right_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="line 2 is no router call"):
        trace(tmp_path, {}, change)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_cells_may_be_separated_as_a_spreadsheet_does(tmp_path: Path, mark: str) -> None:
    lines = ["step,layer,source,expert,count", "1,0,a,1,5", "1,0,a,3,2"]
    (tmp_path / "counts.csv").write_text("\ufeff" + "\r\n".join(lines).replace(",", mark))
    import_files([tmp_path / "counts.csv"], "csv", num_experts=4, output=tmp_path / "routing.db")
    assert counts(tmp_path / "routing.db") == [[0, 5, 0, 2]]


def test_a_row_without_a_source_goes_to_no_other(tmp_path: Path) -> None:
    table = {"step": [1, 1], "layer": [0, 0], "source": [None, "b"], "expert": [0, 1], "count": [5, 6]}
    pd.DataFrame(table).to_parquet(tmp_path / "counts.parquet")
    with pytest.raises(UsageError, match="line 1: source is empty"):
        import_files([tmp_path / "counts.parquet"], "parquet", num_experts=4, output=tmp_path / "routing.db")


@pytest.mark.parametrize("format", ["megatron", "sglang", "hf"])
def test_no_file_counts_twice(tmp_path: Path, format: str) -> None:
    """Given twice, or beside the folder that it lies in; the formats that add files up."""
    suffix = "jsonl" if format == "megatron" else "pt"
    (tmp_path / f"a.{suffix}").write_text("")
    importer = import_files if format == "megatron" else import_tensors
    with pytest.raises(UsageError, match="named twice"):
        importer([tmp_path, tmp_path / f"a.{suffix}"], format, top_k=1, output=tmp_path / "routing.db")
