"""The backends against a loop that autograd differentiates; threads, empty experts, low precision."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_audit.thresholds.errors import UsageError
from moe_trainer.moe.activations import activate
from moe_trainer.moe.blocked import MIN_ROWS_PER_THREAD
from moe_trainer.moe.experts import Experts
from moe_trainer.moe.grouped import BACKENDS, choose
from moe_trainer.moe.router import expert_counts

ACTIVATIONS = [("swiglu", None), ("relu2", None), ("gpt_oss_swiglu", None), ("gpt_oss_swiglu", 0.3)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def reference(experts: Experts, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """One token and one expert at a time."""
    rows = []
    for x_D, weights_K, indices_K in zip(x_TD, weights_TK, indices_TK, strict=True):
        total = torch.zeros_like(x_D)
        for weight, e in zip(weights_K, indices_K.tolist(), strict=True):
            up = experts.w_up_gate[e] @ x_D
            if experts.b_up_gate is not None:
                up = up + experts.b_up_gate[e]
            y = activate(up, experts.activation, experts.alpha, experts.limit) @ experts.w_down[e]
            if experts.b_down is not None:
                y = y + experts.b_down[e]
            total = total + weight.to(y.dtype) * y
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x_TD) + 0 * x_TD


def plan(indices_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    offs = expert_counts(indices_TK, num_experts).cumsum(0).to(torch.int32)
    return indices_TK.flatten().argsort(stable=True), offs


def build(
    num_experts: int, dtype: torch.dtype = torch.float64, hidden: int = 12, **settings_: object
) -> Experts:
    torch.manual_seed(0)
    experts = Experts(num_experts, 8, hidden, **settings_).to(dtype)  # type: ignore[arg-type]
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return experts


def test_backend_is_chosen_by_device_size_and_coverage() -> None:
    large = (8192, 128, 256)
    assert choose("cuda", torch.bfloat16, *large) == "torch"
    assert choose("cpu", torch.float32, *large) == "loop"
    assert choose("cpu", torch.float32, 64, 128, 256) == "torch"
    assert choose("cpu", torch.float64, 64, 128, 256) == "loop"
    assert choose("cpu", torch.float32, 64, 127, 256) == "loop"
    assert choose("cpu", torch.bfloat16, 64, 128, 252) == "loop"


def test_absent_grouped_gemm_is_named() -> None:
    experts = build(3, torch.float32, backend="grouped_gemm")
    with pytest.raises(UsageError, match="grouped_gemm"):
        experts(torch.randn(4, 8), torch.tensor([1, 2, 4], dtype=torch.int32))


def gradients(y: Tensor, experts: Experts, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(9)
    leaves = [*inputs, *experts.parameters()]
    return list(torch.autograd.grad(y, leaves, torch.randn_like(y)))


def route(tokens: int, num_experts: int, top_k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
    indices = (torch.rand(tokens, num_experts) * torch.linspace(0.2, 1, num_experts)).topk(top_k).indices
    weights = torch.rand(tokens, top_k, dtype=torch.float64, requires_grad=True)
    return x, weights, indices


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.integers(0, 25),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 999),
)
def test_blocked_path_equals_the_loop_with_all_gradients(
    activation: tuple[str, float | None], bias: bool, tokens: int, num_experts: int, top_k: int, seed: int
) -> None:
    experts = build(num_experts, activation=activation[0], limit=activation[1], bias=bias)
    x, weights, indices = route(tokens, num_experts, min(top_k, num_experts), seed)
    y = experts.combine(x, weights, *plan(indices, num_experts))
    expected = reference(experts, x, weights, indices)
    torch.testing.assert_close(y, expected)
    got = gradients(y, experts, x, weights)
    if tokens:
        want = gradients(expected, experts, x, weights)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    for parameter, gradient in zip(experts.parameters(), got[2:], strict=True):
        unused = expert_counts(indices, num_experts) == 0
        assert gradient.shape == parameter.shape and (gradient[unused] == 0).all()


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
def test_gradcheck_in_float64(activation: str, limit: float | None) -> None:
    experts = build(3, activation=activation, limit=limit, bias=True)
    x, weights, indices = route(5, 3, 2, 4)
    slots, offs = plan(indices, 3)
    parameters = list(experts.parameters())

    def run(x: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
        return experts.combine(x, weights, slots, offs)

    assert torch.autograd.gradcheck(run, (x, weights, *parameters))


@pytest.mark.parametrize("backend", ["torch", "loop"])
def test_backends_agree_in_fp32(backend: str) -> None:
    experts = build(5, torch.float32, bias=True)
    x, weights, indices = route(70, 5, 2, 1)
    x, weights = (v.detach().float().requires_grad_() for v in (x, weights))
    slots, offs = plan(indices, 5)
    expected = reference(experts, x, weights, indices)
    want = gradients(expected, experts, x, weights)
    experts.backend = backend
    for matmul in (None, BACKENDS[backend]):
        experts.matmul = matmul
        y = experts.combine(x, weights, slots, offs)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        for a, b in zip(gradients(y, experts, x, weights), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_experts", [1, 3, 40])
@pytest.mark.parametrize("count", [2, 3])
def test_threads_share_an_expert_and_repeat_bit_for_bit(num_experts: int, count: int) -> None:
    experts = build(num_experts, bias=True, backend="loop")
    x, weights, indices = route(MIN_ROWS_PER_THREAD * 4, num_experts, 1, 2)
    slots, offs = plan(indices, num_experts)
    runs = []
    for threads in (1, count, count):
        torch.set_num_threads(threads)
        y = experts.combine(x, weights, slots, offs)
        runs.append([y, *gradients(y, experts, x, weights)])
    assert torch.get_num_threads() == count
    for alone, first, second in zip(*runs, strict=True):
        torch.testing.assert_close(alone, first)
        assert torch.equal(first, second)


def test_number_of_threads_may_change_before_the_backward_pass() -> None:
    experts = build(3, backend="loop")
    x, weights, indices = route(MIN_ROWS_PER_THREAD * 4, 3, 1, 2)
    slots, offs = plan(indices, 3)
    torch.set_num_threads(1)
    alone = gradients(experts.combine(x, weights, slots, offs), experts, x, weights)
    torch.set_num_threads(3)
    y = experts.combine(x, weights, slots, offs)
    torch.set_num_threads(2)
    for a, b in zip(gradients(y, experts, x, weights), alone, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(experts.combine(x, weights, slots, offs), y.detach())


def test_a_weight_of_zero_still_gets_its_gradient() -> None:
    experts = build(3)
    x, _, indices = route(6, 3, 2, 5)
    weights = torch.zeros(6, 2, dtype=torch.float64, requires_grad=True)
    y = experts.combine(x, weights, *plan(indices, 3))
    want = gradients(reference(experts, x, weights, indices), experts, x, weights)
    torch.testing.assert_close(gradients(y, experts, x, weights)[1], want[1])
    assert (want[1] != 0).all()


def test_frozen_experts_and_inputs_without_gradient() -> None:
    experts = build(3)
    x, weights, indices = route(6, 3, 2, 5)
    slots, offs = plan(indices, 3)
    want = gradients(experts.combine(x, weights, slots, offs), experts, x, weights)
    experts.w_down.requires_grad_(False)
    y = experts.combine(x.detach(), weights, slots, offs)
    torch.manual_seed(9)
    y.backward(torch.randn_like(y))
    assert experts.w_down.grad is None and x.grad is None
    assert experts.w_up_gate.grad is not None
    torch.testing.assert_close(experts.w_up_gate.grad, want[2])


@pytest.mark.parametrize("backend", ["torch", "loop"])
def test_low_precision_keeps_its_dtype(backend: str) -> None:
    experts = build(4, torch.float32, hidden=16, backend=backend)
    x, weights, indices = route(64, 4, 2, 5)
    x, weights = x.detach().float(), weights.detach().float()
    slots, offs = plan(indices, 4)
    expected = experts.combine(x, weights, slots, offs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = experts.combine(x, weights, slots, offs)
    experts.to(torch.bfloat16)
    low = experts.combine(x.bfloat16().requires_grad_(), weights, slots, offs)
    low.sum().backward()
    assert autocast.dtype == torch.float32 and low.dtype == torch.bfloat16
    assert experts.w_down.grad is not None and experts.w_down.grad.dtype == torch.bfloat16
    for y in (autocast, low.float()):
        assert float((y - expected).norm() / expected.norm()) < 0.02


def test_one_seam_replaces_both_matmuls() -> None:
    experts, calls = build(3, torch.float32), []

    def seam(x_ND: Tensor, w_EDH: Tensor, offs_E: Tensor) -> Tensor:
        calls.append(tuple(w_EDH.shape))
        return BACKENDS["loop"](x_ND, w_EDH, offs_E)

    x, weights, indices = route(6, 3, 2, 5)
    arguments = x.detach().float(), weights.detach().float(), *plan(indices, 3)
    expected = experts.combine(*arguments)
    experts.matmul = seam
    torch.testing.assert_close(experts.combine(*arguments), expected)
    assert calls == [(3, 8, 24), (3, 12, 8)]


def test_retained_graph_gives_the_same_gradients_twice() -> None:
    experts = build(3)
    x, weights, indices = route(6, 3, 2, 5)
    y = experts.combine(x, weights, *plan(indices, 3)).sum()
    first, second = (torch.autograd.grad(y, experts.w_up_gate, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_initial_values_are_cut_at_three_deviations() -> None:
    experts = Experts(4, 64, 64)
    for weight in (experts.w_up_gate, experts.w_down):
        assert float(weight.abs().max()) <= 0.06
        assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    for generator in seeds:
        experts.reset_parameters(0.02, generator)
        values = [p.clone() for p in experts.parameters()]
    experts.reset_parameters(0.02, torch.Generator().manual_seed(1))
    assert all(itertools.starmap(torch.equal, zip(values, experts.parameters(), strict=True)))


def test_threads_survive_a_fork() -> None:
    """A data loader forks after the first step: the child starts threads of its own."""
    code = """
