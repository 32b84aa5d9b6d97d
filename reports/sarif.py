"""The verdict as SARIF 2.1.0 (OASIS), for code-scanning views: one result per cell that does not pass."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from moe_audit.reports.json import plain
from moe_audit.reports.wording import (
    breach,
    clean,
    error_of,
    op_of,
    place,
    ranked,
    sentence,
    status_name,
    waiver_of,
)

if TYPE_CHECKING:
    from moe_audit.verdict import Cell, Verdict

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MOST_RESULTS = 5000  # what code-scanning services take of one run
LEVELS = {"FAIL": "error", "WARN": "warning"}
NOT_JUDGED = "not-judged"  # the rule of a run that could not be judged: an error, so that it is never green


def render(verdict: Verdict) -> str:
    """SARIF text, ASCII."""
    return json.dumps(to_dict(verdict), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def to_dict(verdict: Verdict) -> dict[str, Any]:
    """The SARIF log as plain data."""
    from importlib.metadata import version

    uri = _uri(verdict)
    ops = op_of(verdict)
    cells = [c for c in ranked(verdict.cells) if c.status]
    rules = [*dict.fromkeys([*(g.gate for g in verdict.gates), *(c.gate for c in cells)])]
    results = [
        _result(c, ops.get(c.gate, ""), rules.index(c.gate), uri) | _suppression(waiver_of(verdict, c))
        for c in cells[:MOST_RESULTS]
    ]
    if verdict.exit_code not in (0, 1):
        text = f"{status_name(verdict)}: {sentence(verdict)}"
        result = {"ruleId": NOT_JUDGED, "ruleIndex": len(rules), "level": "error", "message": {"text": text}}
        results.insert(0, result | {"locations": [_location(uri, [])]})
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "moe-audit",
                        "version": version("moe-audit"),
                        "rules": [_rule(g) for g in rules] + [_rule(NOT_JUDGED)],
                    }
                },
                "invocations": [_invocation(verdict)],
                "results": results,
                "properties": {
                    "status": status_name(verdict),
                    "totals": plain(verdict.totals),
                    "policy": plain(verdict.policy),
                    "omittedResults": max(0, len(cells) - MOST_RESULTS),
                },
            }
        ],
    }


def _rule(gate: str) -> dict[str, Any]:
    text = (
        "The run could not be judged. No data is never a pass."
        if gate == NOT_JUDGED
        else f"Routing gate {clean(gate)}: the value of a window of one layer is beyond its limit."
    )
    return {
        "id": clean(gate),
        "shortDescription": {"text": text},
    }


def _result(cell: Cell, op: str, index: int, uri: str) -> dict[str, Any]:
    key = f"{cell.gate}\0{cell.layer}\0{cell.source}".encode("utf-8", "surrogatepass")
    level = LEVELS.get(cell.status.name)
    return {
        "ruleId": clean(cell.gate),
        "ruleIndex": index,
        # a level other than "none" is only for results that say something is wrong
        "kind": "fail" if level else "open",
        "level": level or "none",
        "message": {"text": f"{cell.status.name}: {clean(cell.gate)} {breach(cell, op)} in {place(cell)}"},
        "locations": [_location(uri, [_logical(cell)])],
        "partialFingerprints": {"gateLayerSource/v1": hashlib.sha256(key).hexdigest()},
        "properties": {
            "value": plain(cell.value),
            "limit": plain(cell.limit),
            "floor": plain(cell.floor),
            "firstStep": int(cell.first_step),
            "lastStep": int(cell.last_step),
            "experts": [int(e) for e in cell.experts],
        },
    }


def _suppression(waiver: str | None) -> dict[str, Any]:
    return {} if waiver is None else {"suppressions": [{"kind": "external", "justification": waiver}]}


def _location(uri: str, logical: list[dict[str, Any]]) -> dict[str, Any]:
    physical = {"artifactLocation": {"uri": uri}, "region": {"startLine": 1}}
    return {"physicalLocation": physical} | ({"logicalLocations": logical} if logical else {})


def _logical(cell: Cell) -> dict[str, Any]:
    name = clean(cell.layer_name) if cell.layer_name else f"layer {cell.layer}"
    return {"name": name, "fullyQualifiedName": f"layer {cell.layer}/{clean(cell.source)}", "kind": "module"}


def _invocation(verdict: Verdict) -> dict[str, Any]:
    notes = [("warning", f"{clean(p['kind'])}: {clean(p['message'], 400)}") for p in verdict.problems]
    notes += [("note", f"skipped {clean(s['gate'])}: {clean(s['reason'], 300)}") for s in verdict.skipped]
    error = error_of(verdict)
    if error is not None:
        notes.insert(0, ("error", f"{clean(error['message'], 400)} ({clean(error['remedy'], 300)})"))
    return {
        "executionSuccessful": verdict.exit_code in (0, 1),
        "exitCode": int(verdict.exit_code),
        "toolExecutionNotifications": [{"level": level, "message": {"text": text}} for level, text in notes],
    }


def _uri(verdict: Verdict) -> str:
    """The store's path as a relative URI, forward slashes, everything else encoded."""
    path = str(verdict.run.get("path") or "routing.db").replace("\\", "/").lstrip("/")[:1000]
    return quote(path.encode("utf-8", "surrogatepass"), safe="/-._~") or "routing.db"
