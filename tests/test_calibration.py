"""Trees chosen by measurement: what smaller trees would have accepted, what rounds cost, and what follows."""

import itertools
import json
import statistics

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer import Generator, Settings, calibration, generate
from infer.calibration import Calibration, accept_length, best_tree, fit_cost
from poss_jax.errors import InputError
from tests import fixtures, golden_data

# Nodes 0 (root), 1 and 2 under it, 3 under 1, 4 under 3, 5 under 2; 1, 3 and 4 were accepted.
ROUND = {
    "depths": [0, 1, 1, 2, 3, 2],
    "scores": [0.0, -0.1, -0.2, -0.9, -1.0, -0.3],
    "accepted_path": [0, 1, 3, 4],
}


@pytest.mark.parametrize(
    ("levels", "nodes", "expected"),
    [(3, 6, 3), (2, 6, 2), (1, 6, 1), (3, 5, 2), (3, 4, 1), (3, 3, 1), (3, 2, 1), (3, 1, 0), (2, 5, 2), (2, 4, 1)],
)
def test_a_smaller_tree_accepts_what_it_holds_of_the_path(levels, nodes, expected):
    """Example: four nodes are the root, 1, 2 and 5, the best-scored; of the path 1, 3, 4 only 1 is left."""
    assert accept_length([ROUND], levels, nodes) == expected
    assert accept_length([ROUND, {**ROUND, "accepted_path": [0]}], levels, nodes) == expected / 2


def test_equal_scores_keep_the_lower_number():
    tied = {"depths": [0, 1, 1], "scores": [0.0, -1.0, -1.0], "accepted_path": [0, 2]}
    assert accept_length([tied], 1, 2) == 0
    assert accept_length([tied], 1, 3) == 1


@pytest.mark.parametrize(("levels", "nodes"), [(6, 20), (3, 60), (4, 8), (2, 4)])
def test_smaller_trees_accept_what_golden_rounds_of_large_ones_say(golden, levels, nodes):
    """Each round of the smaller tree has the accept length that the round of the larger one from the same root gives,
    where the larger one holds all of the smaller one's nodes.
    """
    generator, prompts = golden("poss2"), list(golden_data.prompts().values())[:2]
    reference = {"levels": max(calibration.LEVELS), "total_nodes": calibration.LARGE}
    large = generator.generate(prompts, max_new_tokens=40, batch_size=2, trace=True, **reference)
    small = generator.generate(prompts, max_new_tokens=40, levels=levels, total_nodes=nodes, batch_size=2, trace=True)
    for whole, part in zip(large, small, strict=True):
        by_root = {record["n_committed"]: record for record in whole.trace}
        shared = [record for record in part.trace if record["n_committed"] in by_root]
        assert shared
        for record in shared:
            assert accept_length([by_root[record["n_committed"]]], levels, nodes) == record["accept_length"]


@given(st.floats(0, 1e-2), st.floats(0, 1e-2), st.floats(0, 1e-3))
def test_costs_that_are_linear_are_found(constant, level, node):
    timed = {tree: constant + level * tree[0] + node * tree[1] for tree in ((2, 8), (4, 24), (6, 60), (8, 40))}
    cost = fit_cost(timed)
    assert cost(5, 30) == pytest.approx(constant + 5 * level + 30 * node, abs=1e-6)


def test_costs_are_never_negative():
    """A round that came out faster with more nodes does not make more nodes still better."""
    cost = fit_cost({(2, 8): 3.0, (4, 24): 2.9, (6, 60): 2.8, (8, 40): 2.7})
    assert cost(8, 60) >= cost(1, 4) > 0


def test_the_best_tree_weighs_tokens_against_seconds():
    trees = list(itertools.product((1, 2, 3), (2, 4, 6)))
    assert best_tree([ROUND], lambda levels, nodes: 1.0, trees) == (3, 6)
    assert best_tree([ROUND], lambda levels, nodes: float(levels), trees) == (1, 2)
    assert best_tree([ROUND], lambda levels, nodes: 1.0 + (nodes > 5) * 10, trees) == (1, 2)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A tiny target with a tokenizer, its drafter, and a calibration that is quick."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = fixtures.tiny(tmp_path / "target", eos_token_id=63)
    fixtures.tok(tmp_path / "target")
    fixtures.draft(tmp_path / "draft", config, 2)
    settings = {"TEXTS": ("w1 w2 w3", "w4 w5"), "NEW_TOKENS": 12, "TIMED": ((1, 2), (2, 4), (3, 6)), "REPEATS": 1}
    settings |= {"LEVELS": range(1, 4), "NODES": (2, 4, 6), "TIMED_ROUNDS": 2}
    for name, value in settings.items():
        monkeypatch.setattr(calibration, name, value)
    return tmp_path


def load(files) -> Generator:
    return Generator.from_pretrained(str(files / "target"), str(files / "draft"), spans=(2, 2))


AUTO = {"levels": "auto", "total_nodes": "auto", "draft_top_k": 3, "max_new_tokens": 20}


