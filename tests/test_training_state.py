"""What a training run leaves behind: checkpoints that are whole after any kill, metrics that go on where they were."""

import functools
import json
import logging
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tensorboardX.proto.event_pb2 import Event, SessionLog

from poss_jax.errors import InputError
from poss_jax.sharding import make_mesh
from train.checkpoint import Checkpoints
from train.metrics import MetricsLog

ROOT = Path(__file__).parent.parent

META = {
    "position": {"epoch": 2, "batch": 17, "fingerprint": "ab"},
    "spans": [2, 2],
    "huge": 2**200,
    "floats": [0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308],
    "nothing": None,
    "nested": [{"deep": [True, {"er": "ü"}]}],
}


@jax.jit  # one program compiles faster than many small ones
def training_state() -> dict:
    """Parameters of several dtypes, optimizer state in named tuples, a counter, and PRNG data."""
    parameters = {
        "layers": [{"kernel": jax.random.normal(jax.random.key(0), (16, 8)), "scale": jnp.ones(8, jnp.bfloat16) / 3}],
        "embedding": jax.random.normal(jax.random.key(1), (8, 4), jnp.bfloat16),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0, 10)))
    _, moments = optimizer.update(parameters, optimizer.init(parameters), parameters)
    return {
        "parameters": parameters,
        "optimizer": moments,
        "step": jnp.int32(7),
        "random": jax.random.key_data(jax.random.key(3)),
    }


def like(state, sharding=lambda leaf: leaf.sharding):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(leaf)), state)


def assert_same(state, expected):
    """Same tree, dtypes and bits."""
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


@pytest.fixture
def opened(tmp_path):
    """Opens Checkpoints of one directory, and closes them all in the end."""
    every = []

    def open_checkpoints(keep: int = 2) -> Checkpoints:
        every.append(Checkpoints(tmp_path / "checkpoints", keep=keep))
        return every[-1]

    yield open_checkpoints
    for checkpoints in every:
        checkpoints.close()


def steps_in(directory: Path) -> list[int]:
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())


def test_everything_comes_back_bit_for_bit(opened):
    """Named tuples of optax, all dtypes, and meta; from the same object and from a new one."""
    checkpoints, state = opened(), training_state()
    assert (checkpoints.latest, checkpoints.best) == (None, None)
    checkpoints.save(3, state, META)
    checkpoints.wait()
    for reader in (checkpoints, opened()):
        restored, meta = reader.restore(like(state))
        assert_same(restored, state)
        assert json.dumps(meta) == json.dumps(META)
        assert reader.latest == 3
    assert opened().meta() == opened().meta(3) == META


def test_numpy_numbers_in_meta_become_plain_ones(opened):
    checkpoints = opened()
    numbers = {"seconds": np.float32(0.1), "step": np.int64(5), "lengths": np.arange(2)}
    checkpoints.save(1, {"a": jnp.zeros(1)}, numbers)
    numbers["step"] = "changed after the save"
    assert checkpoints.meta() == {"seconds": float(np.float32(0.1)), "step": 5, "lengths": [0, 1]}


@pytest.mark.devices(8)
def test_restores_onto_another_mesh(opened):
    """Saved on data=2,tensor=4 (split and replicated), restored on tensor=2 along other axes, and on one device."""
    wide, narrow = make_mesh({"data": 2, "tensor": 4}), make_mesh({"tensor": 2})
    state = training_state()

    def place(mesh, parts, leaf):
        return NamedSharding(mesh, PartitionSpec(*parts) if leaf.ndim == 2 else PartitionSpec())

    saved = jax.device_put(state, jax.tree.map(functools.partial(place, wide, ("data", "tensor")), state))
    checkpoints = opened()
    checkpoints.save(1, saved, {})
    checkpoints.wait()
    one = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    for sharding in (functools.partial(place, narrow, (None, "tensor")), lambda leaf: one):
        wanted = like(state, sharding)
        restored, _ = opened().restore(wanted)
        assert_same(restored, state)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, wanted))


