"""Directories that appear whole or not at all, and checkpoints in shards."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from convert.checkpoint import check_name, write_json
from poss_jax.errors import InputError

SHARD_BYTES = 2 * 2**30  # of one file, all of which is in memory while it is written


@contextlib.contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A directory beside `path` to write to, which becomes `path` when the block ends without an error.

    After an error, SIGINT or SIGTERM nothing is left. Raises InputError where `path` holds something already or cannot
    be written.
    """
    check_name(str(path))
    path = Path(path).expanduser().absolute()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    created = [unfinished, *(parent for parent in path.parents if not parent.exists())]
    try:
        with _ended_by_sigterm():
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise InputError(f"{path}: is there already; give another directory, or remove it")
            unfinished.mkdir(parents=True)
            yield unfinished
            if path.exists():
                path.rmdir()
            os.replace(unfinished, path)
            created = []
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
    except InputError as error:  # users know the directory by the name that they gave
        raise InputError(str(error).replace(str(unfinished), str(path))) from error
    finally:
        for directory in created:
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end what is inside as an exception does, so that it can be cleaned up after."""

    def end(number, frame):
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    write_json(directory / "model.safetensors.index.json", index)


def _write_shard(directory: Path, number: int, shard: dict[str, np.ndarray]) -> dict[str, int]:
    """Writes a file whose name lacks the number of files, which is not known yet; the bytes of its tensors."""
    path = directory / _unnumbered(number)
    save_file(shard, path, {"format": "pt"})
    path.chmod(0o644)  # safetensors lets nobody else read it
    return {name: tensor.nbytes for name, tensor in shard.items()}


def _unnumbered(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
