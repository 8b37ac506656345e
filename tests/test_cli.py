"""`python -m infer.generate` as its users meet it: what it prints, where it stops, and what it refuses."""

import io
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from infer import generate
from infer.generate import main
from tests import fixtures, golden_data

# Known bug G01: the greedy answer of the tiny target to 0,12,20,31. Ids from 10 on are the words w0, w1, ...
ANSWER = [41, 53, 5, 41, 53, 29, 14, 34, 22, 41, 52, 41, 19, 11, 7, 35, 15, 48, 12, 7]
ANSWER += [11, 2, 52, 55, 22, 24, 1, 52, 28, 42]
TEXT = "w31 w43 w31 w43 w19 w4 w24 w12 w31 w42 w31 w9 w1 user w25 w5 w38 w2 user w1 w42 w45 w12 w14"

# transformers' greedy answer to one user turn "w1 w2" in the chat template.
RENDERED = (
    "<|start_header_id|>user<|end_header_id|>\n\nw1 w2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
CHAT_PROMPT = [0, 2, 7, 3, 9, 11, 12, 1, 2, 8, 3, 9]
CHAT_ANSWER = [23, 5, 28, 57, 49, 57, 41, 60, 52, 11, 42, 50, 57, 59, 60, 46, 55, 11, 5, 15]
CHAT_ANSWER += [52, 30, 19, 2, 5, 2, 5, 52, 54, 39]
CHAT_TEXT = "w13 w18 w47 w39 w47 w31 w50 w42 w1 w32 w40 w47 w49 w50 w36 w45 w1 w5 w42 w20 w9 w42 w44 w29"

# Few different settings, since each one compiles for seconds.
DRAFT = "--draft {three} --spans 1,1,1 --levels 2 --total-nodes 6 --draft-top-k 2"
NUMBERS = f"--target {{numbers}} {DRAFT} --max-new-tokens 30 --prompt-ids 0,12,20,31"
WORDS = f"--target {{words}} {DRAFT} --max-new-tokens 30 --prompt-ids 0,12,20,31"
PLAIN_WORDS = "--target {words} --max-new-tokens 30"

FIELDS = ["token_ids", "text", "stop_reason", "accept_lengths", "rounds", "tokens_per_round", "seconds"]


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def records(self) -> list[dict]:
        """The JSON objects on stdout, one a line, without the seconds, which differ from run to run."""
        assert self.status == 0, self.err
        records = [json.loads(line) for line in self.out.splitlines()]
        return [{name: value for name, value in record.items() if name != "seconds"} for record in records]

    @property
    def record(self) -> dict:
        (record,) = self.records
        return record


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    """Models and files by name: what is in braces in the commands of this file."""
    root = tmp_path_factory.mktemp("cli")
    config = fixtures.tiny(root / "numbers", eos_token_id=63)
    for name, generation in (
        ("words", None),
        ("ends_at_29", {"eos_token_id": [29, 40]}),
        ("ends_at_28", {"eos_token_id": 28}),
    ):
        fixtures.tiny(root / name, eos_token_id=63, gen=generation)
    fixtures.tok(root / "words")
    fixtures.tok(root / "ends_at_28")
    fixtures.draft(root / "one", config, 1)
    fixtures.draft(root / "three", config, 3)
    fixtures.draft(root / "wide", {**config, "hidden_size": 48}, 1)
    fixtures.draft(root / "wordy", {**config, "vocab_size": 80}, 1)
    fixtures.tiny(root / "gemma2", model_type="gemma2")
    fixtures.tiny(root / "yarn", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    for whole, cut in (("numbers", "cut_target"), ("one", "cut_draft")):
        shutil.copytree(root / whole, root / cut)
        weights = root / cut / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    fixtures.tiny(root / "no_json")
    (root / "no_json" / "config.json").write_text("{'vocab_size': 64}")
    fixtures.tiny(root / "pickled")
    (root / "pickled" / "model.safetensors").unlink()
    (root / "pickled" / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Planted(root / "planted")}, protocol=2))
    (root / "ids.jsonl").write_text('{"prompt_ids": [0, 12]}\n')
    (root / "no_turns.jsonl").write_text('{"messages": []}\n')
    (root / "bad.jsonl").write_text('{"prompt": "w1"}\n{"prompt": \n')
    fixed = {
        "root": root,
        "too_long": ",".join(["5"] * 256),
        "long_name": "x" * 300,
        "repository": Path(__file__).parents[1],
    }
    return {path.name.removesuffix(".jsonl"): path for path in root.iterdir()} | fixed


