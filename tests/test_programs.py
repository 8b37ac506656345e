"""Compiled programs on disk: where they are kept, who decides, and what happens where they cannot be."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from infer import generate, programs
from infer.programs import default_directory, kept_programs
from poss_jax.attention import attention
from tests.test_tree_attention import lower, random_case


def slow_to_compile():
    """A program that no other test has. Programs that compile within a second are not kept, unless asked for."""
    return jax.jit(lambda x: jnp.sort(jnp.sin(x) * 3.25))(jnp.arange(7.0))


@pytest.fixture
def everything_is_kept():
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def test_programs_lie_in_the_users_cache(tmp_path, monkeypatch, everything_is_kept):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    with kept_programs():
        assert Path(jax.config.jax_compilation_cache_dir) == default_directory()
        slow_to_compile()
    assert default_directory().parent == tmp_path / "poss-jax"
    assert list(default_directory().iterdir())
    assert jax.config.jax_compilation_cache_dir == before


def test_without_another_wish_the_cache_is_in_the_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_directory().parent == Path.home() / ".cache" / "poss-jax"


def test_processors_of_other_abilities_have_other_directories(monkeypatch):
    """A program for a CPU with more instructions would stop this one, and homes are shared."""
    here = default_directory()
    assert default_directory() == here
    monkeypatch.setattr(programs.platform, "machine", lambda: "riscv64")
    assert default_directory() != here


def test_kernels_are_the_same_whatever_was_compiled_before():
    """JAX 0.11 counts them, 0.10 does not: nothing was found that another command, or other prompts, had compiled."""

    def lowered() -> str:
        query, *parts = random_case(1, 8, 1, 1, 64, 64, [5])
        return lower(lambda query, parts: attention(query, parts, "mosaic"), query, parts)

    with kept_programs():
        assert lowered() == lowered()


def test_a_directory_that_was_asked_for_is_used(tmp_path, monkeypatch, everything_is_kept):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    try:
        with kept_programs():
            assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jax")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jax")
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert not (tmp_path / "users").exists()


def test_switched_off_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with kept_programs():
            assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written_a_note_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "cache").write_text("a file where the directory would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with kept_programs():
        assert jax.config.jax_compilation_cache_dir is None
    assert "note: compiled programs are not kept: " in capsys.readouterr().err


def test_commands_keep_their_programs(models, tmp_path, monkeypatch, capsys, everything_is_kept):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ["--target", str(models / "tiny63"), "--prompt-ids", "0,5", "--max-new-tokens", "3", "--json"]
    assert generate.main(flags) == 0
    assert any(file.name.startswith("jit_decode") for file in default_directory().iterdir())
    assert capsys.readouterr().out.startswith('{"token_ids"')
