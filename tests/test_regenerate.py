"""Answers by the target itself: those of the generator, whatever runs beside them and however often it is stopped."""

import json
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import load_file

from convert.tokenizer import load_tokenizer
from infer import Generator
from infer.batch import bucket
from infer.results import Generation
from infer.settings import Settings
from tests import fixtures
from train.conversations import NO_ROLE, DataSource, read_records
from train.data import Encoder, load_dataset
from train.regenerate import BATCHES_AHEAD, PLAIN_TEXT, TOO_LONG, Regenerator, conversation_seed, main
from train.regenerated_file import Conversation, Output

EOT = 1


def turns(*texts, system=None):
    roles = ("human", "gpt")
    lead = [{"from": "system", "value": system}] if system else []
    return {"conversations": lead + [{"from": roles[i % 2], "value": text} for i, text in enumerate(texts)]}


LONG = " ".join(f"w{i % 54}" for i in range(40))
RECORDS = [
    turns("w3 w4", "w0"),
    turns("w5", "w0", "w6 w7", "w0", "w8", "w0", system="w9"),
    {"text": "w1 w2"},
    turns("w10 w11 w12 w13", "w0", "w14", "w0"),
    turns("w3 w4", "w50"),  # asks what the first one asks
    turns(LONG, "w0", "w15", "w0"),
    turns("w16", "w0", "w17", "w0", "w18", "w0", "w19", "w0"),
    {"conversations": [{"value": "w1"}]},
    turns("w20 w21", "w0", system="w22"),
]
KEPT = [0, 1, 3, 5, 6, 8]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny target with the word tokenizer that often ends its turn, and says no other token that text cannot hold."""
    directory = tmp_path_factory.mktemp("target")
    fixtures.tiny(directory, seed=8)
    fixtures.tok(directory)
    tensors = load_file(directory / "model.safetensors")
    head = tensors["lm_head.weight"].copy()
    head[[0, 2, 3, 4, 5, 9]] = 0
    head[EOT] *= 1.6
    fixtures.save(directory / "model.safetensors", tensors | {"lm_head.weight": head})
    return directory


@pytest.fixture(scope="module")
def generator(target):
    return Generator.from_pretrained(target)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.json"
    path.write_text(json.dumps(RECORDS))
    return path


@pytest.fixture
def command(target, data, tmp_path):
    """Runs the command into `out.jsonl` and gives its lines; `status` is what it must return."""

    def run(*flags, out="out.jsonl", status=0, source=data, lengths=("--max-new-tokens", "24", "--max-length", "64")):
        options = ["--target", str(target), "--data", str(source), "--out", str(tmp_path / out), "--batch-size", "2"]
        assert main([*options, *lengths, *map(str, flags)]) == status
        return lines(tmp_path / out)

    return run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def as_set(path):
    return Counter(path.read_bytes().splitlines())


def answered(generator, line, **options):
    """Generations of the replies of a line, one by one, each behind the line's own messages before it."""
    settings = Settings(max_new_tokens=24, max_length=64, **options)
    places = [place for place, message in enumerate(line["messages"]) if message["role"] == "assistant"]
    return [generator.generate([line["messages"][:place]], settings)[0] for place in places]


def replies(line):
    return [message["content"] for message in line["messages"] if message["role"] == "assistant"]


# ------------------------------------------------------------------------------------------ answers


def test_answers_are_the_generators_own_one_by_one_and_training_supervises_them(command, generator, tmp_path):
    written = command()
    assert sorted(line["record"] for line in written) == KEPT
    generated = {}
    for line in written:
        answers = answered(generator, line)
        assert replies(line) == [answer.text for answer in answers]
        assert line["stop_reasons"][: len(answers)] == ["eos"] * len(answers)
        assert line["tokens"][: len(answers)] == [len(answer.token_ids) for answer in answers]
        generated[line["record"]] = [token for answer in answers for token in answer.token_ids]
    assert max(len(replies(line)) for line in written) > 1  # the context held an answer of its own

    trained = load_dataset([DataSource(str(tmp_path / "out.jsonl"))], generator.tokenizer, max_length=64)
    assert {written[example.record]["record"] for example in trained.examples} == {n for n, g in generated.items() if g}
    for example in trained.examples:
        supervised = example.tokens[np.flatnonzero(example.supervised) + 2].tolist()
        assert supervised == generated[written[example.record]["record"]]


