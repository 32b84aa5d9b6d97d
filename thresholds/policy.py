"""Policies: limits for each gate, how noise and windows are treated, and waivers.

A policy file holds what differs from the policy it `extends`. `load_policy` finds the file, resolves the
chain and returns a `Policy`, which the engine asks for the limit of one gate in one layer and source.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moe_audit.thresholds import expressions
from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.gate_names import GATES, Op, nearest
from moe_audit.thresholds.policy_file import (
    NO_LIMIT,
    SAME_MIX,
    GateRule,
    Override,
    PolicyFile,
    Provenance,
    Waiver,
    mix_distance,
    ranges,
    same_batches,
    stricter,
)

ALL = "all"  # the name of the sum over sources
PRESETS = ("classic", "default", "specialised")
POLICY_FILE = "moe-audit.toml"


class Limit(NamedTuple):
    """Where a gate warns and fails in one layer and source: `value op warn`, `value op fail`; None: never."""

    op: Op
    warn: float | None
    fail: float | None

    @property
    def warn_beyond_fail(self) -> bool:
        """Whether the limit is reached no later than the warning."""
        return self.warn is not None and self.fail is not None and not stricter(self.op, self.warn, self.fail)


class Policy:
    """A policy with everything resolved. Get one by `load_policy`."""

    def __init__(self, layers: Sequence[PolicyFile], name: str, origin: str) -> None:
        """`layers`: the files of the chain, the base first."""
        merged: dict[str, Any] = {}
        self._gates: dict[str, GateRule] = {}
        self.overrides: list[Override] = []
        self.waivers: list[Waiver] = []
        for file in layers:
            merged |= {k: v for k, v in vars(file).items() if v is not None}
            for gate, rule in file.gates.items():
                self._gates[gate] = self._gates.get(gate, GateRule()).merged(rule)
            self.overrides += file.overrides
            self.waivers += file.waivers
        self.name = name
        self.origin = origin
        self.description: str = merged.get("description") or ""
        self.alpha: float = merged.get("alpha") or 0.01
        self.noise_aware: bool = merged.get("noise_aware", True)
        lag = merged.get("lag")
        self.lag: int | None = (
            lag if isinstance(lag, int) else None
        )  # None: the last window that does not overlap
        self.effect: Literal["router", "total"] = merged.get("effect") or "router"
        self.count_windows: Literal["disjoint", "consecutive"] = merged.get("count_windows") or "disjoint"
        self.min_windows: int = merged.get("min_windows") or 3
        self.length: int | None = merged.get("length")
        self.stride: int | None = merged.get("stride")
        self.required: tuple[str, ...] = tuple(merged.get("required") or ())
        self.provenance: Provenance | None = merged.get("provenance")

    @property
    def gates(self) -> tuple[str, ...]:
        """The gates that can have a limit somewhere, in the order of the registry."""
        named = set(self._gates) | {g for o in self.overrides for g in o.gates}
        return tuple(gate for gate in GATES if gate in named and self._ever_on(gate))

    def rule(self, gate: str) -> GateRule | None:
        """The rule of a gate before overrides, as written; None where the policy only reports it."""
        rule = self._gates.get(gate)
        return None if rule is None or rule.enabled is False else rule

    def limit(
        self,
        gate: str,
        *,
        num_experts: int,
        top_k: int | None,
        capacity_factor: float | None = None,
        layer: int | None = None,
        source: str = ALL,
        as_written: bool = False,
    ) -> Limit | None:
        """The limit of a gate in one layer and source, or None where nothing is judged there.

        Pooled gates judge single sources only where an override names the source. `layer=None`: overrides by
        layer are left out. A warning beyond the limit, which two files or two formulas may make, is left out
        too, but for `as_written`.

        Raises:
            UsageError: no such gate, or an expression without a value for these numbers.
        """
        if gate not in GATES:
            raise UsageError(f"unknown gate {gate!r}", nearest(gate, GATES))
        info = GATES[gate]
        on = info.per_source == (source != ALL)
        rule = self._gates.get(gate, GateRule())
        for override in self.overrides:
            covered = override.covers(-1 if layer is None else layer, source)
            if gate in override.gates and covered and (on or override.sources is not None):
                rule, on = _overridden(rule, override.gates[gate]), True
        if not on or rule.enabled is False:
            return None
        op = rule.op or info.op
        values = expressions.variables(num_experts, top_k, capacity_factor)
        warn, fail = (_number(x, values, gate) for x in (rule.warn, rule.fail))
        if warn is None and fail is None:
            return None
        limit = Limit(op, warn, fail)
        return limit._replace(warn=None) if limit.warn_beyond_fail and not as_written else limit

    def waiver(self, gate: str, layer: int, source: str, today: dt.date | None = None) -> Waiver | None:
        """The unexpired waiver that covers a cell, if any."""
        today = today or dt.date.today()
        for waiver in self.waivers:
            if waiver.gate == gate and waiver.covers(layer, source) and not waiver.expired(today):
                return waiver
        return None

    def expired_waivers(self, today: dt.date | None = None) -> list[Waiver]:
        return [w for w in self.waivers if w.expired(today or dt.date.today())]

    def unknown_names(self, layers: Iterable[int], sources: Iterable[str]) -> list[str]:
        """Overrides and waivers that name a layer or source which a run does not have, one message each."""
        layers, sources = list(layers), [*sources, ALL]
        messages = []
        for kind, scopes in (("override", self.overrides), ("waiver", self.waivers)):
            for number, scope in enumerate(scopes, 1):
                for source in scope.sources or ():
                    if source not in sources:
                        messages.append(
                            f"{kind} {number} names source {source!r}: {nearest(source, sources)}"
                        )
                for first, last in ranges(scope.layers) or ():
                    if not any(first <= layer <= last for layer in layers):
                        shown = str(first) if first == last else f"{first}-{last}"
                        messages.append(f"{kind} {number} names layer {shown}, which the run does not have")
        return messages

    def mismatches(
        self,
        num_experts: int | None,
        top_k: int | None,
        capacity_factor: float | None = None,
        *,
        source_mix: Mapping[str, float] | None = None,
        microbatch_tokens: float | None = None,
    ) -> list[str]:
        """In what a run differs from the reference that the limits were calibrated on, one message each."""
        reference = self.provenance
        if reference is None:
            return []
        pairs = {
            "num_experts": (reference.num_experts, num_experts),
            "top_k": (reference.top_k, top_k),
            "capacity_factor": (reference.capacity_factor, capacity_factor),
        }
        found = [f"{key} = {a}, the run has {b}" for key, (a, b) in pairs.items() if a != b]
        if source_mix and reference.source_mix:
            tv = mix_distance(reference.source_mix, source_mix)
            if tv > SAME_MIX:
                found.append(f"another source mix: it differs by {tv:.2f} (total variation)")
        if not same_batches(reference.microbatch_tokens, microbatch_tokens):
            a, b = reference.microbatch_tokens, microbatch_tokens
            found.append(f"{a:,.0f} tokens a micro-batch, the run has {b:,.0f}")
        return [f"policy {self.name!r} was calibrated at {difference}" for difference in found]

    def as_dict(self) -> dict[str, Any]:
        """The resolved policy as plain data, the shape of a policy file."""
        data: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "alpha": self.alpha,
            "noise_aware": self.noise_aware,
            "lag": self.lag or "disjoint",
            "effect": self.effect,
            "count_windows": self.count_windows,
            "min_windows": self.min_windows,
            "length": self.length,
            "stride": self.stride,
            "required": list(self.required) or None,
            "gates": {
                g: _plain(r) for g, r in sorted(self._gates.items(), key=lambda i: list(GATES).index(i[0]))
            },
            "overrides": [_plain(o) for o in self.overrides],
            "waivers": [_plain(w) for w in self.waivers],
            "provenance": _plain(self.provenance) if self.provenance else None,
        }
        return {k: v for k, v in data.items() if v is not None and v != [] and v != ""}

    @property
    def sha256(self) -> str:
        """Hash of the resolved policy, so that two verdicts can be told to rest on the same limits."""
        text = json.dumps(self.as_dict(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def _ever_on(self, gate: str) -> bool:
        base = self._gates.get(gate, GateRule())
        rules = [base] + [_overridden(base, o.gates[gate]) for o in self.overrides if gate in o.gates]
        return any(r.enabled is not False and r.limits for r in rules)


def load_policy(name_or_path: str | Path | None = None, cwd: str | Path | None = None) -> Policy:
    """The policy to judge by: the one named, else `moe-audit.toml` in `cwd`, else `[tool.moe-audit]` of its
    pyproject.toml, else the preset `default`. `Policy.origin` says which it was.

    Raises:
        UsageError: no such policy, no TOML, an unknown key or gate (with the nearest known), a wrong value.
    """
    folder = Path.cwd() if cwd is None else Path(cwd)
    if name_or_path is not None:
        if str(name_or_path) in PRESETS:
            return _resolve(_preset_file(str(name_or_path)), f"preset {name_or_path}")
        path = folder / name_or_path
        if not path.is_file():
            hint = "; it is a folder" if path.is_dir() else ""
            raise UsageError(
                f"there is no policy {str(name_or_path)!r}{hint}",
                f"name a TOML file or a preset: {', '.join(PRESETS)} ({nearest(str(name_or_path), PRESETS)})",
            )
        return _resolve(path, f"{name_or_path}")
    if (folder / POLICY_FILE).is_file():
        return _resolve(folder / POLICY_FILE, str(folder / POLICY_FILE))
    pyproject = folder / "pyproject.toml"
    if pyproject.is_file():
        table = _read_toml(pyproject).get("tool", {}).get("moe-audit")
        if table is not None:
            return _resolve(pyproject, f"[tool.moe-audit] in {pyproject}", table)
    return _resolve(_preset_file("default"), "preset default")


def preset_text(name: str) -> str:
    """The TOML text of a preset.

    Raises:
        UsageError: no such preset.
    """
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}", nearest(name, PRESETS))
    return _preset_file(name).read_text(encoding="utf-8")


def policy_from_dict(table: dict[str, Any], origin: str = "given in Python") -> Policy:
    """A policy from plain data in the shape of a policy file."""
    return _resolve(Path.cwd() / "policy", origin, table)


def policy_schema() -> dict[str, Any]:
    """JSON Schema of a policy file."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(PolicyFile).json_schema()
    names = {"propertyNames": {"enum": list(GATES)}}
    schema["properties"]["gates"] |= names
    schema["$defs"]["Override"]["properties"]["gates"] |= names
    schema["$defs"]["Waiver"]["properties"]["gate"] |= {"enum": list(GATES)}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "title": "moe-audit policy"}


