"""Policies: the presets against the published tables, where a policy comes from, and every slip in a file."""

from __future__ import annotations

import datetime as dt
import json
import math
import tomllib
from pathlib import Path

import jsonschema
import pytest

from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.gate_names import GATES, breaches
from moe_audit.thresholds.policy import (
    PRESETS,
    Limit,
    load_policy,
    policy_from_dict,
    policy_schema,
    preset_text,
)


def levels(name: str, gate: str, num_experts: int, top_k: int = 2) -> tuple[float | None, float | None]:
    source = "code" if GATES[gate].per_source else "all"
    limit = load_policy(name).limit(gate, num_experts=num_experts, top_k=top_k, source=source)
    assert limit is not None
    return tuple(None if x is None else round(x, 9) for x in (limit.warn, limit.fail))


# -- presets


@pytest.mark.parametrize(
    ("gate", "num_experts", "warn", "fail"),
    [
        ("lir", 4, 1.45, 1.5), ("lir", 8, 1.45, 1.5), ("lir", 16, 1.675, 1.75), ("lir", 32, 1.9, 2.0),
        ("lir", 256, 1.9, 2.0), ("cv", 64, 0.225, 0.25), ("norm_entropy", 8, 0.865, 0.85),
        ("source_entropy", 8, 0.865, 0.85), ("min_share", 8, 0.0575, 0.05), ("min_share", 20, None, 0.05),
        ("min_share", 64, None, 0.05), ("capacity_use", 8, 0.81, 0.9), ("share_shift", 8, 0.09, 0.1),
    ],
)  # fmt: skip
def test_classic_is_the_published_table(gate: str, num_experts: int, warn: float | None, fail: float) -> None:
    assert levels("classic", gate, num_experts) == (warn, fail)


def test_classic_fails_at_the_limits_that_are_said_to_lie_below() -> None:
    policy = load_policy("classic")
    ops = {g: policy.limit(g, num_experts=8, top_k=2, capacity_factor=1.25) for g in policy.gates}
    strict = {g for g, limit in ops.items() if limit is not None and limit.op == ">="}
    assert strict == {"capacity_use", "share_shift"}
    assert (policy.lag, policy.effect, policy.noise_aware, policy.count_windows) == (
        1, "total", False, "consecutive",
    )  # fmt: skip


def default_max_load(n: int, k: int) -> tuple[float, float]:
    g = min(max((math.log2(n) - 3) / 3, 0), 1)
    c = n / k
    return min(1.5 + 0.75 * g, 1 + 0.35 * (c - 1)), min(2 + 1.25 * g, 1 + 0.6 * (c - 1))


@pytest.mark.parametrize(("n", "k"), [(4, 2), (8, 2), (16, 2), (32, 4), (64, 8), (256, 8)])
def test_default_and_specialised_follow_their_formulas(n: int, k: int) -> None:
    g, c = min(max((math.log2(n) - 3) / 3, 0), 1), n / k
    assert levels("default", "max_load", n, k) == pytest.approx(default_max_load(n, k))
    assert levels("default", "min_load", n, k) == pytest.approx((0.5 - 0.2 * g, 0.25 - 0.1 * g))
    assert levels("default", "cv", n, k) == pytest.approx((0.35 + 0.2 * g, 0.6 + 0.3 * g))
    assert levels("specialised", "max_load", n, k) == pytest.approx(
        (min(4, 1 + 0.35 * (c - 1)), min(6, 1 + 0.6 * (c - 1)))
    )
    assert levels("specialised", "max_monopoly", n, k) == (0.95, 0.99)
    assert levels("default", "load_shift", n, k) == levels("specialised", "load_shift", n, k) == (0.5, 1.0)


def test_what_a_preset_only_reports_is_not_judged() -> None:
    for name, gates in {
        "default": ("lir", "norm_entropy", "max_monopoly"),
        "specialised": ("cv", "cramers_v"),
    }.items():
        policy = load_policy(name)
        for gate in gates:
            assert gate not in policy.gates
            assert policy.limit(gate, num_experts=8, top_k=2) is None
    assert load_policy("default").limit(
        "capacity_use", num_experts=8, top_k=2, capacity_factor=1.25
    ) == Limit(">", 0.9, None)


def test_with_every_expert_in_use_no_warning_lies_beyond_the_limit() -> None:
    """N = k: the largest load is the fair share, and both levels fall together."""
    assert load_policy("default").limit("max_load", num_experts=4, top_k=4) == Limit(">", None, 1.0)


