"""The output head in 8 bits: what is written, loaded, exported and resumed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, LlamaConfig

from quantkit.calibrate import calibrate, load_recipe, pipeline, weight_tiers
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.recipe_file import parse_recipe
from quantkit.checkpoint import open_checkpoint, read_checkpoint
from quantkit.errors import CheckpointError, RecipeError
from quantkit.export import export
from quantkit.numerics import E3M4, amax_to_scale, quantize, tile_amax
from quantkit.runtime.loading import load_engine
from quantkit.shards import ShardReader, read_json, write_json
from tests import tiny
from tests.calibrate import models

CONFIGS: dict[str, Callable[[], Any]] = {
    "tied": lambda: LlamaConfig(**tiny.LLAMA, tie_word_embeddings=True),
    "untied": lambda: LlamaConfig(**tiny.LLAMA, tie_word_embeddings=False),
    # No family of the decoder, and tied: it runs through transformers.
    "cohere": lambda: CohereConfig(**tiny.LLAMA, tie_word_embeddings=True),
}


def run(source: Path, out: Path, data: Path, **options: Any) -> Path:
    options = {"recipe": weights_only(), "samples": 16, "head": "e3m4", "kv": "none"} | options
    calibrate(source, out, data=[str(data)], progress=False, **options)
    return out


def weights_only() -> Recipe:
    return parse_recipe('kv = "none"\n[weights]\ngranularity = "channel"', "here", "here")


@pytest.fixture(scope="module", params=CONFIGS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def source(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(tmp_path_factory.mktemp(kind) / "source", CONFIGS[kind]())


@pytest.fixture(scope="module")
def made(source: Path, calibration_file: Path) -> Path:
    return run(source, source.parent / "made", calibration_file)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    reader = ShardReader(folder)
    return {name: reader.tensor(name) for name in reader.names}


def plain_model(source: Path, made: Path) -> Any:
    """Return the source in transformers with the weights that the checkpoint's codes stand for."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weights = read_checkpoint(made)
    head = torch.nn.Parameter(weights.pop("lm_head.weight"))
    model.load_state_dict({name: w.float() for name, w in weights.items()}, strict=False)
    model.lm_head.weight = head
    return model.eval()


def test_the_head_is_stored_and_the_embedding_stays(kind: str, source: Path, made: Path) -> None:
    checkpoint, before = open_checkpoint(made), tensors_of(source)
    assert checkpoint.tensor("lm_head.weight").dtype == torch.uint8
    assert checkpoint.scheme.weights_of("lm_head").format == "e3m4"
    assert checkpoint.scheme.native
    assert not checkpoint.scheme.ignore
    name = "model.embed_tokens.weight"
    assert torch.equal(checkpoint.tensor(name), before[name])
    (module,) = read_json(made / "quantkit.json")["outside_layers"]
    assert module["name"] == "lm_head"
    assert module["format"] == "e3m4"
    assert module["output_sqnr_db"] >= module["plain_output_sqnr_db"]
    assert ("lm_head.weight" in before) == (kind == "untied")


def test_the_plan_knows_the_bytes(source: Path, made: Path) -> None:
    planned = calibrate(source, recipe=weights_only(), head="e3m4", dry_run=True).plan
    assert planned.target_bytes == read_json(made / "quantkit.json")["target_bytes"]


def test_logits_are_those_of_the_stored_weights(source: Path, made: Path) -> None:
    ids = tiny.random_ids(40)
    expected = plain_model(source, made)(ids.unsqueeze(0)).logits[0]
    engine = load_engine(made, dtype="float32")
    cache = engine.new_cache(1, 64)
    prefill = engine.forward(ids[:30], [0], [30], cache, last_only=False)
    steps = [engine.forward(ids[n : n + 1], [0], [1], cache) for n in range(30, 40)]
    found = torch.cat([prefill, *steps])
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_portable_exports_have_no_quantized_head(kind: str, made: Path, tmp_path: Path) -> None:
    export(made, tmp_path / "out", progress=False)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert "lm_head" not in checkpoint.quantized
    assert "lm_head" in checkpoint.scheme.ignore
    assert ("lm_head.weight" in checkpoint) == (kind == "untied")
    if kind == "untied":
        expected = open_checkpoint(made).weight("lm_head").dequantize(torch.bfloat16)
        assert torch.equal(checkpoint.tensor("lm_head.weight"), expected)


def test_a_run_that_ends_before_the_head_is_resumed(
    source: Path, made: Path, calibration_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise OSError("no space left")

    out = tmp_path / "made"
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "quantize_head", fail)
        with pytest.raises(OSError, match="no space"):
            run(source, out, calibration_file)
    assert not out.exists()
    run(source, out, calibration_file, resume=True)
    for file in made.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    run(source, out, calibration_file, resume=True)  # finished: nothing to do


def test_parts_of_a_tall_head_are_treated_as_the_whole(
    source: Path, made: Path, calibration_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(weight_tiers, "MOST_ROWS", 48)
    out = run(source, tmp_path / "parts", calibration_file)
    one, other = (open_checkpoint(path).weight("lm_head") for path in (made, out))
    assert other.codes.shape == one.codes.shape
    # Each part may choose another treatment; rows treated otherwise are hardly ever equal.
    same = (one.codes == other.codes).all(dim=1)
    assert same.float().mean() > 0.25


def test_without_tiers_the_head_is_rounded_plainly(
    source: Path, calibration_file: Path, tmp_path: Path
) -> None:
    out = run(source, tmp_path / "plain", calibration_file, tiers="none")
    stored = open_checkpoint(out).weight("lm_head")
    weight = head_of(source).float()
    tile = (1, weight.shape[1])
    scale = amax_to_scale(tile_amax(weight, tile), E3M4)
    assert torch.equal(stored.codes, quantize(weight, scale, E3M4, tile))


def head_of(source: Path) -> Tensor:
    tensors = tensors_of(source)
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("head", "word"), [("e4m4", "e4m3"), ("fp8", "known: e4m3, e5m2, e3m4"), ("", "known")]
)
def test_an_unknown_format_is_refused(head: str, word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        weights_only().with_options(head=head)


def test_a_head_for_other_engines_is_refused() -> None:
    with pytest.raises(RecipeError, match="leave out"):
        load_recipe("fp8-dynamic").with_options(head="e3m4")


def test_ignore_and_head_contradict_each_other() -> None:
    text = 'head = "e3m4"\nignore = ["lm_head"]\n[weights]\ngranularity = "channel"'
    with pytest.raises(RecipeError, match="remove one"):
        parse_recipe(text, "here", "here")


def test_options_turn_the_head_on_and_off() -> None:
    text = 'head = "e3m4"\n[weights]\ngranularity = "channel"'
    recipe = parse_recipe(text, "here", "here")
    assert (recipe.head, recipe.ignore) == ("e3m4", ())
    for off in (recipe.with_options(head="none"), recipe.with_options(ignore=["lm_head"])):
        assert (off.head, off.ignore) == (None, ("lm_head",))
    assert off.with_options(head="e5m2") == recipe.with_options(head="e5m2")


def test_damage_is_named(made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    config = read_json(copy / "config.json")
    del config["quantization_config"]["formats"]["lm_head"]
    write_json(copy / "config.json", config)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is U8, expected F8_E4M3"):
        load_engine(copy)
