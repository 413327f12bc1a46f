"""Profiles as TOML files: written, read back, and read strictly."""

from dataclasses import replace
from pathlib import Path

import pytest

from actorserve.errors import ProfileError
from actorserve.profile_files import (
    MeasuredShape,
    load_profile,
    parse_profile,
    profile_text,
    require_profile_of,
    require_steady,
    save_profile,
)
from tests.core.harness.profiles import PROFILE

SHIPPED = sorted((Path(__file__).resolve().parent.parent / "config" / "profiles").glob("*.toml"))
WHOLE = replace(
    PROFILE,
    weights_s=0.003,
    decode_mixed_s=1e-5,
    pause_s=0.001,
    pause_row_s=2e-6,
    dtype="int8",
    threads=2,
    source='a "paper"',
    errors=(("a", 0.25), ("b", 0.0)),
)
TEXT = profile_text(WHOLE)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """A saved profile is equal to the loaded one; its heading is a comment, and no other file is left behind."""
    file = tmp_path / "folder" / "mine.toml"
    save_profile(WHOLE, file, "two\n\nlines")
    assert load_profile(file) == WHOLE
    assert file.read_text(encoding="utf-8").startswith("# two\n#\n# lines\n\nname = ")
    assert [path.name for path in file.parent.iterdir()] == ["mine.toml"]


def test_a_profile_without_source_and_errors_is_whole() -> None:
    """The source and the errors of a fit may be missing."""
    assert parse_profile(profile_text(replace(WHOLE, source="", errors=())), "x").errors == ()


