"""Prepared data sets and stored features: what is written is read again, after kills, by many hosts, or broken."""

import dataclasses
import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from convert.checkpoint import Source
from convert.tokenizer import load_tokenizer
from infer.loading import load_models
from poss_jax import llama
from poss_jax.errors import InputError
from tests import fixtures
from train import data, features
from train.conversations import DUPLICATE, EMPTY, DataSource, Summary
from train.examples import NO_REPLY_LEFT, Dataset, Example, FeatureKind
from train.features import check_features, padded_width, parse_part, target_fingerprint
from train.packing import Batches
from train.shards import UNFINISHED, WholeFile
from train.store import MANIFEST, Store, is_prepared, open_prepared, write_prepared

SHARD = "shard-00002-of-00003.safetensors"
FILES = (".json", ".safetensors")
KIND = FeatureKind("bfloat16", 6, "some target", "0123")


def conversation(number: int) -> dict:
    words = " ".join(f"w{(number * 7 + place) % 40}" for place in range((1, 34, 9, 20)[number % 4]))
    return {"conversations": [{"from": "human", "value": f"w{number % 50}"}, {"from": "gpt", "value": words}]}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Two targets with one tokenizer, two files of data, and the features of the first file in three shards."""
    root = tmp_path_factory.mktemp("features")
    for name, seed in (("target", 0), ("other", 5)):
        fixtures.tiny(root / name, seed=seed)
        fixtures.tok(root / name)
    records = [conversation(number) for number in range(11)]
    (root / "a.json").write_text(json.dumps([*records, records[0], {"conversations": []}]))
    (root / "b.json").write_text(json.dumps([{"text": f"w1 w2 w{number}"} for number in range(9)]))
    assert make(root, "features") == 0
    return root


def make(root: Path, out: str, *more: str) -> int:
    """Runs the command over a.json."""
    return features.main(arguments(root, root / out, *more))


def arguments(root: Path, out: Path, *more: str) -> list[str]:
    given = ["--target", root / "target", "--data", root / "a.json", "--out", out]
    return [*map(str, given), "--max-length", "48", "--shard-examples", "4", "--batch-size", "3", *more]


def load(*names, tokenizer=None, max_length=48) -> Dataset:
    sources = [DataSource.parse(str(name)) for name in names]
    return data.load_dataset(sources, tokenizer, max_length=max_length)


def tokenizer_of(root: Path):
    return load_tokenizer(root / "target")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def error_of(capsys) -> str:
    lines = capsys.readouterr().err.strip().split("\n")
    assert lines[-1].startswith("error: ")
    return lines[-1]


def same(one: Dataset, other: Dataset) -> None:
    assert (one.sources, one.summary, one.max_length) == (other.sources, other.summary, other.max_length)
    assert str(one.summary) == str(other.summary)
    assert one.fingerprint() == other.fingerprint()
    for index, (a, b) in enumerate(zip(one.examples, other.examples, strict=True)):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.supervised, b.supervised)
        assert (a.tokens.dtype, a.supervised.dtype) == (b.tokens.dtype, b.supervised.dtype) == ("int32", "bool")
        assert one.describe(index) == other.describe(index)


def alone(target, tokens: np.ndarray) -> np.ndarray:
    """What the target's features of these tokens are, float32, with nothing around them."""
    positions, lengths = np.arange(len(tokens))[None], np.full((1, len(tokens)), len(tokens))
    forward = jax.jit(llama.forward, static_argnums=1)
    return np.asarray(forward(target.params, target.config, tokens[None], positions, lengths, None)[0][0], np.float32)


def numbered(count: int, dtype=ml_dtypes.bfloat16) -> Dataset:
    """Examples 3, 4, ... tokens long whose features, of 6 numbers, are any bits that are a number."""
    random, examples = np.random.default_rng(0), []
    for number in range(count):
        length = 3 + number
        bits = random.integers(0, 0x7F00, (length, 6), np.uint16)
        rows = bits.view(ml_dtypes.bfloat16).astype(dtype)
        examples.append(Example(np.full(length, number, np.int32), np.arange(length) < length - 1, 0, number, rows))
    tokens = sum(len(example.tokens) for example in examples)
    summary = Summary(read=count, kept=count, tokens=tokens, supervised=tokens - count)
    return Dataset(examples, (DataSource("n"),), summary, 32, KIND)


