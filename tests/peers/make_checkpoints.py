"""Write the tiny checkpoints of tests/fixtures/foreign with the tools whose formats they are in.

Each tool wants an environment of its own, because their versions of transformers and
compressed-tensors exclude each other:

    python -m venv llmc && llmc/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    llmc/bin/python tests/peers/make_checkpoints.py llmcompressor tests/fixtures/foreign
    python -m venv mo && mo/bin/pip install torch==2.13.0 nvidia-modelopt==0.47.0 transformers==5.24.0 accelerate requests
    mo/bin/python tests/peers/make_checkpoints.py modelopt tests/fixtures/foreign
    python -m venv quark && quark/bin/pip install torch==2.13.0 amd-quark==0.13 transformers==5.17.0 accelerate requests
    quark/bin/python tests/peers/make_checkpoints.py quark tests/fixtures/foreign
    .venv/bin/python tests/peers/make_checkpoints.py transformers tests/fixtures/foreign
    .venv/bin/python tests/peers/make_checkpoints.py autofp8 tests/fixtures/foreign

`autofp8` alone is not written by its tool, which is archived and not on the package index: it is
written here, after auto_fp8/quantize.py of neuralmagic/AutoFP8 084feb8. Models are random, from
fixed seeds. Each folder gets a made_by.json that names the tool and its version.
"""  # noqa: E501

from __future__ import annotations

import copy
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
ODD = {"hidden_size": 136, "intermediate_size": 72, "num_hidden_layers": 1}
"""Not multiples of 128."""
BLOCKS = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
"""The smallest sizes that tools with 128 x 128 blocks quantize."""


