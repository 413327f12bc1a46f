"""tools/profile fit: profiles from published measurements."""

from pathlib import Path

import pytest

from actorserve.profile_files import load_profile
from tools.profiling.__main__ import EXIT_UNUSABLE, main
from tools.profiling.fit import HARDWARE, MODELS, Row, fit, read_rows

COLUMNS = "model,hardware,prompt_size,batch_size,token_size,peak_power,prompt_time,token_time,tensor_parallel"
SWEEPS = (
    [(prompt, 1, 128) for prompt in (128, 256, 512, 1024, 2048, 4096, 8192)]
    + [(512, batch, 128) for batch in (1, 2, 4, 8, 16)]
    + [(512, 1, output) for output in (256, 1024, 8192)]
)


def prompt_ms(num_tokens: int) -> float:
    return 40.0 + 0.1 * num_tokens


def token_ms(batch: int, num_context_tokens: float) -> float:
    return 30.0 + 0.25 * batch + 2e-4 * num_context_tokens


def line(prompt: int, batch: int, output: int, tensor_parallel: int = 8) -> str:
    decode_ms = token_ms(batch, batch * (prompt + output / 2))
    return (
        f"llama2-70b,a100-80gb,{prompt},{batch},{output},0.5,{prompt_ms(prompt * batch)},{decode_ms},{tensor_parallel}"
    )


def write(file: Path, lines: list[str], columns: str = COLUMNS) -> Path:
    file.write_text("\n".join([columns, *lines]) + "\n", encoding="utf-8")
    return file


def test_a_known_cost_is_found_again(tmp_path: Path) -> None:
    """Measurements that follow the model are fitted exactly, also outside of the sweeps."""
    file = write(tmp_path / "a.csv", [line(*sweep) for sweep in SWEEPS])
    profile = fit(MODELS["llama2-70b"], HARDWARE["a100-80gb"], read_rows(file)["llama2-70b", "a100-80gb"])
    errors = dict(profile.errors)
    assert errors["token_time_max"] < 0.005
    assert errors["token_time_left_out_max"] < 0.005
    assert errors["prompt_time_max"] < 0.1  # of its parts, attention between prompts is derived
    assert errors["prompt_time_median"] < 0.005
    assert profile.decode_s(6, 50_000) == pytest.approx(token_ms(6, 50_000) / 1e3, rel=0.01)
    assert profile.prefill_s(3000) == pytest.approx(prompt_ms(3000) / 1e3, rel=0.05)
    assert profile.kv_bytes_per_token == 327_680


def test_errors_are_of_every_row() -> None:
    """A row with twice the predicted time shows as the largest error."""
    rows = [
        Row(prompt, batch, output, prompt_ms(prompt * batch) / 1e3, token_ms(batch, batch * prompt) / 1e3)
        for prompt, batch, output in SWEEPS * 3
    ]
    odd = rows[0]
    rows[0] = Row(odd.prompt, odd.batch, odd.output, odd.prompt_s, 2 * odd.token_s)
    errors = dict(fit(MODELS["llama2-70b"], HARDWARE["a100-80gb"], rows).errors)
    assert 0.4 < errors["token_time_max"] < 0.6
    assert errors["token_time_median"] < 0.05


def test_profiles_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command writes one file for each model and machine, with the errors above it, and shows them."""
    monkeypatch.setenv("COLUMNS", "200")
    file = write(tmp_path / "a.csv", [line(*sweep) for sweep in SWEEPS] + [line(512, 1, 128, tensor_parallel=2)])
    assert main(["fit", str(file), "--output", str(tmp_path)]) == 0
    written = tmp_path / "llama-2-70b-a100.toml"
    assert load_profile(written).hardware == "8 x NVIDIA A100 80GB"
    assert "Fitted to 15 measurements" in written.read_text(encoding="utf-8")
    assert "llama-2-70b-a100.toml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "columns", "says"),
    [
        (
            [line(512, 1, 128).replace(",512,", ",-3,")],
            COLUMNS,
            "row 2: prompt_size is '-3': expected a number above 0",
        ),
        ([line(512, 1, 128), line(512, 1, 128).replace(",0.5,", ",0.5,x")], COLUMNS, "row 3: prompt_time is 'x91.2'"),
        (["llama2-70b,a100-80gb,512"], COLUMNS, "row 2: tensor_parallel is None: expected a number above 0"),
        ([line(512, 1, 128)], COLUMNS.replace("token_time", "x"), "column token_time is missing"),
        ([line(512, 1, 128).replace("llama2-70b", "gpt")], COLUMNS, "gpt on a100-80gb is not known here"),
        ([line(512, 1, 128)], COLUMNS, "1 prompt lengths: expected 3 or more"),
        ([], COLUMNS, "no row with tensor_parallel 8"),
        (
            [line(512, 1, 128).replace(",512,", ",0.5,")],
            COLUMNS,
            "row 2: prompt_size is '0.5': expected a whole number",
        ),
        (
            [line(512, 1, 128).replace(",512,", ",1e300,")],
            COLUMNS,
            "row 2: prompt_size is '1e300': expected a number ab",
        ),
        ([line(512, 10**9, 128)], COLUMNS, "row 2: batch_size is '1000000000': expected a number above 0, up to 10000"),
        (
            [line(*sweep) for sweep in SWEEPS] + [line(1000 + size, 1, 128) for size in range(300)],
            COLUMNS,
            "the fit gives no valid profile: llama-2-70b-a100.toml: prefill.tokens is a list of",
        ),
        (
            [line(*sweep) for sweep in SWEEPS]
            + [line(8192, 16, 8192).replace(f"{token_ms(16, 16 * 12288)}", "1e-3")] * 9,
            COLUMNS,
            "Llama-2-70B on NVIDIA A100 80GB: token_time of batch_size 16 is ",
        ),
    ],
)
def test_wrong_measurements_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], columns: str, says: str
) -> None:
    """The error names a wrong file with row and column, and no profile is written."""
    file = write(tmp_path / "a.csv", lines, columns)
    assert main(["fit", str(file), "--output", str(tmp_path)]) == EXIT_UNUSABLE
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert list(tmp_path.glob("*.toml")) == []


def test_a_falling_time_gives_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a longer prompt took less time than a shorter one, a line says so, and the profile is written."""
    lines = [line(*sweep) for sweep in SWEEPS]
    lines[6] = lines[6].replace(f"{prompt_ms(8192)}", "100.0")
    file = tmp_path / "a.csv"
    file.write_text("\n".join([COLUMNS, *lines]) + "\n", encoding="utf-8-sig")  # as spreadsheets write it
    assert main(["fit", str(file), "--output", str(tmp_path)]) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("profile: warning: Llama-2-70B on NVIDIA A100 80GB: prompt_time falls by ")
    assert "where prompt_size x batch_size grows from " in told
    assert load_profile(tmp_path / "llama-2-70b-a100.toml").prefill.xs


def test_no_folder_to_write_to_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in place of the folder is an error that names it."""
    file = write(tmp_path / "a.csv", [line(*sweep) for sweep in SWEEPS])
    assert main(["fit", str(file), "--output", str(file)]) == EXIT_UNUSABLE
    assert "cannot write " in capsys.readouterr().err


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the file."""
    assert main(["fit", str(tmp_path / "none.csv")]) == EXIT_UNUSABLE
    assert "cannot read measurements from" in capsys.readouterr().err