def test_features_are_those_of_each_example_alone(root):
    dataset = load(root / "features")
    same(dataset, load(root / "a.json", tokenizer=tokenizer_of(root)))
    assert dataset.summary.dropped_records == {"duplicate": 1, "empty conversation": 1}
    assert len({len(example.tokens) for example in dataset.examples}) == 4
    target = load_models(root / "target").target
    for example in dataset.examples:
        assert example.features.dtype == "float32"
        np.testing.assert_allclose(example.features, alone(target, example.tokens), atol=1e-5)
    assert load_file(root / "features" / SHARD)["lengths"].tolist() == [len(e.tokens) for e in dataset.examples[4:8]]


@pytest.mark.devices(2)
def test_features_over_a_mesh(root, capsys):
    assert make(root, "mesh", "--mesh", "tensor=2") == 0
    assert "split over 2 devices" in capsys.readouterr().err
    for one, other in zip(load(root / "mesh").examples, load(root / "features").examples, strict=True):
        # Halves are summed apart: one processor's order gave 1.27945 and 1.27944. An absolute bound alone forgets size.
        np.testing.assert_allclose(one.features, other.features, rtol=1e-5, atol=1e-5)


def test_features_in_bfloat16(root):
    assert make(root, "half", "--dtype", "bfloat16") == 0
    target = load_models(root / "target", dtype="bfloat16").target
    for example in load(root / "half").examples[:2]:
        assert example.features.dtype == ml_dtypes.bfloat16
        np.testing.assert_allclose(example.features.astype(np.float32), alone(target, example.tokens), atol=0.1)


def test_few_widths():
    assert [padded_width(n) for n in (1, 128, 129, 1024, 1025, 1537, 2048, 2049)] == [
        *(128, 128, 256, 1024, 1536, 2048, 2048, 3072)
    ]
    assert len({padded_width(length) for length in range(1, 4097)}) == 8
    assert all(width % 512 == 0 for length in range(513, 9000) if (width := padded_width(length)))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_stored_features_are_the_same_bits(tmp_path, dtype):
    dataset = numbered(7, dtype)
    dataset = dataclasses.replace(dataset, features=dataclasses.replace(KIND, dtype=np.dtype(dtype).name))
    write_prepared(dataset, tmp_path / "out", shard_examples=3)
    again = open_prepared(tmp_path / "out")
    same(again, dataset)
    assert again.features == dataset.features
    for one, other in zip(again.examples, dataset.examples, strict=True):
        assert one.features.dtype == dtype
        assert one.features.tobytes() == other.features.tobytes()
    file = tmp_path / "out" / "shard-00003-of-00003.safetensors"
    with safe_open(file, "numpy") as opened:  # others can read it
        assert opened.get_slice("features")[2:5].tobytes() == dataset.examples[6].features[2:5].tobytes()
        assert opened.get_slice("supervised").get_dtype() == "U8"


@pytest.mark.parametrize("packing", ["rows", "none"])
def test_features_of_a_batch_stand_at_their_tokens(tmp_path, packing):
    write_prepared(numbered(12), tmp_path / "out", shard_examples=5)
    dataset = load(tmp_path / "out", max_length=32)
    batches = Batches(dataset, 2, packing=packing)
    met = 0
    for index in range(batches.count(0)):
        batch = batches.batch(0, index)
        assert (batch.features.shape, batch.features.dtype) == ((*batch.tokens.shape, 6), ml_dtypes.bfloat16)
        assert not batch.features[batch.segments == 0].any()
        for place in zip(*np.nonzero(batch.segments), strict=True):
            stored = dataset.examples[batch.tokens[place]].features[batch.offsets[place]]
            assert batch.features[place].tobytes() == stored.tobytes()
            met += 1
    assert met >= dataset.summary.tokens
    bare = [dataclasses.replace(example, features=None) for example in dataset.examples]
    without = Batches(dataclasses.replace(dataset, examples=bare), 2, packing=packing)
    assert without.batch(0, 0).features is None
    assert without.fingerprint == batches.fingerprint
    mixed = dataclasses.replace(dataset, examples=[*dataset.examples[:3], *bare[3:]])
    with pytest.raises(InputError, match="some examples have features"):
        Batches(mixed, 2)
    assert dataset.split(3)[1].features == KIND