def model(kind: str = "Llama", seed: int = 0, **changes: Any) -> Any:
    """Return a random model whose biases and norms matter, loaded from a folder of its own.

    Tools look into that folder again when they save.
    """
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    made = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
        elif parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=2.0 / parameter.shape[-1] ** 0.5)
    folder = tempfile.mkdtemp()
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def tokenizer() -> Any:
    """Return a tokenizer of numbers, for a tool that will not do without."""
    from tokenizers import Tokenizer, models

    words = {str(number): number for number in range(SIZES["vocab_size"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="3"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="0")


def samples(count: int = 8, length: int = 32) -> list[Tensor]:
    """Return token ids, int64 [1, length] each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (1, length), generator=generator) for _ in range(count)]


def note(folder: Path, tool: str, how: str) -> None:
    """Say in the folder who wrote it; drop what no reader of weights needs."""
    unread = ("generation_config.json", "recipe.yaml", "tokenizer.json", "tokenizer_config.json")
    for name in unread:
        (folder / name).unlink(missing_ok=True)
    made_by = {"tool": tool, "how": how, "torch": torch.__version__.partition("+")[0]}
    made_by["transformers"] = transformers.__version__
    (folder / "made_by.json").write_text(json.dumps(made_by, indent=2) + "\n")
    print(folder, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


# llm-compressor


def llmcompressor(out: Path) -> None:
    """FP8_DYNAMIC with KV scales per head; static FP8 with KV scales; FP8_BLOCK."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    rows = [{"input_ids": ids[0].tolist(), "attention_mask": [1] * 32} for ids in samples()]
    plain = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}

    def save(name: str, made: Any, **recipe: Any) -> None:
        modifier = QuantizationModifier(targets="Linear", ignore=["lm_head"], **recipe)
        oneshot(
            model=made,
            dataset=Dataset.from_list(rows),
            recipe=[modifier],
            max_seq_length=32,
            num_calibration_samples=len(rows),
        )
        made.save_pretrained(out / name, save_compressed=True)
        how = json.dumps(recipe)
        note(out / name, f"llmcompressor {version('llmcompressor')}", how)

    save(
        "llmcompressor-dynamic-kv-heads",
        model(seed=2),
        scheme="FP8_DYNAMIC",
        kv_cache_scheme={**plain, "strategy": "attn_head"},
    )
    save(
        "llmcompressor-static-kv",
        model("Qwen2", seed=3),
        scheme="FP8",
        kv_cache_scheme={**plain, "strategy": "tensor"},
    )
    save("llmcompressor-block-odd", model(seed=4, **ODD), scheme="FP8_BLOCK")


# NVIDIA Model Optimizer


def modelopt(out: Path) -> None:
    """FP8 with KV scales, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def save(name: str, made: Any, preset: str, kv: str | None = None) -> None:
        config = copy.deepcopy(getattr(mtq, preset))
        if kv is not None:
            config = mtq.update_quant_cfg_with_kv_cache_quant(config, getattr(mtq, kv)["quant_cfg"])
        mtq.quantize(made, config, lambda m: [m(ids) for ids in samples()])
        export_hf_checkpoint(made, export_dir=str(out / name))
        how = preset if kv is None else f"{preset} + {kv}"
        note(out / name, f"nvidia-modelopt {version('nvidia-modelopt')}", how)

    untied = {"tie_word_embeddings": False}
    save("modelopt-fp8-kv", model(seed=5, **untied), "FP8_DEFAULT_CFG", "FP8_KV_CFG")
    channels = model("Qwen2", seed=6, num_hidden_layers=1)
    save("modelopt-per-channel", channels, "FP8_PER_CHANNEL_PER_TOKEN_CFG")
    block = "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"
    save("modelopt-block", model(seed=7, **{**BLOCKS, "intermediate_size": 256}), block)


# AMD Quark


def quark(out: Path) -> None:
    """Its mode for vLLM: static FP8 under the name of the fp8 method, with KV scales."""
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
    from torch.utils.data import DataLoader

    made, folder = model(seed=13, num_hidden_layers=1, vocab_size=64), out / "quark-fp8-kv"
    config = LLMTemplate.get("llama").get_config(scheme="fp8", kv_cache_scheme="fp8")
    quantizer = ModelQuantizer(config)
    data = DataLoader([ids[0] for ids in samples()], batch_size=1)
    frozen = quantizer.freeze(quantizer.quantize_model(made, data))
    with torch.no_grad():
        export_safetensors(frozen, folder, custom_mode="fp8")
    note(folder, f"amd-quark {version('amd-quark')}", "fp8, kv_cache_scheme fp8, custom_mode fp8")


# transformers


def finegrained(out: Path) -> None:
    """128 x 128 blocks; one scale per tensor; blocks with scales that are powers of two."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # Quantizing asks for a GPU, which the conversion itself does not need.
    FineGrainedFP8HfQuantizer.validate_environment = lambda self, *args, **kwargs: None

    def save(name: str, made: Any, **options: Any) -> None:
        quantized = transformers.AutoModelForCausalLM.from_pretrained(
            made.config.name_or_path,
            dtype=torch.bfloat16,
            quantization_config=transformers.FineGrainedFP8Config(**options),
        )
        quantized.save_pretrained(out / name)
        note(
            out / name,
            f"transformers {transformers.__version__}",
            json.dumps(options) if options else "defaults",
        )

    save("transformers-block", model(seed=8, **BLOCKS))
    save("transformers-tensor", model(seed=9, num_hidden_layers=1), weight_block_size=None)
    save(
        "transformers-ue8m0",
        model("Qwen3", seed=10, num_hidden_layers=1, head_dim=16, vocab_size=64),
        weight_block_size=[32, 32],
        scale_fmt="ue8m0",
    )


# AutoFP8, after its source


def autofp8(out: Path) -> None:
    """Static scales per tensor; those of the KV cache are output scales of k_proj and v_proj."""
    made, folder = model(seed=11), out / "autofp8-static-kv"
    inputs, outputs = _observe(made)
    tensors = {}
    for name, tensor in made.state_dict().items():
        module = name.removesuffix(".weight")
        if module not in inputs:
            tensors[name] = tensor
            continue
        tensors[name], tensors[f"{module}.weight_scale"] = _per_tensor(tensor)
        tensors[f"{module}.input_scale"] = _per_tensor(inputs[module])[1]
        if module.endswith(("k_proj", "v_proj")):
            tensors[f"{module}.output_scale"] = _per_tensor(outputs[module])[1]
    del tensors["lm_head.weight"]
    made.config.quantization_config = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
        "kv_cache_scheme": "static",
    }
    made.config.save_pretrained(folder)
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    note(folder, "by hand, after neuralmagic/AutoFP8 084feb8", "static, kv_cache_quant_targets")


def _observe(made: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs and outputs of every linear but the head, of all samples."""
    inputs: dict[str, list[Tensor]] = {}
    outputs: dict[str, list[Tensor]] = {}
    for name, module in made.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":

            def keep(_: nn.Module, args: Any, result: Tensor, name: str = name) -> None:
                inputs.setdefault(name, []).append(args[0].detach())
                outputs.setdefault(name, []).append(result.detach())

            module.register_forward_hook(keep)
    for ids in samples():
        made(ids)
    return {n: torch.cat(x) for n, x in inputs.items()}, {
        n: torch.cat(x) for n, x in outputs.items()
    }


def _per_tensor(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and 0-d float32 multiplier, computed in the tensor's dtype as AutoFP8 does."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    inverse = largest / tensor.abs().amax().clamp(min=1e-12)
    codes = (tensor * inverse).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return codes, inverse.float().reciprocal()


TOOLS = {
    "llmcompressor": llmcompressor,
    "modelopt": modelopt,
    "quark": quark,
    "transformers": finegrained,
    "autofp8": autofp8,
}

if __name__ == "__main__":
    tool, destination = sys.argv[1], Path(sys.argv[2])
    for stale in destination.glob(f"{tool}-*"):
        shutil.rmtree(stale)
    destination.mkdir(parents=True, exist_ok=True)
    TOOLS[tool](destination)
