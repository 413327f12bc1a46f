"""Other engines' continuous batching, in a process of their own: commands and answers are lines of JSON.

``python -m tools.benchmarks.gpu.batch_peer transformers|vllm FOLDER DEVICE THREADS``, with that engine's own Python.
The folder has a config.json, and the weights are random. Standard library only, beside the engine itself.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], float]
"""Takes prompts and the number of tokens after each; returns the seconds until all have them."""


def transformers(folder: str, device: str, num_threads: int) -> Generate:
    """transformers' continuous batching, with the settings that it chooses itself. It allocates its cache and captures
    its graphs in the first call, and keeps them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(num_threads)
    config = AutoConfig.from_pretrained(folder)
    on_gpu = device == "cuda"
    with torch.device(device):  # a GPU makes the random weights in seconds
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)  # type: ignore[no-untyped-call]
    model.eval()
    # On a CPU it cannot tell how much memory there is.
    batching = ContinuousBatchingConfig() if on_gpu else ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)

    def generate(prompts: list[list[int]], num_output: int) -> float:
        limits = {"max_new_tokens": num_output, "eos_token_id": -1, "pad_token_id": 0}
        wanted = GenerationConfig(do_sample=False, **limits)  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        made = model.generate_batch(
            prompts, generation_config=wanted, continuous_batching_config=batching, persistent_manager=True
        )
        seconds = time.perf_counter() - began
        lengths = {len(answer.generated_tokens) for answer in made.values()}
        if lengths != {num_output} or len(made) != len(prompts):
            raise ValueError(f"{len(made)} of {len(prompts)} answers have {lengths} tokens instead of {num_output}")
        return seconds

    return generate


def vllm(folder: str, device: str, _num_threads: int) -> Generate:
    """vLLM's offline interface, with the settings that it chooses itself."""
    if device != "cuda":
        raise ValueError("vLLM is measured on a GPU")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], num_output: int) -> float:
        wanted = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        made = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
        seconds = time.perf_counter() - began
        lengths = {len(answer.outputs[0].token_ids) for answer in made}
        if lengths != {num_output}:
            raise ValueError(f"answers have {lengths} tokens instead of {num_output}")
        return seconds

    return generate


ENGINES = {"transformers": transformers, "vllm": vllm}


def main(name: str, folder: str, device: str, num_threads: str) -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # because libraries print

    def tell(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    try:
        generate = ENGINES[name](folder, device, int(num_threads))
        tell({"ready": True})
        for line in sys.stdin:
            command = json.loads(line)
            tell({"seconds": generate(command["prompts"], command["num_output"])})
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        tell({"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
