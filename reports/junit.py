"""The verdict as JUnit XML: one test case per gate and window, and one for the run as a whole.

INSUFFICIENT is skipped, never passed. The case `verdict` fails or errs whenever the exit code is not 0, so
that a run in which nothing could be judged is not green.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from moe_audit.reports.wording import (
    breach,
    clean,
    error_of,
    op_of,
    place,
    plural,
    ranked,
    scope,
    sentence,
    status_name,
    steps,
    waiver_line,
    waiver_of,
)

if TYPE_CHECKING:
    from moe_audit.verdict import Cell, Verdict

MOST_CELLS = 20  # listed in one test case


def render(verdict: Verdict) -> str:
    """JUnit XML. The cells in `verdict` become test cases: judge with `all_cells` to have those that pass."""
    suite = ET.Element("testsuite", name="moe-audit")
    properties = ET.SubElement(suite, "properties")
    for name, value in (
        ("status", status_name(verdict)),
        ("run", verdict.run.get("path")),
        ("policy", verdict.policy.get("name")),
        ("policy_sha256", verdict.policy.get("sha256")),
        ("scope", scope(verdict)),
    ):
        if value:
            ET.SubElement(properties, "property", name=name, value=clean(value, 400))
    _run_case(suite, verdict)
    ops = op_of(verdict)
    for (gate, first, last), cells in _by_gate_and_window(verdict).items():
        waivers = {waiver for c in cells if (waiver := waiver_of(verdict, c))}
        cells = [c for c in cells if not waiver_of(verdict, c)]
        _case(suite, gate, steps(first, last), cells, ops.get(gate, ""), sorted(waivers))
    for skip in verdict.skipped:
        case = ET.SubElement(
            suite, "testcase", classname=_class(skip["gate"]), name=f"{clean(skip['gate'])}: not judged"
        )
        ET.SubElement(case, "skipped", message=clean(skip["reason"], 300))
    root = ET.Element("testsuites", name="moe-audit")
    root.append(suite)
    for element in (root, suite):
        element.set("tests", str(len(suite.findall("testcase"))))
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            element.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
        element.set("time", "0")
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _by_gate_and_window(verdict: Verdict) -> dict[tuple[str, int, int], list[Cell]]:
    groups: dict[tuple[str, int, int], list[Cell]] = defaultdict(list)
    order = {g.gate: i for i, g in enumerate(verdict.gates)}
    for cell in sorted(
        verdict.cells, key=lambda c: (order.get(c.gate, len(order)), c.first_step, c.last_step)
    ):
        groups[cell.gate, cell.first_step, cell.last_step].append(cell)
    return groups


def _run_case(suite: ET.Element, verdict: Verdict) -> None:
    case = ET.SubElement(suite, "testcase", classname="moe-audit", name="verdict", time="0")
    text = f"{status_name(verdict)}: {sentence(verdict)}"
    if verdict.exit_code == 1:
        ET.SubElement(case, "failure", type=status_name(verdict), message=text).text = text
    elif verdict.exit_code != 0:
        error = error_of(verdict) or {}
        remedy = clean(error.get("remedy", ""), 300)
        ET.SubElement(case, "error", type=status_name(verdict), message=text).text = f"{text}\n{remedy}"
    notes = [f"waived: {waiver_line(w)}" for w in verdict.waived]
    notes += [f"problem: {clean(p['kind'])}: {clean(p['message'], 400)}" for p in verdict.problems]
    ET.SubElement(case, "system-out").text = "\n".join([text, *notes])


def _case(suite: ET.Element, gate: str, window: str, cells: list[Cell], op: str, waivers: list[str]) -> None:
    case = ET.SubElement(
        suite, "testcase", classname=_class(gate), name=f"{clean(gate)} steps {window}", time="0"
    )
    worst = ranked(cells)
    by_status = {name: [c for c in worst if c.status.name == name] for name in ("FAIL", "WARN", "PASS")}
    if by_status["FAIL"]:
        failing = by_status["FAIL"]
        first = f"{breach(failing[0], op)} in {place(failing[0])}"
        body = [f"{breach(c, op)} in {place(c)}" for c in failing[:MOST_CELLS]]
        if len(failing) > MOST_CELLS:
            body.append(f"and {plural(len(failing) - MOST_CELLS, 'cell')} more")
        ET.SubElement(case, "failure", type="FAIL", message=first).text = "\n".join(body)
    elif not by_status["WARN"] and not by_status["PASS"]:
        why = f"not enough data: {place(worst[0])}" if worst else f"waived: {'; '.join(waivers)}"
        ET.SubElement(case, "skipped", message=why)
    if by_status["WARN"]:
        warnings = [f"WARN {breach(c, op)} in {place(c)}" for c in by_status["WARN"][:MOST_CELLS]]
        ET.SubElement(case, "system-out").text = "\n".join(warnings)


def _class(gate: str) -> str:
    return f"moe-audit.{clean(gate)}"