def test_features_are_not_read_before_they_are_used(tmp_path):
    write_prepared(numbered(5), tmp_path / "out")
    example = open_prepared(tmp_path / "out").examples[3]
    owner = example.features
    while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
        owner = owner.base
    assert isinstance(owner, np.memmap)
    assert not example.features.flags.writeable


def damage_sidecar(directory: Path) -> None:
    (directory / SHARD).with_suffix(".json").unlink()


def damage_shard(directory: Path) -> None:
    (directory / SHARD).unlink()


def damage_end(directory: Path) -> None:
    with open(directory / SHARD, "r+b") as file:
        file.truncate(1000)


def damage_run(directory: Path) -> None:
    sidecar = (directory / SHARD).with_suffix(".json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "manifest": "other"}))


def damage_json(directory: Path) -> None:
    (directory / SHARD).with_suffix(".json").write_text("{")


def damage_bit(directory: Path) -> None:
    content = bytearray((directory / SHARD).read_bytes())
    content[-1000] ^= 1
    (directory / SHARD).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_sidecar, "is not finished"),
        (damage_shard, "is missing"),
        (damage_end, "has 1000 bytes instead of"),
        (damage_run, "is of another run"),
        (damage_json, "cannot be checked"),
        (damage_bit, "does not have the checksum"),
    ],
)
def test_what_is_broken_is_named_and_mended_by_the_same_command(root, tmp_path, capsys, damage, said):
    shutil.copytree(root / "features", tmp_path / "set")
    right = contents(tmp_path / "set")
    damage(tmp_path / "set")
    with pytest.raises(InputError, match=re.escape(f"{SHARD}: {said}")) as error:
        open_prepared(tmp_path / "set")
    assert "run the same command again (python -m train.features" in str(error.value)
    assert "\n" not in str(error.value)
    assert data.main(["show", "--target", str(root / "target"), "--data", str(tmp_path / "set")]) == 2
    assert SHARD in error_of(capsys)
    if damage is damage_bit:
        assert "delete it" in str(error.value)
        (tmp_path / "set" / SHARD).unlink()
    (tmp_path / "set" / f".{SHARD}.0123{UNFINISHED}").write_bytes(b"half")
    unharmed = (tmp_path / "set" / "shard-00001-of-00003.safetensors").stat().st_mtime_ns
    assert features.main(arguments(root, tmp_path / "set")) == 0
    assert contents(tmp_path / "set") == right
    assert (tmp_path / "set" / "shard-00001-of-00003.safetensors").stat().st_mtime_ns == unharmed


def test_a_manifest_that_is_missing_foreign_or_of_another_version(root, tmp_path):
    shutil.copytree(root / "features", tmp_path / "set")
    manifest = json.loads((tmp_path / "set" / MANIFEST).read_text())
    for changes, said in (
        ({"version": 2}, "has version 2 of the format, this program reads version 1; update"),
        ({"format": "other"}, "is not the manifest of a prepared data set"),
        ({"shards": None}, "is not whole"),
        ({"fingerprint": "0"}, "is of another run"),
    ):
        (tmp_path / "set" / MANIFEST).write_text(json.dumps({**manifest, **changes}))
        assert is_prepared(tmp_path / "set")
        with pytest.raises(InputError, match=said):
            load(tmp_path / "set")
    (tmp_path / "set" / MANIFEST).unlink()
    with pytest.raises(InputError, match=f"{MANIFEST}: no such file"):
        load(tmp_path / "set")
    for name in (root / "a.json", root, root / "none", "org/set", "a\0b", "x" * 300):
        assert not is_prepared(name)


