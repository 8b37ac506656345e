"""Shared by all tests: eight virtual CPU devices, full float32 products, and the tiny models.

XLA_FLAGS=--xla_force_host_platform_device_count=1 makes this a machine of one device.
"""

import gc
import os
import tempfile

from tests import quick_compilation

platforms = os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
if "--xla_force_host_platform_device_count" not in flags:
    flags += " --xla_force_host_platform_device_count=8"
# `make test` sets OPTIMISED_TESTS for the few files whose programs run long. On a GPU the flags change what XLA does.
if platforms == "cpu" and not os.environ.get("OPTIMISED_TESTS"):
    flags += f" {quick_compilation.FLAGS}"
os.environ["XLA_FLAGS"] = flags
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # here, so that processes which tests start compute alike
_cache = tempfile.TemporaryDirectory()  # commands keep compiled programs in the user's cache, which is not for tests
os.environ["XDG_CACHE_HOME"] = _cache.name

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from infer import Generator  # noqa: E402
from tests import fixtures, golden_data  # noqa: E402

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items):
    """Tests that are marked devices(count) are skipped where there are fewer."""
    for item in items:
        for marker in item.iter_markers("devices"):
            (count,), there = marker.args, jax.device_count()
            if count > there:
                item.add_marker(pytest.mark.skip(reason=f"needs {count} devices; this machine has {there}"))


@pytest.fixture(scope="module", autouse=True)
def free_programs():
    """Compiled programs of a finished file are dropped. Each holds memory maps, of which Linux grants a process 65,530
    by default: one process that kept all programs of all tests was aborted inside the compiler.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A directory with the targets and drafts of known_bugs.md: `tiny`, `tiny63` (EOS 63), and drafts for them."""
    root = tmp_path_factory.mktemp("models")
    fixtures.tiny(root / "tiny")
    config = fixtures.tiny(root / "tiny63", eos_token_id=63)
    fixtures.draft(root / "draft1", config, 1)
    fixtures.draft(root / "draft2", config, 2)
    fixtures.draft(root / "draft3", config, 3)
    return root


@pytest.fixture(scope="session")
def tiny(models):
    """The tiny target with EOS 63 and its untrained two-specialist drafter."""
    return Generator.from_pretrained(str(models / "tiny63"), str(models / "draft2"), spans=(2, 2))


@pytest.fixture(scope="session")
def golden():
    """Opens the golden target with one of the golden drafts, once for each."""
    opened = {}

    def open_draft(name: str) -> Generator:
        if name not in opened:
            opened[name] = golden_data.generator(name)
        return opened[name]

    return open_draft
