"""What train.run reports: losses under its flags and figures on held-out conversations, against plain numpy."""

import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tqdm import tqdm

from convert.checkpoint import Source
from convert.load import load_target
from convert.tokenizer import load_tokenizer
from infer import Generator
from poss_jax import llama
from poss_jax.losses import Losses
from poss_jax.objective import Rows, run_unroll
from tests.overfit import overfit, replace_tensors
from tests.training import arguments, lines, shared_programs, train, write_inputs
from train import loop, run
from train.conversations import DataSource, Summary
from train.examples import Dataset, Example
from train.feed import UpdateRows
from train.loop import Logs, Loop, Running
from train.packing import Batches
from train.step import Metrics
from train.store import write_prepared

PROMPT = [0, 12, 20, 31]
# At this learning rate an update changes nothing, so that all figures are of the drafter that was read.
FLAGS = ("--spans", "2,1", "--steps", "1", "--learning-rate", "1e-30", "--noise", "0", "--seed", "3", "--top-k", "3")
FLAGS += ("--feature-weight", "0.5", "--token-weight", "0.3", "--top-k-weight", "2", "--step-weights", "1,0.5,0.25")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Beside target and data: `known`, what the target itself says after a prompt, as a prepared data set; `altered`,
    parts of it with other tokens in between; `knows`, a drafter that knows it by heart, and `guesses`, one that nearly
    does.
    """
    root = tmp_path_factory.mktemp("figures")
    with shared_programs(root / "programs"):
        write_inputs(root)
        said = greedy(root / "target", 48)
        write_tokens(root / "known", [said[:length] for length in (48, 47, 46, 30, 29, 12)])
        random = np.random.default_rng(0)
        parts = [said[: random.integers(8, 40)] for _ in range(20)]
        for part in parts[:12]:
            part[int(random.integers(6, len(part)))] = int(random.integers(10, 64))
        write_tokens(root / "altered", parts)
        overfit(root / "knows", str(root / "target"), PROMPT, 48 - len(PROMPT))
        overfit(root / "guesses", str(root / "target"), PROMPT, 48 - len(PROMPT))
        weights = load_file(root / "guesses" / "model.safetensors")["fc.weight"]
        replace_tensors(root / "guesses", {"fc.weight": weights + random.normal(0, 0.02, weights.shape)})
        yield root


def greedy(directory, length: int) -> list[int]:
    """The target's likeliest tokens after the prompt, by running it on everything again for each."""
    loaded = load_target(Source.open(directory), lambda array, _: jnp.asarray(array, jnp.float32))
    positions = jnp.arange(length)[None]

    @jax.jit
    def likeliest(tokens):
        features, _ = llama.forward(loaded.params, loaded.config, tokens, positions, positions + 1, None)
        return jnp.argmax(llama.head(loaded.params, features), axis=-1)

    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(PROMPT)] = PROMPT
    for place in range(len(PROMPT), length):
        tokens[0, place] = likeliest(tokens)[0, place - 1]
    return tokens[0].tolist()


def write_tokens(directory, token_lists) -> None:
    """A data set of these tokens; what follows the prompt is supervised."""
    examples = []
    for number, tokens in enumerate(token_lists):
        places = np.arange(len(tokens))
        supervised = (places >= len(PROMPT) - 2) & (places < len(tokens) - 1)
        examples.append(Example(np.array(tokens, np.int32), supervised, 0, number))
    tokens, supervised = (sum(len(e.tokens) for e in examples), sum(int(e.supervised.sum()) for e in examples))
    summary = Summary(read=len(examples), kept=len(examples), tokens=tokens, supervised=supervised)
    write_prepared(Dataset(examples, (DataSource("text"),), summary, 48), directory)


