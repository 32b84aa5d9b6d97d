"""Sampling floors against simulation of a perfect router, and the design effect."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from moe_audit.thresholds import floors


def perfect(rng: np.random.Generator, draws: int, tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """Counts [draws, E] of a router that sends each token to k different experts, all alike."""
    out = np.empty((draws, num_experts), np.int64)
    for d in range(draws):
        picks = np.argpartition(rng.random((tokens, num_experts), dtype=np.float32), top_k - 1, axis=1)[
            :, :top_k
        ]
        out[d] = np.bincount(picks.ravel(), minlength=num_experts)
    return out


def test_doctests() -> None:
    assert doctest.testmod(floors).failed == 0


@pytest.mark.parametrize(
    ("num_experts", "top_k", "tokens", "cv", "lir", "draws"),
    [
        (8, 2, 512, 0.077, 1.25, 400),
        (8, 2, 4096, 0.027, 1.08, 120),
        (64, 8, 4096, 0.041, 1.21, 40),
        (128, 8, 8192, 0.043, 1.25, 15),
        (256, 8, 8192, 0.062, 1.42, 10),
    ],
)
def test_floor_table(num_experts: int, top_k: int, tokens: int, cv: float, lir: float, draws: int) -> None:
    M = tokens * top_k
    assert float(floors.cv_floor(num_experts, top_k, M)) == pytest.approx(cv, abs=6e-4)
    assert float(floors.lir_floor(num_experts, top_k, M)) == pytest.approx(lir, abs=6e-3)
    n = perfect(np.random.default_rng(1), draws, tokens, num_experts, top_k)
    assert np.sqrt((n.var(1) / n.mean(1) ** 2).mean()) == pytest.approx(cv, rel=0.08)
    assert (n.max(1) / n.min(1)).mean() == pytest.approx(lir, abs=0.03)


@pytest.mark.parametrize(("num_experts", "top_k", "tokens"), [(8, 2, 256), (16, 1, 256), (64, 8, 96)])
def test_one_minus_alpha_floors_hold(num_experts: int, top_k: int, tokens: int) -> None:
    """Of 2,000 perfect windows at most about alpha exceed the floor, and the floor is not far off either."""
    alpha, draws = 0.05, 2000
    n = perfect(np.random.default_rng(2), draws, tokens, num_experts, top_k)
    z = floors.looks_z(alpha, num_experts)
    M = tokens * top_k
    u = num_experts * n / M
    p = n / M
    h = -(p * np.log(p)).sum(1) / np.log(num_experts)
    rates = {
        "max_load": (
            u.max(1) > floors.floor("max_load", floors.noise("max_load", num_experts, top_k, M, 1.0, z), 0)
        ),
        "min_load": (
            u.min(1) < floors.floor("min_load", floors.noise("min_load", num_experts, top_k, M, 1.0, z), 0)
        ),
        "cv": u.std(1) > floors.cv_floor(num_experts, top_k, M, 1.0, floors.looks_z(alpha, 1)),
        "entropy": h
        < 1 - floors.noise("norm_entropy", num_experts, top_k, M, 1.0, floors.looks_z(alpha, 1)) ** 2,
    }
    for name, over in rates.items():
        assert 0.001 < over.mean() < 1.6 * alpha, name


def test_floors_of_no_chance_are_perfect() -> None:
    assert float(floors.lir_floor(1, 1, 100)) == 1.0
    assert float(floors.lir_floor(8, 8, 100)) == 1.0
    assert float(floors.lir_floor(64, 8, 8)) == np.inf
    assert np.isinf(floors.cv_floor(8, 2, np.array([0, 100]))).tolist() == [True, False]
    with np.errstate(all="raise"):
        assert floors.max_vio_floor(1, 1, np.array([0, 100])).tolist() == [0, 0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (2, 1), (8, 4), (8, 7), (256, 8)])
def test_no_assignments_tell_nothing(num_experts: int, top_k: int) -> None:
    floor = float(floors.max_vio_floor(num_experts, top_k, 0, z=3.0))
    assert floor == (0.0 if num_experts == 1 else np.inf)


@pytest.mark.parametrize("metric", ["max_load", "min_load", "lir", "cv", "norm_entropy", "min_share"])
def test_tokens_needed_bring_the_floor_to_the_limit(metric: str) -> None:
    limit = {
        "max_load": 1.3,
        "min_load": 0.6,
        "lir": 1.5,
        "cv": 0.1,
        "norm_entropy": 0.99,
        "min_share": 0.08,
    }[metric]
    z = floors.looks_z(0.01, 8 * 20 * 4)
    tokens = float(floors.tokens_needed(metric, limit, 8, 2, 3.0, z))
    at = floors.floor(metric, floors.noise(metric, 8, 2, 2 * tokens, 3.0, z), 8)
    assert float(at) == pytest.approx(limit, rel=1e-9)
    assert np.isinf(floors.tokens_needed("max_load", 1.0, 8, 2))


@pytest.mark.parametrize("sizes", [[512] * 32, [128, 1024] * 16, [1000] + [64] * 40])
def test_design_effect_is_one_on_independent_tokens(sizes: list[int]) -> None:
    """Also with micro-batches of varying size, which a naive variance of counts takes for correlation."""
    rng = np.random.default_rng(3)
    p = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02])
    values = []
    for _ in range(60):
        n = np.array([rng.multinomial(t, p) for t in sizes])
        square = (n**2 / np.array(sizes)[:, None]).sum(0)
        n_E, T, B = n.sum(0), sum(sizes), len(sizes)
        q = n_E / T
        values.append(np.median((square - n_E**2 / T) / ((B - 1) * q * (1 - q))))
        got = floors.design_effect(square, n_E, T, B, 1)
        assert float(got) == pytest.approx(max(1.0, values[-1]))
    assert 0.9 < np.mean(values) < 1.1


def test_design_effect_of_repeated_documents() -> None:
    """Each token stands 16 times: the variance is 16 times that of independent tokens."""
    rng = np.random.default_rng(4)
    n = 16 * rng.multinomial(64, [0.125] * 8, size=400)
    phi = floors.design_effect((n**2 / 1024).sum(0), n.sum(0), 400 * 1024, 400, 1)
    assert 14 < float(phi) < 18


def test_no_design_effect_from_one_micro_batch() -> None:
    assert np.isnan(
        floors.design_effect(np.ones((2, 4)), np.ones((2, 4)), np.array([4, 4]), np.array([1, 0]), 1)
    ).all()


def test_association_floor_holds_on_independent_sources() -> None:
    from moe_audit import formulas

    rng = np.random.default_rng(5)
    n = perfect(rng, 900, 200, 8, 2).reshape(300, 3, 8)
    floor = floors.association_floor(8, 2, 3, formulas.balanced_assignments(n), 1.0, floors.looks_z(0.05, 1))
    assert (formulas.cramers_v(n, 2) > floor).mean() < 0.09


def test_shift_floor_holds_between_perfect_windows() -> None:
    rng = np.random.default_rng(6)
    n = perfect(rng, 1200, 200, 16, 2)
    p = n / n.sum(1, keepdims=True)
    dp = p[1::2] - p[::2]
    tv, _ = floors.shift_floor(16, 2, 400, 400, 1.0, floors.looks_z(0.05, 1))
    _, load = floors.shift_floor(16, 2, 400, 400, 1.0, floors.looks_z(0.05, 16))
    assert 0.01 < (0.5 * np.abs(dp).sum(1) > tv).mean() < 0.09
    assert 0.01 < (16 * np.abs(dp).max(1) > load).mean() < 0.09
