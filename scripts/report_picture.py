"""What does the report look like? Draw a result's page and save the top of it, 1400 pixels wide, as PNG.

Usage: python scripts/report_picture.py RESULT_JSON OUTPUT_PNG

Needs the `study` and `test` extras and a Chromium (apt-get install chromium). The picture ends after the last section
that fits under `--height`, so that nothing is cut through.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from largebatch.report.page import write_report
from largebatch.report.reading import read_result

WIDTH = 1400
LIMIT = 400_000
"""Bytes; a README loads the picture on every visit."""
BOTTOMS = (
    """() => [...document.querySelectorAll("header, section")].map((part) => part.getBoundingClientRect().bottom)"""
)


def picture(result: Path, output: Path, *, height: int) -> None:
    """Write the top of the result's page to `output`.

    Args:
        result: The study's result.json.
        output: The PNG to write.
        height: Pixels that the picture may be high.
    Raises:
        RecordError: It is not a study's result.
        RuntimeError: There is no Chromium, or the picture is larger than the limit.
    """
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    browser_path = next((path for name in names if (path := shutil.which(name))), None)
    if browser_path is None:
        raise RuntimeError("no Chromium found: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        report = write_report(read_result(result), Path(folder))
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme="light")
        page.goto(report.as_uri())
        page.wait_for_selector("html[data-drawn=true]", state="attached")
        whole = [bottom for bottom in page.evaluate(BOTTOMS) if bottom + 40 <= height]
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": max(whole, default=height) + 40}
        image = page.screenshot(clip=clip)
        browser.close()
    if len(image) > LIMIT:
        raise RuntimeError(f"the picture has {len(image):,} bytes and may have {LIMIT:,}: choose a smaller --height")
    output.write_bytes(image)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="the study's result.json")
    parser.add_argument("output", type=Path, help="the PNG to write")
    parser.add_argument("--height", type=int, default=1700, help="pixels the picture may be high (default: 1700)")
    given = parser.parse_args()
    try:
        picture(given.result, given.output, height=given.height)
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
