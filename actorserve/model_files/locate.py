"""Finds the model that the user named: ``default``, a GGUF file, a Hugging Face folder, or a name on a hub.

A file or folder comes before a repository of the same name, as in other servers. So a local copy needs no network.
"""

from pathlib import Path

from actorserve.errors import ModelError
from actorserve.model_files.default_model import Progress, default_model
from actorserve.model_files.description import LoadFormat
from actorserve.model_files.hub_name import HubName, parse_hub_name

_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def locate(name_or_path: str, progress: Progress | None = None, load_format: LoadFormat = "auto") -> Path:
    """The GGUF file or the folder to serve from. The default model, or one on a hub, is downloaded if it is not cached.

    A ``dummy`` needs no weights.

    Raises: ModelError if there is no model, or none that is safe to read: pickled weights can run code.
    """
    if name_or_path == "default":
        return default_model(progress)
    path = Path(name_or_path).expanduser()
    needs_weights = load_format != "dummy"
    try:
        name = hub_name(name_or_path)
        if name is not None:
            from actorserve.model_files.hub import fetch_model  # a large library, which only hub names need

            path = fetch_model(name, progress, needs_weights=needs_weights)
        return _checked(path, needs_weights=needs_weights)
    except (OSError, ValueError) as error:  # a name too long, a forbidden folder, a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(f"cannot access model {str(path)[:200]!r}: {reason}") from None


def hub_name(name_or_path: str) -> HubName | None:
    """The name on a hub that the user means; None for ``default``, a path that exists, and anything that is no hub's
    name.
    """
    name = parse_hub_name(name_or_path)
    return None if name is None or Path(name_or_path).exists() else name


def _checked(path: Path, *, needs_weights: bool) -> Path:
    if not path.exists():
        raise ModelError(
            f"model {str(path)!r} does not exist; give a GGUF file, a Hugging Face folder, "
            "a repository as org/name, or 'default'"
        )
    if path.is_file():
        if path.suffix.lower() in _PICKLE_SUFFIXES:
            raise ModelError(f"{path}: pickled weights can run code and are not read; give GGUF or safetensors")
        if path.suffix.lower() == ".safetensors":
            raise ModelError(f"{path}: give its folder, with its config.json and tokenizer.json")
        return path
    if not path.is_dir():
        raise ModelError(f"{path}: neither a file nor a folder")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: config.json is missing; give a Hugging Face folder or a GGUF file")
    names = [entry.suffix.lower() for entry in path.iterdir()]
    if needs_weights and ".safetensors" not in names:
        if _PICKLE_SUFFIXES.intersection(names):
            raise ModelError(f"{path}: only pickled weights, which can run code; convert them to safetensors")
        raise ModelError(f"{path}: no safetensors files")
    return path
