"""Copies of a model that is recorded: they work, and count nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_audit.hooks.forwards import ForwardMicrobatches


def saved_whole(model: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_whole]


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("of_a_trainer", [False, True])
def test_a_copy_works_and_counts_nothing(
    toy: Any, attach: Any, stored: Any, of_a_trainer: bool, copied: Callable[[Any], Any]
) -> None:
    model, x = toy.Model(), torch.randn(2, 3, 8)
    before = list(model.state_dict())
    with attach(model) as recorder:
        if of_a_trainer:
            ForwardMicrobatches(recorder, model)
        twin = copied(model)
        assert list(model.state_dict()) == list(twin.state_dict()) == before
        assert torch.equal(model(x), twin(x))
        recorder.step(1)
    assert torch.equal(model(x), twin(x))
    (record,) = stored().records
    assert (record.microbatches, record.tokens) == (1, 6)
    assert stored().total == toy.brute_force(model, [x])


@pytest.mark.parametrize(("mask_length", "counted"), [(3, 5), (7, 6)])
def test_the_end_of_a_mask_that_is_longer_than_the_input(
    toy: Any, attach: Any, stored: Any, mask_length: int, counted: int
) -> None:
    """As in decoding with a cache: what came before the input has been routed before."""

    class Masked(toy.Model):
        def forward(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs_embeds)

    model = Masked()
    mask = torch.ones(2, mask_length)
    mask[0, 0] = 0
    with attach(model) as recorder:
        ForwardMicrobatches(recorder, model)
        model(inputs_embeds=torch.randn(2, 3, 8), attention_mask=mask)
        recorder.step(1)
    assert stored().records[0].tokens == counted
