"""Models by name, from a hub that the test runs. Each look-up is a process of its own, as a server's start is."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from actorserve.model_files.hub_name import HubName, parse_hub_name
from tests.model_files.builders import write_folder, write_gguf
from tests.model_files.fake_hub import COMMIT, Hub, Repository, running_hub
from tests.sources import ROOT

PROGRAM = """
import sys
from actorserve.errors import ModelError
from actorserve.model_files.locate import locate
try:
    print(locate(sys.argv[1], lambda done, total: print(f"progress {done} {total}", flush=True), sys.argv[2]))
except ModelError as error:
    sys.exit(f"refused: {error}")
"""
BIG = 24 * 2**20  # larger than two of the library's chunks


@dataclass(frozen=True)
class Machine:
    """The environment of a user who starts servers."""

    hub: Hub
    home: Path

    def command(self, name: str, load_format: str) -> list[str]:
        return [sys.executable, "-P", "-c", PROGRAM, name, load_format]

    def environment(self, **variables: str) -> dict[str, str]:
        ours = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "PYTHONPATH": str(ROOT)}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return {**inherited, **ours, **variables}

    def locate(self, name: str, load_format: str = "auto", **variables: str) -> str:
        """The path that a start finds, or "refused: " and its error."""
        done = subprocess.run(
            self.command(name, load_format),
            env=self.environment(**variables),
            cwd=self.home.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode == 0:
            return done.stdout.splitlines()[-1]
        assert "Traceback" not in done.stderr
        (line,) = done.stderr.splitlines()
        return line


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with running_hub() as hub:
        yield Machine(hub, tmp_path / "home")


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return read_files(write_folder(tmp_path / "original"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/model", HubName("org/model")),
        ("org/model-1.5B_x@v1.0", HubName("org/model-1.5B_x", revision="v1.0")),
        ("org/model@refs/pr/3", HubName("org/model", revision="refs/pr/3")),
        ("org/m:Q4_K_M", HubName("org/m", quantization="Q4_K_M")),
        ("org/m/sub/m.gguf@main", HubName("org/m", file="sub/m.gguf", revision="main")),
        *((path, None) for path in ("default", "/org/model", "./model", "../org", "org/", "a/b/c", "~/m", "o/a..b")),
        *((path, None) for path in ("o/m@", "o/m:", "o/m@../x", "x/" + "y" * 600, "o/a\0b", "model.gguf", "o/a--b")),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    """A hub's name has one slash, and may have a file, a quantization and a revision; anything else is a path."""
    assert parse_hub_name(text) == name


def test_a_folder_is_fetched_once(machine: Machine, files: dict[str, bytes]) -> None:
    """Only what serving needs is fetched, into the library's cache. The second start fetches nothing."""
    junk = {"pytorch_model.bin": b"\x80\x04.", "README.md": b"x", "onnx/model.onnx": b"x", "evil.py": b"x"}
    machine.hub.repositories["org/tiny"] = Repository(files | junk)
    found = Path(machine.locate("org/tiny"))
    assert found == machine.home / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert read_files(found) == files
    assert set(machine.hub.ranges) == set(files)
    num_reads = machine.hub.num_reads
    assert Path(machine.locate("org/tiny")) == found
    assert Path(machine.locate(f"org/tiny@{COMMIT}")) == found
    assert machine.hub.num_reads == num_reads


def test_the_library_finds_what_we_fetched(machine: Machine, files: dict[str, bytes]) -> None:
    """Other programs share the cache: the hub's library returns our snapshot without a network."""
    machine.hub.repositories["org/tiny"] = Repository(files)
    found = machine.locate("org/tiny")
    program = "from huggingface_hub import hf_hub_download as d; print(d('org/tiny', 'model.safetensors'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=machine.environment(HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"{found}/model.safetensors"


def test_only_indexed_weights_are_fetched(machine: Machine, files: dict[str, bytes]) -> None:
    """With an index, only the weights that it names are fetched; a dummy needs none."""
    weights = files.pop("model.safetensors")
    index = json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}).encode()
    files |= {"model.safetensors.index.json": index, "model-00001-of-00001.safetensors": weights}
    machine.hub.repositories["org/tiny"] = Repository(files | {"consolidated.safetensors": weights + b"x"})
    assert not machine.locate("org/tiny", "dummy").startswith("refused")
    assert "model-00001-of-00001.safetensors" not in machine.hub.ranges
    assert read_files(Path(machine.locate("org/tiny"))) == files


