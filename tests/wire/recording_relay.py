"""A relay between two sockets that records what the client sends, and can send it again."""

import asyncio
from typing import Self


class RecordingRelay:
    """Passes one TCP connection on to ``target``, in both directions. Use it as a context manager."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self.recorded = b""
        self.address = ""
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def replay(self) -> None:
        """Send what the client sent to the target again, on a new connection."""
        _, writer = await asyncio.open_connection(*self._target)
        self._writers.append(writer)
        writer.write(self.recorded)
        await writer.drain()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(*self._target)
        self._writers += [writer, forth]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass_on(reader, forth, records=True))
            group.create_task(self._pass_on(back, writer, records=False))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, records: bool) -> None:
        while data := await reader.read(2**16):
            if records:
                self.recorded += data
            writer.write(data)
        writer.close()
