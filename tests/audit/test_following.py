"""Following a growing run gives the verdicts of reading it whole, and reads no more the longer it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_audit import check
from moe_audit.following import Following
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.reports.json import to_dict
from moe_audit.store import Store
from moe_audit.thresholds.policy import policy_from_dict

ROWS = [np.random.default_rng(r).multinomial(4000, [0.4, 0.3, 0.2, 0.1], size=2) for r in range(400)]


@pytest.mark.parametrize(
    ("policy", "meta", "lengths"),
    [
        ({"length": 20, "stride": 10}, {}, [5]),
        ({"length": 20, "stride": 10}, {"warmup_steps": 33}, [3, 4, 2]),  # edges inside records
        ({"length": 12, "stride": 4, "lag": 5}, {"warmup_steps": 7}, [2]),
        ({}, {}, [10]),  # auto: the windows grow, up to 2,000 steps
        ({}, {"warmup_steps": 100}, [100]),
    ],
)
def test_the_verdict_is_that_of_the_whole_run(
    tmp_path: Path, policy: dict[str, Any], meta: dict[str, int], lengths: list[int]
) -> None:
    judged = policy_from_dict({"extends": "default", **policy})
    path = tmp_path / "routing.db"
    store = Store.create(path, [LayerInfo(i, f"{i}.moe", 4, 1) for i in range(2)], ["a", "b"], meta)
    following = Following(path, judged)
    store.begin_attempt(1)
    step, read = 0, []
    for r in range(240):
        if r == 150:  # a resume from a checkpoint far back
            step -= 20 * lengths[0]
            store.begin_attempt(step + 1)
        steps = lengths[r % len(lengths)]
        rows = {i: LayerRecord(ROWS[r + i], ROWS[r + i].sum(1)) for i in range(2)}
        store.append(Record("train", step + 1, step + steps, rows, microbatches=1, tokens=8000))
        step += steps
        if r % 7 == 0 or 150 <= r < 160:
            with following.look(step) as (run, verdict):
                assert verdict is not None
                assert to_dict(verdict) == to_dict(check(path, judged, checkpoint=step)), r
                read.append(len(run.records))
    store.close()
    if policy:
        assert read[-1] < 60  # of 240


def test_before_the_first_record_there_is_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "routing.db"
    Store.create(path, [LayerInfo(0, "0.moe", 4, 1)]).close()
    with Following(path, policy_from_dict({"extends": "default"})).look() as (_, verdict):
        assert verdict is None
