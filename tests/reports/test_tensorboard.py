"""TensorBoard events, read back by tensorboard's own reader."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from moe_audit import check, open_run
from moe_audit.reports.tensorboard import load_pixels, write_events
from moe_audit.thresholds.errors import UsageError

Make = Callable[..., Any]


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


@pytest.fixture
def written(tmp_path: Path, recorded: Make) -> tuple[Any, Any]:
    recorded(tmp_path / "run", layers=3, sick=True)
    with open_run(tmp_path / "run") as run:
        verdict = check(run, all_cells=True)
        write_events(run, verdict, tmp_path / "events")
    return read(tmp_path / "events"), verdict


def test_worst_and_mean_of_each_gate_at_the_end_of_each_window(written: tuple[Any, Any]) -> None:
    events, verdict = written
    [gate] = [g for g in verdict.gates if g.gate == "min_load"]
    cells = [c for c in verdict.cells if c.gate == "min_load"]
    steps = sorted({c.last_step for c in cells})
    worst = events.Scalars("routing/min_load/worst")
    assert [e.step for e in worst] == steps
    assert min(e.value for e in worst) == pytest.approx(gate.worst.value)
    mean = np.mean([c.value for c in cells if c.last_step == steps[0]])
    assert events.Scalars("routing/min_load/mean")[0].value == pytest.approx(mean)
    assert len(events.Scalars("routing/loss")) == 40


def test_the_number_of_series_does_not_grow_with_layers_and_experts(tmp_path: Path, recorded: Make) -> None:
    counts = set()
    for name, size in (("a", {"layers": 1, "experts": 8}), ("b", {"layers": 6, "experts": 16})):
        with open_run(recorded(tmp_path / name, **size)) as run:
            write_events(run, check(run, all_cells=True), tmp_path / f"{name}.events")
        counts.add(len(read(tmp_path / f"{name}.events").Tags()["scalars"]))
    assert len(counts) == 1
    assert counts.pop() < 40


def test_an_image_a_layer_shows_the_loads(written: tuple[Any, Any]) -> None:
    events, verdict = written
    assert events.Tags()["images"] == [f"routing/load/layer {i}" for i in range(3)]
    [image] = events.Images("routing/load/layer 0")
    picture = Image.open(io.BytesIO(image.encoded_image_string))
    assert picture.size == (image.width, image.height)
    assert image.height % 8 == 0
    assert image.step == verdict.run["last_step"]


def test_one_panel_has_the_loss_and_every_gate(written: tuple[Any, Any]) -> None:
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    events, verdict = written
    [entry] = events.Tensors("custom_scalars__config__")
    [panel] = Layout.FromString(entry.tensor_proto.string_val[0]).category
    assert [chart.title for chart in panel.chart][: len(verdict.gates) + 1] == [
        "loss",
        *(g.gate for g in verdict.gates),
    ]


def test_the_verdict_stands_as_text(written: tuple[Any, Any]) -> None:
    events, verdict = written
    [entry] = events.Tensors("routing/verdict")
    assert verdict.status.name in entry.tensor_proto.string_val[0].decode()


def test_a_verdict_without_its_passing_cells_is_refused(tmp_path: Path, recorded: Make) -> None:
    with open_run(recorded(tmp_path)) as run, pytest.raises(UsageError, match="all_cells"):
        write_events(run, check(run), tmp_path / "events")


def test_loads_become_colours() -> None:
    pixels = load_pixels(np.array([[1.0, 8.0, 0.0, np.nan]]))[0, :: 256 // 4]
    assert pixels.tolist() == [[247, 247, 247], [179, 88, 6], [33, 102, 172], [160, 160, 160]]


def test_no_torch_is_needed(tmp_path: Path, recorded: Make) -> None:
    recorded(tmp_path / "run")
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['tensorflow'] = None\n"
        "import moe_audit; from moe_audit.reports.tensorboard import write_events\n"
        f"run = moe_audit.open_run({str(tmp_path / 'run')!r})\n"
        f"write_events(run, moe_audit.check(run, all_cells=True), {str(tmp_path / 'events')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert list((tmp_path / "events").iterdir())
