"""What training tells about a step in other types, and models whose stacks see different tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moe_audit.checking import check
from moe_audit.hooks import Recorder
from moe_audit.thresholds.errors import UsageError


def test_steps_and_rates_of_numpy_and_torch(toy: Any, attach: Any, stored: Any) -> None:
    model = toy.Model()
    with attach(model, flush_every=1) as recorder:
        for step in (np.int64(1), np.int32(2), 3):
            model(torch.randn(2, 3, 8))
            recorder.step(step, lr=np.float32(0.5), loss=torch.ones(1, dtype=torch.bfloat16))
    assert [(r.last_step, r.lr, r.loss) for r in stored().records] == [(n, 0.5, 1.0) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"lr": [0.1]}, r"lr=\[0.1\]"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"loss": torch.ones(2)}, r"loss has shape \(2,\)"),
    ],
)
def test_what_is_not_one_number_is_named(toy: Any, attach: Any, told: dict[str, Any], words: str) -> None:
    model = toy.Model()
    with attach(model) as recorder:
        model(torch.randn(2, 3, 8))
        with pytest.raises(UsageError, match=words):
            recorder.step(1, **told)
        recorder.step(1)


@pytest.mark.parametrize(
    "sources",
    [np.array([0, 1])[::-1], np.array([1, 0], ">i4"), np.array([1, 0], np.uint16), ("prose", "code")],
)
def test_arrays_of_any_memory_order(toy: Any, attach: Any, stored: Any, sources: Any) -> None:
    model = toy.Scripted(2)
    mask = np.array([[True, True, False], [True, True, True]])[:, ::-1]
    with attach(model, toy.scripted(), sources=["code", "prose"]) as recorder:
        with recorder.microbatch(sources=sources, mask=mask):
            model(torch.tensor([[0], [0], [0], [1], [1], [1]]))
        recorder.step(1)
    assert stored().counts == [[[0, 3], [2, 0]]]


@pytest.mark.parametrize("sources", [[["code"] * 3, ["prose"] * 3], {"code": 1}])
def test_names_are_one_a_sequence(toy: Any, attach: Any, sources: Any) -> None:
    recorder = attach(toy.Model(), sources=["code", "prose"])
    with recorder, pytest.raises(UsageError, match="source names have shape"):
        recorder.microbatch(sources=sources)


def test_one_name_is_no_list_of_letters(toy: Any, attach: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sources='code' is one name"):
        attach(toy.Model(), sources="code")
    assert not (tmp_path / "routing.db").exists()


class Translator(nn.Module):
    """An encoder and a decoder, each with routers, over sequences of different lengths."""

    def __init__(self, toy: Any) -> None:
        super().__init__()
        self.encoder, self.decoder = toy.Scripted(4, 2), toy.Scripted(4, 2)
        self.skips = False

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.encoder(source)
        self.decoder.layers[0](target)
        self.decoder.layers[1](target[: 4 if self.skips else None])


@pytest.mark.parametrize("skips", [False, True])
def test_a_decoder_has_a_length_of_its_own(toy: Any, tmp_path: Path, skips: bool) -> None:
    """Its layers are held against each other: one that misses tokens is still found out."""
    model, generator = Translator(toy), torch.Generator().manual_seed(0)
    model.skips = skips
    with Recorder.attach(model, tmp_path / "routing.db", adapter=toy.scripted(), flush_every=1) as recorder:
        for step in range(1, 7):
            model(*(torch.randint(4, (n, 1), generator=generator) for n in (1200, 800)))
            recorder.step(step)
    verdict = check(tmp_path / "routing.db")
    assert (verdict.status == "INVALID") == skips
    assert any("decoder.layers.1" in p["message"] for p in verdict.problems) == skips


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_replayed_routing_is_counted_as_replayed(
    toy: Any, attach: Any, stored: Any, first: bool, compiled: bool
) -> None:
    """A hook on the router gives out recorded ids; it may come before the recorder or after."""
    torch._dynamo.reset()
    model, replayed = toy.Model(layers=2), torch.tensor([[1, 3]] * 6)
    recorders = [] if first else [attach(model)]
    for block in model.layers:
        block.router.register_forward_hook(lambda module, args, out: (out[0], replayed, out[2]))
    (recorder,) = recorders or [attach(model)]
    run = torch.compile(model, backend="eager") if compiled else model
    with recorder:
        for step in (1, 2):
            with recorder.microbatch():
                run(torch.randn(2, 3, 8)).backward()
            recorder.step(step)
    assert stored().total == [[0, 12, 0, 12]] * 2
