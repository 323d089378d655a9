"""How do gradients travel during a step? Draw the simulator's timelines into docs/assets, as SVG.

Usage: python scripts/draw_timelines.py

The pictures of docs/explanation/how-gradients-travel.md; a test holds that the committed ones are what this draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

from largebatch.parallel.cost import LinkCost
from largebatch.parallel.simulate import GOYAL_2017, Cluster, Plan, Workload, simulate_point, timeline
from largebatch.parallel.simulate.point import MEBIBYTE, cut_into_buckets

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
WIDTH, LEFT, RIGHT, ROW, BAR = 760, 150, 20, 24, 16
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #39424e } .title { font-weight: 600 } .small { font-size: 11px }
.compute { fill: #a9b4c0 } .inside { fill: #d9974e } .between { fill: #4b7fb5 }
.grid { stroke: #8a94a0; stroke-opacity: .25 } .end { stroke: #b5484b; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) { text { fill: #d5dbe2 } .compute { fill: #6c7885 } .end { stroke: #e08a8c } }
"""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A step on some cluster."""

    title: str
    workload: Workload
    gpus: int
    cluster: Cluster
    plan: Plan


def panels() -> dict[str, tuple[str, list[Panel]]]:
    """File name -> what it shows, and the steps below each other."""
    work, fast = GOYAL_2017.workload(), replace(GOYAL_2017.cluster(), jitter=0.0)
    slow = replace(fast, network=LinkCost(fast.network.latency, 8 / 10e9))
    plan = Plan(bucket_bytes=8 * MEBIBYTE, concurrency=2)
    late = replace(plan, bucket_bytes=1e12, concurrency=1)

    def panel(title: str, gpus: int, cluster: Cluster, plan: Plan) -> Panel:
        return Panel(title=title, workload=work, gpus=gpus, cluster=cluster, plan=plan)

    return {
        "gradients-hidden.svg": (
            "ResNet-50 on 256 GPUs over 50 Gbit/s: all-reduce during the backward, and after it",
            [
                panel("two in flight, buckets of 8 MB", 256, fast, plan),
                panel("one all-reduce after the backward", 256, fast, late),
            ],
        ),
        "gradients-exposed.svg": (
            "The same over 10 Gbit/s: the link is busy longer than the backward",
            [panel("two in flight, buckets of 8 MB", 256, slow, plan)],
        ),
        "gradients-algorithms.svg": (
            "ResNet-50 on 16,384 GPUs (2,048 hosts) over 50 Gbit/s, buckets of 8 MB",
            [
                panel(name.replace("_", "/"), 16_384, fast, replace(plan, algorithm=name))
                for name in ("halving_doubling", "ring", "tree")
            ],
        ),
    }


def draw() -> dict[str, str]:
    """File name -> SVG."""
    return {name: _picture(title, shown) for name, (title, shown) in panels().items()}


def _picture(title: str, shown: list[Panel]) -> str:
    ends = [1e3 * (_backward(panel) + _point_exposed(panel)) for panel in shown]
    step = next(step for step in (10, 20, 50, 100, 200, 500) if max(ends) / step <= 12)
    reach = step * (int(max(ends) / step) + 1)
    scale = (WIDTH - LEFT - RIGHT) / reach
    heights = [ROW * (2 + panel.plan.concurrency) for panel in shown]
    bottom = 34 + sum(heights)
    parts = [f'<text class="title" x="8" y="18">{escape(title)}</text>']
    for mark in range(0, reach + 1, step):
        x = LEFT + mark * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{bottom}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{mark}</text>')
    parts.append(f'<text class="small" x="8" y="{bottom + 16}">time, ms</text>')
    top = 34
    for panel, height, end in zip(shown, heights, ends, strict=True):
        parts += _panel(panel, top, scale, end)
        top += height
    for index, (kind, said) in enumerate(
        [("compute", "backward, by bucket"), ("inside", "inside a host"), ("between", "between hosts")]
    ):
        x = LEFT + 160 * index
        parts.append(f'<rect class="{kind}" x="{x}" y="{bottom + 28}" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="small" x="{x + 18}" y="{bottom + 38}">{said}</text>')
    height = bottom + 50
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _panel(panel: Panel, top: int, scale: float, end: float) -> list[str]:
    backward = 1e3 * _backward(panel)
    parts = [f'<text class="small" x="{LEFT}" y="{top + 15}">{escape(panel.title)}</text>']
    rows = ["backward", *(f"in flight, {lane + 1}" for lane in range(panel.plan.concurrency))]
    parts += [
        f'<text class="small" x="8" y="{top + ROW * (row + 1) + 12}">{name}</text>' for row, name in enumerate(rows)
    ]
    before = 0.0
    for ready, _ in cut_into_buckets(panel.workload.profile, panel.plan.bucket_bytes):
        parts.append(_bar("compute", before, 1e3 * ready, top + ROW, scale))
        before = 1e3 * ready
    for span in timeline(panel.workload, panel.gpus, panel.cluster, panel.plan):
        parts.append(_bar(span.link, 1e3 * span.start, 1e3 * span.stop, top + ROW * (2 + span.lane), scale))
    x = LEFT + backward * scale
    parts.append(f'<line class="end" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 4}" y2="{top + ROW * (1 + len(rows)) - 4}"/>')
    said = f"{end - backward:.1f} ms exposed"
    parts.append(f'<text class="small" x="{WIDTH - RIGHT}" y="{top + 15}" text-anchor="end">{said}</text>')
    return parts


def _bar(kind: str, start: float, stop: float, y: int, scale: float) -> str:
    x, width = LEFT + start * scale, max(1.0, (stop - start) * scale - 0.6)
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="1"/>'


def _backward(panel: Panel) -> float:
    return panel.workload.profile.backward_seconds


def _point_exposed(panel: Panel) -> float:
    return simulate_point(panel.workload, panel.gpus, panel.cluster, panel.plan).exposed_seconds


if __name__ == "__main__":
    for name, text in draw().items():
        (ASSETS / name).write_text(text)
