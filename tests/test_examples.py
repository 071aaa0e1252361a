"""The examples run as they are, here on a tiny model in place of the packaged one."""

from __future__ import annotations

import os
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
    name: str, tiny_long_llama: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, tiny_long_llama],
        cwd=tmp_path,  # they write to demo-out/
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    for part in EXPECTED[name]:
        assert part in done.stdout


@pytest.fixture(scope="module")
def tiny_long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with room for the examples' texts."""
    from transformers import LlamaConfig

    from tests import tiny

    config = LlamaConfig(**{**tiny.LLAMA, "max_position_embeddings": 1024})
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny-long-llama", config)
