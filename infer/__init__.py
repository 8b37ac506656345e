"""Generation with drafters: `Generator` is the library, `python -m infer.generate` the command."""

from infer.engine import Generator
from infer.results import Generation
from infer.settings import Settings

__all__ = ["Generation", "Generator", "Settings"]