def test_training_may_go_on_in_the_same_buffers(opened):
    """A state that is donated right after the save is still saved as it was."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state):
        return jax.tree.map(lambda leaf: leaf + 1, state)

    checkpoints, state = opened(keep=5), {"w": jnp.zeros((512, 512)), "b": jnp.zeros(3)}
    for step in range(1, 4):
        state = train(state)
        checkpoints.save(step, state, {})
        for _ in range(5):
            state = train(state)
    for step in range(1, 4):
        restored, _ = checkpoints.restore(like(state), step)
        assert_same(restored, jax.tree.map(lambda leaf, at=step: jnp.full_like(leaf, 6 * at - 5), state))


def test_keeps_the_last_and_the_best(opened, tmp_path):
    """best.json always names the best, figures that are none do not count, and of equals the newest is best."""
    directory, state = tmp_path / "checkpoints", {"a": jnp.zeros(4)}
    marked = directory / "best.json"
    checkpoints = opened(keep=2)
    for step, figure, best, kept in (
        (1, None, None, [1]),
        (2, 0.25, 2, [1, 2]),
        (3, 0.1 + 0.2, 3, [2, 3]),
        (4, float("nan"), 3, [3, 4]),
        (5, float("inf"), 3, [3, 4, 5]),
        (6, 0.1, 3, [3, 5, 6]),
        (7, 0.1 + 0.2, 7, [6, 7]),
        (8, None, 7, [7, 8]),
        (9, None, 7, [7, 8, 9]),
        (10, None, 7, [7, 9, 10]),
    ):
        checkpoints.save(step, state, {}, figure=figure)
        checkpoints.wait()
        assert (checkpoints.latest, checkpoints.best, steps_in(directory)) == (step, best, kept)
        assert marked.exists() == (best is not None)
        if step == 3:
            assert json.loads(marked.read_text()) == {"step": 3, "figure": 0.1 + 0.2}
    marked.unlink()  # as after a kill just before it was written
    assert (opened().latest, opened().best, json.loads(marked.read_text())["step"]) == (10, 7, 7)
    checkpoints = opened(keep=1)
    checkpoints.save(11, state, {}, figure=1)
    checkpoints.wait()
    assert steps_in(directory) == [11]


def test_saving_a_step_again_is_harmless(opened):
    """A step counts once it is whole; after a restore its step is there already; older steps are refused."""
    checkpoints, state = opened(), {"a": jnp.arange(4)}
    checkpoints.save(5, state, {"first": True}, figure=1.0)
    checkpoints.save(5, state, {"first": False})
    checkpoints.wait()
    checkpoints.save(5, state, {"first": False})
    assert (checkpoints.meta(), checkpoints.latest, checkpoints.best) == ({"first": True}, 5, 5)
    resumed = opened()
    resumed.restore(like(state))
    resumed.save(5, state, {"first": False})
    assert resumed.meta() == {"first": True}
    for step in (4, 5):
        with pytest.raises(InputError, match=f"holds step 5 already, so step {step} .*--out"):
            opened().save(step, state, {})


def test_what_does_not_fit_is_named(opened):
    checkpoints, state = opened(), training_state()
    with pytest.raises(InputError, match="holds no checkpoint"):
        checkpoints.restore(like(state))
    checkpoints.save(1, state, {})
    with pytest.raises(InputError, match="holds no step 2; there are 1"):
        checkpoints.restore(like(state), 2)
    with pytest.raises(InputError, match="holds no step 2"):
        checkpoints.meta(2)
    wanted = like(state)
    for change, message in (
        ({"step": jax.ShapeDtypeStruct((), jnp.uint32)}, r"step is int32\[\], but uint32\[\] is needed; resume with"),
        ({"random": jax.ShapeDtypeStruct((3,), jnp.uint32)}, r"random is uint32\[2\], but uint32\[3\] is needed"),
        ({"zeal": jax.ShapeDtypeStruct((3,), jnp.uint32)}, "has no zeal"),
        ({"parameters": {"layers": []}}, "step 1: has parameters/embedding, which is not needed"),
        ({"optimizer": optax.sgd(1).init({})}, "has optimizer/1/0/count, which is not needed"),
    ):
        with pytest.raises(InputError, match=message):
            checkpoints.restore(wanted | change)
    layers = [{"kernel": jax.ShapeDtypeStruct((8, 16), jnp.float32), "scale": wanted["step"]}]
    with pytest.raises(InputError, match=r"parameters/layers/0/kernel is float32\[16, 8\], but float32\[8, 16\]"):
        checkpoints.restore(wanted | {"parameters": wanted["parameters"] | {"layers": layers}})
    with pytest.raises(ValueError, match="same name"):
        checkpoints.save(2, {"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)}, {})


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/run: cannot open it: .*--out"):
        Checkpoints(tmp_path / "file" / "run", keep=1)
    with pytest.raises(InputError, match="--keep 0"):
        Checkpoints(tmp_path / "run", keep=0)
    with pytest.raises(InputError, match=r"file/run.*--out"):
        MetricsLog(tmp_path / "file" / "run")


def test_only_orbax_is_silenced(opened, caplog):
    """It logs through absl, whose settings belong to whoever uses the library."""
    absl = logging.getLogger("absl")
    before = (absl.level, absl.disabled, absl.propagate)
    checkpoints = opened()
    checkpoints.save(1, {"a": jnp.zeros(1)}, {})
    checkpoints.wait()
    absl.warning("of somebody else")
    assert (absl.level, absl.disabled, absl.propagate) == before
    assert [record.getMessage() for record in caplog.records if record.name == "absl"] == ["of somebody else"]


@pytest.fixture
def small_files():
    """Makes writes fail like on a full disk: `small_files(True)` limits the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(on: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]) if on else before)

    yield limit
    limit(False)


