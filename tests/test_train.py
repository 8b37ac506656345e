"""train.run in this process: what is trained, for how long, how runs go on, what they leave and what they refuse."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert import to_hf
from tests import fixtures
from tests.overfit import replace_tensors
from tests.training import (
    arguments,
    assert_close,
    assert_same_run,
    conversation,
    error_of,
    exported,
    files,
    lines,
    losses,
    saved,
    shared_programs,
    steps_in,
    train,
    write_inputs,
)
from train import STARTED, features, run
from train.checkpoint import Checkpoints
from train.feed import Feed
from train.loop import StopRequest

LENGTHS = (17, 26, 21, 32)  # tokens of conversation 0, 1, 2, 3, and of 4, 5, ... again
ACCUMULATED = ("--accumulate", "2", "--noise", "0", "--held-out", "10", "--learning-rate", "0.01", "--steps", "8")
ACCUMULATED += ("--save-every", "2", "--evaluate-every", "3", "--seed", "5")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    with shared_programs(root / "programs"):
        yield write_inputs(root)


@pytest.fixture(scope="module")
def whole(root):
    """A run of packed rows, two batches an update, with evaluations; nothing interrupted it."""
    assert train(root, root / "whole", *ACCUMULATED) == 0
    return root / "whole"


class Interruption(Exception):  # noqa: N818 - no error
    """Ends a run in the middle, as a kill does."""


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(30): the next run gets SIGTERM after update 30. stop_at(30, crash=True): it ends there at once."""
    ask = StopRequest.at

    def stop_at(last: int, *, crash: bool = False) -> None:
        def at(request, step):
            if step == last and crash:
                raise Interruption
            if step == last:
                signal.raise_signal(signal.SIGTERM)
            return ask(request, step)

        monkeypatch.setattr(StopRequest, "at", at)

    return stop_at


@pytest.fixture
def batches(monkeypatch):
    """The names of the batches that runs have trained on so far."""
    met, take = [], Feed.__next__

    def noting(feed):
        fed = take(feed)
        met.append(fed.names)
        return fed

    monkeypatch.setattr(Feed, "__next__", noting)
    return met


