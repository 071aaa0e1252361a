"""Blocks of config.json as other tools and releases write them, and blocks that are not read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from quantkit.containers import CONTAINERS, IgnoreList, read_scheme
from quantkit.errors import CheckpointError
from quantkit.scheme import Granularity, QuantSpec, Scheme

TENSOR, CHANNEL = QuantSpec(Granularity.TENSOR), QuantSpec(Granularity.CHANNEL)
TENSOR_DYNAMIC = QuantSpec(Granularity.TENSOR, dynamic=True)
TOKEN = QuantSpec(Granularity.TOKEN, dynamic=True)
BLOCK = QuantSpec(Granularity.BLOCK, block_shape=(128, 128))
GROUP = QuantSpec(Granularity.GROUP, group_size=128, dynamic=True)
FLOAT8 = {"num_bits": 8, "type": "float"}

DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
AUTOFP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
CT = CONTAINERS["compressed-tensors"].to_config(Scheme(CHANNEL, TOKEN))
GROUP_0 = CT["config_groups"]["group_0"]
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


def scheme_of(block: dict[str, Any]) -> Scheme:
    return read_scheme({"quantization_config": block})[1]


@pytest.mark.parametrize(
    ("block", "scheme"),
    [
        (DEEPSEEK, Scheme(BLOCK, GROUP)),
        (DEEPSEEK | {"scale_fmt": "ue8m0"}, Scheme(BLOCK, GROUP)),
        (
            DEEPSEEK | {"modules_to_not_convert": ["lm_head", "gate"]},
            Scheme(BLOCK, GROUP, None, ("lm_head", "gate")),
        ),
        (
            DEEPSEEK | {"modules_to_not_convert": None, "ignored_layers": ["a"]},
            Scheme(BLOCK, GROUP, None, ("a",)),
        ),
        (AUTOFP8, Scheme(TENSOR, TENSOR, None, ("lm_head",))),
        (AUTOFP8 | {"kv_cache_scheme": "static"}, Scheme(TENSOR, TENSOR, TENSOR, ("lm_head",))),
        (AUTOFP8 | {"kv_cache_scheme": None}, Scheme(TENSOR, TENSOR, None, ("lm_head",))),
        (
            AUTOFP8 | {"activation_scheme": "dynamic"},
            Scheme(TENSOR, TENSOR_DYNAMIC, None, ("lm_head",)),
        ),
        (MODELOPT, Scheme(TENSOR, TENSOR, None, ("lm_head",))),
        (MODELOPT | {"kv_cache_scheme": FLOAT8}, Scheme(TENSOR, TENSOR, TENSOR, ("lm_head",))),
        (
            MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            Scheme(CHANNEL, TOKEN, None, ("lm_head",)),
        ),
        (MODELOPT | {"quant_algo": "fp8_pb_wo"}, Scheme(BLOCK, None, None, ("lm_head",))),
        (
            {
                "quant_method": "modelopt",
                "quantization": {
                    "quant_algo": "FP8",
                    "kv_cache_quant_algo": "FP8",
                    "exclude_modules": ["lm_head", "model.vision*"],
                },
            },
            Scheme(TENSOR, TENSOR, TENSOR, ("lm_head", "model.vision*")),
        ),
        (CT | {"format": "naive-quantized"}, Scheme(CHANNEL, TOKEN)),
        (
            CT | {"sparsity_config": {"format": "dense"}, "transform_config": None},
            Scheme(CHANNEL, TOKEN),
        ),
        (CT | {"format": "mixed-precision"}, Scheme(CHANNEL, TOKEN)),
    ],
)
def test_blocks_of_other_tools_are_read(block: dict[str, Any], scheme: Scheme) -> None:
    assert scheme_of(block) == scheme


def ct_weights(**changes: Any) -> dict[str, Any]:
    group = GROUP_0 | {"weights": GROUP_0["weights"] | changes}
    return CT | {"config_groups": {"group_0": group}}


def ct_inputs(**changes: Any) -> dict[str, Any]:
    group = GROUP_0 | {"input_activations": GROUP_0["input_activations"] | changes}
    return CT | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (CT | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        (CT | {"format": "int-quantized"}, "int-quantized"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (CT | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (CT | {"config_groups": {"FP8": ["Linear"]}}, r"config_groups\.FP8"),
        (CT | {"config_groups": ["Linear"]}, "config_groups="),
        (CT | {"ignore": "lm_head"}, "ignore='lm_head'"),
        (CT | {"kv_cache_scheme": "fp8"}, "kv_cache_scheme='fp8'"),
        (CT | {"kv_cache_scheme": FLOAT8 | {"strategy": "token"}}, "per 'token'"),
        (CT | {"kv_cache_scheme": FLOAT8 | {"dynamic": True}}, "dynamic scales"),
        (ct_weights(num_bits=4), "num_bits=4"),
        (ct_weights(type="int"), "type=int"),
        (ct_weights(dynamic=True), "weights with dynamic scales"),
        (ct_weights(strategy="token"), "per 'token'"),
        (ct_weights(scale_dtype="torch.uint8"), "scale_dtype='torch.uint8'"),
        (ct_weights(actorder="group"), "actorder='group'"),
        (ct_inputs(dynamic="local"), "dynamic='local'"),
        (ct_inputs(dynamic=False), "input_activations with static scales per 'token'"),
        (
            CT
            | {
                "config_groups": {
                    "a": GROUP_0,
                    "b": GROUP_0 | {"weights": FLOAT8 | {"strategy": "tensor"}},
                }
            },
            "'a' and 'b' differently",
        ),
        (
            CT | {"config_groups": {"a": GROUP_0, "b": {"targets": ["Linear"], "weights": None}}},
            "'b' without weights",
        ),
        (
            CT | {"config_groups": {"a": GROUP_0 | {"format": "int-quantized"}}},
            "'a' with format='int-quantized'",
        ),
        (DEEPSEEK | {"weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        (DEEPSEEK | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (DEEPSEEK | {"weight_block_size": "128x128"}, "weight_block_size"),
        (DEEPSEEK | {"activation_scheme": "static"}, "static inputs with weight_block_size"),
        (DEEPSEEK | {"activation_scheme": "none"}, "activation_scheme='none'"),
        (DEEPSEEK | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (DEEPSEEK | {"scale_fmt": "e4m3"}, "scale_fmt='e4m3'"),
        (DEEPSEEK | {"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        (DEEPSEEK | {"ignored_layers": [1]}, "ignored_layers="),
        (AUTOFP8 | {"kv_cache_scheme": "dynamic"}, "kv_cache_scheme='dynamic'"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
        (MODELOPT | {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
        (MODELOPT | {"quant_algo": "MXFP8"}, "quant_algo='MXFP8'"),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, "quant_algo='MIXED_PRECISION'"),
        (MODELOPT | {"quant_algo": None}, "quant_algo=None"),
        (MODELOPT | {"kv_cache_scheme": "NVFP4"}, "'NVFP4'"),
        (MODELOPT | {"quantization": "FP8"}, "quantization='FP8'"),
        ({"quant_method": "quantkit", "weights": None}, "weights=None"),
    ],
)
def test_what_is_not_plain_fp8_is_refused_by_name(block: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        scheme_of(block)


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("lm_head", "lm_head"),
        ("lm_head", "model.lm_head"),
        ("model.visual", "model.visual.blocks.0.mlp"),
        ("mlp.gate", "model.layers.3.mlp.gate"),
        ("re:.*mlp\\.gate$", "model.layers.3.mlp.gate"),
        ("re:^mtp.*", "mtp.layers.0.fc"),
        ("model.layers.0*", "model.layers.0.mlp.down_proj"),
        ("*lm_head*", "model.lm_head"),
    ],
)
def test_a_module_on_the_list_is_found(entry: str, module: str) -> None:
    assert IgnoreList(["something.else", entry, "re:nothing"]).entry_for(module) == entry


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("mlp.gate", "model.layers.3.mlp.gate_proj"),
        ("model.layers.1", "model.layers.10.mlp.gate_proj"),
        ("head", "lm_head"),
        ("re:mtp.*", "model.mtp.fc"),
        ("re:.*mlp\\.gate$", "model.layers.3.mlp.gate_proj"),
        ("model.layers.1.*", "model.layers.10.mlp"),
        ("lm.head", "lm_head"),
    ],
)
def test_a_module_that_only_looks_alike_is_not(entry: str, module: str) -> None:
    assert IgnoreList([entry]).entry_for(module) is None


def test_an_expression_that_is_none_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"re:\(.*no regular expression"):
        IgnoreList(["re:("])


JUNK: list[Any] = [None, True, -1, 0.5, "junk", [], [1], ["junk"], {}, {"junk": 1}, [[]]]


def variants(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value with one thing in it, at any depth, replaced by junk."""
    yield from JUNK
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: other} for other in variants(inner))
    if isinstance(value, list):
        for number, inner in enumerate(value):
            for other in variants(inner):
                yield [*value[:number], other, *value[number + 1 :]]


NATIVE = CONTAINERS["native"].to_config(
    Scheme(QuantSpec(Granularity.CHANNEL, "e3m4"), TOKEN, TENSOR, ("a",), True, {"b": "e4m3"})
)


@pytest.mark.parametrize(
    "block",
    [
        DEEPSEEK,
        AUTOFP8 | {"kv_cache_scheme": FLOAT8},
        CT | {"kv_cache_scheme": FLOAT8},
        NATIVE,
        MODELOPT | {"kv_cache_scheme": FLOAT8},
        {"quant_method": "modelopt", "quantization": MODELOPT},
    ],
    ids=["deepseek", "autofp8", "compressed-tensors", "native", "modelopt", "hf_quant_config"],
)
def test_junk_anywhere_is_read_or_refused_and_nothing_else(block: dict[str, Any]) -> None:
    count = 0
    for other in variants(block):
        with contextlib.suppress(CheckpointError):
            assert isinstance(scheme_of(other), Scheme)
        count += 1
    assert count > 50
