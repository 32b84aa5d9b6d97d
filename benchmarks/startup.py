"""How long `moe-audit check` takes on a small run, against importing its own dependencies.

    python benchmarks/startup.py [RUN]

Prints the best of alternating cold processes and their ratio; the aim is at most 2.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.store import Store

IMPORTS = "import numpy, pydantic, click, rich"
CHECK = "import sys; from moe_audit.cli import main; main(['check', sys.argv[1]])"
REPEATS = 15


def small_run(folder: Path) -> Path:
    """A run of 30 records, 4 layers, 8 experts, 4 sources: the size of the demo's."""
    rng = np.random.default_rng(0)
    layers = [LayerInfo(i, f"layers.{i}.moe", 8, 2) for i in range(4)]
    store = Store.create(folder / "routing.db", layers, ["a", "b", "c", "d"])
    store.begin_attempt(1)
    for r in range(30):
        rows = {i: LayerRecord(2 * rng.integers(2400, 2600, (4, 8))) for i in range(4)}
        store.append(Record("train", 10 * r + 1, 10 * r + 10, rows))
    store.close()
    return folder / "routing.db"


def seconds(code: str, *args: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, *args], stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = sys.argv[1] if len(sys.argv) > 1 else str(small_run(Path(folder)))
        pairs = [(seconds(IMPORTS), seconds(CHECK, run)) for _ in range(REPEATS + 1)][1:]
    imports, check = (min(times) for times in zip(*pairs, strict=True))
    print(f"imports {imports * 1000:.0f} ms, check {check * 1000:.0f} ms, ratio {check / imports:.2f}")


if __name__ == "__main__":
    main()
