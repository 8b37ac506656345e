"""Checkpoints of a training run: written in the background, whole or not at all, restored onto any mesh."""

import contextlib
import json
import logging
import math
import operator
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from convert.checkpoint import write_json
from poss_jax.errors import InputError

BEST = "best.json"  # which step is best, for people
REMOVED = (
    ".removed"  # steps on their way out: a step is renamed before its files go, so that no part of one looks whole
)


class Checkpoints:
    """Checkpoints under `directory`: a folder for each step, the last `keep` steps and always the best one.

    A step appears under its name once all its files are there, so a process may be killed at any moment. `best.json`
    holds {"step", "figure"} of the best step. What goes wrong in the background is raised by the next `save`, `wait`,
    `restore`, `meta` or `close`. The processes of a run make the same calls in the same order; no other run may open
    the directory meanwhile, because opening removes what is not whole.
    """

    def __init__(self, directory: Path, *, keep: int):
        """Makes the directory, and removes what a killed process left. Raises InputError if it cannot be written."""
        if keep < 1:
            raise InputError(f"--keep {keep}: must be at least 1")
        logging.getLogger("absl").addFilter(_without_orbax)
        self.directory, self._path = directory, Path(directory).absolute()
        self._settling: threading.Thread | None = None
        self._settling_error: Exception | None = None
        self._stands_at: int | None = None  # the step that this object saved or restored last
        with self._errors("open it"):
            if jax.process_index() == 0:
                self._path.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self._path).close()  # rather find out now than after hours of training
                self._empty_removed()
            self._manager = ocp.CheckpointManager(self._path, options=_options(keep))
            self._take_stock()

    @property
    def latest(self) -> int | None:
        """The newest whole step. One that is being written does not count; after `wait` all processes agree."""
        return self._latest

    @property
    def best(self) -> int | None:
        """The whole step with the highest figure, the newest of equals. None if no step has a figure."""
        return self._best

    def save(self, step: int, state, meta: dict, *, figure: float | None = None) -> None:
        """Copies the state and returns; files are written in the background, after those of the save before.

        state is any pytree of jax.Arrays, of any shapes and dtypes (with several processes, global ones). meta is JSON,
        copied before this returns; numpy numbers become plain ones. The highest figure is best; one that is not finite
        counts as none. Saving the step again that was saved or restored last does nothing: what was first stands.
        Raises InputError for any other step that is not newer than those there, which would be of another run.
        """
        self.wait()
        if step == self._stands_at:
            return
        if self.latest is not None and step <= self.latest:
            raise InputError(
                f"{self.directory}: holds step {self.latest} already, so step {step} cannot be saved; "
                "go on from the latest step, or give another --out"
            )
        leaves = _named_leaves(state)
        layout = {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in leaves.items()}
        text = json.dumps({"meta": meta, "layout": layout}, default=operator.methodcaller("tolist"))
        training = json.loads(text)  # a copy: the caller may go on changing meta
        metrics = {"figure": float(figure)} if figure is not None and math.isfinite(figure) else None
        items = ocp.args.Composite(state=ocp.args.StandardSave(leaves), training=ocp.args.JsonSave(training))
        with self._errors(f"save step {step}"):
            self._manager.save(step, args=items, metrics=metrics, force=True)
        self._stands_at = step
        self._settling = threading.Thread(target=self._settle, name="checkpoint_settling")
        self._settling.start()

    def restore(self, like, step: int | None = None):
        """(state, meta) of a step, of the latest if none is given.

        like is a pytree of jax.ShapeDtypeStruct with shardings, of any mesh: values are bit-equal to those saved, laid
        out as it says. Raises InputError if there is no such step, or naming the first parameter that differs.
        """
        step = self._existing(step)
        training, wanted = self._training(step), _named_leaves(like)
        self._check(step, training["layout"], wanted)
        with self._errors(f"read step {step}"):
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))
        self._stands_at = step
        leaves = [restored["state"][name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), training["meta"]

    def meta(self, step: int | None = None) -> dict:
        """What was saved as `meta` with a step, or with the latest. Raises InputError if there is none."""
        return self._training(self._existing(step))["meta"]

    def wait(self) -> None:
        """Returns when the last save is whole. Raises what went wrong with it."""
        if self._settling is None:
            return
        self._settling.join()
        self._settling = None
        with self._errors("save"):
            try:
                self._manager.wait_until_finished()
            except Exception:
                self._stands_at = None
                self._manager.reload()  # it has forgotten steps that would have been removed after this one
                raise
            error, self._settling_error = self._settling_error, None
            if error:
                raise error

    def close(self) -> None:
        """Waits, and ends what runs in the background."""
        try:
            self.wait()
        finally:
            with self._errors("save"):  # a save may have failed in two places at once
                self._manager.close()

    def _settle(self) -> None:
        """After a save, in a thread: marks the best step and removes what is no longer kept."""
        try:
            self._manager.wait_until_finished()
        except Exception:  # `wait` gets it as well
            return
        try:
            self._take_stock()
            if jax.process_index() == 0:
                self._empty_removed()
        except Exception as error:
            self._settling_error = error

    def _take_stock(self) -> None:
        """Notes the whole steps; nothing is being written. Only one process marks the best for people."""
        self._latest, self._best = self._manager.latest_step(), self._manager.best_step()
        if jax.process_index() != 0:
            return
        if self._best is None:
            (self._path / BEST).unlink(missing_ok=True)
            return
        write_json(self._path / BEST, {"step": self._best, "figure": self._manager.metrics(self._best)["figure"]})

    def _empty_removed(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._path / REMOVED)

    def _existing(self, step: int | None) -> int:
        """The step, or the latest; raises InputError if it is not there."""
        self.wait()
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise InputError(f"{self.directory}: holds no checkpoint")
        if step is not None and step not in steps:
            raise InputError(f"{self.directory}: holds no step {step}; there are {', '.join(map(str, steps))}")
        return steps[-1] if step is None else step

    def _training(self, step: int) -> dict:
        """{"meta", "layout"}; layout is [shape, dtype] of each parameter by name."""
        with self._errors(f"read step {step}"):
            return self._manager.restore(step, args=ocp.args.Composite(training=ocp.args.JsonRestore()))["training"]

    def _check(self, step: int, layout: dict, wanted: dict) -> None:
        """Raises InputError naming the first parameter that differs between a checkpoint and what is wanted."""
        mend = "resume with the settings that it was saved with"
        for name, leaf in wanted.items():
            if name not in layout:
                raise InputError(f"{self.directory}, step {step}: has no {name}; {mend}")
            there, here = _describe(*layout[name]), _describe(leaf.shape, leaf.dtype)
            if there != here:
                raise InputError(f"{self.directory}, step {step}: {name} is {there}, but {here} is needed; {mend}")
        for name in layout:
            if name not in wanted:
                raise InputError(f"{self.directory}, step {step}: has {name}, which is not needed; {mend}")

    @contextlib.contextmanager
    def _errors(self, doing: str):
        """Turns what the file system refused into an InputError that names the directory."""
        try:
            yield
        except Exception as error:
            reason = _refusal(error)
            if reason is None:
                raise
            mend = "it must be a writable directory with room, or give another --out"
            raise InputError(f"{self.directory}: cannot {doing}: {reason}; {mend}") from error


def _options(keep: int) -> ocp.CheckpointManagerOptions:
    figure = operator.itemgetter("figure")
    policies = ocp.checkpoint_managers
    best = policies.BestN(get_metric_fn=figure, n=1, keep_checkpoints_without_metrics=False)
    return ocp.CheckpointManagerOptions(
        best_fn=figure,
        preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
        cleanup_tmp_directories=True,
        todelete_subdir=REMOVED,
    )


def _named_leaves(tree) -> dict:
    """Leaves by name, as in "optimizer/0/mu/kernel", in order.

    States are saved as this flat dict, so no container (optax's named tuples, None) has to be told to orbax.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError("two leaves have the same name: keys must not contain '/'")
    return named


def _describe(shape, dtype) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _refusal(error: Exception) -> str | None:
    """Why the file system refused, or None if it did not. tensorstore tells only in the text of other exceptions."""
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):  # the latter are processes that do not come
        return error.strerror or str(error)
    found = re.search(r"os.error(?:.code)?\W+(\d+)", str(error), re.IGNORECASE)
    return os.strerror(int(found[1])) if found else None


def _without_orbax(record: logging.LogRecord) -> bool:
    """Lets through what others than orbax log through absl. What orbax reports as an error, it raises too."""
    return not record.pathname.startswith(str(Path(ocp.__file__).parent))
