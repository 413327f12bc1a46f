"""The file of rules that servers with faults read while they run (``tests.e2e.faults``)."""

import json
from pathlib import Path


class FaultRules:
    """A new file in ``folder``. It has no rules yet."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "faults.json"
        self.program = ("tests.e2e.faults", str(self.path), "actorserve")  # runs ``actorserve`` with these faults
        self.set()

    def set(self, **rules: object) -> None:
        """Replace all rules. The old file stays whole for the processes that are reading it, because a process that
        reads half a file ends with an error.
        """
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(rules))
        new.replace(self.path)
