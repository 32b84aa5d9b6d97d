"""Alerts to people, through apprise (extra `notify`): in the background, rate-limited, never in the way."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from moe_audit.alerts import Alert
from moe_audit.thresholds.errors import UsageError

logger = logging.getLogger("moe_audit")


class Notifier:
    """Sends alerts from a thread of its own; a slow or failing service costs the caller nothing.

    At most one alert leaves every `min_interval` seconds; what comes in between is counted and the
    number told with the next one. A severe alert is not held back by ordinary ones.

    Args:
        urls: apprise addresses, e.g. `mailto://…`, `slack://…`, `json://localhost`.
        min_interval: seconds between two alerts of one severity.
        send: how one alert leaves; the default is apprise.

    Raises:
        UsageError: apprise is not installed, or does not know an address.
    """

    def __init__(
        self,
        urls: Sequence[str] = (),
        min_interval: float = 300.0,
        send: Callable[[Alert], object] | None = None,
    ) -> None:
        self._send = send or _apprise(urls)
        self._min_interval = min_interval
        self._last_sent: dict[bool, float] = {}
        self._held_back = 0
        self._queue: queue.Queue[Alert | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def __call__(self, alert: Alert) -> None:
        """Queues an alert and returns at once."""
        at = time.monotonic()
        if at - self._last_sent.get(alert.severe, -self._min_interval) < self._min_interval:
            self._held_back += 1
            return
        self._last_sent[alert.severe] = at
        if self._held_back:
            alert = Alert(
                alert.title,
                f"{alert.body}\n({self._held_back} alerts before this one were held back)",
                alert.severe,
            )
            self._held_back = 0
        self._queue.put(alert)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="moe-audit-notify", daemon=True)
            self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Lets queued alerts leave, for at most `timeout` seconds. A later alert opens it again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout)

    def _run(self) -> None:
        while (alert := self._queue.get()) is not None:
            try:
                self._send(alert)
            except Exception as error:  # a notifier must never stop what it reports on
                logger.warning("alert %r could not be sent: %s", alert.title, error)


def _apprise(urls: Sequence[str]) -> Callable[[Alert], object]:
    try:
        import apprise
    except ImportError as error:
        raise UsageError("notifications need apprise", "pip install 'moe-audit[notify]'") from error
    hub = apprise.Apprise()
    for url in urls:
        if not hub.add(url):
            scheme = url.split("://")[0]  # the rest of an address may hold a password
            raise UsageError(
                f"apprise does not take the {scheme!r} address given", "see `apprise --help` for its forms"
            )

    def send(alert: Alert) -> None:
        kind = apprise.NotifyType.FAILURE if alert.severe else apprise.NotifyType.WARNING
        if not hub.notify(title=alert.title, body=alert.body, notify_type=kind):
            raise ConnectionError("a service did not accept it")

    return send