@pytest.mark.parametrize("way", ["wait", "save", "close"])
def test_failures_in_the_background_surface(opened, small_files, way, capfd):
    """The next call names the directory; what was whole stays so, and nothing is said on the side."""
    checkpoints = opened(keep=1)
    state = {"w": jax.random.normal(jax.random.key(0), (256, 256))}
    checkpoints.save(1, state, {}, figure=1.0)
    checkpoints.wait()
    small_files(True)
    checkpoints.save(2, state, {}, figure=2.0)
    action = {"wait": checkpoints.wait, "save": lambda: checkpoints.save(3, state, {}), "close": checkpoints.close}[way]
    with pytest.raises(InputError, match=r"checkpoints: cannot save: .*; it must be a writable directory with room"):
        action()
    small_files(False)
    assert (checkpoints.latest, checkpoints.best) == (1, 1)
    assert capfd.readouterr() == ("", "")
    again = opened(keep=1)
    assert (again.latest, again.best) == (1, 1)
    assert_same(again.restore(like(state))[0], state)
    again.save(2, state, {}, figure=2.0)
    again.wait()
    assert (again.latest, again.best, steps_in(again.directory)) == (2, 2, [2])


def filled(step: int) -> dict:
    """A state of 3 MB that says of which step it is."""
    return {f"leaf{index}": jnp.full((96, 1024), step, jnp.float32) for index in range(8)}


# Saves one step after the other, from the latest on, and says where it starts.
SAVES = """
import sys
from pathlib import Path
import jax.numpy as jnp
from train.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
step = 0 if checkpoints.latest is None else checkpoints.meta()["step"]
print(step, flush=True)
while True:
    step += 1
    filled = {f"leaf{index}": jnp.full((96, 1024), step, jnp.float32) for index in range(8)}
    checkpoints.save(step, filled, {"step": step}, figure=-abs(step % 7 - 3))
"""


@pytest.mark.slow
def test_kills_leave_whole_steps(tmp_path):
    """Killed at random moments of its saves, a run goes on from its newest whole step, and leftovers go away."""
    directory, chance, latest = tmp_path / "run", random.Random(0), 0
    for _ in range(4):
        started, said = killed_while_saving(directory, chance)
        assert (started, said) == (latest, "")
        checkpoints = Checkpoints(directory, keep=2)
        try:
            assert checkpoints.latest is None or checkpoints.latest >= started
            assert_whole(checkpoints)
            latest = checkpoints.latest
        finally:
            checkpoints.close()
    assert latest >= 2 * 4  # each time the run has saved a step, and the test another one


