"""A trimmed draft vocabulary: another tree, the very same text."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.checkpoint import read_json
from infer import Generator, generate
from infer.draft_vocab import read_draft_vocab, write_draft_vocab
from poss_jax import llama
from poss_jax.draft import Functions, trim_head
from poss_jax.errors import InputError
from tests import golden_data, training
from train import draft_vocab
from train.draft_vocab import most_frequent, token_counts
from train.examples import Dataset, Example

PROMPT = [0, 5, 9, 17, 3]


def with_vocab(models, directory, ids, **options):
    write_draft_vocab(directory / "vocab.json", np.array(ids), 64, {})
    return Generator.from_pretrained(
        str(models / "tiny63"), str(models / "draft2"), spans=(2, 2), draft_vocab=directory / "vocab.json", **options
    )


# ---------------------------------------------------------------------------------------- the head


@pytest.mark.parametrize("tied", [False, True])
@given(st.sampled_from([1, 3, 40]), st.integers(0, 2**31))
def test_trimmed_logits_are_those_of_the_whole_head(tied, count, seed):
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(50, 8)).astype(np.float32)
    target = {"embed": jnp.asarray(matrix)} | ({} if tied else {"head": jnp.asarray(matrix.T)})
    ids = np.sort(random.choice(50, count, replace=False))
    features = random.normal(size=(1, 3, 8)).astype(np.float32)
    logits = np.asarray(llama.head(target, features))[..., ids]
    width = min(4, count)
    tokens, log_probs = Functions(None, {"vocab": trim_head(target, ids)}, target).best_tokens(features, width)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :width]
    np.testing.assert_array_equal(tokens, ids[order])
    expected = np.take_along_axis(logits - np.asarray(jax.nn.logsumexp(logits, axis=-1, keepdims=True)), order, -1)
    np.testing.assert_allclose(log_probs, expected, atol=1e-5)


@pytest.mark.parametrize("vocab", [50, 6000])
def test_a_drafter_that_overflows_proposes_tokens_that_there_are(vocab):
    """Where all logits are NaN, and where some are: those tokens come last."""
    head = np.random.default_rng(0).normal(size=(8, vocab)).astype(np.float32)
    features = jnp.asarray([[[np.nan] * 8, [np.inf] + [1.0] * 7, [1.0] * 8]])
    head[0, ::2] = 0.0  # times infinity
    tokens, log_probs = Functions(None, {}, {"head": jnp.asarray(head)}).best_tokens(features, 4)
    assert np.all((tokens >= 0) & (tokens < vocab))
    assert np.all(np.asarray(tokens)[0, 1] % 2 == 1)
    assert np.all(np.isfinite(log_probs[0, 2]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kept", [1, 3, 20])
def test_the_text_stays_and_only_kept_tokens_are_drafted(models, tiny, tmp_path, temperature, kept):
    options = {"max_new_tokens": 24, "temperature": temperature, "seed": 7}
    options |= {"levels": 3, "total_nodes": 12, "draft_top_k": 4}
    ids = np.random.default_rng(kept).choice(64, kept, replace=False)
    trimmed = with_vocab(models, tmp_path, ids)
    (plain,) = tiny.generate([PROMPT], plain=True, **options)
    (answer,) = trimmed.generate([PROMPT], trace=True, **options)
    assert answer.token_ids == plain.token_ids
    drafted = {token for record in answer.trace for token in record["tokens"][1:]}
    assert drafted <= set(ids.tolist())


def test_a_whole_vocabulary_drafts_the_golden_trees(golden, tmp_path):
    write_draft_vocab(tmp_path / "all.json", np.arange(512), 512, {})
    whole = golden_data.generator("poss2", draft_vocab=tmp_path / "all.json")
    prompt, options = next(iter(golden_data.prompts().values())), {"max_new_tokens": 16}
    ours, theirs = (generator.generate([prompt], trace=True, **options)[0] for generator in (whole, golden("poss2")))
    assert ours.trace == theirs.trace


@pytest.mark.devices(2)
def test_split_over_devices_it_is_the_same(models, tmp_path):
    options = {"max_new_tokens": 12, "levels": 3, "total_nodes": 12, "draft_top_k": 4}
    one, two = (with_vocab(models, tmp_path, range(0, 64, 2), mesh=mesh) for mesh in (None, "tensor=2"))
    head = two.draft.params["vocab"]["head"]
    assert head.sharding.shard_shape(head.shape) == (32, 16)  # not whole on every device, or nothing would be gained
    answers = [generator.generate([PROMPT], **options)[0] for generator in (one, two)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].accept_lengths == answers[1].accept_lengths


# ---------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"vocab_size": 65, "ids": [1]}, "was made for a vocabulary of 65 tokens; the target's has 64"),
        ({"ids": [1]}, "was made for a vocabulary of None"),
        ({"vocab_size": 64}, "ids must be a list of token ids; train.draft_vocab writes such files"),
        ({"vocab_size": 64, "ids": []}, "ids must be a list"),
        ({"vocab_size": 64, "ids": [1, "2"]}, "ids must be a list"),
        ({"vocab_size": 64, "ids": [1, True]}, "ids must be a list"),
        ({"vocab_size": 64, "ids": [3, 3]}, "ids must be distinct, from 0 to 63"),
        ({"vocab_size": 64, "ids": [64]}, "ids must be distinct, from 0 to 63"),
        ({"vocab_size": 64, "ids": [-1]}, "ids must be distinct, from 0 to 63"),
        ([1, 2], "expected an object"),
    ],
)
def test_files_that_are_no_draft_vocabulary_are_refused(models, tmp_path, capsys, contents, message):
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(contents))
    flags = ["--target", str(models / "tiny63"), "--draft-vocab", str(path), "--prompt-ids", "0"]
    draft = ["--draft", str(models / "draft2"), "--spans", "2,2"]
    assert generate.main([*flags, *draft]) == 2
    shown = capsys.readouterr().err
    assert f"{path}: " in shown
    assert message in shown
    assert generate.main(flags) == 2
    assert "--draft-vocab needs --draft" in capsys.readouterr().err
    with pytest.raises(InputError, match="there is no drafter to use it"):
        Generator.from_pretrained(str(models / "tiny63"), draft_vocab=path)


def test_what_is_written_is_read(tmp_path):
    write_draft_vocab(tmp_path / "deep" / "vocab.json", np.array([9, 2, 5]), 10, {"data": ["a.json"]})
    assert read_draft_vocab(tmp_path / "deep" / "vocab.json", 10).tolist() == [2, 5, 9]
    assert read_json(tmp_path / "deep" / "vocab.json")["data"] == ["a.json"]


# ------------------------------------------------------------------------------------- the command


def test_counted_are_the_tokens_that_supervised_rows_predict():
    """Row i predicts token i + 2, so the last two rows predict nothing that is there."""
    one = Example(np.array([1, 2, 3, 4, 5], np.int32), np.array([0, 1, 1, 1, 0], bool), 0, 0)
    two = Example(np.array([1, 2, 4], np.int32), np.array([1, 0, 0], bool), 0, 1)
    counts = token_counts(Dataset([one, two], (), None, 8), 7)
    assert counts.tolist() == [0, 0, 0, 0, 2, 1, 0]


def test_the_most_frequent_are_kept_and_of_equals_the_lower_id():
    counts = np.array([3, 9, 3, 0, 9, 1])
    assert most_frequent(counts, 3).tolist() == [0, 1, 4]
    assert most_frequent(counts, 4).tolist() == [0, 1, 2, 4]
    assert most_frequent(counts, 3, always=(3,)).tolist() == [1, 3, 4]
    assert most_frequent(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_from_conversations_to_the_same_text(tmp_path, capsys):
    root = training.write_inputs(tmp_path)
    flags = ["--target", str(root / "target"), "--data", str(root / "data.json"), "--max-length", "64"]
    out = tmp_path / "vocab.json"
    assert draft_vocab.main([*flags, "--size", "12", "--out", str(out)]) == 0
    shown = capsys.readouterr().out.splitlines()[-1]
    contents = read_json(out)
    assert (contents["vocab_size"], len(contents["ids"])) == (64, 12)
    assert 1 in contents["ids"]  # the end of text
    assert shown.startswith(f"{out}: 12 of 64 tokens, which are {contents['covered']:.2%} of {contents['counted']:,} ")
    assert 0.2 < contents["covered"] < 1
    assert draft_vocab.main([*flags, "--size", "12", "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    for size in ("0", "65"):
        assert draft_vocab.main([*flags, "--size", size, "--out", str(tmp_path / "other.json")]) == 2
        assert f"--size {size}: must be from 1 to the 64 tokens of the target" in capsys.readouterr().err
