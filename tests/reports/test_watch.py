"""`watch` follows a run from outside: it waits, shows, alarms once a window, and ends with the run."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moe_audit.alerts import Alert
from moe_audit.record import ATTACHED, CLOSED, LayerInfo, LayerRecord, Record
from moe_audit.reports.notify import Notifier
from moe_audit.reports.watch import watch
from moe_audit.store import Store
from moe_audit.thresholds.errors import StoreError, UsageError
from moe_audit.thresholds.policy import load_policy, policy_from_dict

EVEN, COLLAPSED = [2600, 2400, 2510, 2490], [9990, 4, 3, 3]


def write(store: Store, steps: range, counts: list[int]) -> None:
    for step in steps:
        rows = {0: LayerRecord(np.array([counts]), np.array([10_000]))}
        store.append(Record("train", step, step, rows, tokens=10_000, loss=2.0))


def begin(path: Path) -> Store:
    store = Store.create(path, [LayerInfo(0, "layers.0.moe", 4, 1)])
    store.begin_attempt(1)
    with store.transaction():
        store.insert_event(None, ATTACHED, {})
    return store


def end(store: Store, step: int) -> None:
    with store.transaction():
        store.insert_event(step, CLOSED, {})
    store.close()


def test_follows_a_run_from_before_its_first_record_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "run" / "routing.db"

    def train() -> None:
        time.sleep(0.15)  # watch is there first
        store = begin(path)
        for steps, counts in ((range(1, 13), EVEN), (range(13, 25), COLLAPSED)):
            write(store, steps, counts)
            time.sleep(0.25)
        end(store, 24)

    alerts: list[Alert] = []
    out = io.StringIO()
    thread = threading.Thread(target=train)
    thread.start()
    policy = policy_from_dict({"extends": "default", "length": 4, "stride": 2})
    code = watch(path.parent, policy, Console(file=out, width=100), interval=0.05, notify=alerts.append)
    thread.join()
    assert code == 1
    assert "FAIL" in out.getvalue() and "step 24" in out.getvalue()
    assert alerts and alerts[-1].severe and "pause" in alerts[-1].title
    assert len({a.title + a.body for a in alerts}) == len(alerts)  # each window once


def test_in_a_terminal(tmp_path: Path) -> None:
    """The command on a pseudo-terminal, wide enough that no line with the path of the run is broken: each
    stage is on the screen before the next begins."""
    path = tmp_path / "run" / "routing.db"
    policy = tmp_path / "policy.toml"
    policy.write_text('extends = "default"\nlength = 4\nstride = 2\n')
    ours, theirs = pty.openpty()
    command = [str(Path(sys.executable).with_name("moe-audit")), "watch", str(path.parent)]
    watching = subprocess.Popen(
        [*command, "--policy", str(policy), "--interval", "0.1"],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "400"},
    )  # fmt: skip
    os.close(theirs)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        give_up = time.monotonic() + 30  # the screen is painted again and again, whatever is on it
        while text not in seen:
            assert select.select([ours], [], [], 30)[0] and time.monotonic() < give_up, seen.decode()
            seen += os.read(ours, 4096)

    until(b"waiting for")
    store = begin(path)
    write(store, range(1, 13), EVEN)
    until(b"PASS")
    write(store, range(13, 15), COLLAPSED)
    until(b"routing failed")
    write(store, range(15, 25), COLLAPSED)
    until(b"pause the training")
    end(store, 24)
    drain = threading.Thread(target=_drain, args=(ours,), daemon=True)
    drain.start()  # a full terminal would block what it shows
    assert watching.wait(30) == 1


def _drain(terminal: int) -> None:
    """Reads until the other side is closed."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass
    os.close(terminal)


def test_wrong_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "routing.db").write_text("not a database, whatever its name")
    with pytest.raises(StoreError, match="no SQLite database"):
        watch(tmp_path, load_policy("default"), Console(file=io.StringIO()))
    with pytest.raises(UsageError, match="interval"):
        watch(tmp_path, load_policy("default"), Console(file=io.StringIO()), interval=0)


# -- notifier


def test_alerts_are_rate_limited_and_a_severe_one_is_not_held_back() -> None:
    sent: list[Alert] = []
    notifier = Notifier(min_interval=3600, send=sent.append)
    for i in range(5):
        notifier(Alert(f"failing {i}", ""))
    notifier(Alert("severe", "three in a row", severe=True))
    notifier.close()
    assert [a.title for a in sent] == ["failing 0", "severe"]
    assert "4 alerts" in sent[1].body


def test_a_slow_or_failing_service_costs_the_caller_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def slow(alert: Alert) -> None:
        time.sleep(0.2)
        raise ConnectionError("no route")

    notifier = Notifier(min_interval=0, send=slow)
    started = time.perf_counter()
    for i in range(3):
        notifier(Alert(str(i), ""))
    assert time.perf_counter() - started < 0.2
    notifier.close()
    assert [r.getMessage() for r in caplog.records].count("alert '2' could not be sent: no route") == 1


def test_apprise_takes_known_addresses_only_and_keeps_secrets() -> None:
    pytest.importorskip("apprise")
    with pytest.raises(UsageError) as error:
        Notifier(["gopher://user:secret@example.org"])
    assert "gopher" in str(error.value) and "secret" not in str(error.value)
