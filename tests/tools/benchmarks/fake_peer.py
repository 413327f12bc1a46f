"""A peer whose times are options, and that may misbehave. Tests run it as a process."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.benchmarks.peers.protocol import BlockBudget, serve


class FakePeer:
    """Options: ``prefill_s``, ``decode_s``, ``log`` (a file for commands), ``chatter``, ``refuses``, ``crashes``."""

    def __init__(self, options: dict[str, Any]) -> None:
        if "refuses" in options:
            raise ValueError(options["refuses"])
        self._options = options

    def prefill(self, num_tokens: int) -> float:
        if self._options.get("crashes"):
            raise RuntimeError("too much")
        if "chatter" in self._options:
            os.write(1, self._options["chatter"].encode())
        self._note("prefill")
        return float(self._options.get("prefill_s", 1.0))

    def decode(self, batch: int, steps: int) -> float:
        self._note("decode")
        return float(self._options.get("decode_s", 1.0))

    def _note(self, shape: str) -> None:
        if self._options["log"]:
            with Path(self._options["log"]).open("a", encoding="utf-8") as log:
                log.write(json.dumps({"shape": shape, "process": os.getpid()}) + "\n")


class FakeScorer(FakePeer):
    """The peer that the process runs, unless its options have ``cannot_score``."""

    def score(self, token_ids: Sequence[int]) -> float:
        return float(len(token_ids))


def _make(options: dict[str, Any], _: BlockBudget) -> FakePeer:
    return FakePeer(options) if "cannot_score" in options else FakeScorer(options)


if __name__ == "__main__":
    sys.exit(serve(_make, (ValueError,)))
