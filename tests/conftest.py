"""Options and fixtures that several folders of tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from moe_audit.record import LayerRecord, Record

NOBODY = 65534
TEMPORARY = tempfile.gettempdir()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        type=int,
        default=3,
        metavar="N",
        help="How often the tests of kills, locks and many writers repeat (make soak: 50).",
    )


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> int:
    """How often to repeat."""
    return int(pytestconfig.getoption("--soak"))


@pytest.fixture
def make_record() -> Callable[..., Record]:
    """A record of step `step` with all arrays, counts drawn from the step: two writers write the same."""

    def make(
        step: int, layers: int = 2, sources: int = 2, experts: int = 4, top_k: int = 2, phase: str = "train"
    ) -> Record:
        rng = np.random.default_rng(step)
        parts = {}
        for layer in range(layers):
            counts_SE = rng.integers(0, 1000, (sources, experts))
            counts_SE[:, 0] += (-counts_SE.sum(1)) % top_k
            tokens_S = counts_SE.sum(1) // top_k
            parts[layer] = LayerRecord(
                counts_SE,
                tokens_S=tokens_S,
                prob_sum_SE=rng.random((sources, experts), dtype=np.float32),
                top1_S2=rng.random((sources, 2), dtype=np.float32),
                peak_E=rng.random(experts, dtype=np.float32),
                sq_over_t_E=rng.random(experts),
                dropped_E=rng.integers(0, 9, experts),
                logit_mean_E=rng.random(experts, dtype=np.float32),
                logit_std_E=rng.random(experts, dtype=np.float32),
                calls=1,
            )
        tokens = int(parts[0].tokens_S.sum())
        return Record(phase, step, step, parts, microbatches=1, tokens=tokens, ranks=1, lr=0.1, loss=2.0)

    return make


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that other users may look into, unlike pytest's."""
    with tempfile.TemporaryDirectory(dir=TEMPORARY) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        Path(folder).chmod(0o755)


@pytest.fixture
def unprivileged() -> Callable[[], AbstractContextManager[None]]:
    """Permissions hold inside, also where the tests run as root, whom they do not stop."""

    @contextmanager
    def drop() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)

    return drop
