from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from quantkit.cli.main import main
from tests import checkpoints, tiny
from tests.cli.command import QUANTKIT, assert_one_line_error, quantkit, running_quantkit
from tests.evaluate.task_files import write_tasks


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(tiny.sentence(60))
    return path


def test_b45_json_is_one_object_and_equals_the_library(
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


def test_b45_an_exceeded_limit_is_code_1_with_the_numbers_printed(
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


def test_a_page_is_written_and_named_last(
    tiny_checkpoint: Path,
    tiny_llama: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "new" / "report.html"
    flags = ["--reference", str(tiny_llama), "--data", str(text), "-o", str(page)]
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(tiny_checkpoint), *flags])
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    assert page.read_text().count("<svg ") == 2
    with pytest.raises(SystemExit, match="0"):
        main(["eval", str(tiny_checkpoint), *flags, "--json"])
    value = json.loads(capsys.readouterr().out)
    assert value["report"] == str(page)
    assert sum(value["distributions"]["fp8"]["counts"]) == 60


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--max-kl", "0.1"], "give --reference MODEL"),
        (["-o", "report.pdf"], "--output is report.pdf, expected a name that ends in .html"),
        (["--max-ppl-ratio", "1.1"], "--max-ppl-ratio"),
        (["--reference", "absent.gguf"], "absent.gguf does not exist"),
        (["--data", "absent.txt"], "absent.txt does not exist"),
        (["--window", "65"], "--window is 65, the model's context is 64"),
        (["--stride", "0"], "--stride must be between 1 and the window, 64, got 0"),
        (["--max-drop", "0.1"], "--max-drop: compares with the original"),
        (["--max-drop", "0.1", "--reference", "x"], "--max-drop: is about --tasks"),
        (["--limit", "3"], "--limit: is about --tasks"),
        (["--endpoint", "http://x/v1"], "--endpoint: is about --tasks"),
        (["--max-kl", "much"], "--max-kl"),
        (["--maxkl", "1"], "--maxkl"),
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


def test_b45_a_broken_checkpoint_gives_no_number(tiny_checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_one_line_error(quantkit("eval", broken), 2, "model.safetensors")


def test_b45_a_damaged_checkpoint_gives_no_number(tiny_checkpoint: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint, damaged)
    norm = checkpoints.tensor(damaged, "model.norm.weight")
    norm[0] = torch.nan
    checkpoints.add(damaged, "model.norm.weight", norm)
    done = quantkit("eval", damaged, "--max-tokens", "50", "--kv", "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert "not finite (NaN or infinity), first where token 0 of text 0" in done.stderr


def test_b45_a_terminal_that_is_none_gets_plain_lines(tiny_checkpoint: Path, text: Path) -> None:
    done = quantkit("eval", tiny_checkpoint, "--data", text, "--window", "8")
    assert done.returncode == 0
    assert not set("\r\x1b\u2588") & set(done.stderr)
    assert all(" s left" in line for line in done.stderr.splitlines())


def test_b45_a_reader_that_leaves_is_no_error_message(tiny_checkpoint: Path, text: Path) -> None:
    command = [*QUANTKIT, "eval", str(tiny_checkpoint), "--data", str(text), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(60) == 141
    assert "Error" not in errors
    assert "Broken" not in errors


def test_b45_interrupting_is_one_line_and_code_130(tiny_checkpoint: Path, text: Path) -> None:
    text = text.with_name("long.txt")
    text.write_text(tiny.sentence(5_000))
    flags = ["--data", text, "--window", "4", "--stride", "1"]
    with running_quantkit("eval", tiny_checkpoint, *flags) as process:
        assert process.stderr is not None
        started = any(line.startswith("evaluate") for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGINT)
        printed, rest = process.communicate(timeout=60)
    assert started
    assert (process.returncode, printed) == (130, "")
    assert rest.splitlines()[-1] == "interrupted"


class TestTasks:
    """--tasks."""

    @pytest.fixture(autouse=True)
    def _needs_the_harness(self) -> None:
        pytest.importorskip("lm_eval", reason="needs the extra eval")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write_tasks(tmp_path / "tasks")

    def test_json_is_one_object_and_equals_the_library(
        self, tiny_checkpoint: Path, tiny_llama: Path, folder: Path
    ) -> None:
        from quantkit.evaluate import evaluate_tasks

        flags = ["--reference", tiny_llama, "--include-path", folder, "--num-fewshot", "1"]
        names = ["--tasks", "words_mc,words_gen", "--tasks", "words_text", "--limit", "6"]
        done = quantkit("eval", tiny_checkpoint, *flags, *names, "--json")
        assert done.returncode == 0, done.stderr
        value = json.loads(done.stdout)
        expected = evaluate_tasks(
            tiny_checkpoint,
            tiny_llama,
            tasks=["words_mc", "words_gen", "words_text"],
            include_path=folder,
            num_fewshot=1,
            limit=6,
            progress=False,
        )
        wanted = json.loads(json.dumps(expected.to_json()))
        for found, one in zip(value["tasks"].pop("scores"), wanted.pop("scores"), strict=True):
            assert found.pop("change") == pytest.approx(one.pop("change"), abs=1e-6)
            assert found == {
                name: pytest.approx(value) if isinstance(value, float) else value
                for name, value in one.items()
            }
        assert value["tasks"] == wanted
        assert value["checkpoint"] == str(tiny_checkpoint)
        assert value["violations"] == []
        assert not set("\r\x1b\u2588") & set(done.stderr)
        assert "log-likelihoods 1/" in done.stderr

    def run(self, *arguments: str | Path) -> str | int | None:
        """Run in this process, which has read the harness already."""
        with pytest.raises(SystemExit) as caught:
            main(["eval", *map(str, arguments)])
        return caught.value.code

    def test_a_score_that_fell_too_far_is_code_1(
        self,
        tiny_checkpoint: Path,
        tiny_llama: Path,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        flags = ["--reference", tiny_llama, "--include-path", folder, "--tasks", "words_mc"]
        assert self.run(tiny_checkpoint, *flags, "--max-drop", "-1") == 1
        printed = capsys.readouterr()
        assert "questions lost, won" in printed.out
        assert "quantized: quantkit, float32, FP8 KV" in printed.out
        assert printed.err.splitlines()[-1].startswith("failed: acc_norm of words_mc is ")

    def test_text_is_measured_too_where_it_is_asked_for(
        self,
        tiny_checkpoint: Path,
        tiny_llama: Path,
        folder: Path,
        text: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        flags = ["--reference", tiny_llama, "--include-path", folder, "--tasks", "words_mc"]
        assert self.run(tiny_checkpoint, *flags, "--json") == 0
        assert "perplexity" not in json.loads(capsys.readouterr().out)
        assert self.run(tiny_checkpoint, *flags, "--data", text, "--max-kl", "0", "--json") == 1
        value = json.loads(capsys.readouterr().out)
        assert value["perplexity"] > 1
        assert value["tasks"]["scores"][0]["task"] == "words_mc"
        assert len(value["violations"]) == 2

    @pytest.mark.parametrize(
        ("flags", "part"),
        [
            (["--reference", "absent.gguf"], "absent.gguf does not exist"),
            (["--limit", "0"], "--limit must be at least 1"),
            (["--tasks", ","], "names no task"),
            (["--model", "x"], "--model names a served model"),
            (["--endpoint", "http://127.0.0.1:9/v1"], "nothing answers at http://127.0.0.1:9/v1"),
        ],
    )
    def test_what_cannot_be_measured_is_one_line_and_code_2(
        self,
        flags: list[str],
        part: str,
        tiny_checkpoint: Path,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        given = ["--tasks", "words_mc", "--include-path", str(folder), *flags]
        with pytest.raises(SystemExit, match="2"):
            main(["eval", str(tiny_checkpoint), *given])
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert part in printed.err

    def test_a_broken_checkpoint_gives_no_score(
        self, tiny_checkpoint: Path, folder: Path, tmp_path: Path
    ) -> None:
        broken = tmp_path / "broken"
        shutil.copytree(tiny_checkpoint, broken)
        (broken / "model.safetensors").unlink()
        flags = ["--tasks", "words_mc", "--include-path", folder]
        assert_one_line_error(quantkit("eval", broken, *flags), 2, "model.safetensors")
