"""The training gate on a router whose picks are given: when it acts, how long, and what it leaves behind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moe_audit.alerts import Alert
from moe_audit.hooks import Recorder, TrainingGate
from moe_audit.record import ATTACHED, CLOSED
from moe_audit.reports.notify import Notifier
from moe_audit.run import Event, open_run
from moe_audit.thresholds.errors import UsageError

TOKENS, EXPERTS = 4000, 4
Picks = Callable[[int], torch.Tensor]  # step -> the expert of each token


def even(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(EXPERTS, (TOKENS, 1), generator=generator)


def collapsed(step: int) -> torch.Tensor:
    return torch.zeros(TOKENS, 1, dtype=torch.int64) + (even(step) == 3)


def sick_between(first: int, last: int) -> Picks:
    return lambda step: (collapsed if first <= step <= last else even)(step)


class Spy(torch.optim.SGD):
    """Keeps the learning rate that each step is taken with."""

    def step(self, closure: Any = None) -> Any:
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)

    rates: list[float]


@pytest.fixture
def run(toy: Any, attach: Any, tmp_path: Any) -> Callable[..., SimpleNamespace]:
    """Train with scripted picks for some steps, `flush_every` 2, one gate; what came out of it."""

    def run(picks: Picks, steps: int = 60, resume_at: int | None = None, **options: Any) -> SimpleNamespace:
        model = toy.Scripted(EXPERTS)
        weight = nn.Parameter(torch.ones(()))
        optimizer = Spy([weight], lr=1.0)
        optimizer.rates = []
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step / 100)
        options = {"check_every": 4, "cooldown": 10, **options}
        recorder: Recorder = attach(model, toy.scripted(), flush_every=2)
        gate = TrainingGate(recorder, optimizer, **options)
        for step in range(1, steps + 1):
            if step == resume_at:
                state = json.loads(json.dumps(gate.state_dict()))
                recorder.close()
                recorder = attach(model, toy.scripted(), flush_every=2, resume=True)
                gate.override.detach()
                gate = TrainingGate(recorder, optimizer, **options)
                gate.load_state_dict(state)
            with recorder.microbatch():
                model(picks(step))
            weight.grad = torch.ones(())
            optimizer.step()
            recorder.step(step, lr=optimizer.rates[-1])
            scheduler.step()
            if gate.pause_requested:
                break
        recorder.close()
        with open_run(tmp_path) as stored:
            events = [e for e in stored.events if e.kind not in (ATTACHED, CLOSED)]
        rates = dict(enumerate(optimizer.rates, 1))
        schedule = {s: 1 + (s - 1) / 100 for s in rates}
        changed = [s for s in rates if rates[s] != schedule[s]]
        return SimpleNamespace(
            gate=gate, rates=rates, schedule=schedule, changed=changed, events=events, last=step
        )

    return run


def of_kind(events: list[Event], *kinds: str) -> list[tuple[int | None, str]]:
    return [(e.step, e.kind) for e in events if e.kind in kinds]


def test_healthy_routing_is_left_alone(run: Any) -> None:
    out = run(even)
    assert out.changed == [] and out.events == []
    assert out.gate.state.status == "PASS"


@pytest.mark.parametrize("resume_at", [None, 24])
def test_a_failing_window_holds_the_rate_for_the_cooldown(run: Any, resume_at: int | None) -> None:
    """Sick for a while: one action, its rate the one of the alarm, then the schedule to the digit; a resume
    in the middle of it changes nothing."""
    out = run(sick_between(13, 20), resume_at=resume_at)
    alarm, kind = of_kind(out.events, "lr_action")[0]
    assert kind == "lr_action" and 14 <= alarm <= 24
    assert out.changed == list(range(alarm + 1, alarm + 11))
    assert {out.rates[s] for s in out.changed} == {out.schedule[alarm]}
    assert of_kind(out.events, "lr_return")[0] == (alarm + 10, "lr_return")


def test_no_second_action_before_a_window_that_began_after_the_first(run: Any) -> None:
    out = run(sick_between(13, 60))
    actions = [s for s, _ in of_kind(out.events, "lr_action")]
    returns = [s for s, _ in of_kind(out.events, "lr_return")]
    assert len(actions) >= 2
    for action, back, following in zip(actions, returns, actions[1:], strict=False):
        assert back == action + 10
        assert following > back + 4  # a whole window of new steps has to fail first


def test_scale_multiplies_the_schedule(run: Any) -> None:
    out = run(sick_between(13, 20), action="scale", factor=0.5)
    assert out.changed
    assert all(out.rates[s] == 0.5 * out.schedule[s] for s in out.changed)


def test_dry_run_only_tells(run: Any) -> None:
    out = run(sick_between(13, 20), dry_run=True)
    assert out.changed == []
    assert of_kind(out.events, "lr_action")


def test_pause_stops_the_loop_at_the_first_failing_window(run: Any) -> None:
    out = run(sick_between(13, 60), action="pause")
    assert 14 <= out.last <= 24
    assert of_kind(out.events, "pause_requested") == [(out.last, "pause_requested")]


def test_three_failing_windows_in_a_row_are_severe(run: Any) -> None:
    alerts: list[Alert] = []
    out = run(sick_between(13, 60), notify=alerts.append, pause_when_severe=True)
    assert [a.severe for a in alerts] == sorted(a.severe for a in alerts)
    assert alerts[-1].severe and "pause" in alerts[-1].title and not alerts[0].severe
    assert of_kind(out.events, "routing_severe")
    assert out.last == of_kind(out.events, "pause_requested")[0][0]


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_bad_notifier_does_not_stop_training(run: Any, monkeypatch: Any, how: str) -> None:
    released = threading.Event()

    def notify(alert: Alert) -> None:
        if how == "hangs":
            released.wait(60)
        raise ConnectionError("no route")

    monkeypatch.setattr(Notifier.close, "__defaults__", (0.1,))
    started = time.perf_counter()
    assert run(sick_between(13, 20), notify=notify).last == 60
    assert time.perf_counter() - started < 30
    released.set()


def test_each_check_leaves_its_report(run: Any, tmp_path: Any) -> None:
    run(sick_between(13, 20))
    reports = sorted((tmp_path / "checks").glob("step_*.json"))
    statuses = {json.loads(r.read_text())["status"] for r in reports}
    assert {"FAIL", "PASS"} <= statuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "freeze"}, "action='freeze'"),
        ({"groups": "experts"}, "groups='experts'"),
        ({"cooldown": 0}, "cooldown is 0"),
        ({"check_every": 0}, "check_every is 0"),
        ({"action": "zero_router"}, "no parameter group"),
        ({"policy": "defualt"}, "defualt"),
    ],
)
def test_wrong_settings_are_named(run: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(even, **options)


# -- what goes wrong around it


@pytest.fixture
def bare(toy: Any, attach: Any) -> Callable[..., SimpleNamespace]:
    """A loop of the test's own: `step(n)` takes the n-th step, all of them collapsed."""

    def bare(**options: Any) -> SimpleNamespace:
        model, weight = toy.Scripted(EXPERTS), nn.Parameter(torch.ones(()))
        optimizer = Spy([weight], lr=1.0)
        optimizer.rates = []
        recorder = attach(model, toy.scripted(), flush_every=2)
        gate = TrainingGate(recorder, optimizer, action="scale", check_every=4, **options)

        def step(n: int, loss: float | None = None) -> None:
            with recorder.microbatch():
                model(collapsed(n))
            optimizer.step()
            recorder.step(n, loss=loss)

        return SimpleNamespace(gate=gate, recorder=recorder, optimizer=optimizer, step=step)

    return bare