# -- where it comes from


def test_order_of_origins(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "classic"\n')
    assert load_policy(cwd=tmp_path).origin == "preset default"
    (tmp_path / "pyproject.toml").write_text('[tool.moe-audit]\nextends = "specialised"\n')
    assert load_policy(cwd=tmp_path).origin == f"[tool.moe-audit] in {tmp_path / 'pyproject.toml'}"
    (tmp_path / "moe-audit.toml").write_text('extends = "default"\nalpha = 0.05\n')
    found = load_policy(cwd=tmp_path)
    where = str(tmp_path / "moe-audit.toml")
    assert (found.origin, found.name, found.alpha) == (where, "moe-audit", 0.05)
    assert load_policy("mine.toml", cwd=tmp_path).lag == 1
    assert load_policy("classic", cwd=tmp_path).origin == "preset classic"


def test_pyproject_of_somebody_else_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert load_policy(cwd=tmp_path).name == "default"


def test_extending_lays_rules_over_rules(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('extends = "default"\n[gates.cv]\nfail = 0.7\n')
    sub = tmp_path / "sub"
    sub.mkdir()
    (sub / "top.toml").write_text(
        'extends = "../base.toml"\n[gates.cv]\nwarn = 0.4\n[gates.max_load]\nenabled = false\n'
        '[gates.tv]\nfail = "none"\n'
    )
    policy = load_policy(sub / "top.toml")
    assert policy.limit("cv", num_experts=8, top_k=2) == Limit(">", 0.4, 0.7)
    assert policy.limit("max_load", num_experts=8, top_k=2) is None
    assert policy.limit("tv", num_experts=8, top_k=2) == Limit(">", 0.1, None)


def test_a_resolved_policy_loads_as_itself() -> None:
    """Statements hold the resolved policy, and derive its hash again."""
    for name in PRESETS:
        policy = load_policy(name)
        again = policy_from_dict(json.loads(json.dumps(policy.as_dict(), default=str)))
        assert again.sha256 == policy.sha256
    assert len({load_policy(name).sha256 for name in PRESETS}) == 3


def test_presets_and_schema_agree() -> None:
    schema = policy_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for name in PRESETS:
        jsonschema.validate(tomllib.loads(preset_text(name)), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"gates": {"max_lod": {"fail": 2}}}, schema)


# -- overrides and waivers


def layered() -> dict[str, object]:
    return {
        "extends": "default",
        "overrides": [
            {"layers": "0-1", "gates": {"cv": {"fail": 0.9}}},
            {"layers": [3, "5-6"], "gates": {"cv": {"enabled": False}}},
            {
                "sources": ["code"],
                "gates": {"max_load": {"warn": 3, "fail": 4}, "source_entropy": {"fail": 0.5}},
            },
        ],
    }  # fmt: skip


def test_overrides_by_layer_and_source() -> None:
    policy = policy_from_dict(layered())

    def fail(gate: str, layer: int, source: str = "all") -> float | None:
        limit = policy.limit(gate, num_experts=8, top_k=2, layer=layer, source=source)
        return None if limit is None else limit.fail

    assert [fail("cv", layer) for layer in range(7)] == [0.9, 0.9, 0.6, None, 0.6, None, None]
    assert (fail("max_load", 0), fail("max_load", 0, "code"), fail("max_load", 0, "prose")) == (2, 4, None)
    assert (fail("source_entropy", 0, "code"), fail("source_entropy", 0, "prose")) == (0.5, 0.65)
    assert fail("source_entropy", 0) is None  # the sum over sources has its own gate


def test_names_that_a_run_does_not_have_are_told() -> None:
    policy = policy_from_dict(layered())
    assert policy.unknown_names(range(7), ["code"]) == []
    messages = policy.unknown_names([0, 1, 2], ["cod", "prose"])
    assert any("did you mean 'cod'" in m for m in messages)
    assert any("layer 3" in m for m in messages)


def test_waivers_expire() -> None:
    waiver = {"gate": "cv", "layers": 3, "owner": "ada", "reason": "known", "expires": "2026-06-30"}
    policy = policy_from_dict({"extends": "default", "waivers": [waiver]})
    last_day, next_day = dt.date(2026, 6, 30), dt.date(2026, 7, 1)
    assert policy.waiver("cv", 3, "all", last_day) is not None
    assert policy.waiver("cv", 3, "all", next_day) is None
    assert policy.waiver("cv", 2, "all", last_day) is None
    assert policy.waiver("max_load", 3, "all", last_day) is None
    assert policy.expired_waivers(last_day) == []
    assert [w.owner for w in policy.expired_waivers(next_day)] == ["ada"]


# -- slips


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("alpa = 1", "did you mean 'alpha'"),
        ("[gates.max_lod]\nwarn = 1", "did you mean 'max_load'"),
        ("[gates.cv]\nwran = 1", "did you mean 'warn'"),
        ('required = ["cvv"]', "did you mean 'cv'"),
        ('[[waivers]]\ngate = "cvs"\nowner = "a"\nreason = "b"\nexpires = 2030-01-01', "did you mean 'cv'"),
        ("[[overrides]]\nlayer = 3", "did you mean 'layers'"),
        ("[gates.cv]\nwarn = nan", "finite"),
        ("[gates.cv]\nfail = inf", "finite"),
        ("[gates.cv]\nfail = true", "true or false"),
        ("[gates.cv]\nwarn = 0.5\nfail = 0.3", "must lie below"),
        ("[gates.min_load]\nwarn = 0.2\nfail = 0.3", "must lie above"),
        ('[gates.cv]\nop = "<"', "bad side"),
        ('[gates.cv]\nfail = "1 + n"', "'n' in '1 + n' is no variable"),
        ('[gates.cv]\nfail = "__import__(1)"', "is no function"),
        ('[gates.cv]\nfail = "N.real"', "not allowed"),
        ('[gates.cv]\nfail = "2 ** 99"', "not allowed"),
        ('[gates.cv]\nfail = "min(N)"', "arguments"),
        ('[gates.cv]\nfail = "1 +"', "no arithmetic"),
        ("alpha = 0", "alpha"),
        ("alpha = nan", "alpha"),
        ("min_windows = 0", "min_windows"),
        ("length = -5", "length"),
        ("length = 10\nstride = 20", "exceeds length"),
        ("lag = 0", "lag"),
        ('[[overrides]]\nlayers = "3-1"', "backwards"),
        ('[[overrides]]\nlayers = "a"', "no layer"),
        ('[[waivers]]\ngate = "cv"\nowner = "a"\nreason = ""\nexpires = 2030-01-01', "reason"),
        ('[[waivers]]\ngate = "cv"\nowner = "a"\nreason = "b"', "expires"),
        ('extends = "defalt"', "did you mean 'default'"),
        ('extends = "moe-audit.toml"', "circle"),
        ("gates = 3", "gates"),
        ("[gates]\ncv = 3", "cv"),
        ("a b", "no TOML"),
        ("min_windows = 3", "sets no limit"),
        ('length = "20"', "valid integer (given: '20')"),
        ("length = 20.0", "valid integer"),
        ("min_windows = true", "valid integer (given: True)"),
        ('alpha = "0.01"', "valid number"),
        ("noise_aware = 1", "valid boolean"),
        ('[gates.cv]\nenabled = "false"', "valid boolean"),
        ("[[overrides]]\nlayers = true\ngates.cv.fail = 1", "overrides.0.layers"),
        ("lag = true", "lag"),
        ("extends = 5", "valid string"),
    ],
)
def test_a_slip_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "moe-audit.toml").write_text(text)
    with pytest.raises(UsageError, match="moe-audit") as caught:
        load_policy(cwd=tmp_path)
    assert named in str(caught.value)
    assert "\n" not in caught.value.message


def test_a_limit_without_a_value_says_where() -> None:
    policy = policy_from_dict({"gates": {"cv": {"fail": "1/(N - 8)"}}})
    with pytest.raises(UsageError, match=r"gate cv: .* has no value at N = 8, k = 2"):
        policy.limit("cv", num_experts=8, top_k=2)
    only_with_capacity = policy_from_dict({"gates": {"cv": {"fail": "CF/2"}}})
    assert only_with_capacity.limit("cv", num_experts=8, top_k=2) is None


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'classic'"):
        load_policy("clasic")


@pytest.mark.parametrize(
    ("op", "value", "expected"),
    [(">", 0.1 + 0.2, False), (">=", 0.3 - 1e-17, True), ("<", 0.3, False), ("<=", 0.1 + 0.2, True),
     (">", math.inf, True), (">", math.nan, False), ("<", math.nan, False)],
)  # fmt: skip
def test_breaches_at_the_limit(op: str, value: float, expected: bool) -> None:
    assert breaches(op, value, 0.3) is expected  # type: ignore[arg-type]
