"""`metrics`: every metric over windows, layers and sources, as columns; a DataFrame or rows for JSON.

Shapes: W windows, S sources, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_audit import formulas as m
from moe_audit.frame import LayerFrame, analyse
from moe_audit.record import POST_DROP
from moe_audit.run import Run, open_run
from moe_audit.thresholds import floors
from moe_audit.thresholds.policy import Policy

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]
KEYS = ("first_step", "last_step", "layer", "source")
METRICS = (
    "tokens", "lir", "max_load", "max_vio", "cv", "norm_entropy", "effective_experts", "min_share",
    "min_load", "dead_experts", "saturation", "peak_load", "capacity_use", "drop_rate", "share_shift",
    "load_shift", "tv", "router_shift", "mix_shift", "source_entropy", "f_p_gap", "association",
    "association_rel", "cramers_v",
    "association_mix", "association_rel_mix", "cramers_v_mix", "max_lift", "max_monopoly", "source_headroom",
    "top1_mean", "top1_spread", "top1_gap", "invalid_ids", "phi", "effective_tokens", "cv_floor",
    "max_vio_floor", "lir_floor", "min_load_floor", "judged",
)  # fmt: skip


def metrics(
    run: Run | str | Path,
    length: int | None = None,
    stride: int | None = None,
    *,
    policy: Policy | None = None,
    **scope: Any,
) -> pd.DataFrame:
    """Every metric of a run, one row per (window, layer, source); source "all" is their sum.

    Args:
        run: An open run, or a path to open.
        length, stride: Of the windows, in steps; None: from the policy, `meta`, or the length of the run.
        policy: Gives length, stride and lag where it has them.
        scope: first_step, last_step, checkpoint, last, layers, sources as in `check`.

    Returns:
        Columns as in `KEYS` and `METRICS`; NaN where a metric is undefined. `judged` is False in the warm-up.

    Raises:
        UsageError, NoDataError, StoreError: as `check` does.
    """
    import pandas as pd

    parts = [pd.DataFrame(table) for table in _tables(run, length, stride, policy, scope)]
    frame = pd.concat(parts, ignore_index=True)
    return frame.sort_values(["first_step", "last_step", "layer"], kind="stable", ignore_index=True)


def metric_rows(
    run: Run,
    length: int | None = None,
    stride: int | None = None,
    *,
    policy: Policy | None = None,
    **scope: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(windows, rows) for JSON: undefined and infinite numbers are None, every key is always there."""
    analysis = analyse(run, policy=policy, length=length, stride=stride, **scope)
    rows: list[dict[str, Any]] = []
    for frame in analysis.frames():
        for table in _frame_tables(frame):
            names = list(table)
            for values in zip(*(_plain(column) for column in table.values()), strict=True):
                rows.append(dict(zip(names, values, strict=True)))
    rows.sort(key=lambda row: (row["first_step"], row["last_step"], row["layer"]))
    windows = analysis.windows
    layout = windows.layout
    return {
        "length": layout.length,
        "stride": layout.stride,
        "count": int(windows.judged_W.sum()),
        "disjoint": int(windows.disjoint_W.sum()),
        "origin": layout.origin,
    }, rows


