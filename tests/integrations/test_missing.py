"""What does a user read whose loop's package is not installed?"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from largebatch.errors import MissingExtraError


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("lightning", "lightning", "lightning"),
        ("transformers", "transformers", "hf"),
        ("transformers_callback", "transformers", "hf"),
        ("accelerate", "accelerate", "hf"),
    ],
)
def test_a_missing_package_is_one_sentence_with_the_install_line(module, package, extra, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"largebatch.integrations.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to say that it cannot be imported
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else find_spec(name, *rest)
    )
    with pytest.raises(MissingExtraError, match=rf"needs the package '{package}'.*pip install 'largebatch\[{extra}\]'"):
        importlib.import_module(f"largebatch.integrations.{module}")


def test_importing_the_room_imports_none_of_the_loops():
    code = "import largebatch.integrations, sys; print({'lightning', 'transformers', 'accelerate'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
