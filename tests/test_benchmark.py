"""`python -m infer.benchmark` from end to end on tiny models: what it measures, and that it goes on where it ended."""

import dataclasses
import json
import re
import shlex
import signal
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from infer import Generator, Settings, benchmark, study
from infer.benchmark_jobs import coarse_width
from infer.benchmark_join import join_studies
from infer.benchmark_store import Key, Study
from infer.clock import Clock, Stopped
from infer.summary import Results, Setting
from infer.table import mebibytes
from infer.tables import peak_note
from infer.timing import Runner, repeat_draft, repeat_verify
from poss_jax import decode
from poss_jax.errors import InputError
from tests import fixtures, golden_data
from tests.test_lossless import prompt_of
from tests.test_program import batch_of, compilations

TREE = "--levels 2 --total-nodes 5 --draft-top-k 2"
LENGTHS = "--max-new-tokens 6 --batch-size 3 --timing-prompts 1 --timing-repeats 2 --drift-prompts 1"
SETS = "--prompts {root}/talk/question.jsonl {root}/single.jsonl"
DRAFTS = "--target {root}/words --drafts one={root}/one two={root}/two,{root}/two_again --spans two=1,1"
COMMAND = f"{DRAFTS} {SETS} {TREE} {LENGTHS} --temperature 0 1 --seeds 2"
CHEAP = f"{DRAFTS} {SETS} {TREE} {LENGTHS} --temperature 0 --drift-prompts 0"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A target that reads words, drafters of one specialist and of two, and two sets of questions."""
    root = tmp_path_factory.mktemp("benchmark")
    config = fixtures.tiny(root / "words", eos_token_id=63)
    fixtures.tok(root / "words")
    fixtures.draft(root / "one", config, 1)
    fixtures.draft(root / "longer", config, 1, intermediate_size=96)
    fixtures.draft(root / "two", config, 2)
    fixtures.draft(root / "two_again", config, 2, seed=8)
    (root / "talk").mkdir()
    write(
        root / "talk" / "question.jsonl",
        {"question_id": 81, "category": "math", "turns": ["w1 w2", "w3 w4 w5"]},
        {"question_id": 82, "category": "prose", "turns": ["w6", "w7 w8"]},
    )
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    write(root / "single.jsonl", {"prompt": "w9 w10"}, {"messages": [*messages, {"role": "user", "content": "w3"}]})
    return root


def write(path, *records: dict):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run(root, out, command: str, capsys=None) -> str:
    """What a benchmark that must succeed prints."""
    arguments = shlex.split(command.format(root=root)) + ["--out", str(out), "--commit", "abc"]
    status = benchmark.main(arguments)
    shown = capsys.readouterr() if capsys else None
    assert status == 0, shown
    return shown.out + shown.err if shown else ""


@pytest.fixture(scope="module")
def out(root):
    """The directory of a whole benchmark."""
    run(root, root / "whole", COMMAND)
    return root / "whole"


@pytest.fixture(scope="module")
def results(out):
    return Results(Study.read(out))


def keys_of(directory) -> list[Key]:
    return [Key.of(record) for record in Study.read(directory).records]


def test_everything_is_measured_once(out):
    """6 turns; 1 + 2 runs of sampling; 3 trained drafters of which 2 are timed, on 3 turns and at both temperatures."""
    kinds = Counter(key.kind for key in keys_of(out))
    assert kinds == {"plain": 6 * 3, "drafted": 6 * 3 * 3, "timing": 3 * 2 * 2, "split": 2 * 2, "drift": 3 * 3}
    assert len(set(keys_of(out))) == sum(kinds.values())


def test_answers_that_take_as_long_share_a_batch(out):
    """Drafter one's answers come in the order of the plain ones' tokens, those of two in that of one's rounds; all of
    these prompts have one width.
    """
    of_run = [r for r in Study.read(out).records if (r["temperature"], r["seed"], r["training_seed"]) == (1.0, 1, 0)]

    def by_answer(drafter: str, kind: str, value) -> dict:
        records = [r for r in of_run if (r["drafter"], r["kind"]) == (drafter, kind)]
        return {(r["set"], r["question"], r["turn"]): value(r) for r in records}

    tokens = by_answer("plain", "plain", lambda record: record["new_tokens"])
    rounds = by_answer("one", "drafted", lambda record: len(record["accept_lengths"]))
    assert [tokens[answer] for answer in rounds] == [3, 5, 6, 6, 6, 6]
    assert [rounds[answer] for answer in by_answer("two", "drafted", len)] == [2, 4, 5, 5, 5, 5]


def test_answers_are_those_of_the_generator_and_drafted_ones_the_targets_own(root, out, results):
    generator = Generator.from_pretrained(str(root / "words"))
    (answer,) = generator.generate(["w9 w10"], max_new_tokens=6)
    records = {Key(*(r[field] for field in Key._fields)): r for r in Study.read(out).records}
    plain = records[Key("plain", "plain", 0, "single", "1", 0, 0.0, 0, 0)]
    assert plain["token_ids"] == answer.token_ids
    assert plain["text"] == answer.text
    for drafter in results.drafters:
        for setting in results.settings:
            identical, answers = results.cell(drafter, setting).identical
            assert identical == answers == results.cell(drafter, setting).expected


def test_later_turns_follow_the_models_own_answers(root, out):
    records = {Key(*(r[field] for field in Key._fields)): r for r in Study.read(out).records}
    first = records[Key("plain", "plain", 0, "talk", "81", 0, 0.0, 0, 0)]
    second = records[Key("plain", "plain", 0, "talk", "81", 1, 0.0, 0, 0)]
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": first["text"]}]
    messages.append({"role": "user", "content": "w3 w4 w5"})
    (expected,) = Generator.from_pretrained(str(root / "words")).generate([messages], max_new_tokens=6)
    assert second["token_ids"] == expected.token_ids
    assert second["prompt_tokens"] == len(expected.prompt_ids)


def test_sampling_seeds_differ_and_prompts_do_not_share_their_randomness(out):
    sampled = [r["token_ids"] for r in Study.read(out).records if r["kind"] == "plain" and r["temperature"] == 1]
    assert len({tuple(ids) for ids in sampled}) == len(sampled) == 12


def test_figures_are_those_of_the_records(out, results):
    """Counted anew here, without any of the code that is tested."""
    setting = Setting(0.0, 2)
    records = [r for r in Study.read(out).records if r["kind"] == "drafted" and r["drafter"] == "two"]
    lengths = [n for r in records if r["temperature"] == 0 for n in r["accept_lengths"]]
    cell = results.cell("two", setting)
    assert cell.counts.tokens_per_round == pytest.approx(np.mean(lengths) + 1)
    assert cell.counts.acceptance(1) == [np.mean(np.array(lengths) >= 1)]
    assert cell.over("training_seed").count == 2
    assert results.cell("two", Setting(1.0, 2)).over("seed").count == 2
    low, high = cell.interval
    assert low <= cell.counts.tokens_per_round <= high
    timed = [r for r in Study.read(out).records if r["kind"] == "timing" and r["drafter"] == "one"]
    duration = results.timings("one", setting).drafted
    assert duration.tokens == sum(r["drafted"]["tokens"] for r in timed if r["temperature"] == 0)
    plain = results.timings("one", setting).plain
    assert plain.rounds == plain.tokens - plain.answers  # a step a token, but for the prompt's own


def test_the_same_command_measures_nothing_a_second_time(root, out, capsys):
    before = (out / "records.jsonl").read_bytes()
    with compilations() as compiled:
        shown = run(root, out, COMMAND, capsys)
    assert (out / "records.jsonl").read_bytes() == before
    assert compiled == []
    assert "Overall" in shown
    assert [run["ended"] for run in Study.read(out).description["runs"]] == ["done", "done"]


def test_a_run_that_time_ends_is_marked_and_the_same_command_goes_on(root, tmp_path, capsys):
    """Each process does a step at least, so it comes to an end; its records are those of one run."""
    shown = run(root, tmp_path / "short", f"{CHEAP} --minutes 0.00001", capsys)
    assert "partial: the time of --minutes is over; the same command goes on" in shown
    assert 0 < len(keys_of(tmp_path / "short")) <= 3
    page = (tmp_path / "short" / "report.html").read_text()
    assert "Partial results:</b> 0 of 18 answers are there" in page
    for _ in range(60):
        if "partial" not in run(root, tmp_path / "short", f"{CHEAP} --minutes 0.0001", capsys):
            break
    assert "Partial results" not in (tmp_path / "short" / "report.html").read_text()
    run(root, tmp_path / "long", CHEAP, capsys)
    assert untimed(tmp_path / "short") == untimed(tmp_path / "long")


def test_an_interrupted_run_keeps_what_was_finished(root, tmp_path, capsys, monkeypatch):
    """Ctrl-C inside the third batch; the programs cache is what it was before."""
    batches, answer, cache = [], Runner.answer, jax.config.jax_compilation_cache_dir

    def interrupted(*arguments):
        batches.append(arguments)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return answer(*arguments)

    monkeypatch.setattr(Runner, "answer", interrupted)
    arguments = [*shlex.split(CHEAP.format(root=root)), "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 130
    assert jax.config.jax_compilation_cache_dir == cache
    kept = (tmp_path / "records.jsonl").read_bytes()
    assert len(keys_of(tmp_path)) == 4  # a batch of three and one of one: the first turns, plain
    run(root, tmp_path, CHEAP, capsys)
    assert (tmp_path / "records.jsonl").read_bytes().startswith(kept)
    assert [run["ended"] for run in Study.read(tmp_path).description["runs"]] == ["was interrupted", "done"]


def test_timing_may_leave_temperatures_out(root, tmp_path, capsys):
    shown = run(root, tmp_path, f"{COMMAND} --timing-temperature 1 --seeds 1 --limit 1 --drift-prompts 0", capsys)
    timed = [key for key in keys_of(tmp_path) if key.kind in ("timing", "split")]
    assert {key.temperature for key in timed} == {1.0}
    assert "*" not in shown
    assert Results(Study.read(tmp_path)).split("one", 2).prompts == 2


def test_half_precision_is_compared_with_its_own_plain_answers(root, tmp_path, capsys):
    """Where rounding makes an answer leave the plain one, the target was all but undecided."""
    command = CHEAP.replace("--timing-prompts 1", "--timing-prompts 0").replace(
        "--max-new-tokens 6", "--max-new-tokens 40"
    )
    run(root, tmp_path, f"{command} --dtype bfloat16", capsys)
    results = Results(Study.read(tmp_path))
    cell = results.cell("two", Setting(0.0, 2))
    parted = [record for record in cell.records if not record["identical"]]
    assert cell.identical == (len(cell.records) - len(parted), 12)
    assert all(record["logit_gap"] < 0.2 for record in parted)
    assert cell.largest_gap == max((r["logit_gap"] for r in parted), default=None)


def untimed(directory) -> list[str]:
    """All records, sorted, without what a clock gave."""
    records = [r for r in Study.read(directory).records if r["kind"] in ("plain", "drafted")]
    return sorted(json.dumps(record, sort_keys=True) for record in records)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_work_before_a_step_and_a_second_ctrl_c_at_once(number, capfd):
    before = signal.getsignal(number)
    with Clock(None, started=0.0) as clock:
        clock.step()
        signal.raise_signal(number)
        assert capfd.readouterr().err == "\nstopping after this step; Ctrl-C ends it here\n"
        with pytest.raises(Stopped, match=f"stopped by {number.name}"):
            clock.step()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) == before


def test_time_ends_the_work_before_a_step():
    clock = Clock(1.0, started=-1e9)
    clock.step()  # the first is always begun
    with pytest.raises(Stopped, match="the time of --minutes is over"):
        clock.step()


def test_more_drafters_and_levels_are_added_to_what_is_there(root, tmp_path, capsys):
    start = f"--target {{root}}/words {SETS} {LENGTHS} --temperature 0 --drift-prompts 0 --timing-prompts 0"
    run(root, tmp_path, f"{start} {TREE} --drafts one={{root}}/one --limit 1", capsys)
    before = (tmp_path / "records.jsonl").read_bytes()
    shown = run(root, tmp_path, f"{start} {TREE} --drafts two={{root}}/two --spans two=1,1 --limit 1", capsys)
    assert (tmp_path / "records.jsonl").read_bytes().startswith(before)
    assert Counter(key.drafter for key in keys_of(tmp_path)) == {"plain": 3, "one": 3, "two": 3}
    assert re.search(r"one, T=0, 2 levels .*3 of 3\n", shown)
    assert re.search(r"two, T=0, 2 levels .*3 of 3\n", shown)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--max-new-tokens 7", "was begun with another --max-new-tokens (6); give that, or another --out"),
        ("--total-nodes 4", "was begun with another --total-nodes (5)"),
        ("--dtype bfloat16", "was begun with another --dtype (float32)"),
        ("--drafts one={root}/two_again --spans one=1,1", "--drafts one: not the drafter that --out"),
        ("--prompts {root}/other/single.jsonl", "--prompts: single is not what it was when --out"),
    ],
)
def test_what_is_not_comparable_is_not_added(root, out, capsys, change, message):
    (root / "other").mkdir(exist_ok=True)
    write(root / "other" / "single.jsonl", {"prompt": "w1"})
    before = (out / "records.jsonl").read_bytes()
    command = COMMAND.replace(" --spans two=1,1", "") if "--drafts" in change else COMMAND
    assert refusal(root, out, f"{command} {change}", capsys).startswith("error: ")
    assert message in refusal(root, out, f"{command} {change}", capsys)
    assert (out / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--drafts {root}/one", "one' must be a name and a value, such as poss3=DIR"),
        ("--spans 1,1", "--spans '1,1' must be a name and a value, such as poss3=3,3"),
        ("--spans two=1,1 two=2,2", "--spans names two twice; the spans of a drafter are one list"),
        (
            "--drafts one={root}/one one={root}/two",
            "--drafts names one twice; training seeds of one drafter are written",
        ),
        ("--drafts plain={root}/one", "plain is what decoding without a drafter is called; choose another name"),
        (
            "--drafts one={root}/one,{root}/longer",
            "one: training seeds of one drafter must have the same spans and shape",
        ),
        ("--drafts one={root}/two", "pass --spans with 2 numbers, such as --spans one=2,2"),
        ("--drafts one={root}/two --spans one=3", "spans 3 of --spans are for 1 specialist(s)"),
        ("--spans two=none", "spans 'none' must be whole numbers of at least 1"),
        ("--drafts one={root}/one --spans two=3", "--spans two=3: --drafts has no two"),
        ("--drafts one={root}/none", "none: no such file or directory"),
        ("--prompts {root}/none.jsonl", "none.jsonl: not readable"),
        ("--prompts {root}/single.jsonl {root}/single.jsonl", "--prompts holds 2 sets that are called single"),
        ("--seeds 0", "--seeds 0 must be at least 1"),
        ("--batch-size 0", "--batch-size 0 must be at least 1"),
        ("--timing-prompts -1", "--timing-prompts -1 must be at least 0"),
        ("--timing-repeats 0", "--timing-repeats 0 must be at least 1"),
        ("--drift-prompts -1", "--drift-prompts -1 must be at least 0"),
        ("--limit 0", "--limit 0 must be at least 1"),
        ("--minutes 0", "--minutes 0.0 must be a number above 0"),
        ("--levels 0", "--levels 0 must be a whole number of at least 1"),
        ("--levels 2 3 2", "--levels names 2 twice"),
        ("--timing-temperature 0.5", "--timing-temperature 0.5 is not among --temperature; add it there"),
        ("--timing-prompts 0 --timing-temperature 5", "--timing-temperature needs prompts to time; leave it out, or"),
        ("--timing-prompts 0 --timing-temperature 0", "--timing-temperature needs prompts to time; leave it out, or"),
        ("--temperature -1", "temperature -1.0 must be 0 (greedy) or from"),
    ],
)
def test_flags_that_make_no_sense_are_refused_in_a_line(root, tmp_path, capsys, monkeypatch, change, message):
    """Before the target is loaded, which takes long."""
    monkeypatch.setattr(benchmark, "load_models", lambda *_, **__: pytest.fail("the target was loaded"))
    command = COMMAND.replace(" --spans two=1,1", "") if "--drafts" in change else COMMAND
    shown = refusal(root, tmp_path / "new", f"{command} {change}", capsys)
    assert message in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "new").exists()


def refusal(root, out, command: str, capsys) -> str:
    capsys.readouterr()
    arguments = [*shlex.split(command.format(root=root)), "--out", str(out)]
    assert benchmark.main(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ("", "questions.jsonl: holds no questions"),
        ("{", "questions.jsonl, line 1: not JSON"),
        ('{"text": "w1"}', "line 1: expected an object with one of prompt, messages, turns, prompt_ids"),
        ('\n{"turns": []}', "line 2: turns must be a list of texts that is not empty"),
        ('{"turns": ["w1", 2]}', "line 1: turns must be a list of texts that is not empty"),
        (
            '{"question_id": 5, "prompt": "a"}\n{"question_id": "5", "prompt": "b"}',
            "2 questions have the question_id 5",
        ),
        ('{"prompt_ids": [3, 64]}', "questions, question 1: the prompt holds token id 64"),
    ],
)
def test_sets_that_cannot_be_asked_are_named(root, tmp_path, capsys, records, message):
    (tmp_path / "questions.jsonl").write_text(records)
    command = COMMAND.replace(SETS, f"--prompts {tmp_path}/questions.jsonl")
    assert message in refusal(root, tmp_path / "new", command, capsys)


def test_hub_data_sets_are_read_with_datasets(root, tmp_path, monkeypatch, capsys):
    """A directory of the form owner/name is what the hub has behind such a name; its test split is taken."""
    directory = tmp_path / "owner" / "mine"
    directory.mkdir(parents=True)
    for split, text in (("train", "w1"), ("test", "w2 w3")):
        write(directory / f"{split}.jsonl", {"prompt": [text, "w4"], "category": "math"})
    import datasets

    load = datasets.load_dataset
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name: load(str(tmp_path / name), cache_dir=str(tmp_path / "c"))
    )
    from infer.prompt_sets import read_prompt_sets

    (found,) = read_prompt_sets(["owner/mine"])
    assert found.name == "mine"
    assert [(q.prompt, q.later_turns, q.category) for q in found.questions] == [("w2 w3", ("w4",), "math")]


def test_prompts_beyond_the_context_are_left_out_and_said_so(root, tmp_path, capsys):
    write(tmp_path / "long.jsonl", {"turns": ["w1 " * 300, "w2"]}, {"turns": ["w3"]})
    command = CHEAP.replace(SETS, f"--prompts {tmp_path}/long.jsonl")
    shown = run(root, tmp_path / "out", command, capsys)
    results = Results(Study.read(tmp_path / "out"))
    assert [(r["question"], r["turn"], r["skipped"]) for r in results.skipped] == [
        ("1", 0, "longer than the target's context"),
        ("1", 1, "longer than the target's context"),
    ]
    assert results.cell("one", Setting(0.0, 2)).complete
    assert "2 prompts were left out" in (tmp_path / "out" / "report.html").read_text()
    assert "partial" not in shown


def test_the_golden_traces_accept_lengths_come_out_of_the_command(tmp_path, capsys):
    """Setting B of the PosS-3 draft, all prompts in one batch."""
    runs = [run for run in golden_data.trace("poss3")["runs"] if run["setting"] == "B"]
    write(tmp_path / "golden.jsonl", *({"prompt_ids": run["prompt_ids"]} for run in runs))
    assert (runs[0]["levels"], runs[0]["total_nodes"], runs[0]["top_k"]) == (4, 16, 4)
    command = (
        f"--target {golden_data.TARGET} --drafts poss3={golden_data.ROOT / 'drafts' / 'poss3'} --spans poss3=3,3 "
        f"--prompts {tmp_path}/golden.jsonl --temperature 0 --levels 4 --total-nodes 16 --draft-top-k 4 "
        f"--max-new-tokens 64 --batch-size {len(runs)} --timing-prompts 0 --drift-prompts 0"
    )
    run(tmp_path, tmp_path / "out", command, capsys)
    results = Results(Study.read(tmp_path / "out"))
    cell = results.cell("poss3", Setting(0.0, 4))
    ours = {record["question"]: record["accept_lengths"] for record in cell.records}
    theirs = {str(number): run["accept_lengths"] for number, run in enumerate(runs, 1)}
    assert all(theirs[name][: len(lengths)] == lengths for name, lengths in ours.items())
    kept = [n for name, lengths in ours.items() for n in theirs[name][: len(lengths)]]
    assert cell.counts.tokens_per_round == pytest.approx(1 + sum(kept) / len(kept))
    assert cell.identical == (len(runs), len(runs))


def test_g17_times_compile_once_for_a_bucket_and_block_until_done(tiny):
    """Two prompts of different length, each timed twice."""
    runner = Runner(tiny)
    settings = Settings(max_new_tokens=9, levels=2, total_nodes=5, draft_top_k=2)
    with compilations() as first:
        timed = runner.time(prompt_of(18), 0, settings, repeats=1)
    assert first
    with compilations() as later:
        again = [runner.time(prompt_of(length), 0, settings, repeats=2) for length in (18, 31)]
    assert later == []
    for one in (timed, *again):
        duration = one.duration
        assert duration.tokens == len(one.answer.token_ids) == 9
        assert duration.rounds == one.answer.rounds
        assert duration.prefill_seconds > 0 < duration.decode_seconds
    assert timed.answer.token_ids == again[0].answer.token_ids


def test_the_parts_of_a_round_that_are_timed_are_the_round(tiny):
    """Whatever the number of repetitions: the tree and the state that a round makes."""
    batch = batch_of(tiny, [prompt_of(10)], max_new_tokens=20, levels=3, total_nodes=8, draft_top_k=2)
    batch.start()
    batch.advance(2)
    state = batch.state
    whole = jax.jit(decode.decode_round, static_argnums=1)(batch.params, batch.plan, state, batch.eos_ids)
    for repeats in (1, 3):
        tree, caches = repeat_draft(batch.params, batch.plan, state, np.int32(repeats))
        np.testing.assert_array_equal(tree.tokens, whole.last_round.tree.tokens)
        jax.tree.map(np.testing.assert_array_equal, caches, whole.draft_caches)
        after = repeat_verify(batch.params, batch.plan, state, tree, batch.eos_ids, np.int32(repeats))
        for field in ("tokens", "length", "rounds", "accept_lengths"):
            np.testing.assert_array_equal(getattr(after, field), getattr(whole, field))
        assert int(after.rounds[0]) == 3


@pytest.mark.parametrize(("length", "width"), [(1, 128), (128, 128), (129, 512), (513, 2048), (2049, 4096)])
def test_prompts_that_are_not_timed_have_few_widths(length, width):
    assert coarse_width(length) == width


def test_the_report_needs_no_other_file_and_says_what_ran(out):
    page = (out / "report.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert page.count("data:image/png;base64,") == len(list((out / "figures").glob("*.png"))) == 6
    for text in ("two against one, T=0, 2 levels, overall", "abc", "--max-new-tokens 6", "two_again", "words"):
        assert text in page
    assert str(out.parent) not in page  # a page is for others
    place = f"on {benchmark.device_name()} with the target and one, two"
    counted = Study.read(out).description["runs"][0]["peak_bytes"]
    peak = "unknown" if jax.default_backend() == "cpu" else mebibytes(counted)
    assert f"Peak device memory of a whole process {place}: {peak}" in page


def test_peaks_of_runs_are_put_together(out):
    """A study of many parts had a line of thirteen runs."""
    study = Study.read(out)
    run = {"device": "one card", "drafters": ["one", "two"]}
    swapped = run | {"drafters": ["two", "one"]}
    peaks = [run | {"peak_bytes": 3 * 2**20}, swapped | {"peak_bytes": None}, swapped | {"peak_bytes": 2**20}]
    study.description["runs"] = [*peaks, {"device": "another", "drafters": ["two"], "peak_bytes": None}]
    assert peak_note(Results(study)) == (
        "Peak device memory of a whole process on one card with the target and one, two: 1.0 MiB to 3.0 MiB "
        "(2 of 3 runs); on another with the target and two: unknown."
    )


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("overall", "Overall"),
        ("sets", "By set, T=0, 2 levels"),
        ("tests", "two is not told apart from one at T=0, 2 levels: "),
        ("ablation", "Spans and levels, T=1"),
        ("acceptance", "Losslessness"),
        ("tasks", "category math"),
        ("time", "Time split of a round"),
        ("specialists", "Memory and latency by number of specialists"),
        ("drift", "two: cosine"),
    ],
)
def test_studies_from_saved_results(out, capsys, name, title):
    assert study.main([name, "--out", str(out)]) == 0
    assert title in capsys.readouterr().out


def test_the_report_is_written_anew_from_saved_results(out, capsys):
    before = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert study.main(["report", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}/report.html\n"
    assert text_of((out / "report.html").read_text()) == text_of(before)


def text_of(page: str) -> str:
    return re.sub(r'src="data:[^"]*"', "", page).split("<h2>What was run")[0]


def test_studies_of_nothing_are_refused(tmp_path, capsys):
    assert study.main(["overall", "--out", str(tmp_path)]) == 2
    assert "holds no records.jsonl; python -m infer.benchmark --out" in capsys.readouterr().err


OVER = "the time of --minutes is over"


def part(out, directory, drafter: str, *, ended: Sequence[str] = ("done",), **changes) -> str:
    """The directory of a benchmark of one of the drafters: the plain answers and what it has of its own.

    ended: of each of its runs. changes: to its description.
    """
    whole = Study.read(out)
    runs = [{**whole.description["runs"][0], "drafters": [drafter], "ended": why} for why in ended]
    drafters = {drafter: whole.description["drafters"][drafter]}
    records = [record for record in whole.records if record["drafter"] in (drafter, "plain")]
    Study({**whole.description, "drafters": drafters, "runs": runs, **changes}, records).write(directory)
    return str(directory)


def refused_join(out, parts: Sequence[str], capsys) -> str:
    """The one line that is said; nothing is written."""
    before = out.exists()
    assert study.main(["join", "--out", str(out), *parts]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert out.exists() == before
    return said


def test_directories_of_single_drafters_are_joined_and_gone_on_with(root, out, tmp_path, capsys):
    parts = [part(out, tmp_path / name, name) for name in ("one", "two")]
    joined = tmp_path / "joined"
    assert study.main(["join", "--out", str(joined), *parts]) == 0
    assert capsys.readouterr().out == f"{joined}/report.html\n"
    kinds = Counter(key.kind for key in keys_of(joined))
    assert kinds == {"plain": 18, "drafted": 54, "timing": 12, "split": 4, "drift": 9}
    found, whole = Study.read(joined), Study.read(out)
    assert sorted(map(json.dumps, found.records)) == sorted(map(json.dumps, whole.records))
    assert list(found.description["drafters"]) == ["one", "two"]
    assert [run["drafters"] for run in found.description["runs"]] == [["one"], ["two"]]
    page = (joined / "report.html").read_text()
    assert "two against one, T=0, 2 levels, overall" in page
    assert "Partial results" not in page

    before = (joined / "records.jsonl").read_bytes()
    run(root, joined, COMMAND)
    assert (joined / "records.jsonl").read_bytes() == before
    assert [run["drafters"] for run in Study.read(joined).description["runs"]] == [["one"], ["two"], ["one", "two"]]


@pytest.mark.parametrize(
    ("first", "second", "unfinished"),
    [
        (["done"], ["done"], None),
        ([OVER, "done"], ["was interrupted", OVER, "done"], None),  # gone on with, each in its own directory
        (["done", OVER], ["done"], f"run 2 ({OVER})"),
        (["done"], [OVER, "was interrupted"], "run 3 (was interrupted)"),
        ([OVER], ["stopped by SIGTERM"], f"run 1 ({OVER}), run 2 (stopped by SIGTERM)"),
    ],
)
def test_a_joined_study_is_done_where_every_part_is(out, tmp_path, first, second, unfinished):
    """And stays what it is when it is joined with nothing."""
    parts = [part(out, tmp_path / "a", "one", ended=first), part(out, tmp_path / "b", "two", ended=second)]
    joined = join_studies(parts, [Study.read(directory) for directory in parts])
    assert Results(joined).unfinished == unfinished
    assert Results(join_studies(["joined"], [joined])).unfinished == unfinished


def test_a_joined_study_may_be_joined_and_is_finished_by_going_on(out, tmp_path):
    names = [part(out, tmp_path / "a", "one", ended=[OVER]), part(out, tmp_path / "b", "two", ended=["done", "done"])]
    one, two = map(Study.read, names)
    both = join_studies(names, [one, two])
    later = [{**run, "date": "another"} for run in two.description["runs"]]
    third = dataclasses.replace(two, description={**two.description, "drafters": {}, "runs": later})
    nested = join_studies(["c", "ab"], [third, both])
    assert nested.description["last_runs"] == [1, 2, 4]
    assert Results(nested).unfinished == f"run 3 ({OVER})"
    gone_on = benchmark.go_on(nested.description, {**two.description, "runs": []}, "ab")
    gone_on["runs"].append({"ended": "done"})
    assert Results(Study(gone_on, [])).unfinished is None


def test_what_another_directory_has_is_not_joined_twice(out, tmp_path):
    """A copy that went on, and a part of a study that was joined before; in any order."""
    begun = Study.read(part(out, tmp_path / "a", "one", ended=["was interrupted"]))
    begun = Study(begun.description, begun.records[:7])
    others = {**begun.description, "sets": {"others": {"fingerprint": "z"}}, "questions": {"others": {"1": 1}}}
    went_on = Study.read(part(out, tmp_path / "b", "one", ended=["was interrupted", "done"]))
    two = Study.read(part(out, tmp_path / "c", "two"))
    expected = join_studies(["b", "c"], [went_on, two])
    assert [run["ended"] for run in expected.description["runs"]] == ["was interrupted", "done", "done"]
    for studies in (
        [begun, went_on, two],
        [went_on, begun, two],
        [went_on, two, went_on],
        [begun, expected],
        [two, expected],
    ):
        joined = join_studies(list("xyz"[: len(studies)]), studies)
        assert joined.description == expected.description
        assert joined.records == expected.records
    for apart in (Study(others, []), Study(begun.description, [])):  # another part that began in the same minute
        joined = join_studies(["x", "y"], [apart, went_on])
        assert Results(joined).unfinished == "run 1 (was interrupted)"
    other = Study(begun.description, [{**begun.records[0], "seconds": -1.0}])
    with pytest.raises(InputError, match="x and y have measured the same thing and not alike"):
        join_studies(["x", "y"], [other, went_on])


def test_what_is_joined_is_what_any_part_has(out, tmp_path):
    one = {"temperatures": [1.0], "timed_temperatures": [], "levels": [4], "seeds": 5, "timing_prompts": 0}
    one |= {"sets": {"talk": {"fingerprint": "x"}}, "questions": {"talk": {"81": 2}}}
    two = {"temperatures": [0.0], "timed_temperatures": [0.0], "levels": [2], "seeds": 1, "timing_prompts": 3}
    two |= {"sets": {"single": {"fingerprint": "y"}}, "questions": {"single": {"1": 1, "2": 1}}}
    parts = [part(out, tmp_path / "a", "one", **one), part(out, tmp_path / "b", "two", **two)]
    found = join_studies(parts, [Study.read(directory) for directory in parts]).description
    assert {name: found[name] for name in one} == {
        "temperatures": [0.0, 1.0],
        "timed_temperatures": [0.0],
        "levels": [2, 4],
        "seeds": 5,
        "timing_prompts": 3,
        "sets": {"talk": {"fingerprint": "x"}, "single": {"fingerprint": "y"}},
        "questions": {"talk": {"81": 2}, "single": {"1": 1, "2": 1}},
    }


def test_older_directories_that_do_not_name_attention_are_joined_in_any_order(out, tmp_path):
    fixed = dict(Study.read(out).description["fixed"])
    assert fixed.pop("attention") == "plain"
    parts = [part(out, tmp_path / "old", "one", fixed=fixed), part(out, tmp_path / "new", "two")]
    studies = [Study.read(directory) for directory in parts]
    for joined in (join_studies(parts, studies), join_studies(parts[::-1], studies[::-1])):
        assert joined.description["fixed"] == {"attention": "plain", **fixed}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fixed": {"dtype": "bfloat16"}},
            "{two} was measured with another dtype (bfloat16) than {one} (float32); "
            "join directories that have it in common",
        ),
        ({"fixed": {"target": "0"}}, "{two} was measured with another target (0) than {one} ("),
        ({"fixed": {"max_new_tokens": 7}}, "{two} was measured with another max new tokens (7) than {one} (6); "),
        (
            {"sets": {"single": {"fingerprint": "0"}}},
            "{two}: the prompt set single is not that of {one}; join directories that asked the same",
        ),
        (
            {"drafters": {"one": [{"fingerprint": "0", "spans": [1]}]}},
            "{two}: the drafter one is not that of {one}; measure one of them under another name",
        ),
    ],
)
def test_what_is_not_comparable_is_not_joined(out, tmp_path, capsys, changes, message):
    if "fixed" in changes:
        changes = {"fixed": Study.read(out).description["fixed"] | changes["fixed"]}
    one, two = part(out, tmp_path / "one", "one"), part(out, tmp_path / "two", "two", **changes)
    said = refused_join(tmp_path / "joined", [one, two], capsys)
    assert said.startswith("error: " + message.format(one=one, two=two))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            Key("plain", "plain", 0, "talk", "81", 0, 0.0, 0, 0),
            "(kind plain, drafter plain, training_seed 0, set talk, question 81, turn 0, temperature 0.0, seed 0, "
            "levels 0); the target answers otherwise there; measure what the second has with "
            "infer.benchmark --out {one}",
        ),
        (
            Key("timing", "one", 0, "single", "1", 0, 1.0, 0, 2),
            "(kind timing, drafter one, training_seed 0, set single, question 1, turn 0, temperature 1.0, seed 0, "
            "levels 2); keep one of the two, and remove the other's line of records.jsonl",
        ),
    ],
)
def test_what_is_measured_twice_and_not_alike_is_named(out, tmp_path, capsys, key, message):
    one, two = part(out, tmp_path / "one", "one"), part(out, tmp_path / "two", "one")
    records = Study.read(two).records
    write(
        tmp_path / "two" / "records.jsonl",
        *({**record, "prompt_tokens": 0} if Key.of(record) == key else record for record in records),
    )
    said = refused_join(tmp_path / "joined", [one, two], capsys)
    assert said == f"error: {one} and {two} have measured the same thing and not alike {message.format(one=one)}\n"


def test_directories_that_cannot_be_joined_are_named(out, tmp_path, capsys):
    one, two = part(out, tmp_path / "one", "one"), part(out, tmp_path / "two", "two")
    before = (tmp_path / "two" / "records.jsonl").read_bytes()
    assert f"{two}: is there already; give another directory" in refused_join(tmp_path / "two", [one, two], capsys)
    assert (tmp_path / "two" / "records.jsonl").read_bytes() == before
    assert f"{one}/ is given twice" in refused_join(tmp_path / "joined", [one, two, f"{one}/"], capsys)
    (tmp_path / "empty").mkdir()
    assert "empty: holds no records.jsonl" in refused_join(tmp_path / "joined", [one, f"{tmp_path}/empty"], capsys)
