"""Which figures stand in docs/log.md, and which hardware in README.md? Tables made from committed runs/*/.

    python scripts/write_log_tables.py            # write them
    python scripts/write_log_tables.py --check    # exit 1 when one is not what its result.json says

A marker is `<!-- table: NAME KIND -->` ... `<!-- end -->`, with KIND one of how, fronts, large, scales, conditioning,
stamps, or one of runs/_goyal_tables.py.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOYAL = run_path(str(ROOT / "runs" / "_goyal_tables.py"))["KINDS"]
PAGES = (ROOT / "docs" / "log.md", ROOT / "README.md")
MARKER = re.compile(r"(<!-- table: (\w+) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def worded(interval: dict[str, Any], digits: int = 3) -> str:
    """`value (low to high)`."""
    if interval["value"] is None:
        return "not resolved"
    ends = ["unbounded" if interval[end] is None else f"{interval[end]:.{digits}g}" for end in ("low", "high")]
    return f"{interval['value']:.{digits}g} ({ends[0]} to {ends[1]})"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def how(folder: Path) -> str:
    """Where the figures come from."""
    facts = json.loads((folder / "how.json").read_text())
    result = json.loads((folder / "result.json").read_text())
    seed = result["seed"] if "seed" in result else result["rows"][0]["setting"]["seed"]
    seconds = result.get("seconds", facts["seconds"])
    return table(
        ["command", "commit", "hardware", "torch", "seed", "wall"],
        [[f"`{facts['command']}`", f"`{facts['commit']}`", facts["hardware"], facts["torch"], str(seed),
          f"{seconds:.0f} s"]],
    )  # fmt: skip


def fronts(folder: Path) -> str:
    """One row per goal: measured and predicted critical batch size."""
    result = json.loads((folder / "result.json").read_text())
    rows = []
    for front, forecast in zip(result["fronts"], result["predictions"], strict=True):
        seeds = [len(point["steps"]) + len(point["bounds"]) for point in front["points"]]
        batches = f"{len(seeds)} ({min(point['batch'] for point in front['points'])} to "
        batches += f"{max(point['batch'] for point in front['points'])}), {min(seeds)} seeds"
        rows.append([
            f"{front['goal']:g}", worded(front["b_crit"]), worded(forecast["b_crit"]), worded(forecast["b_simple"]),
            worded(front["b_simple_over_b_crit"]), worded(front["min_steps"]), worded(front["min_units"]),
            f"{front['residual_std']:.2f}", batches,
        ])  # fmt: skip
    head = ["goal (loss)", "B_crit measured", "B_crit predicted", "B_simple", "B_simple / B_crit", "S_min", "E_min",
            "std of log S", "batches"]  # fmt: skip
    return table(head, rows)


def large(folder: Path) -> str:
    """One row per full training run."""
    result = json.loads((folder / "result.json").read_text())
    rows = []
    for run in result["large"]:
        error = "diverged" if run["mean"] is None else f"{run['mean']:.2f} ± {run['std']:.2f}"
        gap = run["difference"]
        difference = "" if gap["value"] is None or run["rule"] == "baseline" else (
            f"{gap['value']:+.2f} ({gap['low']:+.2f} to {gap['high']:+.2f})"
        )  # fmt: skip
        rows.append([
            str(run["batch"]), run["role"], run["rule"], f"{run['lr']:.3g}", error, difference, run["verdict"],
            str(len(run["errors"])),
        ])  # fmt: skip
    return table(["batch", "why", "rule", "peak lr", "error, %", "minus baseline, points", "verdict", "seeds"], rows)


def scales(folder: Path) -> str:
    """One row per checkpoint: both noise scales, the line search's, the limits, the temperature."""

    def ratio(value: Any, interval: list[Any]) -> str:
        return worded({"value": value, "low": interval[0], "high": interval[1]})

    rows = []
    for row in json.loads((folder / "result.json").read_text())["rows"]:
        curvature, search, told = row["curvature"], row["line_search"], row["temperature"]
        rows.append([
            str(row["step"]), f"{row['held_out_loss']:.3f}",
            ratio(row["b_simple"]["b_simple"], row["b_simple"]["interval"]),
            ratio(curvature["b_noise"], curvature["interval"]), ratio(search["b_noise"], search["interval"]),
            f"{search['form_p_value']:.2g}", f"{curvature['lr_max']:.3g} / {search['lr_max']:.3g}",
            f"{curvature['loss_decrease_max']:.3g} / {search['loss_decrease_max']:.3g}",
            ratio(told["value"], told["interval"]),
        ])  # fmt: skip
    head = ["step", "held-out loss", "B_simple", "B_noise", "B_noise by line search", "p of the form",
            "eps_max: products / search", "dL_max: products / search", "temperature"]  # fmt: skip
    return table(head, rows)


