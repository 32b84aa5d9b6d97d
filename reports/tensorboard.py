"""A judged run as TensorBoard events, by tensorboard's own writer: no torch.

A bounded number of series, however many experts and layers: per gate the worst cell and the mean of a window,
the loss, the learning rates, the status. One image a layer shows the load of its experts over time.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_audit.reports import markdown
from moe_audit.reports.page import thin
from moe_audit.reports.scope import analysis_of, status_of
from moe_audit.thresholds.errors import UsageError

if TYPE_CHECKING:
    from moe_audit.frame import Analysis, LayerFrame
    from moe_audit.run import Run
    from moe_audit.verdict import Verdict

PREFIX = "routing"
MOST_COLUMNS = 800  # windows in an image
RAMP = np.array([[33, 102, 172], [247, 247, 247], [179, 88, 6]], dtype=np.float64)  # under, even, over
LOG_RANGE = 3.0  # the ramp ends at 1/8 and 8 fair shares


def write_events(run: Run, verdict: Verdict, folder: str | Path) -> Path:
    """Writes one events file for `verdict` on `run` into `folder`; returns the folder.

    Raises:
        UsageError: tensorboard is not installed, the verdict lacks the cells that pass (judge with
            `all_cells=True`), or the folder cannot be written.
    """
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        remedy = "pip install 'moe-audit[report]'"
        raise UsageError("TensorBoard events need the package tensorboard", remedy) from error
    if len(verdict.cells) < sum(verdict.totals.values()):
        raise UsageError("the verdict lacks the cells that pass", "judge the run with all_cells=True")
    analysis = analysis_of(run, verdict)
    try:
        writer = EventFileWriter(str(folder), filename_suffix=".moe-audit")
        for step, wall_time, value in _values(analysis, verdict):
            writer.add_event(_event(step, wall_time, value))
        writer.close()
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}", "choose another folder") from error
    return Path(folder)


def _values(analysis: Analysis, verdict: Verdict) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """(step, wall time, fields of a Summary.Value) in order of the steps."""
    windows = analysis.windows
    time_R = [_seconds(r.written_at) for r in analysis.records]
    end = (analysis.records[-1].last_step, time_R[-1])
    yield 0, time_R[0], _layout(verdict, analysis)
    for record, wall_time in zip(analysis.records, time_R):
        for name in ("loss", "lr", "router_lr"):
            number = getattr(record, name)
            if number is not None:
                yield record.last_step, wall_time, _scalar(name, number)
    gates = _gate_scalars(verdict)
    status_W = status_of(analysis, verdict).max(axis=1)
    for w, last in enumerate(windows.last_step_W.tolist()):
        wall_time = time_R[int(windows.hi_W[w]) - 1]
        for name, number in gates.get((int(windows.first_step_W[w]), last), {}).items():
            yield last, wall_time, _scalar(name, number)
        if status_W[w] >= 0:
            yield last, wall_time, _scalar("status", float(status_W[w]))
    for frame in analysis.frames():
        yield *end, _image(frame)
    yield *end, _text("verdict", markdown.render(verdict))


def _gate_scalars(verdict: Verdict) -> dict[tuple[int, int], dict[str, float]]:
    """(first step, last step) -> "gate/worst" and "gate/mean" over the cells of that window."""
    values: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in verdict.cells:
        if cell.value is not None and np.isfinite(cell.value):
            values[cell.first_step, cell.last_step][cell.gate].append(float(cell.value))
    worst = {g.gate: min if g.op.startswith("<") else max for g in verdict.gates}
    return {
        window: {
            name: number
            for gate, numbers in by_gate.items()
            for name, number in (
                (f"{gate}/worst", worst[gate](numbers)),
                (f"{gate}/mean", float(np.mean(numbers))),
            )
        }
        for window, by_gate in values.items()
    }


def _layout(verdict: Verdict, analysis: Analysis) -> dict[str, Any]:
    """One panel of the custom-scalar dashboard: the loss, then each gate."""
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    charts = [("loss", ["loss"])] if any(r.loss is not None for r in analysis.records) else []
    charts += [(g.gate, [f"{g.gate}/worst", f"{g.gate}/mean"]) for g in verdict.gates]
    charts += [("status (0 pass, 1 warn, 2 insufficient, 3 fail)", ["status"])]
    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title="Routing",
                chart=[
                    layout_pb2.Chart(
                        title=title,
                        multiline=layout_pb2.MultilineChartContent(
                            tag=[f"^{re.escape(f'{PREFIX}/{tag}')}$" for tag in tags]
                        ),
                    )
                    for title, tags in charts
                ],
            )
        ]
    )
    return {
        "tag": metadata.CONFIG_SUMMARY_TAG,
        "metadata": metadata.create_summary_metadata(),
        "tensor": _string_tensor(layout.SerializeToString()),
    }


def _scalar(name: str, number: float) -> dict[str, Any]:
    return {"tag": f"{PREFIX}/{name}", "simple_value": float(number)}


def _text(name: str, text: str) -> dict[str, Any]:
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    encoded = text.encode("utf-8", "replace")
    return {
        "tag": f"{PREFIX}/{name}",
        "metadata": SummaryMetadata(plugin_data=plugin),
        "tensor": _string_tensor(encoded),
    }


def _image(frame: LayerFrame) -> dict[str, Any]:
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    columns = thin(len(frame.p_WE), MOST_COLUMNS)
    pixels_EW3 = load_pixels(frame.p_WE[columns].T * frame.N)
    file = io.BytesIO()
    Image.fromarray(pixels_EW3).save(file, "PNG")
    height, width = pixels_EW3.shape[:2]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=file.getvalue())
    return {"tag": f"{PREFIX}/load/layer {frame.info.layer}", "image": image}


def load_pixels(load_EW: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Loads in fair shares as RGB by log2: blue below 1, white at 1, brown above; grey where there is none.

    Each value becomes a square of whole pixels, so that a small map can be seen as well.
    """
    place = np.log2(np.clip(np.nan_to_num(load_EW, nan=1.0), 2**-LOG_RANGE, 2**LOG_RANGE)) / LOG_RANGE + 1
    low = np.clip(place.astype(np.int64), 0, 1)
    part = (place - low)[..., None]
    colors = RAMP[low] * (1 - part) + RAMP[low + 1] * part
    colors[np.isnan(load_EW)] = 160
    size = max(1, 256 // max(load_EW.shape))
    return np.rint(colors).astype(np.uint8).repeat(size, axis=0).repeat(size, axis=1)


def _string_tensor(data: bytes) -> Any:
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    return TensorProto(dtype=DT_STRING, string_val=[data])


def _event(step: int, wall_time: float, fields: dict[str, Any]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(step=step, wall_time=wall_time, summary=Summary(value=[Summary.Value(**fields)]))


def _seconds(text: str) -> float:
    """A record's ISO 8601 time as seconds since 1970; 0 where another program wrote something else."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
