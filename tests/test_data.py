"""Training data: reading, cleaning, masks, batches. Known bugs G11, G12 and the data half of G13."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.tokenizer import load_tokenizer
from poss_jax.errors import InputError
from tests import fixtures, golden_data
from train import conversations as reasons
from train.conversations import DataSource, Dropped, parse_sources, read_records
from train.data import (
    REFUSED,
    REWRITTEN,
    Encoder,
    Pending,
    load_dataset,
    main,
    supervised_rows,
)
from train.examples import NO_REPLY_LEFT, Dataset, Example
from train.packing import Batches
from train.store import write_prepared

BOS, EOT, START, END, SYSTEM, USER, ASSISTANT, BREAK = 0, 1, 2, 3, 6, 7, 8, 9

# In every turn of this one the user says w40 and higher, and the assistant lower ones.
TURNS = [
    {"from": "system", "value": "w40"},
    {"from": "human", "value": "w41"},
    {"from": "gpt", "value": "w2 w3"},
    {"from": "human", "value": "w44 w42"},
    {"from": "gpt", "value": "w5"},
    {"from": "human", "value": "w46"},
    {"from": "gpt", "value": "w7 w8 w9"},
]
TOKENS = [BOS, START, SYSTEM, END, BREAK, 50, EOT]
TOKENS += [START, USER, END, BREAK, 51, EOT, START, ASSISTANT, END, BREAK, 12, 13, EOT]
TOKENS += [START, USER, END, BREAK, 54, 52, EOT, START, ASSISTANT, END, BREAK, 15, EOT]
TOKENS += [START, USER, END, BREAK, 56, EOT, START, ASSISTANT, END, BREAK, 17, 18, 19, EOT]
REPLIES = [12, 13, EOT, 15, EOT, 17, 18, 19, EOT]
SUPERVISED_ROWS = [15, 16, 17, 29, 30, 41, 42, 43, 44]
ONE_SOURCE = (DataSource("a"),)
GOOD = {"id": "6", "conversations": TURNS}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tok")
    fixtures.tok(directory)
    return load_tokenizer(directory)


def write(path, records) -> str:
    path.write_text(json.dumps(records))
    return str(path)


def load(path, tokenizer, **options) -> Dataset:
    return load_dataset([DataSource(str(path))], tokenizer, **options)


def predicted(example: Example) -> list[int]:
    """Tokens whose law the supervised rows predict, where they are there."""
    rows = np.flatnonzero(example.supervised)
    return [int(example.tokens[row + 2]) for row in rows if row + 2 < len(example.tokens)]


def random_dataset(lengths, max_length: int, sources=ONE_SOURCE) -> Dataset:
    examples = []
    for number, length in enumerate(lengths):
        tokens = np.full(length, number + 1, np.int32)
        examples.append(Example(tokens, np.arange(length) < length - 1, number % len(sources), number))
    return Dataset(examples, tuple(sources), reasons.Summary(), max_length)


@pytest.mark.parametrize("auto_bos", [True, False])
def test_g11_one_beginning_and_the_same_mask_whether_the_tokenizer_adds_it_or_not(tmp_path, auto_bos):
    fixtures.tok(tmp_path, auto_bos=auto_bos)
    dataset = load(write(tmp_path / "d.json", [GOOD]), load_tokenizer(tmp_path))
    (example,) = dataset.examples
    assert example.tokens.tolist() == TOKENS
    assert np.flatnonzero(example.supervised).tolist() == SUPERVISED_ROWS
    assert predicted(example) == REPLIES


def test_g12_dirty_records_are_counted_by_reason_and_stop_nothing(tmp_path, tokenizer):
    user, reply = {"from": "human", "value": "w41"}, {"from": "gpt", "value": "w1"}
    records = [
        {"id": "1", "conversations": []},
        {"id": "2", "conversations": [{"from": "gpt", "value": "w9"}, user, reply]},
        {"id": "3", "conversations": [{"from": "human", "value": "w42"}, {"from": "bing", "value": "w3"}]},
        {"id": "4", "conversations": [{"value": "w43"}, {"from": "gpt", "value": "w2"}]},
        {"id": "5", "conversations": [user, user]},
        GOOD,
        GOOD,
        "text",
        {"from": "bing"},
        {"conversations": "w1"},
        {"conversations": [{"from": "human", "value": "\ud83d"}, reply]},
        {"conversations": [{"from": "human", "value": None}, reply]},
        {"conversations": [{"from": "gpt", "value": "w2"}]},
        {"conversations": [{"from": "human", "value": "w48"}, reply, {"from": "human", "value": " "}, reply]},
        {"conversations": [{"from": "human", "value": "w49"}, reply, user]},
        {"conversations": [{"from": "human", "value": "w50"}, reply, {"from": "tool", "value": "w3"}, user]},
        {"text": " "},
    ]
    dataset = load(write(tmp_path / "d.json", records), tokenizer)
    alone = load(write(tmp_path / "good.json", [GOOD]), tokenizer).examples[0]
    assert [example.record for example in dataset.examples] == [1, 2, 5, 13, 14, 15]
    np.testing.assert_array_equal(dataset.examples[2].tokens, alone.tokens)
    np.testing.assert_array_equal(dataset.examples[2].supervised, alone.supervised)
    assert predicted(dataset.examples[0]) == [11, EOT]
    summary = dataset.summary
    assert (summary.read, summary.kept) == (len(records), 6)
    assert summary.dropped_records == {
        reasons.EMPTY: 1,
        reasons.NO_ROLE: 1,
        reasons.NO_REPLY: 1,
        reasons.DUPLICATE: 1,
        reasons.NOT_OBJECT: 1,
        reasons.NO_FIELD: 2,
        reasons.NOT_UNICODE: 1,
        reasons.NO_CONTENT: 1,
        reasons.NO_USER: 1,
        reasons.BLANK_TEXT: 1,
    }
    assert summary.dropped_turns == {
        reasons.LEAD: 1,
        reasons.BLANK: 2,
        reasons.DANGLING: 1,
        reasons.UNKNOWN_ROLE: 2,
    }
    assert f"records dropped: {reasons.DUPLICATE}" in str(summary)


def test_golden_loss_mask():
    batch = golden_data.tensors("training/hass")
    for mask, real in zip(batch["loss_mask"], batch["attention_mask"], strict=True):
        length, first = int(real.sum()), int(mask.argmax())
        in_reply = np.arange(length + 1) >= first + 2  # the text goes on behind the batch
        np.testing.assert_array_equal(mask[:length].astype(bool), supervised_rows(in_reply, length))
        assert not mask[length:].any()


WORDS = st.lists(st.integers(0, 39), min_size=1, max_size=5)


@given(
    system=st.booleans(),
    turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4),
    max_length=st.integers(3, 60),
    dangling=st.booleans(),
)
def test_exactly_the_replies_are_supervised(tokenizer, system, turns, max_length, dangling):
    """Users say w40 to w53 and assistants the others, so tokens tell who speaks."""
    messages = [{"role": "system", "content": "w53"}] if system else []
    for said, answered in turns:
        messages.append({"role": "user", "content": " ".join(f"w{40 + word % 14}" for word in said)})
        messages.append({"role": "assistant", "content": " ".join(f"w{word}" for word in answered)})
    messages += [{"role": "user", "content": "w40"}] * dangling
    (whole,), (cut,) = encode(tokenizer, messages, 1000), encode(tokenizer, messages, max_length)
    expected = [token for _, answered in turns for token in [*(10 + word for word in answered), EOT]]
    assert predicted(whole) == expected
    assert not whole.supervised[-1]
    if cut is None:
        assert not whole.supervised[: max_length - 1].any()
        return
    np.testing.assert_array_equal(cut.tokens, whole.tokens[:max_length])
    last = min(max_length, len(whole.tokens)) - 1
    np.testing.assert_array_equal(cut.supervised[:last], whole.supervised[:last])
    assert not cut.supervised[last]


def encode(tokenizer, messages, max_length, template=None):
    """The example of one conversation, or None."""
    encoder = Encoder(tokenizer, max_length, template)
    pending = Pending(encoder.render(messages), messages, 0)
    return list(encoder.encode([pending], reasons.Summary())) or [None]


CHAT = [
    {"role": "user", "content": "w41"},
    {"role": "assistant", "content": " w2 w3 "},
    {"role": "user", "content": "w42"},
    {"role": "assistant", "content": "w4"},
]
# No prompt for a generation, no special token around turns.
BARE = (
    "{% for m in messages %}{{ 'user ' if m.role == 'user' else 'assistant ' }}{{ m.content | trim }}"
    "{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}"
)
# As ChatML: a line break behind the end of turn. The generation's prompt has more than turns have.
BREAKS = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content | trim }}<|eot_id|>\n\n"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>w53 {% endif %}"
)


@pytest.mark.parametrize("template", [None, BARE, BREAKS])
def test_any_template(tokenizer, template):
    (example,) = encode(tokenizer, CHAT, 100, template)
    assert predicted(example) == [12, 13, EOT, 14, EOT]


# As Phi-3's: the end of sequence behind every text that is no prompt.
CLOSED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# As Qwen3's: only the last turn has thoughts.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ '<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' }}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "replies", "spans"),
    [
        (CLOSED, ["w0 w2"], ["w0 w2<|end|>"]),
        (CLOSED, ["w0 w2", "w1 w2"], ["w0 w2<|end|>", "w1 w2<|end|>"]),
        (THINKING, ["w3"], ["<think>\n\n</think>\n\nw3<|im_end|>"]),
        (THINKING, ["w1 w2", "w3"], ["w1 w2<|im_end|>", "<think>\n\n</think>\n\nw3<|im_end|>"]),
        (THINKING, ["w1", "w1", "w1"], ["w1<|im_end|>"] * 2 + ["<think>\n\n</think>\n\nw1<|im_end|>"]),
        # Replies that stand in the template's own words too.
        (THINKING, ["end", "think"], ["end<|im_end|>", "<think>\n\n</think>\n\nthink<|im_end|>"]),
        (THINKING, ["<think>", "w3"], ["<think><|im_end|>", "<think>\n\n</think>\n\nw3<|im_end|>"]),
    ],
)
def test_templates_of_supported_targets_keep_every_conversation(tmp_path, tokenizer, template, replies, spans):
    messages = []
    for number, reply in enumerate(replies):
        messages += [{"role": "user", "content": f"w4{number} w50 w51"}, {"role": "assistant", "content": reply}]
    encoder = Encoder(tokenizer, 1000, template)
    text = encoder.render(messages)
    assert [text[start:end] for start, end in encoder.reply_spans(messages, text, len(text))] == spans
    path = write(tmp_path / "d.json", [{"messages": messages}])
    assert load(path, tokenizer, chat_template=template).summary.dropped_records == {}


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }} {% for m in messages %}{{ m.content }} {% endfor %}",  # reorders
        "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else 'w9' }} {% endfor %}",  # rewrites
        "{% for m in messages %}{{ m.content | upper }} {% endfor %}",
        # Finished turns get something before the reply, or behind it, or lose their beginning.
        "{% for m in messages %}{{ '' if loop.last else 'w9 ' }}{{ m.content }} {% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ '' if loop.last else ' w9' }}<|eot_id|>{% endfor %}",
        "{% for m in messages %}{{ m.content | trim if loop.last else m.content | replace('w2', '') }} {% endfor %}",
    ],
)
def test_templates_that_alter_turns_are_found_out(tmp_path, tokenizer, template):
    path = write(tmp_path / "d.json", [{"messages": CHAT}, {"text": "w1 w2 w3"}])
    dataset = load(path, tokenizer, chat_template=template)
    assert dataset.summary.dropped_records == {REWRITTEN: 1}
    assert dataset.examples[0].record == 1


def test_a_template_that_refuses_is_counted(tmp_path, tokenizer):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + BARE
    path = write(tmp_path / "d.json", [GOOD, {"messages": CHAT}])
    dataset = load(path, tokenizer, chat_template=refusing)
    assert dataset.summary.dropped_records == {f"{REFUSED} (no system role)": 1}


def test_text_is_supervised_everywhere_and_truncation_is_counted(tmp_path, tokenizer):
    lines = [{"text": "w1 w2 w3 w4"}, {"text": "<|begin_of_text|>w1 w2"}, {"text": "w1 w2 w3 w4 w5 w6"}]
    dataset = load(write(tmp_path / "d.json", lines), tokenizer, max_length=5)
    assert [example.tokens.tolist() for example in dataset.examples] == [
        [0, 11, 12, 13, 14],
        [0, 11, 12],
        [0, 11, 12, 13, 14],
    ]
    assert [example.supervised.sum() for example in dataset.examples] == [4, 2, 4]
    assert dataset.summary.truncated == 1
    long = write(tmp_path / "long.json", [GOOD, *lines])
    short = load(long, tokenizer, max_length=18)
    assert np.flatnonzero(short.examples[0].supervised).tolist() == [15, 16]  # row 16: token 18 was cut off, row 17 too
    assert load(long, tokenizer, max_length=12).summary.dropped_records == {NO_REPLY_LEFT: 1}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_that_is_cut_off_or_broken(tmp_path, indent):
    whole = json.dumps([GOOD, {"text": "w1"}, GOOD], indent=indent)
    path = tmp_path / "cut.json"
    for cut in (3, 10, len(whole) // 4):
        path.write_text(whole[:-cut])
        assert list(read_records(str(path))) == [GOOD, {"text": "w1"}, reasons.Unreadable(reasons.NOT_JSON)]
    path.write_text(whole.replace('"text":', '"text"'))
    after = [GOOD] if indent else []
    assert list(read_records(str(path))) == [GOOD, reasons.Unreadable(reasons.NOT_JSON), *after]
    path.write_bytes(json.dumps([{"text": "é"}], ensure_ascii=False).encode()[:-4])
    assert list(read_records(str(path))) == [reasons.Unreadable(reasons.NOT_JSON)]


def test_more_records_than_are_encoded_together(tmp_path, tokenizer):
    records = [{"text": f"w{number % 50} w{number // 50}"} for number in range(600)]
    dataset = load(write(tmp_path / "d.json", records), tokenizer)
    assert [example.record for example in dataset.examples] == list(range(600))
    assert [example.tokens[2] for example in dataset.examples] == [10 + number // 50 for number in range(600)]
    assert load(tmp_path / "d.json", tokenizer, records=300).summary.read == 300


def test_forms_of_files(tmp_path, tokenizer):
    import datasets

    lines = "\n".join([json.dumps(GOOD), "{broken", json.dumps({"text": "w1\u2028w2"}, ensure_ascii=False), ""])
    (tmp_path / "a.jsonl").write_text(lines)
    broken = reasons.Unreadable(reasons.NOT_JSON)
    assert list(read_records(str(tmp_path / "a.jsonl"))) == [GOOD, broken, {"text": "w1\u2028w2"}]
    write(tmp_path / "b.json", GOOD)
    assert list(read_records(str(tmp_path / "b.json"))) == [GOOD]
    (tmp_path / "b.json").write_text(json.dumps(GOOD, indent=1))
    assert list(read_records(str(tmp_path / "b.json"))) == [GOOD]
    records = [{"conversations": TURNS, "text": None}, {"conversations": None, "text": "w1 w2"}]
    table = datasets.Dataset.from_list(records)
    table.to_parquet(tmp_path / "c.parquet")
    dataset = load(tmp_path / "c.parquet", tokenizer)
    assert [example.tokens.tolist() for example in dataset.examples] == [TOKENS, [0, 11, 12]]
    together = load(tmp_path, tokenizer)  # the directory: the same conversation in three files
    assert together.summary.dropped_records == {reasons.DUPLICATE: 2, reasons.NOT_JSON: 1}
    parts = [{"type": "text", "text": "w41"}]
    path = write(tmp_path / "d.json", [{"messages": [{"role": "user", "content": parts}, *CHAT[1:]]}])
    assert predicted(load(path, tokenizer).examples[0]) == [12, 13, EOT, 14, EOT]


def test_sources_and_weights(tmp_path):
    (tmp_path / "a.json:0.5").touch()
    assert parse_sources([str(tmp_path / "a.json:0.5")])[0].weight is None
    assert parse_sources(["a.json:0.5", "org/set:2"]) == [DataSource("a.json", 0.5), DataSource("org/set", 2.0)]
    for wrong in (["a.json:0"], ["a.json:nan"], ["a.json:-1"], ["a.json:1", "b.json"], []):
        with pytest.raises(InputError):
            parse_sources(wrong)
    # 90 examples of a, 30 of b in shares 3:3, so an epoch has 30 of each and the second has other ones of a.
    dataset = random_dataset([8] * 120, 32, (DataSource("a", 3.0), DataSource("b", 3.0)))
    examples = [dataset.examples[i] for i in range(120)]
    examples = [Example(e.tokens, e.supervised, 0 if e.record < 90 else 1, e.record) for e in examples]
    batches = Batches(Dataset(examples, dataset.sources, dataset.summary, 32), 4, packing="none")
    epochs = [
        {number for index in range(batches.count(epoch)) for row in batches.members(epoch, index) for number in row}
        for epoch in range(3)
    ]
    assert [(len(epoch), len([n for n in epoch if n < 90])) for epoch in epochs] == [(60, 30)] * 3
    assert set.union(*epochs) == set(range(120))


def test_g13_number_of_batches():
    batches = Batches(random_dataset([5] * 100, 64), 4, packing="none")
    assert (batches.count(0), batches.total(2)) == (25, 50)
    stream = batches.start()
    seen = [next(stream) for _ in range(50)]
    assert stream.position["epoch"] == 1
    for epoch in (seen[:25], seen[25:]):
        assert sorted(int(token) for batch in epoch for token in batch.tokens[:, 0]) == list(range(1, 101))
    assert Batches(random_dataset([5] * 101, 64), 4, packing="none").total(2) == 52


def test_packed_steps_are_at_least_nine_tenths_real():
    lengths = np.random.default_rng(3).integers(4, 257, 600)
    dataset = random_dataset(lengths, 256)
    batches = Batches(dataset, 8)
    steps = [batches.batch(0, index) for index in range(batches.count(0))]
    assert min(step.real_tokens / step.tokens.size for step in steps) >= 0.9
    met = set()
    for step in steps:
        arrays = (step.tokens, step.segments, step.offsets, step.supervised)
        assert [array.dtype for array in arrays] == ["int32"] * 4
        assert {array.shape for array in arrays} == {(8, 256)}
        for row in range(8):
            for segment in range(1, step.segments[row].max() + 1):
                place = step.segments[row] == segment
                example = dataset.examples[int(step.tokens[row][place][0]) - 1]
                met.add(example.record)
                np.testing.assert_array_equal(step.tokens[row][place], example.tokens)
                np.testing.assert_array_equal(step.offsets[row][place], np.arange(len(example.tokens)))
                np.testing.assert_array_equal(step.supervised[row][place], example.supervised)
        assert not step.supervised[step.segments == 0].any()
    assert met == set(range(600))


@pytest.mark.parametrize("packing", ["rows", "none"])
def test_batches_depend_on_seed_and_epoch_only_and_go_on_after_a_resume(packing):
    lengths = np.random.default_rng(5).integers(3, 60, 70)
    batches = Batches(random_dataset(lengths, 64), 4, packing=packing, seed=7)
    stream = batches.start()
    first = [next(stream).tokens for _ in range(batches.count(0) - 1)]
    position = json.loads(json.dumps(stream.position))
    following = [next(stream).tokens for _ in range(5)]  # into the second epoch
    again = Batches(random_dataset(lengths, 64), 4, packing=packing, seed=7).start(position)
    np.testing.assert_array_equal(following, [next(again).tokens for _ in range(5)])
    assert not np.array_equal(first[0], batches.batch(1, 0).tokens)
    other = Batches(random_dataset(lengths, 64), 4, packing=packing, seed=8)
    assert not np.array_equal(first[0], other.batch(0, 0).tokens)
    with pytest.raises(InputError, match="cannot resume"):
        other.start(position)


def test_few_examples_leave_empty_rows_and_names_tell_where_batches_come_from():
    batches = Batches(random_dataset([5, 6], 64), 4)
    assert batches.count(0) == 1
    assert sorted(batches.batch(0, 0).segments.max(axis=1)) == [0, 0, 0, 2]
    assert "a, record 1" in batches.describe(0, 0)
    for options in ({"batch_size": 0}, {"batch_size": 1, "packing": "bad"}, {"batch_size": 1, "seed": -1}):
        with pytest.raises(InputError):
            Batches(random_dataset([5], 64), **options)


def test_split_holds_out_what_the_seed_picks():
    dataset = random_dataset([5] * 20, 64)
    rest, held = dataset.split(4, seed=1)
    assert (len(rest.examples), len(held.examples)) == (16, 4)
    assert {e.record for e in rest.examples} | {e.record for e in held.examples} == set(range(20))
    with pytest.raises(InputError):
        dataset.split(20)


def test_show(tmp_path, capsys):
    fixtures.tok(tmp_path)
    arguments = ["show", "--target", str(tmp_path), "--data"]
    assert main([*arguments, write(tmp_path / "d.json", [GOOD])]) == 0
    out = capsys.readouterr().out
    assert out.count("[[") == 3
    assert "[[w2 w3 <|eot_id|>]]" in out
    assert "examples kept" in out
    template = tmp_path / "t.jinja"
    template.write_text(BARE)
    assert main([*arguments, str(tmp_path / "d.json"), "--chat-template", str(template), "--count", "1"]) == 0
    capsys.readouterr()
    write(tmp_path / "empty.json", [])
    (tmp_path / "bad.parquet").write_text("no")
    for data in ("none.json", "empty.json", "bad.parquet", "t.jinja"):
        assert main([*arguments, str(tmp_path / data)]) == 2
        error = capsys.readouterr().err.strip().split("\n")[-1]
        assert error.startswith("error: ")
        assert data in error
    for more in (["--max-length", "2"], ["--records", "0"], ["--count", "-1"], ["--chat-template", "none"]):
        assert main([*arguments, str(tmp_path / "d.json"), *more]) == 2
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main([*arguments, str(tmp_path / "d.json")]) == 2
    assert "--chat-template" in capsys.readouterr().err


def test_what_is_prepared_is_not_shown_without_a_tokenizer(tmp_path, capsys, tokenizer):
    write_prepared(load(write(tmp_path / "d.json", [GOOD]), tokenizer), tmp_path / "set")
    (tmp_path / "target").mkdir()
    assert main(["show", "--target", str(tmp_path / "target"), "--data", str(tmp_path / "set")]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {tmp_path / 'target'}: has no tokenizer, which shows tokens as text; pass --tokenizer DIR\n"


def test_wrong_flags_are_one_line():
    run = subprocess.run([sys.executable, "-m", "train.data", "show"], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1


def test_reasons_are_said_by_dropped():
    with pytest.raises(Dropped, match=reasons.NOT_OBJECT):
        reasons.clean(3, reasons.Counter())
