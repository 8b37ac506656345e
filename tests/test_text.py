"""Units of infer/text.py, infer/results.py and infer/prompts.py: text while it arrives, counting, prompts to ids."""

import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from convert.tokenizer import load_tokenizer
from infer.prompts import encode, parse_ids, read_prompts
from infer.results import Generation, rounds_needed
from infer.text import find_stop, settled, tokens_until_stop
from poss_jax.errors import InputError
from tests import fixtures

# Few letters, so that stop strings do occur, overlap and repeat; \ufffd stands for bytes that are not all there.
LETTERS = "ab\ufffd"
texts = st.text(LETTERS + "c", max_size=14)
stops = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3).map(tuple)


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("the E", ("END",), "the "),
        ("the EN", ("END",), "the "),
        ("the EX", ("END",), "the EX"),
        ("aEN", ("END", "aENx"), ""),  # the longest beginning of any stop string is held back
        ("aab", ("abc",), "a"),
        ("aaa", ("aab",), "a"),
        ("caf\ufffd", (), "caf"),
        ("a\ufffdb", (), "a\ufffdb"),
        ("\ufffd\ufffd", (), ""),
        ("text", (), "text"),
        ("", ("x",), ""),
        ("x", ("y",), "x"),
        ("E", ("E",), "E"),  # one letter cannot be half there
    ],
)
def test_settled_holds_back_what_may_still_change(text, stop, shown):
    assert settled(text, stop) == shown


@given(texts, stops)
def test_text_that_is_shown_never_changes(text, stop):
    place = find_stop(text, stop)
    final = text if place is None else text[:place]
    shown = ""
    for size in range(len(text) + 1):
        if find_stop(text[:size], stop) is not None:
            break
        now = settled(text[:size], stop)
        assert now.startswith(shown)
        shown = now
    assert final.startswith(shown)


@given(st.one_of(st.text(max_size=8).map(str.encode), st.binary(max_size=12)))
def test_characters_are_shown_only_when_all_their_bytes_are_there(data):
    final = data.decode(errors="replace")
    for size in range(len(data) + 1):
        assert final.startswith(settled(data[:size].decode(errors="replace"), ()))


@pytest.mark.parametrize(
    ("text", "stop", "place"),
    [
        ("abc", (), None),
        ("abc", ("x",), None),
        ("abcabc", ("c",), 2),
        ("abc", ("c", "bc"), 1),  # the earliest, not the first one given
        ("abc", ("a",), 0),
        ("", ("a",), None),
    ],
)
def test_find_stop_gives_the_earliest_place(text, stop, place):
    assert find_stop(text, stop) == place


@given(st.lists(st.text("ab", max_size=3), min_size=1, max_size=12), stops)
def test_tokens_until_stop_is_the_fewest_tokens_that_hold_one(pieces, stop):
    def decode(ids):
        return "".join(pieces[token] for token in ids)

    ids = list(range(len(pieces)))
    assume(find_stop(decode(ids), stop) is not None)
    fewest = next(n for n in range(1, len(ids) + 1) if find_stop(decode(ids[:n]), stop) is not None)
    assert tokens_until_stop(decode, ids, stop) == fewest


@pytest.mark.parametrize(
    ("accept_lengths", "tokens", "rounds"),
    [
        ([2, 0], 1, 0),  # the first token needs no round
        ([2, 0], 2, 1),
        ([2, 0], 4, 1),
        ([2, 0], 5, 2),
        ([0, 0, 0], 3, 2),
        ([], 1, 0),
        ([5, 5], 7, 1),
        ([5, 5], 8, 2),
    ],
)
def test_rounds_needed_to_know_a_number_of_tokens(accept_lengths, tokens, rounds):
    assert rounds_needed(accept_lengths, tokens) == rounds


@pytest.mark.parametrize(
    ("accept_lengths", "rounds", "per_round"), [([4, 4, 4, 4, 0], 5, 4.2), ([0], 1, 1.0), ([], 0, None)]
)
def test_tokens_per_round_is_the_mean_of_accept_length_plus_one(accept_lengths, rounds, per_round):
    generation = Generation([0], [5], None, "eos", accept_lengths, 0.5)
    assert generation.to_json() == {
        "token_ids": [5],
        "text": None,
        "stop_reason": "eos",
        "accept_lengths": accept_lengths,
        "rounds": rounds,
        "tokens_per_round": per_round,
        "seconds": 0.5,
    }