def test_measured_for_real_and_kept(files, monkeypatch, capsys):
    generator = load(files)
    (plain,) = generator.generate(["w7 w8"], max_new_tokens=20, plain=True)
    assert generator.generate(["w7 w8"], **AUTO)[0].token_ids == plain.token_ids
    assert "measuring which tree is fastest" in capsys.readouterr().err
    (kept,) = (files / "cache" / "poss-jax" / "trees").iterdir()
    contents = json.loads(kept.read_text())
    found = contents["found"]
    assert found["speed_up"] == pytest.approx(
        found["tokens_per_round"] * found["plain_seconds"] / found["round_seconds"]
    )
    assert contents["facts"]["device"] == jax.devices()[0].device_kind
    assert {tuple(tree[:2]) for tree in found["timed"]} >= {(1, 2), (2, 4), (3, 6)}
    monkeypatch.setattr(Calibration, "_measure", None)  # the next process reads what is kept
    again = load(files)
    assert again.generate(["w7 w8"], **AUTO)[0].token_ids == plain.token_ids
    assert list(again.visits([[0, 5]], Settings(**AUTO)))
    assert capsys.readouterr().err == ""


def test_a_broken_file_is_measured_again(files, monkeypatch):
    monkeypatch.setattr(
        Calibration, "_measure", lambda *_: {"levels": 2, "total_nodes": 4, "tokens_per_round": 2.0, "speed_up": 2.0}
    )
    load(files).generate(["w7 w8"], **AUTO)
    (kept,) = (files / "cache" / "poss-jax" / "trees").iterdir()
    whole = kept.read_text()
    for broken in ("", whole[:-9], "[]", "{}", '{"found": null}', '{"found": {"levels": 0}}'):
        kept.write_text(broken)
        load(files).generate(["w7 w8"], **AUTO)
        assert kept.read_text() == whole


def measured(monkeypatch, seconds):
    """So many seconds of a round by its levels and nodes, and one of a plain token; and tokens were accepted."""

    def fake(self, settings, length):
        return 1.0 if settings.plain else seconds(settings.levels, settings.total_nodes)

    monkeypatch.setattr(Calibration, "_seconds", fake)
    monkeypatch.setattr(Calibration, "_rounds", lambda self, settings: [ROUND])


@pytest.mark.parametrize(
    ("seconds", "drafted"),
    [(lambda levels, nodes: 1e-6, True), (lambda levels, nodes: 10.0 + levels, False)],
    ids=["cheap", "dear"],
)
def test_drafting_only_where_it_pays(files, monkeypatch, seconds, drafted):
    measured(monkeypatch, seconds)
    generator = load(files)
    (answer,) = generator.generate(["w7 w8"], trace=True, **AUTO)
    assert bool(answer.trace and len(answer.trace[0]["tokens"]) > 1) == drafted


@pytest.mark.parametrize("given", [{"levels": 3}, {"total_nodes": 4}])
def test_numbers_that_are_given_stay(files, monkeypatch, given):
    measured(monkeypatch, lambda levels, nodes: 1e-6)
    (answer,) = load(files).generate(["w7 w8"], trace=True, **{**AUTO, **given})
    record = answer.trace[0]
    if "levels" in given:
        assert max(record["depths"]) <= 3
    else:
        assert len(record["tokens"]) == 4


def test_what_is_measured_depends_on_models_and_settings(files, monkeypatch):
    measured = []

    def fake(self, settings):
        measured.append(settings)
        return {"levels": 1, "total_nodes": 2, "tokens_per_round": 2.0, "speed_up": 2.0}

    monkeypatch.setattr(Calibration, "_measure", fake)
    generator = load(files)
    for options in ({}, {}, {"temperature": 1.0}, {"seed": 5}, {"batch_size": 2}, {"max_new_tokens": 9}):
        generator.generate(["w7 w8", "w9"], **{**AUTO, **options})
    assert [(settings.temperature, settings.batch_size) for settings in measured] == [(0.0, 1), (1.0, 1), (0.0, 2)]
    fixtures.draft(files / "draft", fixtures.tiny(files / "other", seed=3), 2, seed=9)
    load(files).generate(["w7 w8"], **AUTO)
    assert len(measured) == 4


def test_without_texts_or_a_drafter(files, models, capsys):
    without = Generator.from_pretrained(str(models / "tiny63"), str(models / "draft2"), spans=(2, 2))
    with pytest.raises(InputError, match="auto trees are measured on texts, and the target has no tokenizer"):
        without.generate([[0, 5]], **AUTO)
    plain = Generator.from_pretrained(str(models / "tiny63"))
    assert plain.generate([[0, 5]], **AUTO)[0].token_ids == without.generate([[0, 5]], plain=True, **AUTO)[0].token_ids
    with pytest.raises(InputError, match="--levels never must be a whole number of at least 1, or auto"):
        Settings(levels="never")
    with pytest.raises(SystemExit):
        generate.main(["--target", "x", "--levels", "many", "--prompt-ids", "0"])
    assert "--levels: 'many' must be a whole number, or auto" in capsys.readouterr().err