def test_parts_in_any_order_give_the_same_bytes_as_one_run(root, tmp_path, capsys):
    right = contents(root / "features")
    for order in (("1/2", "2/2"), ("2/2", "1/2")):
        out = tmp_path / order[0][0]
        assert features.main(arguments(root, out, "--part", order[0])) == 0
        assert f"{2 if order[0] == '1/2' else 1} of 3 shards" in capsys.readouterr().out
        with pytest.raises(InputError, match="is missing .* of 3 shards are finished"):
            open_prepared(out)
        assert features.main(arguments(root, out, "--part", order[1])) == 0
        assert "complete: 3 of 3 shards" in capsys.readouterr().out
        assert contents(out) == right
    for wrong in ("0/2", "3/2", "1", "a/2", "1/", "-1/2"):
        with pytest.raises(InputError, match="--part"):
            parse_part(wrong)


def test_a_run_that_differs_is_refused_by_what_differs(root, tmp_path, capsys):
    before = contents(root / "features")
    (tmp_path / "c.json").write_text(json.dumps([conversation(30)]))
    for more, said in (
        (["--max-length", "40"], "--max-length 48, not 40"),
        (["--data", str(tmp_path / "c.json")], "c.json (fingerprint"),
        (["--data", f"{root / 'a.json'}:2"], "weights [None], not [2.0]"),
        (["--target", str(root / "other")], f"{root / 'other'} (fingerprint"),
        (["--dtype", "bfloat16"], "--dtype float32, not bfloat16"),
        (["--shard-examples", "5"], "--shard-examples 4, not 5"),
    ):
        assert make(root, "features", *more) == 2
        assert said in error_of(capsys)
    prepare = ["prepare", "--tokenizer", str(root / "target"), "--data", str(root / "a.json"), "--max-length", "48"]
    assert data.main([*prepare, "--out", str(root / "features")]) == 2
    assert "features of a target, not left out" in error_of(capsys)
    for more in (["--batch-size", "0"], ["--shard-examples", "0"], ["--part", "2"], ["--mesh", "data=2"]):
        assert make(root, "features", *more) == 2
        assert error_of(capsys)
    assert contents(root / "features") == before
    (tmp_path / "file").write_text("")
    assert features.main(arguments(root, tmp_path / "file")) == 2
    assert f"{tmp_path / 'file'}: cannot be written" in error_of(capsys)


def test_names_of_files_and_smaller_batches_may_differ_between_hosts(root, tmp_path):
    shutil.copytree(root / "features", tmp_path / "set")
    damage_shard(tmp_path / "set")
    shutil.copy(root / "a.json", tmp_path / "moved.json")
    shutil.copytree(root / "target", tmp_path / "moved")
    more = ["--data", str(tmp_path / "moved.json"), "--target", str(tmp_path / "moved"), "--batch-size", "2"]
    assert features.main(arguments(root, tmp_path / "set", *more)) == 0
    for one, other in zip(load(tmp_path / "set").examples, load(root / "features").examples, strict=True):
        np.testing.assert_allclose(one.features, other.features, atol=1e-5)


def test_features_of_another_target_are_refused_naming_both(root, tmp_path):
    dataset = load(root / "features")
    check_features(dataset, Source.open(root / "target"))
    check_features(load(root / "a.json", tokenizer=tokenizer_of(root)), Source.open(root / "other"))
    with pytest.raises(InputError) as error:
        check_features(dataset, Source.open(root / "other"))
    assert str(root / "target") in str(error.value)
    assert str(root / "other") in str(error.value)
    fixtures.tiny(tmp_path / "shards", shards=3)
    fixtures.tiny(tmp_path / "theta", rope_theta=5000.0)
    right = target_fingerprint(Source.open(root / "target"))
    assert target_fingerprint(Source.open(tmp_path / "shards")) == right
    assert target_fingerprint(Source.open(tmp_path / "theta")) != right


