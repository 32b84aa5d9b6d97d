"""The HTML report: one file that needs no network. Plots by plotly.js, out of the plotly package."""

from __future__ import annotations

import base64
import gzip
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from moe_audit.reports import page
from moe_audit.reports.wording import expert_list, number
from moe_audit.thresholds.errors import UsageError

if TYPE_CHECKING:
    from moe_audit.explain import Explanation
    from moe_audit.run import Run
    from moe_audit.verdict import Verdict


def write_html(run: Run, verdict: Verdict, path: str | Path, explanation: Explanation | None = None) -> Path:
    """Writes the report of `verdict` on `run` to `path`; its folder is made if need be.

    With an `explanation` (of `moe_audit.explain`) the page also says why, and what to do.

    Raises:
        UsageError: plotly is not installed, or the file cannot be written.
    """
    path = Path(path)
    text = render_html(run, verdict, explanation)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}", "choose another path with -o") from error
    return path


def render_html(run: Run, verdict: Verdict, explanation: Explanation | None = None) -> str:
    """The report as text. Script and data are compressed: the browser unpacks them itself, in some 50 ms."""
    from jinja2 import Environment, StrictUndefined

    templates = files("moe_audit.reports").joinpath("templates")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    environment.filters["experts"] = expert_list
    template = environment.from_string(templates.joinpath("report.html.j2").read_text(encoding="utf-8"))
    header, arrays = page.collect(run, verdict)
    text = template.render(
        **page.summary(verdict, explanation),
        events=header["events"],
        layer_names=[(i["layer"], i["name"]) for i in header["layers"]],
        windows=len(arrays["first"]),
        style=templates.joinpath("report.css").read_text(encoding="utf-8"),
        script=templates.joinpath("report.js").read_text(encoding="utf-8"),
        plotly=_plotly(),
        data=page.pack(header, arrays),
    )
    return text.encode("utf-8", "replace").decode("utf-8")


@cache
def _plotly() -> str:
    """plotly.js as base64 of gzip."""
    try:
        script = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    except (ImportError, OSError) as error:
        raise UsageError("the HTML report needs plotly", "pip install 'moe-audit[report]'") from error
    return base64.b64encode(gzip.compress(script, 6, mtime=0)).decode("ascii")
