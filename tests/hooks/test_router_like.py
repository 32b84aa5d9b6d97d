"""Routers that no adapter knows: found by name, read by form, refused where that is not clear (C27, C50)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_audit.hooks import Recorder
from moe_audit.run import open_run
from moe_audit.thresholds.errors import UsageError

E, K, T = 32, 4, 10
FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "scores, ids": lambda scores, ids, weights: (scores, ids),
    "logits, scores, ids": lambda scores, ids, weights: (scores.log(), scores, ids),
    "ids, weights": lambda scores, ids, weights: (ids, weights),
    "weights, ids": lambda scores, ids, weights: (weights, ids),
    "a dictionary": lambda scores, ids, weights: {"topk": ids, "p": scores},
}


class TokenRouter(nn.Module):
    def __init__(self, form: str, **numbers: int) -> None:
        super().__init__()
        self.form, self.proj = form, nn.Linear(8, E)
        self.__dict__.update(numbers)
        self.seen = torch.zeros(E, dtype=torch.int64)

    def forward(self, x: Tensor) -> Any:
        scores = self.proj(x).softmax(-1)
        weights, ids = scores.topk(K)
        self.seen += ids.flatten().bincount(minlength=E)
        return FORMS[self.form](scores, ids, weights) if self.form in FORMS else (scores, scores)


class MoEBlock(nn.Module):
    def __init__(self, form: str, on_router: dict[str, int], on_block: dict[str, int]) -> None:
        super().__init__()
        self.router = TokenRouter(form, **on_router)
        self.__dict__.update(on_block)

    def forward(self, x: Tensor) -> Tensor:
        self.router(x)
        return x


def model(form: str, on_router: dict[str, int], on_block: dict[str, int] | None = None) -> nn.Sequential:
    return nn.Sequential(*(MoEBlock(form, on_router, on_block or {}) for _ in range(3)))


BOTH = {"num_experts": E, "top_k": K}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_counts(form: str, tmp_path: Path) -> None:
    net = model(form, BOTH)
    with Recorder.attach(net, tmp_path / "routing.db") as recorder:
        net(torch.randn(T, 8))
        recorder.step(1)
    with open_run(tmp_path) as run:
        assert [info.layer for info in run.layers] == [0, 1, 2]  # block and router are not two layers
        for info, block in zip(run.layers, net, strict=True):
            assert run.counts(info.layer).sum((0, 1)).tolist() == block.router.seen.tolist()


def test_numbers_may_stand_on_the_block(tmp_path: Path) -> None:
    net = model("weights, ids", {}, {"n_routed_experts": E, "num_experts_per_tok": K})
    with Recorder.attach(net, tmp_path / "routing.db") as recorder:
        assert [(info.num_experts, info.top_k) for info in recorder.layers] == [(E, K)] * 3


@pytest.mark.parametrize(
    ("numbers", "message"),
    [({"num_experts_per_tok": K}, "number of experts"), ({"num_experts": E}, "number of picks")],
)
def test_what_is_not_known_is_an_error_that_names_the_router(
    numbers: dict[str, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=rf"0\.router .*TokenRouter.*{message}"):
        Recorder.attach(model("ids, weights", numbers), tmp_path / "routing.db")


def test_output_without_ids_is_an_error_that_names_the_router(tmp_path: Path) -> None:
    net = model("scores only", BOTH)
    with (
        Recorder.attach(net, tmp_path / "routing.db") as recorder,
        pytest.raises(UsageError, match="TokenRouter: no integer tensor"),
        recorder.microbatch(),
    ):
        net(torch.randn(T, 8))


def test_a_gate_without_experts_is_no_router(tmp_path: Path) -> None:
    class OutputGate(nn.Linear):
        pass

    with pytest.raises(UsageError, match="no router found"):
        Recorder.attach(nn.Sequential(OutputGate(8, 8)), tmp_path / "routing.db")
