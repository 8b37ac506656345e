"""Where a text ends, and what state a generation leaves behind (none)."""

import dataclasses

import jax
import numpy as np
import pytest

from infer import Generator
from infer.batch import bucket
from tests import fixtures
from tests.overfit import overfit
from tests.test_lossless import GREEDY, PROMPT, prompt_of
from tests.test_program import batch_of, compilations

TREE = {"levels": 5, "total_nodes": 12, "draft_top_k": 2}
CHAIN = {"levels": 5, "total_nodes": 6, "draft_top_k": 1}
P60 = [41, 10, 5, 42, 41, 22, 1, 21, 52, 16, 41, 35, 49, 57, 52, 19, 11, 52, 32, 57]  # known_bugs.md G06


@pytest.fixture(scope="module")
def fitted(models, tmp_path_factory):
    """The tiny target with a drafter that knows its answer to PROMPT by heart."""
    draft = overfit(tmp_path_factory.mktemp("fitted") / "draft", str(models / "tiny63"), PROMPT, 40)
    return Generator.from_pretrained(str(models / "tiny63"), str(draft))


def test_the_overfitted_drafter_is_accepted_in_full(fitted):
    (answer,) = fitted.generate([PROMPT], max_new_tokens=30, ignore_eos=True, **CHAIN)
    assert answer.token_ids == GREEDY
    assert answer.accept_lengths == [5, 5, 5, 5, 5]
    assert answer.tokens_per_round == 6.0


def test_g04_nothing_follows_an_eos_that_is_accepted_inside_a_block(fitted):
    (answer,) = fitted.generate([PROMPT], max_new_tokens=30, eos_ids=(29,), **CHAIN)
    assert answer.token_ids == [41, 53, 5, 41, 53, 29]
    assert answer.stop_reason == "eos"
    assert answer.accept_lengths == [5]  # as the round had it


@pytest.mark.parametrize("place", range(14))
def test_an_eos_stops_at_every_place_of_a_block(fitted, place):
    first = GREEDY.index(GREEDY[place])
    (answer,) = fitted.generate([PROMPT], max_new_tokens=30, eos_ids=(GREEDY[place],), **CHAIN)
    assert answer.token_ids == GREEDY[: first + 1]
    assert answer.stop_reason == "eos"


