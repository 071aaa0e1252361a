"""Every rule: one fault in a good checkpoint gives that rule's finding, and nothing else."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.lint import lint, rules
from tests.lint.folders import ALL, BASES, GATE0, Q0, Draft, plain_tensors, quantized

Damage = Callable[[Draft], Any]
VLLM, SGLANG, TRANSFORMERS, TENSORRT = ALL
SERVERS = (VLLM, SGLANG, TENSORRT)
PYDANTIC = (VLLM, SGLANG, TRANSFORMERS)
K_SCALE = "model.layers.0.self_attn.k_scale"
EXPERT_DOWN = "model.layers.0.mlp.experts.1.down_proj"
MTP_Q = "mtp.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class Case:
    """A fault: the base it is done to, how, and what must be found for whom.

    `also` are other rules that the same fault breaks.
    """

    rule: str
    base: str
    damage: Damage
    engines: tuple[str, ...]
    severity: str = "error"
    tensor_parallel: int = 1
    place: str = ""
    also: tuple[str, ...] = ()
    count: int = 1


def remove(name: str) -> Damage:
    return lambda draft: draft.tensors.pop(name)


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda draft: draft.tensors.update({name: make(draft.tensors[name])})


def rename(old: str, new: str) -> Damage:
    return lambda draft: draft.tensors.update({new: draft.tensors.pop(old)})


def add(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Damage:
    return lambda draft: draft.tensors.update({name: torch.ones(shape).to(dtype)})


def config(**changes: Any) -> Damage:
    return lambda draft: draft.config.update(changes)


def block(**changes: Any) -> Damage:
    return lambda draft: draft.quantization.update(changes)


def group(**changes: Any) -> Damage:
    return lambda draft: draft.group.update(changes)


def weights(**changes: Any) -> Damage:
    return lambda draft: draft.group["weights"].update(changes)


def inputs(**changes: Any) -> Damage:
    return lambda draft: draft.group["input_activations"].update(changes)


def kv(**changes: Any) -> Damage:
    return lambda draft: draft.quantization["kv_cache_scheme"].update(changes)


def drop(*path: str) -> Damage:
    def damage(draft: Draft) -> None:
        value = draft.config
        for key in path[:-1]:
            value = value[key]
        del value[path[-1]]

    return damage


def file(name: str, text: str | None) -> Damage:
    return lambda d: d.files.pop(name) if text is None else d.files.update({name: text})


def both(*damages: Damage) -> Damage:
    return lambda draft: [damage(draft) for damage in damages]


def sharded(change: Damage) -> Damage:
    return both(Draft.split, change)


def index(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return sharded(lambda draft: change(draft.index or {}))


def plain(module: str) -> Damage:
    """Store one linear in 16 bits."""
    return both(
        put(f"{module}.weight", lambda weight: weight.bfloat16()), remove(f"{module}.weight_scale")
    )


def narrow(module: str, rows: int) -> Damage:
    return put(f"{module}.weight", lambda weight: weight[:rows].clone())


def ignore(*entries: str) -> Damage:
    return lambda draft: draft.quantization["ignore"].extend(entries)


def all_scales(suffix: str, value: float) -> Damage:
    def damage(draft: Draft) -> None:
        for name, tensor in draft.tensors.items():
            if name.endswith(suffix):
                tensor.fill_(value)

    return damage


def no_kv(draft: Draft) -> None:
    for name in [name for name in draft.tensors if name.endswith(("k_scale", "v_scale"))]:
        del draft.tensors[name]


def unquantized(draft: Draft) -> None:
    draft.tensors = plain_tensors()
    del draft.config["quantization_config"]


def as_int8(draft: Draft) -> None:
    draft.group["weights"]["type"] = "int"
    for name in [name for name in draft.tensors if "_proj" in name]:
        del draft.tensors[name]


def experts(draft: Draft) -> None:
    """Replace the first MLP by two experts."""
    coded = quantized(lambda rows, columns: (rows, 1))
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        for part in ("weight", "weight_scale"):
            del draft.tensors[f"model.layers.0.mlp.{leaf}.{part}"]
            source = coded[f"model.layers.0.mlp.{leaf}.{part}"]
            for expert in range(2):
                name = f"model.layers.0.mlp.experts.{expert}.{leaf}.{part}"
                draft.tensors[name] = source.clone()


STRUCTURE = [
    Case("no-weights", "dynamic", lambda d: d.tensors.clear(), ALL),
    Case("index", "dynamic", index(lambda i: i.pop("weight_map")), ALL),
    Case(
        "index-outside-folder",
        "dynamic",
        index(lambda i: i["weight_map"].update({"extra.weight": "../secret.safetensors"})),
        ALL,
        place="extra.weight",
    ),
    Case(
        "shard-missing",
        "dynamic",
        index(lambda i: i["weight_map"].update({"extra.weight": "model-00003.safetensors"})),
        ALL,
        place="model-00003.safetensors",
    ),
    Case(
        "tensor-missing",
        "dynamic",
        index(lambda i: i["weight_map"].update({"extra": "model-00001-of-00002.safetensors"})),
        ALL,
        place="extra",
    ),
    Case(
        "index-wrong-shard",
        "dynamic",
        index(
            lambda i: i["weight_map"].update({"lm_head.weight": "model-00001-of-00002.safetensors"})
        ),
        ALL,
        "warning",
        place="lm_head.weight",
    ),
    Case(
        "tensor-not-indexed",
        "dynamic",
        index(lambda i: i["weight_map"].pop("lm_head.weight")),
        ALL,
        "warning",
        place="lm_head.weight",
    ),
    Case("total-size", "dynamic", index(lambda i: i["metadata"].update(total_size=1)), ALL, "note"),
    Case("stray-shard", "dynamic", file("extra.safetensors", ""), (VLLM, SGLANG)),
    Case("stray-shard", "dynamic", sharded(file("extra.safetensors", "")), ALL, "note"),
    Case("consolidated-weights", "dynamic", sharded(file("consolidated.safetensors", "")), (VLLM,)),
    Case("pickled-weights", "dynamic", file("pytorch_model.bin", ""), ALL, "warning"),
    Case(
        "metadata-format",
        "dynamic",
        lambda draft: setattr(draft, "metadata", None),
        (TRANSFORMERS,),
        "warning",
    ),
    Case(
        "shard-name",
        "dynamic",
        lambda d: d.shards.update(dict.fromkeys(d.tensors, "weights.safetensors")),
        (TRANSFORMERS,),
    ),
]
METHOD = [
    Case("not-quantized", "dynamic", unquantized, ALL, "note"),
    Case(
        "not-checked",
        "dynamic",
        block(quant_method="torchao"),
        (VLLM, TRANSFORMERS),
        "note",
        also=("unknown-method",),
    ),
    Case(
        "deprecated-method",
        "dynamic",
        block(quant_method="fbgemm_fp8"),
        (VLLM,),
        "warning",
        also=("unknown-method", "not-checked"),
    ),
    Case("not-declared", "dynamic", drop("quantization_config"), ALL),
    Case("native-checkpoint", "dynamic", block(quant_method="quantkit"), ALL),
    Case("unknown-method", "dynamic", block(quant_method="fp9"), ALL),
    Case("unknown-method", "modelopt", lambda draft: None, (TRANSFORMERS,)),
]
COMPRESSED = [
    Case("not-fp8", "dynamic", both(as_int8, no_kv, block(kv_cache_scheme=None)), ALL, "note"),
    Case(
        "class-target",
        "dynamic",
        lambda draft: draft.quantization["config_groups"].update(
            group_1={**draft.group, "targets": [r"re:.*down_proj$"]}
        ),
        (TENSORRT,),
    ),
    Case(
        "unknown-key",
        "dynamic",
        weights(block_strcture=None),
        PYDANTIC,
        place="quantization_config.config_groups.group_0.weights.block_strcture",
    ),
    Case("unknown-key", "dynamic", group(weight=None), PYDANTIC),
    Case("unknown-key", "dynamic", kv(scale="x"), PYDANTIC),
    Case("invalid-value", "block", weights(block_structure=None), PYDANTIC),
    Case("invalid-value", "dynamic", weights(group_size=64), PYDANTIC),
    Case("no-groups", "dynamic", block(config_groups={}), ALL),
    Case(
        "group-without-weights",
        "dynamic",
        lambda draft: draft.quantization["config_groups"].update(
            attention={"targets": ["re:.*self_attn$"], "weights": None}
        ),
        (VLLM, SGLANG, TENSORRT),
        also=("class-target",),
    ),
    Case("unsupported-scheme", "dynamic", weights(symmetric=False), (VLLM, SGLANG)),
    Case("unsupported-scheme", "block", inputs(group_size=64), (TENSORRT,)),
    Case("unsupported-scheme", "block", group(input_activations=None), (SGLANG, TENSORRT), count=2),
    Case("unsupported-scheme", "dynamic", group(input_activations=None), (TENSORRT,)),
    Case("unsupported-scheme", "static", lambda draft: None, (TENSORRT,)),
    Case("format", "dynamic", group(format="pack-quantized"), (VLLM, SGLANG)),
    Case("format", "dynamic", group(format="floatquantized"), PYDANTIC),
    Case("status", "dynamic", drop("quantization_config", "quantization_status"), (TRANSFORMERS,)),
    Case(
        "sparsity",
        "dynamic",
        block(sparsity_config={"format": "dense", "targets": ["Linear"]}),
        (VLLM,),
    ),
    Case("target", "dynamic", group(targets=["Linear", "re:.*q_prjo"]), ALL),
]
OTHER_CONTAINERS = [
    Case(
        "activation-scheme",
        "fp8-block",
        drop("quantization_config", "activation_scheme"),
        (VLLM, SGLANG),
    ),
    Case("activation-scheme", "fp8-block", block(activation_scheme="block"), PYDANTIC),
    Case("block-size", "fp8-block", block(weight_block_size=[128]), ALL),
    Case("fp8-per-tensor", "fp8-tensor", lambda draft: None, (TRANSFORMERS,)),
    Case(
        "two-ignore-lists",
        "fp8-tensor",
        block(modules_to_not_convert=["lm_head", Q0]),
        (VLLM, SGLANG, TENSORRT),
        "warning",
    ),
    Case(
        "quant-algo",
        "modelopt",
        block(quant_algo="FP9"),
        SERVERS,
        also=("quant-config-differs",),
    ),
    Case(
        "quant-config-differs",
        "modelopt",
        block(kv_cache_scheme={"num_bits": 8, "type": "float"}, ignore=["lm_head", "*norm*"]),
        SERVERS,
        "warning",
    ),
    Case(
        "quant-config-differs",
        "dynamic",
        file("hf_quant_config.json", json.dumps({"quantization": {"quant_algo": "FP8"}})),
        (TENSORRT,),
    ),
    Case(
        "quant-config-missing", "modelopt", file("hf_quant_config.json", None), (TENSORRT,), "note"
    ),
    Case("quant-config", "modelopt", file("hf_quant_config.json", "{"), SERVERS),
]
IGNORE = [
    Case(
        "experts-not-ignored",
        "dynamic",
        add("model.layers.0.mlp.experts.gate_up_proj", 2, 64, 256),
        SERVERS,
        place="model.layers.0.mlp.experts.gate_up_proj",
    ),
    Case(
        "fused-group-split",
        "dynamic",
        both(plain(GATE0), ignore(GATE0)),
        SERVERS,
        place=f"{GATE0}.weight",
        also=("ignore-splits-group",),
    ),
    Case(
        "ignore-splits-group",
        "dynamic",
        ignore(GATE0),
        (VLLM, SGLANG),
        also=("ignored-but-quantized",),
    ),
    Case(
        "experts-scheme",
        "dynamic",
        both(experts, inputs(strategy="tensor", dynamic=True)),
        (VLLM, SGLANG),
        also=("unsupported-scheme",),
    ),
    Case(
        "experts-split",
        "dynamic",
        both(experts, plain(EXPERT_DOWN), ignore(EXPERT_DOWN)),
        SERVERS,
        place=f"{EXPERT_DOWN}.weight",
    ),
    Case("ignored-but-quantized", "dynamic", ignore("model.layers.0.mlp.down_proj"), ALL),
    Case("ignored-but-quantized", "dynamic", ignore("re:.*down"), PYDANTIC, also=("ignore-regex",)),
    Case("ignored-but-quantized", "dynamic", ignore("layers.0.mlp.down_proj"), (SGLANG,)),
    Case("unquantized-not-ignored", "dynamic", plain("model.layers.0.mlp.down_proj"), ALL),
    Case("unquantized-not-ignored", "dynamic", block(ignore=[]), (TRANSFORMERS,)),
    Case(
        "unquantized-not-ignored",
        "modelopt",
        block(ignore=[]),
        (VLLM, SGLANG),
        also=("quant-config-differs",),
    ),
    Case("ignore-pattern", "dynamic", ignore("re:.*(unclosed"), ALL, also=("ignore-regex",)),
    Case(
        "ignore-matches-nothing",
        "dynamic",
        ignore("model.layers.7.mlp.down_proj"),
        ALL,
        "warning",
        place="quantization_config.ignore",
    ),
    Case("untargeted", "dynamic", group(targets=["re:.*(attn|gate|up).*"]), ALL),
    Case("ignore-regex", "dynamic", ignore(r"re:.*\.norm$"), (TENSORRT,), "note"),
]
SCALES = [
    Case("weight-dtype", "dynamic", put(f"{Q0}.weight", lambda w: w.to(torch.float8_e5m2)), ALL),
    Case(
        "fp8-not-linear",
        "dynamic",
        put("model.norm.weight", lambda w: w.to(torch.float8_e4m3fn)),
        ALL,
    ),
    Case("scale-missing", "dynamic", remove(f"{Q0}.weight_scale"), ALL, place=f"{Q0}.weight"),
    Case(
        "scale-name",
        "dynamic",
        rename(f"{Q0}.weight_scale", f"{Q0}.weight_scale_inv"),
        PYDANTIC,
    ),
    Case(
        "scale-name",
        "fp8-block",
        rename(f"{Q0}.weight_scale_inv", f"{Q0}.weight_scale"),
        PYDANTIC,
    ),
    Case("scale-without-weight", "dynamic", add("lm_head.weight_scale", 128, 1), (VLLM,)),
    Case("scale-shape", "dynamic", put(f"{Q0}.weight_scale", lambda s: s[:, 0]), PYDANTIC),
    Case("scale-shape", "dynamic", put(f"{Q0}.weight_scale", lambda s: s.T.contiguous()), ALL),
    Case("scale-shape", "static", put(f"{Q0}.weight_scale", lambda s: s[0]), (TRANSFORMERS,)),
    Case("scale-shape", "block", put(f"{GATE0}.weight_scale", lambda s: s[:2].clone()), ALL),
    Case("scale-dtype", "dynamic", put(f"{Q0}.weight_scale", lambda s: s.int()), ALL),
    Case("scale-invalid", "dynamic", put(f"{Q0}.weight_scale", lambda s: s * torch.nan), ALL),
    Case("scale-invalid", "dynamic", put(f"{Q0}.weight_scale", lambda s: -s), ALL),
    Case("scale-invalid", "static", put(f"{Q0}.input_scale", lambda s: s / 0), PYDANTIC),
    Case("scale-zero", "static", put(f"{Q0}.weight_scale", lambda s: s * 0), PYDANTIC),
    Case("scale-zero", "dynamic", put(f"{Q0}.weight_scale", lambda s: s * 0), ALL, "warning"),
    Case(
        "scale-absurd",
        "dynamic",
        put(f"{Q0}.weight_scale", lambda s: s * 2.0**-100),
        ALL,
        "warning",
    ),
    Case(
        "scale-not-bf16",
        "dynamic",
        put(f"{Q0}.weight_scale", lambda s: s * 1.001),
        (TRANSFORMERS,),
        "note",
    ),
    Case("input-scale-missing", "static", remove(f"{Q0}.input_scale"), PYDANTIC),
    Case("input-scale-unused", "dynamic", add(f"{Q0}.input_scale", 1), ALL, "warning"),
    Case("input-scale-shape", "static", add(f"{Q0}.input_scale", 2), PYDANTIC),
    Case(
        "fused-scales-differ",
        "static",
        put(f"{Q0}.weight_scale", lambda s: s * 2),
        (VLLM, SGLANG),
        "warning",
        place=f"{Q0}.weight_scale",
    ),
    Case(
        "fused-scales-differ",
        "modelopt",
        put(f"{GATE0}.input_scale", lambda s: s * 2),
        SERVERS,
        "warning",
    ),
]
KV = [
    Case(
        "kv-scale-name",
        "dynamic",
        both(no_kv, *(add(f"model.layers.{i}.self_attn.kv_scale", 1) for i in range(2))),
        (VLLM, SGLANG),
        "warning",
        also=("kv-scales-one",),
    ),
    Case("kv-scheme", "dynamic", kv(num_bits=4), (VLLM, TENSORRT)),
    Case("kv-scheme", "dynamic", kv(dynamic=True), (SGLANG,), "warning"),
    Case("kv-scheme", "dynamic", kv(symmetric=False), (VLLM,)),
    Case("kv-scales-missing", "dynamic", no_kv, SERVERS, "warning"),
    Case("kv-scales-partial", "dynamic", remove(K_SCALE), SERVERS, "warning"),
    Case("kv-scales-undeclared", "dynamic", block(kv_cache_scheme=None), SERVERS, "warning"),
    Case("kv-scale-shape", "dynamic", add(K_SCALE, 2), SERVERS),
    Case("kv-scale-shape", "dynamic", kv(strategy="attn_head"), (VLLM,), also=("kv-scheme",)),
    Case("kv-scale-invalid", "dynamic", put(K_SCALE, lambda s: s * 0), ALL),
    Case(
        "kv-scales-one",
        "dynamic",
        both(all_scales("k_scale", 1.0), all_scales("v_scale", 1.0)),
        SERVERS,
        "warning",
    ),
    Case("q-scale", "dynamic", add("model.layers.0.self_attn.q_scale", 1), (SGLANG,), "warning"),
]
SHAPES = [
    Case(
        "tp-size",
        "dynamic",
        config(num_attention_heads=3, num_key_value_heads=3),
        SERVERS,
        tensor_parallel=3,
        also=(),
    ),
    Case("alignment", "static", narrow(GATE0, 250), (SGLANG,)),
    Case("tp-heads", "dynamic", config(num_attention_heads=6), SERVERS, tensor_parallel=4),
    Case("tp-kv-heads", "dynamic", config(num_key_value_heads=3), SERVERS, tensor_parallel=2),
    Case(
        "block-rows",
        "block",
        lambda draft: None,
        (VLLM, SGLANG),
        tensor_parallel=2,
        place="model.layers.0.self_attn.k_proj.weight",
    ),
    Case(
        "block-columns",
        "block",
        lambda draft: None,
        (VLLM, SGLANG),
        tensor_parallel=4,
        place="model.layers.0.self_attn.o_proj.weight",
        also=("block-rows",),
    ),
]
MODEL = [
    Case(
        "head-quantized",
        "dynamic",
        both(
            put("lm_head.weight", lambda w: (w.float() * 1024).to(torch.float8_e4m3fn)),
            add("lm_head.weight_scale", 128, 1, dtype=torch.float32),
            block(ignore=[]),
        ),
        (VLLM, SGLANG),
    ),
    Case("no-architecture", "dynamic", drop("architectures"), SERVERS),
    Case("no-model-type", "dynamic", drop("model_type"), ALL),
    Case("no-dtype", "dynamic", drop("dtype"), ALL, "warning"),
    Case("dtype", "dynamic", config(dtype="float8_e4m3fn"), ALL),
    Case("other-dtype", "dynamic", put("model.norm.weight", lambda w: w.half()), ALL, "note"),
    Case("tied-head-stored", "dynamic", config(tie_word_embeddings=True), ALL, "warning"),
    Case("head-missing", "dynamic", remove("lm_head.weight"), ALL),
    Case(
        "custom-code",
        "dynamic",
        config(auto_map={"AutoModelForCausalLM": "modeling_x.XModel"}),
        ALL,
        "warning",
        place="modeling_x.py",
    ),
    Case("mtp-missing", "dynamic", config(num_nextn_predict_layers=1), (VLLM, SGLANG), "warning"),
    Case(
        "mtp-ignored-by-name",
        "dynamic",
        both(add(f"{MTP_Q}.weight", 256, 256), ignore(MTP_Q)),
        (SGLANG,),
        "warning",
    ),
    Case(
        "head-not-ignored",
        "fp8-block",
        block(modules_to_not_convert=[]),
        (TRANSFORMERS,),
        "warning",
    ),
]
SIDE_FILES = [
    Case("tokenizer-missing", "dynamic", file("tokenizer.json", None), ALL, "warning"),
    Case(
        "tokenizer-config",
        "dynamic",
        both(file("tokenizer_config.json", None), file("chat_template.jinja", "")),
        ALL,
        "warning",
    ),
    Case("chat-template", "dynamic", file("tokenizer_config.json", "{}"), SERVERS, "note"),
    Case("processor-missing", "dynamic", config(vision_config={}), ALL, "warning"),
    Case("generation-config", "dynamic", file("generation_config.json", "{,"), ALL, "warning"),
    Case("generation-config", "dynamic", file("generation_config.json", None), ALL, "note"),
    Case(
        "generation-sampling",
        "dynamic",
        lambda draft: draft.edit("generation_config.json", do_sample=False),
        (TRANSFORMERS,),
        "warning",
    ),
    Case(
        "no-eos",
        "dynamic",
        both(drop("eos_token_id"), file("generation_config.json", "{}")),
        ALL,
        "warning",
    ),
]
CASES = [
    *STRUCTURE,
    *METHOD,
    *COMPRESSED,
    *OTHER_CONTAINERS,
    *IGNORE,
    *SCALES,
    *KV,
    *SHAPES,
    *MODEL,
    *SIDE_FILES,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.base}")
def test_one_fault_is_one_finding(case: Case, tmp_path: Path) -> None:
    make, engines = BASES[case.base]
    draft = make()
    case.damage(draft)
    asked = tuple(dict.fromkeys((*engines, *case.engines)))
    report = lint(draft.save(tmp_path), asked, case.tensor_parallel)
    expected = (case.rule, case.severity)
    mine = [f for f in report.findings if (f.rule, f.severity) == expected]
    others = {finding.rule for finding in report.findings if finding not in mine}
    assert len(mine) == case.count, report.findings  # one cause, however many places
    assert others <= {case.rule, *case.also}, report.findings
    named = {engine for finding in mine for engine in finding.engines}
    assert named == {engine for engine in case.engines if engine in asked}
    if case.severity == "error":
        assert not report.ok
    if case.place:
        assert mine[0].places[0] == case.place
    assert all(finding.problem and finding.places for finding in report.findings)


def test_every_rule_has_a_case() -> None:
    names = {
        call.args[0].value
        for path in Path(rules.__path__[0]).glob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("error", "warning", "note")
        and isinstance(call.args[0], ast.Constant)
    }
    assert len(names) > 60
    assert names - {case.rule for case in CASES} == {"shard-damaged", "tensor-twice"}  # below


@pytest.mark.parametrize("cut", [4, 100, 5000, -1], ids=str)
def test_a_truncated_shard_is_one_finding(cut: int, tmp_path: Path) -> None:
    make, _ = BASES["dynamic"]
    shard = make().save(tmp_path) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:cut])
    (finding, *others) = lint(tmp_path).findings
    assert (finding.rule, finding.engines) == ("shard-damaged", ALL)
    assert "truncated" in finding.problem
    assert not others


def test_a_tensor_in_two_shards_is_one_finding(tmp_path: Path) -> None:
    make, _ = BASES["dynamic"]
    draft = make()
    draft.split()
    draft.save(tmp_path)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    extra = {"lm_head.weight": draft.tensors["lm_head.weight"]}
    save_file({**load_file(first), **extra}, first, metadata={"format": "pt"})
    rules = {finding.rule: finding for finding in lint(tmp_path).findings}
    assert "lm_head.weight" in rules["tensor-twice"].places
    assert first.name in rules["tensor-twice"].problem
    assert second.name in rules["tensor-twice"].problem
