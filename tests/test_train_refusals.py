"""What train.run refuses at once: one line that names the flag, and nothing written."""

import jax
import pytest

from tests.training import error_of, train, write_inputs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("refusals"))


SECOND = ("--processes", "2", "--process-id", "1")
REFUSED = [
    (("--steps", "3", "--epochs", "1"), "--steps, --epochs or --minutes"),
    (("--steps", "0"), "--steps 0: must be above 0"),
    (("--minutes", "nan"), "--minutes nan: must be above 0"),
    (("--mesh", "data=4096"), f"needs 4096 devices; this machine has {jax.device_count()}"),
    (("--mesh", "rows=2"), "mesh axis 'rows' is not known here; write data=N,fsdp=N,tensor=N"),
    (("--spans", "2,0"), "spans"),
    (("--spans", "two"), "spans"),
    (("--step-weights", "1,1,1"), "3 step weights were given for 2 steps"),
    (("--step-weights", "1,high"), "--step-weights '1,high': must be numbers"),
    (("--attention", "cudnn"), "--attention cudnn needs an NVIDIA GPU"),
    (("--held-out", "100"), "--held-out 100: there are 100 examples in all; hold out fewer"),
    (("--held-out", "-1"), "--held-out -1: must not be negative"),
    (("--data", "nowhere.json"), "nowhere.json"),
    (("--target", "./nowhere"), "nowhere"),
    (("--max-length", "2"), "--max-length 2"),
    (("--learning-rate", "0"), "--learning-rate 0.0: must be above 0"),
    (("--warmup", "1.5"), "--warmup 1.5: must be a share"),
    (("--clip-at", "-1"), "--clip-at -1.0: must be above 0"),
    (("--beta2", "1"), "--beta1 and --beta2 must be"),
    (("--noise", "-1"), "--noise -1.0: must be at least 0"),
    (("--top-k", "0"), "top-K"),
    (("--accumulate", "0"), "--accumulate 0: must be at least 1"),
    (("--save-every", "0"), "--save-every 0: must be at least 1"),
    (("--keep", "0"), "--keep 0: must be at least 1"),
    (("--seed", "-1"), "--seed -1: must be from 0"),
    (("--no-fc-bias", "--init-from", "x"), "--no-fc-bias: is for drafters that start from nothing"),
    (("--processes", "2"), "--processes and --process-id need --coordinator"),
    (("--coordinator", "localhost:1"), "--coordinator needs --processes and --process-id"),
    (("--coordinator", "nonsense", *SECOND), "--coordinator nonsense: must be HOST:PORT"),
    (("--coordinator", ":1234", *SECOND), "--coordinator :1234: must be HOST:PORT"),
    (("--coordinator", "host:0", *SECOND), "--coordinator host:0: must be HOST:PORT"),
    (("--coordinator", "host:70000", *SECOND), "--coordinator host:70000: must be HOST:PORT"),
    (("--coordinator", "host:1", "--processes", "0", "--process-id", "0"), "--processes 0: must be at least 1"),
    (("--coordinator", "host:1", "--processes", "2", "--process-id", "5"), "--process-id 5: must be from 0 to 1"),
    (("--coordinator", "host:1", "--processes", "2", "--process-id", "-1"), "--process-id -1: must be from 0 to 1"),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_bad_input_is_refused_in_one_line(root, tmp_path, capsys, flags, said):
    assert train(root, tmp_path / "out", *flags) == 2
    assert said in error_of(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.devices(4)
def test_a_batch_that_the_mesh_does_not_divide_is_refused_too(root, tmp_path, capsys):
    flags = ("--batch-size", "6", "--mesh", "data=2,fsdp=2")
    test_bad_input_is_refused_in_one_line(root, tmp_path, capsys, flags, "--batch-size 6: must be a multiple of 4")


def test_auto_off_a_cluster_is_refused_too(root, tmp_path, capsys, monkeypatch):
    def initialize():
        raise ValueError("coordinator_address should be defined.")  # as JAX says it

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    flags = ("--coordinator", "auto")
    said = "--coordinator auto: this is no TPU pod or Slurm job (coordinator_address should be defined.)"
    test_bad_input_is_refused_in_one_line(root, tmp_path, capsys, flags, said)
