"""Permutation, conservation, capacity, drops, and the shares of the threads."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trainer.moe.blocked import BLOCK_ROWS, shares
from moe_trainer.moe.dispatch import Dispatcher, expert_capacity
from moe_trainer.moe.router import RouterOutput, expert_counts

routings = st.integers(1, 6).flatmap(
    lambda experts: st.tuples(
        st.just(experts),
        st.integers(1, experts),
        st.integers(0, 60),
        st.integers(0, 10_000),
    )
)


def route(experts: int, top_k: int, tokens: int, seed: int) -> RouterOutput:
    """Random distinct experts per token, with random weights that have ties."""
    torch.manual_seed(seed)
    scores = torch.rand(tokens, experts) * torch.linspace(1, 4, experts)
    indices = scores.topk(top_k, -1).indices
    weights = torch.randint(1, 5, (tokens, top_k)) / 4
    return RouterOutput(weights, indices, expert_counts(indices, experts), scores, scores)


@settings(deadline=None)
@given(routings)
def test_dropless_is_a_stable_permutation(case: tuple[int, int, int, int]) -> None:
    routed = route(*case)
    plan = Dispatcher(case[0])(routed)
    flat = routed.indices_TK.flatten()
    assert plan.slots_N.sort().values.tolist() == list(range(len(flat)))
    assert plan.slots_N.tolist() == sorted(range(len(flat)), key=lambda slot: (int(flat[slot]), slot))
    assert plan.offs_E.diff(prepend=torch.zeros(1)).tolist() == routed.counts_E.tolist()
    assert plan.kept_TK is None and plan.dropped_E is None


@settings(deadline=None)
@given(routings, st.sampled_from(["position", "probs"]), st.sampled_from([0.25, 1.0, 1.3]), st.booleans())
def test_capacity_is_never_exceeded_and_nothing_is_lost(
    case: tuple[int, int, int, int], policy: str, factor: float, renormalize: bool
) -> None:
    experts, top_k, tokens, _ = case
    routed = route(*case)
    plan = Dispatcher(experts, factor, policy, renormalize)(routed)
    assert plan.kept_TK is not None and plan.dropped_E is not None
    capacity = expert_capacity(tokens, top_k, experts, factor)
    kept_E = expert_counts(routed.indices_TK[plan.kept_TK], experts)
    assert torch.equal(kept_E + plan.dropped_E, routed.counts_E)
    assert torch.equal(kept_E, routed.counts_E.clamp(max=capacity))
    assert torch.equal(plan.offs_E.diff(prepend=torch.zeros(1)).long(), kept_E)
    assert set(plan.slots_N.tolist()) == set(plan.kept_TK.flatten().nonzero().flatten().tolist())
    assert (plan.weights_TK[~plan.kept_TK] == 0).all()
    weight = routed.weights_TK.flatten().tolist()
    by_weight = policy == "probs"
    for e in range(experts):
        mine = (routed.indices_TK == e).flatten().nonzero().flatten().tolist()
        order = sorted((-weight[slot] if by_weight else 0.0, slot) for slot in mine)
        expected = {slot for _, slot in order[:capacity]}
        assert {slot for slot in mine if plan.kept_TK.flatten()[slot]} == expected
    if not renormalize:
        assert torch.equal(plan.weights_TK, routed.weights_TK * plan.kept_TK)
    else:
        some = plan.kept_TK.any(-1)
        torch.testing.assert_close(plan.weights_TK.sum(-1)[some], routed.weights_TK.sum(-1)[some])


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 8), st.integers(8, 256), st.decimals("0.01", "10", places=2))
def test_capacity_is_exact_in_the_printed_decimal(
    tokens: int, top_k: int, experts: int, factor: object
) -> None:
    exact = Fraction(str(factor)) * top_k * tokens / experts
    got = expert_capacity(tokens, top_k, experts, float(str(factor)))
    assert got % 8 == 0 and exact <= got < exact + 8


def test_published_capacities() -> None:
    assert expert_capacity(400, 1, 1, 1.1) == 440
    assert expert_capacity(400, 1, 1, 1.1, ep_degree=4) == 1760
    assert expert_capacity(4096, 8, 64, 1.25) == 640
    assert expert_capacity(0, 2, 8, 1.0) == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 3 * BLOCK_ROWS), max_size=12), st.integers(1, 7))
def test_shares_cover_every_row_once_in_equal_parts(sizes: list[int], parts: int) -> None:
    offs = torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()
    blocks = shares(offs, parts)
    total = sum(sizes)
    assert len(blocks) == parts
    assert max(sum(b.end - b.start for b in share) for share in blocks) <= -(-total // parts)
    at = 0
    for share in blocks:
        begun = set()
        for block in share:
            assert block.start == at and block.start < block.end <= block.start + BLOCK_ROWS
            assert ([0, *offs])[block.expert] <= block.start and block.end <= offs[block.expert]
            assert block.first == (block.expert not in begun)
            begun.add(block.expert)
            at = block.end
    assert at == total


@pytest.mark.parametrize("policy", ["position", "probs"])
def test_no_tokens(policy: str) -> None:
    plan = Dispatcher(4, 1.0, policy)(route(4, 2, 0, 0))
    assert len(plan.slots_N) == 0 and plan.offs_E.tolist() == [0] * 4
