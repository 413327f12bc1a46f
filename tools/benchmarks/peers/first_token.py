"""A process that loads our engine and computes one token; ``tools/bench start`` times it.

Arguments: the model's path, the numeric mode, and the number of threads.
"""

import sys
from pathlib import Path

from actorserve.core.messages import RequestSpec, SamplingParams, StepPlan
from actorserve.errors import ActorserveError
from actorserve.model_files.describe import describe
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine

_PROMPT = tuple(range(100, 116))


def main() -> int:
    model, dtype, num_threads = sys.argv[1:]
    try:
        engine = TorchEngine(
            describe(Path(model)), EngineOptions(device="cpu", dtype=dtype, num_threads=int(num_threads))
        )
    except ActorserveError as error:
        print(error, file=sys.stderr)
        return 1
    engine.add(RequestSpec("r", _PROMPT, SamplingParams(seed=0, max_tokens=1, temperature=0.0)))
    blocks = tuple(range(-(-len(_PROMPT) // engine.tokens_per_block)))
    done = engine.begin(StepPlan(0, ("r",), (0,), (_PROMPT,), (blocks,), (True,))).result()
    print(*done.token_ids, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
