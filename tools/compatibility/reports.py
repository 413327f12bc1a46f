"""What checks found, read from the JUnit reports of pytest and of Node's test runner."""

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tools.compatibility.errors import CompatibilityError

_MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and why it failed or was skipped; both are empty if it passed."""

    name: str
    failure: str = ""
    skipped: str = ""


def read_report(file: Path) -> list[Check]:
    """The checks of a report. Raises: CompatibilityError if there is none."""
    try:
        root = ElementTree.parse(file).getroot()
    except (OSError, ElementTree.ParseError):
        raise CompatibilityError("the checks ended without a report") from None
    return [_check(case) for case in root.iter("testcase")]


def _check(case: ElementTree.Element) -> Check:
    name = case.get("name", "")
    for tag in ("failure", "error"):
        if (found := case.find(tag)) is not None:
            return Check(name, failure=_reason(found))
    if (found := case.find("skipped")) is not None:
        return Check(name, skipped=_reason(found))
    return Check(name)


def _reason(found: ElementTree.Element) -> str:
    text = found.get("message") or found.text or "no reason given"
    return " ".join(text.split())[:_MAX_REASON_CHARS]
