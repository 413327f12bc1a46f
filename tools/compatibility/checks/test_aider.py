"""aider: the program itself, in a repository of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

QUESTION = "Write a program that greets."
PROGRAMS = ("print('hello')", "print('hi')")


def test_edit(tmp_path: Path, url: str, key: str, model: str, answered: Callable[[], tuple[int, int]]) -> None:
    """aider asks for a file, writes the answer into it and commits it, and the server refuses none of its requests.

    The model chooses among two answers in aider's form, because a small model does not keep to it. The settings are
    JSON, which is YAML, too.
    """
    answers = [f"hello.py\n```\n{program}\n```" for program in PROGRAMS]
    choice = {"extra_body": {"structured_outputs": {"choice": answers}}}
    settings = [{"name": f"openai/{model}", "edit_format": "whole", "use_repo_map": False, "extra_params": choice}]
    settings_file = tmp_path / "settings.yml"
    settings_file.write_text(json.dumps(settings), "utf-8")
    folder = tmp_path / "repository"
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    command = [str(Path(sys.executable).parent / "aider"), "--model", f"openai/{model}", "--message", QUESTION]
    command += ["--model-settings-file", str(settings_file), "--yes-always", "--analytics-disable", "--no-check-update"]
    command += ["--no-show-model-warnings", "--no-show-release-notes", "--no-gitignore", "--no-pretty", "hello.py"]
    identity = {f"GIT_{role}_{field}": "a@b" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **identity}
    variables |= {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    good, bad = answered()
    subprocess.run(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, timeout=300, check=True)
    assert (folder / "hello.py").read_text("utf-8").strip() in PROGRAMS
    log = subprocess.run(["git", "log", "--oneline"], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert "hello.py" in log
    good_after, bad_after = answered()
    assert good_after > good
    assert bad_after == bad