def conditioning(folder: Path) -> str:
    """One row per quadratic: the swept B_crit and both noise scales, from B_noise = 1 at the start."""
    rows = [
        [row["noise"], f"{row['goal']:g}", f"{row['condition']:g}", f"{row['b_crit']:.3g}", f"{row['b_noise']:.3g}",
         f"{row['b_simple']:.3g}", f"{row['b_noise_over_b_crit']:.2g}", f"{row['b_simple_over_b_crit']:.2g}",
         f"{row['min_steps']:.3g}", f"{row['residual_std']:.2f}"]
        for row in json.loads((folder / "result.json").read_text())["rows"]
    ]  # fmt: skip
    head = ["Sigma", "goal", "condition", "B_crit swept", "B_noise", "B_simple", "B_noise / B_crit",
            "B_simple / B_crit", "S_min", "std of log S"]  # fmt: skip
    return table(head, rows)


def stamps(folder: Path) -> str:
    """One row per fine-tune of Mask R-CNN: box and mask AP in percent, after training and before."""
    rows = []
    for row in json.loads((folder / "result.json").read_text())["rows"]:
        aps = [f"{100 * row['trained'][ap]:.1f}" for ap in ("box_ap", "box_ap50", "mask_ap", "mask_ap50")]
        untrained = " / ".join(f"{100 * row['untrained'][ap]:.1f}" for ap in ("box_ap", "mask_ap"))
        rows.append([str(row["setting"]["batch"]), f"{row['lr']:g}", str(row["steps"]), *aps, untrained,
                     f"{row['seconds']:.0f} s"])  # fmt: skip
    head = ["batch", "lr", "steps", "box AP, %", "box AP50", "mask AP, %", "mask AP50", "untrained box / mask", "time"]
    return table(head, rows)


def transfer(folder: Path) -> str:
    """One row per backbone: its batch and error, and the AP of the same fine-tune from it."""
    rows = []
    for row in json.loads((folder / "result.json").read_text())["rows"]:
        batch, error = row["setting"]["backbone_batch"], row["backbone_error"]
        aps = [f"{100 * row['trained'][ap]:.1f}" for ap in ("box_ap", "box_ap50", "mask_ap", "mask_ap50")]
        start = ["none", "-"] if batch is None else [str(batch), f"{error:.1f}"]
        rows.append([*start, *aps, str(row["steps"]), f"{row['seconds']:.0f} s"])
    head = [
        "backbone's batch",
        "its error, %",
        "box AP, %",
        "box AP50",
        "mask AP, %",
        "mask AP50",
        "steps",
        "fine-tune",
    ]
    return table(head, rows)


def training(folder: Path) -> str:
    """One row per training: the held-out error after some of its epochs."""
    rows = []
    for row in json.loads((folder / "result.json").read_text())["rows"]:
        epochs = row["epochs"]
        marks = [epochs[len(epochs) * part // 4 - 1] for part in (1, 2, 3, 4)]
        errors = [f"{100 * mark['error']:.1f} ({mark['epoch']:g})" for mark in marks]
        rows.append([str(row["batch"]), f"{row['lr']:g}", str(row["steps"]), *errors, f"{row['seconds']:.0f} s"])
    head = ["batch", "peak lr", "steps", *["error, % (epoch)"] * 4, "time"]
    return table(head, rows)


def ran(_: Path) -> str:
    """One row per hardware and torch: the experiments on record there."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted((ROOT / "runs").glob("*/how.json")):
        facts = json.loads(path.read_text())
        found.setdefault((facts["hardware"], facts["torch"]), []).append(path.parent.name)
    rows = [[hardware, torch, ", ".join(names)] for (hardware, torch), names in sorted(found.items())]
    return table(["hardware", "torch", "experiments on record (`runs/`)"], rows)


def written(text: str) -> str:
    """The page with every table made afresh."""
    kinds = {"how": how, "fronts": fronts, "large": large, "scales": scales, "conditioning": conditioning, "ran": ran}
    kinds |= {"stamps": stamps, "transfer": transfer, "training": training}
    kinds |= GOYAL
    return MARKER.sub(lambda found: found[1] + "\n" + kinds[found[3]](ROOT / "runs" / found[2]) + "\n" + found[4], text)


if __name__ == "__main__":
    for path in PAGES:
        page = path.read_text()
        if "--check" not in sys.argv:
            path.write_text(written(page))
        elif page != written(page):
            sys.exit(f"{path} is out of date: python scripts/write_log_tables.py")
