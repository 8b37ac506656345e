"""train.run in processes of its own: ended by signals, killed while it saves, and as one run on several hosts."""

import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from tests.training import (
    assert_close,
    assert_same_run,
    exported,
    lines,
    losses,
    saved,
    shared_programs,
    start,
    steps_in,
    train,
    write_inputs,
)
from train.loop import StopRequest
from train.schedule import RunLength, Schedule
from train.step import OptimizerConfig

PATIENCE = 240  # seconds
KILLED = ("--steps", "12", "--learning-rate", "0.01", "--save-every", "1", "--held-out", "8", "--evaluate-every", "4")
SHARDED = ("--batch-size", "8", "--mesh", "data=2,fsdp=2,tensor=2", "--spans", "1", "--held-out", "8")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hosts")
    with shared_programs(root / "programs"):
        yield write_inputs(root)


@pytest.fixture(scope="module")
def whole(root):
    """What the interrupted runs are to come to."""
    assert train(root, root / "whole", *KILLED) == 0
    return root / "whole"


def wait_for(process: subprocess.Popen, found) -> None:
    """Returns once found() is true."""
    began = time.monotonic()
    while not found():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - began < PATIENCE
        time.sleep(0.001)


def logged(out: Path) -> int:
    """Number of lines in the log."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_sigterm_ends_a_run_that_can_go_on(root, whole, tmp_path):
    process = start(root, tmp_path, *KILLED)
    wait_for(process, lambda: logged(tmp_path) >= 2)
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "stopped by SIGTERM; the same command with --resume goes on" in errors
    assert "drafter with spans 1,1" in said
    stopped = logged(tmp_path)
    assert 2 <= stopped < 12
    assert steps_in(tmp_path)[-1] == stopped
    assert train(root, tmp_path, *KILLED, "--resume") == 0
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_kills_at_any_moment_change_nothing(root, whole, tmp_path):
    """Killed while a checkpoint is being written, a little later, and before the first update."""
    chance = random.Random(0)
    for least, saving in ((0, False), (2, True), (5, True)):
        process = start(root, tmp_path, *KILLED, "--resume")
        wait_for(process, lambda least=least: logged(tmp_path) > least or (least == 0 and tmp_path.exists()))
        if saving:
            wait_for(process, lambda: list(tmp_path.glob("checkpoints/*tmp*")))
        time.sleep(chance.uniform(0, 0.03))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert logged(tmp_path) < 12
    assert train(root, tmp_path, *KILLED, "--resume") == 0
    assert_same_run(tmp_path, whole)


def start_two(root: Path, out: Path, *more) -> list[subprocess.Popen]:
    """The same command in two processes of four devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    hosts = ("--coordinator", f"localhost:{port}", "--processes", "2", "--process-id")
    return [start(root, out, *more, *hosts, number, devices=4) for number in range(2)]


def end(processes: list[subprocess.Popen]) -> list[tuple[str, str]]:
    """What each said, once all have ended well."""
    try:
        said = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    return said


@pytest.mark.slow
@pytest.mark.devices(8)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the hosts' devices are virtual, which only CPUs can be")
def test_two_hosts_are_one_with_twice_the_devices(root, tmp_path, monkeypatch):
    """Stopped by a SIGTERM to one of them, resumed, and resumed on one host; each time against one that was alone."""
    one, two = tmp_path / "one", tmp_path / "two"
    processes = start_two(root, two, *SHARDED, "--steps", "1000")
    wait_for(processes[0], lambda: logged(two) >= 3)
    processes[1].send_signal(signal.SIGTERM)
    said = end(processes)
    assert "stopped by SIGTERM" in said[0][1]
    assert "drafter with spans 1, for" in said[0][0]
    assert "drafter with spans" not in said[1][0]  # gloo has its say there
    stopped = logged(two)
    assert 3 <= stopped < 1000
    assert steps_in(two) == [stopped]
    monkeypatch.setattr(StopRequest, "at", lambda _, step: step == stopped)
    assert train(root, one, *SHARDED, "--steps", "1000") == 0
    monkeypatch.undo()
    assert_alike(one, two)

    more = ("--steps", stopped + 3, "--resume")
    assert train(root, one, *SHARDED, *more) == 0
    said = end(start_two(root, two, *SHARDED, *more))
    assert "held-out loss" in said[0][1]
    assert [line["step"] for line in lines(two)] == list(range(1, stopped + 4))
    assert_alike(one, two)
    assert_close(exported(two, "best"), exported(one, "best"), rtol=1e-4, atol=1e-6)
    for (name, figure), other in zip(*(lines(out, "evaluations.jsonl")[0].items() for out in (one, two)), strict=True):
        np.testing.assert_allclose(other[1], figure, rtol=1e-4, err_msg=name)

    for out in (one, two):
        assert train(root, out, *SHARDED, "--steps", stopped + 4, "--resume") == 0
    assert_alike(one, two)


def assert_alike(one: Path, two: Path) -> None:
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5)
    assert [line["learning_rate"] for line in lines(two)] == [line["learning_rate"] for line in lines(one)]
    assert_close(saved(two)[0], saved(one)[0], rtol=1e-4, atol=1e-6)
    assert_close(exported(two), exported(one), rtol=1e-4, atol=1e-6)


def test_hosts_go_by_the_clock_of_the_first(monkeypatch):
    """Else they would take different numbers of updates, and wait for each other."""
    asked = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "broadcast_one_to_all", lambda used: asked.append(used) or np.array([90.0, 60.0])
    )
    schedule = Schedule(RunLength(minutes=2), None, OptimizerConfig(1.0, warmup=0.1), time.monotonic())
    assert schedule.used == (90, 60)
    assert schedule.seconds_left == 30
    np.testing.assert_allclose(schedule.rate(1), (90 - 60) / (90 - 9), rtol=1e-2)
    assert len(asked) == 1
    schedule.tick()
    assert not schedule.done(10**6)
    assert len(asked) == 2
    counted = Schedule(RunLength(steps=3), 3, OptimizerConfig(), time.monotonic())
    assert counted.done(3)
    assert len(asked) == 2
