"""Reading a chat template that the operator gives."""

from pathlib import Path

import pytest

from actorserve.errors import ModelError
from actorserve.model_files.chat_template import read_chat_template


def test_a_file_is_read(tmp_path: Path) -> None:
    """The file's text is the template's source."""
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }} \u00e9\n", encoding="utf-8")
    assert read_chat_template(file) == "{{ messages }} \u00e9\n"


@pytest.mark.parametrize(
    ("data", "problem"),
    [(b" \n", "is empty"), (b"\xff", "is not text"), (b"x" * (2**20 + 1), "is larger"), (None, "cannot read")],
)
def test_a_wrong_file_is_an_error_that_names_it(tmp_path: Path, data: bytes | None, problem: str) -> None:
    """A file that is missing, empty, too large or no text is an error in one line."""
    file = tmp_path / "chat.jinja"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ModelError, match=problem) as caught:
        read_chat_template(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    """A folder in place of a file is an error."""
    with pytest.raises(ModelError, match="cannot read"):
        read_chat_template(tmp_path)
