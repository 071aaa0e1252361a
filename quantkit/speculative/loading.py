"""From the word or path a user gives to a drafter for a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CheckpointError, UnsupportedError, nearest
from quantkit.runtime.loading import load_engine
from quantkit.runtime.model import Fp8Model
from quantkit.speculative.drafter import Drafter
from quantkit.speculative.head_drafter import SOURCE, HeadDrafter
from quantkit.speculative.head_weights import FOLDER, DraftHead, TargetEnds, is_head
from quantkit.speculative.hybrid import HybridDrafter
from quantkit.speculative.model_drafter import ModelDrafter
from quantkit.speculative.suffix import SuffixDrafter
from quantkit.speculative.vocabulary import check_same_tokens, token_map

NAMES = ("none", "suffix", "auto")
"""Drafts that are no path."""


def check_draft(draft: str | Path) -> None:
    """Raise UnsupportedError unless `draft` is a known word or an existing folder."""
    if str(draft) not in NAMES and not Path(draft).is_dir():
        hint = nearest(str(draft), NAMES)
        raise UnsupportedError(
            f"draft {str(draft)!r} is neither {', '.join(NAMES)} nor a folder{hint}; give one of "
            "these or the folder of a smaller checkpoint"
        )


def load_drafter(draft: str | Path, target: Fp8Model, texts: Sequence[str] = ()) -> Drafter | None:
    """Return what drafts for `target`; None for "none".

    `texts` are what outputs may repeat, for drafters that look for repetitions. Raises
    UnsupportedError on a draft that is not known or has another tokenizer.
    """
    check_draft(draft)
    if draft == "none":
        return None
    if draft == "auto":
        trained = target.path / FOLDER
        suffix = _suffix_drafter(target, texts)
        if not is_head(trained):
            return suffix
        return HybridDrafter(suffix, load_head_drafter(trained, target), SOURCE)
    if draft == "suffix":
        return _suffix_drafter(target, texts)
    path = Path(draft)
    return load_head_drafter(path, target) if is_head(path) else load_model_drafter(path, target)


def _suffix_drafter(target: Fp8Model, texts: Sequence[str]) -> Drafter:
    return SuffixDrafter([target.encode(text) for text in texts])


def load_head_drafter(path: Path, target: Fp8Model) -> Drafter:
    """Return a drafter that runs the head at `path`."""
    ends = TargetEnds.read(open_checkpoint(target.path))
    return HeadDrafter(DraftHead.load(path), ends, target.engine)


def load_model_drafter(path: Path, target: Fp8Model) -> Drafter:
    """Return a drafter that runs the checkpoint at `path`, on the target's device."""
    engine = load_engine(path, device=str(target.engine.device))
    drafting = Fp8Model(engine, path)
    for model in (target, drafting):
        if not model.has_tokenizer:
            raise CheckpointError(
                f"{model.path} has no tokenizer, so whether {path} can draft for {target.path} is "
                "not known; copy the source model's tokenizer files there"
            )
    names = str(target.path), str(path)
    check_same_tokens(token_map(target.tokenizer), token_map(drafting.tokenizer), *names)
    return ModelDrafter(engine)
