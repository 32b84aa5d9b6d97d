"""Which token belongs to which source, and which does not count: every layout of ids and masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_audit.hooks.context import row_ids, token_rows
from moe_audit.hooks.labels import Labels, call_tallies
from moe_audit.thresholds.errors import UsageError

NAMES = ["code", "prose"]
B, S = 3, 4
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)  # right, no, left padding
IDS = torch.tensor([0, 1, -1])


def picks_of(pattern: list[int], layout: str) -> torch.Tensor:
    """One expert per sequence b (its number), in the router's order of tokens."""
    table = torch.tensor(pattern).unsqueeze(1).expand(B, S)
    return (table.t() if layout == "sequence" else table).reshape(-1, 1).clone()


@pytest.mark.parametrize("layout", ["batch", "sequence"])
@pytest.mark.parametrize(
    ("sources", "mask"),
    [
        (IDS, MASK),
        (IDS.unsqueeze(1).expand(B, S), MASK),
        (["code", "prose", "unlabelled"], MASK.long()),
        (IDS.unsqueeze(1).expand(B, S).reshape(-1), MASK),
        (IDS, MASK.reshape(-1)),
        (IDS.numpy(), MASK.float().numpy()),
        (IDS.tolist(), MASK.tolist()),
        (IDS.to(torch.int8), MASK.to(torch.uint8)),
    ],
)
def test_all_layouts_agree(toy, attach, stored, sources, mask, layout):
    """C15: tokens of sequence b pick expert b; sources and mask say the same in every form."""
    adapter = toy.scripted()
    adapter.layout = layout
    model = toy.Scripted(3)
    with attach(model, adapter, sources=NAMES) as recorder:
        with recorder.microbatch(sources=sources, mask=mask):
            model(picks_of([0, 1, 2], layout))
        recorder.step(1)
    got = stored()
    assert got.sources == ["code", "prose", "unlabelled"]
    assert got.counts == [[[2, 0, 0], [0, 4, 0], [0, 0, 3]]]
    assert [(r.tokens, r.excluded_tokens) for r in got.records] == [(9, 3)]
    assert got.broken == []


def test_packed_documents_with_a_source_per_token(toy, attach, stored):
    model = toy.Scripted(2)
    ids = torch.tensor([[0, 0, 0, 1], [1, 1, 0, 0]])
    with attach(model, toy.scripted(2), sources=NAMES) as recorder:
        for sources in (ids, ids.reshape(-1)):  # as a table, and as the flat row of a packed batch
            with recorder.microbatch(sources=sources):
                model(torch.tensor([[0, 1]]).expand(8, 2))
        recorder.step(1)
    assert stored().counts == [[[10, 10], [6, 6]]]


def test_padding_that_is_not_masked_is_told(toy, attach, stored):
    """C15: without a mask the padding counts, and the record says that none was given."""
    model = toy.Scripted(8)
    real = torch.arange(400).unsqueeze(1).repeat(1, 2) * 2 % 8
    real[:, 1] += 1
    picks = torch.cat([real, torch.tensor([[3, 5]]).expand(300, 2)])
    mask = torch.arange(700) < 400
    with attach(model, toy.scripted(2), flush_every=1) as recorder:
        for step, given_mask in enumerate((mask, None), 1):
            with recorder.microbatch(mask=given_mask):
                model(picks)
            recorder.step(step)
    got = stored()
    assert [(r.tokens, r.excluded_tokens) for r in got.records] == [(400, 300), (700, None)]
    assert got.total == [[200, 200, 200, 500, 200, 500, 200, 200]]


def test_unlabelled_tokens_get_a_source_only_once_they_are_seen(toy, attach, stored):
    model = toy.Scripted(2)
    with attach(model, toy.scripted(), sources=NAMES, flush_every=1) as recorder:
        for step, ids in enumerate(([0, 1], [0, -1], [1, 1]), 1):
            with recorder.microbatch(sources=ids):
                model(torch.zeros(2, 1, dtype=torch.int64))
            recorder.step(step)
            recorder.flush()
            assert stored().sources == (NAMES if step == 1 else [*NAMES, "unlabelled"])
    assert stored().counts == [[[2, 0], [3, 0], [1, 0]]]


@pytest.mark.parametrize("ids", [None, [0, 0], [-1, -1]])
def test_a_recorder_without_sources_has_one(toy, attach, stored, ids):
    model = toy.Scripted(2)
    with attach(model, toy.scripted()) as recorder:
        with recorder.microbatch(sources=ids):
            model(torch.zeros(2, 1, dtype=torch.int64))
        recorder.step(1)
    got = stored()
    assert (got.sources, got.counts) == (["unlabelled"], [[[2, 0]]])


