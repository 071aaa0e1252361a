"""What the linter says compressed-tensors and transformers refuse, against these libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from quantkit.lint import lint
from quantkit.lint.rules.compressed_tensors import STRATEGIES, _invalid
from tests.lint.folders import BASES, Q0, Draft, dynamic

ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "num_bits": st.sampled_from([8, 4]),
        "type": st.sampled_from(["float", "int", "FLOAT", "flaot"]),
        "symmetric": st.booleans(),
        "strategy": st.sampled_from([*STRATEGIES, "Token", "chanel", None]),
        "group_size": st.sampled_from([None, -1, 0, 16, 128]),
        "block_structure": st.sampled_from(
            [None, [128, 128], [128], [128, "x"], "128x128", "1x", [64, 128]]
        ),
        "dynamic": st.sampled_from([True, False, "local", "locl"]),
    },
)


def is_refused(fields: dict[str, Any]) -> bool:
    try:
        QuantizationArgs.model_validate(fields)
    except (ValueError, NotImplementedError):
        return True
    return False


@given(ARGUMENTS)
def test_arguments_are_refused_as_compressed_tensors_refuses_them(fields: dict[str, Any]) -> None:
    assert bool(list(_invalid(fields))) == is_refused(fields), fields


@pytest.mark.parametrize("key", ["observer", "scale_dtype", "actorder", "wieghts", "bits"])
@pytest.mark.parametrize("part", ["weights", "input_activations", "group"])
def test_keys_are_refused_as_compressed_tensors_refuses_them(
    part: str, key: str, tmp_path: Path
) -> None:
    draft = dynamic()
    place = draft.group if part == "group" else draft.group[part]
    place[key] = None
    found = [f for f in lint(draft.save(tmp_path)).findings if f.rule == "unknown-key"]
    if found:
        with pytest.raises(ValueError, match="Extra inputs are not permitted"):
            QuantizationConfig.model_validate(draft.quantization)
    else:
        QuantizationConfig.model_validate(draft.quantization)


def loading(folder: Path) -> dict[str, Any] | Exception:
    """Return what transformers says of a checkpoint's keys, or how it fails."""
    try:
        _, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    except Exception as error:
        return error
    return {key: value for key, value in said.items() if value and key != "unexpected_keys"}


def drop_status(draft: Draft) -> None:
    del draft.quantization["quantization_status"]


DAMAGES: dict[str, Any] = {
    "unknown-key": lambda d: d.group["weights"].update(wieghts=1),
    "invalid-value": lambda d: d.group["weights"].update(group_size=64),
    "scale-missing": lambda d: d.tensors.pop(f"{Q0}.weight_scale"),
    "scale-shape": lambda d: d.tensors.update({f"{Q0}.weight_scale": torch.ones(256)}),
    "unquantized-not-ignored": lambda d: d.quantization.update(ignore=[]),
    "scale-name": lambda d: d.tensors.update(
        {f"{Q0}.weight_scale_inv": d.tensors.pop(f"{Q0}.weight_scale")}
    ),
}


@pytest.mark.parametrize("rule", DAMAGES)
def test_what_is_an_error_for_transformers_fails_there(rule: str, tmp_path: Path) -> None:
    draft = dynamic()
    DAMAGES[rule](draft)
    folder = draft.save(tmp_path)
    assert rule in {finding.rule for finding in lint(folder, ["transformers"]).errors}
    assert loading(folder) != {}


@pytest.mark.parametrize("base", ["dynamic", "static", "block", "fp8-block"])
def test_what_is_clean_for_transformers_loads_there(base: str, tmp_path: Path) -> None:
    make, engines = BASES[base]
    folder = make().save(tmp_path)
    assert "transformers" in engines
    assert lint(folder, ["transformers"]).ok
    assert loading(folder) == {}


def test_scalar_scales_load_in_no_transformers(tmp_path: Path) -> None:
    draft = BASES["static"][0]()
    draft.tensors[f"{Q0}.weight_scale"] = draft.tensors[f"{Q0}.weight_scale"][0]
    folder = draft.save(tmp_path)
    assert [f.rule for f in lint(folder, ["transformers"]).errors] == ["scale-shape"]
    assert loading(folder) != {}


def test_without_a_status_transformers_takes_codes_for_weights(tmp_path: Path) -> None:
    draft = dynamic()
    good = draft.save(tmp_path / "good")
    drop_status(draft)
    bad = draft.save(tmp_path / "bad")
    assert [f.rule for f in lint(bad, ["transformers"]).errors] == ["status"]
    ids = torch.arange(8)[None]
    logits = [AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (good, bad)]
    assert not torch.allclose(*(value.float() for value in logits), atol=0.1)
