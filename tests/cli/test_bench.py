from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.bench.prompts import Prompt
from quantkit.cli.main import main
from tests.cli.command import quantkit

WORKLOAD = ["--prompt-tokens", "16", "--new-tokens", "4", "--batch", "1,3", "--repeats", "2"]


def test_json_has_one_measured_row_per_batch_size(tiny_checkpoint: Path) -> None:
    done = quantkit("bench", tiny_checkpoint, *WORKLOAD, "--threads", "1", "--json")
    result = json.loads(done.stdout)
    assert (result["new_tokens"], result["threads"]) == (4, 1)
    assert result["peak_memory_bytes"] > 1e6
    assert [row["batch"] for row in result["results"]] == [1, 3]
    for row in result["results"]:
        assert row.pop("runner") == "quantkit"
        assert all(value > 0 for value in row.values())


def test_every_prompt_length_meets_every_batch_size_and_the_baseline(
    tiny_checkpoint: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--baseline", "transformers", "--reference", str(tiny_llama), "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(tiny_checkpoint), *WORKLOAD, "--prompt-tokens", "8,16", *options])
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [(row["runner"], row["prompt_tokens"], row["batch"]) for row in rows] == [
        (runner, length, batch)
        for length in (8, 16)
        for batch in (1, 3)
        for runner in ("quantkit", "transformers bf16")
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--baseline", "transfomers"], "did you mean 'transformers'"),
        (["--baseline", "transformers"], "goes together with --reference MODEL"),
        (["--prompt-tokens", "0"], "expected positive integers"),
        (["--draft", "suffix", "--kernels"], "a measurement of its own"),
        (["--draft", "suffix", "--temperature", "0,warm"], "expected numbers >= 0"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "no-such-folder", *options])
    assert message in " ".join(capsys.readouterr().err.split())


def test_kernels_are_shown_beside_the_machine(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("machine", "kernels"):
        monkeypatch.setattr(f"quantkit.bench.{module}.READ_BYTES", 1 << 20)
    monkeypatch.setattr("quantkit.bench.kernels.COLD_BYTES", 1 << 16)
    monkeypatch.setattr("quantkit.bench.machine.MATRIX_SIZE", 64)
    arguments = ["bench", str(tiny_checkpoint), "--prompt-tokens", "16", "--new-tokens", "4"]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--kernels", "--repeats", "1", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["machine"]["read_gb_per_second"] > 0
    assert len(result["kernels"]) == 10
    for row in result["kernels"]:
        assert (row["gb_per_second"] is None) != (row["gflops"] is None)
        assert row["of_limit"] > 0
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--kernels", "--repeats", "1"])
    assert "of limit" in capsys.readouterr().out


def test_the_table_goes_to_stdout_and_progress_to_stderr(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(tiny_checkpoint), *WORKLOAD])
    printed = capsys.readouterr()
    assert "decode tok/s" in printed.out
    assert printed.err.splitlines() == [
        "batch 1: 2 runs of 16 + 4 tokens",
        "batch 3: 2 runs of 16 + 4 tokens",
    ]


def test_without_decoding_there_is_no_decode_speed(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(tiny_checkpoint), *WORKLOAD, "--new-tokens", "1", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["results"][0]["decode_tokens_per_second"] is None


def test_a_workload_beyond_the_context_is_an_error(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", str(tiny_checkpoint), "--prompt-tokens", "60", "--new-tokens", "5"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "error: --prompt-tokens and --new-tokens add up to 65, the model's context is 64; "
        "lower one of them\n"
    )


@pytest.fixture
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = (
        Prompt("again", "copy", "one two three one two three one two three"),
        Prompt("story", "prose", "the cat and the river"),
    )
    monkeypatch.setattr("quantkit.bench.prompts.PROMPTS", prompts)


@pytest.mark.usefixtures("_short_prompts")
def test_drafting_is_measured_in_turn_with_plain_decoding(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", str(tiny_checkpoint), "--draft", "suffix", "--new-tokens", "12"]
    arguments += ["--repeats", "2", "--batch", "1,3"]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    rows = report["results"]
    assert [(row["prompt"], row["batch"], row["temperature"]) for row in rows] == [
        (name, batch, temperature)
        for batch, names in ((1, ("again", "story")), (3, ("copy", "prose")))
        for temperature in (0, 0.7)
        for name in names
    ]
    for row in rows:
        assert 0 <= row["identical"] <= row["batch"]
        assert row["plain_tokens_per_second"] > 0
        assert row["draft_tokens_per_second"] > 0
        assert row["drafts"]["num_steps"] > 0
    assert [summary["kind"] for summary in report["summary"]] == ["copy", "prose"] * 4
    assert all(s["worst_speed_up"] <= s["speed_up"] for s in report["summary"])
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert "speed-ups by kind" in capsys.readouterr().out
