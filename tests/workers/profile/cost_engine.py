"""An engine with a known cost: it computes nothing, and says how long an iteration took."""

from collections.abc import Callable, Sequence

from actorserve.core.kv.layer_groups import ONE_GROUP
from actorserve.core.messages import ModelInfo, RequestSpec, StepDone, StepPlan
from workers.engine import EndedStep
from workers.engines.fake_engine import FakeEngine
from workers.kv.pools import check_copy
from workers.sampling.grammars import PreparedGrammar


class CostEngine:
    """Says that iterations take what a cost says; with ``disturbs``, every fifth one fifty times that.

    ``decode_s`` is added for each decode, and ``slowness`` gives a factor for each iteration by its number.
    """

    kind = "cost"
    weights_digest = "cost"
    tokens_per_block = 16
    bytes_per_block = 1600
    layer_groups = ONE_GROUP

    def __init__(self, num_blocks: int = 4096, num_host_blocks: int = 8, max_tokens: int = 4096) -> None:
        self.model = ModelInfo("cost", 500, max_tokens)
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.num_written_host_blocks = 0
        self.kv = FakeEngine(num_blocks=1).kv
        self.requests: set[str] = set()
        self.plans: list[StepPlan] = []
        self.disturbs = False
        self.decode_s = 0.0
        self.slowness: Callable[[int], float] = lambda number: 1.0
        self.written: set[int] = set()  # blocks

    def prepare(self, request: RequestSpec) -> None:
        """No request of a profile has a grammar."""

    def add(self, request: RequestSpec, grammar: PreparedGrammar | None = None) -> None:
        self.requests.add(request.request_id)

    def drop(self, request_id: str) -> None:
        self.requests.discard(request_id)

    def begin(self, plan: StepPlan) -> EndedStep:
        self.plans.append(plan)
        assert set(plan.request_ids) <= self.requests
        assert all(plan.samples)
        seconds = 0.005
        num_rows = 0
        for start, tokens, table in zip(plan.starts, plan.token_ids, plan.block_tables, strict=True):
            end = start + len(tokens)
            assert 0 <= start < end <= self.model.max_tokens
            assert (len(table) - 1) * 16 < end <= len(table) * 16
            assert all(0 <= block < self.num_blocks for block in table)
            assert self.written.issuperset(table[: start // 16]), "a context that was never written"
            assert all(0 <= token < 500 for token in tokens)
            self.written.update(table[start // 16 :])
            seconds += 1e-6 * start * len(tokens) + 0.5e-6 * len(tokens) ** 2
            num_rows += len(tokens)
            seconds += self.decode_s if start and len(tokens) == 1 else 0.0
        seconds += 0.0004 * num_rows
        if self.disturbs and len(self.plans) % 5 == 0:
            seconds *= 50
        seconds *= self.slowness(len(self.plans))
        return EndedStep(StepDone(plan.step_id, seconds, (), (), ()))

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        check_copy(device_blocks, self.num_blocks, host_blocks, self.num_host_blocks)

    def copy_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        check_copy(device_blocks, self.num_blocks, host_blocks, self.num_host_blocks)
        self.written.update(device_blocks)
