"""The HTML report without a browser: what is in the data block, and runs of every odd kind."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_audit import check, open_run
from moe_audit.explain import explain
from moe_audit.reports import html
from moe_audit.reports.html import render_html, write_html
from moe_audit.reports.page import NO_VALUE, thin
from moe_audit.store import LayerInfo, LayerRecord, Record, Store
from moe_audit.thresholds.errors import UsageError

Make = Callable[..., Any]
ODD = ["one expert", "one source", "one record", "uneven layers", "import", "empty source"]
TYPES = {"u1": "u1", "i1": "i1", "u2": "<u2", "f4": "<f4", "f8": "<f8", "i8": "<i8"}


def block(page: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and arrays of a page, unpacked as the browser does."""
    [packed] = re.findall(r'id="data-gz">([A-Za-z0-9+/=]+)</script>', page)
    raw = gzip.decompress(base64.b64decode(packed))
    length = int.from_bytes(raw[:4], "little")
    header = json.loads(raw[4 : 4 + length])
    arrays = {}
    for name, entry in header["arrays"].items():
        at = 4 + length + entry["at"]
        assert at % 8 == 0
        count = int(np.prod(entry["shape"]))
        arrays[name] = np.frombuffer(raw, TYPES[entry["type"]], count, at).reshape(entry["shape"])
    return header, arrays


