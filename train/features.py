"""The target's features of a whole data set, computed once and kept on disk: training reads them instead of running it.

    python -m train.features --target MODEL --data a.json --out features

Run again after a kill, it goes on with the shards that are missing. Many hosts share the work by `--part 1/8` to
`--part 8/8` into one directory. What it writes is a prepared data set (`train.store`) that --data takes everywhere.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from convert.checkpoint import Source
from convert.command import OneLineParser, exit_status
from convert.load import target_config
from convert.tokenizer import tokenizer_for
from infer.loading import DTYPES, load_models
from infer.programs import kept_programs
from poss_jax import llama, sharding
from poss_jax.config import TargetConfig
from poss_jax.errors import InputError
from train.data import add_data_flags, dataset_from
from train.examples import Dataset, Example, FeatureKind
from train.store import Store

SHARD_EXAMPLES = 512
SMALLEST_WIDTH = 128
HALVES_FROM = 1024  # from this width on there is one more between two powers of two: padding costs most there
# The first values of these tensors, in the first and the last layer, tell one target from another.
TOLD_BY = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
TOLD_VALUES = 4096


def target_fingerprint(source: Source) -> str:
    """Names a target by its sizes and some of its weights, whatever its name, its files and the dtype it runs in."""
    config = TargetConfig.from_hf(source.config)
    said = [dataclasses.asdict(config.block), config.num_layers, config.vocab_size]
    digest = hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=8)
    names = [f"model.layers.{layer}.{name}.weight" for layer in (0, config.num_layers - 1) for name in TOLD_BY]
    for name in ("model.norm.weight", *names):
        if name in source.tensors:  # that they are all there is seen when they are loaded
            digest.update(np.asarray(source.tensors[name]).reshape(-1)[:TOLD_VALUES].astype(np.float32).tobytes())
    return digest.hexdigest()


def check_features(dataset: Dataset, source: Source) -> None:
    """Raises InputError naming both targets where the data set has features of another one than this."""
    kind = dataset.features
    if kind is None or kind.target_fingerprint == (found := target_fingerprint(source)):
        return
    raise InputError(
        f"the data holds features of {kind.target} (fingerprint {kind.target_fingerprint}), but the target is "
        f"{source.path} (fingerprint {found}); make its own with train.features"
    )


def padded_width(length: int) -> int:
    """How wide a batch is whose longest example has so many tokens: one of few widths, so that few programs are
    compiled. From 1,024 on they are multiples of 512, which attention needs to go in chunks.
    """
    width = SMALLEST_WIDTH
    while width < length:
        width *= 2
    return width * 3 // 4 if width > HALVES_FROM and length <= width * 3 // 4 else width


def batches_of(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Numbers of examples that are computed together: of about one length, the longest first, so that a batch that
    does not fit into memory is met at once.
    """
    order = np.argsort(-lengths, kind="stable")
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def features_of(
    params: llama.Params, config: TargetConfig, examples: Sequence[Example], batch_size: int
) -> Iterator[tuple[int, np.ndarray]]:
    """The number of each example and its features [n, h], in the dtype of the parameters; not in order.

    Each is what `llama.forward` gives for this example alone, but for rounding. The device works on the next batch
    while the caller has features of this one.
    """
    lengths = np.array([len(example.tokens) for example in examples])
    running: list[tuple[np.ndarray, jax.Array]] = []
    for members in batches_of(lengths, batch_size):
        tokens = np.zeros((batch_size, padded_width(int(lengths[members].max()))), np.int32)
        for row, number in enumerate(members):
            tokens[row, : lengths[number]] = examples[number].tokens
        whole = np.ones(batch_size, np.int32)  # the last batch may have rows without an example
        whole[: len(members)] = lengths[members]
        running.append((members, _features(params, config, tokens, whole)))
        if len(running) == 2:
            yield from _taken(*running.pop(0), lengths)
    for members, computed in running:
        yield from _taken(members, computed, lengths)


