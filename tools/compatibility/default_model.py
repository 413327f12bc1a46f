"""The default model's tokenizer as a folder that transformers reads, for clients that count tokens themselves."""

import json
from pathlib import Path

from actorserve.model_files.describe import describe
from actorserve.model_files.gguf_tokenizer import build_tokenizer
from actorserve.model_files.locate import locate


def weights() -> Path:
    """The default model's GGUF file. Raises: ModelError if it cannot be downloaded."""
    return locate("default")


def write_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, with the chat template. Raises: ModelError."""
    description = describe(weights())
    build_tokenizer(description).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": description.chat_template,
        "model_max_length": 8192,
        **description.special_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
