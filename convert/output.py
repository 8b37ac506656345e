"""Directories that appear whole or not at all, and checkpoints in shards."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from poss_jax.errors import InputError

SHARD_BYTES = 2 * 2**30  # of one file, all of which is in memory while it is written


@contextlib.contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A directory beside `path` to write to, which becomes `path` when the block ends without an error.

    After an error nothing is left. Raises InputError where `path` holds something already or cannot be written.
    """
    path = Path(path).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path}: is there already; give another directory, or remove it")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if path.exists():
            path.rmdir()
        os.replace(unfinished, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_tensors(directory: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """`model.safetensors`, or several files of about `SHARD_BYTES` and an index, as transformers writes them."""
    files: list[dict[str, int]] = []
    shard: dict[str, np.ndarray] = {}
    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > SHARD_BYTES:
            files.append(_write_shard(directory, len(files), shard))
            shard = {}
        shard[name] = tensor
    files.append(_write_shard(directory, len(files), shard))
    if len(files) == 1:
        os.replace(directory / _unnumbered(0), directory / "model.safetensors")
        return
    weight_map = {}
    for number, sizes in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        os.replace(directory / _unnumbered(number), directory / name)
        weight_map |= dict.fromkeys(sizes, name)
    index = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_shard(directory: Path, number: int, shard: dict[str, np.ndarray]) -> dict[str, int]:
    """Writes a file whose name lacks the number of files, which is not known yet; the bytes of its tensors."""
    path = directory / _unnumbered(number)
    save_file(shard, path, {"format": "pt"})
    path.chmod(0o644)  # safetensors lets nobody else read it
    return {name: tensor.nbytes for name, tensor in shard.items()}


def _unnumbered(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
