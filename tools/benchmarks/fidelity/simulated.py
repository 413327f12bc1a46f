"""The simulated twin of a measured run."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from actorserve.options import ClusterOptions, SchedulingOptions
from actorserve.settings import Settings
from actorserve.sim.arrivals import arrivals
from actorserve.sim.config import RunConfig, parse_run
from actorserve.sim.results import Results
from actorserve.sim.simulation import Simulation
from actorserve.sim.workload.traces import TraceRow
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.journals import Pools, Record
from tools.benchmarks.fidelity.recorded_engine import RecordedEngine, RecordedTimes
from tools.benchmarks.fidelity.server_runs import LoadedRun

_PLACE = "the simulated cluster"
_LEAD_S = 1.0  # from the beginning of the simulation to the first recorded arrival


@dataclass(frozen=True, slots=True)
class Twin:
    """What the simulated cluster has in common with the measured one. ``message_s`` is the time of one message."""

    arguments: argparse.Namespace
    settings: Settings
    pools: Pools
    message_s: float

    def config(self, load_tokens_per_s: float) -> RunConfig:
        """Arrivals whose answers sum up to ``load_tokens_per_s``. Raises: ActorserveError."""
        drawn = arrivals(self._config({"arrivals": {"rate_per_s": 1.0}}), ())  # a rate changes no length
        rate = load_tokens_per_s / fmean(arrival.output_tokens for arrival in drawn)
        return self._config({"arrivals": {"rate_per_s": rate}})

    def recorded_config(self) -> RunConfig:
        """Arrivals that were recorded. Raises: ActorserveError."""
        recorded = {"trace": "recorded", "arrivals": {"process": "trace"}, "lengths": {"like": "trace"}}
        return self._config(recorded)

    def _config(self, more: dict[str, Any]) -> RunConfig:
        arguments = self.arguments
        shared = self.settings.workers.model_dump(include=set(SchedulingOptions.model_fields))
        shared |= self.settings.cluster.model_dump(include=set(ClusterOptions.model_fields))
        values = {
            "seed": arguments.seed,
            "num_requests": arguments.requests,
            "cluster": shared
            | {
                "profile": "measured",
                "kv_tokens": self.pools.kv_tokens,
                "host_kv_tokens": self.pools.host_kv_tokens,
                "tokens_per_block": self.pools.tokens_per_block,
                "max_context_tokens": arguments.max_tokens,
                "network_s": self.message_s,
            },
            "lengths": {"prompt": arguments.prompt_tokens, "output": arguments.output_tokens},
            "prefixes": {"count": arguments.prefixes, "tokens": arguments.prefix_tokens},
        }
        return parse_run(values | more, _PLACE)


def with_recorded_times(twin: Twin, run: LoadedRun) -> Results:
    """Simulate a run's arrivals with the times of its iterations and swaps.

    Raises: ActorserveError.
    """
    began_s = run.records[0].arrived_s - _LEAD_S
    trace = [TraceRow(record.arrived_s - began_s, record.num_prompt, record.num_output) for record in run.records]
    profile = replace(run.recording.profile, swap=run.recording.swap_link())
    make_engine = partial(RecordedEngine, RecordedTimes(run.recording.steps, profile, began_s))
    return Simulation(twin.recorded_config(), [profile], trace, make_engine=make_engine).run()


def records_in(results: Results) -> Sequence[Record]:
    """Raises: BenchError, if a request did not end."""
    outcomes = results.outcomes
    num_missing = len(outcomes) - outcomes.num_completed()
    if num_missing:
        raise BenchError(f"{num_missing} of {len(outcomes)} simulated requests did not end")
    columns = (
        *(outcomes.arrived_s, outcomes.first_token_s, outcomes.ended_s),
        *(outcomes.num_prompt, outcomes.num_output),
    )
    return [Record(*row) for row in zip(*columns, strict=True)]
