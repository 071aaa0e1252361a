"""Names beyond the plain decoder: experts, routers, vision, layers that share a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.lint import lint
from tests.lint.folders import BASES, LAYERS, Draft, dynamic, quantized

ROUTER = "model.layers.{}.mlp.gate"
VISION = "model.visual.blocks.0.mlp.fc1.weight"


def rules(draft: Draft, folder: Path, engines: tuple[str, ...] | None = None) -> set[str]:
    report = lint(draft.save(folder)) if engines is None else lint(draft.save(folder), engines)
    return {finding.rule for finding in report.findings}


def mixture() -> Draft:
    """Return the model with four experts and a router in place of each MLP."""
    draft, coded = dynamic(), quantized(lambda rows, columns: (rows, 1))
    for name in [name for name in draft.tensors if ".mlp." in name]:
        del draft.tensors[name]
        for expert in range(4):
            new = name.replace(".mlp.", f".mlp.experts.{expert}.")
            draft.tensors[new] = coded[name].clone()
    for layer in range(LAYERS):
        draft.tensors[f"{ROUTER.format(layer)}.weight"] = torch.ones(4, 256).bfloat16()
        draft.quantization["ignore"].append(ROUTER.format(layer))
    return draft


def test_experts_with_an_ignored_router_are_clean(tmp_path: Path) -> None:
    assert rules(mixture(), tmp_path) == set()


def test_a_pattern_for_the_router_that_takes_gate_proj_too_is_found(tmp_path: Path) -> None:
    draft = dynamic()
    draft.quantization["ignore"].append("re:.*mlp.gate")
    (finding,) = lint(draft.save(tmp_path), ["transformers"]).errors
    assert finding.rule == "ignored-but-quantized"
    assert finding.places[0] == "model.layers.0.mlp.gate_proj.weight"
    assert len(finding.places) == LAYERS
    assert "end it with $" in finding.advice


@pytest.mark.parametrize(
    "entry", ["re:visual.*", "re:model.visual.*", "model.visual.blocks.0.mlp.fc1"]
)
def test_vision_may_be_ignored_under_the_names_of_servers(entry: str, tmp_path: Path) -> None:
    draft = dynamic()
    draft.tensors[VISION] = torch.ones(256, 256).bfloat16()
    assert "unquantized-not-ignored" in rules(draft, tmp_path / "without")
    draft.quantization["ignore"].append(entry)
    assert "unquantized-not-ignored" not in rules(draft, tmp_path / "with", ("vllm", "sglang"))


def test_layers_that_share_a_cache_need_no_scales(tmp_path: Path) -> None:
    draft = dynamic()
    for kind in "kv":
        del draft.tensors[f"model.layers.{LAYERS - 1}.self_attn.{kind}_scale"]
    assert rules(draft, tmp_path / "own") == {"kv-scales-partial"}
    draft.config["num_kv_shared_layers"] = 1
    assert rules(draft, tmp_path / "shared") == set()


def fuse(draft: Draft) -> None:
    """Store q, k and v as one matrix, as Phi-3 does."""
    for layer in range(LAYERS):
        for part in ("weight", "weight_scale"):
            names = [f"model.layers.{layer}.self_attn.{leaf}_proj.{part}" for leaf in "qkv"]
            parts = [draft.tensors.pop(name) for name in names]
            joined = torch.cat([tensor.view(torch.uint8) for tensor in parts])
            name = f"model.layers.{layer}.self_attn.qkv_proj.{part}"
            draft.tensors[name] = joined.view(parts[0].dtype)


def test_linears_fused_on_disk_are_clean(tmp_path: Path) -> None:
    draft = dynamic()
    fuse(draft)
    assert rules(draft, tmp_path) == set()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda d: d.quantization.update(ignore=[]), "unquantized-not-ignored"),
        (lambda d: d.config.update(tie_word_embeddings=True), "tied-head-stored"),
    ],
)
def test_a_tied_head_needs_no_entry(
    change: Callable[[Draft], None], rule: str, tmp_path: Path
) -> None:
    draft = dynamic()
    change(draft)
    assert rules(draft, tmp_path / "stored") == {rule}
    del draft.tensors["lm_head.weight"]
    draft.config["tie_word_embeddings"] = True
    assert rules(draft, tmp_path / "tied") == set()


def test_the_last_of_fused_linears_may_end_in_part_of_a_block(tmp_path: Path) -> None:
    for base, engines in (("block", set()), ("fp8-block", {"sglang"})):
        draft = BASES[base][0]()
        for layer in range(LAYERS):
            name = f"model.layers.{layer}.self_attn.v_proj.weight"
            draft.tensors[name] = draft.tensors[name][:64].clone()
        report = lint(draft.save(tmp_path / base))
        assert {engine for finding in report.findings for engine in finding.engines} == engines


def test_scales_of_experts_stored_together_are_for_transformers_alone(tmp_path: Path) -> None:
    draft = BASES["fp8-block"][0]()
    for name in [name for name in draft.tensors if ".0.mlp." in name]:
        tensor = draft.tensors.pop(name)
        if name.endswith(".weight"):
            draft.tensors[name.replace(".mlp.", ".mlp.experts.0.")] = tensor
    scales = {"gate_up_proj": (1, 8, 2), "down_proj": (1, 2, 4)}
    for leaf, shape in scales.items():
        name = f"model.layers.0.mlp.experts.{leaf}_scale_inv"
        draft.tensors[name] = torch.full(shape, 2.0**-10)
    failing, warned = lint(draft.save(tmp_path)).findings
    assert failing.rule == warned.rule == "scale-of-all-experts"
    assert failing.engines == ("vllm", "sglang", "tensorrt-llm")
    assert warned.engines == ("transformers",)
    assert len(failing.places) == len(warned.places) == 3


def test_experts_stored_together_are_named_by_their_first(tmp_path: Path) -> None:
    draft = dynamic()
    draft.tensors["model.layers.0.mlp.experts.down_proj"] = torch.ones(2, 64, 256).bfloat16()
    assert rules(draft, tmp_path / "without") == {"experts-not-ignored"}
    draft.quantization["ignore"].append("re:.*experts.*")
    assert rules(draft, tmp_path / "with") == {"ignore-regex"}  # TensorRT-LLM's note
