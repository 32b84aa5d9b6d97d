"""What is counted, under everything a real run does: compared with counts taken another way."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_audit.thresholds.errors import UsageError

REMAT = ("none", "reentrant", "non-reentrant", "selective")


def train(recorder, model, batches, sources=None):
    """One step a batch; the losses and gradients of each."""
    seen = []
    for step, x in enumerate(batches, 1):
        model.zero_grad()
        with recorder.microbatch(sources=sources):
            loss = model(x)
            loss.backward()
        recorder.step(step, loss=loss)
        seen.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
    return seen


@pytest.mark.parametrize("router_last", [False, True])
@pytest.mark.parametrize("remat", REMAT)
def test_recompute_counts_once_and_changes_nothing(toy, attach, stored, remat, router_last):
    """C23, C27: each form of checkpointing; loss and gradients bit-equal with the recorder on."""
    model = toy.Model(remat=remat, router_last=router_last)
    batches = [torch.randn(3, 5, 8, requires_grad=True) for _ in range(4)]
    without = []
    for x in batches:
        model.zero_grad()
        loss = model(x)
        loss.backward()
        without.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
    with attach(model, flush_every=2) as recorder:
        with_recorder = train(recorder, model, batches)
    for (loss, grads), (loss_0, grads_0) in zip(with_recorder, without, strict=True):
        assert loss == loss_0
        assert all(torch.equal(a, b) for a, b in zip(grads, grads_0, strict=True))
    got = stored()
    assert got.total == toy.brute_force(model, batches)
    assert [(r.first_step, r.last_step, r.tokens) for r in got.records] == [(1, 2, 30), (3, 4, 30)]
    assert got.broken == []


def test_uneven_recompute_of_two_sources(toy, attach, stored):
    """C23: only the micro-batch of source A is recomputed."""
    model = toy.Scripted(2)
    weight = torch.ones(40, 1, requires_grad=True)
    recorder = attach(model, toy.scripted(), sources=["A", "B"])

    def forward(picks: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        model(picks)
        return weight.exp().sum()

    with recorder.microbatch(sources=["A"]):
        checkpoint(forward, torch.zeros(40, 1, dtype=torch.int64), weight, use_reentrant=False).backward()
    with recorder.microbatch(sources=["B"]):
        forward(torch.ones(40, 1, dtype=torch.int64), weight).backward()
    recorder.step(1)
    recorder.close()
    assert stored().counts == [[[40, 0], [0, 40]]]


def test_micro_batches_are_summed_and_measured_one_by_one(toy, attach, stored):
    """C24: accumulation gives one record; peak and squares are of the single micro-batches."""
    model = toy.Scripted(2)
    recorder = attach(model, toy.scripted())
    for expert in (0, 1):
        with recorder.microbatch():
            model(torch.full((40, 1), expert))
    recorder.step(1)
    recorder.close()
    got = stored()
    assert got.total == [[40, 40]]
    assert [(r.microbatches, r.tokens) for r in got.records] == [(2, 80)]
    np.testing.assert_allclose(got.stat("peak")[0], [[2.0, 2.0]])
    np.testing.assert_allclose(got.stat("sq_over_t")[0], [[40.0, 40.0]])


def test_a_bf16_model_after_attaching_counts_exactly(toy, attach, stored):
    """C12: counts are no part of the model; 400 tokens, one at a time."""
    model = nn.Sequential(toy.Scripted(4), nn.Linear(4, 4))
    before = set(model.state_dict())
    recorder = attach(model, toy.scripted())
    model.to(torch.bfloat16)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(400):
            with recorder.microbatch():
                model[0](torch.zeros(1, 1, dtype=torch.int64))
        recorder.step(1)
        recorder.close()
    finally:
        torch.set_default_dtype(default)
    assert stored().total == [[400, 0, 0, 0]]
    assert set(model.state_dict()) == before


def test_nothing_is_left_on_the_model(toy, attach):
    model = toy.Model()

    def state() -> list[dict[str, object]]:
        return [
            {key: list(value) if "hooks" in key and value else None for key, value in vars(module).items()}
            for module in model.modules()
        ]

    before = state()
    with attach(model):
        assert state() != before
    assert state() == before


def test_a_copy_of_the_model_is_not_recorded(toy, attach, stored):
    """An EMA copy, and a pickled model: they carry hooks that do nothing."""
    model = toy.Model()
    recorder = attach(model)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    x = torch.randn(2, 5, 8)
    with recorder.microbatch():
        model(x)
    twin(x)
    recorder.step(1)
    recorder.close()
    assert [r.tokens for r in stored().records] == [10]


def test_invalid_ids_are_counted_as_such(toy, attach, stored):
    """C33: NaN logits gave -1 here, E there; neither wraps to an expert."""
    model = toy.Scripted(4)
    recorder = attach(model, toy.scripted())
    picks = torch.tensor([0] * 4 + [1] * 4 + [2] * 4 + [3] * 3 + [-1, -1, 4, 896, -7]).unsqueeze(1)
    with recorder.microbatch():
        model(picks)
    recorder.step(1)
    recorder.close()
    got = stored()
    assert (got.total, got.invalid, got.broken) == ([[4, 4, 4, 3]], [5], [])


def test_nan_logits_are_invalid_and_do_not_poison_the_sums(toy, attach, stored):
    model = toy.Scripted(4)
    adapter = toy.scripted(2, indices=lambda o: o[0], logits=lambda o: o[1])
    logits = torch.randn(6, 4)
    logits[4:] = float("nan")
    picks = logits.nan_to_num(0).topk(2).indices
    with attach(model, adapter, sources=["a", "b"]) as recorder:
        with recorder.microbatch(sources=["a", "b"]):
            model((picks, logits))
        recorder.step(1)
    got = stored()
    # Whatever ids the kernel made of NaN (here: valid ones), they are invalid.
    assert (got.invalid, sum(got.total[0]), got.broken) == ([4], 8, [])
    p = logits[:3].softmax(-1).sum(0), logits[3:4].softmax(-1).sum(0)
    np.testing.assert_allclose(got.prob_sum()[0][0], torch.stack(p).numpy(), rtol=1e-5)
    top1 = logits[:3].softmax(-1).amax(-1)
    np.testing.assert_allclose(got.top1()[0][0][0], [top1.sum(), top1.square().sum()], rtol=1e-5)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_probabilities_are_distributions_and_logits_have_moments(toy, attach, stored, gating):
    model = toy.Scripted(5)
    adapter = toy.scripted(2, indices=lambda o: o[0], logits=lambda o: o[1])
    adapter.gating = gating
    logits = 3 * torch.randn(40, 5) + 1
    keep = torch.rand(40) > 0.3
    with attach(model, adapter) as recorder:
        with recorder.microbatch(mask=keep):
            model((logits.topk(2).indices, logits))
        recorder.step(1)
    got = stored()
    x = logits[keep].double()
    p = x.softmax(-1) if gating == "softmax" else x.sigmoid() / x.sigmoid().sum(-1, keepdim=True)
    np.testing.assert_allclose(got.prob_sum()[0][0, 0], p.sum(0).numpy(), rtol=1e-4)
    np.testing.assert_allclose(got.stat("logit_mean")[0][0], x.mean(0).numpy(), rtol=1e-4)
    np.testing.assert_allclose(got.stat("logit_std")[0][0], x.std(0, correction=0).numpy(), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_more_than_255_experts(toy, attach, stored, dtype):
    model = toy.Scripted(300)
    picks = torch.randint(0, 300, (500, 3))
    with attach(model, toy.scripted(3)) as recorder:
        with recorder.microbatch():
            model(picks.to(dtype))
        recorder.step(1)
    assert stored().total == [picks.flatten().bincount(minlength=300).tolist()]


def test_variable_number_of_picks(toy, attach, stored):
    """Expert choice: each expert takes its own tokens; nothing is invalid, nothing is expected of k."""
    model = toy.Scripted(4)
    chosen = torch.rand(30, 4) > 0.6
    with attach(model, toy.scripted("varies", chosen=lambda o: o)) as recorder:
        with recorder.microbatch():
            model(chosen)
        recorder.step(1)
    got = stored()
    assert got.total == [chosen.sum(0).tolist()]
    assert (got.invalid, got.broken, got.layers[0].top_k) == ([0], [], None)
    share = chosen.sum(0) / chosen.sum()
    np.testing.assert_allclose(got.stat("peak")[0][0], 4 * share.numpy(), rtol=1e-6)


def test_drops_are_counted_beside_the_demand(toy, attach, stored):
    """C43: eight tokens, capacity two: demand [5, 1, 1, 1], three dropped."""
    model = toy.Scripted(4)
    picks = torch.tensor([0, 0, 0, 0, 0, 1, 2, 3]).unsqueeze(1)
    kept = torch.tensor([1, 1, 0, 0, 0, 1, 1, 1], dtype=torch.bool).unsqueeze(1)
    with attach(model, toy.scripted(indices=lambda o: o[0], kept=lambda o: o[1])) as recorder:
        with recorder.microbatch():
            model((picks, kept))
        with recorder.microbatch(mask=torch.tensor([1, 1, 0, 1, 1, 1, 1, 1])):
            model((picks, kept))
        recorder.step(1)
    got = stored()
    assert got.total == [[9, 2, 2, 2]]
    assert got.stat("dropped")[0].tolist() == [[5, 0, 0, 0]]


def test_crash_in_the_middle_of_a_forward(toy, attach, stored):
    """A micro-batch that did not end well is in no layer, with a context and without."""
    model = toy.Model()
    recorder = attach(model)
    good, bad = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    for context in (True, False):
        model.fail_in = 2
        with pytest.raises(RuntimeError, match="lost a shard"):
            if context:
                with recorder.microbatch():
                    model(bad)
            else:
                model(bad)
        model.fail_in = -1
        if context:
            with recorder.microbatch():
                model(good)
        else:
            model(good)
    recorder.step(1)
    recorder.close()
    got = stored()
    assert got.total == toy.brute_force(model, [good, good])
    assert [r.tokens for r in got.records] == [20]


def test_plain_loop_without_contexts(toy, attach, stored):
    """Forwards of the model are micro-batches; single parts of it are counted at once."""
    model = toy.Model()
    batches = [torch.randn(2, 5, 8) for _ in range(3)]
    recorder = attach(model, flush_every=2, sources=["a"])
    for step, x in enumerate(batches, 1):
        model(x).backward()
        recorder.step(step)
    for block in model.layers:  # a step that did not end
        block(batches[2])
    recorder.close()
    got = stored()
    assert got.sources == ["a", "unlabelled"]
    assert [(r.microbatches, r.tokens) for r in got.records] == [(2, 20), (2, 20)]
    assert got.tokens == [[0, 40]] * 3
    assert got.total[0] == toy.brute_force(model, [*batches, batches[2]])[0]


def test_two_models_in_one_process(toy, attach, stored, tmp_path):
    one, two = toy.Model(), toy.Model(layers=2)
    x = torch.randn(2, 5, 8)
    with attach(one, path=tmp_path / "one.db") as first, attach(two, path=tmp_path / "two.db") as second:
        with first.microbatch(), second.microbatch():
            one(x)
            two(x)
            two(x)
        first.step(1)
        second.step(1)
    assert stored(path=tmp_path / "one.db").total == toy.brute_force(one, [x])
    assert stored(path=tmp_path / "two.db").total == toy.brute_force(two, [x, x])


def test_data_parallel_is_refused(toy, attach):
    model = toy.Model()
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        attach(nn.DataParallel(model))
    recorder = attach(model)
    replica = model.layers[0].router._replicate_for_data_parallel()
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        replica(torch.randn(2, 8))
    recorder.close()


def test_more_than_the_store_holds_cuts_a_record_early(toy, attach, stored, monkeypatch):
    """A record ends before a count could pass 2^32 - 1 (here 100)."""
    monkeypatch.setattr("moe_audit.hooks.recorder.MAX_COUNT", 100)
    model = toy.Scripted(2)
    with attach(model, toy.scripted(), flush_every=1000) as recorder:
        for step in range(1, 13):
            with recorder.microbatch():
                model(torch.zeros(20, 1, dtype=torch.int64))
            recorder.step(step)
    got = stored()
    assert got.total == [[240, 0]]
    assert len(got.records) > 2 and max(r.tokens for r in got.records) <= 100