def _resolve(path: Path, origin: str, table: dict[str, Any] | None = None) -> Policy:
    """The policy of a file (or of a table that stands in it), with all that it extends."""
    chain: list[PolicyFile] = []
    seen: list[Path] = []
    while True:
        seen.append(path.resolve())
        if table is None and path == _preset_file(path.stem):
            file = _preset(path.stem)
        else:
            data = table if table is not None else _read_toml(path)
            file, table = _validate(data, path if chain else origin), None
        chain.append(file)
        if file.extends is None:
            break
        path = _preset_file(file.extends) if file.extends in PRESETS else path.parent / file.extends
        if not path.is_file():
            raise UsageError(
                f"{origin}: it extends {file.extends!r}, which is neither a preset nor a file",
                nearest(file.extends, PRESETS),
            )
        if path.resolve() in seen:
            raise UsageError(
                f"{origin}: policies extend each other in a circle at {path.name}", "break the circle"
            )
    own_name = chain[0].name or (seen[0].stem if seen[0].name != "pyproject.toml" else "pyproject")
    policy = Policy(chain[::-1], own_name, origin)
    if not policy.gates:
        raise UsageError(f"{origin} sets no limit, so nothing would be judged", 'add extends = "default"')
    if policy.length and policy.stride and policy.stride > policy.length:
        raise UsageError(
            f"{origin}: stride {policy.stride} exceeds length {policy.length}",
            "steps between windows would go unjudged",
        )
    return policy