@pytest.mark.parametrize(
    ("sources", "mask", "words"),
    [
        ([0, 2], None, "source id 2 is outside -1 to 1"),
        ([-2, 0], None, "source id -2"),
        (["code", "poems"], None, "'poems'"),
        ("code", None, "one name"),
        ([0.5, 1.0], None, "float"),
        ([True, False], None, "bool"),
        ([[[0]]], None, r"\(1, 1, 1\)"),
        ([0, 1, 0], [[1, 1], [1, 1]], r"\(3,\).*\(2, 2\)"),
        ([0, 1], [1, 1, 1], r"\(2,\).*\(3,\)"),
        (None, [[[1]]], r"\(1, 1, 1\)"),
        (None, [[0.0, -1e9]], "additive"),
    ],
)
def test_what_does_not_belong_together_is_an_error(toy, attach, sources, mask, words):
    recorder = attach(toy.Scripted(2), toy.scripted(), sources=NAMES)
    with pytest.raises(UsageError, match=words):
        recorder.microbatch(sources=sources, mask=mask)
    recorder.close()


def test_tokens_that_do_not_fit_name_both_shapes(toy, attach):
    model = toy.Scripted(2)
    recorder = attach(model, toy.scripted(), sources=NAMES)
    with pytest.raises(UsageError, match=r"7 tokens.*\(2, 4\)"), recorder.microbatch(mask=torch.ones(2, 4)):
        model(torch.zeros(7, 1, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"7 tokens.*\(2,\)"), recorder.microbatch(sources=[0, 1]):
        model(torch.zeros(7, 1, dtype=torch.int64))
    recorder.close()


def test_device_ids_out_of_range_are_raised_with_the_record(toy, attach, stored, monkeypatch):
    """Ids on a device are not looked at before the flush (here the look at host ids is switched off)."""
    monkeypatch.setattr("moe_audit.hooks.labels.LabelCache._is_checked", lambda self: False)
    model = toy.Scripted(2)
    recorder = attach(model, toy.scripted(), sources=NAMES)
    rows = torch.tensor([0, 1, -3, 7])
    scope = recorder.microbatch(sources=[0, 1, 0, 0])
    scope.rows = rows
    with scope:
        model(torch.zeros(4, 1, dtype=torch.int64))
    with pytest.warns(UserWarning, match="2 tokens"), pytest.raises(UsageError, match="2 tokens"):
        recorder.step(1)
        recorder.flush()
    recorder.close()
    assert stored().broken == ["source ids"]


def test_pipeline_chunks_split_the_batch(toy, attach, stored):
    """Each chunk has its own labels and is a micro-batch of its own, whatever the order of the stages."""
    model = toy.Scripted(2, layers=2)
    first, second = model.layers
    with attach(model, toy.scripted(), sources=NAMES) as recorder:
        with recorder.microbatch(sources=[0, 1, 1, 1], chunks=2):
            first(torch.tensor([[0], [0]]))
            first(torch.tensor([[1], [1]]))
            second(torch.tensor([[0], [0]]))
            second(torch.tensor([[1], [1]]))
        recorder.step(1)
    got = stored()
    assert got.counts == [[[1, 0], [1, 2]]] * 2
    assert [(r.microbatches, r.tokens) for r in got.records] == [(2, 4)]
    np.testing.assert_allclose(got.stat("peak")[0], [[2.0, 2.0]])
    np.testing.assert_allclose(got.stat("sq_over_t")[1], [[2.0, 2.0]])


def test_more_chunks_than_told_is_an_error(toy, attach):
    model = toy.Scripted(2)
    recorder = attach(model, toy.scripted())
    with pytest.raises(UsageError, match="3 times"), recorder.microbatch(chunks=2):
        for _ in range(3):
            model(torch.zeros(2, 1, dtype=torch.int64))
    recorder.close()


@given(
    batch=st.integers(1, 5),
    length=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    layout=st.sampled_from(["batch", "sequence"]),
    flat_mask=st.booleans(),
)
def test_rows_against_a_loop(batch, length, seed, layout, flat_mask):
    rng = np.random.default_rng(seed)
    ids, mask = rng.integers(-1, 2, batch), rng.random((batch, length)) < 0.7
    rows = row_ids(torch.from_numpy(ids), torch.from_numpy(mask.reshape(-1) if flat_mask else mask), NAMES)
    if rows.dim() == 1 and layout == "sequence":
        return  # flat ids and mask are taken to stand in the router's order
    got = token_rows(rows, batch * length, layout).tolist()
    order = [(b, s) for b in range(batch) for s in range(length)]
    if layout == "sequence":
        order = [(b, s) for s in range(length) for b in range(batch)]
    assert got == [3 if not mask[b, s] else 2 if ids[b] == -1 else ids[b] for b, s in order]
    labels = Labels.of(torch.tensor(got), call_tallies(4, torch.device("cpu")), 2)
    assert labels.tally(False, False, False).tolist() == [
        *(got.count(row) for row in range(4)),
        1,
        0,
        0,
        0,
        0,
    ]
    assert labels.counted_T.sum() == sum(row < 3 for row in got)