@pytest.mark.slow
def test_two_epochs_without_packing(root, tmp_path, stop_at, batches, capsys):
    """G13: 100 samples, 4 a batch, 2 epochs; the learning rate goes on where a stopped run was."""
    flags = ("--packing", "none", "--epochs", "2", "--learning-rate", "0.0049", "--save-every", "2", "--keep", "100")
    stop_at(-1)
    assert train(root, tmp_path / "whole", *flags) == 0
    steps = lines(tmp_path / "whole")
    assert [step["step"] for step in steps] == list(range(1, 51))
    # Up to the peak in 1 of 50 updates, then in 49 equal parts down to 0.
    np.testing.assert_allclose([step["learning_rate"] for step in steps], np.arange(49, -1, -1) * 1e-4, rtol=1e-12)
    assert steps[49]["learning_rate"] == 0
    assert [step["epoch"] for step in steps] == [0] * 25 + [1] * 25
    assert sum(step["tokens"] for step in steps) == 2 * 25 * sum(LENGTHS)
    assert steps_in(tmp_path / "whole") == list(range(2, 51, 2))
    epochs = [[number for name in batches[part] for number in records_of(name)] for part in (np.s_[:25], np.s_[25:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert epochs[0] != epochs[1]
    uninterrupted = batches[:]
    batches.clear()
    capsys.readouterr()

    out = tmp_path / "stopped"
    stop_at(30)
    assert train(root, out, *flags, "--save-every", "7") == 0
    said = capsys.readouterr()
    assert "stopped by SIGTERM; the same command with --resume goes on" in said.err
    assert f"{out / 'drafter'}: drafter with spans 1,1" in said.out
    assert lines(out) == steps[:30]
    assert steps_in(out) == [7, 14, 21, 28, 30]
    stop_at(-1)
    assert train(root, out, *flags, "--resume", "--save-every", "7") == 0
    assert lines(out)[30] == steps[30]
    np.testing.assert_allclose(lines(out)[30]["learning_rate"], 0.0019, rtol=1e-12)
    assert batches == uninterrupted
    assert_same_run(out, tmp_path / "whole")
    assert "SIGTERM" not in capsys.readouterr().err


def records_of(name: str) -> list[int]:
    """ "epoch 0, batch 3 (a.json, record 12; ...)" to [12, ...]."""
    return [int(number) for number in re.findall(r"record (\d+)", name)]


@pytest.mark.slow
def test_interrupted_equals_uninterrupted_packed_and_accumulated(root, whole, tmp_path, stop_at, batches):
    """SIGTERM where nothing is saved otherwise, then a crash between two checkpoints, and right after an evaluation."""
    out = tmp_path / "out"
    stop_at(1)
    assert train(root, out, *ACCUMULATED) == 0
    assert steps_in(out) == [1]
    stop_at(5, crash=True)
    with pytest.raises(Interruption):
        train(root, out, *ACCUMULATED, "--resume")
    assert steps_in(out)[-1] == 4
    stop_at(6, crash=True)
    with pytest.raises(Interruption):
        train(root, out, *ACCUMULATED, "--resume")
    stop_at(-1)
    assert train(root, out, *ACCUMULATED, "--resume") == 0
    # After the crash at 5 the checkpoint of 4 is whole, as the one of 6 is after that at 6.
    assert len(batches) == 1 + 4 + 2 + 2
    assert batches[4:6] != batches[5:7]
    assert batches[4] == batches[5]
    assert_same_run(out, whole)
    assert [line["step"] for line in lines(out, "evaluations.jsonl")] == [3, 6, 8]
    before = files(out / "drafter")
    assert train(root, out, *ACCUMULATED, "--resume") == 0  # a run that has come to its end stays as it is
    assert files(out / "drafter") == before
    assert_same_run(out, whole)


def test_the_best_drafter_is_that_of_the_checkpoint_marked_best(root, whole):
    figures = {line["step"]: line["tokens_per_round"] for line in lines(whole, "evaluations.jsonl")}
    marked = json.loads((whole / "checkpoints" / "best.json").read_text())
    assert marked == {"step": max(figures, key=lambda step: (figures[step], step)), "figure": max(figures.values())}
    config = json.loads((whole / "best" / "config.json").read_text())
    assert config["notes"]["step"] == marked["step"]
    assert config["notes"]["data"] == [str(root / "data.json")]
    (line,) = (line for line in lines(whole, "evaluations.jsonl") if line["step"] == marked["step"])
    assert config["notes"]["evaluation"] == line
    assert f"one drafted chain | {line['tokens_per_round']:.3f} |" in (whole / "best" / "README.md").read_text()
    best, state = exported(whole, "best"), saved(whole, marked["step"])[0]
    np.testing.assert_array_equal(best["fc.weight"], state["params/fc/kernel"].T)
    for index in range(2):
        np.testing.assert_array_equal(
            best[f"layers.{index}.mlp.down_proj.weight"], state[f"params/specialist_{index}/down"].T
        )
    last, state = exported(whole), saved(whole)[0]
    np.testing.assert_array_equal(last["fc.weight"], state["params/fc/kernel"].T)


def test_of_equal_drafters_the_newest_is_best(root, tmp_path):
    flags = (*ACCUMULATED, "--learning-rate", "1e-30", "--steps", "2", "--evaluate-every", "1")
    assert train(root, tmp_path, *flags) == 0
    one, two = (line["tokens_per_round"] for line in lines(tmp_path, "evaluations.jsonl"))
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == {"step": 2, "figure": two}
    assert json.loads((tmp_path / "best" / "config.json").read_text())["notes"]["step"] == 2
    assert one == two


DEVICES = {"data=8": 8, "fsdp=8": 8, "tensor=2": 2, "data=2,fsdp=2,tensor=2": 8, "fsdp=2,tensor=4": 8}
MESHES = [pytest.param(mesh, marks=pytest.mark.devices(count)) for mesh, count in DEVICES.items()]
SHARDED = ("--batch-size", "8", "--steps", "4", "--learning-rate", "0.001", "--save-every", "2", "--keep", "9")


@pytest.fixture(scope="module")
def alone(root):
    """A run on one device."""
    assert train(root, root / "alone", *SHARDED) == 0
    return root / "alone"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_the_same(root, alone, tmp_path, mesh):
    assert train(root, tmp_path, *SHARDED, "--mesh", mesh) == 0
    np.testing.assert_allclose(losses(tmp_path), losses(alone), rtol=1e-5)
    (state, meta), (expected, _) = saved(tmp_path), saved(alone)
    assert_close(state, expected, rtol=1e-4, atol=1e-6)
    assert meta["position"]["batch"] == 4


@pytest.mark.slow
@pytest.mark.devices(8)
def test_a_run_goes_on_on_another_mesh(root, alone, tmp_path, monkeypatch):
    mesh = ("--mesh", "data=2,fsdp=2,tensor=2")
    shutil.copytree(alone, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "4")
    restored, restore = [], Checkpoints.restore

    def noting(checkpoints, like):
        state, meta = restore(checkpoints, like)
        restored.append(jax.tree.map(np.asarray, state))
        assert {leaf.sharding.mesh.size for leaf in jax.tree.leaves(state)} == {8}
        return state, meta

    monkeypatch.setattr(Checkpoints, "restore", noting)
    assert train(root, tmp_path / "out", *SHARDED, *mesh, "--resume") == 0
    monkeypatch.undo()
    assert_close(named_leaves(restored[0]), saved(alone, 2)[0], rtol=0)
    assert losses(tmp_path / "out")[:2] == losses(alone)[:2]
    np.testing.assert_allclose(losses(tmp_path / "out")[2:], losses(alone)[2:], rtol=1e-5)


def named_leaves(state) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def test_accumulating_is_a_larger_batch(root, tmp_path):
    """Without noise, which is drawn for each batch, and with rows in the same order."""
    flags = ("--packing", "none", "--noise", "0", "--steps", "4", "--learning-rate", "0.001")
    assert train(root, tmp_path / "large", *flags, "--batch-size", "8") == 0
    assert train(root, tmp_path / "parts", *flags, "--batch-size", "4", "--accumulate", "2") == 0
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "large"), rtol=1e-6)
    assert [line["tokens"] for line in lines(tmp_path / "parts")] == [
        line["tokens"] for line in lines(tmp_path / "large")
    ]
    assert_close(saved(tmp_path / "parts")[0], saved(tmp_path / "large")[0], rtol=1e-4, atol=1e-6)
    assert train(root, tmp_path / "noisy", *flags, "--batch-size", "8", "--noise", "0.2") == 0
    assert lines(tmp_path / "noisy")[0]["tokens"] == lines(tmp_path / "large")[0]["tokens"]
    assert abs(losses(tmp_path / "noisy")[0] - losses(tmp_path / "large")[0]) > 1e-3


def test_stored_features_train_the_same(root, alone, tmp_path, capsys):
    given = [
        "--target",
        root / "target",
        "--data",
        root / "data.json",
        "--max-length",
        "48",
        "--out",
        root / "features",
    ]
    assert features.main([*map(str, given)]) == 0
    assert train(root, tmp_path / "out", *SHARDED, "--data", root / "features") == 0
    np.testing.assert_allclose(losses(tmp_path / "out"), losses(alone), rtol=1e-5)
    assert_close(saved(tmp_path / "out")[0], saved(alone)[0], rtol=1e-4, atol=1e-6)
    fixtures.tiny(tmp_path / "other", seed=1, num_hidden_layers=1)
    fixtures.tok(tmp_path / "other")
    flags = (*SHARDED, "--data", root / "features", "--target", tmp_path / "other")
    assert train(root, tmp_path / "refused", *flags) == 2
    assert f"the data holds features of {root / 'target'} (fingerprint" in error_of(capsys)
    assert not (tmp_path / "refused").exists()


def test_too_high_a_learning_rate_stops_the_run(root, tmp_path, batches, capsys):
    flags = ("--learning-rate", "1e30", "--steps", "9", "--save-every", "1")
    assert train(root, tmp_path / "out", *flags) == 2
    said = error_of(capsys)
    assert f"step 2: loss nan, gradient norm nan, with {batches[1]}; the checkpoint of step 1 is kept" in said
    assert "try a smaller --learning-rate" in said
    assert steps_in(tmp_path / "out") == [1]
    assert [line["loss"] is None for line in lines(tmp_path / "out")] == [False, True]


def test_the_batch_with_a_loss_that_is_not_finite_is_named(root, tmp_path, batches, capsys):
    """One token's embedding is so large that sums of it are infinite, and one record has it."""
    config = fixtures.tiny(tmp_path / "target", num_hidden_layers=1)
    fixtures.tok(tmp_path / "target")
    embedding = load_file(tmp_path / "target" / "model.safetensors")["model.embed_tokens.weight"].copy()
    embedding[10 + 53] = 3e38  # w53
    replace_tensors(tmp_path / "target", {"model.embed_tokens.weight": embedding})
    assert config["vocab_size"] == 64
    records = [conversation(number) for number in range(100)]
    records[77]["conversations"][1]["value"] += " w53 w1"
    (tmp_path / "data.json").write_text(json.dumps(records))
    flags = ("--packing", "none", "--epochs", "1", "--save-every", "3")
    assert train(tmp_path, tmp_path / "out", *flags) == 2
    bad = next(number for number, name in enumerate(batches, 1) if 77 in records_of(name))
    assert bad > 4
    assert len(batches) in (bad, bad + 1)
    said = error_of(capsys)
    assert f"step {bad}: loss nan" in said
    assert f"{tmp_path / 'data.json'}, record 77" in said
    kept = (bad - 1) // 3 * 3
    assert f"the checkpoint of step {kept} is kept" in said
    assert steps_in(tmp_path / "out")[-1] == kept
    state = saved(tmp_path / "out")[0]
    assert all(np.isfinite(array).all() for array in state.values())


def test_starts_from_a_drafter_with_fewer_specialists(root, tmp_path, capsys):
    """At a learning rate of nothing, what is exported is what was read."""
    config = json.loads((root / "target" / "config.json").read_text())
    fixtures.draft(tmp_path / "eagle", config, 1)
    fixtures.draft(tmp_path / "poss", config, 3)
    fixtures.draft(tmp_path / "wide", {**config, "hidden_size": 48}, 1)
    fixtures.draft(tmp_path / "wordy", {**config, "vocab_size": 65}, 1)
    flags = ("--spans", "2,1", "--steps", "1", "--learning-rate", "1e-30")
    assert train(root, tmp_path / "out", *flags, "--init-from", tmp_path / "eagle") == 0
    there, made = load_file(tmp_path / "eagle" / "model.safetensors"), exported(tmp_path / "out")
    expected = {name: tensor for name, tensor in there.items() if not name.startswith("layers.")}
    assert "embed_tokens.weight" in expected
    for name in there.keys() - expected.keys():
        for index in range(2):
            expected[name.replace("layers.0", f"layers.{index}")] = there[name]
    assert_close(made, expected, rtol=0)
    assert json.loads((tmp_path / "out" / "drafter" / "config.json").read_text())["spans"] == [2, 1]
    assert train(root, tmp_path / "again", *flags, "--init-from", tmp_path / "out") == 0  # a run holds its drafter
    assert_close(exported(tmp_path / "again"), expected, rtol=0)
    capsys.readouterr()
    for name, said in (
        ("poss", "has 3 specialists; --spans 2,1 has room for 2"),
        ("wide", "has hidden_size 48, the target 32; it was made for another target"),
        ("wordy", "has vocab_size 65, the target 64; it was made for another target"),
        ("none", "none"),
        ("run", "this run has not written its drafter yet; end it with train.run --resume"),
    ):
        (tmp_path / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
        assert train(root, tmp_path / "refused", *flags, "--init-from", tmp_path / name) == 2
        assert f"{tmp_path / name}: {said}" in error_of(capsys) or name == "none"
    assert not (tmp_path / "refused").exists()


def test_a_drafter_without_a_bias_in_fc_is_one_for_vllm(root, tmp_path, capsys):
    out, flags = tmp_path / "out", ("--spans", "2", "--learning-rate", "0.01")
    assert train(root, out, *flags, "--no-fc-bias", "--steps", "2") == 0
    assert "fc.bias" not in exported(out)
    assert json.loads((out / "drafter" / "config.json").read_text())["bias"] is False
    assert to_hf.main([str(out), str(tmp_path / "vllm"), "--format", "vllm"]) == 0
    assert_close(load_file(tmp_path / "vllm" / "model.safetensors"), exported(out), rtol=0)
    assert train(root, out, *flags, "--steps", "4", "--resume") == 2
    assert "it began with --no-fc-bias True, this is --no-fc-bias False" in error_of(capsys)


def test_checkpoints_where_asked_also_without_evaluations(root, tmp_path):
    assert train(root, tmp_path, "--steps", "4", "--save-every", "3", "--evaluate-every", "1") == 0
    assert steps_in(tmp_path) == [3, 4]
    assert not (tmp_path / "best").exists()


def test_the_card_of_a_stopped_run_says_of_which_update_its_figures_are(root, tmp_path, stop_at):
    stop_at(3)
    assert train(root, tmp_path, "--steps", "9", "--held-out", "8", "--evaluate-every", "2") == 0
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "| updates | 3 |" in card
    assert len(re.findall(r"\d at update 2 \|", card)) == 2
    assert "at update" not in (tmp_path / "best" / "README.md").read_text()


def test_minutes_end_the_run_and_its_learning_rate(root, tmp_path):
    began = time.monotonic()
    assert train(root, tmp_path / "first", "--steps", "2") == 0
    allowed = 2 * (time.monotonic() - began) + 1  # so that there is time to train on any machine
    out = tmp_path / "out"
    flags = ("--learning-rate", "0.001", "--warmup", "0.25", "--save-every", "100000", "--minutes", allowed / 60)
    assert train(root, out, *flags) == 0
    rates = np.array([line["learning_rate"] for line in lines(out)])
    peak = rates.argmax()
    assert 0.0009 < rates[peak] <= 0.001
    assert (np.diff(rates[: peak + 1]) >= 0).all()
    assert (np.diff(rates[peak:]) <= 0).all()
    assert rates[0] < 0.0003
    assert rates[-1] < 0.0003
    seconds, training = saved(out)[1]["seconds"]
    assert allowed <= seconds < allowed + 6
    assert training < seconds
    assert train(root, out, *flags, "--resume") == 0  # its time is over
    assert len(lines(out)) == len(rates)


def test_the_minutes_of_a_command_count_from_before_its_imports(root, tmp_path, monkeypatch):
    """Those of several runs in one process from each call."""
    loaded = "import sys, train; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "False\n"
    given, began = [], time.monotonic()
    monkeypatch.setattr(run, "prepare", lambda options: None)
    monkeypatch.setattr(run, "train", lambda prepared, started: (given.append(started), "done"))
    flags = arguments(root, tmp_path, "--minutes", "1")
    monkeypatch.setattr(sys, "argv", ["train.run", *flags])
    assert run.main() == run.main(flags) == 0
    assert given[0] == STARTED < began <= given[1]


def test_an_output_directory_of_another_run_is_refused(root, whole, tmp_path, capsys):
    before = files(whole)
    assert train(root, whole, *ACCUMULATED) == 2
    assert f"--out {whole}: holds checkpoints of another run; give --resume, or another --out" in error_of(capsys)
    (tmp_path / "data.json").write_text(json.dumps([conversation(number) for number in range(99)]))
    for flags, said in (
        (("--spans", "2"), "--spans 1,1, this is --spans 2"),
        (("--seed", "6"), "--seed 5, this is --seed 6"),
        (("--learning-rate", "0.02"), "--learning-rate 0.01, this is --learning-rate 0.02"),
        (("--data", str(tmp_path / "data.json")), f"--data ['{root / 'data.json'}'], this is --data"),
    ):
        assert train(root, whole, *ACCUMULATED, "--resume", *flags) == 2
        assert f"cannot resume {whole}: it began with {said}" in error_of(capsys)
    assert files(whole) == before
    (tmp_path / "file").write_text("")
    assert train(root, tmp_path / "file", *ACCUMULATED) == 2
    assert "is no directory" in error_of(capsys)


def test_other_data_under_the_same_name_is_refused(root, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "out")
    shutil.copytree(root / "target", tmp_path / "target")
    settings = json.loads((whole / "settings.json").read_text())
    (tmp_path / "data.json").write_text(json.dumps([conversation(number) for number in range(99)]))
    settings |= {"target": str(tmp_path / "target"), "data": [str(tmp_path / "data.json")]}
    (tmp_path / "out" / "settings.json").write_text(json.dumps(settings))
    assert train(tmp_path, tmp_path / "out", *ACCUMULATED, "--resume") == 2
    assert "give the same --data, sizes and --seed" in error_of(capsys)
