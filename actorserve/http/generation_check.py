"""``/health_generate``: whether a worker makes a token in time, which ``/health`` does not try."""

import asyncio
import time
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from actorserve.core.effects import Deliver
from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.http.access.authentication import Grant, granted
from actorserve.http.answers.time_limit import time_limit_s
from actorserve.http.service import Service
from actorserve.http.stream import AnswerStream

TIMEOUT_S: Final = 20.0
"""A client may ask for less, as for any answer."""


class GenerationCheck:
    """The handler of this route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[BaseRoute]:
        return [Route("/health_generate", self._check)]

    async def _check(self, request: Request) -> Response:
        limit_s = time_limit_s(request.scope, TIMEOUT_S)
        grant = granted(request.scope, None)
        began_s = time.monotonic()
        is_made = self._service.model is not None and await self._makes_a_token(grant, limit_s)
        status = {"status": "ok" if is_made else "unavailable", "seconds": round(time.monotonic() - began_s, 3)}
        return JSONResponse(status, 200 if is_made else 503)

    async def _makes_a_token(self, grant: Grant, limit_s: float) -> bool:
        sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
        spec = RequestSpec(f"{grant.work_name}-0", (0,), sampling, priority=grant.priority, client=grant.client)
        stream = AnswerStream()
        self._service.submit(spec, stream)
        try:
            # The first effect is enough: a token, or the end of a request that was refused.
            effects = await stream.take(asyncio.get_running_loop().time() + limit_s)
            return any(isinstance(effect, Deliver) for effect in effects)
        finally:
            stream.close()
            self._service.release(spec.request_id)
