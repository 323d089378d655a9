"""Does the page work in a real browser, offline, on a phone and on a desk?"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.sample import sample_result

from largebatch.records.files import plain
from largebatch.report.page import write_report

HOW = "apt-get install chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FIGURES = ["noise", "front", "learning_rate", "curves", "error"]
SMALL_TEXT = """() => {
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const parent = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || parent.closest("script, style, sub, noscript, tspan")) continue;
    if (parent.getClientRects().length === 0) continue;
    const size = parseFloat(getComputedStyle(parent).fontSize);
    if (size < 14) found.push([size, walk.currentNode.data.trim().slice(0, 40)]);
  }
  return found;
}"""
LOW_CONTRAST = """() => {
  const channels = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const rgb = channels(getComputedStyle(at).backgroundColor);
      if (rgb.length === 3 || rgb[3] === 1) return rgb;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("h1,h2,h3,p,dt,dd,td,th,figcaption,li,summary,button,code,data,a")) {
    const both = [light(channels(getComputedStyle(element).color)), light(behind(element))];
    const [high, low] = both.sort((a, b) => b - a);
    if ((high + 0.05) / (low + 0.05) < 4.5) found.push(element.outerHTML.slice(0, 80));
  }
  return found;
}"""


def chromium_path() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install 'largebatch[test]'"
    )
    path = chromium_path()
    if path is None:
        pytest.skip(f"no Chromium found: {HOW}")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=path, args=FLAGS, env={**os.environ})
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(sample_result(), tmp_path_factory.mktemp("report"))


def opened(browser: Any, report: Path, width: int, scheme: str = "light") -> tuple[Any, list[str]]:
    """The page, drawn, and everything that went wrong or was asked for on the way."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page, trouble = context.new_page(), []
    page.on("console", lambda message: trouble.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    page.on("request", lambda request: request.url != report.as_uri() and trouble.append(f"request {request.url}"))
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn=true]", state="attached", timeout=90_000)
    return page, trouble


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_is_whole_and_readable(browser: Any, report: Path, width: int, scheme: str) -> None:
    page, trouble = opened(browser, report, width, scheme)
    drawn = page.evaluate(
        "() => [...document.querySelectorAll('.plot')].map((plot) => [plot.dataset.figure, "
        "plot.querySelectorAll('svg.main-svg').length, plot.querySelectorAll('.trace path').length, "
        "plot.querySelector('.main-svg').getBoundingClientRect().width <= plot.clientWidth + 1])"
    )
    assert [name for name, *_ in drawn] == FIGURES
    assert all(layers >= 1 and marks >= 3 and fits for _, layers, marks, fits in drawn)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    first = page.evaluate("document.body.innerText.trim()")
    assert first.startswith("A batch of 64 examples is worth it for digits")
    assert page.evaluate(SMALL_TEXT) == []
    assert page.evaluate(LOW_CONTRAST) == []
    assert trouble == []
    page.context.close()


def test_a_press_on_the_legend_hides_a_series_and_its_band(browser: Any, report: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    page, trouble = opened(browser, report, 1400)
    plot = page.locator("#plot-curves")
    before = plot.locator(".trace").count()
    page.locator("#plot-curves + .legend button").first.click()
    playwright.expect(plot.locator(".trace")).to_have_count(before - 2)
    assert trouble == []
    page.context.close()


def test_turning_the_phone_draws_again_at_the_new_width(browser: Any, report: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    page, trouble = opened(browser, report, 1400)
    page.set_viewport_size({"width": 400, "height": 900})
    playwright.expect(page.locator("#plot-error .main-svg").first).to_have_attribute("width", re.compile("^3\\d\\d$"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert trouble == []
    page.context.close()


def test_the_picture_of_the_report_is_1400_wide_and_light_enough_for_a_readme(browser: Any, tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "report_picture.py"
    (tmp_path / "result.json").write_text(json.dumps(plain(sample_result())))
    image = tmp_path / "report.png"
    subprocess.run([sys.executable, script, tmp_path / "result.json", image], check=True)
    head = image.read_bytes()[:24]
    width, height = (int.from_bytes(head[place : place + 4], "big") for place in (16, 20))
    assert width == 1400
    assert 600 < height <= 1700
    assert image.stat().st_size < 400_000
    refused = subprocess.run([sys.executable, script, tmp_path / "none.json", image], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "none.json does not exist" in refused.stderr
    assert "Traceback" not in refused.stderr
