"""Prepared data sets: tokenised examples on disk, with or without the target's features.

A directory holds `manifest.json`, which says what the whole set is and which examples each shard holds, and the shards
(`train.shards`). Files appear whole or not at all, so that a run that was killed can be run again and goes on, and
several hosts may write shards of one set into a shared directory.
"""

import dataclasses
import hashlib
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from convert.checkpoint import read_json
from poss_jax.errors import InputError
from train.conversations import DataSource, Summary
from train.examples import Dataset, FeatureKind
from train.shards import (
    PATTERN,
    Shard,
    ShardWriter,
    divide,
    fault_of,
    read_shard,
    remove_leftovers,
    sha256,
    sidecar_of,
    write_whole,
    writing,
)

FORMAT = "poss-jax prepared data set"
VERSION = 1
MANIFEST = "manifest.json"
SHARD_EXAMPLES = 8192  # of sets without features, whose examples are small


def is_prepared(path: str | Path) -> bool:
    """Whether this is the directory of a prepared data set, be it whole or not."""
    directory = Path(path).expanduser()
    try:
        if any(directory.glob(PATTERN)):
            return True
        with open(directory / MANIFEST, "rb") as file:
            return FORMAT.encode() in file.read(200)
    except (OSError, ValueError):  # no such directory, or a name that none can have
        return False


def open_prepared(path: str | Path) -> Dataset:
    """The data set in a directory, every file of which is checked. Features are read when they are used.

    Raises InputError naming the file that is missing, of another version or run, cut off or altered, and the remedy.
    """
    store = Store.open(path)
    faults = [(shard, fault) for shard in store.shards if (fault := store.fault(shard))]
    if faults:
        (shard, fault), whole = faults[0], len(store.shards) - len(faults)
        raise InputError(
            f"{store.directory / shard.file}: {fault} ({whole} of {len(store.shards)} shards are finished); "
            f"run the same command again ({store.command})"
        )
    store.verify()
    return store.read()


def write_prepared(dataset: Dataset, path: str | Path, *, shard_examples: int = SHARD_EXAMPLES) -> "Store":
    """Writes a data set, with the features that it has, or goes on with that. Raises InputError: see `Store.create`."""
    store = Store.create(path, dataset, shard_examples=shard_examples, features=dataset.features)
    for shard in tqdm(store.unfinished(), desc="writing", unit=" shards", file=sys.stderr, disable=None, delay=2):
        with store.writer(shard, dataset) as writer:
            if store.features is not None:
                for number, example in enumerate(dataset.examples[shard.first : shard.first + shard.examples]):
                    writer.put_features(number, example.features)
            writer.finish()
    return store


