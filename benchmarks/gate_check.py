"""What one check of the training gate costs as the run gets longer: reading on, and reading the run anew.

python benchmarks/gate_check.py --records 1000 10000 100000
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from moe_audit import check
from moe_audit.following import Following
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.store import Store
from moe_audit.thresholds.policy import policy_from_dict

LAYERS, SOURCES, EXPERTS, TOP_K, TOKENS, STEPS = 4, 2, 16, 2, 10_000, 10
POLICY = policy_from_dict({"extends": "default", "length": 1000, "stride": 500})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--records", type=int, nargs="+", default=[1000, 10_000])
    rng = np.random.default_rng(0)
    counts_SE = rng.multinomial(TOP_K * TOKENS, [1 / EXPERTS] * EXPERTS, size=SOURCES)
    rows = {layer: LayerRecord(counts_SE, np.full(SOURCES, TOKENS)) for layer in range(LAYERS)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routing.db"
        store = Store.create(
            path, [LayerInfo(i, f"{i}.moe", EXPERTS, TOP_K) for i in range(LAYERS)], ["a", "b"]
        )
        store.begin_attempt(1)
        following, written = Following(path, POLICY), 0
        for records in sorted(options.parse_args().records):
            for r in range(written, records):
                steps = (STEPS * r + 1, STEPS * (r + 1))
                store.append(Record("train", *steps, rows, microbatches=STEPS, tokens=SOURCES * TOKENS))
            written = records
            with following.look(STEPS * records):  # where a gate would have been all along
                pass
            on, anew = [], []
            for _ in range(5):
                began = time.perf_counter()
                with following.look(STEPS * records):
                    on.append(time.perf_counter() - began)
                began = time.perf_counter()
                check(path, POLICY, checkpoint=STEPS * records)
                anew.append(time.perf_counter() - began)
            print(f"{records:>8,} records  reading on {min(on):.3f} s  anew {min(anew):.3f} s", flush=True)
        store.close()


if __name__ == "__main__":
    main()