def test_turns_are_the_conversations_own_as_far_as_they_fit(command, generator):
    for line in command():
        messages, record = line["messages"], RECORDS[line["record"]]["conversations"]
        asked = [turn["value"] for turn in record if turn["from"] == "human"]
        users = [message["content"] for message in messages if message["role"] == "user"]
        assert users == asked[: len(users)]
        assert line["source"].endswith("chats.json")
        lead = [turn["value"] for turn in record if turn["from"] == "system"] if messages else []
        assert [message["content"] for message in messages if message["role"] == "system"] == lead
        roles = [message["role"] for message in messages if message["role"] != "system"]
        assert roles == ["user", "assistant"] * len(users)
        ended = all(reason == "eos" for reason in line["stop_reasons"])
        assert len(users) == line["stop_reasons"].count("eos")
        if ended and len(users) < len(asked):
            turn = {"role": "user", "content": asked[len(users)]}
            assert len(generator.encode([*messages, turn])) >= 64
        assert ended or line["stop_reasons"][-1] != "eos"


def test_size_of_batches_changes_no_line(command, tmp_path):
    command()
    command("--batch-size", 5, out="other.jsonl")
    assert as_set(tmp_path / "out.jsonl") == as_set(tmp_path / "other.jsonl")


def test_drafter_changes_no_line(command, target, tmp_path):
    fixtures.draft(tmp_path / "draft", json.loads((target / "config.json").read_text()), 2)
    (tmp_path / "short.json").write_text(json.dumps([turns(f"w{n}", "w0") for n in range(3)]))
    sampling = ("--temperature", 0.9, "--seed", 5)
    tree = ("--spans", "2,2", "--levels", 3, "--total-nodes", 6, "--draft-top-k", 2)
    command(*sampling, source=tmp_path / "short.json")
    command(*sampling, "--draft", tmp_path / "draft", *tree, source=tmp_path / "short.json", out="other.jsonl")
    assert as_set(tmp_path / "out.jsonl") == as_set(tmp_path / "other.jsonl")


def test_each_conversation_draws_with_its_own_seed(command, generator):
    first = command("--temperature", 0.9, "--seed", 5, "--limit", 3)
    for line in first:
        seed = conversation_seed(5, 0, line["record"])
        assert replies(line) == [answer.text for answer in answered(generator, line, temperature=0.9, seed=seed)]
    assert first != command("--temperature", 0.9, "--seed", 6, "--limit", 3, "--overwrite")
    assert (
        len({conversation_seed(seed, source, n) for seed in range(3) for source in range(3) for n in range(99)}) == 891
    )


def test_turns_and_limit_bound_what_is_asked(command):
    one = command("--turns", 1)
    assert {len(line["stop_reasons"]) for line in one} == {1}
    assert [line["record"] for line in command("--limit", 2, out="two.jsonl")] == [0, 1]


def test_chat_template_of_a_file_is_used(command, generator, tmp_path):
    template = generator.tokenizer.chat_template.replace("{{ bos_token }}", "{{ bos_token }}w7 ")
    (tmp_path / "template").write_text(template)
    (line,) = command("--chat-template", tmp_path / "template", "--limit", 1, "--truncated", "keep")
    ids = generator.tokenizer("<|begin_of_text|>w7 ", add_special_tokens=False).input_ids
    ids += generator.encode(line["messages"][:1])[1:]
    assert replies(line) == [generator.generate([ids], max_new_tokens=24, max_length=64)[0].text]


# ---------------------------------------------------------------------------------- replies cut off


def test_reply_that_is_cut_is_left_out_and_ends_its_conversation(command, generator, tmp_path):
    whole = {line["record"]: line for line in command()}
    for line in command(lengths=("--max-new-tokens", "6", "--max-length", "64"), out="short.jsonl"):
        before = whole[line["record"]]
        fitting = [count <= 6 and reason == "eos" for count, reason in zip(before["tokens"], before["stop_reasons"])]  # noqa: B905
        kept = fitting.index(False) if False in fitting else len(fitting)
        assert replies(line) == replies(before)[:kept]
        if kept < len(fitting):
            blank = before["stop_reasons"][kept] == "blank"
            assert line["stop_reasons"] == ["eos"] * kept + ["blank" if blank else "max_new_tokens"]
            assert blank or line["tokens"][-1] == 6
        assert bool(line["messages"]) == (kept > 0)
    assert any("max_new_tokens" in line["stop_reasons"] for line in lines(tmp_path / "short.jsonl"))
    trained = load_dataset([DataSource(str(tmp_path / "short.jsonl"))], generator.tokenizer)
    assert all(example.tokens[-1] == EOT for example in trained.examples)


