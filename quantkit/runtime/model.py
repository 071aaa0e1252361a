"""Fp8Model: a quantized checkpoint that writes text. Joins engine, tokenizer and generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, GenerationError, first_line
from quantkit.runtime.drafting import Speculator
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation
from quantkit.runtime.params import ResolvedParams, SamplingParams, sampling_params
from quantkit.runtime.request import Completion
from quantkit.runtime.stats import Stats
from quantkit.runtime.text import TextStream
from quantkit.shards import read_json
from quantkit.tokenizer_check import usable

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""A folder with none of these has no tokenizer."""


class Fp8Model:
    """A loaded checkpoint; made by `quantkit.load_fp8`.

    `stats` are the counters of the last call. Sampling options are the fields of SamplingParams,
    given as one object, as keywords, or both (keywords win). `speculator` is who drafts, if anyone
    does; with a `width` every decoding pass runs that many rows of one sequence, see Generation.
    """

    def __init__(
        self,
        engine: Engine,
        path: Path,
        speculator: Speculator | None = None,
        width: int | None = None,
    ) -> None:
        self.engine = engine
        self.path = path
        self.speculator = speculator
        self.width = width
        self.stats = Stats()

    @cached_property
    def config(self) -> Any:
        """The model's transformers configuration."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path, local_files_only=True)

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer; raises CheckpointError if it has none that loads."""
        if not self.has_tokenizer:
            raise CheckpointError(
                f"{self.path} has no tokenizer; copy the source model's tokenizer files there, or "
                "use generate_ids"
            )
        from transformers import AutoTokenizer

        try:
            return usable(AutoTokenizer.from_pretrained(self.path, local_files_only=True))
        except Exception as error:  # the library of tokenizers raises plain ones
            reason = first_line(error)
            raise CheckpointError(f"cannot load the tokenizer of {self.path}: {reason}") from error

    @property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint folder holds a tokenizer."""
        return any((self.path / name).exists() for name in TOKENIZER_FILES)

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """Generation defaults: generation_config.json, token ids missing there from config.json."""
        listed: dict[str, Any] = {}
        if (self.path / "generation_config.json").exists():
            listed = read_json(self.path / "generation_config.json")
        config = read_json(self.path / "config.json")
        text_config = config.get("text_config") or {}
        for name in ("bos_token_id", "eos_token_id"):
            for source in (config, text_config):
                if listed.get(name) is None:
                    listed[name] = source.get(name)
        return listed

    @overload
    def generate(
        self, prompts: str, params: SamplingParams | None = ..., **options: Any
    ) -> str: ...
    @overload
    def generate(
        self, prompts: Sequence[str], params: SamplingParams | None = ..., **options: Any
    ) -> list[str]: ...
    def generate(
        self, prompts: str | Sequence[str], params: SamplingParams | None = None, **options: Any
    ) -> str | list[str]:
        """Continue one prompt (str in, str out) or several (list in, list out)."""
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        completions = self.generate_ids([self.encode(text) for text in several], params, **options)
        # encode has loaded the tokenizer, so that every completion has text.
        texts = [completion.text or "" for completion in completions]
        return texts[0] if isinstance(prompts, str) else texts

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[str]:
        """Yield the continuation of one prompt, text or token ids, piece by piece.

        The pieces add up to what `generate` returns. Errors are raised here, not at the first
        piece.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        resolved = self._resolve(params, options)
        generation = self._generation([ids], resolved, required=True)
        return (token.text for token in generation.tokens() if token.text)

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Continue prompts given as token ids, of any lengths; returns one Completion each.

        An empty prompt becomes the BOS token if the model has one. There is no padding: every id
        is a token. A checkpoint without a tokenizer gives completions whose text is None.
        """
        resolved = self._resolve(params, options)
        return self._generation(prompts, resolved, required=bool(resolved.stop)).completions()

    def logits(self, input_ids: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Return the logits of whole sequences, without cache: each position predicts the next.

        Shapes: input_ids int64 [batch, seq] -> float32 [batch, seq, vocab].
        """
        ids = torch.as_tensor(input_ids, device=self.engine.device)
        if ids.dim() != 2 or ids.is_floating_point() or ids.numel() == 0:
            raise GenerationError(
                f"input_ids must be non-empty integers [batch, seq], got {list(ids.shape)} "
                f"{ids.dtype}"
            )
        outside = (ids < 0) | (ids >= self.engine.vocab_size)
        if bool(outside.any()):
            raise GenerationError(
                f"input_ids has token {int(ids[outside][0])}, outside the vocabulary of "
                f"{self.engine.vocab_size} tokens"
            )
        if ids.shape[1] > self.engine.max_context:
            raise GenerationError(
                f"input_ids has {ids.shape[1]} tokens a sequence and the model's context is "
                f"{self.engine.max_context}; shorten it"
            )
        with torch.no_grad():
            return self.engine.logits(ids.long())

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the special tokens the tokenizer adds."""
        return self._with_single_bos(list(self.tokenizer(text)["input_ids"]))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, ready for the model's answer.

        `messages` have `role` and `content`. The chat template of the checkpoint is applied; there
        is exactly one BOS token whether or not the template writes it. Raises GenerationError if
        there is no template or it refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise GenerationError(
                f"the tokenizer of {self.path} has no chat template; give a plain prompt instead"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program that came with the model
            raise GenerationError(
                f"the chat template of {self.path}: {first_line(error)}"
            ) from None
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        added_to_plain_text = bos is not None and self.encode("")[:1] == [bos]
        if added_to_plain_text and ids[:1] != [bos]:
            ids = [bos, *ids]
        return self._with_single_bos(ids)

    def _with_single_bos(self, ids: list[int]) -> list[int]:
        """Drop the first of two BOS tokens: one from the tokenizer, one written in the text."""
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _resolve(self, params: SamplingParams | None, options: Mapping[str, Any]) -> ResolvedParams:
        requested = sampling_params(params, options)
        return requested.resolve(self.generation_config, self.engine.vocab_size)

    def _generation(
        self, prompts: Sequence[Sequence[int]], params: ResolvedParams, required: bool
    ) -> Generation:
        """Prepare a generation; text is made when there is a tokenizer or it is `required`."""
        ids = [self._prompt_ids(number, prompt) for number, prompt in enumerate(prompts)]
        new_text = None
        if required or self.has_tokenizer:
            tokenizer = self.tokenizer

            def new_text() -> TextStream:
                return TextStream(tokenizer, params.stop)

        speculation = self.speculator.start(params, len(ids)) if self.speculator else None
        generation = Generation(self.engine, ids, params, new_text, speculation, self.width)
        self.stats = generation.stats
        return generation

    def _prompt_ids(self, number: int, prompt: Sequence[int]) -> list[int]:
        """Return a prompt as plain integers, BOS if it is empty."""
        try:
            ids = [int(token_id) for token_id in prompt]
        except (TypeError, ValueError):
            raise GenerationError(
                f"prompt {number} must be a sequence of token ids, got {prompt!r}"
            ) from None
        bos = self.generation_config.get("bos_token_id")
        if ids or bos is None:
            return ids
        return [int(bos)]
