"""Conformal limits: their rank, their coverage, and what too few windows are worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_audit.thresholds.calibrate import calibrate_gate, conformal_limit
from moe_audit.thresholds.errors import NoDataError, UsageError


@pytest.mark.parametrize(
    ("n", "alpha", "upper", "lower", "calibrated"),
    [
        (19, 0.05, 19, 1, True), (99, 0.01, 99, 1, True), (199, 0.05, 190, 10, True),
        (100, 0.05, 96, 5, True),
        (18, 0.05, 18, 1, False), (98, 0.01, 98, 1, False), (1, 0.5, 1, 1, True),
    ],
)  # fmt: skip
def test_ranks(n: int, alpha: float, upper: int, lower: int, calibrated: bool) -> None:
    values = list(range(1, n + 1))
    high, low = conformal_limit(values, alpha, ">"), conformal_limit(values, alpha, "<")
    assert (high.value, low.value) == (upper, lower)
    assert high.calibrated is low.calibrated is calibrated
    assert high.attainable_alpha == pytest.approx(1 / (n + 1))


@given(st.integers(1, 400), st.floats(0.001, 0.5))
def test_rank_is_the_definition(n: int, alpha: float) -> None:
    values = list(range(1, n + 1))
    upper = conformal_limit(values, alpha, ">")
    if upper.calibrated and abs((n + 1) * (1 - alpha) - round((n + 1) * (1 - alpha))) > 1e-6:
        assert upper.value == math.ceil((n + 1) * (1 - alpha))


def test_coverage_of_a_further_window() -> None:
    rng = np.random.default_rng(0)
    draws = rng.lognormal(size=(4000, 40))
    over = [row[-1] > conformal_limit(row[:-1].tolist(), 0.1, ">").value for row in draws]
    under = [row[-1] < conformal_limit(row[:-1].tolist(), 0.1, "<").value for row in draws]
    assert np.mean(over) == pytest.approx(0.1, abs=0.015)
    assert np.mean(under) == pytest.approx(0.1, abs=0.015)


def test_nan_is_no_value_and_nothing_is_no_limit() -> None:
    assert conformal_limit([1.0, math.nan, 2.0], 0.3, ">").windows == 2
    with pytest.raises(NoDataError):
        conformal_limit([math.nan], 0.1, ">")
    for alpha in (0.0, -1.0, 0.6, math.nan):
        with pytest.raises(UsageError):
            conformal_limit([1.0], alpha, ">")


def test_warning_lies_before_the_limit() -> None:
    gate = calibrate_gate("min_load", [x / 100 for x in range(1, 101)], 0.05, fails=True)
    assert gate.fail is not None
    assert gate.warn.value > gate.fail.value
    assert calibrate_gate("capacity_use", [0.5] * 30, 0.05, fails=False).fail is None