import os, torch
from moe_trainer.moe.blocked import _threads
torch.set_num_threads(2)
one = _threads.map(lambda part: torch.get_num_threads(), 2)
child = os.fork()
if child == 0:
    os._exit(0 if _threads.map(lambda part: part, 2) == [0, 1] else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(one, torch.get_num_threads(), status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[0] == "[1, 1] 2 0", done.stderr


def test_backward_fills_no_gradient_for_what_the_forward_keeps() -> None:
    experts = build(4, torch.float32, hidden=64, backend="loop")
    x_TD = torch.randn(512, 8, requires_grad=True)
    slots_N, offs_E = plan(torch.randint(4, (512, 2)), 4)
    y_TD = experts.combine(x_TD, torch.full((512, 2), 0.5), slots_N, offs_E)
    with torch.profiler.profile(record_shapes=True) as profile:
        y_TD.sum().backward()
    kept = 1024 * 128
    filled = [event.input_shapes[0] for event in profile.events() if event.name == "aten::fill_"]
    assert filled and all(torch.Size(shape).numel() < kept for shape in filled)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_openmp_threads_end_before_the_experts_threads_begin() -> None:
    code = """
import os, torch
from moe_trainer.moe.blocked import _pause_openmp, end_openmp_threads
torch.set_num_threads(3)
x = torch.ones(2**20)
counts = []
for _ in range(2):
    (x + 1).sum()
    counts.append(len(os.listdir("/proc/self/task")))
    end_openmp_threads()
    counts.append(len(os.listdir("/proc/self/task")))
print(_pause_openmp is not None, counts[0] - counts[1], counts[2] - counts[3], float((x + 1).sum()) == 2**21)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    can, first, second, right = done.stdout.split()
    assert right == "True"
    assert (first, second) == ("2", "2") or can == "False"