@pytest.mark.parametrize(
    ("text", "ids"), [("0,12,20", [0, 12, 20]), ("7", [7]), (" 1, 2 ", [1, 2]), ("", []), (" ", [])]
)
def test_token_ids_from_text(text, ids):
    assert parse_ids(text) == ids


@pytest.mark.parametrize("text", ["a", "1,", ",1", "1 2", "1.5", "1,,2", "0x10"])
def test_what_is_no_list_of_token_ids_is_refused(text):
    with pytest.raises(InputError, match="token ids"):
        parse_ids(text)


@pytest.fixture(scope="module", params=[True, False], ids=["tokenizer_adds_bos", "tokenizer_adds_none"])
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    fixtures.tok(directory, auto_bos=request.param)
    return load_tokenizer(directory)


TURN = [{"role": "user", "content": "w1 w2"}]
CONVERSATION = [
    {"role": "system", "content": "w5"},
    {"role": "user", "content": "w1"},
    {"role": "assistant", "content": "w2"},
    {"role": "user", "content": "w3"},
]


@pytest.mark.parametrize(
    ("prompt", "system", "ids"),
    [
        ("w1 w2", None, [0, 2, 7, 3, 9, 11, 12, 1, 2, 8, 3, 9]),
        (TURN, None, [0, 2, 7, 3, 9, 11, 12, 1, 2, 8, 3, 9]),
        (TURN, "w0", [0, 2, 6, 3, 9, 10, 1, 2, 7, 3, 9, 11, 12, 1, 2, 8, 3, 9]),
        (
            CONVERSATION,
            None,
            [0] + [2, 6, 3, 9, 15, 1] + [2, 7, 3, 9, 11, 1] + [2, 8, 3, 9, 12, 1] + [2, 7, 3, 9, 13, 1] + [2, 8, 3, 9],
        ),
    ],
)
def test_chat_prompts_begin_with_one_bos_whether_or_not_the_tokenizer_adds_it(tokenizer, prompt, system, ids):
    assert encode(tokenizer, prompt, raw=False, system=system) == ids


def test_encoding_leaves_the_messages_as_they_were(tokenizer):
    messages = [dict(message) for message in TURN]
    encode(tokenizer, messages, raw=False, system="w0")
    assert messages == TURN


def test_raw_text_gets_the_special_tokens_that_the_tokenizer_adds(tokenizer):
    added = [0] if tokenizer("").input_ids else []
    assert encode(tokenizer, "w1 w2", raw=True, system=None) == [*added, 11, 12]


def test_raw_text_that_begins_with_bos_gets_no_second_one(tokenizer):
    assert encode(tokenizer, "<|begin_of_text|>w1", raw=True, system=None) == [0, 11]


@pytest.mark.parametrize("ids", [[0, 12, 20], [1, 1, 0]])
def test_token_ids_are_taken_as_they_are(tokenizer, ids):
    assert encode(tokenizer, ids, raw=False, system=None) == ids
    assert encode(None, ids, raw=False, system=None) == ids


