"""Dumps that hold tensors: SGLang's expert distribution, router logits; loaded with weights only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_audit.hooks.importers import import_tensors
from moe_audit.run import open_run
from moe_audit.thresholds.errors import NoDataError, UsageError

REPLICAS = torch.tensor([[0, 1, 2, 3, 0, 1]] * 3)  # six physical experts, two of them second copies


def test_sglang_stat(tmp_path):
    """A ring buffer that is not full has empty rows, dense layers count nothing: both are left out."""
    counts = torch.randint(1, 50, (5, 4, 8), generator=torch.Generator().manual_seed(0))
    counts[:, 0] = 0
    counts[3:] = 0
    dump = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": 0.5}
    torch.save(dump, tmp_path / "expert_distribution_recorder_1.5.pt")
    report = import_tensors([tmp_path], "sglang", top_k=2, output=tmp_path / "routing.db")
    assert (report.records, report.layers) == (3, 3) and "1 layers" in report.notes[0]
    with open_run(tmp_path) as run:
        assert [info.layer for info in run.layers] == [1, 2, 3]
        np.testing.assert_array_equal(run.counts(2)[:, 0], counts[:3, 2])
    for options, words in [({"num_experts": 9}, "9 experts"), ({"top_k": 9}, "top-k 9")]:
        with pytest.raises(UsageError, match=words):
            import_tensors([tmp_path], "sglang", output=tmp_path / "x.db", **options)


def test_sglang_per_pass(tmp_path):
    """Ranks and replicas are added up, over all files."""
    for rank in range(2):
        records = [
            {"forward_pass_id": p, "rank": rank, "gatherer_key": "primary",
             "global_physical_count": torch.arange(18, dtype=torch.int32).reshape(3, 6) * p}
            for p in (7, 8)
        ]  # fmt: skip
        dump = {"records": records, "last_physical_to_logical_map": REPLICAS}
        torch.save(dump, tmp_path / f"expert_distribution_recorder_1.0_{rank}.pt")
    import_tensors([tmp_path], "sglang", output=tmp_path / "routing.db")
    with open_run(tmp_path) as run:
        assert [r.last_step for r in run.records] == [7, 8]
        assert run.counts(1)[:, 0].tolist() == [[2 * p * n for n in (6 + 10, 7 + 11, 8, 9)] for p in (7, 8)]


def test_sglang_per_token(tmp_path):
    ids = torch.tensor([[[0, 4, -1], [1, 2, -1]]] * 3, dtype=torch.int32)
    record = {"forward_pass_id": 3, "rank": 0, "gatherer_key": "primary", "topk_ids_of_layer": ids}
    torch.save({"records": [record], "last_physical_to_logical_map": REPLICAS}, tmp_path / "a.pt")
    import_tensors([tmp_path / "a.pt"], "sglang", num_experts=5, output=tmp_path / "routing.db")
    with open_run(tmp_path) as run:
        assert run.counts(0).tolist() == [[[2, 1, 1, 0, 0]]]


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("format", ["sglang", "hf"])
def test_files_that_are_no_dumps(tmp_path, format, capsys):
    for content, words in [
        (Evil(), "weights only"),
        ({"a": 1}, "no"),
        ({"logical_count": torch.zeros(2, 2, 2)}, "integer|router_logits"),
        ({"records": []}, "map|router_logits"),
        ({"router_logits": (torch.zeros(3, dtype=torch.int64),)}, "no"),
    ]:
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(UsageError, match=words) as caught:
            import_tensors([tmp_path / "a.pt"], format, top_k=1, output=tmp_path / "x.db")
        assert "a.pt" in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "b.pt").write_bytes(b"text")
    with pytest.raises(UsageError, match=r"b\.pt"):
        import_tensors([tmp_path / "b.pt"], format, top_k=1, output=tmp_path / "x.db")
    with pytest.raises(UsageError, match=r"none\.pt does not exist"):
        import_tensors([tmp_path / "none.pt"], format, top_k=1, output=tmp_path / "x.db")
    assert "executed" not in capsys.readouterr().out
    torch.save({"logical_count": torch.zeros(2, 2, 2, dtype=torch.int32)}, tmp_path / "c.pt")
    with pytest.raises(NoDataError):
        import_tensors([tmp_path / "c.pt"], "sglang", output=tmp_path / "x.db")
    assert not (tmp_path / "x.db").exists()


def test_router_logits(tmp_path):
    """Against picks taken token by token; padding does not count, a token with NaN is invalid."""
    draw = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(3, 4, 8, generator=draw) for _ in range(2))
    logits[0][0, 1, 3] = float("nan")
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    sources = torch.tensor([0, 1, 1])
    content = {"router_logits": logits, "attention_mask": mask, "source_ids": sources}
    for step in (1, 2, 10):
        torch.save(content, tmp_path / f"step{step}.pt")
    report = import_tensors([tmp_path], "hf", top_k=2, output=tmp_path / "routing.db")
    assert report.records == 3 and report.sources == ("source 0", "source 1")
    wanted = np.zeros((2, 2, 8), np.int64)
    for layer in range(2):
        for b in range(3):
            for t in range(4):
                if mask[b, t] and not logits[layer][b, t].isnan().any():
                    for e in sorted(range(8), key=lambda e: -logits[layer][b, t, e])[:2]:
                        wanted[layer, sources[b], e] += 1
    with open_run(tmp_path) as run:
        for layer in range(2):
            np.testing.assert_array_equal(run.counts(layer)[1], wanted[layer])
            assert run.counts(layer)[1].sum() + run.invalid(layer)[1] == 2 * run.tokens(layer)[1].sum() == 16
        assert run.invalid(0).tolist() == [2, 2, 2]
        assert (run.records[0].tokens, run.records[0].excluded_tokens) == (8, 4)
        np.testing.assert_allclose(run.prob_sum(1)[0].sum(), 8, rtol=1e-6)
    with pytest.raises(UsageError, match="--top-k"):
        import_tensors([tmp_path], "hf", output=tmp_path / "x.db")


def test_logits_as_a_model_returns_them(tmp_path):
    """A bare tuple of [tokens, experts]; blocks without a router leave None."""
    torch.save((None, torch.tensor([[0.0, 1.0, 2.0]])), tmp_path / "a.pt")
    import_tensors([tmp_path / "a.pt"], "hf", top_k=1, output=tmp_path / "routing.db")
    with open_run(tmp_path) as run:
        assert [info.layer for info in run.layers] == [1] and run.counts(1).tolist() == [[[0, 0, 1]]]
