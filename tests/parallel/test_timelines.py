"""The timelines in the documentation are what the simulator draws today."""

import importlib.util
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("draw_timelines", ROOT / "scripts" / "draw_timelines.py")
draw_timelines = importlib.util.module_from_spec(_spec)
sys.modules["draw_timelines"] = draw_timelines
_spec.loader.exec_module(draw_timelines)
DRAWN = draw_timelines.draw()


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_the_committed_picture_is_what_the_script_draws(name):
    committed = (ROOT / "docs" / "assets" / name).read_text()
    assert committed == DRAWN[name], "run: python scripts/draw_timelines.py"


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_no_bar_leaves_its_picture(name):
    picture = ElementTree.fromstring(DRAWN[name])
    width, height = float(picture.get("width")), float(picture.get("height"))
    bars = picture.findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) > 10
    for bar in bars:
        assert 0 <= float(bar.get("x")) <= width - float(bar.get("width"))
        assert 0 <= float(bar.get("y")) <= height - float(bar.get("height"))


def test_every_picture_is_shown():
    page = (ROOT / "docs" / "explanation" / "how-gradients-travel.md").read_text()
    assert all(f"../assets/{name}" in page for name in DRAWN)
