"""Every causal language model of transformers calibrates, exports and generates, or is refused.

What is refused is refused by name, with the reason. Random models of two layers; those that people
bring most often in every run, all others in the slow one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quantkit import load_fp8
from quantkit.calibrate import calibrate
from quantkit.errors import CalibrationError, QuantKitError
from quantkit.export import export
from quantkit.runtime.shapes import parse_config
from quantkit.shards import read_json
from tests import tiny
from tests.calibrate import models
from tests.causal_models import MODEL_TYPES, tiny_config

EVERYDAY = (
    "bamba", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5",
    "exaone", "exaone4", "falcon", "falcon_h1", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granitemoe", "jamba", "lfm2",
    "llama4_text", "mamba", "mamba2", "minimax", "mpt", "nemotron", "nemotron_h", "olmoe", "opt",
    "phi", "phimoe", "qwen3_next", "rwkv", "stablelm",
)  # fmt: skip
NO_LINEARS = r"no linear module in its decoder layers that is stored as one \(Conv1D"
UNEQUAL = r"has no list of equal decoder layers"
CONVERTED = r"of tensors that the checkpoint holds otherwise, as transformers does on loading"
UNTIED = r"ties lm_head.weight to \S+ \(tie_word_embeddings\) but stores different values"
REFUSED = {
    "bigbird_pegasus": UNTIED,  # transformers itself does not tie what their configs say
    "cpmant": UNTIED,
    "gemma3n_text": NO_LINEARS,
    "gpt-sw3": NO_LINEARS,
    "gpt2": NO_LINEARS,
    "hrm_text": r"HrmTextForCausalLM has 2 decoder layers and runs 12 times through one",
    "jamba": UNEQUAL,
    "lara_mini": CONVERTED,
    "minimax": r"MiniMaxForCausalLM cannot be run one decoder layer at a time",
    "nemotron_h": CONVERTED,
    "olmo_hybrid": UNEQUAL,
    "openai-gpt": NO_LINEARS,
    "prophetnet": r"has no tensor prophetnet\.decoder\.word_embeddings\.weight",
    "rembert": r"no output head is stored",  # nor does transformers find it where it is
    "rwkv": r"type 'rwkv' cannot be quantized: it rescales weights in place",
    "sarvam_moe": CONVERTED,
    "xlm": r"XLMWithLMHeadModel changes hidden states between its decoder layers",
}
"""Models that are refused, and why."""
WITHOUT_KEYS = ("bamba", "falcon_mamba", "mamba", "mamba2")
"""Models with layers that cache no keys, for which KV scales are refused."""
NOT_COMPARABLE = {"youtu": "transformers clears the padding token's row of what it has loaded"}
MAX_PARAMETERS = 20_000_000
PROMPT = tiny.random_ids(9)
FLOAT32 = 1e-5  # of the largest logit: the same kernels, and sums over experts in another order


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(kind: str, folder: Path) -> Path:
    """Save a random model; skips what transformers cannot build in this size, or run itself."""
    try:
        config = tiny_config(kind)
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config)
        if sum(parameter.numel() for parameter in empty.parameters()) > MAX_PARAMETERS:
            pytest.skip("the common sizes make no small model of it")
        models.save(folder, config)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.inference_mode():
            model(PROMPT[None])
    except Exception as error:
        if kind in EVERYDAY:
            raise
        pytest.skip(f"transformers alone fails: {type(error).__name__}")
    return folder


def run(kind: str, source: Path, folder: Path) -> None:
    """Calibrate, export, load and generate; compare with transformers' float32 model."""
    options: dict[str, Any] = {
        "data": [str(tiny.write_jsonl(folder / "rows.jsonl", tiny.calibration_rows()))],
        "samples": 4, "seq_len": 32, "tiers": "none", "budget": 0, "progress": False,
    }  # fmt: skip
    out = folder / "fp8"
    if kind in WITHOUT_KEYS:
        with pytest.raises(CalibrationError, match=r"cached no keys or values.*--kv none"):
            calibrate(source, out, **options)
        options["kv"] = "none"
    calibrate(source, out, **options)
    export(out, folder / "hub", progress=False)
    model = load_fp8(out, dtype="float32", kv="none")
    (found,) = model.generate_ids([PROMPT.tolist()], max_new_tokens=6, ignore_eos=True)
    ids = torch.tensor([[*PROMPT.tolist(), *found.ids]])
    with torch.inference_mode():
        expected = models.dequantized(out, folder / "plain")(ids).logits
    close = FLOAT32 * float(expected.abs().max())
    torch.testing.assert_close(model.logits(ids), expected, rtol=0, atol=close)
    # Cached steps choose what one pass over all of it does.
    choices = expected[0, len(PROMPT) - 1 : -1]
    chosen = choices.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    torch.testing.assert_close(chosen, choices.amax(dim=1), rtol=0, atol=10 * close)


@pytest.mark.parametrize(
    "kind",
    [kind if kind in EVERYDAY else pytest.param(kind, marks=pytest.mark.slow)
     for kind in MODEL_TYPES],
)  # fmt: skip
def test_it_works_through_transformers_or_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    if kind in NOT_COMPARABLE:
        pytest.skip(NOT_COMPARABLE[kind])
    source = build(kind, tmp_path / "source")
    if kind not in REFUSED:
        run(kind, source, tmp_path)
        return
    with pytest.raises(QuantKitError) as refusal:
        run(kind, source, tmp_path)
    assert re.search(REFUSED[kind], str(refusal.value))


def test_infinities_of_a_config_are_numbers(tmp_path: Path) -> None:
    """transformers writes them as objects, JSON having no infinity."""
    config = tiny_config("mamba2")
    config.save_pretrained(tmp_path)
    stored = read_json(tmp_path / "config.json")
    assert stored["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert list(parse_config(stored).time_step_limit) == [0.0, float("inf")]
