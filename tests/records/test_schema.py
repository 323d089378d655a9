"""The layout on disk is frozen, documented key by key, and read back as it was written."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from largebatch.noise.moments import StepMoments
from largebatch.records import schema
from largebatch.records.files import plain
from largebatch.records.moments_log import MomentsHeader
from largebatch.records.schema import SCHEMA_VERSION, RunRecord, RunSpec

ROOT = Path(__file__).resolve().parents[2]


def layout():
    """Class -> its keys, of everything that reaches the disk."""
    classes = [value for value in vars(schema).values() if dataclasses.is_dataclass(value)] + [
        StepMoments,
        MomentsHeader,
    ]
    return {"schema_version": SCHEMA_VERSION} | {
        cls.__name__: [field.name for field in dataclasses.fields(cls)] for cls in classes
    }


def test_the_layout_is_what_the_golden_file_says():
    golden = json.loads((ROOT / "tests" / "golden" / "records.json").read_text())
    assert layout() == golden, "a key changed: raise SCHEMA_VERSION, then change tests/golden/records.json with it"


def test_the_page_names_every_key():
    check = subprocess.run([sys.executable, ROOT / "scripts" / "write_records_page.py", "--check"], capture_output=True)
    assert check.returncode == 0, check.stderr.decode()


def test_a_run_record_comes_back_as_it_was():
    spec = RunSpec(task="t", role="seed", batch=8, lr=0.1, seed=1, max_steps=9, goals=(2.0, 1.0), stop_after=(5.0, 9.0))
    record = RunRecord(
        spec=spec, status="stopped", steps=9, units=72, crossings=(4.5, None), epochs=({"epoch": 1.0, "error": 0.5},)
    )
    assert RunRecord.from_json(json.loads(json.dumps(plain(dataclasses.asdict(record))))) == record


def test_two_specs_never_share_a_folder():
    spec = RunSpec(task="t", role="seed", batch=8, lr=0.1, seed=1, max_steps=9)
    others = [
        dataclasses.replace(spec, **change)
        for change in ({"task": "u"}, {"role": "x"}, {"batch": 9}, {"microbatch": 4}, {"lr": 0.1000001},
                       {"schedule": "goyal"}, {"seed": 2}, {"max_steps": 10}, {"goals": (1.0,)}, {"stop_after": (1.0,)},
                       {"trace_loss": True}, {"monitor": True}, {"evaluate_epochs": True})
    ]  # fmt: skip
    assert len(others) == len(dataclasses.fields(spec)), "a new field must tell folders apart too"
    assert len({spec.key, *(other.key for other in others)}) == len(others) + 1