def _tables(
    run: Run | str | Path,
    length: int | None,
    stride: int | None,
    policy: Policy | None,
    scope: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    if isinstance(run, str | Path):
        with open_run(run) as opened:
            yield from _tables(opened, length, stride, policy, scope)
        return
    for frame in analyse(run, policy=policy, length=length, stride=stride, **scope).frames():
        yield from _frame_tables(frame)


def _frame_tables(frame: LayerFrame) -> Iterator[dict[str, Any]]:
    """The columns of one layer, for all sources together and then for each source."""
    headroom_WS = np.full(frame.m_WS.shape, np.nan)
    if frame.info.capacity_factor is not None and POST_DROP not in frame.info.tags:
        headroom_WS = m.source_headroom(frame.counts_WSE, frame.info.capacity_factor)
    for source in [None, *range(len(frame.sources))]:
        W = len(frame.windows)
        n_WE = frame.n_WE if source is None else frame.counts_WSE[:, source]
        tokens_W = frame.tokens_W() if source is None else frame.source_tokens_WS()[:, source]
        if frame.tokens_WS is None and frame.info.top_k is None:
            tokens_W = np.full(W, np.nan)  # picks do not tell tokens
        columns = {name: np.full(W, np.nan) for name in METRICS}
        columns |= _evenness(frame, n_WE, tokens_W) | _change(frame, n_WE, source)
        if source is None:
            columns |= _whole_layer(frame)
        else:
            columns["source_entropy"] = columns["norm_entropy"]
            columns["source_headroom"] = headroom_WS[:, source]
        columns |= _probabilities(frame, n_WE, source)
        yield {
            "first_step": frame.windows.first_step_W,
            "last_step": frame.windows.last_step_W,
            "layer": np.full(W, frame.info.layer),
            "source": ["all" if source is None else frame.sources[source]] * W,
            **columns,
            "judged": frame.windows.judged_W,
        }


def _evenness(frame: LayerFrame, n_WE: npt.NDArray[Any], tokens_W: Floats) -> dict[str, Floats]:
    N, k, m_W, phi_W = frame.N, frame.k, n_WE.sum(-1), frame.phi1_W
    vio_floor_W = floors.max_vio_floor(N, k, m_W, phi_W)
    known_W = np.where(m_W > 0, 1.0, np.nan)
    return {
        "tokens": tokens_W,
        "lir": m.lir(n_WE),
        "max_load": m.max_load(n_WE),
        "max_vio": m.max_load(n_WE) - 1,
        "cv": m.cv(n_WE),
        "norm_entropy": m.norm_entropy(n_WE),
        "effective_experts": m.effective_experts(n_WE),
        "min_share": m.min_share(n_WE),
        "min_load": m.min_load(n_WE),
        "dead_experts": m.dead_experts(n_WE),
        "saturation": m.saturation(n_WE, k) if frame.info.top_k else np.full(len(n_WE), np.nan),
        "phi": frame.phi_W,
        "effective_tokens": tokens_W / phi_W,
        "cv_floor": known_W * floors.cv_floor(N, k, m_W, phi_W),
        "max_vio_floor": known_W * vio_floor_W,
        "lir_floor": known_W * floors.lir_floor(N, k, m_W, phi_W),
        "min_load_floor": known_W * floors.floor("min_load", vio_floor_W, N),
    }


def _change(frame: LayerFrame, n_WE: npt.NDArray[Any], source: int | None) -> dict[str, Floats]:
    previous = frame.windows.previous_W
    p_WE = m.shares(n_WE)
    change_WE = np.where((previous >= 0)[:, None], p_WE - p_WE[previous], np.nan)
    columns = {
        "tv": 0.5 * np.abs(change_WE).sum(-1),
        "share_shift": np.abs(change_WE).max(-1),
        "load_shift": frame.N * np.abs(change_WE).max(-1),
    }
    if source is None:
        for name, shift_WE in zip(("router_shift", "mix_shift"), frame.shift_WE, strict=True):
            columns[name] = 0.5 * np.abs(shift_WE).sum(-1)
    return columns


def _whole_layer(frame: LayerFrame) -> dict[str, Floats]:
    """What has a value for all sources together only."""
    n_WSE, k, phi_W = frame.counts_WSE, frame.k, frame.phi1_W
    columns: dict[str, Floats] = {"invalid_ids": frame.invalid_W.astype(np.float64)}
    for suffix, equal in (("", True), ("_mix", False)):
        columns[f"association{suffix}"] = m.association(n_WSE, k, phi_W, equal_weights=equal)
        columns[f"association_rel{suffix}"] = m.association_rel(n_WSE, k, phi_W, equal_weights=equal)
        columns[f"cramers_v{suffix}"] = m.cramers_v(n_WSE, k, phi_W, equal_weights=equal)
    columns["max_lift"], columns["max_monopoly"] = m.max_lift(n_WSE), m.max_monopoly(n_WSE)
    if frame.peak_WE is not None:
        columns["peak_load"] = frame.peak_WE.max(-1)
        if frame.info.capacity_factor is not None:
            columns["capacity_use"] = columns["peak_load"] / frame.info.capacity_factor
    columns["drop_rate"] = frame.drop_rate_W()
    if frame.top1_WS2 is not None and frame.tokens_WS is not None:
        columns["top1_gap"] = m.confidence_gap(frame.top1_WS2, frame.tokens_WS)
    return columns


def _probabilities(frame: LayerFrame, n_WE: npt.NDArray[Any], source: int | None) -> dict[str, Floats]:
    columns: dict[str, Floats] = {}
    if frame.prob_WSE is not None:
        prob_WE = frame.prob_WSE.sum(1) if source is None else frame.prob_WSE[:, source]
        columns["f_p_gap"] = m.f_p_gap(n_WE, prob_WE)
    if frame.top1_WS2 is not None:
        top1_W2 = frame.top1_WS2.sum(1) if source is None else frame.top1_WS2[:, source]
        tokens_W = frame.tokens_W() if source is None else frame.source_tokens_WS()[:, source]
        columns["top1_mean"], columns["top1_spread"] = m.confidence(top1_W2, tokens_W)
    return columns


def _plain(column: Sequence[Any] | npt.NDArray[Any]) -> list[Any]:
    values = column.tolist() if isinstance(column, np.ndarray) else list(column)
    return [None if isinstance(v, float) and not math.isfinite(v) else v for v in values]
