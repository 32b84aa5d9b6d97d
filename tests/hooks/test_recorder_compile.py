"""torch.compile: hooks in whole graphs count exactly, also with checkpointing; late ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moe_audit.thresholds.errors import UsageError


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, how: str, backend: str, fullgraph: bool = True) -> nn.Module:
    if how == "whole":
        return torch.compile(model, backend=backend, fullgraph=fullgraph)  # type: ignore[return-value]
    for part in [model] if how == "in place" else model.layers:
        part.compile(backend=backend, fullgraph=fullgraph)
    return model


@pytest.mark.parametrize("how", ["whole", "in place", "blocks"])
@pytest.mark.parametrize("remat", ["none", "non-reentrant", "reentrant"])
def test_compiled_models_count_exactly(toy, attach, stored, how, remat):
    check(toy, attach, stored, how, remat, "aot_eager", fullgraph=remat != "reentrant" or how == "blocks")


@pytest.mark.parametrize("remat", ["none", "selective"])
def test_with_the_real_code_generator(toy, attach, stored, remat):
    check(toy, attach, stored, "blocks", remat, "inductor", fullgraph=True)


def check(toy, attach, stored, how, remat, backend, fullgraph):
    model = toy.Model(layers=2, remat=remat)
    batches = [torch.randn(3, 5, 8, requires_grad=True) for _ in range(4)]
    want = toy.brute_force(model, batches)
    recorder = attach(model, flush_every=2, sources=["a", "b", "c"])
    model = compiled(model, how, backend, fullgraph)
    for step, x in enumerate(batches, 1):
        with recorder.microbatch(sources=[0, 1, 2]):
            model(x).backward()
        recorder.step(step)
    recorder.close()
    got = stored()
    assert (got.total, got.broken) == (want, [])
    assert [r.tokens for r in got.records] == [30, 30]


def test_phases_masks_and_plain_loops_do_not_recompile_or_go_wrong(toy, attach, stored):
    """What changes between calls is looked at when the code runs, not when it was compiled."""
    model = toy.Model(layers=2)
    x = torch.randn(3, 5, 8)
    recorder = attach(model)
    fast = compiled(model, "whole", "eager")
    with recorder.paused():
        fast(x)
    for step in (1, 2):
        fast(x)
        with recorder.microbatch(mask=torch.arange(15) < 6):
            fast(x)
        with recorder.phase("eval"):
            fast(x)
        recorder.step(step)
    recorder.close()
    assert [(r.tokens, r.excluded_tokens) for r in stored().records] == [(42, 18)]
    assert [r.tokens for r in stored("eval").records] == [30]
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(type(model).forward.__code__)) <= 2


@pytest.mark.parametrize("how", ["whole", "in place", "blocks"])
def test_a_model_that_ran_compiled_is_refused(toy, attach, stored, how):
    """C51: a hook added after the first compiled call never fires; the remedy works."""
    model = toy.Model(layers=2)
    x = torch.randn(3, 5, 8)
    fast = compiled(model, how, "eager")
    fast(x)
    with pytest.raises(UsageError, match=r"torch\._dynamo\.reset\(\)"):
        attach(model)
    torch._dynamo.reset()
    with attach(model) as recorder:
        fast(x)
        recorder.step(1)
    assert stored().total == toy.brute_force(model, [x])


@pytest.mark.parametrize("how", ["whole", "in place", "blocks"])
def test_a_model_of_a_class_that_was_compiled_without_hooks(toy, attach, stored, how):
    """C51: compiled code of another instance is not reused for the one with hooks."""
    x = torch.randn(3, 5, 8)
    compiled(toy.Model(layers=2), how, "eager")(x)
    model = toy.Model(layers=2)
    with attach(model) as recorder:
        fast = compiled(model, how, "eager")
        for step in (1, 2, 3):
            fast(x)
            recorder.step(step)
    assert stored().total == toy.brute_force(model, [x] * 3)


def test_code_compiled_around_the_model_is_found_out(toy, attach):
    """A step function that was compiled before: attach cannot see it, the first step does."""
    model = toy.Model(layers=2)
    x = torch.randn(3, 5, 8)
    torch._dynamo.config.skip_nnmodule_hook_guards = True
    step = torch.compile(lambda x: model(x), backend="eager")
    step(x)
    recorder = attach(model)
    step(x)
    with pytest.raises(UsageError, match="attached 2, fired 0"):
        recorder.step(1)
    with pytest.warns(UserWarning, match="never fired"):
        recorder.close()
