"""The records of a benchmark survive kills, and count once."""

import json
import subprocess
import sys

import pytest

from infer.benchmark_store import Key, Store, Study
from poss_jax.errors import InputError

KEY = Key("drafted", "poss3", 0, "qa", "321", 0, 0.0, 0, 6)
OTHER = KEY._replace(question="322")


def test_records_are_there_when_it_is_opened_again(tmp_path):
    with Store(tmp_path / "new") as store:
        store.add(KEY, accept_lengths=[1, 2], new_tokens=6)
        store.describe({"fixed": {}})
    with Store(tmp_path / "new") as store:
        assert KEY in store
        assert OTHER not in store
        assert store.records[KEY]["accept_lengths"] == [1, 2]
        assert store.description() == {"fixed": {}}
    study = Study.read(tmp_path / "new")
    assert [record["question"] for record in study.records] == ["321"]


def test_what_is_recorded_is_not_recorded_again(tmp_path):
    with Store(tmp_path) as store:
        store.add(KEY, new_tokens=6)
        with pytest.raises(ValueError, match="recorded already"):
            store.add(KEY, new_tokens=7)


@pytest.mark.parametrize("kept", [0, 1, 30, -1])
def test_a_line_that_a_kill_cut_is_measured_again(tmp_path, kept):
    """Whatever part of the last line is there: nothing, a byte, some, or all but its end."""
    with Store(tmp_path) as store:
        store.add(KEY, new_tokens=6)
        store.add(OTHER, new_tokens=7)
    first, second, _ = (tmp_path / "records.jsonl").read_bytes().split(b"\n")
    cut = second[:kept] if kept >= 0 else second
    (tmp_path / "records.jsonl").write_bytes(first + b"\n" + cut)
    with Store(tmp_path) as store:
        assert list(store.records) == [KEY]
        store.add(OTHER, new_tokens=7)
    assert (tmp_path / "records.jsonl").read_bytes() == first + b"\n" + second + b"\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("same", "line 2: is there twice; remove one of the two lines"),
        ("not JSON", "line 2: not a line that this command writes"),
        ("[]", "line 2: not a line that this command writes"),
        (json.dumps({**KEY._asdict(), "kind": "other"}), "line 2: has the unknown kind 'other'"),
    ],
)
def test_lines_that_should_not_be_there_are_named(tmp_path, line, message):
    with Store(tmp_path) as store:
        store.add(KEY, new_tokens=6)
    first = (tmp_path / "records.jsonl").read_text()
    (tmp_path / "records.jsonl").write_text(first + (first if line == "same" else line + "\n"))
    with pytest.raises(InputError, match=message), Store(tmp_path):
        pass


def test_two_runs_do_not_write_to_one_directory(tmp_path):
    code = f"from infer.benchmark_store import Store\nwith Store({str(tmp_path)!r}): pass"
    with Store(tmp_path):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert other.returncode != 0
    assert "another run writes there; wait for it, or take another" in other.stderr


def test_directories_that_hold_no_benchmark(tmp_path):
    with pytest.raises(InputError, match=r"holds no records.jsonl; python -m infer.benchmark --out"):
        Study.read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="not writable"), Store(tmp_path / "file"):
        pass