def test_reply_that_is_cut_can_be_kept_but_nothing_follows_it(command, tmp_path):
    lengths = ("--max-new-tokens", "6", "--max-length", "64")
    dropped = {line["record"]: line for line in command(lengths=lengths)}
    for line in command("--truncated", "keep", lengths=lengths, out="kept.jsonl"):
        without = dropped[line["record"]]
        assert line["stop_reasons"] == without["stop_reasons"]
        cut = line["stop_reasons"][-1] == "max_new_tokens"
        assert len(replies(line)) == len(replies(without)) + cut
        if cut:
            assert len(replies(line)[-1].split()) == 6


def test_conversation_ends_where_the_length_is_used_up(command, capsys):
    written = command(lengths=("--max-new-tokens", "24", "--max-length", "40"))
    assert sorted(line["record"] for line in written) == [n for n in KEPT if n != 5]
    assert f"skipped: {TOO_LONG}" in capsys.readouterr().out
    assert any(line["stop_reasons"][-1] == "context" for line in written)


def test_blank_reply_is_no_turn(target, data, tmp_path, command):
    fixtures.const(tmp_path / "mute", [0.0, 1.0] + [0.0] * 62)
    fixtures.tok(tmp_path / "mute")
    written = command("--target", tmp_path / "mute", "--limit", 2)
    assert [(line["messages"], line["stop_reasons"], line["tokens"]) for line in written] == [([], ["blank"], [1])] * 2


def test_summary_counts_what_was_skipped_and_how_replies_ended(command, capsys):
    written = command()
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    figures = {name.strip(): value for name, value in rows}
    assert figures["conversations written now"] == str(len(KEPT))
    assert figures["conversations written before"] == "0"
    assert figures[f"skipped: {PLAIN_TEXT}"] == figures["skipped: duplicate"] == figures[f"skipped: {NO_ROLE}"] == "1"
    reasons = Counter(reason for line in written for reason in line["stop_reasons"])
    assert figures["replies that ended by eos"] == str(reasons["eos"])
    assert figures["tokens generated"] == str(sum(sum(line["tokens"]) for line in written))
    assert figures["of these without a reply"] == str(sum(not line["messages"] for line in written))
    assert figures["replies whose text is read as other tokens"] == "0"


def test_replies_that_are_read_as_other_tokens_are_counted(tmp_path, command, capsys):
    """A target that says a special token, which no text holds, in the middle of its reply."""
    fixtures.const(tmp_path / "special", [0.0, 0.2, 0.4, 0.0] + [0.0] * 6 + [0.4] + [0.0] * 53)
    fixtures.tok(tmp_path / "special")
    written = command("--target", tmp_path / "special", "--temperature", 0.9, "--turns", 1, "--limit", 2)
    assert any(replies(line) for line in written)
    assert "replies whose text is read as other tokens " in (out := capsys.readouterr().out)
    assert not any(line.startswith("replies whose text") and line.endswith(" 0") for line in out.splitlines())


# ------------------------------------------------------------------------------------------ batches


class Recorded:
    """A generator that notes what it is given and answers with "w0" and the end of turn."""

    def __init__(self, tokenizer):
        self.tokenizer, self.batches_run = tokenizer, []

    def batches(self, prompts, settings):
        assert len(prompts) == settings.batch_size == len(settings.seeds)
        self.batches_run.append([len(ids) for ids in prompts])
        yield [Generation(ids, [10, EOT], "w0", "eos", [], 1.0) for ids in prompts]