def _preset_file(name: str) -> Path:
    return Path(__file__).with_name("presets") / f"{name}.toml"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is no TOML: {error}", "`moe-audit policy show` prints a sound one"
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _validate(data: dict[str, Any], where: Path | str) -> PolicyFile:
    """A user's file, checked key by key."""
    from pydantic import TypeAdapter, ValidationError

    _refuse_unknown_keys(data, PolicyFile, str(where))
    try:
        # As JSON, since strictly only JSON may stand for a dataclass: "20" is no 20, and true is no 1.
        return TypeAdapter(PolicyFile).validate_json(json.dumps(data, default=_as_json), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        kinds = {"float", "int", "str", "list[union[int,str]]"}
        place = ".".join(str(s) for s in first["loc"] if str(s) not in kinds)
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{where}: {place + ': ' if place else ''}{message}", _given(first)) from error


def _preset(name: str) -> PolicyFile:
    """A preset as it is: it is validated by the tests, not at each start."""
    data = tomllib.loads(preset_text(name))
    gates = {gate: GateRule(**rule) for gate, rule in data.pop("gates").items()}
    return PolicyFile(**data, gates=gates)


def _as_json(value: Any) -> Any:
    """Numbers of numpy as numbers; dates, and all else, as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _given(error: Any) -> str:
    value = error.get("input")
    return f"given: {value!r}" if isinstance(value, str | int | float | bool) else ""


def _refuse_unknown_keys(data: Any, model: type[Any], where: str, place: str = "") -> None:
    """Names the nearest known key, which pydantic's own message does not."""
    if not isinstance(data, dict):
        return
    known = [each.name for each in dataclasses.fields(model)]
    nested = {"overrides": Override, "waivers": Waiver, "provenance": Provenance}
    for key, value in data.items():
        if key not in known:
            raise UsageError(f"{where}: unknown key {place}{key}", nearest(key, known))
        if model is GateRule and key in ("warn", "fail") and isinstance(value, bool):
            raise UsageError(f"{where}: {place}{key} is a number or an expression, not true or false")
        if key == "gates" and isinstance(value, dict):
            for gate, rule in value.items():
                if gate not in GATES:
                    raise UsageError(f"{where}: unknown gate {place}gates.{gate}", nearest(gate, GATES))
                _refuse_unknown_keys(rule, GateRule, where, f"{place}gates.{gate}.")
        elif key in nested:
            for item in value if isinstance(value, list) else [value]:
                _refuse_unknown_keys(item, nested[key], where, f"{place}{key}.")


def _overridden(rule: GateRule, override: GateRule) -> GateRule:
    """An override that gives limits switches its gate on, unless it says otherwise."""
    on = GateRule(enabled=True) if override.limits else GateRule()
    return rule.merged(on).merged(override)


def _plain(value: Any) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(value).items() if v not in (None, [], {})}


def _number(value: float | str | None, values: dict[str, float], gate: str) -> float | None:
    if value is None or value == NO_LIMIT:
        return None
    if isinstance(value, str):
        if "CF" in expressions.names(value) and "CF" not in values:
            return None
        try:
            return expressions.evaluate(value, values)
        except UsageError as error:
            raise UsageError(f"gate {gate}: {error.message}", error.remedy) from error
    return float(value)
