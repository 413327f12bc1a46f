"""What the rows of an iteration cost by the profile, so that they share its energy (``core.power.accounting``)."""

from collections.abc import Collection, Iterator

from actorserve.core.power.accounting import EnergyRow
from actorserve.core.request import Request
from actorserve.core.scheduling.batch import Batch
from actorserve.core.timing.step_times import StepTimes


def energy_rows(
    batch: Batch, starts: Collection[int], present: Collection[Request], times: StepTimes
) -> Iterator[EnergyRow]:
    """The iteration's rows. ``starts`` are the tokens of each row's request that were fed before, and ``present`` the
    requests that are still here.
    """
    rows = list(zip(batch.rows, starts, strict=True))
    decode_starts = [start for (_, num_fed), start in rows if num_fed == 1]
    num_decodes, num_context_tokens = max(1, len(decode_starts)), max(1, sum(decode_starts))
    alone_s = times.decode_s(num_decodes, 0)
    decode_s = alone_s / num_decodes
    token_s = (times.decode_s(num_decodes, num_context_tokens) - alone_s) / num_context_tokens
    for (request, num_fed), start in rows:
        cost_s = decode_s + token_s * start if num_fed == 1 else times.prefill_s(num_fed, start)
        yield (request if request in present else None, start >= request.num_prompt, cost_s)
