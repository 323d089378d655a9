"""What does every key on disk mean? Writes docs/records.md from the docstrings of records/ and StepMoments.

python scripts/write_records_page.py            # write the page
python scripts/write_records_page.py --check    # exit 1 when the page is not what it should be
"""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "records.md"
SCHEMA = ROOT / "src" / "largebatch" / "records" / "schema.py"
MOMENTS = ROOT / "src" / "largebatch" / "noise" / "moments.py"
LOG = ROOT / "src" / "largebatch" / "records" / "moments_log.py"

HEAD = """# What a run writes to disk

Every file carries `schema_version` where it can outlive the program that wrote it (this page: version {version}).
Whole documents are written to a temporary name, fsynced and renamed; `.jsonl` files grow a line at a time, can be read
while they are written, and lose at most a torn last line to a kill. Wall times are in files of their own, so that two
studies with the same seed leave the same bytes everywhere else. A number that is not finite is `null`.

| file | what it holds |
|---|---|
| `study.json` | whose folder this is: task, seed, protocol, recipe, torch version; another study is refused |
| `cells/KEY/run.json` | one finished training run (`RunRecord` below); it exists only once the run has ended |
| `cells/KEY/steps.jsonl` | the moments of every step of a measured run (step record below) |
| `cells/KEY/evaluations.jsonl` | per evaluation `step`, `units`, `goal_loss`; per epoch the row of `RunRecord.epochs` |
| `cells/KEY/attempts.jsonl` | when a process began and ended this run: proof that nothing finished is trained twice |
| `cells/KEY/timing.json` | wall seconds of the run |
| `cells/KEY/checkpoints/step-N/` | only while the run is under way; the newest two, `MANIFEST` has checksums |
| `cells/KEY/skipped.json` | pictures that could not be read, with how often; only where there were any |
| `budget.json` | only with `--budget`: the units it was worth at the measured speed |
| `result.json` | the answer (`StudyResult` below) |
| `moments.jsonl` | the moments log of your own training loop (below); `largebatch report FILE` draws it |
| `report.html`, `figures/` | drawn from `result.json` alone; `largebatch report FOLDER` draws them again |

## The step record

One line of `steps.jsonl`: raw moments, from which ratios, smoothing and intervals are derived later, so that a report
can be made again without training.

| key | type | meaning |
|---|---|---|
| `step` | `int` | Optimizer steps taken, this one included. |
| `units` | `int` | Units seen, this step's included. |
| `lr` | `float` | Learning rate of this step. |
| `loss` | `float` | Mean training loss of the step's batch. |
"""

LOG_HEAD = """## The moments log

What `MomentsLog` writes beside a training loop of your own, by custom `moments.jsonl`. Its first line is the header:

| key | type | meaning |
|---|---|---|
"""
LOG_LINES = """
Each other line is one measured step. A training that goes on from a checkpoint drops the lines from its first step on;
one that starts over moves the old file aside.

| key | type | meaning |
|---|---|---|
| `step` | `int` | Number of the optimizer step, the first being 1. |
"""
LOG_TAIL = (
    "\n| `groups` | `dict[str, dict]` | Of each group of parameters: `trace_cov`, `grad_sq_norm`, `sq_norm_small`, "
    "`sq_norm_step`; {} without groups. |"
    "\n| `preconditioned` | `dict \\| None` | The same four in the optimizer's metric P; null without one, and before "
    "its first step. |"
)


def rows(path: Path, name: str) -> list[str]:
    """One table row per field of a dataclass, from the docstring under it."""
    tree = ast.parse(path.read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name).body
    found = []
    for field, text in itertools.pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if not is_text:
            raise SystemExit(f"{name}.{field.target.id} has no docstring")
        meaning = " ".join(str(text.value.value).split()).replace("|", r"\|")  # type: ignore[union-attr, attr-defined]
        kind = ast.unparse(field.annotation).replace("|", r"\|")
        found.append(f"| `{field.target.id}` | `{kind}` | {meaning} |")
    return found


def classes(path: Path) -> list[tuple[str, str]]:
    """(name, first line of the docstring) of every class."""
    tree = ast.parse(path.read_text())
    return [
        (node.name, (ast.get_docstring(node) or "").splitlines()[0])
        for node in tree.body if isinstance(node, ast.ClassDef)
    ]  # fmt: skip


def page() -> str:
    """The page's text."""
    version = next(
        line.split("=")[1].strip() for line in SCHEMA.read_text().splitlines() if line.startswith("SCHEMA_VERSION")
    )
    parts = [HEAD.format(version=version) + "\n".join(rows(MOMENTS, "StepMoments"))]
    step = "\n".join(rows(MOMENTS, "StepMoments"))
    parts.append(LOG_HEAD + "\n".join(rows(LOG, "MomentsHeader")) + "\n" + LOG_LINES + step + LOG_TAIL)
    for name, first_line in reversed(classes(SCHEMA)):
        heading = f"## {name}\n\n{first_line}\n\n| key | type | meaning |\n|---|---|---|\n"
        parts.append(heading + "\n".join(rows(SCHEMA, name)))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is out of date: python scripts/write_records_page.py")
    PAGE.write_text(page())
