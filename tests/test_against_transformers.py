"""`python -m infer.against_transformers`: whom it compares, and what it refuses."""

import re
import sys

import pytest

from infer.against_transformers import main
from tests import fixtures
from tests.test_llama import CASES, make_model


def run(capsys, *flags) -> tuple[int, str, str]:
    status = main([*map(str, flags)])
    return status, *capsys.readouterr()


def test_as_many_tokens_as_the_context_holds_are_compared(tmp_path, capsys):
    """The tiny target's answer holds token 1, which is its end-of-text: neither side stops there."""
    fixtures.tiny(tmp_path, max_position_embeddings=34)
    status, out, _ = run(capsys, "--target", tmp_path, "--new-tokens", 30, "--repeats", 1)
    setting, ours, theirs, ratio = out.splitlines()
    assert status == 0
    assert re.fullmatch(r"\d+ threads, float32, 30 new tokens, median of 1 runs after one more", setting)
    rates = [float(re.fullmatch(r"\S+ +(\d+\.\d) tokens/s", line)[1]) for line in (ours, theirs)]
    assert float(ratio.split()[1].rstrip(",")) == pytest.approx(rates[0] / rates[1], rel=0.01)
    assert ratio.endswith(", tokens identical")


@pytest.mark.parametrize("name", ["Qwen2", "Qwen2, tied", "Qwen3 with biases", "Phi-3"])
def test_models_of_other_families_are_those_of_transformers(tmp_path, capsys, name):
    make_model(tmp_path, CASES[name], False)
    status, out, err = run(capsys, "--target", tmp_path, "--new-tokens", 6, "--repeats", 1)
    assert status == 0, err
    assert out.endswith(", tokens identical\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--new-tokens 31",
            "--new-tokens 31 and the prompt's 4 are more than the target's context of 34; give at most --new-tokens 30",
        ),
        ("--new-tokens 0", "--new-tokens 0 must be at least 1"),
        ("--repeats 0", "--repeats 0 must be at least 1"),
        ("--repeats=-1", "--repeats -1 must be at least 1"),
        ("--prompt-ids 0,64", "the prompt holds token id 64; the vocabulary has ids 0 to 63"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(tmp_path, capsys, flags, message):
    fixtures.tiny(tmp_path, max_position_embeddings=34)
    assert run(capsys, "--target", tmp_path, *flags.split()) == (2, "", f"error: {message}\n")


def test_without_torch_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    expected = "error: infer.against_transformers needs torch: pip install torch\n"
    assert run(capsys, "--target", "absent") == (2, "", expected)