def test_tokens_that_the_target_does_not_have(root, tmp_path, capsys):
    fixtures.tiny(tmp_path / "small", vocab_size=32)
    assert make(root, "small", "--target", str(tmp_path / "small"), "--tokenizer", str(root / "target")) == 2
    assert re.search(r"a.json, record 1: holds token \d+, the target has 32", error_of(capsys))
    assert not (root / "small").exists()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"model_type": "mistral", "sliding_window": 24}, "attention slides after"),
        ({"max_position_embeddings": 24}, "context is"),
    ],
)
def test_examples_stay_within_what_the_target_was_made_for(root, tmp_path, capsys, limits, reason):
    """Beyond it features would be those of attention that does not slide, or of positions without training."""
    fixtures.tiny(tmp_path / "short", **limits)
    model = ("--target", str(tmp_path / "short"), "--tokenizer", str(root / "target"))
    name = f"short of {reason}"
    assert make(root, name, *model) == 2
    assert re.search(rf"has \d+ tokens, and the target's {reason} 24; give --max-length 24", error_of(capsys))
    assert not (root / name).exists()
    assert make(root, name, *model, "--max-length", "24") == 0
    assert max(len(example.tokens) for example in load(root / name).examples) == 24


def test_prepared_text_is_what_was_read(root, tmp_path, capsys):
    weighted = [f"{root / 'a.json'}:3", f"{root / 'b.json'}:1"]
    prepare = ["prepare", "--target", str(root / "target"), "--max-length", "48", "--out", str(tmp_path / "set")]
    assert data.main([*prepare, "--data", *weighted]) == 0
    out = capsys.readouterr().out
    assert data.main([*prepare, "--data", *weighted]) == 0  # again: nothing is left to do
    direct = load(*weighted, tokenizer=tokenizer_of(root))
    assert str(direct.summary) in out
    for tokenizer in (None, tokenizer_of(root)):
        same(load(tmp_path / "set", tokenizer=tokenizer), direct)
    one, other = Batches(load(tmp_path / "set"), 2), Batches(direct, 2)
    assert one.fingerprint == other.fingerprint
    assert [one.members(0, i) for i in range(one.count(0))] == [other.members(0, i) for i in range(other.count(0))]
    shown = ["--target", str(root / "target"), "--count", "2", "--max-length", "48"]
    assert data.main(["show", *shown, "--data", str(tmp_path / "set")]) == 0
    text = capsys.readouterr().out
    assert data.main(["show", *shown, "--data", *weighted]) == 0
    assert text.endswith(capsys.readouterr().out)
    for wrong in (["--records", "3"], ["--max-length", "2"]):
        assert data.main(["show", *shown, "--data", str(tmp_path / "set"), *wrong]) == 2
    assert data.main(["prepare", "--data", *weighted, "--out", str(tmp_path / "set")]) == 2
    assert "--tokenizer" in error_of(capsys)


@pytest.mark.parametrize("max_length", [20, 14, 100])
def test_cutting_what_is_prepared_is_as_cutting_what_is_read(root, tmp_path, max_length):
    (tmp_path / "a.json").write_text(
        json.dumps([*map(conversation, range(9)), {"messages": [{"role": "user", "content": "w1 " * 30}, REPLY]}])
    )
    whole = load(tmp_path / "a.json", tokenizer=tokenizer_of(root))
    assert whole.summary.truncated == 0
    write_prepared(whole, tmp_path / "set", shard_examples=3)
    cut = load(tmp_path / "set", max_length=max_length)
    same(cut, load(tmp_path / "a.json", tokenizer=tokenizer_of(root), max_length=max_length))
    if max_length < 48:
        assert cut.summary.dropped_records == {NO_REPLY_LEFT: 1}
        assert cut.summary.truncated > 3
    again = load(root / "features", max_length=max_length)
    for short, long in zip(again.examples, load(root / "features").examples, strict=True):
        np.testing.assert_array_equal(short.features, long.features[:max_length])
        assert len(short.features) == len(short.tokens)
    with pytest.raises(InputError, match=f"set: gives no example .{NO_REPLY_LEFT}"):
        load(tmp_path / "set", max_length=4)


REPLY = {"role": "assistant", "content": "w2 w3"}


