"""`check`: one run under one policy, to one verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moe_audit import formulas as m
from moe_audit.column import Column, Looks
from moe_audit.frame import Analysis, LayerFrame, analyse
from moe_audit.gates import column
from moe_audit.invariants import INVARIANT, Inspector, Problem, notes, problem, run_problems
from moe_audit.judge import Tally, judge_column, limits
from moe_audit.run import Run, open_run
from moe_audit.series import SERIES_GATES, SeriesJudge
from moe_audit.thresholds.calibrate import NOT_CALIBRATED, expected_breaches
from moe_audit.thresholds.gate_names import GATES
from moe_audit.thresholds.policy import Policy, load_policy
from moe_audit.verdict import Grid, Status, Verdict
from moe_audit.windows import CHECKPOINT_WINDOWS, Tail

UNCOUNTED = ("health", "drift")  # families that can pass where no gate on the counts could be decided
EVEN_LOSS = 1.1  # a balancing loss N*sum f*P below this looks fine


def check(
    run: Run | str | Path,
    policy: Policy | str | Path | None = "default",
    length: int | None = None,
    stride: int | None = None,
    checkpoint: int | None = None,
    *,
    first_step: int | None = None,
    last_step: int | None = None,
    last: int | None = None,
    layers: Sequence[int] | None = None,
    sources: Sequence[str] | None = None,
    all_cells: bool = False,
    fail_on: Literal["fail", "warn", "never"] = "fail",
) -> Verdict:
    """Judges a run window by window.

    Args:
        run: An open run, or a path to open.
        policy: A policy, its name or path; None looks for one as the command line does.
        length, stride: Of the windows, in steps; None: from the policy, `meta`, or the length of the run.
        checkpoint: Judge the last 5 windows that end at or before this step; only they are read.
        first_step, last_step: Only records within these steps.
        last: Judge only so many windows, the last ones.
        layers, sources: Only these; pooled values are then over these sources.
        all_cells: Keep the cells that pass too.
        fail_on: What exit code 1 stands for. Codes 2 to 5 cannot be silenced.

    Returns:
        The verdict; a broken invariant makes it INVALID, too little data INSUFFICIENT, never PASS.

    Raises:
        UsageError: an unknown layer or source, a bad length, stride or policy.
        NoDataError: there is no record to judge.
        StoreError: the store is damaged.
    """
    if isinstance(run, str | Path):
        with open_run(run) as opened:
            return check(
                opened, policy, length, stride, checkpoint, first_step=first_step, last_step=last_step,
                last=last, layers=layers, sources=sources, all_cells=all_cells, fail_on=fail_on,
            )  # fmt: skip
    if not isinstance(policy, Policy):
        policy = load_policy(policy)
    if checkpoint is not None:
        last = CHECKPOINT_WINDOWS if last is None else last
    analysis = analyse(
        run,
        policy=policy,
        length=length,
        stride=stride,
        first_step=first_step,
        last_step=last_step,
        checkpoint=checkpoint,
        last=last,
        layers=layers,
        sources=sources,
        judged_only=True,
    )
    return _Judge(analysis, policy, all_cells).verdict(fail_on)


class _Judge:
    """The passes of one check: every layer once, then what runs over many windows, then the verdict."""

    def __init__(self, analysis: Analysis, policy: Policy, all_cells: bool) -> None:
        self.analysis, self.policy = analysis, policy
        windows = analysis.windows
        self.tally = Tally(windows, policy, all_cells)
        self.looks = Looks(
            policy.alpha,
            max(int(windows.judged_W.sum()), 1),
            len(analysis.layers),
            len(analysis.sources),
            policy.effect,
        )
        self.skipped: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.mix: tuple[float, str] = (0.0, "")
        self.source_mix: dict[str, float] = {}
        self.series = SeriesJudge(analysis, self.looks)
        self.wants_series = not set(SERIES_GATES).isdisjoint(policy.gates)

    def verdict(self, fail_on: str) -> Verdict:
        analysis, policy, tally = self.analysis, self.policy, self.tally
        inspector = Inspector(analysis.records, analysis.rows.tolist())
        wants_series = "periodicity" in policy.gates and self.series.lag is not None
        for frame in analysis.frames(series=wants_series, inspect=inspector):
            self._layer(frame)
        for judged in self.series.judge(policy, self._skip):
            tally.add(judged)
        self.problems += [*run_problems(analysis.run, analysis.records), *inspector.problems]
        invalid = any(p["kind"] == INVARIANT for p in self.problems)
        self._add_notes(inspector)
        for gate in policy.gates:
            if gate not in tally.worst and gate not in self.skipped:
                self.skipped[gate] = "no window has a value"
        skipped = [
            {"gate": g, "reason": r} for g, r in self.skipped.items() if g in GATES and g not in tally.worst
        ]
        status, why = self._status(invalid)
        exit_code = exit_code_of(status, fail_on)
        return Verdict(
            status,
            exit_code,
            self._run(),
            {"name": policy.name, "sha256": policy.sha256, "origin": policy.origin},
            self._windows(),
            {s.name: tally.totals[s] for s in (Status.PASS, Status.WARN, Status.FAIL, Status.INSUFFICIENT)},
            tally.gate_results(policy.gates),
            sorted(tally.cells, key=lambda c: (-c.status, c.first_step, c.layer, c.gate, c.source)),
            skipped,
            list(tally.waived.values()),
            self.problems,
            why if exit_code >= 2 else None,
            self._grid(),
            self._tail(),
        )

    # -- one layer

    def _layer(self, frame: LayerFrame) -> None:
        policy, windows = self.policy, self.analysis.windows
        self.source_mix = self.source_mix or frame.source_mix
        uneven = False
        empty_W = windows.judged_W & (frame.m_W == 0) & (frame.invalid_W == 0)
        if empty_W.any():
            name = f"layer {frame.info.layer} ({frame.info.name})"
            n, W = empty_W.sum(), windows.judged_W.sum()
            where = "the windows judged" if n == W else f"{n} of the {W} windows judged"
            since = windows.first_step_W[empty_W.argmax()]
            self.problems.append(
                problem("no_data", f"{name} has no counts in {where}, the first from step {since}")
            )
        for gate in policy.gates:
            places = list(limits(policy, gate, frame.info, frame.sources))
            if gate in SERIES_GATES:
                continue
            for source, name, limit in places:
                result = column(gate, frame, self.looks, source)
                if not isinstance(result, Column):
                    self._skip(gate, result)
                    continue
                judged = judge_column(
                    gate, frame.info, name, limit, result, windows.judged_W, noise_aware=policy.noise_aware
                )
                self.tally.add(judged)
                uneven |= GATES[gate].family == "evenness" and bool((judged.status_W == Status.FAIL).any())
        if self.wants_series:
            self.series.add(frame)
        self._note_mix(frame)
        if uneven and frame.prob_WSE is not None:
            self._note_loss(frame)

    def _skip(self, gate: str, reason: str) -> None:
        self.skipped.setdefault(gate, reason)

    def _note_mix(self, frame: LayerFrame) -> None:
        """Remembers the largest swing that the data mix made, where the router did not."""
        limit = next((x for _, _, x in limits(self.policy, "tv", frame.info, ())), None)
        least = (limit.warn if limit.warn is not None else limit.fail) if limit else None
        if least is None or len(frame.sources) < 2 or not (frame.windows.previous_W >= 0).any():
            return
        router_W, mix_W = (0.5 * np.abs(x).sum(-1) for x in frame.shift_WE)
        mix_W = np.where(frame.windows.judged_W & ~np.isnan(mix_W), mix_W, 0.0)
        w = int(mix_W.argmax())
        if mix_W[w] <= max(least, self.mix[0]):
            return
        steps = f"{frame.windows.first_step_W[w]}-{frame.windows.last_step_W[w]}"
        self.mix = (
            float(mix_W[w]),
            f"the data mix moved the loads of layer {frame.info.layer} by {mix_W[w]:.3f} (total variation)"
            f" at steps {steps}, the router itself by {router_W[w]:.3f}: other data came by",
        )

    def _note_loss(self, frame: LayerFrame) -> None:
        assert frame.prob_WSE is not None  # the caller looked
        loss_W = m.switch_loss(frame.n_WE, frame.prob_WSE.sum(1))
        bad_W = self.tally.status_WL[frame.info.layer] == Status.FAIL
        fine = np.flatnonzero(bad_W & (loss_W < EVEN_LOSS))
        if len(fine):
            w = fine[0]
            steps = f"{frame.windows.first_step_W[w]}-{frame.windows.last_step_W[w]}"
            self.problems.append(
                problem(
                    "balancing_loss",
                    f"layer {frame.info.layer}, steps {steps}: balancing loss N*sum f*P = {loss_W[w]:.3f}"
                    " is near its floor of 1, while dispatch fails: judge the counts, not the loss",
                )
            )

    # -- the whole

    def _add_notes(self, inspector: Inspector) -> None:
        analysis, policy = self.analysis, self.policy
        self.problems += notes(analysis.run, analysis.records, analysis.windows.layout.length)
        if inspector.unchecked:
            named = ", ".join(map(str, inspector.unchecked[:8]))
            more = " ..." if len(inspector.unchecked) > 8 else ""
            self.problems.append(
                problem("not_checkable", f"picks cannot be checked against tokens in layers {named}{more}")
            )
        if analysis.windows.unjudged_steps:
            end = analysis.records[-1].last_step
            first = end - analysis.windows.unjudged_steps + 1
            self.problems.append(
                problem("tail", f"steps {first}-{end} fill no window yet and are not judged")
            )
        if self.mix[1]:
            self.problems.append(problem("mix_shift", self.mix[1]))
        infos = analysis.layers
        messages = policy.unknown_names([i.layer for i in analysis.run.layers], analysis.run.sources)
        messages += policy.mismatches(
            _common(i.num_experts for i in infos),
            _common(i.top_k for i in infos),
            _common(i.capacity_factor for i in infos),
            source_mix=self.source_mix,
            microbatch_tokens=analysis.microbatch_tokens,
        )
        messages += self._beyond_calibrated()
        self.problems += [problem("policy", message) for message in messages]
        self.problems += [
            problem("waiver", f"the waiver of {w.owner} for {w.gate} expired on {w.expires}")
            for w in policy.expired_waivers()
        ]

    def _beyond_calibrated(self) -> list[str]:
        """How many windows lie beyond calibrated limits, beside how many do in a healthy run."""
        reference, windows = self.policy.provenance, self.analysis.windows
        starts = set(windows.first_step_W[windows.disjoint_W].tolist())
        limit_of = {gate: judged.limit for gate, (_, judged, _) in self.tally.worst.items()}
        gates = {gate for gate in limit_of.keys() - NOT_CALIBRATED if limit_of[gate].fail is not None}
        beyond = {
            (c.gate, c.first_step)
            for c in self.tally.cells
            if c.status == Status.FAIL and c.gate in gates and c.first_step in starts
        }
        if reference is None or not beyond:
            return []
        alpha = max(reference.alpha, reference.attainable_alpha)
        return [
            f"{len(beyond)} lie beyond a fail limit, where calibrated limits leave"
            f" {expected_breaches(alpha, len(gates), len(starts))} in a healthy run"
        ]

    def _status(self, invalid: bool) -> tuple[Status, dict[str, str] | None]:
        """The first that holds, as the design orders them, and why where there is no verdict."""
        tally, policy, windows = self.tally, self.policy, self.analysis.windows
        if invalid:
            message = next(p["message"] for p in self.problems if p["kind"] == INVARIANT)
            return Status.INVALID, {
                "message": message, "remedy": "mend the recording; these counts mean nothing"
            }  # fmt: skip
        if Status.FAIL in tally.unwaived.values():
            return Status.FAIL, None
        count = int((windows.disjoint_W if policy.count_windows == "disjoint" else windows.judged_W).sum())
        if (silent := self._silence()) is not None:
            return Status.INSUFFICIENT, {"message": silent, "remedy": "record more tokens a window"}
        if count < policy.min_windows:
            kind = "disjoint windows" if policy.count_windows == "disjoint" else "windows"
            steps = windows.layout.length
            return Status.INSUFFICIENT, {
                "message": f"{count} {kind} of {steps} steps, where {policy.min_windows} are needed",
                "remedy": "record more steps, or judge shorter windows with --length",
            }
        missing = [gate for gate in policy.required if gate not in tally.decided]
        if missing:
            reason = self.skipped.get(missing[0], "every cell is within sampling noise")
            return Status.INSUFFICIENT, {
                "message": f"the policy requires the gate {missing[0]}, which judged nothing: {reason}",
                "remedy": "record what it needs, or take it out of `required`",
            }
        return (Status.WARN if Status.WARN in tally.unwaived.values() else Status.PASS), None

    def _silence(self) -> str | None:
        """What makes a run say too little to pass, though single cells may have been decided; None: nothing.

        A policy that judges evenness has not judged a run of which no load could be told from noise.
        """
        tally, policy = self.tally, self.policy
        evenness = [gate for gate in policy.gates if GATES[gate].family == "evenness" and gate in tally.worst]
        on_counts = [gate for gate in policy.gates if GATES[gate].family not in UNCOUNTED]
        if not tally.decided.intersection(on_counts or policy.gates):
            return "nothing was judged: " + _reasons(tally.totals, self.skipped)
        if evenness and not tally.decided.intersection(evenness):
            cells = "every cell of " + ", ".join(evenness)
            return f"how even the loads are was not judged: {cells} is within sampling noise"
        return None

    def _run(self) -> dict[str, Any]:
        analysis = self.analysis
        return {
            "path": str(analysis.run.path),
            "run_id": None if (run_id := analysis.run.meta.get("run_id")) is None else str(run_id),
            "first_step": analysis.records[0].first_step,
            "last_step": analysis.records[-1].last_step,
            "layers": [i.layer for i in analysis.layers],
            "num_experts": _common(i.num_experts for i in analysis.layers),
            "top_k": _common(i.top_k for i in analysis.layers),
            "sources": list(analysis.sources),
            "attempts": len(analysis.run.attempts),
        }

    def _windows(self) -> dict[str, Any]:
        windows = self.analysis.windows
        return {
            "length": windows.layout.length,
            "stride": windows.layout.stride,
            "count": int(windows.judged_W.sum()),
            "disjoint": int(windows.disjoint_W.sum()),
            "origin": windows.layout.origin,
        }

    def _tail(self) -> Tail | None:
        """None within the warm-up: the windows are anchored at its end."""
        windows = self.analysis.windows
        return Tail(self.analysis.records[0].record, windows.anchor) if windows.judged_W.any() else None

    def _grid(self) -> Grid:
        windows = self.analysis.windows
        blank = np.full(len(windows), -1, np.int8)
        columns = [self.tally.status_WL.get(i.layer, blank) for i in self.analysis.layers]
        judged = windows.judged_W
        return Grid(
            windows.first_step_W[judged],
            windows.last_step_W[judged],
            tuple(i.layer for i in self.analysis.layers),
            np.stack(columns, axis=1)[judged],
        )


def exit_code_of(status: Status, fail_on: str = "fail") -> int:
    """0 pass, 1 a gate failed, 3 insufficient, 4 invalid.

    >>> exit_code_of(Status.WARN), exit_code_of(Status.WARN, "warn"), exit_code_of(Status.FAIL, "never")
    (0, 1, 0)
    """
    match status:
        case Status.INVALID:
            return 4
        case Status.INSUFFICIENT:
            return 3
        case Status.FAIL:
            return int(fail_on != "never")
        case Status.WARN:
            return int(fail_on == "warn")
        case _:
            return 0


def _common(values: Iterable[Any]) -> Any:
    """The value, if all are the same; else None."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _reasons(totals: dict[Status, int], skipped: dict[str, str]) -> str:
    if totals[Status.INSUFFICIENT]:
        return "every cell is within sampling noise"
    return "; ".join(sorted(set(skipped.values()))) or "no window is complete"
