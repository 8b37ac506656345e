"""train.run in processes of its own: ended by signals, killed while it saves, and as one run on several hosts."""

import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.training import (
    assert_close,
    assert_same_run,
    exported,
    lines,
    losses,
    quick_programs,
    saved,
    start,
    steps_in,
    train,
    write_inputs,
)

PATIENCE = 240  # seconds
KILLED = ("--steps", "12", "--learning-rate", "0.01", "--save-every", "1", "--held-out", "8", "--evaluate-every", "4")
SHARDED = ("--batch-size", "8", "--mesh", "data=2,fsdp=2,tensor=2", "--learning-rate", "0.001", "--held-out", "8")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hosts")
    with quick_programs(root / "programs"):
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
def test_two_hosts_are_one_with_twice_the_devices(root, tmp_path):
    """Trained on for a while, resumed, and resumed on one host."""
    for steps, *resume in ((3,), (5, "--resume")):
        assert train(root, tmp_path / "one", *SHARDED, "--steps", steps, *resume) == 0
        said = end(start_two(root, tmp_path / "two", *SHARDED, "--steps", steps, *resume))
        assert "drafter with spans 1,1" in said[0][0]
        assert "held-out loss" in said[0][1]
        assert "drafter with spans" not in said[1][0]  # gloo has its say there
        assert [line["step"] for line in lines(tmp_path / "two")] == list(range(1, steps + 1))
        np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)
        evaluations = [lines(tmp_path / out, "evaluations.jsonl") for out in ("one", "two")]
        for one, two in zip(*evaluations, strict=True):
            assert_close(one, two, rtol=1e-4)
        for name in ("drafter", "best"):
            assert_close(exported(tmp_path / "two", name), exported(tmp_path / "one", name), rtol=1e-4, atol=1e-6)
        assert_close(saved(tmp_path / "two")[0], saved(tmp_path / "one")[0], rtol=1e-4, atol=1e-6)
    assert steps_in(tmp_path / "two") == [3, 5]
    for out in ("one", "two"):
        assert train(root, tmp_path / out, *SHARDED, "--steps", "6", "--resume") == 0
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)


@pytest.mark.slow
def test_sigterm_and_the_clock_end_both_hosts_at_one_update(root, tmp_path):
    flags, out = (*SHARDED, "--save-every", "100000", "--evaluate-every", "100000"), tmp_path / "signal"
    began = time.monotonic()
    processes = start_two(root, out, *flags, "--steps", "100000")
    wait_for(processes[0], lambda: logged(out) >= 3)
    starting = time.monotonic() - began
    processes[1].send_signal(signal.SIGTERM)
    said = end(processes)
    assert "stopped by SIGTERM" in said[0][1]
    assert steps_in(out) == [logged(out)]

    out = tmp_path / "clock"
    end(start_two(root, out, *flags, "--minutes", (starting + 5) / 60))
    assert steps_in(out) == [logged(out)]
    rates = [line["learning_rate"] for line in lines(out)]
    assert rates[-1] < max(rates) / 2