def predictions(prepared: run.Run, examples: list[Example]) -> list[tuple[Example, np.ndarray, np.ndarray]]:
    """Of each example alone: predicted features [j, n, h], and those that the target has there [n, h]."""
    unroll = jax.jit(run_unroll, static_argnums=0)
    found = []
    with jax.set_mesh(prepared.trainer.mesh):
        for example in examples:
            length = len(example.tokens)
            tokens, segments, offsets = np.zeros((3, 1, 48), np.int32)
            tokens[0, :length], segments[0, :length], offsets[0, :length] = example.tokens, 1, np.arange(length)
            rows = Rows(tokens, segments, offsets, segments)
            unrolled = unroll(prepared.trainer.objective, prepared.drafter.params, prepared.frozen, rows)
            found.append((example, *(np.asarray(part)[..., 0, :length, :] for part in unrolled)))
    return found


def expected_losses(head: np.ndarray, found) -> dict[str, np.ndarray]:
    """Means over supervised rows, for each step; a row that no chain reaches counts as 0."""
    sums, count = (
        {name: np.zeros(3) for name in ("smooth_l1", "soft_cross_entropy", "top_k_cross_entropy", "agreement")},
        0,
    )
    for example, predicted, target in found:
        for row in np.flatnonzero(example.supervised):
            count += 1
            law = softmax(target[row] @ head)
            likeliest = np.argsort(-law)[:3]
            for step in range(min(3, row + 1)):
                error = np.abs(predicted[step, row] - target[row])
                logs = np.log(softmax(predicted[step, row] @ head))
                sums["smooth_l1"][step] += np.where(error < 1, error**2 / 2, error - 0.5).mean()
                sums["soft_cross_entropy"][step] -= (law * logs).sum()
                sums["top_k_cross_entropy"][step] -= (law * logs)[likeliest].sum()
                sums["agreement"][step] += logs.argmax() == likeliest[0]
    return {name: part / count for name, part in sums.items()}


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max())
    return raised / raised.sum()


def expected_loss(terms: dict[str, np.ndarray]) -> float:
    by_step = 0.5 * terms["smooth_l1"] + 0.3 * terms["soft_cross_entropy"] + 2 * terms["top_k_cross_entropy"]
    return (by_step * [1, 0.5, 0.25]).sum()


