"""Steps on a GPU that the host begins ahead of their tokens.

A step's tokens stay on the device, where the next step feeds them, and a copy of them comes to the host later. The host
waits for a step's tokens while the next one's layers run, and only if a request needs them: its grammar or penalties
follow from its tokens. Log-probabilities are read at once, so a step with them is not begun ahead.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actorserve.core.messages import PromptLogprobs, StepDone, StepPlan, TokenLogprobs
from workers.engines.device_steps import DeviceSteps
from workers.packed_batch import Doubles
from workers.sampling.grammars import Grammars, Masks
from workers.sampling.logprobs import read_logprobs
from workers.sampling.prompt_scorer import PromptScorer
from workers.sampling.sampler import Sampler
from workers.sampling.token_choice import Rule


class Choose(Protocol):
    """Chooses tokens on the device, without waiting for it."""

    def __call__(self, logits: Tensor, rules: Tensor, masks: Tensor, allowed: Tensor) -> Tensor:
        """``logits``: [S, vocab_size] float32; ``rules``: [S, fields of a Rule] float64; ``masks``: [S] int64, each
        row's row in ``allowed`` [M, ceil(vocab_size / 8)] uint8, or -1. Returns [S] int64.
        """
        ...


class DeviceStep:
    """A step that was begun. Implements ``workers.engine.PendingStep``."""

    def __init__(
        self, plan: StepPlan, request_ids: Sequence[str], positions: Sequence[int], timer: "_Timer", tokens: Tensor
    ) -> None:
        """``tokens``: [S], whose copy to the host is launched."""
        self.request_ids = tuple(request_ids)
        self.failed: tuple[int, ...] = ()
        """Rows whose grammar failed."""
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.prompt_logprobs: tuple[PromptLogprobs | None, ...] = ()
        self._step_id = plan.step_id
        self._positions = tuple(positions)
        self._timer = timer
        self._tokens = tokens

    def token_ids(self) -> list[int]:
        """Wait for the tokens."""
        self._timer.wait()
        token_ids: list[int] = self._tokens.tolist()
        return token_ids

    def result(self) -> StepDone:
        token_ids = self.token_ids()
        rows = [row for row in range(len(token_ids)) if row not in self.failed]
        return StepDone(
            step_id=self._step_id,
            duration_s=self._timer.seconds(),
            request_ids=tuple(self.request_ids[row] for row in rows),
            positions=tuple(self._positions[row] for row in rows),
            token_ids=tuple(token_ids[row] for row in rows),
            logprobs=tuple(self.logprobs.get(row) for row in rows) if self.logprobs else (),
            prompt_logprobs=self.prompt_logprobs,
            failed=tuple(self.request_ids[row] for row in self.failed),
        )


class StepsAhead:
    """Begins steps. One thread calls it, in their order; another one asks the steps for their results."""

    def __init__(
        self,
        steps: DeviceSteps,
        head: Callable[[Tensor], Tensor],
        choose: Choose,
        sampler: Sampler,
        grammars: Grammars,
        scorer: PromptScorer,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """``head``: hidden states [n, hidden_size] to logits [n, vocab_size] float32."""
        self._steps = steps
        self._head = head
        self._choose = choose
        self._sampler = sampler
        self._grammars = grammars
        self._scorer = scorer
        self._device = device
        self._vocab_size = vocab_size
        self._no_masks = torch.full((0,), -1, dtype=torch.int64, device=device)
        self._nothing_allowed = torch.empty((0, -(-vocab_size // 8)), dtype=torch.uint8, device=device)
        self._before: DeviceStep | None = None
        self._dropped: set[str] = set()  # since the step before

    def begin(self, plan: StepPlan, request_ids: Sequence[str], positions: Sequence[int]) -> DeviceStep:
        """Launch a step. ``request_ids`` sample at the output ``positions``, in the plan's order.

        Raises: ValueError if a request of the plan has no token, or too few blocks.
        """
        timer = _Timer(self._device)
        rules = self._sampler.rules(request_ids, positions)
        packed, hidden = self._steps.forward(plan, _columns(rules))
        prompt_logprobs = self._scorer(plan, hidden, self._head)
        if request_ids:
            logits = self._head(hidden.index_select(0, packed.batch.sample_rows))
        else:
            logits = torch.empty((0, self._vocab_size), device=self._device)

        self._learn_tokens()
        masks = self._grammars.begin(request_ids, positions).result()
        num_best = self._sampler.num_best(request_ids)
        raw = logits[list(num_best)] if num_best else None
        self._sampler.edit(logits, request_ids, positions)
        tokens = self._choose(logits, packed.rules, *self._on_device(masks, len(request_ids)))
        self._steps.keep_tokens(packed, tokens)
        step = DeviceStep(plan, request_ids, positions, timer, tokens.to("cpu", non_blocking=True))
        timer.stop()
        step.failed, step.prompt_logprobs = masks.failed, prompt_logprobs
        if raw is not None:
            token_ids = step.token_ids()
            found = read_logprobs(raw, [token_ids[row] for row in num_best], list(num_best.values()))
            step.logprobs = dict(zip(num_best, found, strict=True))
        self._before, self._dropped = step, set()
        return step

    def without_failed(self, plan: StepPlan) -> StepPlan:
        """The plan, in which no request samples whose grammar failed in the step before. It comes before ``begin``."""
        if self._before is None or not self._before.failed:
            return plan
        failed = {self._before.request_ids[row] for row in self._before.failed} - self._dropped
        kept = (name not in failed for name in plan.request_ids)
        return replace(plan, samples=tuple(a and b for a, b in zip(plan.samples, kept, strict=True)))

    def drop(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        self._dropped.add(request_id)
        self._steps.drop(request_id)

    def _learn_tokens(self) -> None:
        """Tell penalties and grammars the tokens of the step before, if they want them, after waiting for them."""
        before = self._before
        if before is None:
            return
        rows = [
            row
            for row, name in enumerate(before.request_ids)
            if row not in before.failed
            and name not in self._dropped
            and (self._sampler.needs_tokens([name]) or self._grammars.has(name))
        ]
        if rows:
            names, token_ids = [before.request_ids[row] for row in rows], before.token_ids()
            learned = [token_ids[row] for row in rows]
            self._sampler.append(names, learned)
            self._grammars.append(names, learned)

    def _on_device(self, masks: Masks, num_rows: int) -> tuple[Tensor, Tensor]:
        """For each row its row in the second tensor, or -1; and the allowed tokens (``Choose``)."""
        if not masks.rows:
            if len(self._no_masks) < num_rows:
                self._no_masks = torch.full((2 * num_rows,), -1, dtype=torch.int64, device=self._device)
            return self._no_masks[:num_rows], self._nothing_allowed
        index = np.full(num_rows, -1, np.int64)
        index[list(masks.rows)] = np.arange(len(masks.rows))
        return self._upload(index), self._upload(masks.allowed)

    def _upload(self, array: npt.NDArray[np.int64] | npt.NDArray[np.uint8]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


class _Timer:
    """Measures a step by the device's clock; by the host's where the device is the host."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Event
        self._events = None
        if device.type == "cuda":  # waiting for a blocking event leaves the core to other threads
            self._events = (make(enable_timing=True), make(enable_timing=True, blocking=True))
        if self._events is not None:
            self._events[0].record()
        self._began = self._ended = time.perf_counter()

    def stop(self) -> None:
        """The step's last work is launched."""
        if self._events is not None:
            self._events[1].record()
        self._ended = time.perf_counter()

    def wait(self) -> None:
        """Wait for the work that was launched before ``stop``."""
        if self._events is not None:
            self._events[1].synchronize()

    def seconds(self) -> float:
        """From the start to ``stop``. Call ``wait`` first."""
        if self._events is not None:
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return self._ended - self._began


def _columns(rules: Sequence[Rule]) -> Doubles:
    return np.array(rules, np.float64).reshape(len(rules), len(Rule._fields))
