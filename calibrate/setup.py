"""What a run needs before any data is read: the model, its plan, and how long its samples are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.data import Samples, effective_seq_len, load_samples
from quantkit.calibrate.estimates import held_bytes, hidden_bytes
from quantkit.calibrate.free_memory import free_bytes
from quantkit.calibrate.output import bytes_of_dtype, peak_bytes
from quantkit.calibrate.plan import Plan, make_plan
from quantkit.calibrate.ranks import ALONE, Ranks
from quantkit.calibrate.recipe import Recipe
from quantkit.calibrate.self_data import generate_samples
from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.source import ModelSource, open_source
from quantkit.errors import DataError, UnsupportedError
from quantkit.shards import MAX_SHARD_BYTES

COMPUTE_DTYPE = torch.bfloat16
"""What layers compute in, whatever the source is stored in, so that the same weights give the same
scales in every dtype. It has the range of float32."""
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens per batch when no batch size is given: what fits a CPU's caches, or fills a GPU."""
DEFAULT_SEQ_LEN = 2048
HIDDEN_SHARE = 0.5
"""Of the free memory: what hidden states may take of it before they live on the disk, and what they
may take with all that is computed of them inside a layer, to be kept there."""
DTYPES = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `calibrate` was asked for, besides model and recipe; see there."""

    data: tuple[str, ...]
    samples: int
    seed: int = 0
    seq_len: int | None = None
    batch_size: int | None = None
    strict_samples: bool = False
    dtype: str = "auto"
    dry_run: bool = False
    resume: bool = False
    chat_template: str | Path | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    progress: bool = True

    def __post_init__(self) -> None:
        """Raise for values that mean nothing."""
        for name in ("samples", "seq_len", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = f"--{name.replace('_', '-')}"
                raise DataError(f"{option} must be at least 1, got {value}")
        if self.dtype not in DTYPES:
            raise UnsupportedError(f"dtype is {self.dtype!r}; known: {', '.join(DTYPES)}")


@dataclass(frozen=True, slots=True)
class Setup:
    """A model that is open, and how it is to be run; nothing is loaded yet.

    `length` is that of a sample in tokens, `batch_size` in samples. `peak_bytes` is what the run
    takes on disk at most, `notes` are for the report.
    """

    source: ModelSource
    skeleton: Skeleton
    tokenizer: Any
    plan: Plan
    length: int
    batch_size: int
    peak_bytes: int
    notes: tuple[str, ...] = ()

    def spills(self, ranks: Ranks, num_tokens: int) -> bool:
        """Whether what this process has of so many tokens is too much to keep in memory."""
        return not self._fits(ranks, hidden_bytes(self.skeleton, num_tokens))

    def holds(self, ranks: Ranks, num_tokens: int) -> bool:
        """Whether there is memory too for what so many tokens carry inside a layer."""
        inside = held_bytes(self.skeleton, self.plan.modules, num_tokens)
        return self._fits(ranks, hidden_bytes(self.skeleton, num_tokens) + inside)

    def _fits(self, ranks: Ranks, num_bytes: int) -> bool:
        """Tell whether this process's share of so many bytes may be kept in memory."""
        device = self.skeleton.device
        free = free_bytes(device)
        sharing = ranks.num_on_this_machine() if device.type == "cpu" else 1
        return free is None or num_bytes // ranks.size <= HIDDEN_SHARE * free / sharing

    def load_samples(self, options: RunOptions) -> Samples | None:
        """Return the calibration samples; None where the recipe needs none."""
        if not self.plan.recipe.needs_data:
            return None
        found = load_samples(
            options.data,
            self.tokenizer,
            num_samples=options.samples,
            seq_len=self.length,
            seed=options.seed,
            chat_template=_read_template(options.chat_template),
            self_generate=partial(generate_samples, self.source),
        )
        if options.strict_samples:
            _check_count(found, options.samples)
        return found


def set_up(
    model: str | Path,
    recipe: Recipe,
    options: RunOptions,
    device: str,
    trust_remote_code: bool,
    ranks: Ranks = ALONE,
) -> Setup:
    """Open a model and plan its run; raises QuantKitError for what cannot be done."""
    source = open_source(model, trust_remote_code)
    skeleton = Skeleton(source, source.config(), COMPUTE_DTYPE, ranks.device(_device(device)))
    reads_data = recipe.needs_data and not options.dry_run
    tokenizer = source.tokenizer() if reads_data else None
    length, note = _sample_length(skeleton, tokenizer, options.seq_len)
    size = options.batch_size or max(1, BATCH_TOKENS[skeleton.device.type] // length)
    if skeleton.has_experts:
        size = 1  # routers and experts would multiply the tokens of all sequences together
    plan = make_plan(skeleton, recipe, options.samples, length, size)
    added = bytes_of_dtype(skeleton, plan, DTYPES[options.dtype])
    plan = replace(plan, target_bytes=plan.target_bytes + added)
    hidden = hidden_bytes(skeleton, options.samples * length if recipe.needs_data else 0)
    peak = peak_bytes(plan.target_bytes, hidden, options.max_shard_bytes)
    return Setup(source, skeleton, tokenizer, plan, length, size, peak, (note,) if note else ())


def _check_count(found: Samples, asked: int) -> None:
    if len(found.ids) < asked:
        reasons = "; ".join(found.warnings) or f"{len(found.ids)} of {asked} samples usable"
        raise DataError(f"{reasons}; give more --data, or ask for fewer --samples")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UnsupportedError(f"device is {name!r}; known: auto, cpu, cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError(f"device {name!r} is not available; use cpu")
    return torch.device(name)


def _sample_length(
    skeleton: Skeleton, tokenizer: Any, seq_len: int | None
) -> tuple[int, str | None]:
    model_limit = getattr(skeleton.model.config.get_text_config(), "max_position_embeddings", None)
    tokenizer_limit = getattr(tokenizer, "model_max_length", None)
    requested = seq_len or DEFAULT_SEQ_LEN
    return effective_seq_len(requested, seq_len is not None, model_limit, tokenizer_limit)


def _read_template(path: str | Path | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read chat template {path}: {error}") from None
