"""The routing statement in words: a section of a model card, in Markdown."""

from __future__ import annotations

from typing import Any

from moe_audit.reports.markdown import SIGNS, escape
from moe_audit.reports.wording import number, plural, steps

MOST_WINDOWS = 12  # rows of the window table; the JSON has them all
EXPERTS_NAMED = 3


def render_card(content: dict[str, Any]) -> str:
    """`content` is that of `routing_statement.json`; names in it are shown literally."""
    verdict, run, policy = content["verdict"], content["run"], content["policy"]
    status = verdict["status"]
    at = f"step {content['checkpoint']:,}" if content["checkpoint"] is not None else "the whole run"
    lines = [
        "## Routing",
        "",
        f"{SIGNS[status]} **{status}** for {at} under the policy {escape(policy['name'])}: "
        f"{escape(verdict['sentence'], 600)}.",
        "",
        *_model(content),
        "",
        "### Load and stability",
        "",
        *_windows(content),
        "",
        "### Gates",
        "",
        "| gate | status | worst | warn | fail | where |",
        "| :-- | :-- | --: | --: | --: | :-- |",
        *(_gate(g) for g in verdict["gates"]),
        *_skipped(verdict),
        "",
        "### Sources",
        "",
        *_sources(content),
        "",
        "### Healthy under these conditions",
        "",
        *_conditions(content),
        "",
        "### Provenance",
        "",
        *_provenance(content),
        "",
        f"Run {escape(run['run_id'] or 'without an id')}; `moe-audit statement --verify` derives all of this "
        "again from the run's store.",
    ]
    return "\n".join(lines) + "\n"


def _model(content: dict[str, Any]) -> list[str]:
    groups: dict[tuple[Any, ...], int] = {}
    for layer in content["layers"]:
        key = (layer["num_experts"], layer["top_k"], layer["capacity_factor"])
        groups[key] = groups.get(key, 0) + 1
    parts = []
    for (experts, top_k, capacity), count in groups.items():
        picks = f"top-{top_k}" if top_k else "a varying number of picks"
        room = f"capacity factor {number(capacity)}" if capacity is not None else "dropless"
        parts.append(f"{count} MoE layer{'s' * (count != 1)} of {experts} experts, {picks}, {room}")
    return ["; ".join(parts) + "."]


