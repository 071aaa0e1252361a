from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import QUANTKIT, SLOW_KERNELS, assert_one_line_error, quantkit

PROMPT = "hello world the cat"


def test_json_is_one_object_and_equals_the_library(tiny_checkpoint: Path) -> None:
    from quantkit import load_fp8

    options = {"max_new_tokens": 5, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    done = quantkit("generate", tiny_checkpoint, *flags, "--prompt", PROMPT, "--seed=3", "--json")
    result = json.loads(done.stdout)
    model = load_fp8(tiny_checkpoint)
    (expected,) = model.generate_ids([model.encode(PROMPT)], seed=3, **options)
    assert (result["prompt"], result["text"]) == (PROMPT, expected.text)
    assert (result["ids"], result["finish_reason"]) == (expected.ids, expected.finish_reason)
    assert result["stats"]["new_tokens"] == len(result["ids"])
    assert result["stats"]["seed"] == 3


def test_the_stream_equals_the_library_and_the_prompt_may_be_piped(tiny_checkpoint: Path) -> None:
    from quantkit import load_fp8

    options = {"max_new_tokens": 8, "temperature": 0.7, "repetition_penalty": 1.2, "seed": 5}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    done = quantkit("generate", tiny_checkpoint, *flags, stdin=PROMPT + "\n")
    assert done.stdout == load_fp8(tiny_checkpoint).generate(PROMPT, **options) + "\n"
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("draft", ["suffix", "auto"])
def test_drafts_do_not_change_what_is_written(draft: str, tiny_checkpoint: Path) -> None:
    prompt = "one two three one two three one two"
    options = ["--prompt", prompt, "--max-new-tokens", "20", "--temperature", "0"]
    # In 16 bits a pass of more rows may round another way; at a fixed size it cannot.
    options.append("--deterministic")
    plain = quantkit("generate", tiny_checkpoint, *options)
    drafted = quantkit("generate", tiny_checkpoint, *options, "--draft", draft, "--stats")
    assert drafted.stdout == plain.stdout
    assert "drafted" in drafted.stderr


def test_an_unknown_draft_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    done = quantkit("generate", tmp_path, "--prompt", "a", "--draft", "sufix")
    assert_one_line_error(done, 2, "draft 'sufix' is neither", "did you mean 'suffix'")


def test_a_device_map_from_a_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    places = tmp_path / "places.json"
    places.write_text('{"": "cpu", "model.layers.1": "cpu"}')
    options = ["--prompt", PROMPT, "--max-new-tokens", "4", "--temperature", "0"]
    plain = quantkit("generate", tiny_checkpoint, *options)
    mapped = quantkit("generate", tiny_checkpoint, *options, "--device-map", places)
    assert (mapped.returncode, mapped.stdout) == (0, plain.stdout)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory; give auto, balanced, or a JSON file"),
        ("{", "it is not JSON"),
        ("[1]", "must be an object of names of modules and devices"),
        ('{"": true}', "must be an object of names of modules and devices"),
        ('{"": "disk"}', "device_map places '' on 'disk'"),
        ('{"model.layers.0": "cpu"}', "device_map says nothing about model.layers.1"),
    ],
)
def test_a_device_map_that_is_none_is_named(
    content: str | None, message: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    places = tmp_path / "places.json"
    if content is not None:
        places.write_text(content)
    done = quantkit("generate", tiny_checkpoint, "--prompt", "a", "--device-map", places)
    assert_one_line_error(done, 2, message)


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["bench"]])
def test_several_gpus_are_asked_for_where_there_are_none(
    command: list[str], gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    done = quantkit(*command, tmp_path, "--device-map", "balanced")
    message = f"--device-map balanced is for several GPUs, and this machine has {gpus}"
    assert_one_line_error(done, 2, message)


def test_chat_stop_and_stats(tiny_checkpoint: Path) -> None:
    from quantkit import load_fp8

    model = load_fp8(tiny_checkpoint)
    ids = model.encode_chat([{"role": "user", "content": PROMPT}])
    answer = "".join(model.stream(ids, max_new_tokens=8))
    stop = answer.split()[2]
    done = quantkit(
        "generate", tiny_checkpoint, "--chat", "--prompt", PROMPT, "--max-new-tokens", "8",
        "--stop", "never", "--stop", stop, "--stats",
    )  # fmt: skip
    assert done.stdout == answer[: answer.find(stop)] + "\n"
    assert done.stderr.startswith(f"prompt {len(ids)} tokens (")
    assert "first token after" in done.stderr


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--top-p", "1.5"], "top_p must be in (0, 1], got 1.5"),
        (["--temperature", "-1"], "temperature must be a finite number >= 0, got -1.0"),
        (["--repetition-penalty", "0"], "repetition_penalty must be a finite number > 0, got 0.0"),
        (["--max-new-tokens", "-3"], "max_new_tokens must be >= 0, got -3"),
        (["--stop", ""], "stop must hold non-empty strings"),
    ],
)
def test_a_bad_parameter_is_named_before_anything_is_loaded(
    flags: list[str], part: str, tmp_path: Path
) -> None:
    assert_one_line_error(quantkit("generate", tmp_path, "--prompt", "a", *flags), 2, part)


def test_a_folder_that_is_no_checkpoint_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    done = quantkit("generate", tiny_llama, "--prompt", "a")
    assert_one_line_error(done, 2, str(tiny_llama), "quantkit calibrate")
    assert_one_line_error(quantkit("generate", tmp_path, "--prompt", "a"), 2, "config.json")


def test_a_prompt_that_does_not_fit_is_named(tiny_checkpoint: Path) -> None:
    done = quantkit("generate", tiny_checkpoint, "--prompt", "cat " * 80)
    assert_one_line_error(done, 2, "81 tokens", "context is 64")


def test_a_prompt_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    done = quantkit("generate", tmp_path, stdin=b"ab\xff")
    assert_one_line_error(done, 2, "not UTF-8", "0xff", "offset 2")


def test_a_reader_that_leaves_ends_it_quietly(tiny_checkpoint: Path) -> None:
    with subprocess.Popen(
        [*QUANTKIT, "generate", tiny_checkpoint, "--prompt", PROMPT, "--max-new-tokens", "20"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read().replace(SLOW_KERNELS.encode(), b"") == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("redirection", "part"),
    [("> /dev/full", "no space left on device"), (">&-", "standard output is closed")],
)
def test_an_output_that_cannot_be_written_is_an_error(
    redirection: str, part: str, tiny_checkpoint: Path
) -> None:
    command = f'"$@" {redirection}'
    arguments = ["generate", str(tiny_checkpoint), "--prompt", PROMPT, "--max-new-tokens", "2"]
    done = subprocess.run(
        ["sh", "-c", command, "sh", *QUANTKIT, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    errors = done.stderr.replace(SLOW_KERNELS, "")
    assert errors.count("\n") == 1
    assert part in errors.lower()
