"""The API's README tells what the code does."""

from tools.figures.api_table import README, filled


def test_the_readme_shows_all_fields() -> None:
    """The README tells of every field of a request what happens to it."""
    text = README.read_text(encoding="utf-8")
    assert filled(text) == text, "run python -m tools.figures.api_table"
