"""actorserve as its next version: ``python -m tests.e2e.next_version MODULE ARGUMENTS`` runs the module.

In its process, and in every process that it starts, the protocol has the next number, and every message has one more
field, at its end.
"""

import runpy
import sys

import msgpack

from actorserve.core import messages


def main() -> None:
    """Patch what makes messages, and run the module that the arguments name."""
    messages.PROTOCOL_VERSION += 1  # before the modules that take it from there are imported
    from actorserve.processes import launch
    from actorserve.wire import codec, transport

    tags = {cls: tag for tag, cls in codec.WIRE_TAGS.items()}

    def encode(message: messages.Message) -> bytes:
        fields = codec._all_fields_getter(type(message))(message)
        encoded: bytes = msgpack.packb((tags[type(message)], *fields, ["new", 1]), default=codec._pack_nested)
        return encoded

    transport.encode = encode  # type: ignore[attr-defined]
    python = (sys.executable, "-P", "-m", "tests.e2e.next_version")
    launch.python_command = lambda: python
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
