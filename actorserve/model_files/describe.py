"""Makes a ModelDescription from a path, for both formats (GGUF and Hugging Face)."""

from pathlib import Path

from actorserve.errors import ModelError
from actorserve.model_files.description import LoadFormat, ModelDescription
from actorserve.model_files.gguf_file import describe_gguf
from actorserve.model_files.hf_folder import describe_folder


def describe(path: Path, load_format: LoadFormat = "auto") -> ModelDescription:
    """Describe the model in the GGUF file or Hugging Face folder at ``path``. Reads headers, not weights.

    Raises: ModelError, in one line that tells a user what to do.
    """
    if path.is_dir():
        return describe_folder(path, dummy=load_format == "dummy")
    if load_format == "dummy":
        raise ModelError(f"{path}: load_format 'dummy' needs a folder with a config.json")
    return describe_gguf(path)
