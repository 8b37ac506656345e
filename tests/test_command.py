"""What all commands share."""

import argparse

import jax.numpy as jnp
import pytest

from convert.command import exit_status
from poss_jax.errors import InputError


def status_of(run, **options) -> int:
    return exit_status(lambda options: run(), argparse.Namespace(**options))


def raise_(error: Exception):
    raise error


@pytest.mark.parametrize(
    ("options", "remedy"), [({"batch_size": 2}, "; give a smaller --batch-size\n"), ({"batch_size": 1}, ""), ({}, "")]
)
def test_memory_that_a_device_lacks_is_one_line(capsys, options, remedy):
    assert status_of(lambda: jnp.zeros(10**15).block_until_ready(), **options) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: the device's memory is too small: RESOURCE_EXHAUSTED: Out of memory")
    assert line.count("\n") == 1
    assert line.endswith(remedy)
    assert ("--batch-size" in line) == bool(remedy)


def test_bad_input_is_one_line(capsys):
    assert status_of(lambda: raise_(InputError("draft: no such\n  directory"))) == 2
    assert capsys.readouterr().err == "error: draft: no such directory\n"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("INTERNAL: no kernel"), RuntimeError("RESOURCE_EXHAUSTED: Shared memory"), ValueError("ours")],
)
def test_faults_of_ours_keep_their_traceback(error):
    with pytest.raises(type(error), match=str(error)):
        status_of(lambda: raise_(error))


def test_an_interrupt_has_its_own_status():
    assert status_of(lambda: raise_(KeyboardInterrupt())) == 130