class Store:
    """The directory of a prepared data set, whole or being written."""

    def __init__(self, directory: Path, manifest: dict[str, Any], fingerprint: str):
        """fingerprint: of everything in the manifest that decides what is in the shards."""
        self.directory, self.manifest, self.fingerprint = directory, manifest, fingerprint
        self.shards = [Shard(**fields) for fields in manifest["shards"]]
        self.features = None if manifest["features"] is None else FeatureKind(**manifest["features"])

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """Reads the manifest only. Raises InputError where there is none, or none that this version can read."""
        directory = Path(path).expanduser()
        file = directory / MANIFEST
        manifest = read_json(file)
        if manifest.get("format") != FORMAT:
            raise InputError(f"{file}: is not the manifest of a prepared data set; make one with train.data prepare")
        if manifest.get("version") != VERSION:
            raise InputError(
                f"{file}: has version {manifest.get('version')} of the format, this program reads version {VERSION}; "
                "update poss-jax, or prepare the data set again"
            )
        try:
            decisive = json.dumps([value for _, value, _ in _settings(manifest)])
            return cls(directory, manifest, hashlib.sha256(decisive.encode()).hexdigest()[:16])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise InputError(f"{file}: is not whole ({error!r}); remove it and prepare the data set again") from error

    @classmethod
    def create(
        cls, path: str | Path, dataset: Dataset, *, shard_examples: int, features: FeatureKind | None = None
    ) -> "Store":
        """Begins a directory for the data set, or goes on with one, so that shards can be written.

        features: what kind will be written, whatever the examples have. Raises InputError naming what differs where the
        directory was begun with other data or settings, and where it cannot be written.
        """
        if shard_examples < 1:
            raise InputError(f"--shard-examples {shard_examples}: must be at least 1")
        directory, manifest = Path(path).expanduser(), _manifest(dataset, shard_examples, features)
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory)
            if not (directory / MANIFEST).exists():
                write_whole(directory / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        store = cls.open(directory)  # another run may have begun it, or another host in the meantime
        there, here = _settings(store.manifest), _settings(manifest)
        for (name, one, shown), (_, other, ours) in zip(there, here, strict=True):
            if one != other:
                raise InputError(
                    f"{directory}: was begun with {name} {shown}, not {ours}; give the same again or another --out"
                )
        return store

    @property
    def command(self) -> str:
        """What wrote it, for people."""
        program = "train.data prepare" if self.features is None else "train.features"
        return f"python -m {program} ... --out {self.directory}"

    def fault(self, shard: Shard) -> str | None:
        """Why a shard does not count as finished, or None; `verify` looks at its contents."""
        return fault_of(self.directory, shard, self.features, self.fingerprint)

    def unfinished(self, part: int = 1, parts: int = 1) -> list[Shard]:
        """Shards that are still to be written, of those whose number, from 1, is `part` modulo `parts`."""
        own = [shard for number, shard in enumerate(self.shards, 1) if number % parts == part % parts]
        return [shard for shard in own if self.fault(shard)]

    def writer(self, shard: Shard, dataset: Dataset) -> ShardWriter:
        """Begins a shard; `dataset` is what the store was created for."""
        examples = dataset.examples[shard.first : shard.first + shard.examples]
        return ShardWriter(self.directory, shard, self.features, self.fingerprint, examples)

    def verify(self) -> None:
        """Compares all shards with their checksums. Raises InputError naming one that was altered."""
        files = [self.directory / shard.file for shard in self.shards]
        options = {"unit": "B", "unit_scale": True, "file": sys.stderr, "disable": None, "delay": 2}
        size, lock = sum(file.stat().st_size for file in files), threading.Lock()
        with tqdm(total=size, desc=f"checking {self.directory.name}", **options) as progress:

            def advance(count: int) -> None:
                with lock:
                    progress.update(count)

            pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))  # hashing lets go of Python's lock
            try:
                digests = pool.map(lambda file: sha256(file, advance), files)
                for file, digest in zip(files, digests, strict=True):
                    if digest != read_json(sidecar_of(file)).get("sha256"):
                        raise InputError(
                            f"{file}: does not have the checksum that its sidecar says; delete it and run the same "
                            f"command again ({self.command})"
                        )
            finally:
                pool.shutdown(cancel_futures=True)

    def read(self) -> Dataset:
        """The data set in finished shards. Raises InputError where they are not what the manifest says."""
        examples = []
        for shard in self.shards:
            examples += read_shard(self.directory / shard.file, shard, self.features)
        said, counts = self.manifest, self.manifest["summary"]
        counts = {name: Counter(value) if isinstance(value, dict) else value for name, value in counts.items()}
        sources = tuple(DataSource(**source) for source in said["sources"])
        probe = tuple(said["tokenizer_probe"])
        dataset = Dataset(examples, sources, Summary(**counts), said["max_length"], self.features, probe)
        if dataset.fingerprint() != said["fingerprint"]:
            raise InputError(f"{self.directory / MANIFEST}: is of other data than its shards; prepare them again")
        return dataset


def _manifest(dataset: Dataset, shard_examples: int, features: FeatureKind | None) -> dict[str, Any]:
    counts = vars(dataset.summary).items()
    return {
        "format": FORMAT,
        "version": VERSION,
        "max_length": dataset.max_length,
        "sources": [dataclasses.asdict(source) for source in dataset.sources],
        "summary": {name: dict(value) if isinstance(value, Counter) else value for name, value in counts},
        "fingerprint": dataset.fingerprint(),
        "tokenizer_probe": list(dataset.probe),
        "features": None if features is None else dataclasses.asdict(features),
        "shards": [s._asdict() for s in divide([len(e.tokens) for e in dataset.examples], shard_examples)],
    }


def _settings(manifest: dict[str, Any]) -> Sequence[tuple[str, Any, str]]:
    """What decides about the contents of shards: name, value, and how to show it. Names of files and of the target do
    not: they may differ from host to host.
    """
    kind, sources = manifest["features"] or {}, manifest["sources"]
    weights = [source["weight"] for source in sources]
    names = ", ".join(source["name"] for source in sources)
    first = manifest["shards"][0]["examples"]
    target = kind.get("target_fingerprint")
    return [
        ("--max-length", manifest["max_length"], str(manifest["max_length"])),
        ("data", manifest["fingerprint"], f"{names} (fingerprint {manifest['fingerprint']})"),
        ("weights", weights, str(weights)),
        ("features", bool(kind), "of a target" if kind else "left out"),
        ("target", target, f"{kind.get('target')} (fingerprint {target})"),
        ("--dtype", kind.get("dtype"), str(kind.get("dtype"))),
        ("--shard-examples", manifest["shards"], str(first)),
    ]
