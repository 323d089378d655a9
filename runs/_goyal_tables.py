"""How are the results of runs/goyal_*.py read? As tables for docs/log.md: `python runs/_goyal_tables.py NAME`.

Nothing but the standard library, and nothing but result.json, so that a page can be checked without training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    return "".join("| " + " | ".join(line) + " |\n" for line in [head, ["---"] * len(head), *rows])


def spread(mean: float | None, std: float | None, digits: int = 2) -> str:
    """`mean ± std`, or that a seed had none."""
    return "not finite" if mean is None or std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"


def interval(of: dict[str, Any] | None, digits: int = 2) -> str:
    """`value (low to high)` with signs; nothing for a comparison of a training with itself."""
    if of is None:
        return ""
    if None in of.values():
        return "not finite"
    return f"{of['value']:+.{digits}f} ({of['low']:+.{digits}f} to {of['high']:+.{digits}f})"


def goyal(folder: Path) -> str:
    """One row per training or comparison."""
    rows = []
    for row in json.loads((folder / "result.json").read_text())["rows"]:
        difference, verdict = interval(row["difference"]), row["verdict"]
        rows.append([
            str(row["batch"]), row["what"], f"{row['lr']:.3g}", spread(row["mean"], row["std"]),
            str(len(row["errors"])), f"{difference} to {row['against']}" if difference else "", verdict,
            spread(row["recomputed_mean"], row["recomputed_std"]), spread(row["train_loss"], row["train_loss_std"], 3),
            interval(row["train_loss_difference"], 3), f"{row['seconds_a_seed']:.0f} s",
        ])  # fmt: skip
    head = ["batch", "run", "peak lr", "error, %", "seeds", "paired difference, points", "verdict", "error, recomputed",
            "training loss", "its paired difference", "core seconds a run"]  # fmt: skip
    return table(head, rows)


def joined(folder: Path) -> str:
    """One row per length and batch: the epoch from which on its curves stay within 2 std of the reference's."""

    def said(epoch: int | None) -> str:
        return "never" if epoch is None else str(epoch)

    rows = [
        [
            str(row["epochs"]),
            str(row["batch"]),
            *(said(row[curve]) for curve in ("train_loss", "error", "recomputed_error")),
        ]
        for row in json.loads((folder / "result.json").read_text())["rows"]
    ]
    return table(["epochs", "batch", "training loss", "test error", "test error, statistics recomputed"], rows)


def forecasts(folder: Path) -> str:
    """One row per epoch: rank correlation of its gap in training loss with how the run ends."""
    rows = [
        [str(row["epoch"]), row["of"], interval(row["across"]), interval(row["within"])]
        for row in json.loads((folder / "result.json").read_text())["forecasts"]
    ]
    return table(["gap after epoch", "with the gap in", "over batches and seeds", "over seeds within a batch"], rows)


KINDS = {"goyal": goyal, "joined": joined, "forecasts": forecasts}

if __name__ == "__main__":
    chosen = Path(__file__).parent / sys.argv[1]
    kinds = ("joined", "forecasts") if sys.argv[1] == "goyal_curves" else ("goyal",)
    print("\n".join(KINDS[kind](chosen) for kind in kinds))