@pytest.mark.parametrize("new", [1, 2, 3, 6, 7, 8, 13, 30])
def test_g05_exactly_max_new_tokens(fitted, new):
    (answer,) = fitted.generate([PROMPT], max_new_tokens=new, ignore_eos=True, **CHAIN)
    assert answer.token_ids == GREEDY[:new]
    assert answer.stop_reason == "max_new_tokens"
    assert answer.rounds == -(-(new - 1) // 6)  # the first token needs no round, each round makes six known


def test_one_token_needs_no_round_and_has_no_rate(fitted):
    (answer,) = fitted.generate([PROMPT], max_new_tokens=1, ignore_eos=True, **CHAIN)
    assert (answer.rounds, answer.tokens_per_round) == (0, None)


def test_an_eos_as_the_very_first_token(fitted):
    (answer,) = fitted.generate([PROMPT], max_new_tokens=30, eos_ids=(41,), **CHAIN)
    assert (answer.token_ids, answer.stop_reason, answer.rounds) == ([41], "eos", 0)


@pytest.mark.parametrize("room", [1, 2, 7, 29])
def test_the_context_ends_a_text(fitted, room):
    (answer,) = fitted.generate([PROMPT], max_new_tokens=30, max_length=4 + room, ignore_eos=True, **CHAIN)
    assert answer.token_ids == GREEDY[:room]
    assert answer.stop_reason == "context"


def test_the_targets_own_context_ends_a_text(tiny):
    prompt = prompt_of(250)
    (answer,) = tiny.generate([prompt], max_new_tokens=50, ignore_eos=True, **TREE)
    (plain,) = tiny.generate([prompt], max_new_tokens=50, ignore_eos=True, plain=True)
    assert len(answer.token_ids) == 6
    assert answer.token_ids == plain.token_ids
    assert answer.stop_reason == plain.stop_reason == "context"


def test_the_last_token_may_be_an_eos_and_then_that_is_the_reason(fitted):
    (answer,) = fitted.generate([PROMPT], max_new_tokens=6, eos_ids=(29,), **CHAIN)
    assert (answer.token_ids, answer.stop_reason) == (GREEDY[:6], "eos")


def test_g06_prompts_longer_than_the_drafts_max_position(models, tmp_path):
    """Rotary angles go on past it: the trees are those of the same drafter declared for 256 positions."""
    config = fixtures.tiny(tmp_path / "target", eos_token_id=63)
    answers = []
    for limit in (32, 256):
        fixtures.draft(tmp_path / f"draft{limit}", config, 2, max_position_embeddings=limit)
        generator = Generator.from_pretrained(str(tmp_path / "target"), str(tmp_path / f"draft{limit}"), spans=(2, 2))
        answers += generator.generate([prompt_of(60)], max_new_tokens=20, trace=True, **TREE)
    assert answers[0].token_ids == answers[1].token_ids == P60
    assert answers[0].trace == answers[1].trace


def test_g07_nothing_leaks_from_one_call_into_the_next(models):
    def fresh() -> Generator:
        return Generator.from_pretrained(str(models / "tiny63"), str(models / "draft2"), spans=(2, 2))

    def answer(generator, prompt):
        (result,) = generator.generate([prompt], max_new_tokens=20, trace=True, **TREE)
        return dataclasses.replace(result, seconds=0.0, compile_seconds=0.0)

    used = fresh()
    long, short = prompt_of(60), PROMPT
    in_turn = [answer(used, prompt) for prompt in (long, short, long)]
    assert in_turn == [answer(fresh(), prompt) for prompt in (long, short, long)]  # bit-equal, trees included
    assert in_turn[0].token_ids == P60


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_g18_batch_rows_do_not_change_each_other(tiny, order):
    """Prompts of different length, of which one finishes early."""
    prompts = [prompt_of(4), prompt_of(17), prompt_of(33)]
    options = {"max_new_tokens": 20, "eos_ids": (57,), "trace": True, **TREE}
    alone = [tiny.generate([prompt], **options)[0] for prompt in prompts]
    assert [len(answer.token_ids) for answer in alone] == [20, 2, 7]
    together = tiny.generate([prompts[row] for row in order], batch_size=3, **options)
    for row, answer in zip(order, together, strict=True):
        assert answer.token_ids == alone[row].token_ids
        assert answer.accept_lengths == alone[row].accept_lengths
        assert answer.stop_reason == alone[row].stop_reason


def test_a_last_batch_that_is_not_full(tiny):
    prompts = [prompt_of(4), prompt_of(9), prompt_of(12)]
    alone = tiny.generate(prompts, max_new_tokens=12, **TREE)
    paired = tiny.generate(prompts, max_new_tokens=12, batch_size=2, **TREE)
    assert [answer.token_ids for answer in paired] == [answer.token_ids for answer in alone]


def test_g18_the_cache_follows_the_request_and_not_the_config(tmp_path):
    fixtures.tiny(tmp_path, max_position_embeddings=131072)
    batch = batch_of(Generator.from_pretrained(str(tmp_path)), [prompt_of(10)], max_new_tokens=8)
    batch.start()
    assert batch.state.target_caches[0].keys.shape[2] <= 64
    assert sum(x.nbytes for x in jax.tree.leaves(batch.state.target_caches)) < 100_000


@pytest.mark.parametrize(
    ("length", "width"), [(1, 16), (16, 16), (17, 32), (300, 512), (512, 512), (513, 1024), (1025, 1536)]
)
def test_buckets(length, width):
    assert bucket(length) == width


def test_seeds_one_for_each_prompt(tiny):
    prompt = prompt_of(9)
    options = {"max_new_tokens": 12, "temperature": 1.0, **TREE}
    both = tiny.generate([prompt, prompt], seeds=(1, 2), batch_size=2, **options)
    singly = [tiny.generate([prompt], seed=seed, **options)[0] for seed in (1, 2)]
    assert [answer.token_ids for answer in both] == [answer.token_ids for answer in singly]
    assert both[0].token_ids != both[1].token_ids


def test_unknown_options_are_refused(tiny):
    with pytest.raises(TypeError, match="unknown option 'max_tokens'"):
        tiny.generate([PROMPT], max_tokens=3)


def test_results_are_plain_python(tiny):
    (answer,) = tiny.generate([PROMPT], max_new_tokens=5, **TREE)
    assert all(type(token) is int for token in answer.token_ids)
    assert all(type(length) is int for length in answer.accept_lengths)
    assert not isinstance(answer.seconds, np.generic)


def test_a_large_tree_is_attended_in_chunks(fitted):
    """1,024 nodes: more query rows than one chunk of attention takes."""
    (answer,) = fitted.generate(
        [PROMPT], max_new_tokens=12, ignore_eos=True, levels=12, total_nodes=1024, draft_top_k=10
    )
    assert answer.token_ids == GREEDY[:12]


@pytest.fixture(scope="module")
def words(models, fitted, tmp_path_factory):
    """The fitted drafter's target with a tokenizer: id 10 + n is the word wn."""
    directory = tmp_path_factory.mktemp("words")
    fixtures.tiny(directory, eos_token_id=63)
    fixtures.tok(directory)
    tokenizer = Generator.from_pretrained(str(directory)).tokenizer
    return Generator(dataclasses.replace(fitted.models, tokenizer=tokenizer))


@pytest.mark.parametrize("plain", [False, True], ids=["drafted", "plain"])
def test_of_overlapping_stop_strings_the_one_completed_first_decides(words, plain):
    """The longer string begins earlier, but is complete later: a block that holds both must not see it."""
    stop = ("w43 w31 w43 w19 w4", "w43 w19")
    (answer,) = words.generate([PROMPT], max_new_tokens=30, ignore_eos=True, stop=stop, plain=plain, **CHAIN)
    assert answer.stop_reason == "stop_string"
    assert answer.text == "w31 w43 w31 "
    assert answer.token_ids == GREEDY[:6]


def test_a_row_that_the_host_stops_compiles_nothing_and_leaves_the_others_alone(words):
    options = {"max_new_tokens": 20, "ignore_eos": True, "batch_size": 2, **CHAIN}
    prompts = [PROMPT, prompt_of(9)]
    (alone,) = words.generate([prompts[1]], **options)
    words.generate(prompts, **options)  # compiles the programs of this batch
    with compilations() as compiled:
        first, second = words.generate(prompts, stop=("w43 w19",), **options)
    assert compiled == []
    assert (first.stop_reason, second.stop_reason) == ("stop_string", "max_new_tokens")
    assert second.token_ids == alone.token_ids