class Planted:
    """A pickle of this runs code when it is loaded carelessly: it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


@pytest.fixture
def cli(paths, capsys, monkeypatch):
    """Runs the command in this process, with `stdin` typed at it."""

    def run(command: str, stdin: str = "", **more: object) -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            status = main(shlex.split(command.format_map(paths | more)))
        except SystemExit as stopped:
            status = stopped.code
        return Ran(status, *capsys.readouterr())

    return run


def in_a_fresh_process(paths, command: str) -> Ran:
    arguments = [sys.executable, "-m", "infer.generate", *shlex.split(command.format_map(paths))]
    done = subprocess.run(arguments, cwd=paths["repository"], capture_output=True, text=True, timeout=120)
    return Ran(done.returncode, done.stdout, done.stderr)


# ------------------------------------------------------------------------------------------- output


def test_json_holds_exactly_the_documented_fields(cli):
    ran = cli(f"{NUMBERS} --json")
    record = json.loads(ran.out)
    assert list(record) == FIELDS
    assert record["token_ids"] == ANSWER
    assert record["text"] is None
    assert record["stop_reason"] == "max_new_tokens"
    assert all(type(length) is int and 0 <= length <= 2 for length in record["accept_lengths"])
    assert record["rounds"] == len(record["accept_lengths"])
    assert record["tokens_per_round"] == pytest.approx(sum(record["accept_lengths"]) / record["rounds"] + 1)
    assert type(record["seconds"]) is float
    assert record["seconds"] > 0


def test_accept_lengths_account_for_every_token(cli):
    lengths = cli(f"{NUMBERS} --json").record["accept_lengths"]
    assert sum(lengths[:-1]) + len(lengths[:-1]) + 1 < 30 <= sum(lengths) + len(lengths) + 1


@pytest.mark.parametrize("command", [f"{NUMBERS} --json --plain", NUMBERS.replace(DRAFT, "") + " --json"])
def test_plain_decoding_takes_a_round_for_every_token_but_the_first(cli, command):
    record = cli(command).record
    assert record["token_ids"] == ANSWER
    assert record["accept_lengths"] == [0] * 29
    assert record["rounds"] == 29
    assert record["tokens_per_round"] == 1.0


def test_one_token_needs_no_round(cli):
    record = cli(f"{NUMBERS} --plain --max-new-tokens 1 --json").record
    assert record == {
        "token_ids": [41],
        "text": None,
        "stop_reason": "max_new_tokens",
        "accept_lengths": [],
        "rounds": 0,
        "tokens_per_round": None,
    }


@pytest.mark.parametrize("flags", ["", "--plain"])
def test_text_is_printed_alone_and_figures_go_to_stderr(cli, flags):
    ran = cli(f"{WORDS} {flags}")
    assert (ran.status, ran.out) == (0, TEXT + "\n")
    assert "27 tokens" in ran.err
    assert "stopped by eos" in ran.err


def test_text_is_streamed_in_pieces(cli, monkeypatch):
    class Terminal(io.StringIO):
        shown = ()

        def flush(self):
            if self.getvalue() not in self.shown:
                self.shown = (*self.shown, self.getvalue())

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    cli(WORDS)
    assert len(terminal.shown) >= 3
    assert all(TEXT.startswith(shown.rstrip("\n")) for shown in terminal.shown)
    assert terminal.getvalue() == TEXT + "\n"


def test_token_ids_are_printed_where_there_is_no_tokenizer(cli):
    assert cli(NUMBERS).out == ",".join(map(str, ANSWER)) + "\n"


def test_tokenizer_from_elsewhere(cli):
    command = NUMBERS.replace("{numbers}", "{numbers} --tokenizer {words}")
    record = cli(f"{command} --json").record
    assert record["text"] == TEXT
    assert record["token_ids"] == ANSWER[:27]


@pytest.mark.devices(2)
def test_weights_split_over_two_devices_give_the_same_tokens(cli):
    ran = cli(f"{NUMBERS} --plain --mesh tensor=2 --json")
    assert ran.record["token_ids"] == ANSWER
    assert "note: weights are split over 2 devices" in ran.err


# ------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize("flags", ["", "--batch-size 2"])
def test_several_prompts_are_answered_in_order_as_if_alone(cli, flags):
    prompts = ["0,12,20,31", "0,12", "5"]
    command = NUMBERS.replace(" --prompt-ids 0,12,20,31", " --json --prompt-ids")
    together = cli(f"{command} {' '.join(prompts)} {flags}").records
    assert together[0]["token_ids"] == ANSWER
    assert together == [cli(f"{command} {prompt}").record for prompt in prompts]


@pytest.mark.parametrize(
    "source",
    [
        "'w1 w2'",
        "--prompt-ids 0,2,7,3,9,11,12,1,2,8,3,9",
        f"--raw '{RENDERED}'",
    ],
)
def test_a_text_is_one_user_turn_in_the_chat_template_unless_raw(cli, source):
    record = cli(f"{PLAIN_WORDS} --json {source}").record
    assert record["token_ids"] == CHAT_ANSWER
    assert record["text"] == CHAT_TEXT


def test_system_prompt_comes_first(cli):
    system = cli(f"{PLAIN_WORDS} --json --system w3 w1").record
    ids = cli(f"{PLAIN_WORDS} --json --prompt-ids 0,2,6,3,9,13,1,2,7,3,9,11,1,2,8,3,9").record
    assert system == ids
    assert system["token_ids"] == [50, 52, 41, 14, 11, 63]


def test_prompt_file_with_every_kind_of_line(cli, tmp_path):
    lines = [
        {"prompt": "w1 w2"},
        {"messages": [{"role": "user", "content": "w1 w2"}], "id": "a"},
        {"turns": ["w1 w2", "w9"], "question_id": 81},
        {"prompt_ids": CHAT_PROMPT},
        {"prompt_ids": [0, 12, 20, 31]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    records = cli(f"{PLAIN_WORDS} --json --prompts {{path}}", path=path).records
    assert [record["text"] for record in records] == [CHAT_TEXT] * 4 + [TEXT]


# ----------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("--stop w24", "w31 w43 w31 w43 w19 w4 ", 8),
        ("--stop 'w4 w24'", "w31 w43 w31 w43 w19 ", 8),
        ("--stop 9", "w31 w43 w31 w43 w1", 6),  # inside of a token
        ("--stop w24 --stop w19", "w31 w43 w31 w43 ", 6),
        ("--stop w31", "", 1),
        ("--stop w99", TEXT, 27),
    ],
)
@pytest.mark.parametrize("output", ["--json", ""])
def test_stop_string_ends_the_text_before_it(cli, stop, text, tokens, output):
    ran = cli(f"{WORDS} {stop} {output}")
    if output:
        record = ran.record
        assert record["text"] == text
        assert record["token_ids"] == ANSWER[:tokens]
        assert record["stop_reason"] == ("eos" if text == TEXT else "stop_string")
        known = [1 + sum(length + 1 for length in record["accept_lengths"][:n]) for n in range(record["rounds"] + 1)]
        assert [total >= tokens for total in known] == [False] * record["rounds"] + [True]  # no round too many
    else:
        assert ran.out == text + "\n"


@pytest.mark.parametrize(
    ("command", "tokens", "reason"),
    [
        (NUMBERS, 30, "max_new_tokens"),  # 63 of config.json does not occur
        (WORDS, 27, "eos"),  # 1, the tokenizer's
        (f"{NUMBERS} --eos-ids 29,30", 6, "eos"),  # known bug G04
        (f"{NUMBERS} --eos-ids 30,5", 3, "eos"),
        (f"{WORDS} --eos-ids 40,42", 30, "eos"),  # 42 comes last; the tokenizer's 1 no longer counts
        (NUMBERS.replace("numbers", "ends_at_29"), 6, "eos"),  # a list in generation_config.json
        (WORDS.replace("words", "ends_at_28"), 27, "eos"),  # the tokenizer's counts beside generation_config.json
        (f"{PLAIN_WORDS} --prompt-ids 0,12,20,31 --ignore-eos", 30, "max_new_tokens"),
        (f"{NUMBERS} --max-new-tokens 20", 20, "max_new_tokens"),
        (f"{NUMBERS} --max-length 33", 29, "context"),
        (f"{NUMBERS} --max-length 34", 30, "max_new_tokens"),
    ],
)
def test_stops_where_it_must_and_says_why(cli, command, tokens, reason):
    record = cli(f"{command} --json").record
    assert record["token_ids"] == ANSWER[:tokens]
    assert record["stop_reason"] == reason


@pytest.mark.parametrize(("prompt", "tokens"), [(250, 6), (255, 1)])
def test_stops_at_the_context_of_the_target(cli, prompt, tokens):
    ids = ",".join(["5"] * prompt)
    record = cli(f"--target {{numbers}} --max-new-tokens 30 --ignore-eos --json --prompt-ids {ids}").record
    assert len(record["token_ids"]) == tokens
    assert record["stop_reason"] == "context"


# ------------------------------------------------------------------------------------------ sampling


def test_the_seed_decides_whatever_else_runs_also_in_a_fresh_process(cli, paths):
    command = NUMBERS.replace("--prompt-ids 0,12,20,31", "--temperature 1 --json --prompt-ids")
    (first,) = cli(f"{command} 0,12,20,31 --seed 42").records
    other, again = cli(f"{command} 0,12 0,12,20,31 --seed 42").records
    (another_seed,) = cli(f"{command} 0,12,20,31 --seed 43").records
    assert first == again
    assert first["token_ids"] not in (other["token_ids"], another_seed["token_ids"], ANSWER)
    assert in_a_fresh_process(paths, f"{command} 0,12,20,31 --seed 42").record == first


# ----------------------------------------------------------------------------------------- comparing


def test_compare_prints_both_rates_and_whether_the_texts_are_identical(cli):
    ran = cli(f"{WORDS} --compare")
    assert ran.status == 0
    drafted = cli(f"{WORDS} --json").record
    text, header, ours, plain, ratio, identical = ran.out.splitlines()
    assert text == TEXT
    assert header.split() == ["tokens", "rounds", "tokens/round", "seconds", "tokens/s"]
    assert ours.split()[:4] == ["drafted", "27", str(drafted["rounds"]), f"{drafted['tokens_per_round']:.3f}"]
    assert plain.split()[:4] == ["plain", "27", "26", "1.000"]
    assert re.fullmatch(r"speed-up: \d+\.\d\d times", ratio)
    assert identical == "identical texts: yes"


def test_compare_as_json_holds_both_answers(cli):
    ran = cli(f"{WORDS} --compare --json")
    record = json.loads(ran.out)
    assert list(record) == [*FIELDS, "drafted", "identical", "plain"]
    assert list(record["plain"]) == FIELDS
    assert record["drafted"] is True
    assert record["identical"] is True
    assert record["text"] == record["plain"]["text"] == TEXT
    assert record["plain"]["accept_lengths"] == [0] * 26


# ------------------------------------------------------------------------------------------- traces


def tree_of(record):
    """Token path from the root -> score, of every node of a recorded round."""
    paths = []
    for token, parent in zip(record["tokens"], record["parents"], strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    assert record["depths"] == [len(path) - 1 for path in paths]
    return dict(zip(paths, record["scores"], strict=True))


def token_paths(record, node_paths):
    return {tuple(record["tokens"][node] for node in path) for path in node_paths}


def test_trace_holds_every_round_as_the_golden_traces_do(cli, tmp_path):
    recorded = {run["prompt"]: run for run in golden_data.trace("poss3")["runs"] if run["setting"] == "B"}
    expected = [recorded["m7"], recorded["m2"]]
    prompts = " ".join(",".join(map(str, run["prompt_ids"])) for run in expected)
    ran = cli(
        "--target {target} --draft {draft} --spans 3,3 --levels 4 --total-nodes 16 --draft-top-k 4 "
        "--max-new-tokens 64 --ignore-eos --json --trace {trace} --prompt-ids " + prompts,
        target=golden_data.TARGET,
        draft=golden_data.ROOT / "drafts" / "poss3",
        trace=tmp_path / "trace.json",
    )
    assert os.listdir(tmp_path) == ["trace.json"]
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["spans"] == [3, 3]
    assert [run["new_token_ids"] for run in content["runs"]] == [record["token_ids"] for record in ran.records]
    for ours, golden in zip(content["runs"], expected, strict=True):
        for field in ("levels", "total_nodes", "top_k", "prompt_ids", "new_token_ids"):
            assert ours[field] == golden[field]
        lengths = ours["accept_lengths"]
        assert lengths == golden["accept_lengths"][: len(lengths)]
        assert sum(lengths) + len(lengths) + 1 >= 64
        assert [record["accept_length"] for record in ours["rounds"]] == lengths
        for our_round, golden_round in zip(ours["rounds"], golden["rounds"], strict=False):
            assert set(our_round) == {name for name in golden_round if "gap" not in name and "float64" not in name}
            for field in ("round", "n_committed", "root_token", "accept_length", "next_root"):
                assert our_round[field] == golden_round[field]
            assert tree_of(our_round) == pytest.approx(tree_of(golden_round), abs=2e-4)
            leaves = token_paths(golden_round, golden_round["leaf_paths"])
            assert token_paths(our_round, our_round["leaf_paths"]) == leaves
            accepted = token_paths(golden_round, [golden_round["accepted_path"]])
            assert token_paths(our_round, [our_round["accepted_path"]]) == accepted


def test_trace_of_a_batch_is_that_of_its_prompts_alone(cli, tmp_path):
    command = f"{NUMBERS} 0,12 5 --trace {{trace}}"
    assert cli(command, trace=tmp_path / "alone.json").status == 0
    assert cli(f"{command} --batch-size 2", trace=tmp_path / "together.json").status == 0
    alone, together = (json.loads((tmp_path / name).read_text()) for name in ("alone.json", "together.json"))
    for one, other in zip(alone["runs"], together["runs"], strict=True):
        assert [set(tree_of(record)) for record in one["rounds"]] == [
            set(tree_of(record)) for record in other["rounds"]
        ]
        assert one | {"rounds": None} == other | {"rounds": None}


@pytest.mark.parametrize("flags", ["--prompt-ids 64", "--stop w1", "--batch-size 0"])
def test_no_trace_is_left_behind_by_a_command_that_fails(cli, tmp_path, flags):
    assert cli(f"{NUMBERS} --trace {{trace}} {flags}", trace=tmp_path / "trace.json").status == 2
    assert os.listdir(tmp_path) == []


def test_trace_replaces_the_file_that_was_there(cli, tmp_path):
    (tmp_path / "trace.json").write_text("old")
    assert cli(f"{NUMBERS} --trace {{trace}} --compare", trace=tmp_path / "trace.json").status == 0
    assert os.listdir(tmp_path) == ["trace.json"]
    (run,) = json.loads((tmp_path / "trace.json").read_text())["runs"]
    assert run["new_token_ids"] == ANSWER


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("flags", ["", "--compare"])
def test_a_trace_holds_what_was_finished_before_an_interruption(cli, tmp_path, monkeypatch, flags):
    actions = iter([lambda *_, **__: None, interrupt])
    monkeypatch.setattr(generate, "_print_generation", lambda *args, **options: next(actions)(*args, **options))
    command = f"{NUMBERS} 0,12 0,13 --trace {{trace}} {flags}"
    assert cli(command, trace=tmp_path / "trace.json").status == 130
    assert os.listdir(tmp_path) == ["trace.json"]
    runs = json.loads((tmp_path / "trace.json").read_text())["runs"]
    assert [run["prompt_ids"] for run in runs] == [[0, 12, 20, 31], [0, 12]]
    assert runs[0]["new_token_ids"] == ANSWER


def test_an_interruption_before_the_first_answer_leaves_the_trace_that_was_there(cli, tmp_path, monkeypatch):
    (tmp_path / "trace.json").write_text("old")
    monkeypatch.setattr(generate.Generator, "batches", interrupt)
    assert cli(f"{NUMBERS} --trace {{trace}}", trace=tmp_path / "trace.json").status == 130
    assert (tmp_path / "trace.json").read_text() == "old"


# ---------------------------------------------------------------------------------------- conversing

CHAT = "--target {words} --plain --max-new-tokens 20 --chat"
CHAT_START = "w13 w18 w47 w39 w47 w31 w50 w42 w1 w32 w40 w47 w49 w50 w36 w45 w1 w5"  # 20 tokens of CHAT_ANSWER


def test_chat_gives_each_turn_the_whole_conversation(cli, tmp_path):
    ran = cli(CHAT, stdin="w1 w2\n\nw3\n/reset\n  w1 w2  \n/quit\nw9\n")
    first, second, after_reset = ran.out.splitlines()
    assert ran.status == 0
    assert first == after_reset == CHAT_START
    conversation = [
        {"role": "user", "content": "w1 w2"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "w3"},
    ]
    (tmp_path / "second.jsonl").write_text(json.dumps({"messages": conversation}))
    command = "--target {words} --max-new-tokens 20 --json --prompts {path}"
    assert cli(command, path=tmp_path / "second.jsonl").record["text"] == second


def test_chat_ends_at_the_end_of_input(cli):
    ran = cli(CHAT, stdin="w1 w2\n")
    assert (ran.status, ran.out) == (0, CHAT_START + "\n")


def test_chat_goes_on_without_a_turn_that_is_too_long(cli):
    ran = cli(CHAT, stdin="w1 " * 260 + "\nw1 w2\n")
    assert (ran.status, ran.out) == (0, CHAT_START + "\n")
    (complaint,) = [line for line in ran.err.splitlines() if "leaves no room" in line]
    assert "/reset" in complaint


# -------------------------------------------------------------------------------- one-line refusals

IDS = "--target {numbers} --prompt-ids 0,12"
DRAFTED_IDS = f"--target {{numbers}} {DRAFT} --prompt-ids"

REFUSED = [
    # Prompts.
    ("--target {numbers}", "--prompt-ids"),
    (f"{IDS} --prompts {{bad}}", "one way"),
    ("--target {words} w1 --chat", "one way"),
    ("--target {numbers} --prompt-ids ''", "the prompt is empty"),
    (f"{DRAFTED_IDS} ''", "the prompt is empty"),
    ("--target {words} ''", "the prompt is empty"),
    ("--target {words} --raw ' '", "the prompt is empty"),
    ("--target {numbers} --prompt-ids 0,64", "token id 64"),
    (f"{DRAFTED_IDS} 0,64", "token id 64"),
    ("--target {numbers} --prompt-ids=-1", "token id -1"),
    ("--target {numbers} --prompt-ids 0,5 0,99", "prompt 2 holds token id 99"),
    ("--target {numbers} --prompt-ids 0,x", "'0,x'"),
    ("--target {numbers} --prompt-ids {too_long}", "256 tokens"),
    (f"{DRAFTED_IDS} {{too_long}}", "256 tokens"),
    ("--target {numbers} --max-length 3 --prompt-ids 0,1,2", "3 tokens"),
    ("--target {numbers} w1", "no tokenizer"),
    ("--target {numbers} --chat", "no tokenizer"),
    ("--target {words} --prompts {root}/absent.jsonl", "absent.jsonl"),
    ("--target {words} --prompts {bad}", "bad.jsonl, line 2"),
    # Models.
    ("--target {root}/absent --prompt-ids 0", "absent"),
    ("--target absent --prompt-ids 0", "absent"),
    ("--target {long_name} --prompt-ids 0", "xxx"),
    ("--target {bad} --prompt-ids 0", "bad.jsonl"),
    ("--target {root} --prompt-ids 0", "config.json"),
    ("--target {cut_target} --prompt-ids 0", "model.safetensors"),
    ("--target {pickled} --prompt-ids 0", "pytorch_model.bin"),
    ("--target {no_json} --prompt-ids 0", "config.json"),
    ("--target {gemma2} --prompt-ids 0", "'gemma2'"),
    ("--target {yarn} --prompt-ids 0", "'yarn'"),
    (f"{IDS} --tokenizer {{root}}/absent", "absent"),
    (f"{IDS} --tokenizer {{one}}", "tokenizer"),
    (f"{IDS} --draft {{root}}/absent", "absent"),
    (f"{IDS} --draft {{cut_draft}}", "model.safetensors"),
    (f"{IDS} --draft {{wide}}", "hidden_size is 48, the target's is 32"),
    (f"{IDS} --draft {{wordy}}", "vocab_size is 80, the target's is 64"),
    (f"{IDS} --dtype float16", "--dtype"),
    # Spans.
    (f"{IDS} --draft {{three}}", "--spans"),
    (f"{IDS} --draft {{three}} --spans abc", "'abc'"),
    (f"{IDS} --draft {{three}} --spans 0,3", "'0,3'"),
    (f"{IDS} --draft {{three}} --spans 3,,3", "'3,,3'"),
    (f"{IDS} --draft {{three}} --spans=-3,3,3", "'-3,3,3'"),
    (f"{IDS} --draft {{three}} --spans 3,3", "2 specialist(s), but the checkpoint holds 3"),
    (f"{IDS} --draft {{one}} --spans 3,3", "2 specialist(s), but the checkpoint holds 1"),
    (f"{IDS} --draft {{one}} --spans ''", "spans ''"),
    # Flags that contradict, or that would be ignored.
    (f"{IDS} --spans 3", "--draft"),
    (f"{IDS} --compare", "--draft"),
    (f"{IDS} --trace {{root}}/trace.json", "--draft"),
    (f"{IDS} --draft {{one}} --plain --compare", "--plain"),
    (f"{IDS} --draft {{one}} --plain --trace {{root}}/trace.json", "--plain"),
    (f"{IDS} --eos-ids 5 --ignore-eos", "--ignore-eos"),
    (f"{IDS} --system w1", "--system"),
    (f"{IDS} --system ''", "--system"),
    (f"{IDS} --raw", "--raw"),
    ("--target {words} --prompts {ids} --system w1", "--system is for text; token ids are taken as they are"),
    ("--target {words} --prompts {ids} --raw", "--raw is for text; token ids are taken as they are"),
    ("--target {words} --prompts {no_turns} --system w1", "the prompt is empty"),
    (f"{IDS} --levels auto", "--levels auto needs --draft"),
    (f"{IDS} --total-nodes auto", "--total-nodes auto needs --draft"),
    ("--target {words} --system w1 --raw w2", "--system"),
    ("--target {words} --chat --raw", "--raw"),
    ("--target {words} --chat --json", "--json"),
    ("--target {words} --chat --max-length 300", "--max-length 300"),
    (f"{IDS} --stop w1", "--stop"),
    ("--target {numbers} --prompt-ids 0,12 0,13 --stop w1", "--stop"),
    (f"{IDS} --draft {{one}} --trace {{root}}/absent/trace.json", "absent"),
    (f"{IDS} --draft {{one}} --trace {{root}}", "--trace"),
    # Numbers.
    (f"{IDS} --temperature=-1", "temperature -1"),
    (f"{IDS} --temperature nan", "temperature nan"),
    (f"{IDS} --temperature inf", "temperature inf"),
    (f"{IDS} --top-p 0", "top_p 0"),
    (f"{IDS} --top-p 1.5", "top_p 1.5"),
    (f"{IDS} --top-p nan", "top_p nan"),
    (f"{IDS} --top-k=-1", "top_k -1"),
    (f"{IDS} --levels 0", "--levels 0"),
    (f"{IDS} --levels 2.5", "--levels"),
    (f"{IDS} --total-nodes 0", "--total-nodes 0"),
    (f"{IDS} --draft-top-k 0", "--draft-top-k 0"),
    (f"{IDS} --batch-size 0", "--batch-size 0"),
    (f"{IDS} --max-new-tokens 0", "--max-new-tokens 0"),
    (f"{IDS} --max-new-tokens=-5", "--max-new-tokens -5"),
    (f"{IDS} --max-length 1", "--max-length 1"),
    (f"{IDS} --max-length 300", "--max-length 300"),
    (f"{IDS} --seed=-1", "--seed -1"),
    (f"{IDS} --seed 4294967296", "--seed 4294967296"),
    (f"{IDS} --eos-ids x", "'x'"),
    (f"{IDS} --eos-ids 64", "64"),
    (f"{IDS} --eos-ids 99999999999", "99999999999"),
    ("--target {words} w1 --stop ''", "--stop"),
    # Devices.
    (f"{IDS} --mesh tensor=0", "tensor"),
    (f"{IDS} --mesh tensor=two", "'two'"),
    (f"{IDS} --mesh tensor", "tensor"),
    (f"{IDS} --mesh data=2", "'data'"),
    (f"{IDS} --mesh tensor=2,tensor=2", "twice"),
    (f"{IDS} --mesh tensor=4096", "4096 devices"),
    # The parser's own.
    ("--prompt-ids 0", "--target"),
    (f"{IDS} --no-such-flag", "--no-such-flag"),
]


def assert_refused(ran: Ran, message: str):
    assert ran.status == 2
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=[command for command, _ in REFUSED])
def test_bad_input_is_one_line_that_names_the_thing(cli, paths, command, message):
    assert_refused(cli(command), message)
    assert not (paths["root"] / "trace.json").exists()
    assert not (paths["root"] / "planted").exists()


def test_a_fresh_process_refuses_with_one_line_too(paths):
    assert_refused(in_a_fresh_process(paths, "--target {numbers} --prompt-ids 0,64"), "token id 64")


def test_help_names_every_flag(paths):
    ran = in_a_fresh_process(paths, "--help")
    assert ran.status == 0
    assert ran.err == ""
    flags = set(re.findall(r"--[a-z-]+", ran.out))
    assert flags >= {
        "--target", "--draft", "--spans", "--prompt-ids", "--prompts", "--max-new-tokens", "--temperature", "--top-k",
        "--top-p", "--seed", "--levels", "--total-nodes", "--draft-top-k", "--dtype", "--batch-size", "--max-length",
        "--raw", "--system", "--chat", "--mesh", "--plain", "--compare", "--json", "--trace", "--stop", "--eos-ids",
        "--ignore-eos",
    }  # fmt: skip
