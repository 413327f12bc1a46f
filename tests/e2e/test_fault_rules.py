from pathlib import Path

from tests.e2e.fault_rules import FaultRules


def test_a_reader_that_has_the_file_open_meanwhile_reads_whole_rules(tmp_path: Path) -> None:
    rules = FaultRules(tmp_path)
    rules.set(restless=True)
    with rules.path.open() as file:
        rules.set(drop=0.5)
        assert file.read() == '{"restless": true}'
    assert rules.path.read_text() == '{"drop": 0.5}'