@pytest.mark.parametrize("count", [1, 3, 50])
def test_batches_are_of_one_bucket_and_one_size_and_nothing_waits_for_more_than_a_window(target, count):
    tokenizer = load_tokenizer(target)
    random = np.random.default_rng(count)
    sizes = random.integers(1, 60, (count, 3)).tolist()
    conversations = [
        Conversation("a", 0, number, (), tuple(" ".join(["w1"] * size) for size in row))
        for number, row in enumerate(sizes)
    ]
    generator = Recorded(tokenizer)
    regenerator = Regenerator(generator, Settings(max_length=256, batch_size=4), Encoder(tokenizer, 256))
    ended = list(regenerator.run(conversations))
    assert sorted(dialogue.conversation.record for dialogue in ended) == list(range(count))
    assert all(dialogue.stop_reasons == ["eos"] * 3 for dialogue in ended)
    rows = min(4, count)
    for lengths in generator.batches_run:
        assert len(lengths) == rows
        assert len({bucket(length) for length in lengths}) == 1
    assert len(generator.batches_run) <= 3 * count / rows + rows * BATCHES_AHEAD
    for place, dialogue in enumerate(ended):
        assert dialogue.conversation.record <= place + rows * BATCHES_AHEAD


def test_window_of_prompts_that_are_all_too_long_does_not_end_the_run(target):
    tokenizer = load_tokenizer(target)
    texts = [" ".join(["w1"] * 300)] * 3 * BATCHES_AHEAD + ["w1"]
    conversations = [Conversation("a", 0, number, (), (text,)) for number, text in enumerate(texts)]
    regenerator = Regenerator(Recorded(tokenizer), Settings(max_length=256, batch_size=1), Encoder(tokenizer, 256))
    *refused, last = regenerator.run(conversations)
    assert refused == [None] * 3 * BATCHES_AHEAD
    assert last.conversation == conversations[-1]
    assert regenerator.tally.skipped == {TOO_LONG: 3 * BATCHES_AHEAD}


# ----------------------------------------------------------------------------------------- resuming


@pytest.fixture
def whole(command, tmp_path):
    """The lines of a run that nothing interrupted, and its file."""
    command()
    return as_set(tmp_path / "out.jsonl"), tmp_path / "out.jsonl"


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.75, -2, -1])
def test_run_goes_on_where_it_was_killed(command, whole, cut):
    expected, path = whole
    content = path.read_bytes()
    path.write_bytes(content[:cut] if cut in (-1, -2) else content[: int(cut * len(content))])
    kept = path.read_bytes()
    whole_lines = kept[: kept.rfind(b"\n") + 1]
    command()
    assert as_set(path) == expected
    assert path.read_bytes().startswith(whole_lines)


def test_finished_run_is_left_alone(command, whole, capsys):
    _, path = whole
    content = path.read_bytes()
    command()
    assert path.read_bytes() == content
    out = capsys.readouterr().out
    assert "conversations written before" in out


def test_run_that_was_interrupted_goes_on_with_another_batch_size(command, whole, tmp_path, monkeypatch):
    expected, _ = whole
    write = Output.write

    def interrupted(self, line):
        write(self, line)
        raise KeyboardInterrupt

    monkeypatch.setattr(Output, "write", interrupted)
    assert len(command(out="other.jsonl", status=130)) == 1
    monkeypatch.undo()
    command("--batch-size", 5, out="other.jsonl")
    assert as_set(tmp_path / "other.jsonl") == expected


def test_line_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    with Output(str(tmp_path / "a.jsonl"), {}) as output:
        for number in range(3):
            output.write({"record": number, "text": "\u2028é"})
            assert lines_on_disk(tmp_path / "a.jsonl") == [{"record": n, "text": "\u2028é"} for n in range(number + 1)]


def lines_on_disk(path):
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return list(read_records(str(path)))


def test_limit_can_be_raised(command, whole, tmp_path):
    expected, _ = whole
    first = command("--limit", 2, out="grown.jsonl")
    assert command("--limit", 4, out="grown.jsonl")[:2] == first
    command(out="grown.jsonl")
    assert as_set(tmp_path / "grown.jsonl") == expected


def test_overwrite_begins_anew(command, whole, tmp_path):
    command("--turns", 1, "--overwrite")
    assert {len(line["stop_reasons"]) for line in lines(tmp_path / "out.jsonl")} == {1}
    settings = json.loads((tmp_path / "out.jsonl.settings.json").read_text())
    assert settings["turns"] == 1
    assert len(as_set(tmp_path / "out.jsonl")) == len(KEPT)


def other_data(path, data):
    data.write_text(json.dumps(RECORDS[1:]))


def no_sidecar(path, data):
    (path.parent / (path.name + ".settings.json")).unlink()


