"""Names of models on a hub: ``organisation/repository``, with a choice of file and revision."""

import re
from dataclasses import dataclass

_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?P<repository>{_WORD}/{_WORD})"
    r"(?:/(?P<file>[^@:\0]+\.gguf)|:(?P<quantization>[A-Za-z0-9_.-]+))?"
    r"(?:@(?P<revision>[A-Za-z0-9_][A-Za-z0-9_./-]*))?"
)
_MAX_CHARS = 512


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on a hub. At most one of ``file`` and ``quantization`` is given, and both choose a GGUF file.

    ``revision`` is a branch, a tag or a commit; None: the repository's main branch.
    """

    repository: str
    file: str | None = None
    quantization: str | None = None
    revision: str | None = None

    @property
    def served_name(self) -> str:
        """The name without its revision: what clients ask for unless the operator gives another name."""
        if self.file is not None:
            return f"{self.repository}/{self.file}"
        return self.repository if self.quantization is None else f"{self.repository}:{self.quantization}"


def parse_hub_name(text: str) -> HubName | None:
    """The name that ``text`` spells; None for anything else, such as a path.

    The forms are ``org/repository``, ``org/repository/file.gguf`` and ``org/repository:QUANTIZATION``, all of them with
    or without ``@revision``.
    """
    found = _NAME.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if found is None or ".." in text or "--" in found["repository"]:
        return None
    return HubName(found["repository"], found["file"], found["quantization"], found["revision"])
