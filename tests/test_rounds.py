"""The timing of rounds with random weights: what is counted, and that the parts are those of generation."""

import json
from collections import namedtuple

import jax
import numpy as np
import pytest

from infer import benchmark, rounds
from infer.rounds import (
    SHAPES,
    Rounds,
    build_parser,
    bytes_read,
    kernel_times,
    make_params,
    make_plans,
    start,
)
from poss_jax.config import BlockConfig, RopeConfig, TargetConfig

FLAGS = ("--shape", "tiny", "--random-weights", "--context", "20", "--repeats", "1", "--dtype", "float32")
TREE = ("--levels", "2", "--total-nodes", "6", "--draft-top-k", "3", "--spans", "1,1")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Two layers, 8 queries of 4 for 2 key/value heads."""
    block = BlockConfig(32, 48, 8, 2, 4, 1e-5, RopeConfig())
    monkeypatch.setitem(SHAPES, "tiny", TargetConfig(block, 100, 2, 512))
    monkeypatch.setitem(SHAPES, "tied", TargetConfig(block, 100, 2, 512, tie_embeddings=True))
    monkeypatch.setattr(rounds, "REPEATS", 2)
    monkeypatch.setitem(rounds.READ_BYTES, "cpu", 2**16)


def test_the_command_prints_every_part_beside_what_it_reads(capsys):
    assert benchmark.main([*FLAGS, *TREE, "--slots", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "tiny, float32, batch 1, spans 1,1, 2 levels, 6 nodes, context 20 of 64 slots, tensor=1, attention plain; "
        + jax.devices()[0].device_kind
    )
    assert [line.split()[0] for line in lines[3:7]] == ["plain", "draft", "verify", "round"]
    assert lines[7].startswith("speed-up over plain decoding by tokens per round: ")


@pytest.mark.devices(2)
def test_over_devices_each_reads_its_part(capsys):
    read = []
    for mesh in ("tensor=1", "tensor=2"):
        flags = [*FLAGS, *TREE, "--slots=64", "--draft-vocab-size", "10", "--json", "--mesh", mesh]
        assert benchmark.main(flags) == 0
        read.append(json.loads(capsys.readouterr().out)["bytes_read"])
    assert 0.5 < read[1]["plain"] / read[0]["plain"] < 0.55  # norms are whole on each
    assert 0.5 < read[1]["draft"] / read[0]["draft"] < 0.75  # and so is fc


def test_the_tree_that_is_named_is_the_one_that_ran(capsys):
    flags = ["--levels", "6", "--total-nodes", "3", "--draft-top-k", "3", "--slots", "128", "--json"]
    assert benchmark.main([*FLAGS, *flags]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["levels"], figures["total_nodes"], figures["top_k"]) == (2, 3, 3)


def test_figures_as_json_and_a_trimmed_vocabulary_in_batches(capsys):
    flags = [*FLAGS, *TREE, "--slots=64", "--batch-size", "2", "--draft-vocab-size", "10", "--json"]
    assert benchmark.main(flags) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["shape"], figures["batch_size"], figures["draft_vocab_size"]) == ("tiny", 2, 10)
    assert all(seconds > 0 for seconds in figures["seconds"].values())
    for name, share in figures["share_of_bandwidth"].items():
        expected = figures["bytes_read"][name] / figures["seconds"][name] / figures["read_bandwidth"]
        assert share == pytest.approx(expected)
    assert figures["break_even_tokens_per_round"] == figures["seconds"]["round"] / figures["seconds"]["plain"]


@pytest.mark.parametrize(("shape", "vocab", "head"), [("tiny", None, 100), ("tied", None, 100), ("tiny", 10, 10)])
def test_bytes_are_every_weight_once_and_the_filled_caches(shape, vocab, head):
    flags = [*FLAGS, *TREE, "--slots", "80", *([] if vocab is None else ["--draft-vocab-size", str(vocab)])]
    options, target = build_parser().parse_args(flags), SHAPES[shape]
    _, plan = make_plans(options, target)
    params = make_params(options, target, plan.draft)
    state = start(params, plan, options)
    got = bytes_read(options, params, plan, state)
    if shape == "tiny":
        run = Rounds(params, plan, state)
        run.prepare()
        assert run(np.int32(2)).rounds.tolist() == [2]  # none is left out, whatever was accepted
    layer = 32 * 2 * (4 + 2) * 4 + 8 * 4 * 32 + 3 * 32 * 48  # q, k, v; output; gate, up, down
    row = 2 * 2 * 4  # keys and values of one layer and token
    plain = 2 * (layer + 2 * 32) + 32 + 100 * 32 + 20 * 2 * row
    draft = 2 * (layer + 32) + 2 * (64 * 32 + 32 + head * 32) + 20 * 2 * row
    assert got == {"plain": 4 * plain, "draft": 4 * draft, "verify": 4 * plain, "round": 4 * (plain + draft)}


def test_kernels_are_added_up_by_name_over_the_streams_of_devices():
    Event, Line, Plane, Profile = (
        namedtuple(*fields)
        for fields in (
            ("Event", "name duration_ns"),
            ("Line", "name events"),
            ("Plane", "name lines"),
            ("Profile", "planes"),
        )
    )
    gemm, copy = Event("gemm", 2000), Event("copy", 500)
    device = Plane("/device:GPU:0", [Line("Stream #1", [gemm, copy]), Line("Stream #2", [gemm]), Line("Steps", [gemm])])
    seconds, counts = kernel_times(Profile([device, Plane("/host:CPU", [Line("Stream", [copy])])]))
    assert seconds == {"gemm": pytest.approx(4e-6), "copy": pytest.approx(5e-7)}
    assert counts == {"gemm": 2, "copy": 1}


def test_kernels_are_shown_for_each_part(monkeypatch, capsys):
    kernels = {"busy": 2e-3, "top": [{"name": "gemm", "seconds": 1.5e-3, "count": 32.0}]}
    monkeypatch.setattr(rounds, "top_kernels", lambda run: kernels)
    monkeypatch.setattr(rounds, "check_flags", lambda options, target: None)
    assert benchmark.main([*FLAGS, *TREE, "--slots=64", "--profile"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "plain: the device is busy for 2.000 ms of it",
        "    1.500 ms,   32.0 x gemm",
        "round: the device is busy for 2.000 ms of it",
        "    1.500 ms,   32.0 x gemm",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slots", "20"], "--slots 20: --context 20 needs at least"),
        (["--slots", "64", "--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--slots", "64", "--draft-vocab-size", "101"], "--draft-vocab-size 101: the target has 100 tokens"),
        (["--slots", "64", "--context", "1"], "--context 1: must be from 2 to the 512 tokens of the target"),
        (["--slots", "900", "--context", "513"], "--context 513: must be from 2 to the 512"),
        (["--slots", "64", "--total-nodes", "1"], "--levels 2 --total-nodes 1: leave no tree to draft"),
        (["--slots", "64", "--spans", "x"], "spans 'x' must be whole numbers"),
        (["--slots", "64", "--mesh", "data=2"], "mesh axis 'data' is not known here"),
        pytest.param(
            *(["--slots", "64", "--profile"], "--profile: this device does not tell its kernels"),
            marks=pytest.mark.skipif(jax.default_backend() != "cpu", reason="accelerators tell their kernels"),
        ),
    ],
)
def test_what_cannot_be_is_one_line(capsys, flags, message):
    assert benchmark.main([*FLAGS, *TREE, *flags]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_every_shape_has_heads_that_fit():
    for target in SHAPES.values():
        assert target.block.num_heads % target.block.num_kv_heads == 0
    llama = SHAPES["llama3-8b"].block
    assert np.prod([llama.num_heads, llama.head_dim]) == llama.hidden_size == 4096