def test_prepared_sources_among_others(root, tmp_path):
    tokenizer = tokenizer_of(root)
    write_prepared(load(root / "a.json", tokenizer=tokenizer), tmp_path / "a")
    write_prepared(load(root / "a.json", root / "b.json", tokenizer=tokenizer), tmp_path / "both")
    plain = load(root / "a.json", root / "b.json", tokenizer=tokenizer)
    same(load(tmp_path / "a", root / "b.json", tokenizer=tokenizer), plain)
    same(load(tmp_path / "both"), plain)
    weighted = load(f"{tmp_path / 'a'}:0.5", f"{root / 'b.json'}:0.25", tokenizer=tokenizer)
    same(weighted, load(f"{root / 'a.json'}:0.5", f"{root / 'b.json'}:0.25", tokenizer=tokenizer))
    # Sources inside share a weight by their examples, 11 and 9, so together they are taken as one.
    (tmp_path / "c.json").write_text(json.dumps([{"text": f"w3 w4 w{number}"} for number in range(9)]))
    nested = load(f"{tmp_path / 'both'}:2", f"{tmp_path / 'c.json'}:0.5", tokenizer=tokenizer)
    assert [source.weight for source in nested.sources] == [2 * 11 / 20, 2 * 9 / 20, 0.5]
    assert [example.source for example in nested.examples] == [0] * 11 + [1] * 9 + [2] * 9
    write_prepared(weighted, tmp_path / "weighted")
    with pytest.raises(InputError, match="weighted: was prepared with weights"):
        load(tmp_path / "weighted", tmp_path / "c.json", tokenizer=tokenizer)
    write_prepared(load(tmp_path / "c.json", tokenizer=tokenizer), tmp_path / "c")
    shares = [source.weight for source in load(f"{tmp_path / 'weighted'}:3", f"{tmp_path / 'c'}:1").sources]
    assert shares == [2.0, 1.0, 1.0]


def test_an_example_of_an_earlier_source_is_a_duplicate_prepared_or_not(root, tmp_path):
    tokenizer = tokenizer_of(root)
    few = [conversation(number) for number in (3, 5, 10)]
    (tmp_path / "few.json").write_text(json.dumps([*few, {"text": "w9 w9 w9"}]))
    for name in (root / "a.json", root / "b.json", tmp_path / "few.json"):
        write_prepared(load(name, tokenizer=tokenizer), tmp_path / name.stem)
    few, prepared = tmp_path / "few.json", tmp_path / "few"
    for one, other in ((tmp_path / "a", few), (root / "a.json", prepared), (tmp_path / "a", prepared)):
        both = load(one, other, tokenizer=tokenizer)
        assert [(e.source, e.record) for e in both.examples] == [*((0, n) for n in range(11)), (1, 3)]
        assert both.summary.dropped_records == {DUPLICATE: 4, EMPTY: 1}  # one within a.json itself
        assert (both.summary.read, both.summary.kept) == (17, 12)
        assert both.summary.truncated == load(one, tokenizer=tokenizer).summary.truncated
        assert both.summary.tokens == sum(len(example.tokens) for example in both.examples)
        assert both.summary.supervised == sum(example.supervised.sum() for example in both.examples)
        assert load(other, one, tokenizer=tokenizer).examples[4].record == 0
    with pytest.raises(InputError, match="b: gives no example .duplicate"):
        load(root / "b.json", tmp_path / "b", tokenizer=tokenizer)
    # Weights are shares of what is left.
    halves = load(f"{few}:1", f"{tmp_path / 'a'}:1", tokenizer=tokenizer)
    assert [example.source for example in halves.examples] == [0] * 4 + [1] * 8


def test_features_stay_with_their_examples_where_others_are_duplicates(root, tmp_path):
    every = open_prepared(root / "features")
    write_prepared(dataclasses.replace(every, examples=every.examples[2:5]), tmp_path / "some")
    both = load(tmp_path / "some", root / "features")
    assert [e.record for e in both.examples] == [2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10]
    assert [e.source for e in both.examples] == [0] * 3 + [1] * 8
    for example in both.examples:
        np.testing.assert_array_equal(example.features, every.examples[example.record].features)


