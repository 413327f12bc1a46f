"""One way in to both formats: a path becomes a ModelDescription."""

from pathlib import Path

from actorserve.model_files.description import ModelDescription
from actorserve.model_files.gguf_file import describe_gguf
from actorserve.model_files.hf_folder import describe_folder


def describe(path: Path) -> ModelDescription:
    """What the GGUF file or Hugging Face folder at ``path`` holds; reads headers, not weights.

    Raises: ModelError, in one line that a user can act on.
    """
    return describe_folder(path) if path.is_dir() else describe_gguf(path)
