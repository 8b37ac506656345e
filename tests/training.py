"""Runs of train.run on a tiny target, in this process or in others, and what they leave."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file

from tests import fixtures
from train import run
from train.checkpoint import Checkpoints

ROOT = Path(__file__).parent.parent


def conversation(number: int) -> dict:
    """17, 26, 21 or 32 tokens."""
    words = " ".join(f"w{(number * 7 + place) % 40}" for place in range((5, 14, 9, 20)[number % 4]))
    return {"conversations": [{"from": "human", "value": f"w{number % 50}"}, {"from": "gpt", "value": words}]}


def write_inputs(root: Path) -> Path:
    """A target with a tokenizer, and a hundred conversations."""
    fixtures.tiny(root / "target", num_hidden_layers=1)
    fixtures.tok(root / "target")
    (root / "data.json").write_text(json.dumps([conversation(number) for number in range(100)]))
    return root


@contextlib.contextmanager
def shared_programs(directory: Path):
    """Programs are compiled once for all runs, those in other processes included."""
    wanted = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def arguments(root: Path, out: Path, *more) -> list[str]:
    """Flags of a short run, in float32 on GPUs too; those in `more` count where they are given again."""
    given = ["--target", root / "target", "--data", root / "data.json", "--out", out, "--max-length", "48"]
    given += ["--spans", "1,1", "--mesh", "data=1", "--batch-size", "4", "--held-out", "0", "--no-tensorboard"]
    given += ["--dtype", "float32"]
    return [*map(str, given), *map(str, more)]


def train(root: Path, out: Path, *more) -> int:
    """Runs the command here."""
    return run.main(arguments(root, out, *more))


def start(root: Path, out: Path, *more, devices: int | None = None) -> subprocess.Popen:
    """Runs the command in a process of its own, which finds the programs that were compiled here. It has this process's
    devices, or that many virtual CPU devices.
    """
    virtual = [] if devices is None else [f"--xla_force_host_platform_device_count={devices}"]
    wanted = {
        "XLA_FLAGS": " ".join([os.environ["XLA_FLAGS"], *virtual]),  # the last counts
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "train.run", *arguments(root, out, *more)],
        cwd=ROOT,
        env=os.environ | wanted,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(out: Path, filename: str = "metrics.jsonl") -> list[dict]:
    """A log without the figure that is of the clock."""
    read = [json.loads(line) for line in (out / filename).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in read]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines(out)]


def steps_in(out: Path) -> list[int]:
    """Steps that have a checkpoint."""
    return sorted(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdecimal())


def saved(out: Path, step: int | None = None) -> tuple[dict[str, np.ndarray], dict]:
    """State, by names of its parts, and meta of a checkpoint, the newest if no step is given."""
    checkpoints = Checkpoints(out / "checkpoints", keep=1000)
    try:
        step = checkpoints.latest if step is None else step
        layout = json.loads((out / "checkpoints" / str(step) / "training" / "metadata").read_text())["layout"]
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, (shape, dtype) in layout.items()}
        state, meta = checkpoints.restore(like, step)
        return jax.device_get(state), meta
    finally:
        checkpoints.close()


def exported(out: Path, name: str = "drafter") -> dict[str, np.ndarray]:
    return load_file(out / name / "model.safetensors")


def files(directory: Path) -> dict[str, bytes]:
    """All files below a directory, by relative path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs came to the same to the last bit."""
    assert lines(one) == lines(other)
    (state, meta), (other_state, other_meta) = saved(one), saved(other)
    assert state.keys() == other_state.keys()
    for name, array in state.items():
        assert array.tobytes() == other_state[name].tobytes(), name
    assert meta | {"seconds": None} == other_meta | {"seconds": None}
    assert files(one / "drafter") == files(other / "drafter")
    assert lines(one, "evaluations.jsonl") == lines(other, "evaluations.jsonl")
    assert files(one / "best") == files(other / "best")


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray], **tolerance) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], err_msg=name, **tolerance)


def error_of(capsys) -> str:
    """The last line on stderr, which is to be an error."""
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert last.startswith("error: "), last
    return last
