"""The lm-evaluation-harness's model interface on our runtime.

Tokenization, windows and truncation are those of the harness's own adapter for transformers, so
that both give the same log-likelihoods for the same weights. Importing this needs `lm_eval`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, resolve_max_length
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quantkit.calibrate.progress import Phase
from quantkit.errors import DataError, UnsupportedError
from quantkit.evaluate.continuations import ContinuationScorer, Question
from quantkit.runtime.model import Fp8Model
from quantkit.runtime.params import SamplingParams

Scored = tuple[Any, list[int], list[int]]
"""A request of the harness: its strings, the tokens of the context, and of the continuation."""

MAX_GEN_TOKS = 256
"""New tokens where a task does not say; the harness's own default."""

MAX_STEPS = 20
"""Progress reports of one kind of request, at most."""

PASSED_ON = ("top_k", "top_p", "min_p", "repetition_penalty")
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
"""A task says how to sample; a model's own defaults would change what it measures."""


class QuantkitLM(TemplateLM):  # type: ignore[misc]
    """An Fp8Model as the harness sees it.

    `batch_size` sequences run together; `progress` is where it is shown, if at all. `longest` is
    the longest sequence so far, in tokens, and `truncated` counts the requests that were cut to the
    context, from the left.
    """

    def __init__(
        self,
        model: Fp8Model,
        batch_size: int = 8,
        seed: int = 0,
        progress: TextIO | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = model.tokenizer
        self.longest = 0
        self.truncated = 0
        self.batch_size = batch_size
        self._model = model
        self._seed = seed
        self._progress = progress
        limit = resolve_max_length(model.config, self.tokenizer)
        self.max_length = min(model.engine.max_context, limit)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS, or EOS if there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return token ids, with the special tokens that the tokenizer adds, but never two BOS."""
        options = {}
        if add_special_tokens is None and has_bos_prefix(
            string, self.tokenizer.decode(self.prefix_token_id)
        ):
            add_special_tokens = False
        if add_special_tokens is not None:
            options["add_special_tokens"] = add_special_tokens
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text; a template without system messages loses those."""
        from jinja2 import TemplateError

        def render(messages: list[dict[str, str]]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        try:
            return render(chat_history)
        except TemplateError:
            return render([message for message in chat_history if message["role"] != "system"])

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Return log p(continuation | context) and whether it is the greedy one, per request."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return log p of whole texts, read in windows of the model's context."""
        windows: list[Scored] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score tokens. Requests with one context are one question; neighbours begin alike."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            by_context.setdefault(self._cut(context, continuation), []).append(number)
        contexts = sorted(by_context)
        scorer = ContinuationScorer(self._model.engine, min(self.batch_size, max(len(contexts), 1)))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with self._phase("log-likelihoods", len(contexts)) as batches:
            for start, end in batches:
                batch = contexts[start:end]
                questions = [
                    Question(context, [requests[n][2] for n in by_context[context]])
                    for context in batch
                ]
                for asked, found in zip(batch, scorer.score(questions), strict=True):
                    for number, one in zip(by_context[asked], found, strict=True):
                        answers[number] = (one.log_probability, one.is_greedy)
        return answers

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[int, ...]:
        """Return what fits of a context: the last token of a continuation is not read."""
        if not 0 < len(continuation) <= self.max_length or not context:
            raise DataError(
                f"a task asks for the likelihood of {len(continuation)} tokens after "
                f"{len(context)}; it must be 1 to {self.max_length} (the model's context) after at "
                "least 1"
            )
        self._check_ids([*context, *continuation])
        kept = tuple(context[-(self.max_length + 1 - len(continuation)) :])
        self.truncated += len(kept) < len(context)
        self.longest = max(self.longest, len(kept) + len(continuation))
        return kept

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return what the model writes after every context, up to a stop string."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            options = requests[numbers[0]].args[1]
            prompts = [requests[number].args[0] for number in numbers]
            for number, text in zip(numbers, self._generate(prompts, options), strict=True):
                texts[number] = text
        return texts

    def _generate(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        params = self._params(options)
        prompts = [self._prompt(context, params) for context in contexts]
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        texts = [""] * len(prompts)
        with self._phase("answers", len(prompts)) as batches:
            for start, end in batches:
                numbers = order[start:end]
                # Noise depends on the place in a batch; another seed keeps batches independent.
                completions = self._model.generate_ids(
                    [prompts[number] for number in numbers], params, seed=self._seed + start
                )
                for number, completion in zip(numbers, completions, strict=True):
                    texts[number] = completion.text or ""
        return texts

    def _prompt(self, context: str, params: SamplingParams) -> list[int]:
        """Return the last tokens of a context that leave room for the answer."""
        new = params.max_new_tokens or 0
        room = self.max_length - new
        if room < 1:
            raise UnsupportedError(
                f"a task asks for up to {new} new tokens, and the model's context is "
                f"{self.max_length}; it must be longer"
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        self._check_ids(ids)
        self.truncated += len(ids) > room
        self.longest = max(self.longest, min(len(ids), room) + new)
        return ids[-room:]

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        """Translate a task's generation options; raises UnsupportedError on an unknown one."""
        known = dict(normalize_gen_kwargs(dict(options), MAX_GEN_TOKS))
        sampled = bool(known.pop("do_sample"))
        temperature = float(known.pop("temperature", 1.0 if sampled else 0.0))
        stop = [text for text in known.pop("until") if text]
        values: dict[str, Any] = {**NEUTRAL, "max_new_tokens": known.pop("max_gen_toks")}
        values |= {name: known.pop(name) for name in PASSED_ON if name in known}
        if known:
            raise UnsupportedError(
                f"a task sets {next(iter(known))!r} for generation, which quantkit does not have"
            )
        return SamplingParams(
            temperature=temperature if sampled else 0.0,
            stop=stop,
            stop_token_ids=[self.eot_token_id],
            **values,
        )

    def _check_ids(self, ids: Sequence[int]) -> None:
        if max(ids) >= self._model.engine.vocab_size:
            raise UnsupportedError(
                f"the tokenizer gives token {max(ids)}, and the model's vocabulary has "
                f"{self._model.engine.vocab_size}; the tokenizer belongs to another model"
            )

    @contextmanager
    def _phase(self, kind: str, total: int) -> Iterator[Iterator[tuple[int, int]]]:
        """Give the batches of `total` items, as (start, end), and show progress meanwhile."""
        starts = range(0, total, self.batch_size)
        every = max(1, -(-len(starts) // MAX_STEPS))

        def batches(phase: Phase) -> Iterator[tuple[int, int]]:
            for number, start in enumerate(starts, start=1):
                yield start, min(start + self.batch_size, total)
                if number % every == 0 or number == len(starts):
                    phase.advance(f"{min(start + self.batch_size, total)} of {total}")

        steps = -(-len(starts) // every)
        # Not what stderr is now: the harness's own output is kept off it.
        with (
            redirect_stderr(self._progress or sys.stderr),
            Phase(kind, steps, quiet=self._progress is None) as phase,
        ):
            yield batches(phase)