@functools.partial(jax.jit, static_argnames="config")
def _features(params: llama.Params, config: TargetConfig, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """[b, t, h] of tokens [b, t]. Attention is causal, so that padding behind an example does not alter it."""
    positions = jnp.arange(tokens.shape[1])[None]
    lengths = jnp.broadcast_to(lengths[:, None], tokens.shape)
    return llama.forward(params, config, tokens, positions, lengths, None)[0]


def _taken(members: np.ndarray, computed: jax.Array, lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    arrived = np.asarray(computed)
    for row, number in enumerate(members.tolist()):
        yield number, arrived[row, : lengths[number]]


def write_features(
    store: Store,
    dataset: Dataset,
    params: llama.Params,
    config: TargetConfig,
    *,
    batch_size: int = 8,
    part: tuple[int, int] = (1, 1),
) -> None:
    """Computes and writes the shards of this part that are not finished. Parameters are in the dtype of the store."""
    shards = store.unfinished(*part)
    progress = {"unit": " tokens", "unit_scale": True, "file": sys.stderr, "disable": None}
    # A finished shard is hashed and brought to disk while the next one is computed.
    with tqdm(total=sum(s.tokens for s in shards), desc="features", **progress) as bar, ThreadPoolExecutor(1) as disk:
        finishing: list[Future] = []
        for shard in shards:
            with store.writer(shard, dataset) as writer:
                examples = dataset.examples[shard.first : shard.first + shard.examples]
                for number, features in features_of(params, config, examples, batch_size):
                    writer.put_features(number, features)
                    bar.update(len(features))
                for earlier in finishing:
                    earlier.result()
            finishing = [disk.submit(writer.finish)]
        for last in finishing:
            last.result()


def parse_part(text: str) -> tuple[int, int]:
    """ "3/8" gives (3, 8)."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise InputError(f"--part {text}: write I/N with I from 1 to N, such as 3/8")
    return int(number), int(count)


def run(options: argparse.Namespace) -> None:
    """Writes what is missing of the features, and says how far the set is."""
    part = parse_part(options.part)
    for name in ("batch_size", "shard_examples"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if options.mesh is not None:
        sharding.parse_mesh(options.mesh, ("tensor",))  # before the data is read, which takes longer
    source = Source.open(options.target)
    dataset = dataset_from(options, tokenizer_for(source, options.tokenizer))
    config = target_config(source)
    dataset.check_tokens(config)
    dataset.check_length(config)
    kind = FeatureKind(options.dtype, config.block.hidden_size, str(options.target), target_fingerprint(source))
    print(dataset.summary)
    store = Store.create(options.out, dataset, shard_examples=options.shard_examples, features=kind)
    if store.unfinished(*part):
        size = dataset.summary.tokens * kind.hidden_size * jnp.dtype(kind.dtype).itemsize
        print(f"note: all features take {size / 1e9:,.3g} GB", file=sys.stderr)
        models = load_models(options.target, dtype=options.dtype, mesh=options.mesh)
        for note in models.notes:
            print(f"note: {note}", file=sys.stderr)
        target = models.target
        write_features(store, dataset, target.params, target.config, batch_size=options.batch_size, part=part)
    _report(store, options.out)


def _report(store: Store, out: str) -> None:
    missing, count = len(store.unfinished()), len(store.shards)
    if missing:
        print(f"{count - missing} of {count} shards are in {out}; the other parts are to make the others")
    else:
        print(f"complete: {count} of {count} shards are in {out}; give that to --data")


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m train.features", description="Compute the target's features of a data set once, and keep them."
    )
    parser.add_argument("--target", required=True, help="directory, hub id or GGUF file of the target")
    add_data_flags(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="directory to write, or to go on with")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and features (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="examples computed at once (%(default)s)")
    parser.add_argument(
        "--shard-examples", type=int, default=SHARD_EXAMPLES, help="examples in a file; a kill costs one (%(default)s)"
    )
    parser.add_argument("--mesh", help="tensor=N splits the weights over N devices")
    parser.add_argument(
        "--part", metavar="I/N", default="1/1", help="do the I-th of N parts, on many hosts with a shared directory"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `exit_status`."""
    options = build_parser().parse_args(arguments)
    with kept_programs():
        return exit_status(run, options)


if __name__ == "__main__":
    sys.exit(main())
