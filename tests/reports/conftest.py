"""Verdicts of every status, and names that attack every format."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from moe_audit.reports.scope import analysis_of
from moe_audit.run import Run
from moe_audit.store import LayerInfo, LayerRecord, Record, Store
from moe_audit.verdict import Cell, GateResult, Grid, Status, Verdict

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


@pytest.fixture(scope="session")
def tools() -> ModuleType:
    """This module, for fixtures of a wider scope."""
    return sys.modules[__name__]


@pytest.fixture
def recorded() -> Callable[..., Path]:
    return record_run


@pytest.fixture
def with_grid() -> Callable[..., Verdict]:
    return gridded


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


def record_run(
    folder: Path,
    *,
    layers: int = 2,
    experts: int = 8,
    sources: Sequence[str] = ("code", "prose"),
    records: int = 40,
    top_k: int = 2,
    tokens: int = 4096,
    sick: bool = False,
    capacity_factor: float | None = None,
    names: Sequence[str] | None = None,
    seed: int = 0,
) -> Path:
    """A store of records of ten steps with multinomial counts; `sick`: experts starve as it goes on."""
    rng = np.random.default_rng(seed)
    infos = [
        LayerInfo(i, names[i] if names else f"layers.{i}.mlp", experts, top_k, capacity_factor)
        for i in range(layers)
    ]
    S = len(sources)
    tokens -= tokens % S  # every source the same
    store = Store.create(folder / "routing.db", infos, sources, {"run_id": "r1"})
    store.begin_attempt(1)
    taste_LSE = rng.normal(0, 0.15, (layers, S, experts))
    drift_LE = rng.normal(0, 1.0, (layers, experts)) * sick
    for r in range(records):
        rows = {}
        for i in range(layers):
            weight_SE = np.exp(taste_LSE[i] + drift_LE[i] * 3 * r / records)
            p_SE = weight_SE / weight_SE.sum(1, keepdims=True)
            counts_SE = np.stack([rng.multinomial(tokens * top_k // S, p) for p in p_SE])
            rows[i] = LayerRecord(
                counts_SE,
                tokens_S=np.full(S, tokens // S),
                prob_sum_SE=p_SE * tokens / S,
                peak_E=counts_SE.sum(0) * experts / counts_SE.sum() * 1.2,
                sq_over_t_E=counts_SE.sum(0).astype(float) ** 2 / tokens * 1.01,
                calls=20,
            )
        events = [(10 * r + 5, "alert", {"gate": "min_load"})] if sick and r == records // 2 else []
        store.append(
            Record("train", 10 * r + 1, 10 * r + 10, rows, microbatches=20, tokens=tokens, ranks=1,
                   lr=1e-3, loss=3.0 - r / records, events=events)
        )  # fmt: skip
    store.close()
    return folder


def gridded(run: Run, verdict: Verdict, length: int = 80, stride: int = 40) -> Verdict:
    """The verdict as if it had been reached on `run`: its windows, with every status among them."""
    scope = {
        "first_step": run.records[0].first_step,
        "last_step": run.records[-1].last_step,
        "layers": [i.layer for i in run.layers],
        "sources": run.sources,
    }
    windows = verdict.windows | {"length": length, "stride": stride}
    verdict = replace(verdict, run=verdict.run | scope, windows=windows)
    laid = analysis_of(run, verdict).windows
    W, L = len(laid), len(run.layers)
    status_WL = (np.arange(W * L).reshape(W, L) % 5 - 1).astype(np.int8)
    grid = Grid(laid.first_step_W, laid.last_step_W, tuple(i.layer for i in run.layers), status_WL)
    return replace(verdict, grid=grid)
