"""The golden data: numbers from the authors' implementation. `golden/README.md` says what each file holds."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from infer import Generator

ROOT = Path(__file__).parent / "golden"
TARGET = ROOT / "targets" / "base"
DRAFTS = ("eagle", "hass", "poss1", "poss2", "poss3", "poss2_nobias")


def trace(draft: str) -> dict:
    return json.loads((ROOT / "traces" / f"{draft}.json").read_text())


def spans(draft: str) -> tuple[int, ...]:
    recorded = trace(draft)
    return (recorded["position_per_layer"],) * recorded["specialists"]


def generator(draft: str, **options) -> Generator:
    return Generator.from_pretrained(str(TARGET), str(ROOT / "drafts" / draft), spans=spans(draft), **options)


def tensors(name: str) -> dict[str, np.ndarray]:
    return load_file(ROOT / f"{name}.safetensors")


def prompts() -> dict[str, list[int]]:
    return {prompt["name"]: prompt["ids"] for prompt in json.loads((ROOT / "prompts.json").read_text())}