def test_an_index_cannot_name_other_folders(machine: Machine, files: dict[str, bytes]) -> None:
    """An index that names a file outside the repository's top folder is refused."""
    index = json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()
    machine.hub.repositories["org/tiny"] = Repository(files | {"model.safetensors.index.json": index})
    assert "outside the repository's top folder" in machine.locate("org/tiny")


def test_gguf_repositories(machine: Machine, tmp_path: Path) -> None:
    """A GGUF file is chosen by being the only one, by its name, or by its quantization; else the files are listed."""
    data = write_gguf(tmp_path / "a.gguf").read_bytes()
    machine.hub.repositories["org/one"] = Repository({"m-Q8_0.gguf": data, "README.md": b"x"})
    machine.hub.repositories["org/two"] = Repository({"m-Q8_0.gguf": data, "sub/m-Q4_K_M.gguf": data + b"x"})
    assert machine.locate("org/one").endswith("/m-Q8_0.gguf")
    assert machine.locate("org/two:q4_k_m").endswith("/sub/m-Q4_K_M.gguf")
    assert machine.locate("org/two/m-Q8_0.gguf").endswith("/m-Q8_0.gguf")
    assert "several GGUF files fit" in machine.locate("org/two")
    assert "m-Q8_0.gguf, sub/m-Q4_K_M.gguf" in machine.locate("org/two:Q2_K")


def test_a_local_folder_comes_first(machine: Machine, files: dict[str, bytes]) -> None:
    """A folder of the same name in the current folder is served, and the hub is not asked."""
    write_folder(machine.home.parent / "org" / "tiny")
    assert machine.locate("org/tiny") == "org/tiny"
    assert machine.hub.num_reads == 0


def test_a_cut_connection_is_resumed(machine: Machine, files: dict[str, bytes]) -> None:
    """A transfer that is cut goes on from where it was, within one start."""
    files["model.safetensors"] += bytes(BIG)
    machine.hub.repositories["org/tiny"] = Repository(files, cut_at={"model.safetensors": [15 * 2**20]})
    found = Path(machine.locate("org/tiny"))
    assert read_files(found) == files
    first, second = machine.hub.ranges["model.safetensors"]
    assert first == ""
    assert int(second.removeprefix("bytes=").rstrip("-")) >= 10 * 2**20


def test_a_killed_start_is_resumed(machine: Machine, files: dict[str, bytes]) -> None:
    """A second start goes on from what a killed one left."""
    files["model.safetensors"] += os.urandom(BIG)
    repository = Repository(files, cut_at={"model.safetensors": [15 * 2**20] * 9})
    machine.hub.repositories["org/tiny"] = repository
    start = subprocess.Popen(
        machine.command("org/tiny", "auto"), env=machine.environment(), stdout=subprocess.PIPE, text=True
    )
    assert start.stdout is not None
    for line in start.stdout:
        if int(line.split()[1]) >= 10 * 2**20:
            break
    start.send_signal(signal.SIGKILL)
    start.communicate()
    repository.cut_at.clear()
    found = Path(machine.locate("org/tiny"))
    assert read_files(found) == files
    assert int(machine.hub.ranges["model.safetensors"][-1].removeprefix("bytes=").rstrip("-")) >= 10 * 2**20
    assert [path.name for path in (found.parent.parent / "blobs").glob("*.partial")] == []


