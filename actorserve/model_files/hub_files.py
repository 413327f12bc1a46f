"""Which files of a hub's repository a model needs."""

import json
import re
from collections.abc import Collection
from pathlib import PurePosixPath

from actorserve.errors import ModelError
from actorserve.model_files.hub_name import HubName

INDEX = "model.safetensors.index.json"
_DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX,
)
"""The files beside the weights that ``hf_folder`` and the tokenizer read."""
_PICKLES = re.compile(r"\.(bin|pt|pth|ckpt|pkl)$", re.IGNORECASE)
_MAX_LISTED = 12


def gguf_file(name: HubName, files: Collection[str]) -> str | None:
    """The GGUF file to serve; None if the repository is served as a folder.

    Raises: ModelError, which lists the GGUF files, if the name does not choose exactly one of them.
    """
    ggufs = sorted(file for file in files if file.lower().endswith(".gguf"))
    if name.file is not None:
        found = [file for file in ggufs if file == name.file]
    elif name.quantization is not None:
        end = re.compile(rf"(^|[-_./]){re.escape(name.quantization)}\.gguf$", re.IGNORECASE)
        found = [file for file in ggufs if end.search(file)]
    elif ("config.json" in files and any(file.endswith(".safetensors") for file in files)) or not ggufs:
        return None
    else:
        found = ggufs
    if len(found) == 1:
        return found[0]
    listed = ", ".join(ggufs[:_MAX_LISTED]) + (", ..." if len(ggufs) > _MAX_LISTED else "")
    has = f"its GGUF files: {listed}" if ggufs else "it has no GGUF files"
    advice = f"give one as {name.repository}/FILE.gguf or {name.repository}:QUANTIZATION; {has}"
    what = "several GGUF files fit" if found else "no GGUF file fits"
    raise ModelError(f"{name.served_name}: {what}; {advice}")


def description_files(name: HubName, files: Collection[str]) -> list[str]:
    """The small files of a repository that is served as a folder.

    Raises: ModelError if the repository is not a model, or has only weights that can run code.
    """
    if "config.json" not in files:
        raise ModelError(f"{name.repository}: the repository has no config.json and no GGUF file")
    return [file for file in _DESCRIPTIONS if file in files]


def weight_files(name: HubName, files: Collection[str], index: bytes | None) -> list[str]:
    """The safetensors files of a repository: those that ``index`` (the index file's content) names, if there is one.

    Raises: ModelError if there are none, or one is missing.
    """
    if index is not None:
        wanted = _indexed(name, index)
        missing = [file for file in wanted if file not in files]
        if missing:
            raise ModelError(f"{name.repository}: {missing[0]} is named in {INDEX} and is missing")
        return wanted
    tops = sorted(file for file in files if file.endswith(".safetensors") and "/" not in file)
    if not tops:
        if any(_PICKLES.search(file) for file in files):
            raise ModelError(
                f"{name.repository}: only pickled weights, which can run code; convert them to safetensors"
            )
        raise ModelError(f"{name.repository}: the repository has no safetensors files")
    return ["model.safetensors"] if "model.safetensors" in tops else tops


def _indexed(name: HubName, index: bytes) -> list[str]:
    try:
        files = sorted(set(json.loads(index)["weight_map"].values()))
        if all(PurePosixPath(file).name == file and file.endswith(".safetensors") for file in files):
            return files
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ModelError(f"{name.repository}: {INDEX} is damaged, or names a file outside the repository's top folder")
