"""The counters themselves: no synchronisation, and the same sums however calls are put together."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_audit.hooks.accumulator import Accumulator
from moe_audit.hooks.adapters import NO_PICK, Observation
from moe_audit.hooks.counters import Bank
from moe_audit.hooks.labels import LabelCache, Labels, call_tallies
from moe_audit.store import LayerInfo


class NoSync(TorchDispatchMode):
    """Raises on everything that waits for a device or looks at values on the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "_to_copy.to_cpu", "is_nonzero", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(word in name for word in self.FORBIDDEN), name
        if "_to_copy" in name or "index.Tensor" in name:
            assert not (kwargs or {}).get("device"), name
            assert not any(
                getattr(x, "dtype", None) is torch.bool for x in (args[1] if "index" in name else ())
            )
        return func(*args, **(kwargs or {}))


def test_no_synchronisation_between_flushes():
    """The operators of the forward and of the end of a micro-batch, without the operator that hides them."""
    info = [LayerInfo(i, f"layers.{i}", 4, 2, 1.0, "softmax") for i in range(2)]
    accumulator = Accumulator(info, [torch.device("cpu")] * 2, 4)
    logits = torch.randn(10, 4)
    with NoSync():
        labels = Labels.of(torch.randint(-1, 5, (10,)), call_tallies(4, torch.device("cpu")), 4)
        for i in range(2):
            picks = logits.topk(2).indices
            accumulator.observe(i, Observation(picks, None, logits, "logits", picks > 1), labels)
        accumulator.end_chunk(0)
        accumulator.commit(1, masked=True)
        accumulator.discard()


@pytest.mark.parametrize("joint_bytes", [0, 2**18])
def test_picks_make_a_histogram_per_row(joint_bytes, monkeypatch):
    monkeypatch.setattr("moe_audit.hooks.counters.JOINT_BYTES", joint_bytes)
    rows, experts, tokens, k = 4, 7, 200, 3
    bank = Bank([k], experts, rows, torch.device("cpu"))
    picks = torch.randint(-2, experts + 2, (tokens, k))
    picks[torch.rand(tokens, k) < 0.1] = NO_PICK
    row_T = torch.randint(0, rows, (tokens,))
    labels = Labels.of(row_T, call_tallies(rows, torch.device("cpu")), experts)
    bank.observe(0, Observation(picks), labels, None)
    for row in range(rows - 1):
        mine = picks[row_T == row]
        want = [int((mine == e).sum()) for e in range(experts)]
        assert bank.counts_LRC[0, row, 1:-1].tolist() == want
        invalid = ((mine < 0) & (mine != NO_PICK)).sum() + (mine >= experts).sum()
        assert bank.counts_LRC[0, row, [0, -1]].sum() == invalid


def test_layers_counted_together_are_those_counted_alone(monkeypatch):
    """Any order of calls, changed tensors, a dropped micro-batch: the same sums as one call at a time."""
    generator = torch.Generator().manual_seed(0)
    infos = [LayerInfo(i, f"layers.{i}", 8, 2, None, "softmax") for i in range(5)]
    calls = [0, 1, 2, 3, 4, 0, 1, 1, 3, 4, 2, 0, 4]
    results = []
    for joint_bytes in (0, 2**18):
        monkeypatch.setattr("moe_audit.hooks.counters.JOINT_BYTES", joint_bytes)
        generator.manual_seed(0)
        accumulator = Accumulator(infos, [torch.device("cpu")] * 5, 4)
        for microbatch in range(20):
            row_T = torch.randint(-1, 5, (30,), generator=generator)
            labels = Labels.of(row_T, call_tallies(4, torch.device("cpu")), 8)
            for n, layer in enumerate(calls):
                logits = torch.randn(30, 8, generator=generator)
                logits[::7, n % 8] = float("nan")
                picks = logits.topk(2).indices
                picks[n, 0] = NO_PICK
                kind, gated = ("probs", None) if n == 3 else ("logits", logits.softmax(-1) if n % 2 else None)
                full = logits.abs() if n == 3 else logits
                kept = picks > 1 if n % 3 == 0 else None
                accumulator.observe(layer, Observation(picks, None, full, kind, kept, gated_TE=gated), labels)
                for tensor in (picks, logits, full):  # the model goes on with them
                    tensor.zero_()
            if microbatch % 5 == 1:
                accumulator.discard()
            else:
                accumulator.commit(1, masked=False)
        bank = accumulator.banks[0]
        bank.join()
        results.append((bank.total_ints, accumulator.seen(), bank.floats(), bank.peaks()))
    for alone, together in zip(*results, strict=True):
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if alone.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(together, alone, **tolerance)


def test_labels_that_a_cuda_graph_reads_are_renewed_in_place():
    """A replay runs no Python of ours: the addresses that were captured must hold the new micro-batch."""
    cache = LabelCache(4)
    cache.set_rows(torch.tensor([0, 1]))
    key = (torch.device("cpu"), 4, "batch", 0, 2)
    labels = cache._captured[key] = cache.get(*key)
    address = labels.row_T.data_ptr()
    cache.set_rows(torch.tensor([1, 3]))
    assert cache.captured and cache.get(*key) is labels
    assert (labels.row_T.tolist(), labels.row_T.data_ptr()) == ([1, 1, 3, 3], address)
    assert labels.tally(False, False, False).tolist() == [0, 2, 0, 2, 1, 0, 0, 0, 0]
    assert labels.tally(True, False, True).tolist() == [0, 2, 0, 2, 1, 1, 0, 1, 0]


def test_a_bank_that_moves_goes_on_counting():
    bank = Bank([1], 3, 3, torch.device("cpu"))
    labels = Labels.of(torch.zeros(4, dtype=torch.int64), call_tallies(3, torch.device("cpu")), 3)
    for _ in range(2):
        bank.observe(0, Observation(torch.tensor([[0], [1], [1], [2]])), labels, None)
        bank.move(torch.device("cpu"))
    bank.commit(slice(None))
    bank.join()
    assert bank.total_ints[0, 1:4].tolist() == [2, 4, 2]
    assert bank.pending_ints.sum() == 0
