"""What is in a run: `moe-audit info RUN`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_audit.run import Run, open_run


def info(path: str | Path) -> dict[str, Any]:
    """The content of a run as plain data, ready for JSON. Every phase is looked at; counts are not read.

    Raises:
        UsageError, StoreError: as `open_run`.
    """
    with open_run(path) as run:
        phases = {run.phase: _phase(run)} if run.records else {}
        for phase in run.phases:
            if phase != run.phase:
                with open_run(path, phase) as other:
                    phases[phase] = _phase(other)
        return {
            "path": str(run.path),
            "bytes": run.path.stat().st_size,
            "meta": run.meta,
            "phases": phases,
            "layers": [asdict(layer) | {"tags": list(layer.tags)} for layer in run.layers],
            "sources": list(run.sources),
            "attempts": [asdict(attempt) for attempt in run.attempts],
            "superseded": run.superseded,
            "gaps": [asdict(gap) for gap in run.gaps],
            "spilled": run.spilled,
            "events": dict(Counter(event.kind for event in run.events)),
        }


def _phase(run: Run) -> dict[str, Any]:
    records = run.records
    tokens = [record.tokens for record in records]
    known = [n for n in tokens if n is not None]
    return {
        "records": len(records),
        "first_step": min(record.first_step for record in records),
        "last_step": records[-1].last_step,
        "tokens": sum(known) if len(known) == len(tokens) else None,
    }


def info_text(content: dict[str, Any]) -> str:
    """The same for people: one line a fact, layers of one shape in one line."""
    lines = [f"{content['path']}  {content['bytes'] / 1e6:.1f} MB"]
    lines += [f"  {key}: {value}" for key, value in content["meta"].items()]
    for name, phase in content["phases"].items():
        tokens = "" if phase["tokens"] is None else f", {phase['tokens']:,} tokens"
        span = f"steps {phase['first_step']} to {phase['last_step']}"
        lines.append(f"phase {name}: {phase['records']} records, {span}{tokens}")
    if not content["phases"]:
        lines.append("no records")
    lines += [f"layers {span}" for span in _layer_spans(content["layers"])]
    lines.append(f"sources: {', '.join(content['sources'])}")
    if len(content["attempts"]) > 1:
        starts = ", ".join(str(attempt["start_step"]) for attempt in content["attempts"])
        lines.append(f"attempts started at steps {starts}; {content['superseded']} records superseded")
    lines += [f"no record of steps {g['first_step']} to {g['last_step']}" for g in content["gaps"]]
    if content["spilled"]:
        lines.append(f"{content['spilled']} records wait in {content['path']}.spill")
    if content["events"]:
        lines.append("events: " + ", ".join(f"{n} {kind}" for kind, n in content["events"].items()))
    return "\n".join(lines)


def _layer_spans(layers: list[dict[str, Any]]) -> list[str]:
    """`0-15: 64 experts, top-8, softmax`: neighbours that differ in number and name only, together."""
    spans: list[tuple[list[dict[str, Any]], str]] = []
    for layer in layers:
        text = f"{layer['num_experts']} experts, "
        text += "top-k varies" if layer["top_k"] is None else f"top-{layer['top_k']}"
        text += "" if layer["capacity_factor"] is None else f", capacity factor {layer['capacity_factor']:g}"
        text += "".join(f", {word}" for word in [layer["gating"], *layer["tags"]] if word)
        if spans and spans[-1][1] == text:
            spans[-1][0].append(layer)
        else:
            spans.append(([layer], text))
    out = []
    for group, text in spans:
        first, last = group[0], group[-1]
        numbers = str(first["layer"]) if first is last else f"{first['layer']}-{last['layer']}"
        out.append(f"{numbers} ({first['name']}{'' if first is last else ' …'}): {text}")
    return out
