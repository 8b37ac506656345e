"""Reading checkpoints as mappings from tensor name to numpy array, whatever the files are.

Nothing is cast and nothing is renamed here. Every failure is an InputError that names the file.
"""

import dataclasses
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from convert.gguf import GGUFCheckpoint
from poss_jax.errors import InputError

HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*")
SECOND_COPIES = ("consolidated*", "original/*")  # of the weights, in the makers' own layout
LONGEST_NAME = 255  # bytes of one part of a path; the operating system refuses to look up longer ones
SAFETENSORS_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.bool_,
}
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def locate(name: str | Path) -> Path:
    """The local path of a model: a directory, a GGUF file, or a hub id, which is downloaded (or found in the cache).

    A directory without `config.json` stands for what it holds: the drafter of a training run, else a single GGUF file.
    """
    name = str(name)
    path = Path(name).expanduser()
    check_name(name)
    if path.is_dir():
        return path if (path / "config.json").exists() else _inside(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"{name}: a model is a directory, a .gguf file or a hub id, not this kind of file")
        return path
    if not is_hub_id(name):
        raise InputError(f"{name}: no such file or directory")
    return _download(name)


def _inside(directory: Path) -> Path:
    if (directory / "drafter" / "config.json").exists():
        return directory / "drafter"
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if (directory / "checkpoints").exists():
        raise InputError(f"{directory}: this run has not written its drafter yet; end it with train.run --resume")
    return directory


def is_hub_id(name: str) -> bool:
    """Whether a name that is no file here can be an owner and a name on the hub."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def check_name(name: str) -> None:
    """Raises InputError for what no operating system takes for a path."""
    if not name or "\0" in name or max(len(part.encode()) for part in Path(name).parts or ("",)) > LONGEST_NAME:
        raise InputError(f"{name!r} is not the name of a file or directory")


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # only users of hub ids wait for this import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(hub_id, allow_patterns=[*HUB_FILES], ignore_patterns=[*SECOND_COPIES]))
        if not any(directory.glob("*.safetensors")):
            snapshot_download(hub_id, allow_patterns=["*.bin"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"{hub_id}: no such directory here, and not available from the model hub ({first_line(error)})"
        ) from error
    return directory


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened checkpoint: where it is, the contents of its `config.json`, and its tensors by their Hugging Face
    names. A GGUF file shows itself in the same form.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, np.ndarray]

    @classmethod
    def open(cls, name: str | Path) -> "Source":
        """Raises InputError naming the file that is missing or broken."""
        path = locate(name)
        if path.suffix == ".gguf":
            checkpoint = GGUFCheckpoint(path)
            return cls(path, checkpoint.config, checkpoint)
        return cls(path, read_json(path / "config.json"), open_tensors(path))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes what `read_json` reads. Other processes, and those after a kill, see it whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def open_tensors(directory: Path) -> Mapping[str, np.ndarray]:
    """The tensors of a Hugging Face directory: one safetensors file, shards with an index, or `pytorch_model.bin`."""
    if (directory / "model.safetensors").exists():
        return SafetensorsFiles.single(directory / "model.safetensors")
    if (directory / "model.safetensors.index.json").exists():
        return SafetensorsFiles.sharded(directory / "model.safetensors.index.json")
    if (directory / "pytorch_model.bin").exists():
        return read_torch_file(directory / "pytorch_model.bin")
    if (directory / "pytorch_model.bin.index.json").exists():
        return _read_torch_files(directory / "pytorch_model.bin.index.json")
    raise InputError(f"{directory}: holds no weights; expected one of {', '.join(WEIGHT_FILES)}")


class SafetensorsFiles(Mapping[str, np.ndarray]):
    """Tensors of one or several safetensors files, read one by one when asked for."""

    def __init__(self, files: dict[str, Path]):
        found: dict[str, StoredTensor] = {}
        for path in sorted(set(files.values())):
            with _open_safetensors(path) as handle:
                held = list(handle.keys())
                _check_index(files, path, held)
                found |= {name: StoredTensor.find(path, name, handle) for name in held}
        self._stored = {name: found[name] for name in files}

    @classmethod
    def single(cls, path: Path) -> "SafetensorsFiles":
        with _open_safetensors(path) as handle:
            return cls(dict.fromkeys(handle.keys(), path))

    @classmethod
    def sharded(cls, index: Path) -> "SafetensorsFiles":
        return cls(_read_index(index))

    def stored(self, name: str) -> "StoredTensor":
        """A tensor that is left in its file."""
        return self._stored[name]

    def __getitem__(self, name: str) -> np.ndarray:
        return self._stored[name].whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _read_index(index: Path) -> dict[str, Path]:
    """The file of each tensor."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: holds no weight_map")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{index}: its weight_map must give a file name for every tensor")
    missing = sorted({file for file in weight_map.values() if not (index.parent / file).exists()})
    if missing:
        raise InputError(f"{index}: names {missing[0]!r}, which is not there")
    return {name: index.parent / file for name, file in weight_map.items()}