def expected_acceptance(head: np.ndarray, found) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance by position, chain by chain, given that all before were accepted; and mean cosine by position."""
    reached, accepted, cosines = np.zeros(3), np.zeros(3), [[], [], []]
    for example, predicted, target in found:
        chosen, drafted = (target @ head).argmax(-1), (predicted @ head).argmax(-1)
        for first in np.flatnonzero(example.supervised):
            for position in range(3):
                row = first + position
                if not example.supervised[row : row + 1].any():
                    break
                reached[position] += 1
                if drafted[position, row] != chosen[row]:
                    break
                accepted[position] += 1
                if row + 2 == len(example.tokens) or example.tokens[row + 2] != chosen[row]:
                    break  # the text goes on otherwise than the chain
        for row in np.flatnonzero(example.supervised):
            for position in range(min(3, row + 1)):
                one, other = predicted[position, row], target[row]
                cosines[position].append(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    return accepted / reached, np.array([np.mean(part) for part in cosines])


def test_figures_are_those_of_plain_numpy(root, tmp_path):
    """Packed rows of several texts, the last batch filled up; every loss flag at a value of its own."""
    flags = (*FLAGS, "--data", root / "altered", "--init-from", root / "guesses", "--held-out", "10")
    assert train(root, tmp_path / "out", *flags) == 0
    prepared = run.prepare(run.build_parser().parse_args(arguments(root, tmp_path / "again", *flags, "--noise", "1")))
    head = np.asarray(prepared.frozen["target"]["head"], np.float64)
    _, held_out = run.split(run.dataset_from(prepared.options, None), prepared.options)
    members = Batches(held_out, 4).members(0, 0)
    assert Batches(held_out, 4).count(0) == 2
    assert max(map(len, members)) > 1

    (evaluation,) = lines(tmp_path / "out", "evaluations.jsonl")
    assert evaluation == {"step": 1} | prepared.evaluation(prepared.drafter.params, prepared.frozen)
    found = predictions(prepared, held_out.examples)
    terms = expected_losses(head, found)
    for name, part in terms.items():
        np.testing.assert_allclose(evaluation[name], part, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(evaluation["loss"], expected_loss(terms), rtol=1e-4)
    accepted, cosine = expected_acceptance(head, found)
    assert ((accepted > 0.2) & (accepted < 0.95)).all()
    np.testing.assert_allclose(evaluation["acceptance"], accepted, rtol=1e-6)
    a, b, c = accepted
    np.testing.assert_allclose(evaluation["tokens_per_round"], 1 + a + a * b + a * b * c, rtol=1e-6)
    np.testing.assert_allclose(evaluation["cosine"], cosine, rtol=1e-4)

    (update,) = lines(tmp_path / "out")
    chosen = [prepared.batches.dataset.examples[n] for row in prepared.batches.members(0, 0) for n in row]
    terms = expected_losses(head, predictions(prepared, chosen))
    for name, part in terms.items():
        np.testing.assert_allclose(update[name], part, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(update["loss"], expected_loss(terms), rtol=1e-4)


def test_a_drafter_that_always_agrees(root, tmp_path):
    """And what is exported generates at once, with the spans that it was trained with."""
    flags = (*FLAGS, "--data", root / "known", "--init-from", root / "knows", "--held-out", "4")
    assert train(root, tmp_path, *flags) == 0
    (evaluation,) = lines(tmp_path, "evaluations.jsonl")
    assert evaluation["acceptance"] == [1, 1, 1]
    assert evaluation["tokens_per_round"] == 4
    np.testing.assert_allclose(evaluation["agreement"], 1, atol=1e-6)
    np.testing.assert_allclose(evaluation["cosine"], 1, atol=1e-5)
    np.testing.assert_allclose(evaluation["smooth_l1"], 0, atol=1e-5)
    generator = Generator.from_pretrained(str(root / "target"), str(tmp_path / "drafter"))
    assert generator.draft.config.spans == (2, 1)
    (answer,) = generator.generate([PROMPT], max_new_tokens=20, levels=3, total_nodes=4, draft_top_k=1, ignore_eos=True)
    assert answer.token_ids == greedy(root / "target", 48)[4:24]
    assert answer.tokens_per_round > 3


@pytest.mark.parametrize(("host_seconds", "waited"), [(0.01, 0.49), (0.5, 0.0)], ids=["of the device", "of the host"])
def test_speed_is_what_the_host_took_and_what_it_waited(monkeypatch, host_seconds, waited):
    """Also of the last update before a checkpoint, done long since where the host is slower."""
    clock, written = [7.0], []
    metrics = Metrics(np.float32(1), Losses(*[np.ones(2, np.float32)] * len(Losses._fields)), np.float32(1))

    def wait(value):
        clock[0] += waited
        return value

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(loop.jax, "device_get", wait)
    logs = Logs(SimpleNamespace(write=lambda step, figures: written.append(figures)), None)
    whole = Loop(None, SimpleNamespace(seconds_left=None), None, {}, None, None, logs, None, {}, None)
    whole._reported, whole._progress = 6.999, tqdm(disable=True)
    fed = UpdateRows(rows=None, position={"epoch": 0}, names="a", tokens=1000)
    whole._report(Running(1, metrics, 0.0, fed, host_seconds))
    assert written[0]["tokens_per_second"] == pytest.approx(2000)


def test_weights_of_sources_are_for_training(root, tmp_path):
    """What is held out need not hold examples of every source."""
    (tmp_path / "few.json").write_text(json.dumps([{"text": "w1 w2 w3"}, {"text": "w3 w2 w1"}]))
    data = ("--data", f"{root / 'data.json'}:3", f"{tmp_path / 'few.json'}:1", "--held-out", "4", "--steps", "2")
    prepared = run.prepare(run.build_parser().parse_args(arguments(root, tmp_path / "out", *data)))
    assert [source.weight for source in prepared.batches.dataset.sources] == [3, 1]
    training, held_out = run.split(
        run.dataset_from(prepared.options, load_tokenizer(root / "target")), prepared.options
    )
    assert len(training.examples) == 98
    (batch,) = [Batches(held_out, 4).members(0, index) for index in range(Batches(held_out, 4).count(0))]
    assert sorted(itertools.chain(*batch)) == [0, 1, 2, 3]
