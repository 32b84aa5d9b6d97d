"""The gates that need many windows or records of all layers: drift, periodicity, static_router.

`SeriesJudge` gathers what they need while the layers stream by, and judges at the end.
Shapes: W windows, D disjoint judged windows, L layers, S sources, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_audit import detectors
from moe_audit import formulas as m
from moe_audit.attribution import attribute
from moe_audit.column import Column, Looks, effective_tokens
from moe_audit.frame import Analysis, LayerFrame
from moe_audit.judge import Judged, judge_column, limits
from moe_audit.record import LayerInfo
from moe_audit.thresholds import floors
from moe_audit.thresholds.policy import Limit, Policy
from moe_audit.windows import positive_int, record_spacing

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

SERIES_GATES = ("drift", "periodicity", "static_router")
# What drift follows: which layer is the worst one, and the smallest deviation that is worth a thought.
DRIFT_SERIES: dict[str, tuple[bool, float]] = {
    "max_load": (True, 0.02),
    "min_load": (False, 0.02),
    "cramers_v": (True, 0.01),
}


class SeriesJudge:
    """Takes in the frames of all layers, and gives judged columns for the gates over many windows.

    Attributes:
        lag: The shard cycle, or a few of them, in records; None where it is not known or too short for the
            records to show.
    """

    def __init__(self, analysis: Analysis, looks: Looks) -> None:
        self.analysis, self.looks = analysis, looks
        windows = analysis.windows
        self.disjoint = np.flatnonzero(windows.disjoint_W)
        judged = np.flatnonzero(windows.judged_W)
        self.judged = judged
        self.cycle = positive_int(analysis.run.meta.get("shard_cycle_steps"))
        self.lag = None if self.cycle is None else self._cycle_lag(self.cycle)
        self.infos: list[LayerInfo] = []  # in the order in which the frames come
        self.series: dict[str, list[Floats]] = {name: [] for name in DRIFT_SERIES}
        self.noise: dict[str, list[Floats]] = {name: [] for name in DRIFT_SERIES}
        self.periods: list[tuple[float, float, Floats] | None] = []
        self.static: list[Floats] = []
        self.tokens: list[Floats] = []
        self.counts: list[Array] = []

    def _cycle_lag(self, cycle: int) -> int | None:
        windows, records = self.analysis.windows, self.analysis.records
        judged = windows.hi_W[self.judged[-1]] - windows.lo_W[self.judged[0]] if len(self.judged) else 0
        return detectors.cycle_lag(cycle / record_spacing(records), int(judged))

    def add(self, frame: LayerFrame) -> None:
        """Keeps the few numbers of a layer that the gates need; the frame itself is not kept."""
        self.infos.append(frame.info)
        rows = self.disjoint
        counts_DSE = frame.counts_WSE[rows]
        n_DE = counts_DSE.sum(1)
        self.series["max_load"].append(m.max_load(n_DE))
        self.series["min_load"].append(m.min_load(n_DE))
        self.series["cramers_v"].append(m.cramers_v(counts_DSE, frame.k, frame.phi1_W[rows]))
        m_D, phi_D, sources_D = frame.m_W[rows], frame.phi1_W[rows], (frame.m_WS[rows] > 0).sum(-1)
        # The largest of many loads deviates by about half as much as one of them.
        load_D = 0.5 * floors.cv_floor(frame.N, frame.k, m_D, phi_D)
        balanced_D = m.balanced_assignments(counts_DSE)
        v_D = floors.association_floor(frame.N, frame.k, sources_D, balanced_D, phi_D, z=1.0)
        for name, noise_D in (("max_load", load_D), ("min_load", load_D), ("cramers_v", v_D)):
            self.noise[name].append(np.nan_to_num(noise_D, posinf=0.0))
        self.counts.append(counts_DSE)
        self.tokens.append(effective_tokens(frame, None))
        self.static.append(detectors.static_windows(frame.counts_WSE, frame.windows.judged_W))
        if frame.series is not None and self.lag is not None and len(self.judged):
            windows = frame.windows
            span = slice(int(windows.lo_W[self.judged[0]]), int(windows.hi_W[self.judged[-1]]))
            picks_RE, source_picks_RS = (x[span] for x in frame.series)
            self.periods.append(
                detectors.periodicity(picks_RE, source_picks_RS, m.shares(counts_DSE.sum(0)), self.lag)
            )

    def judge(self, policy: Policy, skip: Callable[[str, str], None]) -> Iterator[Judged]:
        """Judged columns of the gates over many windows; `skip` hears of those without input."""
        judges = {
            "drift": self._drift,
            "periodicity": self._periodicity,
            "static_router": self._static,
        }
        for gate, judge in judges.items():
            if gate in policy.gates:
                yield from judge(policy, skip)

    def _limit(self, policy: Policy, gate: str, layer: int) -> Limit | None:
        return next((x for s, _, x in limits(policy, gate, self.infos[layer], ()) if s is None), None)

    def _judged(
        self, gate: str, layer: int, limit: Limit | None, column: Column, *, noise_aware: bool
    ) -> Iterator[Judged]:
        if limit is not None:
            info, judged_W = self.infos[layer], self.analysis.windows.judged_W
            yield judge_column(gate, info, "all", limit, column, judged_W, noise_aware=noise_aware)

    def _blank(self) -> Floats:
        return np.full(len(self.analysis.windows), np.nan)

    def _drift(self, policy: Policy, skip: Callable[[str, str], None]) -> Iterator[Judged]:
        looked_at = len(self.disjoint) - detectors.BASELINE_WINDOWS
        if looked_at < 1:
            skip(
                "drift",
                f"{len(self.disjoint)} disjoint windows, where {detectors.BASELINE_WINDOWS + 1} are needed",
            )
            return
        limit_of = {layer: self._limit(policy, "drift", layer) for layer in range(len(self.infos))}
        on = [layer for layer, limit in limit_of.items() if limit is not None]
        if not on:
            return
        series = {name: np.stack(x)[on] for name, x in self.series.items()}
        series = {name: x_LD for name, x_LD in series.items() if not np.isnan(x_LD).all(0).any()}
        if not series:
            skip("drift", "a window without a value breaks the series")
            return
        floor = floors.cusum_floor(self.looks.alpha, 2 * len(series) * looked_at)
        results, worst_layers, names = [], [], []
        for name, x_LD in series.items():
            largest, least_sigma = DRIFT_SERIES[name]
            x_D, layer_D = detectors.worst_layer(x_LD, largest=largest)
            sigma = max(least_sigma, float(np.median(np.stack(self.noise[name])[on].max(0))))
            results.append(detectors.cusum(x_D, sigma, floor))
            worst_layers.append(layer_D)
            names.append(name)
        values = np.stack([r.value_D for r in results])
        top_D = np.where(np.isnan(values), -1, values).argmax(0)
        D = len(self.disjoint)
        layer_D = np.array([on[worst_layers[top_D[d]][d]] for d in range(D)])
        for layer in np.unique(layer_D):
            value_W = self._blank()
            mine = np.flatnonzero(layer_D == layer)
            value_W[self.disjoint[mine]] = values.max(0)[mine]
            describe = {
                int(self.disjoint[d]): (
                    names[top_D[d]],
                    int(results[top_D[d]].start_D[d]),
                    int(d),
                    bool(results[top_D[d]].upward_D[d]),
                )
                for d in mine
            }
            limit = limit_of[int(layer)]
            assert limit is not None  # of the layers that are on
            raised = _raised(limit, floor)
            remark = ""
            if raised != limit:
                remark = f"; noise alone reaches {floor:.1f} when {looked_at} windows are looked at"
            column = self._drift_column(int(layer), value_W, floor, describe, remark)
            # The floor is in the limit: what passes it is decided.
            yield from self._judged("drift", int(layer), raised, column, noise_aware=False)

    def _drift_column(
        self,
        layer: int,
        value_W: Floats,
        floor: float,
        describe: dict[int, tuple[str, int, int, bool]],
        remark: str,
    ) -> Column:
        counts_DSE = self.counts[layer]

        def moved(w: int) -> tuple[Array, Array]:
            _, start, d, _ = describe[w]
            return counts_DSE[:start].sum(0), counts_DSE[start : d + 1].sum(0)

        def experts(w: int, limit: float) -> Array:
            before_SE, after_SE = moved(w)
            change_E = m.shares(after_SE.sum(0)) - m.shares(before_SE.sum(0))
            return np.argsort(-np.abs(change_E))[:3]

        def note(w: int) -> str:
            name, start, _, upward = describe[w]
            step = self.analysis.windows.first_step_W[self.disjoint[start]]
            text = f"{name} of the worst layer {'rose' if upward else 'fell'} from step {step} on"
            before_SE, after_SE = moved(w)
            shift = attribute(before_SE, after_SE)
            sources = self.analysis.sources
            if len(sources) > 1 and shift.by_source_S.any():
                text += f"; source {sources[shift.sources[0]]} moved most"
            return text + remark

        return Column(value_W, np.full(len(value_W), floor), self.tokens[layer], experts=experts, note=note)

    def _periodicity(self, policy: Policy, skip: Callable[[str, str], None]) -> Iterator[Judged]:
        if self.cycle is None:
            skip("periodicity", "meta has no shard_cycle_steps")
            return
        if self.lag is None:
            skip("periodicity", f"records are too long to show a cycle of {self.cycle} steps")
            return
        if all(p is None or math.isnan(p[0]) for p in self.periods):
            skip("periodicity", f"too few cycles of {self.cycle} steps were judged")
            return
        lag, w = self.lag, int(self.judged[-1])
        for layer, period in enumerate(self.periods):
            if period is None or math.isnan(period[0]):
                continue
            correlation, swing, swing_E = period
            value_W, floor_W = self._blank(), self._blank()
            harmless = swing < detectors.SMALLEST_SWING
            value_W[w] = min(correlation, 0.0) if harmless else correlation
            windows, N = self.analysis.windows, len(swing_E)
            records = int(windows.hi_W[w] - windows.lo_W[self.judged[0]])
            floor_W[w] = min(1.0, self.looks.z(1) / math.sqrt(max((records - 2 * lag) * (N - 1), 1)))
            first = windows.first_step_W[self.judged[0]]
            note = (
                f"the router's shares come back every {self.cycle} steps, over steps"
                f" {first}-{windows.last_step_W[w]}, by {swing:.2f} fair shares"
            )
            column = Column(
                value_W,
                floor_W,
                self.tokens[layer],
                experts=lambda w, limit, swing_E=swing_E: np.argsort(-swing_E)[:3],  # type: ignore[misc]
                note=lambda w, note=note: note,  # type: ignore[misc]
            )
            limit = self._limit(policy, "periodicity", layer)
            yield from self._judged("periodicity", layer, limit, column, noise_aware=policy.noise_aware)

    def _static(self, policy: Policy, skip: Callable[[str, str], None]) -> Iterator[Judged]:
        if len(self.judged) < detectors.STATIC_WINDOWS:
            skip("static_router", f"{len(self.judged)} windows, where {detectors.STATIC_WINDOWS} are needed")
            return
        for layer, value_W in enumerate(self.static):
            column = Column(
                value_W,
                None,
                self.tokens[layer],
                note=lambda w: (
                    f"the same counts in {detectors.STATIC_WINDOWS} windows: the router is not learning"
                ),
            )
            limit = self._limit(policy, "static_router", layer)
            yield from self._judged("static_router", layer, limit, column, noise_aware=policy.noise_aware)


def _raised(limit: Limit, floor: float) -> Limit:
    """The limit, or where noise alone passes it, what noise does not pass."""
    warn, fail = (None if x is None else max(x, floor) for x in (limit.warn, limit.fail))
    return Limit(limit.op, None if warn == fail else warn, fail)
