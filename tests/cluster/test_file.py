"""The cluster's file: what it says, and every mistake in one line."""

import tomllib
from pathlib import Path

import pytest

from actorserve.cluster.file import ClusterFile, Host, read_cluster_file
from actorserve.errors import SettingsError

EXAMPLE = Path(__file__).resolve().parents[2] / "config" / "cluster.toml"
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
GOOD = """
id = "lab"
coordinators = ["alpha"]
[[host]]
name = "alpha"
address = "10.0.0.1"
gateways = 1
[[host]]
name = "beta"
address = "beta.example.net"
workers = 2
"""


def read(folder: Path, text: str) -> ClusterFile:
    file = folder / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return read_cluster_file(file)


def problems_of(folder: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        read(folder, text)
    assert "\n" not in str(caught.value)
    assert str(folder / "cluster.toml") in str(caught.value)
    return tuple(caught.value.problems)


def test_a_file_says_what_runs_where(tmp_path: Path) -> None:
    """Hosts, their addresses, what runs there, and the ports are read; the rest has defaults."""
    cluster = read(tmp_path, GOOD)
    assert cluster.hosts == (
        Host(name="alpha", address="10.0.0.1", gateways=1),
        Host(name="beta", address="beta.example.net", workers=2),
    )
    assert (cluster.id, cluster.coordinators) == ("lab", ("alpha",))
    assert cluster.coordinator_hosts == cluster.hosts[:1]
    assert (cluster.coordinator_port, cluster.kv_port) == (7480, 7490)


def test_the_example_shows_every_setting() -> None:
    """config/cluster.toml is right, and names every setting, also with its comment signs taken away."""
    assert len(read_cluster_file(EXAMPLE).hosts) == 3
    text = EXAMPLE.read_text(encoding="utf-8")
    uncommented = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
    values = tomllib.loads(uncommented)
    shown = ClusterFile.model_validate(values)
    assert set(values) == {field.alias or name for name, field in ClusterFile.model_fields.items()}
    assert {name for host in shown.hosts for name in host.model_fields_set} == set(Host.model_fields)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"beta"', '"alpha"', "two hosts are called alpha"),
        ("beta.example.net", "10.0.0.1", "hosts alpha and beta have the same address"),
        ("beta.example.net", "beta example", "host beta: address: expected an IP address or a host's name"),
        ("beta.example.net", "10.0.0.256", "host beta: address: expected an IP address"),
        ("beta.example.net", "tcp://10.0.0.2", "host beta: address: expected an IP address"),
        (
            "beta.example.net",
            "0.0.0.0",
            "host beta: address: expected the address at which other hosts reach this host",
        ),
        ("beta.example.net", "127.0.0.1", "host beta has an address of loopback"),
        ('["alpha"]', '["alhpa"]', 'coordinators: host alhpa is unknown; did you mean "alpha"?'),
        ('["alpha"]', "[]", "no coordinator: expected the name of a host"),
        ('["alpha"]', '["alpha", "beta", "alpha"]', "coordinators: host alpha stands there twice"),
        ('["alpha"]', str([f"h{number}" for number in range(11)]), "coordinators: 11 hosts, and at most 10"),
        ("coordinators", "cordinators", 'cordinators: unknown; did you mean "coordinators"?'),
        ("gateways", "gatewyas", 'host alpha: gatewyas: unknown; did you mean "gateways"?'),
        ("workers = 2", 'workers = "2"', "host beta: workers: Input should be a valid integer"),
        ("workers = 2", "", "host beta runs nothing"),
        ("workers = 2", "", "no host has workers"),
        ("workers = 2", "workers = -1", "host beta: workers: Input should be greater"),
        ('"beta"', '"be/ta"', "name: expected at most 64 letters"),
        ('"beta"', '"coordinator"', 'name: "coordinator" is the name of a process'),
        ('name = "beta"', "", "host 2: name: missing"),
        ('id = "lab"', 'id = "lab"\nkv_port = 65535', "host beta has 2 workers: there is no port 65536 for their KV"),
        ('id = "lab"', 'id = "lab"\nkv_port = 7479', "coordinator_port 7480 is among the ports of KV, 7479 to 7480"),
        ('id = "lab"', 'id = "lab"\nconsole_port = 7491', "console_port 7491 is among the ports of KV, 7490 to 7491"),
        ('id = "lab"', 'id = "lab"\nconsole_port = 7480', "coordinator_port and console_port are both 7480"),
        ('id = "lab"', "", "id: missing"),
        ("workers = 2", 'workers = 2\npublic_key = "short"', "host beta: public_key: expected the 40 characters"),
        ('name = "beta"', f'public_key = "{KEY}"\nname = "beta"', ""),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    """A wrong file is refused in one line that names the file, the host and the setting."""
    text = GOOD.replace(old, new, 1) if old != '"beta"' or "alpha" not in new else GOOD.replace(old, new)
    if not problem:
        assert read(tmp_path, text).host("beta").public_key == KEY
        return
    assert any(found.startswith(problem) or problem in found for found in problems_of(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "workers = 2",
            'wokers = 2\nroles = ["prompt", "token"]',
            'host beta: wokers: unknown; did you mean "workers"?',
        ),
        ("coordinators", "cordinators", 'cordinators: unknown; did you mean "coordinators"?'),
        ('name = "beta"', 'nmae = "beta"', 'host beta: nmae: unknown; did you mean "name"?'),
        ("[[host]]", "[[hosts]]", 'hosts: unknown; did you mean "host"?'),
        ("workers = 2", "workers = 2\nwokers = 3", 'host beta: wokers: unknown; did you mean "workers"?'),
    ],
)
def test_a_misspelt_key_is_the_only_mistake(tmp_path: Path, old: str, new: str, problem: str) -> None:
    """Nothing else is said of what seems to be missing because of it."""
    assert problems_of(tmp_path, GOOD.replace(old, new)) == (problem,)