def test_a_file_of_the_older_format_is_whole() -> None:
    """Values that older files do not have are 0."""
    kept = [line for line in TEXT.splitlines() if not line.startswith(("weights_s", "mixed_s", "row_s", "[pause]"))]
    kept.remove("seconds = 0.001")
    older = parse_profile("\n".join(kept), "x")
    assert older == replace(WHOLE, weights_s=0.0, decode_mixed_s=0.0, pause_s=0.0, pause_row_s=0.0)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "a GPU\'s shape"\n', "", "name is missing: expected a text"),
        ('model = "none"', "model = 3", "model is 3: expected a text"),
        ("threads = 2", "threads = 2.5", "threads is 2.5: expected a whole number from 0"),
        ("threads = 2", "threads = true", "threads is True: expected a whole number"),
        (
            "kv_bytes_per_token = 100",
            "kv_bytes_per_token = 0",
            "kv_bytes_per_token is 0: expected a whole number from 1",
        ),
        ("tokens = [1, 100, 1100]\n", "", "prefill.tokens is missing: expected a list of 2 to"),
        ("tokens = [1, 100, 1100]", "tokens = [1]", "prefill.tokens is a list of 1: expected a list of 2 to"),
        ("tokens = [1, 100, 1100]", "tokens = 7", "prefill.tokens is 7: expected a list"),
        (
            "tokens = [1, 100, 1100]",
            "tokens = [1, 100]",
            "prefill.seconds is 3 numbers: expected 2, one per entry of tokens",
        ),
        ("tokens = [1, 100, 1100]", "tokens = [1, 100, 100]", "prefill.tokens[2] is 100.0: expected more than 100"),
        ("tokens = [1, 100, 1100]", "tokens = [0, 100, 1100]", "prefill.tokens[0] is 0: expected a number from 1"),
        (
            "tokens = [1, 100, 1100]",
            "tokens = [1, 100, 1e12]",
            "prefill.tokens[2] is 1000000000000.0: expected a number",
        ),
        ("tokens = [1, 100, 1100]", 'tokens = [1, 100, "x"]', "prefill.tokens[2] is 'x': expected a number"),
        ("seconds = [0.01, 0.01, 0.11]", "seconds = [0, 0.01, 0.11]", "prefill.seconds[0] is 0: expected more than 0"),
        (
            "seconds = [0.01, 0.02]",
            "seconds = [0, 0.02]",
            "decode.seconds[0] is 0: expected more than 0: the shortest iter",
        ),
        ("seconds = [0.01, 0.02]", "seconds = [0.02, 0.01]", "decode.seconds[1] is 0.01: expected at least 0.02"),
        ("seconds = [0.01, 0.02]", "seconds = [-1.0, 0.02]", "decode.seconds[0] is -1.0: expected a number from 0"),
        (
            "seconds = [0.01, 0.02]",
            "seconds = [0.01, 1e9]",
            "decode.seconds[1] is 1000000000.0: expected a number from 0 to",
        ),
        ("seconds = [0.01, 0.02]", "seconds = [nan, 0.02]", "decode.seconds[0] is nan: expected a number"),
        ("seconds = [0.01, 0.02]", "seconds = [0.01, inf]", "decode.seconds[1] is inf: expected a number"),
        ("context_s = 1e-08", "context_s = -1", "prefill.context_s is -1: expected a number from 0"),
        ("latency_s = 0.001\n", "", "swap.latency_s is missing: expected a number from 0"),
        ("bytes_per_s = 1000000", "bytes_per_s = 0", "swap.bytes_per_s is 0: expected a number from 1000"),
        ("threads = 2", "threads = 2\nthraeds = 2", "thraeds is unknown: expected"),
        (
            "context_s = 1e-08",
            "context_s = 1e-08\nfoo = 1",
            "prefill.foo is unknown: expected context_s, seconds, tokens, weights_s",
        ),
        ("weights_s = 0.003", "weights_s = 0.02", "prefill.weights_s is 0.02: expected a number from 0 to 0.01"),
        ("mixed_s = 1e-05", "mixed_s = -1", "decode.mixed_s is -1: expected a number from 0"),
        ("row_s = 2e-06\n", "", "pause.row_s is missing: expected a number from 0"),
        ("[transfer]", "[transfers]", "transfer is missing: expected a table"),
        ("threads = 2", "threads = 2\nswap = 1", "not TOML"),
        ("threads = 2", "threads = ", "not TOML"),
        ("threads = 2", f"threads = {'9' * 5000}", "not TOML"),
        ("threads = 2", f"threads = {'[' * 20_000}", "not TOML"),
        ("context_s = 1e-08", f"context_s = {'9' * 400}", "prefill.context_s is 999"),
        ("context_s = 1e-08", "context_s = nan", "prefill.context_s is nan: expected a number from 0"),
        ("a = 0.25", "a = -1", "errors.a is -1: expected a number from 0"),
    ],
)
def test_a_wrong_profile_is_one_line(old: str, new: str, says: str) -> None:
    """A missing, wrong or unknown value gives an error with its key and the expected value."""
    assert old in TEXT
    with pytest.raises(ProfileError) as caught:
        parse_profile(TEXT.replace(old, new, 1), "mine.toml")
    assert str(caught.value).startswith(f"mine.toml: {says}")
    assert "\n" not in str(caught.value)


def test_a_profile_that_was_cut_off_is_one_line() -> None:
    """A file that ends too early, after any line or within one, is told by the key that is missing or broken."""
    whole = TEXT[: TEXT.index("[pause]")].rstrip()  # what follows may be missing
    ends = [place for place, letter in enumerate(whole) if letter == "\n"]
    for end in [0, *ends, *(end - 2 for end in ends)]:
        with pytest.raises(ProfileError) as caught:
            parse_profile(whole[:end], "mine.toml")
        assert str(caught.value).startswith("mine.toml: ")
        assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """The error for a file that is missing or not text names it."""
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "none.toml", tmp_path, binary):
        with pytest.raises(ProfileError, match=f"cannot read a profile from {file}"):
            load_profile(file)


