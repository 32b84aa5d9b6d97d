"""What the oracles do not cover: exact ties, purity, precision, expert choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trainer.moe import RouterConfig
from moe_trainer.moe.losses import orthogonal_loss
from moe_trainer.moe.router import Router


def make(**given_settings: Any) -> Router:
    torch.manual_seed(0)
    router = Router(RouterConfig(**{"d_model": 8, "num_experts": 6, "top_k": 2, **given_settings}))
    torch.nn.init.normal_(router.weight)
    return router


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-3, 3), min_size=6, max_size=6),
    st.sampled_from([0.0, 1.0, 1e3, -1e6]),
    st.integers(1, 6),
)
def test_equal_values_go_to_the_lower_index(steps: list[int], offset: float, k: int) -> None:
    """Values that share a cell of the 2**-14 grid are equal; at 1e6 fp32 itself is coarser than the grid."""
    grid = 2.0**-14 if abs(offset) < 2**9 else 0.25
    noise = 1e-6 if abs(offset) < 1 else 0.0
    values = torch.tensor([[offset + step * grid + noise * (i % 2) for i, step in enumerate(steps)]])
    got = make(top_k=k, tie_break=True).select(values)[0].tolist()
    assert got == sorted(range(6), key=lambda i: (-steps[i], i))[:k]


def test_weights_come_from_the_unquantised_scores() -> None:
    router, x = make(tie_break=True), torch.randn(50, 8)
    out = router(x)
    assert torch.equal(out.weights_TK, out.scores_TE.gather(-1, out.indices_TK))


def test_router_is_pure() -> None:
    router, x = make(bias_gamma=1e-3, jitter_eps=None), torch.randn(20, 8)
    before = {name: value.clone() for name, value in router.state_dict().items()}
    first, second = router(x), router(x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(value, router.state_dict()[name]) for name, value in before.items())


def test_logits_are_fp32_in_a_bf16_model_and_under_autocast() -> None:
    router, x = make(bias_gamma=1e-3), torch.randn(20, 8)
    assert router.score_bias is not None
    router.score_bias.fill_(0.123456789)
    expected = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = router(x)
    assert torch.equal(out.logits_TE, expected.logits_TE)
    router.to(torch.bfloat16)
    assert router.score_bias.dtype == torch.float32
    assert float(router.score_bias[0]) == pytest.approx(0.123456789, abs=1e-8)
    assert router(x.bfloat16()).logits_TE.dtype == torch.float32


def test_jitter_only_in_training_and_repeatable() -> None:
    router, x = make(jitter_eps=0.2), torch.randn(20, 8)
    plain = x @ router.weight.T
    torch.manual_seed(3)
    first = router(x).logits_TE
    torch.manual_seed(3)
    assert torch.equal(router(x).logits_TE, first)
    assert not torch.allclose(first, plain)
    assert torch.allclose(router.eval()(x).logits_TE, plain, atol=1e-6)


def test_system_tests_spread_the_tokens() -> None:
    uniform = make(uniform_expert_assignment=True)(torch.randn(60, 8))
    assert uniform.counts_E.tolist() == [20] * 6
    random = make(random_expert_assignment=True)(torch.randn(6000, 8))
    assert random.counts_E.sum() == 12000 and (random.counts_E - 2000).abs().max() < 250
    random.weights_TK.sum().backward()


def test_temperature_divides_the_logits() -> None:
    x = torch.randn(20, 8)
    assert torch.allclose(make(temperature=4.0)(x).logits_TE * 4, make()(x).logits_TE, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 12, 50])
def test_expert_choice_fills_every_expert_alike(tokens: int) -> None:
    out = make(routing="expert_choice", normalize_expert_weights=1.0)(torch.randn(tokens, 8))
    share = min(tokens, -(-tokens * 2 // 6))
    assert out.counts_E.tolist() == [share] * 6
    chosen = out.indices_TK >= 0
    assert torch.equal(out.indices_TK[chosen], torch.arange(6).expand_as(out.indices_TK)[chosen])
    for e in range(6):
        worst_in = out.scores_TE[chosen[:, e], e].min()
        best_out = out.scores_TE[~chosen[:, e], e]
        assert len(best_out) == 0 or worst_in >= best_out.max()
    assert (out.weights_TK[~chosen] == 0).all() and out.weights_TK.isfinite().all()


def test_orthogonal_loss_is_zero_for_orthogonal_rows_and_sees_directions_only() -> None:
    assert float(orthogonal_loss(3 * torch.eye(5, 8))) == pytest.approx(0, abs=1e-12)
    # Equal rows: every one of the E^2 - E off-diagonal products is 1.
    assert float(orthogonal_loss(torch.ones(5, 8))) == pytest.approx((25 - 5) / 25)
