"""What is concluded from the records of a benchmark, on records written by hand; drift and near-ties on tiny models."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from infer import Generator, drift, figures, tables
from infer.benchmark_store import Study
from infer.lossless import first_difference, logit_gap
from infer.summary import Results, Setting
from poss_jax import llama
from poss_jax.config import DraftConfig
from tests.overfit import overfit
from tests.test_lossless import GREEDY, PROMPT

T0 = Setting(0.0, 6)


def about(*spans: int) -> dict:
    return {"spans": list(spans), "parameters": 10, "weight_bytes": 40, "training_steps": None, "directory": "d"}


def study(lengths: dict[str, dict[str, list[int]]], *, questions: int | None = None, seeds: int = 1) -> Study:
    """Drafters a (one specialist) and b (two) with the accept lengths of each question, whose name is `set/id`."""
    names = {name: {} for answers in lengths.values() for name in (q.split("/")[0] for q in answers)}
    for answers in lengths.values():
        for question in answers:
            names[question.split("/")[0]][question.split("/")[1]] = 1
    if questions is not None:
        names["qa"] = dict.fromkeys(map(str, range(questions)), 1)
    records = []
    for run, answers in lengths.items():
        drafter, _, training_seed = run.partition("#")
        for question, accepted in answers.items():
            set_name, identity = question.split("/")
            key = {"kind": "drafted", "drafter": drafter, "training_seed": int(training_seed or 0), "set": set_name}
            key |= {"question": identity, "turn": 0, "temperature": 0.0, "seed": 0, "levels": 6}
            values = {"accept_lengths": accepted, "new_tokens": 1 + len(accepted) + sum(accepted), "identical": True}
            records.append({**key, **values, "category": set_name})
    description = {
        "fixed": {"dtype": "float32"},
        "target": {"name": "t", "weight_bytes": 100},
        "questions": names,
        "drafters": {"a": [about(1)] * seeds, "b": [about(3, 3)] * seeds},
        "temperatures": [0.0],
        "levels": [6],
        "seeds": 1,
        "timing_prompts": 1,
        "timed_temperatures": [0.0],
        "runs": [],
    }
    return Study(description, records)


def timing(drafter: str, seconds: float) -> dict:
    """A timed answer of 10 rounds in so many seconds, and the plain one of 41 tokens in 4 seconds."""
    key = {"kind": "timing", "drafter": drafter, "training_seed": 0, "set": "qa", "question": "0", "turn": 0}
    key |= {"temperature": 0.0, "seed": 0, "levels": 6, "device": "x"}
    drafted = {"tokens": 41, "answers": 1, "rounds": 10, "prefill_seconds": 1.0, "decode_seconds": seconds}
    return {**key, "drafted": drafted, "plain": {**drafted, "rounds": 40, "decode_seconds": 4.0}}


def drifted(drafter: str, temperature: float, levels: int, cosine: float) -> dict:
    """Drift over so many positions, each with ten rows of this cosine similarity."""
    key = {"kind": "drift", "drafter": drafter, "training_seed": 0, "set": "qa", "question": "0", "turn": 0}
    key |= {"temperature": temperature, "seed": 0, "levels": levels}
    counts = {name: [10] * levels for name in ("rows", "reached", "accepted")}
    return {**key, **counts, "cosine": [10 * cosine] * levels}


def test_drift_is_shown_where_each_drafter_has_most_levels_and_at_one_temperature():
    """Parts of a study that were joined need not have drafted as deep, nor at the same temperatures."""
    joined = study({"a": {"qa/0": [1]}, "b": {"qa/0": [1]}})
    joined.description.update(temperatures=[0.0, 1.0], levels=[2, 6])
    joined.records.extend([drifted("a", 0.0, 2, 0.5), drifted("b", 1.0, 6, 0.1), drifted("b", 0.0, 6, 0.8)])
    results = Results(joined)
    assert results.drift("a").cosine == [0.5, 0.5]
    assert results.drift("b").cosine == pytest.approx([0.8] * 6)
    assert Results(study({"a": {"qa/0": [1]}})).drift("a").cosine == []


def test_a_drafter_that_is_better_on_every_question_beats_the_other():
    first = {f"qa/{n}": [1, 1 + n % 2, 2] for n in range(12)}
    second = {f"qa/{n}": [2, 2 + n % 2, 2 + n % 3] for n in range(12)}
    (overall, qa) = Results(study({"a": first, "b": second})).comparisons()
    assert (overall.set, qa.set) == (None, "qa")
    assert overall.test.count == 12
    assert overall.tokens_per_round == (2.5, 3.5)
    assert overall.gain == pytest.approx(0.4)
    assert overall.significant
    assert qa.significant
    (sentence,) = tables.verdicts([overall, qa])
    assert sentence.startswith("b beats a at T=0, 6 levels: 3.500 against 2.500 tokens per round (+40.0%; ")
    assert sentence.endswith("significantly better on qa.")


def test_comparisons_are_of_questions_that_both_have_and_partial_ones_say_so():
    first = {f"qa/{n}": [1, n] for n in range(4)}
    second = {"qa/1": [1, 1], "qa/2": [1, 3]}
    results = Results(study({"a": first, "b": second}, questions=4))
    comparison = results.compare("a", "b", T0)
    assert comparison.test.count == 2
    assert comparison.tokens_per_round == (2.25, 2.5)
    assert not comparison.complete
    assert results.cell("a", T0).complete
    assert (results.cell("b", T0).done, results.cell("b", T0).expected) == (2, 4)
    shown = tables.overall(results).as_text()
    assert "2.500*" in shown
    assert "2 of 4" in shown
    (sentence, *_) = tables.verdicts(results.comparisons())
    assert sentence.startswith("b is not told apart from a at T=0, 6 levels")
    assert sentence.endswith("; partial results.")


@pytest.mark.parametrize("field", ["turn", "seed"])
def test_turns_and_seeds_that_only_one_has_make_no_difference(field):
    """A run that --minutes ended has them for one drafter and not yet for the next; the two are the same here."""
    same = {f"qa/{n}": [1, n % 3, 2] for n in range(12)}
    made = study({"a": same, "b": same})
    more = [{**record, field: 1, "accept_lengths": [5, 5]} for record in made.records if record["drafter"] == "a"]
    (overall, _) = Results(Study(made.description, made.records + more)).comparisons()
    assert overall.tokens_per_round[0] == overall.tokens_per_round[1]
    assert (overall.test.difference, overall.test.p) == (0.0, 1.0)


def test_training_seeds_are_compared_on_what_all_of_them_have_answered():
    """b has only the questions that are hard for both, and is better there."""
    easy, hard = {f"qa/{n}": [5, 5, 5] for n in range(2)}, {f"qa/{n}": [1, 1] for n in range(2, 4)}
    better = {question: [2, 2] for question in hard}
    made = study({"a#0": easy | hard, "a#1": easy | hard, "b#0": better, "b#1": better | easy}, seeds=2)
    (overall, _) = Results(made).comparisons()
    assert overall.tokens_per_round == (2.0, 3.0)
    assert overall.test.count == 2
    assert overall.training.difference == 1.0


def test_tests_over_all_sets_and_those_of_single_sets_are_corrected_apart():
    """One pair and setting: the test over both sets stands alone, the two of single sets count twice at most."""
    first = {f"{name}/{n}": [1, 1 + n % 2, 2] for n in range(4) for name in ("qa", "sum")}
    second = {f"{name}/{n}": [2, 1 + n % 3, n] for n in range(4) for name in ("qa", "sum")}
    overall, *of_sets = Results(study({"a": first, "b": second})).comparisons()
    assert overall.p_adjusted == overall.test.p < of_sets[0].test.p
    assert [c.set for c in of_sets] == ["qa", "sum"]
    assert all(c.p_adjusted == pytest.approx(c.test.p) for c in of_sets)  # both have the same p: 2 p / 2


def test_training_seeds_are_paired_in_their_order():
    runs = {f"{name}#{seed}": {"qa/0": [base + seed, base]} for name, base in (("a", 1), ("b", 2)) for seed in range(3)}
    runs["b#2"] = {"qa/0": [5, 2]}
    comparison = Results(study(runs, seeds=3)).compare("a", "b", T0)
    assert comparison.test.count == 1  # one question, whose seeds are pooled
    assert comparison.test.p is None
    assert comparison.training.count == 3
    assert comparison.training.difference == pytest.approx((1 + 1 + 1.5) / 3)
    assert comparison.training.p == pytest.approx(0.0198, abs=1e-4)  # t = 7 with 2 degrees of freedom


def test_figures_that_resemble_tokens_per_round_have_their_own_names():
    """Known bug G17, in the table that the command prints."""
    results = Results(study({"a": {"qa/0": [4, 4, 4, 4], "qa/1": [0]}}))
    row = tables.spreads(results).rows[0]
    assert dict(zip(tables.spreads(results).columns, row, strict=True)) == {
        "": "a, T=0, 6 levels",
        "tokens/round": "4.200",
        "per-prompt mean": "3.000",
        "its SD": "2.828",
        "its 95% interval": "-22.412 to 28.412",
        "emitted/round": "4.200",
        "over sampling seeds": "4.200 ± – (1)",
        "over training seeds": "4.200 ± – (1)",
        "rounds": "5",
    }


@pytest.mark.parametrize(("seconds", "extra", "pays"), [(2.1, "+10.00 ms", "yes"), (2.8, "+80.00 ms", "no")])
def test_more_specialists_stop_paying_where_rounds_grow_more_than_their_tokens(seconds, extra, pays):
    """a: 200 ms for 2 tokens. b has 2.5 tokens, so its rounds may take 250 ms."""
    made = study({"a": {"qa/0": [1, 1]}, "b": {"qa/0": [1, 2]}})
    made = dataclasses.replace(made, records=[*made.records, timing("a", 2.0), timing("b", seconds)])
    first, second = tables.specialists(Results(made)).rows
    assert first[-4:] == ["–", "–", "–", "–"]
    assert second[-4:] == ["a", extra, "+50.00 ms", pays]
    assert Results(made).timings("a", T0).speed_up() == 2.0
    assert Results(made).timings("a", T0).speed_up(with_prefill=True) == pytest.approx(5 / 3)


def test_timings_of_several_devices_are_warned_of():
    made = study({"a": {"qa/0": [1]}})
    other = {**timing("b", 2.0), "device": "y"}
    made = dataclasses.replace(made, records=[*made.records, timing("a", 2.0), other])
    assert "Timed on: x, y. Several devices were used" in tables.times(Results(made)).note


def test_a_table_without_anything_measured_is_a_table():
    results = Results(study({"a": {"qa/0": []}}))
    for table in (tables.overall(results), tables.times(results), tables.parts(results), tables.drift(results)):
        assert table.as_text().startswith(table.title)
    assert results.comparisons() == []


def test_text_in_tables_is_no_html():
    table = tables.Table("<b>", ["&"], [["<i>"]], "<p>")
    assert "<h3>&lt;b&gt;</h3>" in table.as_html()
    assert "<td>&lt;i&gt;</td>" in table.as_html()


@pytest.mark.parametrize(
    ("spans", "positions", "deeper"), [((1,), 6, (6,)), ((3, 3), 8, (3, 5)), ((6,), 3, (6,)), ((1, 3, 4), 8, (1, 3, 4))]
)
def test_drift_is_followed_as_deep_as_trees_are(tiny, spans, positions, deeper):
    config = DraftConfig(tiny.draft.config.block, 64, spans)
    assert drift.deeper(config, positions).spans == deeper


def test_a_drafter_that_knows_the_text_by_heart_does_not_drift(models, tmp_path):
    """30 tokens: 28 chains can draft a token of the text, and one less for every position more; the features of rows
    that end inside the prompt are compared too.
    """
    draft = overfit(tmp_path / "draft", str(models / "tiny63"), PROMPT, 40)
    fitted = Generator.from_pretrained(str(models / "tiny63"), str(draft))
    found = drift.drift(fitted.models, PROMPT, GREEDY, 4, 64)
    assert found["reached"] == found["accepted"] == [29, 28, 27, 26]
    cosine = np.array(found["cosine"]) / found["rows"]
    np.testing.assert_allclose(cosine, 1.0, atol=1e-3)
    short = drift.drift(fitted.models, PROMPT, GREEDY[:1], 4, 64)
    assert short is None


def test_untrained_drafters_are_counted_the_same_at_any_width(tiny):
    one, other = (drift.drift(tiny.models, PROMPT, GREEDY, 3, width) for width in (48, 64))
    assert {name: one[name] for name in ("rows", "reached", "accepted")} == {
        name: other[name] for name in ("rows", "reached", "accepted")
    }
    np.testing.assert_allclose(one["cosine"], other["cosine"], rtol=1e-4)


@pytest.mark.parametrize(
    ("left", "right", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)]
)
def test_the_first_difference(left, right, place):
    assert first_difference(left, right) == place


def test_the_gap_is_that_of_the_targets_logits_where_two_texts_part(tiny):
    other = [*GREEDY[:3], 7, *GREEDY[4:]]
    ids = jnp.array([[*PROMPT, *GREEDY[:3]]])
    positions = jnp.arange(ids.shape[1])[None]
    config, params = tiny.target
    features, _ = llama.forward(params, config, ids, positions, positions + 1, None)
    logits = np.asarray(llama.head(params, features[0, -1]))
    assert logits.argmax() == GREEDY[3]
    assert logit_gap(tiny.models, PROMPT, GREEDY, other) == pytest.approx(logits[GREEDY[3]] - logits[7], abs=1e-4)
    assert logit_gap(tiny.models, PROMPT, GREEDY, GREEDY) is None
    assert logit_gap(tiny.models, PROMPT, GREEDY, GREEDY[:5]) is None


def test_bars_over_a_part_of_the_questions_look_so():
    """Two of three questions of the set are answered by a, all of them by b."""
    lengths = {"a": {"qa/0": [1], "qa/1": [2]}, "b": {"qa/0": [1], "qa/1": [2], "qa/2": [0]}}
    (axis,) = figures.tokens_per_round(Results(study(lengths, questions=3))).axes
    assert [(bar.get_hatch(), round(bar.get_height(), 6)) for bar in axis.patches] == [("////", 2.5), (None, 2.0)]
    (legend,) = axis.figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["plain decoding", "a", "b", "not all measured yet"]
