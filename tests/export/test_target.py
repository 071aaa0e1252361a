"""What a format holds of a scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantkit.containers import CONTAINERS
from quantkit.errors import UnsupportedError
from quantkit.export.target import FORMATS, engines_of, target_scheme
from quantkit.scheme import Granularity, QuantSpec
from tests.checkpoints import BLOCK, DYNAMIC, NATIVE, SCHEMES, STATIC

KV = QuantSpec(Granularity.TENSOR)
KV_HEAD = QuantSpec(Granularity.HEAD)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_target_is_one_that_its_container_can_say(name: str, format_name: str) -> None:
    source = replace(SCHEMES[name], kv=KV, ignore=("lm_head",))
    target = target_scheme(source, format_name)
    block = CONTAINERS[format_name].to_config(target)
    assert CONTAINERS[format_name].from_config(block) == target
    assert target.ignore == ("lm_head",)
    assert target.kv == KV
    assert not target.native


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC, BLOCK])
def test_portable_schemes_stay_in_their_own_container(scheme: object) -> None:
    assert target_scheme(scheme, "compressed-tensors") == scheme


def test_native_weights_become_e4m3_and_inputs_follow() -> None:
    source = replace(NATIVE, formats={"a.b": "e4m3"})
    assert target_scheme(source, "compressed-tensors") == DYNAMIC


@pytest.mark.parametrize("format_name", ["fp8-block", "modelopt"])
def test_kv_scales_per_head_have_no_place_in(format_name: str) -> None:
    with pytest.raises(UnsupportedError, match="one per head; use --format compressed-tensors"):
        target_scheme(replace(DYNAMIC, kv=KV_HEAD), format_name)


def test_an_unknown_format_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match=r"'modelop' is not known.*'modelopt'"):
        target_scheme(DYNAMIC, "modelop")


def test_engines_follow_from_format_and_scheme() -> None:
    assert "tensorrt-llm" in engines_of("compressed-tensors", DYNAMIC)
    assert "tensorrt-llm" not in engines_of("compressed-tensors", STATIC)
    assert "transformers" not in engines_of("modelopt", STATIC)
    assert engines_of("compressed-tensors", replace(DYNAMIC, kv=KV_HEAD)) == ("vllm",)