def test_sources_that_do_not_go_together(root, tmp_path):
    tokenizer = tokenizer_of(root)
    with pytest.raises(InputError, match="features holds features of the target and .*b.json does not"):
        load(root / "features", root / "b.json", tokenizer=tokenizer)
    write_prepared(numbered(4), tmp_path / "numbers")
    with pytest.raises(InputError, match="features holds float32 .*target .* and .*numbers bfloat16 .*some target"):
        load(root / "features", tmp_path / "numbers")
    config = json.loads((root / "target" / "tokenizer.json").read_text())
    config["model"]["vocab"]["world!"] = 63
    del config["model"]["vocab"]["w53"]
    shutil.copytree(root / "target", tmp_path / "tok")
    (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="features: was prepared with another tokenizer"):
        load(root / "features", tokenizer=load_tokenizer(tmp_path / "tok"))
    write_prepared(load(root / "b.json", tokenizer=load_tokenizer(tmp_path / "tok")), tmp_path / "b")
    write_prepared(load(root / "a.json", tokenizer=tokenizer), tmp_path / "a")
    with pytest.raises(InputError, match="with different tokenizers"):
        load(tmp_path / "a", tmp_path / "b")


def test_prepared_data_can_be_prepared_again_with_its_features(root, tmp_path):
    write_prepared(load(root / "features", max_length=20), tmp_path / "short", shard_examples=5)
    again = open_prepared(tmp_path / "short")
    same(again, load(root / "features", max_length=20))
    for short, long in zip(again.examples, load(root / "features").examples, strict=True):
        np.testing.assert_array_equal(short.features, long.features[:20])
    source = ["--data", str(tmp_path / "short"), "--dtype", "bfloat16"]
    assert make(root, "from_prepared", *source) == 0
    assert open_prepared(root / "from_prepared").features.dtype == "bfloat16"


def test_files_that_another_host_writes_are_left_alone(tmp_path):
    store = write_prepared(numbered(4), tmp_path / "set")
    other = WholeFile(tmp_path / "set" / "shard-00001-of-00001.safetensors")
    (tmp_path / "set" / f".left{UNFINISHED}").touch()
    write_prepared(numbered(4), tmp_path / "set")
    assert len([name for name in contents(tmp_path / "set") if name.endswith(UNFINISHED)]) == 1
    other.abandon()
    other.abandon()
    assert {path.suffix for path in store.directory.iterdir()} == {".json", ".safetensors"}
    with pytest.raises(ValueError, match="are not those of example 1"), store.writer(store.shards[0], numbered(4)) as w:
        w.put_features(1, np.zeros((3, 6), np.float32))
    assert {path.suffix for path in store.directory.iterdir()} == {".json", ".safetensors"}
    assert not Store.open(tmp_path / "set").unfinished()


def test_a_full_disk_is_said_and_leaves_nothing_behind(root, tmp_path, capsys, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    Store.create(tmp_path / "set", numbered(4), shard_examples=2, features=KIND)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match=r"shard-00001-of-00002.safetensors: cannot be written \(No space left"):
        write_prepared(numbered(4), tmp_path / "set", shard_examples=2)
    assert set(contents(tmp_path / "set")) == {MANIFEST}
    assert features.main(arguments(root, tmp_path / "new")) == 2
    assert "manifest.json" not in contents(tmp_path / "new")
    assert "No space left" in error_of(capsys)


@pytest.mark.slow
def test_a_killed_run_goes_on(root, tmp_path):
    given = arguments(root, tmp_path / "set", "--shard-examples", "1")
    command = [sys.executable, "-m", "train.features", *given]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list((tmp_path / "set").glob("shard-*.json")) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    store, before = Store.open(tmp_path / "set"), contents(tmp_path / "set")
    assert 0 < len(store.unfinished()) < len(store.shards) == 11
    finished = [shard.file for shard in store.shards if not store.fault(shard)]
    assert features.main(given) == 0
    after = contents(tmp_path / "set")
    assert [after[name] for name in finished] == [before[name] for name in finished]
    assert set(after) == {MANIFEST, *(f"shard-{n:05d}-of-00011{kind}" for n in range(1, 12) for kind in FILES)}
    for one, other in zip(load(tmp_path / "set").examples, load(root / "features").examples, strict=True):
        np.testing.assert_allclose(one.features, other.features, atol=1e-5)
