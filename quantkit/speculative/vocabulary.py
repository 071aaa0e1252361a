"""Whether two models mean the same by their token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UnsupportedError
from quantkit.sampling_ops import widen


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens that a drafter can draft: int64 ids [columns], ascending, of `size` in all."""

    token_ids: Tensor
    size: int

    def widen(self, logits: Tensor) -> Tensor:
        """Return logits for all tokens, -inf for those that cannot be drafted.

        Shapes: float32 [rows, columns] -> [rows, size].
        """
        return widen(logits, self.token_ids, self.size)


def token_map(tokenizer: Any) -> dict[int, str]:
    """Return the token of every id that a transformers tokenizer knows."""
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def check_same_tokens(
    target: Mapping[int, str], draft: Mapping[int, str], target_name: str, draft_name: str
) -> None:
    """Raise UnsupportedError, naming the first difference, unless common ids are common tokens.

    Ids that only one of the two has are no difference: vocabularies are padded and cut, and such
    ids are never drafted or never accepted.
    """
    common = sorted(target.keys() & draft.keys())
    for token_id in common:
        if target[token_id] != draft[token_id]:
            raise UnsupportedError(
                f"{draft_name} cannot draft for {target_name}, its tokenizer is another one: token "
                f"{token_id} is {draft[token_id]!r} there and {target[token_id]!r} here; use a "
                "draft model with the same tokenizer"
            )
    if not common:
        raise UnsupportedError(
            f"{draft_name} cannot draft for {target_name}: their tokenizers have no token id in "
            "common; use a draft model with the same tokenizer"
        )


def fit_logits(logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits for the ids of another vocabulary: -inf for ids that these do not have.

    Shapes: float32 [rows, any] -> [rows, vocab_size].
    """
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
