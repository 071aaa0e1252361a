from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.cli.main import main
from tests.cli.command import quantkit

WORKLOAD = ["--prompt-tokens", "16", "--new-tokens", "4", "--batch", "1,3", "--repeats", "2"]


def test_json_has_one_measured_row_per_batch_size(tiny_checkpoint: Path) -> None:
    done = quantkit("bench", tiny_checkpoint, *WORKLOAD, "--threads", "1", "--json")
    result = json.loads(done.stdout)
    assert (result["prompt_tokens"], result["new_tokens"], result["threads"]) == (16, 4, 1)
    assert [row["batch"] for row in result["results"]] == [1, 3]
    for row in result["results"]:
        assert all(value > 0 for value in row.values())


def test_the_table_goes_to_stdout_and_progress_to_stderr(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", str(tiny_checkpoint), *WORKLOAD])
    printed = capsys.readouterr()
    assert "decode tokens/s" in printed.out
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
