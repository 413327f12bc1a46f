"""A small experiment for tests."""

from pathlib import Path

from actorserve.profile_files import profile_text
from tests.sim.profiles import PROFILE

EXPERIMENT = """
seed = 1
num_requests = 40
[cluster]
profile = "tiny.toml"
kv_tokens = 120
host_kv_tokens = 400
tokens_per_block = 4
max_context_tokens = 60
max_batch_requests = 4
max_batch_tokens = 50
tpot_target_s = inf
no_instance_timeout_s = 1e6
[arrivals]
process = "gamma"
cv = 2.0
[lengths]
prompt = "uniform:1:30"
output = "uniform:1:30"
[search]
low = 0.05
high = 3.2
step = 2.0
compare_at = "fcfs"
[[search.goals]]
metric = "per_token_s.mean"
limit = 3.0
[[arms]]
name = "fcfs"
cluster.policy = "fcfs"
[[arms]]
name = "srpt"
cluster.policy = "srpt"
"""


def write(folder: Path, text: str = EXPERIMENT) -> Path:
    tiny = profile_text(PROFILE).replace("seconds = [0.5]", "seconds = [0.5, 0.5]").replace("= [1]", "= [1, 2]")
    (folder / "tiny.toml").write_text(tiny.replace("seconds = [0]", "seconds = [0, 0]").replace("= [0]", "= [0, 1]"))
    file = folder / "small.toml"
    file.write_text(text)
    return file
