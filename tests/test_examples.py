"""The examples run as they are, here on a tiny model in place of the packaged one."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
EXPECTED = {
    "compare_recipes.py": ("fp8-accurate", "mean KL"),
    "custom_recipe.py": ("recipe my-recipe", "down_proj"),
    "gemma3.py": ("recipe fp8-dynamic", "same top-1"),
    "own_observer.py": ("mean of maxima", "least error"),
    "other_engines.py": ("vllm: ok", "transformers continues with"),
    "quickstart.py": ("recipe fp8-dynamic", "tokens"),
    "speculative.py": ("draft=none", "draft=suffix"),
}


def test_every_example_is_run() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - {"smollm2.py"}
    assert scripts == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_it_promises(
    name: str,
    tiny_long_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, which has paid for torch and transformers."""
    monkeypatch.chdir(tmp_path)  # they write to demo-out/
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), str(tiny_long_llama)])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for part in EXPECTED[name]:
        assert part in printed


def test_one_of_them_runs_in_a_process_of_its_own(tiny_long_llama: Path, tmp_path: Path) -> None:
    line = [sys.executable, EXAMPLES / "quickstart.py", tiny_long_llama]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "recipe fp8-dynamic" in done.stdout


@pytest.fixture(scope="module")
def tiny_long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with room for the examples' texts."""
    from transformers import LlamaConfig

    from tests import tiny

    config = LlamaConfig(**{**tiny.LLAMA, "max_position_embeddings": 1024})
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny-long-llama", config)