def test_texts_that_end_at_once_mean_plain_decoding(files, monkeypatch):
    """No round was run, so nothing was accepted: whatever the clock said of rounds, as it may on a busy machine."""
    monkeypatch.setattr(Calibration, "_seconds", lambda self, settings, length: 1.0 if settings.plain else 1e-6)
    generator = load(files)
    first = {answer.token_ids[0] for answer in generator.generate(list(calibration.TEXTS), max_new_tokens=1)}
    settled = generator.settle(Settings(**AUTO, eos_ids=tuple(first)))
    assert settled.plain


def test_the_command_says_what_was_chosen(files, monkeypatch, capsys):
    measured(monkeypatch, lambda levels, nodes: 1e-6)
    flags = ["--target", str(files / "target"), "--draft", str(files / "draft"), "--spans", "2,2", "--levels", "auto"]
    flags += ["--total-nodes", "4", "--draft-top-k", "3", "--max-new-tokens", "4", "--trace", str(files / "trace.json")]
    assert generate.main([*flags, "--prompt-ids", "0,5"]) == 0
    assert "note: the tree that is fastest here has " in capsys.readouterr().err
    assert type(json.loads((files / "trace.json").read_text())["runs"][0]["levels"]) is int
    monkeypatch.setattr(
        Calibration, "_find", lambda *_: {"levels": 1, "total_nodes": 2, "tokens_per_round": 2.0, "speed_up": 1.0}
    )
    assert generate.main([*flags[:-2], "--prompt-ids", "0,5"]) == 0
    assert "no tree is faster than plain decoding here" in capsys.readouterr().err


def test_a_comparison_decodes_as_chosen(files, monkeypatch, capsys):
    """Where no tree gains, plain decoding is compared with itself, and not a tree that was not chosen."""
    flags = ["--target", str(files / "target"), "--draft", str(files / "draft"), "--spans", "2,2", "--levels", "auto"]
    flags += ["--draft-top-k", "3", "--max-new-tokens", "8", "--prompt-ids", "0,5", "--compare", "--json"]
    rounds = {}
    for speed_up in (0.5, 2.0):
        found = {"levels": 3, "total_nodes": 9, "tokens_per_round": 2.0, "speed_up": speed_up}
        monkeypatch.setattr(Calibration, "_find", lambda *_, found=found: found)
        assert generate.main(flags) == 0
        pair = json.loads(capsys.readouterr().out)
        assert pair["identical"]
        assert pair["drafted"] == (speed_up == 2.0)
        assert len(pair["plain"]["accept_lengths"]) == pair["plain"]["rounds"] == 7
        rounds[speed_up] = (pair["rounds"], sum(pair["accept_lengths"]))
    assert rounds[0.5] == (7, 0)
    assert rounds[2.0][0] + rounds[2.0][1] == 7


@pytest.mark.parametrize("more", [[], ["--compare"], ["--json"]])
def test_no_trace_of_trees_that_are_not_drafted(files, monkeypatch, capsys, more):
    found = {"levels": 3, "total_nodes": 9, "tokens_per_round": 2.0, "speed_up": 0.5}
    monkeypatch.setattr(Calibration, "_find", lambda *_: found)
    flags = ["--target", str(files / "target"), "--draft", str(files / "draft"), "--spans", "2,2", "--levels", "auto"]
    assert generate.main([*flags, "--prompt-ids", "0,5", "--trace", str(files / "trace.json"), *more]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1] == (
        "error: --trace writes draft trees, and no tree is faster than plain decoding here, so decoding is plain; give "
        "numbers for --levels and --total-nodes, or leave out --trace"
    )
    assert not (files / "trace.json").exists()


@pytest.mark.parametrize(
    ("speed_up", "row", "gain"), [(2.0, "drafted", True), (0.5, "as chosen (plain)", False)], ids=["pays", "does not"]
)
def test_a_speed_up_is_printed_only_of_a_drafter(files, monkeypatch, capsys, speed_up, row, gain):
    """Two plain rows differ by noise."""
    found = {"levels": 3, "total_nodes": 9, "tokens_per_round": 2.0, "speed_up": speed_up}
    monkeypatch.setattr(Calibration, "_find", lambda *_: found)
    flags = ["--target", str(files / "target"), "--draft", str(files / "draft"), "--spans", "2,2", "--levels", "auto"]
    flags += ["--draft-top-k", "3", "--max-new-tokens", "8", "--prompt-ids", "0,5", "--compare"]
    assert generate.main(flags) == 0
    _, header, first, second, *rest = capsys.readouterr().out.splitlines()
    assert len(header) == len(first) == len(second)
    assert (first[:17].rstrip(), second[:17].rstrip()) == (row, "plain")
    assert [line.split(": ")[0] for line in rest] == ["speed-up"] * gain + ["identical texts"]


def test_mean_over_rounds():
    rounds = [ROUND, {**ROUND, "accepted_path": [0]}, {**ROUND, "accepted_path": [0, 2, 5]}]
    assert accept_length(rounds, 3, 6) == statistics.fmean([3, 0, 2])