def test_a_misspelt_key_hides_no_other_mistake(tmp_path: Path) -> None:
    """Its value is checked as that of the key that was meant."""
    text = GOOD.replace("workers = 2", "wokers = -1").replace('["alpha"]', '["gamma"]')
    assert problems_of(tmp_path, text) == (
        'host beta: wokers: unknown; did you mean "workers"?',
        "host beta: workers: Input should be greater than or equal to 0",
        "coordinators: host gamma is unknown; known: alpha, beta",
    )


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """A file with several mistakes is refused with all of them, so that one look is enough."""
    text = GOOD.replace('"beta"', '"alpha"').replace("gateways", "gatewyas").replace('["alpha"]', '["gamma"]')
    assert len(problems_of(tmp_path, text)) >= 3


def test_two_hosts_of_one_key_are_refused(tmp_path: Path) -> None:
    """A key belongs to one host, because it proves which host a process runs on."""
    text = GOOD.replace("[[host]]\n", f'[[host]]\npublic_key = "{KEY}"\n')
    assert "hosts alpha and beta have the same public key" in problems_of(tmp_path, text)


@pytest.mark.parametrize("length", range(0, len(GOOD), 7))
def test_a_half_written_file_is_refused_or_says_less(tmp_path: Path, length: int) -> None:
    """A file that was cut off anywhere is refused in one line, or is a whole file of fewer hosts or counts."""
    try:
        cluster = read(tmp_path, GOOD[:length])
    except SettingsError as error:
        said = str(error)
    else:
        said = str(cluster.host("beta").workers)
    assert "\n" not in said


def test_an_unknown_host_names_the_nearest(tmp_path: Path) -> None:
    """A host that the file lacks is refused with the name that was probably meant."""
    with pytest.raises(SettingsError, match='host betta is unknown; did you mean "beta"'):
        read(tmp_path, GOOD).host("betta")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    """A file that does not exist is a SettingsError that names it."""
    with pytest.raises(SettingsError, match=r"absent\.toml"):
        read_cluster_file(tmp_path / "absent.toml")