def test_an_action_ends_with_the_recorder(bare: Any) -> None:
    loop = bare()
    for n in range(1, 10):
        loop.step(n)
    assert loop.gate.action_ends is not None and loop.optimizer.rates[-1] == 0.1
    loop.recorder.close()
    loop.optimizer.step()
    assert loop.optimizer.rates[-1] == 1.0
    assert loop.gate.check(99) == "FAIL"  # as a trainer does that saves after close()
    assert not loop.gate.override.active
    loop.gate.load_state_dict(loop.gate.state_dict())  # saved after close(), inside the freeze
    assert loop.gate.override.active


def test_a_store_that_vanishes_is_told_and_does_not_stop_training(
    bare: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("moe_audit.hooks.gate.WAIT_FOR_DISK", 0.1)
    loop = bare(dry_run=True)
    for n in range(1, 6):
        loop.step(n)
    (tmp_path / "routing.db").unlink()
    with pytest.warns(UserWarning, match="could not judge step 8"):
        for n in range(6, 9):
            loop.step(n)
    assert loop.gate.state.status == "UNKNOWN" and loop.gate.verdict is None
    loop.recorder.close()


def test_a_loss_that_is_not_a_number_changes_nothing(bare: Any, tmp_path: Any) -> None:
    loop = bare()
    for n in range(1, 9):
        loop.step(n, loss=float("nan"))
    loop.recorder.close()
    assert loop.gate.state.status == "FAIL"
    text = sorted((tmp_path / "checks").glob("*.json"))[-1].read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["status"] == "FAIL"


def test_less_than_half_a_window_raises_no_alarm(bare: Any, tmp_path: Any) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('extends = "default"\nlength = 40\n')
    loop = bare(policy=policy)
    for n in range(1, 21):
        loop.step(n)
        assert loop.gate.state.status in ("NO DATA", "FAIL")
        assert (loop.gate.action_ends is not None) == (n >= 20)
    loop.recorder.close()


def test_a_run_that_has_just_begun_raises_no_alarm(run: Any) -> None:
    """Routers begin uneven; without a length, three windows have to be there before one can alarm."""
    assert run(sick_between(1, 4)).changed == []


def test_a_window_is_alerted_of_once(bare: Any, tmp_path: Any) -> None:
    """A trainer that saves has it checked again in the same step."""
    alerts: list[Alert] = []
    loop = bare(notify=alerts.append)
    for n in range(1, 13):
        loop.step(n)
        assert loop.gate.check(n) in ("FAIL", "NO DATA", "INSUFFICIENT")
    loop.recorder.close()
    with open_run(tmp_path) as stored:
        told = [e.step for e in stored.events if e.kind.startswith("routing_")]
    assert len(told) == len(set(told)) == len(alerts) > 1


def test_a_resumed_run_is_not_paused_again_for_the_windows_before(bare: Any) -> None:
    loop, n = bare(pause_when_severe=True), 0
    while not loop.gate.pause_requested:
        n += 1
        loop.step(n)
    loop.gate.load_state_dict(loop.gate.state_dict())
    loop.gate.check(n)
    assert not loop.gate.pause_requested
    while not loop.gate.pause_requested:  # but for new ones it is
        n += 1
        loop.step(n)
    loop.recorder.close()