@pytest.mark.parametrize(
    ("prompt", "raw", "system", "message"),
    [
        ("", False, None, "empty"),
        (" \n", True, None, "empty"),
        (TURN, True, None, "--raw"),
        ("w1", True, "w2", "--system"),
        ([0, 12], True, None, "--raw is for text; token ids are taken as they are"),
        ([0, 12], False, "w2", "--system is for text; token ids are taken as they are"),
        ([0, 12], False, "", "--system is for text; token ids are taken as they are"),
    ],
)
def test_prompts_that_cannot_be_encoded_are_refused(tokenizer, prompt, raw, system, message):
    with pytest.raises(InputError, match=message):
        encode(tokenizer, prompt, raw=raw, system=system)


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(InputError, match="no tokenizer"):
        encode(None, "w1", raw=False, system=None)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template.*--raw"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template"),
    ],
)
def test_a_template_that_is_missing_or_refuses_is_said(tmp_path, template, message):
    fixtures.tok(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": template}
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        encode(load_tokenizer(tmp_path), "w1", raw=False, system=None)


def test_prompt_file_holds_texts_messages_turns_and_ids(tmp_path):
    path = tmp_path / "prompts.jsonl"
    records = [
        {"prompt": "w1 w2", "question_id": 81},
        {"messages": CONVERSATION},
        {"turns": ["w1", "w2"]},
        {"prompt_ids": [0, 5]},
    ]
    path.write_text("\n\n".join(map(json.dumps, records)) + "\n \n")
    assert read_prompts(str(path)) == ["w1 w2", CONVERSATION, "w1", [0, 5]]


@given(st.text(min_size=1, max_size=10))
def test_prompt_file_gives_every_text_back(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any_text.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(str(path)) == [text]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_unicode_line_separators_do_not_end_a_json_line(tmp_path, separator):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": f"a{separator}b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(str(path)) == [f"a{separator}b"]


def test_windows_line_ends_are_fine(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert read_prompts(str(path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "prompt, messages, turns, prompt_ids"),
        ('"text"', "prompt, messages, turns, prompt_ids"),
        ('{"text": "a"}', "prompt, messages, turns, prompt_ids"),
        ('{"prompt": 5}', "prompt has the wrong form"),
        ('{"prompt": ["a"]}', "prompt has the wrong form"),
        ('{"turns": []}', "turns"),
        ('{"turns": "a"}', "turns"),
        ('{"turns": [{"role": "user"}]}', "turns has the wrong form"),
        ('{"messages": "a"}', "messages has the wrong form"),
        ('{"messages": [{"role": "user"}]}', "messages has the wrong form"),
        ('{"messages": [{"content": "a"}]}', "messages has the wrong form"),
        ('{"messages": [{"role": "user", "content": 5}]}', "messages has the wrong form"),
        ('{"prompt_ids": "0,1"}', "prompt_ids has the wrong form"),
        ('{"prompt_ids": [0, 1.5]}', "prompt_ids has the wrong form"),
        ('{"prompt_ids": [true]}', "prompt_ids has the wrong form"),
        ("[" * 20_000, "not JSON"),
    ],
)
def test_broken_line_is_refused_with_its_number(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(InputError, match=f"prompts.jsonl, line 2: .*{message}"):
        read_prompts(str(path))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
def test_prompt_file_without_prompts_or_not_text_is_refused(tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match="prompts.jsonl"):
        read_prompts(str(path))


@pytest.mark.parametrize("code", [0xDCFF, 0xD800], ids=["byte that is not UTF-8", "lone surrogate"])
def test_text_that_is_not_unicode_is_refused(tokenizer, code):
    text = "w1 " + chr(code)
    for prompt in (text, [{"role": "user", "content": text}]):
        with pytest.raises(InputError, match="the prompt is not valid Unicode"):
            encode(tokenizer, prompt, raw=False, system=None)


@pytest.mark.parametrize(
    "ids", [(0, 12, 20), np.array([0, 12, 20]), [np.int64(0), np.int32(12), 20]], ids=["tuple", "array", "numpy ints"]
)
def test_token_ids_of_any_whole_numbers_are_taken(ids):
    taken = encode(None, ids, raw=False, system=None)
    assert taken == [0, 12, 20]
    assert {type(token) for token in taken} == {int}


@pytest.mark.parametrize("prompt", [3, [1.5], [None], {"role": "user"}], ids=repr)
def test_prompts_of_no_known_form_are_refused(prompt):
    with pytest.raises(InputError, match="a prompt is a text, a list of messages or a list of token ids"):
        encode(None, prompt, raw=False, system=None)


def test_ids_of_thousands_of_digits_are_refused(tmp_path):
    with pytest.raises(InputError, match="must be whole numbers"):
        parse_ids("9" * 5000)
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [%s]}\n' % ("9" * 5000))
    with pytest.raises(InputError, match="line 1: not JSON"):
        read_prompts(str(tmp_path / "prompts.jsonl"))
