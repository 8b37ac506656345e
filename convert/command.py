"""What all commands share: errors in one line, and exit statuses."""

import argparse
import os
import sys
from collections.abc import Callable

from poss_jax.errors import InputError


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the flags in one line, without the usage in front of it."""

    def error(self, message: str):
        self.exit(2, f"error: {message} (see --help)\n")


def exit_status(run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Runs a command. 0: done, 1: the device's memory is too small and 2: bad input, both said in one line; 130:
    interrupted; 141: its output was closed.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that it misses torch; we do not
    try:
        run(options)
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED: Out of memory"):  # JAX has no class for it
            raise
        remedy = "; give a smaller --batch-size" if getattr(options, "batch_size", 1) > 1 else ""
        print(f"error: the device's memory is too small: {' '.join(str(error).split())}{remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
