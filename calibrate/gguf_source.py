"""A GGUF file as a model source: dequantized tensor by tensor under Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.gguf_file import GgufFile
from quantkit.calibrate.source import HEAD_BYTES, check_finite
from quantkit.config_sizes import check_sizes
from quantkit.errors import QuantKitError, SourceError, first_line
from quantkit.tokenizer_check import usable

PLAIN_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "nemotron")
"""Architectures whose config is a renaming of the metadata and whose tensors map one to one; any
other is loaded whole, through transformers."""


class GgufSource:
    """A GGUF file. Its weights become bfloat16, the dtype such models were converted from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._file = GgufFile(path)
        self.config_dict = self._read_config()

    @property
    def names(self) -> list[str]:
        """Hugging Face names of all tensors, sorted."""
        return sorted(self._gguf_names) if self._is_plain else sorted(self._whole)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, dequantized, in bfloat16."""
        tensor = self._read(self._gguf_names[name]) if self._is_plain else self._whole[name]
        check_finite(name, tensor)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        if self._is_plain:
            return self._file.tensors[self._gguf_names[name]].shape
        return tuple(self._whole[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return bfloat16."""
        return torch.bfloat16

    def head(self, name: str) -> bytes:
        """Return the first bytes of a tensor: its blocks, or its values if it was converted."""
        if self._is_plain:
            return self._file.head(self._gguf_names[name], HEAD_BYTES)
        values = self._whole[name].flatten()[: HEAD_BYTES // 4].float()
        return values.numpy().tobytes()

    def config(self) -> Any:
        """Return the transformers config."""
        from transformers import AutoConfig

        kind = self.config_dict["model_type"]
        fields = {key: value for key, value in self.config_dict.items() if key != "model_type"}
        return AutoConfig.for_model(kind, **fields)

    def tokenizer(self) -> Any:
        """Return the tokenizer that the metadata describes."""
        from transformers import PreTrainedTokenizerFast

        try:
            return usable(
                PreTrainedTokenizerFast.from_pretrained(
                    self.path.parent, gguf_file=self.path.name, local_files_only=True
                )
            )
        except Exception as error:  # the library of tokenizers raises plain ones
            reason = first_line(error)
            raise SourceError(f"{self.path} has no usable tokenizer: {reason}") from error

    def write_side_files(self, folder: Path) -> None:
        """Write the tokenizer, its chat template and generation_config.json."""
        from transformers import GenerationConfig

        tokenizer = self.tokenizer()
        tokenizer.save_pretrained(folder)
        GenerationConfig.from_model_config(self.config()).save_pretrained(folder)

    def load_model(self, dtype: torch.dtype) -> Any:
        """Load the whole model, dequantized, through transformers."""
        from transformers import AutoModelForCausalLM, GgufConfig

        try:
            return AutoModelForCausalLM.from_pretrained(
                self.path.parent,
                gguf_file=self.path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=dtype,
                local_files_only=True,
            )
        except Exception as error:  # its readers of a header raise of every kind
            reason = first_line(error)
            raise SourceError(f"{self.path} cannot be loaded by transformers: {reason}") from error

    def scan(self, advance: Callable[[], None]) -> None:
        """Do nothing: a block format is checked when it is dequantized, in `tensor`."""
        for _ in self.names:
            advance()

    @property
    def _is_plain(self) -> bool:
        return self._file.architecture in PLAIN_ARCHITECTURES

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        """All tensors at once, for architectures that need conversion beyond renaming."""
        model = self.load_model(torch.bfloat16)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        return {name: value for name, value in model.state_dict().items() if name not in tied}

    @cached_property
    def _gguf_names(self) -> dict[str, str]:
        """{Hugging Face name: GGUF name} of every tensor of the file."""
        from accelerate import init_empty_weights
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
        from transformers import AutoModelForCausalLM

        try:
            with init_empty_weights():
                skeleton = AutoModelForCausalLM.from_config(self.config())
        except Exception as error:  # sizes that do not go together
            reason = first_line(error)
            raise SourceError(f"{self.path} has metadata of no usable model: {reason}") from error
        kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        table = get_tensor_name_map(
            kinds[self._file.architecture], self.config_dict["num_hidden_layers"]
        )
        names = {}
        for name in skeleton.state_dict():
            module, _, leaf = name.rpartition(".")
            stored = f"{table.get_name(module)}.{leaf}"
            if stored in self._file.tensors:
                names[name] = stored
        unused = self._file.tensors.keys() - names.values()
        # llama.cpp stores rotary factors that the config already describes.
        unknown = sorted(name for name in unused if not name.startswith("rope_"))
        if unknown:
            raise SourceError(f"{self.path} has tensor {unknown[0]} that its architecture lacks")
        return names

    @cached_property
    def _processor(self) -> Any:
        """What undoes llama.cpp's own changes to a tensor (head order, norm offset)."""
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        kind = TENSOR_PROCESSORS.get(self._file.architecture, TensorProcessor)
        return kind(config=self.config_dict)

    def _read(self, gguf_name: str) -> Tensor:
        try:
            weights = self._file.read(gguf_name)
            values = self._processor.process(weights=weights, name=gguf_name).weights
        except (ValueError, TypeError, ZeroDivisionError, NotImplementedError) as error:
            reason = first_line(error)
            raise SourceError(
                f"{self.path}: tensor {gguf_name} cannot be read: {reason}"
            ) from error
        return torch.tensor(values).to(torch.bfloat16)

    def _read_config(self) -> dict[str, Any]:
        try:
            fields = self._plain_config() if self._is_plain else self._transformers_config()
            check_sizes(fields, self.path)
            return self._completed(fields)
        except QuantKitError:
            raise
        except Exception as error:  # checks of a config raise of every kind
            reason = first_line(error)
            raise SourceError(f"{self.path} has metadata of no usable config: {reason}") from error

    def _plain_config(self) -> dict[str, Any]:
        from transformers.integrations import GGUF_CONFIG_MAPPING

        kind, metadata = self._file.architecture, self._file.metadata
        config: dict[str, Any] = {"model_type": "gemma3_text" if kind == "gemma3" else kind}
        for key, field in GGUF_CONFIG_MAPPING[kind].items():
            if field and f"{kind}.{key}" in metadata:
                config[field] = metadata[f"{kind}.{key}"]
        config.setdefault("vocab_size", len(metadata["tokenizer.ggml.tokens"]))
        for special in ("bos", "eos", "padding"):
            if (value := metadata.get(f"tokenizer.ggml.{special}_token_id")) is not None:
                config[f"{special.replace('padding', 'pad')}_token_id"] = value
        config["tie_word_embeddings"] = "output.weight" not in self._file.tensors
        return config

    def _transformers_config(self) -> dict[str, Any]:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True
            )
        except Exception as error:  # its readers of a header raise of every kind
            reason = first_line(error)
            raise SourceError(f"{self.path} cannot be read by transformers: {reason}") from error
        fields: dict[str, Any] = config.to_dict()
        return fields

    @staticmethod
    def _completed(fields: dict[str, Any]) -> dict[str, Any]:
        """Return config.json as transformers would write it for these fields."""
        from transformers import AutoConfig, AutoModelForCausalLM

        kind = fields["model_type"]
        rest = {key: value for key, value in fields.items() if key != "model_type"}
        config = AutoConfig.for_model(kind, **rest)
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.dtype = torch.bfloat16
        complete: dict[str, Any] = config.to_diff_dict()
        complete.pop("_name_or_path", None)
        return complete