def _windows(content: dict[str, Any]) -> list[str]:
    """Per window the worst layer: load in fair shares, shifts as half the summed change of the shares."""
    windows = content["windows"]["judged"]
    lines = [
        f"Windows of {content['windows']['length']:,} steps; each figure is that of the worst layer. "
        "Loads are in fair shares (1: even), shifts in parts of all assignments.",
        "",
        "| steps | tokens | loss | largest load | smallest load | cv | router shift | mix shift |",
        "| :-- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    first = max(0, len(windows) - MOST_WINDOWS)
    for w, window in enumerate(windows[first:], first):
        worst = {
            name: (min if name == "min_load" else max)(
                (x for layer in content["layers"] if (x := layer[name][w]) is not None), default=None
            )
            for name in ("max_load", "min_load", "cv", "router_shift", "mix_shift")
        }
        figures = [number(window["loss"]), *(number(v) for v in worst.values())]
        span = steps(window["first_step"], window["last_step"])
        lines.append(f"| {span} | {window['tokens']:,} | {' | '.join(figures)} |")
    if first:
        lines += ["", f"The {first} windows before these are in the JSON."]
    return lines


def _gate(gate: dict[str, Any]) -> str:
    worst = gate["worst"]
    limits = [number(gate["warn"]), number(gate["fail"])]
    if worst is None:
        return f"| {escape(gate['gate'])} | {gate['status']} | – | {' | '.join(limits)} | – |"
    where = f"layer {worst['layer']}, steps {steps(worst['first_step'], worst['last_step'])}"
    if worst["source"] != "all":
        where += f", {escape(worst['source'])}"
    value = f"{number(worst['value'])} {escape(gate['op'])} {number(worst['limit'])}"
    if gate["status"] == "PASS":
        value = number(worst["value"])
    return f"| {escape(gate['gate'])} | {gate['status']} | {value} | {' | '.join(limits)} | {where} |"


def _skipped(verdict: dict[str, Any]) -> list[str]:
    reasons = [f"{escape(s['gate'])} ({escape(s['reason'], 200)})" for s in verdict["skipped"]]
    return ["", f"Not judged: {', '.join(reasons)}."] if reasons else []


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _sources(content: dict[str, Any]) -> list[str]:
    """Of the last window, per source: its share, and its most used experts in the layer most skewed by it."""
    sources = content["run"]["sources"]
    lines = ["| source | share | most used experts (layer: expert, load) |", "| :-- | --: | :-- |"]
    windows = content["windows"]["judged"]
    mix = windows[-1]["source_mix"] if windows else [None] * len(sources)
    for s, name in enumerate(sources):
        best: tuple[float, str] = (0.0, "–")
        for layer in content["layers"]:
            picks = layer["last_window_picks"][s]
            total = sum(picks)
            if not total:
                continue
            top = sorted(range(len(picks)), key=lambda e: -picks[e])[:EXPERTS_NAMED]
            load = len(picks) * picks[top[0]] / total
            if load > best[0]:
                named = ", ".join(f"{e} ({number(len(picks) * picks[e] / total)})" for e in top)
                best = (load, f"layer {layer['layer']}: {named}")
        share = _percent(mix[s])
        lines.append(f"| {escape(name)} | {share} | {best[1]} |")
    return lines


def _conditions(content: dict[str, Any]) -> list[str]:
    conditions = content["conditions"]
    lines = [
        f"- {escape(c['source'])} is {_percent(c['least'])} to {_percent(c['most'])} of the assignments."
        for c in conditions["source_mix"]
    ]
    if conditions["tokens_per_step"] is not None:
        lines.append(f"- A step has about {conditions['tokens_per_step']:,.0f} tokens.")
    for entry in conditions["headroom"]:
        name = escape(entry["source"])
        if entry["share"] == 0:
            lines.append(f"- An expert of layer {entry['layer']} is over its capacity already with this mix.")
        else:
            over = f"overflows once {name} exceeds {_percent(entry['share'])} of the traffic"
            lines.append(f"- An expert of layer {entry['layer']} {over}.")
    if not conditions["headroom"]:
        dropless = all(layer["capacity_factor"] is None for layer in content["layers"])
        why = "the layers are dropless" if dropless else "no growth of one source fills an expert"
        lines.append(f"- Nothing overflows: {why}.")
    return list(dict.fromkeys(lines))


def _provenance(content: dict[str, Any]) -> list[str]:
    coverage, policy, verdict = content["coverage"], content["policy"], content["verdict"]
    run = content["run"]
    lines = [
        f"- Steps {steps(run['first_step'], run['last_step'])} in {coverage['records']:,} records, "
        f"{coverage['tokens']:,} tokens, {plural(len(coverage['attempts']), 'attempt')}, "
        f"{plural(coverage['superseded_records'], 'record')} superseded.",
        f"- Gaps: {', '.join(steps(*g) for g in coverage['gaps']) or 'none'}.",
        f"- Policy {escape(policy['name'])}, SHA-256 `{policy['sha256']}`.",
        f"- Store content, SHA-256 `{content['hashes']['store']}`.",
    ]
    provenance = policy["resolved"].get("provenance")
    if provenance:
        stated = ", ".join(f"{k} {v}" for k, v in provenance.items() if v is not None)
        lines.append(f"- Limits calibrated: {escape(stated, 600)}.")
    for waiver in verdict["waived"]:
        lines.append(f"- Waived: {escape(', '.join(f'{k} {v}' for k, v in waiver.items()), 600)}.")
    for problem in verdict["problems"]:
        lines.append(f"- {escape(problem['kind'])}: {escape(problem['message'], 400)}")
    return lines
