"""Size and opening time of the HTML report of a large run, in headless Chromium.

    python benchmarks/html_report.py [--layers 32] [--experts 64] [--sources 8] [--windows 400]

Needs selenium (in the extra `dev`), chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from moe_audit import check, open_run
from moe_audit.reports.html import write_html
from moe_audit.store import LayerInfo, LayerRecord, Record, Store


def record(folder: Path, layers: int, experts: int, sources: int, windows: int) -> None:
    """Counts of routers that slowly lose their balance; one record is half a window."""
    rng = np.random.default_rng(0)
    top_k, tokens = 8, 65_536
    infos = [LayerInfo(i, f"layers.{i}.mlp", experts, top_k) for i in range(layers)]
    names = [f"source {s}" for s in range(sources)]
    store = Store.create(folder / "routing.db", infos, names, {"window_length": 20})
    store.begin_attempt(1)
    taste = rng.normal(0, 0.3, (layers, sources, experts))
    drift = rng.normal(0, 0.6, (layers, 1, experts))
    known = {"microbatches": 10, "tokens": tokens, "ranks": 1, "lr": 1e-3}
    tokens_S = np.full(sources, tokens // sources)
    for r in range(windows + 1):
        p = np.exp(taste + drift * r / windows)
        p /= p.sum(-1, keepdims=True)
        rows = {}
        for i in range(layers):
            counts = np.stack([rng.multinomial(tokens * top_k // sources, q) for q in p[i]])
            rows[i] = LayerRecord(counts, tokens_S=tokens_S, calls=10)
        store.append(Record("train", 10 * r + 1, 10 * r + 10, rows, loss=3 - r / windows, **known))
    store.close()


def opening_times(page: Path, times: int) -> list[float]:
    """Milliseconds from navigation to the first finished plot, by the page's own clock."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    found = []
    for _ in range(times):
        driver.get(page.as_uri())
        while not (ready := driver.execute_script("return document.documentElement.dataset.ready")):
            time.sleep(0.02)
        found.append(float(ready))
    driver.quit()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("layers", 32), ("experts", 64), ("sources", 8), ("windows", 400), ("times", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder, args.layers, args.experts, args.sources, args.windows)
        with open_run(folder) as run:
            start = time.perf_counter()
            verdict = check(run)
            judged = time.perf_counter()
            page = write_html(run, verdict, folder / "report.html")
            written = time.perf_counter()
        times = opening_times(page, args.times)
        bad, size = len(verdict.cells), page.stat().st_size / 1e6
        print(f"{verdict.windows['count']} windows, {verdict.status.name}, {bad} cells do not pass")
        print(f"check {judged - start:.2f} s, report {written - judged:.2f} s, {size:.2f} MB")
        print(f"opens in {statistics.median(times):.0f} ms (median of {[round(t) for t in times]})")


if __name__ == "__main__":
    main()
