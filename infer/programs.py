"""Compiled programs, kept on disk between runs: a large one takes a minute to compile and a second to read."""

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def kept_programs() -> Iterator[None]:
    """Programs that are compiled inside are kept on disk, and read from there instead of compiled again.

    They lie where JAX was told to keep them (JAX_COMPILATION_CACHE_DIR), else in `default_directory`.
    JAX_ENABLE_COMPILATION_CACHE=false keeps none. A directory that cannot be written to is said and done without.
    """
    with _kernels_without_numbers(), _directory_in_use():
        yield


@contextlib.contextmanager
def _directory_in_use() -> Iterator[None]:
    before = jax.config.jax_compilation_cache_dir
    settled = before is not None or not jax.config.jax_enable_compilation_cache
    directory = None if settled else _writable_directory()
    if directory is None:
        yield
        return
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    try:
        yield
    finally:
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", before)


@contextlib.contextmanager
def _kernels_without_numbers() -> Iterator[None]:
    """Programs with the kernel "mosaic" are found again whatever the process compiled before.

    JAX 0.11 writes a number into every such kernel, counted through the process, for the names of files that it may
    dump (MOSAIC_GPU_DUMP_...: the numbers stay then); and a program is found by all its bytes.
    """
    dialect = _dialect_that_numbers()
    if dialect is None or any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ):
        yield
        return
    from jax._src.lib.mlir import ir

    numbered = dialect.get_or_set_dump_options

    def without_number(module):
        options = numbered(module)
        module.operation.attributes["mosaic_gpu.dump_basename"] = ir.StringAttr.get("kernel")
        return options

    dialect.get_or_set_dump_options = without_number
    try:
        yield
    finally:
        dialect.get_or_set_dump_options = numbered


def _dialect_that_numbers():
    """Where JAX numbers kernels; None in JAX 0.10, which does not. Not public: a JAX that moves it is left as it is."""
    try:
        from jax._src.lib import mosaic_gpu_dialect as dialect
    except ImportError:
        return None
    return dialect if hasattr(dialect, "get_or_set_dump_options") else None


def _writable_directory() -> Path | None:
    """`default_directory`, made if need be; None, and a note, where that cannot be."""
    try:
        directory = default_directory()
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(f"{directory}: cannot be written to")
    except (OSError, RuntimeError) as error:  # the latter: there is no home
        print(f"note: compiled programs are not kept: {error}", file=sys.stderr)
        return None
    return directory


def default_directory() -> Path:
    """In the user's cache, apart for each kind of processor: homes are shared between machines, and a program for a
    CPU that has more instructions than this one would stop it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "poss-jax" / f"programs-{processor()}"


def processor() -> str:
    """A short name for what this machine's processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        abilities = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:
        abilities = [platform.processor()]
    return hashlib.sha256("\n".join([platform.machine(), *abilities]).encode()).hexdigest()[:12]
