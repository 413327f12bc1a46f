"""Small random models as Hugging Face folders, and a scheduler that plays requests in any mixture."""

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from actorserve.core.messages import StepPlan
from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription
from tests.workers.triton import HAS_TRITON, INTERPRETED

Tokens = tuple[int, ...]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch to one thread; engines set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def patched_once() -> Iterator[None]:
    """Let Triton's interpreter replace the functions of its language once. It does so at each call, which takes a
    quarter of its time.
    """
    if not (HAS_TRITON and INTERPRETED):
        yield
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        yield
    scope.restore()


@pytest.fixture(scope="session", autouse=True)
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the weights that engines prepare in these tests out of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.weights.prepared.cache_folder", lambda: folder)
        yield folder / "prepared"


@dataclass(frozen=True)
class SmallModel:
    """A random model: transformers' own, as the reference, and the folder that it was saved in."""

    reference: Any
    folder: Path

    @property
    def description(self) -> ModelDescription:
        return describe(self.folder)


MakeModel = Callable[..., SmallModel]


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Its tokens are single bytes, of which a small vocabulary has the printable ones, and further words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
    words = [f"word{index}" for index in range(vocab_size - len(letters))]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate([*letters, *words])}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes a small random Llama; keyword arguments go to LlamaConfig, ``max_shard_size`` to save_pretrained."""
    from transformers import LlamaConfig, LlamaForCausalLM  # here, because it takes seconds, and few processes need it

    def make(max_shard_size: str = "1GB", **changes: Any) -> SmallModel:
        settings: dict[str, Any] = {
            "vocab_size": 211,
            "hidden_size": 54,
            "intermediate_size": 100,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
        }
        torch.manual_seed(0)
        reference: Any = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
        reference = reference.float().eval()
        for parameter in reference.parameters():
            if parameter.dim() == 1:  # norms and biases, which would be ones and zeros
                torch.nn.init.normal_(parameter, mean=0.5)
        folder = tmp_path_factory.mktemp("model")
        reference.save_pretrained(folder, max_shard_size=max_shard_size)
        _tokenizer(reference.config.vocab_size).save(str(folder / "tokenizer.json"))
        return SmallModel(reference, folder)

    return make


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """A small random Gemma 3 of three layers, two of which have a window of 12 tokens: three layer groups."""
    from tests.workers.small_models import save_model

    folder = tmp_path_factory.mktemp("windowed")
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    saved = save_model(folder, "gemma3", num_hidden_layers=3, sliding_window=12, layer_types=layer_types)
    _tokenizer(saved.reference.config.vocab_size).save(str(folder / "tokenizer.json"))
    return SmallModel(saved.reference, folder)


@dataclass
class _Playing:
    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Schedule:
    """Plays requests in random mixtures of prefill chunks and decodes, with random blocks and preemptions.

    ``run(plan)`` computes a plan and returns a result for each sampling row. With ``num_tokens`` the result is the
    next token, and a request ends when it has that many tokens; otherwise all tokens are known from the start.
    """

    def __init__(
        self, num_blocks: int, tokens_per_block: int, seed: int, preempts: bool = True, num_groups: int = 1
    ) -> None:
        self._num_groups = num_groups
        self._random = random.Random(seed)
        self._free = list(range(num_blocks))
        self._random.shuffle(self._free)
        self._tokens_per_block = tokens_per_block
        self._preempts = preempts
        self.num_preemptions = 0

    def play(
        self,
        requests: dict[str, Sequence[int]],
        run: Callable[[StepPlan], Sequence[Any]],
        num_tokens: dict[str, int] | None = None,
        chunks: Sequence[int] = (1, 3, 17, 80),
    ) -> dict[tuple[str, int], Any]:
        """The result of ``run`` for each request and position; the last one if a position was computed again."""
        playing = {name: _Playing(list(tokens)) for name, tokens in requests.items()}
        results: dict[tuple[str, int], Any] = {}
        step_id = 0
        while playing:
            rows: list[tuple[str, int, Tokens, Tokens, bool]] = []
            for name, state in playing.items():
                if self._preempts and state.num_computed and self._random.random() < 0.04:
                    self._free += state.blocks
                    state.blocks, state.num_computed = [], 0
                    self.num_preemptions += 1
                if self._random.random() < 0.8 or not rows:
                    chunk = state.tokens[state.num_computed :][: self._random.choice(chunks)]
                    end = state.num_computed + len(chunk)
                    num_blocks = -(-end // self._tokens_per_block) * self._num_groups
                    while len(state.blocks) < num_blocks:
                        state.blocks.append(self._free.pop(self._random.randrange(len(self._free))))
                    samples = num_tokens is None or end == len(state.tokens)
                    rows.append((name, state.num_computed, tuple(chunk), tuple(state.blocks), samples))
                    state.num_computed = end
            self._random.shuffle(rows)
            names, starts, token_ids, tables, samples_column = zip(*rows, strict=True)
            plan = StepPlan(step_id, names, starts, token_ids, tables, samples_column)
            step_id += 1
            sampling = [row for row in rows if row[4]]
            for (name, start, chunk_ids, _, _), result in zip(sampling, run(plan), strict=True):
                position = start + len(chunk_ids) - 1
                results[name, position] = result
                if num_tokens is not None:
                    playing[name].tokens.append(result)
            for name in list(playing):
                state = playing[name]
                finished = len(state.tokens) >= num_tokens[name] if num_tokens else False
                if finished or (num_tokens is None and state.num_computed == len(state.tokens)):
                    self._free += state.blocks
                    del playing[name]
        return results


MakeSchedule = Callable[..., Schedule]


@pytest.fixture
def make_schedule() -> MakeSchedule:
    return Schedule