def test_ctrl_c_ends_a_transfer_at_once(machine: Machine, files: dict[str, bytes]) -> None:
    """Ctrl-C ends a start whose transfer hangs, and does not wait for the network."""
    files["model.safetensors"] += bytes(BIG)
    machine.hub.repositories["org/tiny"] = Repository(files, cut_at={"model.safetensors": [10] * 9})
    start = subprocess.Popen(
        machine.command("org/tiny", "auto"),
        env=machine.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert start.stdout is not None
    start.stdout.readline()
    start.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    start.communicate(timeout=30)
    assert time.monotonic() - began_s < 10


def test_a_wrong_hash_is_refused(machine: Machine, files: dict[str, bytes]) -> None:
    """A file that differs from what the hub announced is refused and not kept, large or small."""
    for path in ("model.safetensors", "config.json"):
        repository = Repository(files, damaged=(path,))
        machine.hub.repositories["org/tiny"] = repository
        assert f"{path} is not what the hub announced" in machine.locate("org/tiny")
        repository.damaged = ()
        assert read_files(Path(machine.locate("org/tiny")))[path] == files[path]
        for file in (machine.home / "hub" / "models--org--tiny" / "blobs").iterdir():
            file.unlink()


def test_tokens(machine: Machine, files: dict[str, bytes]) -> None:
    """Private and gated repositories need HF_TOKEN, and the error says so. Storage on another host gets no token."""
    machine.hub.repositories["org/private"] = Repository(files, token="secret")
    machine.hub.repositories["org/gated"] = Repository(files, gated=True)
    assert machine.locate("org/private").endswith("or it is private: then set HF_TOKEN")
    assert "is gated: ask for access on its page, and set HF_TOKEN" in machine.locate("org/gated")
    assert "refuses the token in HF_TOKEN" in machine.locate("org/private", HF_TOKEN="wrong")
    assert not machine.locate("org/private", HF_TOKEN="secret").startswith("refused")
    assert machine.hub.storage_tokens == {""}


def test_what_does_not_exist(machine: Machine, files: dict[str, bytes]) -> None:
    """A missing repository, a missing revision, and a repository without usable weights are errors that say so."""
    pickled = {"config.json": b"{}", "pytorch_model.bin": b"\x80\x04."}
    machine.hub.repositories |= {"org/tiny": Repository(files), "org/old": Repository(pickled)}
    machine.hub.repositories |= {"org/empty": Repository({"README.md": b"x"})}
    assert "there is no folder and no repository org/absent" in machine.locate("org/absent")
    assert "has no revision v9" in machine.locate("org/tiny@v9")
    assert "only pickled weights, which can run code" in machine.locate("org/old")
    assert "no config.json and no GGUF file" in machine.locate("org/empty")
    assert not (machine.home / "hub" / "models--org--old" / "snapshots" / COMMIT / "pytorch_model.bin").exists()


def test_without_a_network(machine: Machine, files: dict[str, bytes]) -> None:
    """A cached model is served without the hub. A model that is not cached is an error that says what to do."""
    machine.hub.repositories["org/tiny"] = Repository(files)
    nowhere = "http://127.0.0.1:9"
    assert f"cannot reach {nowhere}" in machine.locate("org/tiny", HF_ENDPOINT=nowhere)
    assert "HF_HUB_OFFLINE is set" in machine.locate("org/tiny", HF_HUB_OFFLINE="1")
    found = machine.locate("org/tiny")
    assert machine.locate("org/tiny", HF_ENDPOINT=nowhere) == found
    assert machine.locate("org/tiny", HF_HUB_OFFLINE="1") == found
    machine.hub.is_down = True
    assert machine.locate("org/tiny") == found
    (Path(found) / "model.safetensors").unlink()
    assert "HTTP status 503" in machine.locate("org/tiny")


def test_a_full_disk_is_known_before(machine: Machine, files: dict[str, bytes]) -> None:
    """A model that does not fit the disk is refused before its weights are fetched."""
    repository = Repository(files, announced_bytes={"model.safetensors": 2**60})
    machine.hub.repositories["org/tiny"] = repository
    refused = machine.locate("org/tiny")
    assert "MiB are free; set HF_HOME to a folder with enough space" in refused
    assert "model.safetensors" not in machine.hub.ranges


def test_a_cache_that_cannot_be_written(machine: Machine, files: dict[str, bytes]) -> None:
    """A cache folder that cannot be created is an error of one line."""
    machine.hub.repositories["org/tiny"] = Repository(files)
    machine.home.write_text("", encoding="utf-8")
    assert "cannot store org/tiny in" in machine.locate("org/tiny")
