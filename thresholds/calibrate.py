"""Limits from healthy runs: split conformal quantiles, and the policy file that carries them.

An upper limit is the ceil((n+1)(1-alpha))-th smallest of n disjoint reference windows, a lower limit the
floor((n+1) alpha)-th: a further window of the same kind breaches it with probability at most alpha, whatever
the distribution. That needs n >= 1/alpha - 1 windows; with fewer the extreme stands, worth 1/(n+1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_audit.thresholds.errors import NoDataError, UsageError
from moe_audit.thresholds.gate_names import GATES
from moe_audit.thresholds.policy_file import Provenance

# Counts of faults, switches, and gates with a floor for repeated looks of their own: a healthy run has no
# distribution of them to take a limit from.
NOT_CALIBRATED = frozenset(
    {"invalid_ids", "uniform_counts", "dead_experts", "drift", "periodicity", "static_router"}
)
ROUNDING = 1e-9  # so that (n+1)(1-alpha) is a whole number where it should be one


@dataclass(frozen=True)
class ConformalLimit:
    """A limit from n windows; `calibrated` is False where n is too small for alpha."""

    value: float
    windows: int
    alpha: float
    attainable_alpha: float

    @property
    def calibrated(self) -> bool:
        return self.attainable_alpha <= self.alpha + ROUNDING


def attainable_alpha(windows: int) -> float:
    """The smallest alpha for which n windows give a limit: 1/(n+1)."""
    return 1 / (windows + 1)


def expected_breaches(alpha: float, gates: int, windows: int) -> str:
    """What to expect of a healthy run, whose every window may breach each limit with probability alpha.

    >>> expected_breaches(0.05, 8, 20)
    'about 8 of 160 (8 gates x 20 windows)'
    """
    looks = gates * windows
    return f"about {alpha * looks:.3g} of {looks} ({gates} gates x {windows} windows)"


def run_alpha(alpha: float, gates: int, windows: int) -> float:
    """The alpha of one gate and window with which alpha of all healthy runs breach some limit, at most.

    >>> round(1 / run_alpha(0.05, 8, 20) - 1)  # reference windows that it needs
    3119
    """
    return -math.expm1(math.log1p(-alpha) / (gates * windows))


def conformal_limit(values: Sequence[float], alpha: float, op: str) -> ConformalLimit:
    """The limit that a further window breaches with probability at most alpha.

    Args:
        values: One value a disjoint window; those that are NaN are left out.
        alpha: In (0, 0.5].
        op: ">" or ">=" for an upper limit, "<" or "<=" for a lower one.

    Raises:
        UsageError: alpha is out of range.
        NoDataError: there is no value.

    >>> conformal_limit(range(1, 20), 0.05, ">").value, conformal_limit(range(1, 20), 0.05, "<").value
    (19, 1)
    >>> conformal_limit(range(1, 10), 0.05, ">").calibrated
    False
    """
    if not 0 < alpha <= 0.5:
        raise UsageError(f"alpha is {alpha}", "it must lie above 0 and at most at 0.5")
    known = sorted(v for v in values if not math.isnan(v))
    n = len(known)
    if n == 0:
        raise NoDataError("no reference window has a value", "judge shorter windows, or record longer")
    if op.startswith(">"):
        rank = math.ceil((n + 1) * (1 - alpha) - ROUNDING)
        value = known[min(rank, n) - 1]
    else:
        rank = math.floor((n + 1) * alpha + ROUNDING)
        value = known[max(rank, 1) - 1]
    return ConformalLimit(value, n, alpha, attainable_alpha(n))


@dataclass(frozen=True)
class CalibratedGate:
    """The limits of one gate. `fail` is None where the policy that is calibrated only warns."""

    gate: str
    warn: ConformalLimit
    fail: ConformalLimit | None


def calibrate_gate(gate: str, values: Sequence[float], alpha: float, *, fails: bool) -> CalibratedGate:
    """Fail limit at alpha, warning at twice alpha; where the gate only warns, the warning at alpha."""
    op = GATES[gate].op
    if not fails:
        return CalibratedGate(gate, conformal_limit(values, alpha, op), None)
    return CalibratedGate(
        gate, conformal_limit(values, min(2 * alpha, 0.5), op), conformal_limit(values, alpha, op)
    )


def policy_toml(
    name: str, extends: str, gates: Sequence[CalibratedGate], length: int, stride: int, provenance: Provenance
) -> str:
    """A policy file with these limits and where they come from."""
    lines = [
        "# Limits from healthy runs, by conformal quantiles over disjoint windows; see [provenance].",
        f"name = {json.dumps(name)}",
        f"extends = {json.dumps(extends)}",
        f"length = {length}",
        f"stride = {stride}",
        "noise_aware = false  # the limits hold the sampling noise of windows of this length already",
    ]
    for each in gates:
        if not math.isfinite(each.warn.value) or (each.fail and not math.isfinite(each.fail.value)):
            continue
        lines += ["", f"[gates.{each.gate}]", f"op = {json.dumps(GATES[each.gate].op)}"]
        if each.fail is None or each.warn.value != each.fail.value:
            lines.append(f"warn = {float(each.warn.value)!r}")
        else:
            lines.append('warn = "none"  # too few windows to tell a warning level from the limit')
        lines.append(f"fail = {float(each.fail.value)!r}" if each.fail else 'fail = "none"')
    lines += ["", "[provenance]", *_table({k: v for k, v in vars(provenance).items() if v is not None})]
    return "\n".join(lines) + "\n"


def _table(values: Mapping[str, object]) -> list[str]:
    """The keys of one TOML table. JSON text is TOML for the strings, numbers and lists in it."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{key} = {{ {inner} }}")
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    return lines
