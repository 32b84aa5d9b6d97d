"""Windows: what belongs together, what is judged, what is compared with what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_audit.thresholds.errors import NoDataError, UsageError
from moe_audit.windows import Layout, choose_layout, lay_out


@dataclass
class Steps:
    first_step: int
    last_step: int


def records(*sizes: int, start: int = 1) -> list[Steps]:
    out = []
    for size in sizes:
        out.append(Steps(start, start + size - 1))
        start += size
    return out


def spans(windows: object) -> list[tuple[int, int]]:
    return list(zip(windows.first_step_W.tolist(), windows.last_step_W.tolist(), strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kwargs", "meta", "expect"),
    [
        ({"length": 40, "policy_length": 60}, {"window_length": 80}, (40, 20, "command line")),
        ({"policy_length": 60, "policy_stride": 20}, {"window_length": 80}, (60, 20, "policy")),
        ({}, {"window_length": 80, "shard_cycle_steps": 5}, (80, 40, "meta: window_length")),
        ({}, {"shard_cycle_steps": 5}, (50, 25, "meta: 10 x shard_cycle_steps")),
        ({}, {}, (100, 50, "auto")),
        ({"stride": 10}, {}, (100, 10, "auto")),
        ({}, {"warmup_steps": 20}, (80, 40, "auto")),  # 280 judged steps: 9 records, rounded to 8
        ({}, {"window_length": "many"}, (100, 50, "auto")),
    ],
)
def test_length_and_stride_come_from_the_first_that_knows(kwargs, meta, expect) -> None:  # type: ignore[no-untyped-def]
    layout = choose_layout(records(*[10] * 30), meta, **kwargs)
    assert (layout.length, layout.stride, layout.origin) == expect


def test_auto_length_is_at_most_2000_steps_and_at_least_one_record() -> None:
    assert choose_layout(records(*[10] * 2000), {}).length == 2000
    assert choose_layout(records(100), {}).length == 100
    assert choose_layout(records(1, 1, 1), {}) == Layout(1, 1, "auto")


def test_bad_lengths_are_told() -> None:
    for kwargs in (
        {"length": 0}, {"length": -5}, {"stride": 0}, {"length": 10, "stride": 20},
        {"length": 2.5}, {"length": "10"}, {"length": 10**30}, {"policy_length": 10**30},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            choose_layout(records(*[1] * 30), {}, **kwargs)  # type: ignore[arg-type]


def test_sliding_windows() -> None:
    windows = lay_out(records(*[10] * 30), Layout(100, 50, "auto"))
    assert spans(windows) == [(1, 100), (51, 150), (101, 200), (151, 250), (201, 300)]
    assert windows.previous_W.tolist() == [-1, -1, 0, 1, 2]
    assert np.flatnonzero(windows.disjoint_W).tolist() == [0, 2, 4]
    assert windows.unjudged_steps == 0


def test_classic_compares_with_the_neighbour() -> None:
    windows = lay_out(records(*[10] * 30), Layout(100, 50, "auto"), lag=1)
    assert windows.previous_W.tolist() == [-1, 0, 1, 2, 3]


def test_a_record_belongs_to_the_window_that_holds_its_last_step() -> None:
    windows = lay_out(records(*[7] * 12), Layout(20, 20, ""))
    assert spans(windows) == [(1, 14), (15, 35), (36, 56), (57, 77)]
    assert windows.unjudged_steps == 7


def test_a_window_without_a_record_is_left_out() -> None:
    gappy = records(*[10] * 4) + records(*[10] * 4, start=101)
    windows = lay_out(gappy, Layout(20, 20, ""))
    assert spans(windows) == [(1, 20), (21, 40), (101, 120), (121, 140)]
    assert windows.previous_W.tolist() == [-1, 0, 1, 2]


def test_runs_that_do_not_begin_at_step_one() -> None:
    windows = lay_out(records(*[10] * 6, start=5001), Layout(20, 10, ""))
    assert spans(windows)[0] == (5001, 5020)
    assert len(windows) == 5


def test_a_run_that_counts_its_steps_from_zero_is_judged_whole() -> None:
    windows = lay_out(records(1, 1, 1, start=0), Layout(1, 1, "call"))
    assert spans(windows) == [(0, 0), (1, 1), (2, 2)]
    assert windows.judged_W.all()
    assert windows.previous_W.tolist() == [-1, 0, 1]
    assert choose_layout(records(*[10] * 30, start=0), {}) == choose_layout(records(*[10] * 30), {})
    warm = lay_out(records(1, 1, 1, start=0), Layout(1, 1, "call"), warmup=1)
    assert warm.judged_W.tolist() == [False, False, True]


def test_sparse_records_stand_for_the_steps_before_them() -> None:
    """One step in a hundred was recorded: three records are three windows."""
    sparse = [Steps(step, step) for step in (100, 200, 300)]
    layout = choose_layout(sparse, {})
    assert (layout.length, layout.stride) == (100, 100)
    assert spans(lay_out(sparse, layout)) == [(100, 100), (200, 200), (300, 300)]
    many = [Steps(step, step) for step in range(50, 3001, 50)]
    windows = lay_out(many, choose_layout(many, {}))
    assert windows.layout == Layout(1000, 500, "auto")
    assert (windows.hi_W - windows.lo_W == 20).all() and len(windows) == 5


def test_warm_up_is_shown_and_not_judged_nor_compared_with() -> None:
    windows = lay_out(records(*[10] * 33), Layout(100, 50, "auto"), warmup=25)
    judged = [span for span, ok in zip(spans(windows), windows.judged_W, strict=True) if ok]
    assert judged[0] == (31, 130), "the first record that begins after the warm-up"
    assert len(judged) == 5
    assert not windows.judged_W[0]
    previous = [spans(windows)[p] for p in windows.previous_W[windows.judged_W] if p >= 0]
    assert all(first > 25 for first, _ in previous)


def test_shorter_than_one_window_is_one_partial_window() -> None:
    windows = lay_out(records(10, 10), Layout(100, 50, ""))
    assert spans(windows) == [(1, 20)]
    assert windows.judged_W.all()
    assert int(windows.disjoint_W.sum()) == 1


def test_warm_up_only_is_never_judged() -> None:
    assert not lay_out(records(10, 10), Layout(10, 10, ""), warmup=50).judged_W.any()


def test_stride_finer_than_the_records_gives_each_window_once() -> None:
    windows = lay_out(records(*[10] * 10), Layout(20, 1, ""))
    assert len(set(spans(windows))) == len(windows)


def test_last_windows_only() -> None:
    windows = lay_out(records(*[10] * 30), Layout(50, 25, ""), last=5)
    assert np.flatnonzero(windows.judged_W).tolist() == list(range(len(windows) - 5, len(windows)))


def test_no_records_is_no_data() -> None:
    with pytest.raises(NoDataError):
        lay_out([], Layout(10, 5, ""))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(0, 80),
    st.integers(1, 500),
)
def test_windows_hold_whole_records_in_order(
    sizes: list[int], length: int, stride: int, warmup: int, start: int
) -> None:
    rows = records(*sizes, start=start)
    windows = lay_out(rows, Layout(length, min(stride, length), ""), warmup=warmup)
    assert len(windows) >= 1
    assert (windows.hi_W > windows.lo_W).all()
    assert (np.diff(windows.lo_W) >= 0).all() and (np.diff(windows.hi_W) >= 0).all()
    for w, (lo, hi) in enumerate(zip(windows.lo_W, windows.hi_W, strict=True)):
        assert windows.first_step_W[w] == rows[lo].first_step
        assert windows.last_step_W[w] == rows[hi - 1].last_step
        if windows.judged_W[w]:
            assert rows[lo].first_step > warmup
        if windows.previous_W[w] >= 0:
            assert windows.hi_W[windows.previous_W[w]] <= lo
