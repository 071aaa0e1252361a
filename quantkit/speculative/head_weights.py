"""The drafter head on disk and in memory: its sizes, its tensors, 8-bit matrices.

A folder has `model.safetensors` and `quantkit.json`. The target's embedding and output head are not
copied there: they are read from the target's checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.numerics import E4M3, amax_to_scale, dequantize, quantize, tile_amax
from quantkit.runtime.logits_rule import LogitsRule
from quantkit.runtime.shapes import parse_config
from quantkit.shards import ShardReader, ShardWriter, read_json, write_json
from quantkit.staging import MARKER, StagedFolder, check_destination

KEY = "draft_head"
"""In `quantkit.json`: this folder is a drafter head."""
FOLDER = "draft"
"""Where `--draft auto` looks, inside the checkpoint."""
MATRICES = ("input", "qkv", "out", "gate_up", "down")
NORMS = ("hidden_norm", "token_norm", "input_norm", "post_norm", "norm")

Weights = dict[str, Tensor]
"""Float tensors by name: MATRICES [out, in], NORMS [hidden]."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a drafter head; the first two are the target's."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries = self.num_heads * self.head_dim
        rows = queries + 2 * self.num_kv_heads * self.head_dim
        matrices = [
            (hidden, 2 * hidden),
            (rows, hidden),
            (hidden, queries),
            (2 * inner, hidden),
            (hidden, inner),
        ]
        return dict(zip(MATRICES, matrices, strict=True)) | dict.fromkeys(NORMS, (hidden,))


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """What a head shares with its target. Shapes: embedding and output [vocab, hidden_size]."""

    embedding: Tensor
    output: Tensor
    logits: LogitsRule = field(default_factory=LogitsRule)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> TargetEnds:
        """Read them from a checkpoint; raises CheckpointError if it names them otherwise."""
        embedding, output = "model.embed_tokens", "lm_head"
        if f"{embedding}.weight" not in checkpoint:
            raise CheckpointError(f"{checkpoint.path} has no {embedding}.weight to draft with")
        matrix = _plain(checkpoint, embedding)
        tied = f"{output}.weight" not in checkpoint
        rule = LogitsRule.of(parse_config(checkpoint.config))
        return cls(matrix, matrix if tied else _plain(checkpoint, output), rule)


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A trained head. `token_ids` are those it can draft, int64 [draft vocabulary], ascending."""

    shape: HeadShape
    weights: Weights
    token_ids: Tensor
    report: Mapping[str, Any]

    def save(self, folder: Path) -> Path:
        """Write the folder, complete or not at all; the matrices as E4M3 with a scale per row."""
        check_head_destination(folder)
        with StagedFolder(folder) as stage:
            writer = ShardWriter(stage.path)
            for name in NORMS:
                writer.add(f"{name}.weight", self.weights[name].float())
            for name in MATRICES:
                codes, scale = quantize_rows(self.weights[name])
                writer.add(f"{name}.weight", codes)
                writer.add(f"{name}.weight_scale", scale)
            writer.add("token_ids", self.token_ids.int())
            writer.finish()
            content = {"shape": asdict(self.shape), "report": dict(self.report)}
            write_json(stage.path / MARKER, {KEY: content})
            return stage.commit()

    @classmethod
    def load(cls, folder: Path) -> DraftHead:
        """Read a folder; raises CheckpointError if it is damaged."""
        content = read_json(folder / MARKER)[KEY]
        names = {each.name for each in fields(HeadShape)}
        shape = HeadShape(**{name: content["shape"][name] for name in names})
        reader = ShardReader(folder)
        weights: Weights = {name: reader.tensor(f"{name}.weight").float() for name in NORMS}
        for name in MATRICES:
            codes, scale = reader.tensor(f"{name}.weight"), reader.tensor(f"{name}.weight_scale")
            weights[name] = dequantize(codes, scale, E4M3, (1, codes.shape[1]))
        for name, expected in shape.shapes().items():
            if tuple(weights[name].shape) != expected:
                raise CheckpointError(
                    f"{folder}: {name} has shape {list(weights[name].shape)}, expected "
                    f"{list(expected)}; train the drafter again with 'quantkit draft'"
                )
        return cls(shape, weights, reader.tensor("token_ids").long(), content["report"])


def _plain(checkpoint: Checkpoint, module: str) -> Tensor:
    """Return a weight as it is, or in 16 bits if it is stored in 8."""
    if module in checkpoint.quantized:
        return checkpoint.weight(module).dequantize(torch.bfloat16)
    return checkpoint.tensor(f"{module}.weight")


def is_head(folder: Path) -> bool:
    """Return whether a folder holds a drafter head."""
    return (folder / MARKER).exists() and KEY in read_json(folder / MARKER)


def check_head_destination(folder: Path) -> None:
    """Raise CheckpointError unless `folder` is new, empty, or an earlier head."""
    check_destination(folder)
    if (folder / MARKER).exists() and not is_head(folder):
        raise CheckpointError(f"{folder} is a checkpoint, not a drafter; choose another output")


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes and the scale of each row. Shapes: [N, K] -> [N, K], float32 [N, 1]."""
    tile = (1, weight.shape[1])
    scale = amax_to_scale(tile_amax(weight.float(), tile), E4M3)
    return quantize(weight.float(), scale, E4M3, tile), scale


def rotation_frequencies(shape: HeadShape) -> Tensor:
    """Return radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    return 1.0 / shape.rope_theta**exponents