def foreign_line(path, data):
    path.write_text('{"messages": []}\n' + path.read_text())


@pytest.mark.parametrize(
    ("flags", "change", "message"),
    [
        (("--temperature", 0.5), None, "was begun with --temperature 0.0, and now is 0.5"),
        (("--turns", 2), None, "was begun with --turns not given, and now is 2"),
        (("--seed", 1), None, "was begun with --seed 0, and now is 1"),
        (("--truncated", "keep"), None, 'was begun with --truncated "drop", and now is "keep"'),
        (
            ("--limit", 2),
            None,
            "not as it was, among the conversations asked for; the data changed or --limit is lower",
        ),
        ((), no_sidecar, "is there already, without out.jsonl.settings.json"),
        ((), foreign_line, "out.jsonl, line 1: not a line that this command writes (KeyError('source'))"),
        ((), other_data, "not as it was, among the conversations asked for"),
    ],
)
def test_file_of_another_run_is_refused_and_left_alone(command, tmp_path, capsys, flags, change, message):
    source = tmp_path / "own.json"
    source.write_text(json.dumps(RECORDS))
    command(source=source)
    path = tmp_path / "out.jsonl"
    if change:
        change(path, source)
    content = path.read_bytes()
    capsys.readouterr()
    command(*flags, source=source, status=2)
    error = capsys.readouterr().err
    assert message in error
    assert "--overwrite" in error
    assert len(error.splitlines()) == 1
    assert path.read_bytes() == content


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--turns", 0), "--turns 0: must be at least 1"),
        (("--limit", 0), "--limit 0: must be at least 1"),
        (("--batch-size", 0), "--batch-size 0"),
        (("--temperature", -1), "temperature"),
        (("--spans", "2,2"), "--spans needs --draft"),
        (("--data", "missing.json"), "missing.json: no such file"),
        (("--data", "a.json:0.5"), "a.json: has a weight"),
        (("--out", "out.txt"), "--out out.txt: must be a .jsonl file in a directory that exists"),
        (("--out", "no/such/out.jsonl"), "must be a .jsonl file in a directory that exists"),
        (("--max-length", 999), "--max-length 999 is more than the target's context of 256"),
        (("--eos-ids", "64"), "--eos-ids holds token id 64"),
        (("--chat-template", "missing"), "--chat-template missing: not readable"),
        (("--target", "missing"), "missing: no such file or directory"),
    ],
)
def test_bad_flags_are_refused_in_one_line_before_anything_is_written(command, tmp_path, capsys, flags, message):
    command(*flags, status=2)
    error = capsys.readouterr().err
    assert message in error
    assert len([line for line in error.splitlines() if line.startswith("error:")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_target_without_what_it_needs_is_refused(command, target, tmp_path, capsys):
    config = json.loads((target / "config.json").read_text())
    bare = tmp_path / "bare"
    fixtures.tiny(bare)
    command("--target", bare, status=2)
    assert "the target has no tokenizer" in capsys.readouterr().err
    fixtures.tok(bare)
    tokenizer = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": None}))
    command("--target", bare, status=2)
    assert "no chat template; pass --chat-template FILE" in capsys.readouterr().err
    (bare / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": None}))
    (bare / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    command("--target", bare, status=2)
    assert "pass --eos-ids" in capsys.readouterr().err


def test_data_without_a_conversation_is_refused(command, tmp_path, capsys):
    (tmp_path / "texts.json").write_text(json.dumps([{"text": "w1"}]))
    command(source=tmp_path / "texts.json", status=2)
    assert f"the data holds no conversation ({PLAIN_TEXT})" in capsys.readouterr().err


def test_data_is_never_written_over(command, tmp_path, capsys):
    source = tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, RECORDS)))
    content = source.read_bytes()
    for data in (source, tmp_path):
        command("--overwrite", source=data, status=2)
        assert "is or lies in" in capsys.readouterr().err
    assert source.read_bytes() == content


def test_refusal_by_the_template_is_counted_and_the_others_go_on(command, generator, tmp_path, capsys):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
    (tmp_path / "template").write_text(template + generator.tokenizer.chat_template)
    written = command("--chat-template", tmp_path / "template")
    assert sorted(line["record"] for line in written) == [n for n in KEPT if n not in (1, 8)]
    assert "skipped: refused by the chat template (none)" in capsys.readouterr().out