def test_a_profile_of_another_model_is_one_line() -> None:
    """The profile's model and KV size must be those of the served model."""
    require_profile_of(WHOLE, Path("mine.toml"), "none", 100)
    with pytest.raises(ProfileError, match=r"^mine\.toml: model is 'none': expected 'other', the served model$"):
        require_profile_of(WHOLE, Path("mine.toml"), "other", 100)
    with pytest.raises(ProfileError, match=r"^mine\.toml: kv_bytes_per_token is 100: expected 200, "):
        require_profile_of(WHOLE, Path("mine.toml"), "none", 200)


def test_measured_iterations_stand_in_the_file() -> None:
    """They do not change the profile, and a damaged table is one line with the key."""
    shapes = [MeasuredShape(128, 0, 0, 0, 0.02, 0.01), MeasuredShape(128, 64, 4, 32, 0.03, 0.02)]
    text = profile_text(WHOLE, shapes)
    assert "\nbefore = [0, 64]\n" in text
    assert "\nseconds = [0.02, 0.03]\nspread = [0.01, 0.02]\n" in text
    assert parse_profile(text, "x") == WHOLE
    for old, new, says in (
        ("before = [0, 64]", "before = [0]", "measured.before is 1 numbers: expected 2, one for each iteration"),
        ("before = [0, 64]", "", "measured.before is missing"),
        ("before = [0, 64]", "before = [0, -64]", r"measured.before\[1\] is -64"),
        ("spread =", "spreads =", "measured.spread is missing"),
    ):
        with pytest.raises(ProfileError, match=says):
            parse_profile(text.replace(old, new), "x")


def test_a_profile_of_a_machine_that_drifted_is_refused() -> None:
    """The error names the key; a profile that tells nothing of it is accepted, because published ones do not."""
    for errors in ((), (("drift", 0.1),)):
        require_steady(replace(WHOLE, errors=errors), Path("mine.toml"))
    with pytest.raises(ProfileError, match=r"^mine.toml: errors.drift is 0.35: expected at most 0.1, because"):
        require_steady(replace(WHOLE, errors=(("drift", 0.35),)), Path("mine.toml"))


@pytest.mark.parametrize("file", SHIPPED, ids=[file.stem for file in SHIPPED])
def test_shipped_profiles_can_be_read(file: Path) -> None:
    """Every shipped profile is complete, has a source, and takes longer for more work."""
    profile = load_profile(file)
    assert profile.source
    assert 0.0 < profile.min_iteration_s < 0.1
    assert profile.prefill_s(2048) > profile.prefill_s(512) > 0.0
    assert profile.decode_s(64, 64_000) > profile.decode_s(1, 1000)


def test_all_published_profiles_are_shipped() -> None:
    """There is a profile for every published model and hardware, with the KV size of grouped heads."""
    found = {file.stem: load_profile(file) for file in SHIPPED}
    machines = ("a100", "h100", "h100-capped")
    fitted = [f"{model}-{machine}" for model in ("bloom-176b", "llama-2-70b") for machine in machines]
    assert sorted(found) == sorted([*fitted, "llama-7b-a100", "opt-13b-a100"])
    assert {found[name].kv_bytes_per_token for name in fitted[:3]} == {4 * 70 * 14336}
    assert {found[name].kv_bytes_per_token for name in fitted[3:]} == {320 * 1024}
    for name in fitted:
        assert dict(found[name].errors)["token_time_median"] < 0.02
        assert dict(found[name].errors)["prompt_time_median"] < 0.03


def test_stated_figures_are_kept() -> None:
    """The profiles have the times of iterations that the papers state."""
    opt, llama = (
        load_profile(file) for name in ("opt-13b", "llama-7b") for file in SHIPPED if file.stem == f"{name}-a100"
    )
    assert opt.min_iteration_s == 0.03
    assert opt.kv_bytes_per_token == 4 * 40 * 5120
    assert llama.kv_bytes_per_token == 2**19
    steps_ms = [1e3 * llama.decode_s(8, num_tokens) for num_tokens in (64, 256, 512, 1024)]
    assert steps_ms == pytest.approx([8, 12, 17, 21])
