"""The clients that ``tools/clients`` knows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.compatibility.environments import Environment, NodeEnvironment, PythonEnvironment

CHECKS: Final = Path(__file__).parent / "checks"

SDK: Final = PythonEnvironment("sdk")
FRAMEWORKS: Final = PythonEnvironment("frameworks")
NODE: Final = NodeEnvironment("node")
CODING_AGENTS: Final = NodeEnvironment("coding-agents")


@dataclass(frozen=True, slots=True)
class Client:
    """A client, and the files whose tests use it as its documentation shows.

    ``package`` is the one whose version stands in the table. ``workers`` are the settings of workers that the checks
    need. CI runs the checks of quick clients, whose installation takes a minute and whose checks take seconds.
    """

    environment: Environment
    package: str
    checks: tuple[str, ...]
    is_quick: bool = True
    workers: tuple[tuple[str, str], ...] = ()


CLIENTS: Final = {
    "openai": Client(SDK, "openai", ("test_openai_chat.py", "test_openai_other.py")),
    "anthropic": Client(SDK, "anthropic", ("test_anthropic.py",)),
    "langchain": Client(SDK, "langchain-openai", ("test_langchain.py",)),
    "openai-agents": Client(SDK, "openai-agents", ("test_openai_agents.py",)),
    "litellm": Client(FRAMEWORKS, "litellm", ("test_litellm.py",), is_quick=False),
    "llama-index": Client(FRAMEWORKS, "llama-index-llms-openai-like", ("test_llama_index.py",), is_quick=False),
    "openai-node": Client(NODE, "openai", ("openai.test.mjs",)),
    "ai-sdk": Client(NODE, "ai", ("ai_sdk.test.mjs",)),
    "codex": Client(CODING_AGENTS, "@openai/codex", ("codex.test.mjs",), is_quick=False),
    "claude-code": Client(CODING_AGENTS, "@anthropic-ai/claude-code", ("claude_code.test.mjs",), is_quick=False),
    "aider": Client(PythonEnvironment("aider"), "aider-chat", ("test_aider.py",), is_quick=False),
    "guidellm": Client(PythonEnvironment("guidellm"), "guidellm", ("test_guidellm.py",), is_quick=False),
    "aiperf": Client(PythonEnvironment("aiperf"), "aiperf", ("test_aiperf.py",), is_quick=False),
    "schemathesis": Client(
        PythonEnvironment("schemathesis"),
        "schemathesis",
        ("test_schemathesis.py",),
        workers=(("engine", "fake"),),  # because it sends thousands of requests
    ),
    "lm-eval": Client(
        PythonEnvironment("lm-eval"), "lm_eval", ("test_lm_eval.py",), is_quick=False, workers=(("dtype", "float32"),)
    ),
}
"""By the name that ``tools/clients`` takes."""
