"""Reports of checks, as pytest and Node's test runner write them."""

from pathlib import Path

import pytest

from tools.compatibility.errors import CompatibilityError
from tools.compatibility.reports import Check, read_report

PYTEST = """<testsuites><testsuite>
<testcase classname="test_x" name="test_good" time="0.1" />
<testcase classname="test_x" name="test_bad"><failure message="assert 1 == 2\n where">trace</failure></testcase>
<testcase classname="test_x" name="test_broken"><error message="failed on setup">trace</error></testcase>
<testcase classname="test_x" name="test_left_out"><skipped type="pytest.skip" message="no GPU">x</skipped></testcase>
</testsuite></testsuites>"""
NODE = """<testsuites>
<testcase name="good" time="0.1" classname="test"/>
<testcase name="bad" classname="test" failure="it broke"><failure type="x" message="it broke">trace</failure></testcase>
</testsuites>"""


def test_report_of_pytest(tmp_path: Path) -> None:
    """Failures and errors both count as failures, and reasons are one line."""
    file = tmp_path / "report.xml"
    file.write_text(PYTEST, "utf-8")
    assert read_report(file) == [
        Check("test_good"),
        Check("test_bad", failure="assert 1 == 2 where"),
        Check("test_broken", failure="failed on setup"),
        Check("test_left_out", skipped="no GPU"),
    ]


def test_report_of_node(tmp_path: Path) -> None:
    """The same format from Node's test runner is read, too."""
    file = tmp_path / "report.xml"
    file.write_text(NODE, "utf-8")
    assert read_report(file) == [Check("good"), Check("bad", failure="it broke")]


def test_no_report(tmp_path: Path) -> None:
    """Checks that end before they report are an error and not a success."""
    with pytest.raises(CompatibilityError, match="without a report"):
        read_report(tmp_path / "report.xml")
