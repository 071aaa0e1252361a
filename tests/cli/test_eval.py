from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantkit.cli.main import main
from tests import tiny
from tests.cli.command import assert_one_line_error, quantkit


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(tiny.sentence(60))
    return path


def test_json_is_one_object_and_equals_the_library(
    tiny_checkpoint: Path, tiny_llama: Path, text: Path
) -> None:
    from quantkit.evaluate import evaluate

    flags = ["--reference", tiny_llama, "--data", text, "--window", "32", "--stride", "16"]
    done = quantkit("eval", tiny_checkpoint, *flags, "--max-kl", "10", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    expected = evaluate(
        tiny_checkpoint, str(tiny_llama), data=[str(text)], window=32, stride=16, max_kl=10.0
    )
    wanted = expected.to_json()
    for kv in ("none", "fp8"):
        assert value["measurements"].pop(kv) == pytest.approx(wanted["measurements"].pop(kv))
    assert value.keys() == wanted.keys()
    assert value["mean_kl"] == pytest.approx(wanted["mean_kl"])
    assert (value["count"], value["reference_is_source"]) == (60, True)
    assert value["violations"] == []
    assert done.stderr.splitlines()[-1].startswith("evaluate 3/3")


def test_an_exceeded_limit_is_code_1_with_the_numbers_printed(
    tiny_checkpoint: Path, tiny_llama: Path, text: Path
) -> None:
    flags = ["--reference", tiny_llama, "--data", text, "--kv", "none", "--max-kl", "0"]
    done = quantkit("eval", tiny_checkpoint, *flags)
    assert done.returncode == 1
    assert "mean KL" in done.stdout
    assert "60 of 60 tokens scored" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("failed: mean KL is ")


def test_without_a_reference_there_is_perplexity_alone(
    tiny_checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(tiny_checkpoint), "--data", str(text)])
    printed = capsys.readouterr().out
    assert "perplexity" in printed
    assert "KL" not in printed.replace("KV", "")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--max-kl", "0.1"], "give --reference MODEL"),
        (["--max-ppl-ratio", "1.1"], "--max-ppl-ratio"),
        (["--reference", "absent.gguf"], "absent.gguf does not exist"),
        (["--data", "absent.txt"], "absent.txt does not exist"),
        (["--window", "65"], "--window is 65, the model's context is 64"),
        (["--stride", "0"], "--stride must be between 1 and the window, 64, got 0"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_code_2(
    flags: list[str], part: str, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["eval", str(tiny_checkpoint), *flags])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert part in printed.err


def test_a_broken_checkpoint_gives_no_number(tiny_checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_one_line_error(quantkit("eval", broken), 2, "model.safetensors")
