"""One iteration of a TorchEngine, from its launch until its tokens are on the host."""

import threading
import time
from collections.abc import Callable, Sequence

import torch

from actorserve.core.messages import PromptLogprobs, StepDone
from workers.sampling.grammars import Masks
from workers.sampling.sampler import PendingSample, Sampled

KeepTokens = Callable[[Sequence[str], Sequence[int]], None]
"""Takes a step's request ids and tokens, for the steps that follow."""


class TorchStep:
    """Implements ``workers.engine.PendingStep``. Make it when all of its work has been launched."""

    def __init__(
        self,
        step_id: int,
        request_ids: Sequence[str],
        positions: Sequence[int],
        sample: PendingSample,
        masks: Masks,
        prompt_logprobs: tuple[PromptLogprobs | None, ...],
        keep: KeepTokens,
        began_s: float,
        before: "TorchStep | None",
        device: torch.device,
    ) -> None:
        """The columns hold the rows that are sampled. ``began_s``: when the launch began, by ``time.perf_counter``.
        ``before``: the step before, whose end is the beginning of this one if the launch began earlier.
        """
        self._step_id = step_id
        self._request_ids = request_ids
        self._positions = positions
        self._sample = sample
        self._masks = masks
        self._prompt_logprobs = prompt_logprobs
        self._keep = keep
        self._began_s = began_s
        self._before = before
        self._ended_s = began_s
        self._done: StepDone | None = None
        self._lock = threading.Lock()
        self._end: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._end.record(torch.cuda.current_stream(device))

    @torch.inference_mode()
    def result(self) -> StepDone:
        """As ``PendingStep.result``. Any thread may call it, any number of times."""
        with self._lock:
            if self._done is None:
                if self._end is not None:
                    self._end.synchronize()
                sampled = self._sample.result()
                self._done = self._make_done(sampled)
                self._keep(self._done.request_ids, self._done.token_ids)
                self._before = None  # otherwise each step would keep all steps before it
            return self._done

    def _make_done(self, sampled: Sampled) -> StepDone:
        failed = self._masks.failed
        good = [row for row in range(len(self._request_ids)) if row not in failed]
        logprobs = tuple(sampled.logprobs[row] for row in good)
        self._ended_s = time.perf_counter()
        began_s = self._began_s if self._before is None else max(self._began_s, self._before._ended_s)
        return StepDone(
            step_id=self._step_id,
            duration_s=self._ended_s - began_s,
            request_ids=tuple(self._request_ids[row] for row in good),
            positions=tuple(self._positions[row] for row in good),
            token_ids=tuple(sampled.token_ids[row] for row in good),
            logprobs=logprobs if any(entry is not None for entry in logprobs) else (),
            prompt_logprobs=self._prompt_logprobs,
            failed=tuple(self._request_ids[row] for row in failed),
        )