def _check_index(files: Mapping[str, Path], path: Path, held: Iterable[str]) -> None:
    """Raises InputError where a file does not hold just the tensors that the index puts there."""
    expected = {name for name, place in files.items() if place == path}
    for name in sorted(expected.difference(held)):
        raise InputError(f"{path}: lacks tensor {name!r}, which the index puts there")
    for name in sorted(set(held) - expected):
        where = f"puts into {files[name].name}" if name in files else "does not list"
        raise InputError(f"{path}: holds tensor {name!r}, which the index {where}")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. `tensor[slices]` reads that part of it.

    The file is mapped only while it is read: what was read of a file that stays mapped counts as memory in use, and a
    host would seem to need as much as its checkpoints are large.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def find(cls, path: Path, name: str, handle: Any) -> "StoredTensor":
        """From an opened file. Raises InputError for a kind of number that numpy does not know."""
        tensor = handle.get_slice(name)
        kind = tensor.get_dtype()
        if kind not in SAFETENSORS_DTYPES:
            raise InputError(f"{path}: tensor {name!r} holds {kind}; expected float32, float16 or bfloat16")
        return cls(path, name, tuple(tensor.get_shape()), np.dtype(SAFETENSORS_DTYPES[kind]))

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        with _open_safetensors(self.path) as handle:
            return handle.get_slice(self.name)[index]

    def whole(self) -> np.ndarray:
        """All of it."""
        with _open_safetensors(self.path) as handle:
            return handle.get_tensor(self.name)


def _open_safetensors(path: Path):
    try:
        return safe_open(path, "numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error})") from error


def _read_torch_files(index: Path) -> dict[str, np.ndarray]:
    files, tensors = _read_index(index), {}
    for path in sorted(set(files.values())):
        held = read_torch_file(path)
        _check_index(files, path, held)
        tensors |= held
    return {name: tensors[name] for name in files}


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a PyTorch checkpoint, which must hold nothing but tensors. Needs torch.

    Values stay in the file until they are used, unless it is in torch's oldest format.
    """
    try:
        import torch  # an optional dependency, only for these files
    except ImportError:
        raise InputError(
            f"{path}: reading .bin files needs torch (pip install torch), or convert it to safetensors"
        ) from None
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged pickle can raise any; torch's own texts advise to run what is in it
        reason = f"{type(error).__name__}, so it is damaged or holds more"
        raise InputError(f"{path}: not a PyTorch file of tensors only ({reason})") from error
    if not isinstance(tensors, dict):
        raise InputError(f"{path}: holds a {type(tensors).__name__}, expected a dictionary of tensors")
    return {name: _to_numpy(path, name, tensor) for name, tensor in tensors.items()}


def _to_numpy(path: Path, name: Any, tensor: Any) -> np.ndarray:
    import torch

    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise InputError(f"{path}: {name!r} is a {type(tensor).__name__}, expected tensors under their names")
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise InputError(f"{path}: {name!r} is a sparse or lazily changed tensor; store it dense")
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16 of its own: carry the bits over
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    try:
        return tensor.numpy()
    except TypeError:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{path}: {name!r} holds {kind}; expected float32, float16 or bfloat16") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or what kind it is if it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