def killed_while_saving(directory: Path, chance: random.Random) -> tuple[int, str]:
    """The step that a run went on from, and what it said on stderr until it was killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES, str(directory)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started = int(process.stdout.readline() or -1)
    while process.poll() is None and not any(step > started for step in steps_in(directory)):
        time.sleep(0.001)  # a busy machine has not saved anything after a while that is long on another one
    time.sleep(chance.uniform(0.0, 0.6))
    while process.poll() is None and not list(directory.glob("*tmp*")):
        time.sleep(0.001)
    time.sleep(chance.uniform(0.0, 0.06))
    process.kill()
    said = process.communicate()[1]
    assert started >= 0, said
    return started, said


def assert_whole(checkpoints: Checkpoints):
    """Every step that is there is what was saved, and the step that was cut off can be saved now."""
    directory = checkpoints.directory
    for step in steps_in(directory):
        restored, meta = checkpoints.restore(like(filled(0)), step)
        assert meta == {"step": step}
        assert_same(restored, filled(step))
    step = (checkpoints.latest or 0) + 1
    checkpoints.save(step, filled(step), {"step": step}, figure=-10.0)
    checkpoints.wait()
    assert checkpoints.latest == step
    assert {entry.name for entry in directory.iterdir()} == {"best.json", *map(str, steps_in(directory))}
    assert json.loads((directory / "best.json").read_text())["step"] == checkpoints.best


VALUES = {1: 2.5, 2: 0.1 + 0.2, 3: 1e-300, 4: 3.0, 5: 0.25}


def write_steps(log: MetricsLog, steps) -> None:
    for step in steps:
        log.write(step, {"loss": VALUES[step], "tokens": 10**15 + step, "accuracy": [VALUES[step] / 2, float("nan")]})


def test_metrics_lines_are_strict_json(tmp_path):
    """Numbers of numpy and JAX too; what is not finite is null; readers see each line as it is written."""
    log = MetricsLog(tmp_path)
    log.write(1, {"loss": np.float32(0.1), "rate": jnp.float32(0.5), "count": np.int64(3), "each": jnp.arange(2)})
    log.write(np.int32(2), {"loss": float("inf"), "each": [float("nan"), 1.0, np.float64("-inf")], "none": None})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    read = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert read == [
        {"step": 1, "loss": float(np.float32(0.1)), "rate": 0.5, "count": 3, "each": [0, 1]},
        {"step": 2, "loss": None, "each": [None, 1.0, None], "none": None},
    ]
    log.close()


def test_metrics_of_another_run_are_not_mixed(tmp_path):
    log = MetricsLog(tmp_path)
    write_steps(log, [1])
    log.close()
    with pytest.raises(InputError, match=r"metrics.jsonl: holds .*--resume.*--out"):
        MetricsLog(tmp_path)
    other = MetricsLog(tmp_path, filename="evaluation.jsonl", tensorboard=False)
    write_steps(other, [1])
    other.close()
    assert (tmp_path / "evaluation.jsonl").read_text() == (tmp_path / "metrics.jsonl").read_text()
    assert [entry.name for entry in (tmp_path / "tensorboard").iterdir()] == ["metrics"]


@pytest.mark.parametrize("cut", [0, 1, 2, 10, 200])
@pytest.mark.parametrize("resume_step", [0, 3, 5])
def test_resumed_metrics_equal_uninterrupted_ones(tmp_path, cut, resume_step):
    """Whatever was written beyond the checkpoint, and wherever the kill cut it."""
    for name in ("whole", "killed"):
        log = MetricsLog(tmp_path / name, tensorboard=False)
        write_steps(log, range(1, 6))
        log.close()
    whole, killed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "killed"))
    content = whole.read_bytes()
    end = len(b"".join(content.splitlines(keepends=True)[:resume_step]))
    # Lines up to the checkpoint are in the file, except perhaps the end of the last one.
    killed.write_bytes(content[: max(len(content) - cut, end - 1 if cut else end)])
    log = MetricsLog(tmp_path / "killed", resume_step=resume_step, tensorboard=False)
    write_steps(log, range(resume_step + 1, 6))
    log.close()
    assert killed.read_bytes() == content


def test_metrics_with_a_foreign_line_are_not_touched(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics.jsonl: line 2"):
        MetricsLog(tmp_path, resume_step=2)
    assert len(path.read_text().splitlines()) == 3
    path.unlink()
    MetricsLog(tmp_path, resume_step=2, tensorboard=False).close()  # none to cut off
    assert path.read_text() == ""


def events_in(directory: Path) -> list[Event]:
    """Events of all TensorBoard files, in the order in which TensorBoard reads them."""
    found = []
    for path in sorted(directory.glob("*tfevents*")):
        data, start = path.read_bytes(), 0
        while start < len(data):
            length = int.from_bytes(data[start : start + 8], "little")
            found.append(Event.FromString(data[start + 12 : start + 12 + length]))
            start += 16 + length
    return found


def test_tensorboard_has_tags_and_forgets_what_is_written_again(tmp_path):
    log = MetricsLog(tmp_path)
    write_steps(log, [1, 2, 3])
    log.flush()
    first = events_in(tmp_path / "tensorboard" / "metrics")  # readable while the run goes on
    assert [event.step for event in first if event.HasField("summary")] == [1, 2, 3]
    values = {value.tag: value.simple_value for value in first[-1].summary.value}
    assert list(values) == ["loss", "tokens", "accuracy/0", "accuracy/1"]
    assert values["accuracy/0"] == np.float32(VALUES[3] / 2)
    assert np.isnan(values["accuracy/1"])
    log.close()
    log = MetricsLog(tmp_path, resume_step=2)
    write_steps(log, [3])
    log.close()
    added = events_in(tmp_path / "tensorboard" / "metrics")[len(first) :]
    assert added[0].file_version == "brain.Event:2"
    assert (added[1].session_log.status, added[1].step) == (SessionLog.START, 3)
    assert [event.step for event in added[2:]] == [3]


def test_metrics_on_a_full_disk(tmp_path, small_files):
    log = MetricsLog(tmp_path, tensorboard=False)
    small_files(True)
    with pytest.raises(InputError, match=r"metrics.jsonl: cannot be written: .*--out"):
        log.write(1, {"each": [0.1 + 0.2] * 10_000})
    small_files(False)
    log.close()
