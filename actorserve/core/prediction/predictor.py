"""What a scheduling policy asks about the lengths of outputs."""

from typing import Protocol

from actorserve.core.request import Request


class Forecast(Protocol):
    """What is expected of one request's output."""

    def rest(self, num_output: int) -> float | None:
        """How many output tokens are expected to follow the first ``num_output``; None if nothing is known."""
        ...

    def ended(self, num_output: int) -> None:
        """The request has ended by itself, with ``num_output`` tokens."""
        ...


class LengthPredictor(Protocol):
    """Forecasts the lengths of outputs. What it answers depends on the calls alone."""

    def forecast(self, request: Request) -> Forecast:
        """The forecast of a request that has just come. It learns from other requests as long as it is kept."""
        ...


class _LimitedForecast:
    """A forecast, with the limit of its request's output."""

    __slots__ = ("_forecast", "_max_tokens")

    def __init__(self, forecast: Forecast, max_tokens: int) -> None:
        self._forecast = forecast
        self._max_tokens = max_tokens

    def rest(self, num_output: int) -> float | None:
        rest = self._forecast.rest(num_output)
        return None if rest is None else min(rest, self._max_tokens - num_output)

    def ended(self, num_output: int) -> None:
        self._forecast.ended(num_output)


class LimitedLengths:
    """What another predictor expects, but never more than the request's ``max_tokens``.

    Without it a simulation measures a predictor honestly, because ``max_tokens`` is a simulated output's length.
    """

    def __init__(self, predictor: LengthPredictor) -> None:
        self._predictor = predictor

    def forecast(self, request: Request) -> Forecast:
        return _LimitedForecast(self._predictor.forecast(request), request.sampling.max_tokens)
