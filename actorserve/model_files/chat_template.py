"""A chat template that the operator gives in place of the model's own."""

from pathlib import Path

from actorserve.errors import ModelError

_MAX_BYTES = 2**20


def read_chat_template(file: Path) -> str:
    """The template's source. Raises: ModelError if the file cannot be read, or is empty, too large or not UTF-8."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ModelError(f"cannot read the chat template {file}: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ModelError(f"the chat template {file} is larger than {_MAX_BYTES} bytes")
    try:
        source = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"the chat template {file} is not text in UTF-8") from None
    if not source.strip():
        raise ModelError(f"the chat template {file} is empty")
    return source