class Tags(HTMLParser):
    """Every start tag with its attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not self.tags or self.tags[-1][0] not in ("script", "style"):
            self.text += data


def test_the_block_holds_what_the_store_holds(tmp_path: Path, recorded: Make) -> None:
    with open_run(recorded(tmp_path, layers=2, records=120, sick=True)) as run:
        _, arrays = block(render_html(run, check(run)))
        windows = list(zip(arrays["first"], arrays["last"]))
        rows = [windows[-1][0] <= r.last_step <= windows[-1][1] for r in run.records]
        picks_SE = run.counts(1)[rows].sum(0)
    load = picks_SE.sum(0) * 8 / picks_SE.sum()
    shown = arrays["load1"][:, -1] / 65534 * arrays["top1"][0]
    assert shown == pytest.approx(load, abs=1e-4)
    share = picks_SE / picks_SE.sum(1, keepdims=True)
    assert (arrays["source1"][-1] / 254) ** 2 == pytest.approx(share, abs=5e-3)
    assert arrays["loss"] == pytest.approx([3.0 - r / 120 for r in range(120)])
    assert arrays["status"].shape == (len(windows), 2)


def test_the_verdict_and_its_reasons_stand_in_the_text(tmp_path: Path, recorded: Make) -> None:
    with open_run(recorded(tmp_path, records=120, sick=True)) as run:
        verdict = check(run)
        found = explain(run, "default")
        page = Tags(render_html(run, verdict, found))
    assert "Routing is not acceptable under policy default" in page.text
    assert found.diagnoses[0].title in page.text
    assert all(cell.gate in page.text for cell in verdict.cells)


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path, recorded: Make) -> None:
    with open_run(recorded(tmp_path)) as run:
        page = Tags(render_html(run, check(run)))
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data"):
            assert not re.match(r"https?:|//", attributes.get(name) or ""), (tag, attributes)
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'")


def test_hostile_names_stay_text(
    tmp_path: Path, recorded: Make, verdict: Make, cell: Make, with_grid: Make, nasty: str
) -> None:
    name = nasty.replace("\ud800", "")  # which no store can hold
    recorded(tmp_path, names=[name, "b"], sources=[name, "prose"], sick=True)
    with open_run(tmp_path) as run:
        usual = Tags(render_html(run, with_grid(run, verdict(cells=[cell()]))))
        hostile = verdict(cells=[cell(layer_name=nasty, source=nasty, value_reason=nasty)])
        hostile.skipped = [{"gate": "cv", "reason": nasty}]
        hostile.problems = [{"kind": nasty, "message": nasty}]
        hostile.waived = [{"gate": "cv", "owner": nasty}]
        hostile.policy["name"] = nasty
        text = render_html(run, with_grid(run, hostile))
    page = Tags(text)
    kinds = {tag for tag, _ in usual.tags} | {"ul", "li"}
    assert {tag for tag, _ in page.tags} <= kinds
    assert not [a for _, a in page.tags if any(key.startswith("on") for key in a)]
    assert "\x1b" not in text and "\u202e" not in text and "\x00" not in text
    assert len(page.text) < 20_000


def test_more_cells_than_are_listed_are_counted(
    tmp_path: Path, recorded: Make, verdict: Make, cell: Make, with_grid: Make
) -> None:
    with open_run(recorded(tmp_path)) as run:
        cells = [cell(layer=i) for i in range(900)]
        page = Tags(render_html(run, with_grid(run, verdict(cells=cells))))
    assert "400 FAIL of min_load" in " ".join(page.text.split())


@pytest.mark.parametrize("kind", ODD)
def test_odd_runs_have_a_report(tmp_path: Path, kind: str) -> None:
    E = 1 if kind == "one expert" else 4
    sources = ["a"] if kind == "one source" else ["a", "b"]
    infos = [LayerInfo(0, "x", E, 1), LayerInfo(3, "y", 6 if kind == "uneven layers" else E, None)]
    store = Store.create(tmp_path / "routing.db", infos, sources)
    store.begin_attempt(1)
    for r in range(1 if kind == "one record" else 30):
        rows = {}
        for info in infos:
            counts = np.full((len(sources), info.num_experts), 100)
            counts[-1] *= kind != "empty source"
            full = kind != "import"
            rows[info.layer] = LayerRecord(
                counts, tokens_S=counts.sum(1) if full else None, calls=2 if full else None
            )
        store.append(Record("train", r + 1, r + 1, rows, tokens=None))
    store.close()
    with open_run(tmp_path) as run:
        path = write_html(run, check(run), tmp_path / "new" / "folder" / "report.html")
    header, arrays = block(path.read_text(encoding="utf-8"))
    assert [layer["experts"] for layer in header["layers"]] == [i.num_experts for i in infos]
    if kind == "empty source":
        assert (arrays["source0"][:, 1] == 255).all()
    assert (arrays["load0"] != NO_VALUE).all()


def test_without_plotly_there_is_one_clear_error(
    tmp_path: Path, recorded: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    html._plotly.cache_clear()
    with open_run(recorded(tmp_path)) as run, pytest.raises(UsageError, match=r"plotly.*\[report\]"):
        write_html(run, check(run), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_path_that_cannot_be_written_is_a_usage_error(tmp_path: Path, recorded: Make) -> None:
    (tmp_path / "file").touch()
    with open_run(recorded(tmp_path)) as run, pytest.raises(UsageError, match="cannot be written"):
        write_html(run, check(run), tmp_path / "file" / "report.html")


@pytest.mark.parametrize(
    ("count", "most", "expected"), [(5, 9, [0, 1, 2, 3, 4]), (9, 4, [2, 5, 8]), (3, 0, [2]), (0, 5, [])]
)
def test_windows_are_thinned_evenly_and_the_last_one_stays(
    count: int, most: int, expected: list[int]
) -> None:
    assert thin(count, most).tolist() == expected


# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
COLOUR_BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def lab(hexadecimal: str, matrix: Any) -> np.ndarray[Any, Any]:
    """CIE L*a*b* of a colour as somebody with this vision sees it."""
    srgb = np.array([int(hexadecimal[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(matrix) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = to_xyz @ seen / [0.9505, 1.0, 1.089]
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", COLOUR_BLINDNESS)
def test_statuses_can_be_told_apart_by_colour_whatever_the_eye(vision: str) -> None:
    css = (Path(html.__file__).parent / "templates" / "report.css").read_text()
    themes = re.findall(
        r"--pass: (#\w{6}); --warn: (#\w{6}); --fail: (#\w{6}); --insufficient: (#\w{6})", css
    )
    assert len(themes) == 2  # light and dark
    for theme in themes:
        seen = [lab(colour, COLOUR_BLINDNESS[vision]) for colour in theme]
        distances = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
        assert min(distances) > 15, (theme, [round(d) for d in distances])
