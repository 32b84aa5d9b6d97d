"""Verdicts of every status, and names that attack every format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moe_audit.verdict import Cell, GateResult, Status, Verdict

NASTY = [
    '<script>alert(1)</script><img src=x onerror="alert(2)">',
    "quote\" and ' and `tick` and \\ back",
    "two\nlines\r\nand three\u2028four",
    "\x1b[31mred\x1b]0;title\x07 bell\x9b2J",
    "::error file=x,line=1::owned%0A::set-output name=a::b",
    "| pipe | [link](javascript:alert(1)) **bold** #1 @team <!-- -->",
    "rtl \u202eevil\u202c zero\u200bwidth \ud800 \x00 \ufeff",
    "]]></failure><testcase/>&amp;&#x3c;",
    "[bold red]markup[/bold red] :smile:",
    "x" * 10_000,
    "{{ 7*7 }}{% raw %}</textarea></style>",
]


def make_cell(**changes: Any) -> Cell:
    cell = Cell(
        first_step=101,
        last_step=150,
        layer=2,
        layer_name="model.layers.2.mlp",
        source="all",
        gate="min_load",
        status=Status.FAIL,
        value=0.0123,
        limit=0.25,
        floor=0.95,
        effective_tokens=51200.0,
        experts=(3, 5),
    )
    return replace(cell, **changes)


def make_verdict(status: Status = Status.FAIL, cells: list[Cell] | None = None, **changes: Any) -> Verdict:
    code = {"PASS": 0, "WARN": 0, "FAIL": 1, "INSUFFICIENT": 3, "INVALID": 4}[status.name]
    if cells is None:
        cells = [make_cell(), make_cell(gate="max_load", status=Status.WARN, value=1.6, limit=1.5, layer=1)]
        if status is Status.PASS:
            cells = []
    worst = {c.gate: c for c in sorted(cells, key=lambda c: c.status)}
    ops = {"min_load": ("<", 0.5, 0.25), "max_load": (">", 1.5, 2.0), "cv": (">", 0.35, 0.6)}
    gates = [
        GateResult(
            g, worst[g].status if g in worst else Status.PASS, *ops.get(g, (">", 1.0, 2.0)), worst.get(g)
        )
        for g in {**ops, **worst}
    ]
    totals = {s: sum(c.status.name == s for c in cells) for s in ("PASS", "WARN", "FAIL", "INSUFFICIENT")}
    values: dict[str, Any] = {
        "status": status,
        "exit_code": code,
        "run": {
            "path": "runs/sick",
            "run_id": "r1",
            "first_step": 1,
            "last_step": 150,
            "layers": [0, 1, 2, 3],
            "num_experts": 8,
            "top_k": 2,
            "sources": ["code", "prose"],
            "attempts": 1,
        },
        "policy": {"name": "default", "sha256": "0" * 64},
        "windows": {"length": 50, "stride": 25, "count": 5, "disjoint": 3, "origin": "auto"},
        "totals": {**totals, "PASS": totals["PASS"] + 100},
        "gates": gates,
        "cells": cells,
        "skipped": [{"gate": "capacity_use", "reason": "no capacity factor"}],
    }
    return Verdict(**{**values, **changes})


@pytest.fixture
def verdict() -> Callable[..., Verdict]:
    return make_verdict


@pytest.fixture
def cell() -> Callable[..., Cell]:
    return make_cell


@pytest.fixture(params=range(len(NASTY)), ids=lambda i: f"nasty{i}")
def nasty(request: pytest.FixtureRequest) -> str:
    return NASTY[request.param]


def nasty_verdict(name: str) -> Verdict:
    """A failing verdict in which every text that can come from a store or policy is `name`."""
    verdict = make_verdict(cells=[make_cell(layer_name=name, source=name, value_reason=name)])
    verdict.run |= {"path": name, "run_id": name, "sources": [name]}
    verdict.policy["name"] = name
    verdict.windows["origin"] = name
    verdict.skipped = [{"gate": "cv", "reason": name}]
    verdict.waived = [{"gate": "cv", "owner": name, "reason": name, "expires": "2099-01-01"}]
    verdict.problems = [{"kind": "gap", "message": name}]
    return verdict


@pytest.fixture
def hostile(nasty: str) -> Verdict:
    return nasty_verdict(nasty)
