"""Takes the pictures of this folder: the two reports of `make demo`, in headless Chromium.

    python examples/gallery/shoot.py runs

Needs selenium (in the extra `dev`), chromium and chromedriver. Each picture is the verdict, the timeline and
the first two maps of the page, one below the other; nothing else about them is changed.
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

PARTS = ("header.verdict", "#explore", "#load", "#sources")
WIDTH, GAP = 1120, 14


def shoot(page: Path, picture: Path) -> None:
    """One report as a PNG."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    screen = {"width": WIDTH, "height": 4000, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    driver.get(page.resolve().as_uri())
    while not driver.execute_script("return document.querySelector('#sources .main-svg')"):
        time.sleep(0.1)
    time.sleep(1)  # until the last plot has its final size
    full = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    boxes = driver.execute_script(
        "return arguments[0].map(s => document.querySelector(s)).map(e => e.closest('section') || e)"
        ".map(e => e.getBoundingClientRect()).map(r => [r.left, r.top, r.right, r.bottom])",
        list(PARTS),
    )
    driver.quit()
    rows = [boxes[0], boxes[1], [boxes[2][0], boxes[2][1], boxes[3][2], max(boxes[2][3], boxes[3][3])]]
    strips = [full.crop((0, int(top), WIDTH, int(bottom) + 1)) for _, top, _, bottom in rows]
    height = sum(s.height for s in strips) + GAP * (len(strips) + 1)
    out = Image.new("RGB", (WIDTH, height), full.getpixel((2, 2)))
    y = GAP
    for strip in strips:
        out.paste(strip, (0, y))
        y += strip.height + GAP
    out.save(picture, optimize=True)


if __name__ == "__main__":
    for name in ("healthy", "sick"):
        shoot(Path(sys.argv[1]) / name / "report.html", Path(__file__).with_name(f"{name}.png"))
