"""A served model, asked through the harness's own models for OpenAI-compatible servers.

Those take what a server leaves out for zero; the classes here refuse it instead, because many
servers do not give the log-probabilities of a prompt. Importing this needs `lm_eval`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.models.utils import resolve_max_length

from quantkit.calibrate.tokenize import special_prefix
from quantkit.errors import QuantKitError, UnsupportedError, nearest
from quantkit.evaluate.sides import CHAT

COMPLETIONS = "/completions"
TIMEOUT = 10
"""Seconds to wait for a server's list of models."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and one of its models. `max_length` is None where the server does not say."""

    url: str  # up to and without /completions
    chat: bool
    model: str
    max_length: int | None

    @property
    def description(self) -> str:
        """For people."""
        return f"{self.model} at {self.url}{CHAT if self.chat else COMPLETIONS}"


def find_endpoint(url: str, model: str | None) -> Endpoint:
    """Ask a server for its models; an address that ends in /chat/completions is asked in messages.

    Raises QuantKitError if nothing answers there or if the model is not served.
    """
    if not url.startswith(("http://", "https://")):
        raise UnsupportedError(
            f"--endpoint {url!r} is no address; give one like http://host:8000/v1"
        )
    base = url.rstrip("/")
    chat = base.endswith(CHAT)
    base = base.removesuffix(CHAT).removesuffix(COMPLETIONS)
    served = _served(base)
    if model is None:
        if served is None or len(served) != 1:
            known = "does not list its models" if served is None else f"serves {_names(served)}"
            raise UnsupportedError(f"{base} {known}; say which with --model NAME")
        (model,) = served
    elif served is not None and model not in served:
        raise UnsupportedError(
            f"{base} does not serve {model!r}{nearest(model, served)}; it serves {_names(served)}"
        )
    return Endpoint(base, chat, model, (served or {}).get(model))


def open_endpoint(
    endpoint: Endpoint,
    tokenizer: str | Path,
    concurrent: int,
    chat_template: bool,
    trust_remote_code: bool,
) -> Any:
    """Return the harness's model for a server.

    `tokenizer` is a folder or Hub id; where a task's text is cut and where a continuation begins is
    found here, with the server's own tokens.
    """
    common = {
        "model": endpoint.model,
        "num_concurrent": concurrent,
        "batch_size": 1,
        "max_retries": 3,
    }
    if endpoint.chat:
        return ServedChat(base_url=endpoint.url + CHAT, **common)
    from transformers import AutoConfig, AutoTokenizer

    options = {"trust_remote_code": trust_remote_code, "local_files_only": Path(tokenizer).is_dir()}
    try:
        words = AutoTokenizer.from_pretrained(str(tokenizer), **options)
        config = AutoConfig.from_pretrained(str(tokenizer), **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise QuantKitError(f"{tokenizer} has no tokenizer and config.json: {reason}") from error
    limit = resolve_max_length(config, words)
    return ServedCompletions(
        base_url=endpoint.url + COMPLETIONS,
        tokenizer=str(tokenizer),
        tokenizer_backend="huggingface",
        max_length=min(limit, endpoint.max_length or limit),
        add_bos_token=_adds_bos(words, chat_template),
        trust_remote_code=trust_remote_code,
        **common,
    )


class ServedCompletions(LocalCompletionsAPI):  # type: ignore[misc]
    """The harness's `local-completions`. `empty` counts answers without text."""

    empty = 0

    @staticmethod
    def parse_logprobs(
        outputs: Any,
        tokens: Sequence[Sequence[int]] | None = None,
        ctxlens: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Return (log p, is greedy) per prompt; raises UnsupportedError where numbers are missing.

        The prompt's tokens are followed by the one that every request makes the server add.
        """
        choices = [choice for output in _listed(outputs) for choice in _choices(output)]
        prompts = tokens or ()
        if len(choices) != len(prompts):
            raise UnsupportedError(f"{len(prompts)} prompts got {len(choices)} answers")
        for output in _listed(outputs):
            ordered = sorted(_choices(output), key=lambda choice: int(choice["index"]))
            for choice, prompt in zip(ordered, prompts, strict=False):
                _check_log_probabilities(choice, len(prompt))
        found: list[tuple[float, bool]] = LocalCompletionsAPI.parse_logprobs(
            outputs=outputs, tokens=tokens, ctxlens=ctxlens
        )
        return found

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        """Return the texts; raises UnsupportedError where there is none."""
        for output in _listed(outputs):
            for choice in _choices(output):
                if not isinstance(choice.get("text"), str):
                    raise UnsupportedError(f"the server answered without text: {_short(output)}")
        texts: list[str] = LocalCompletionsAPI.parse_generations(outputs)
        self.empty += texts.count("")
        return texts


class ServedChat(LocalChatCompletion):  # type: ignore[misc]
    """The harness's `local-chat-completions`. `empty` counts answers without text."""

    empty = 0

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        """Return the texts; a message without content is an empty one."""
        for output in _listed(outputs):
            for choice in _choices(output):
                message = choice.get("message")
                if not isinstance(message, Mapping) or "content" not in message:
                    raise UnsupportedError(
                        f"the server answered without a message: {_short(output)}"
                    )
        texts = [text or "" for text in super().parse_generations(outputs, **kwargs)]
        self.empty += texts.count("")
        return texts

    def loglikelihood(self, requests: Any, **kwargs: Any) -> Any:
        """Refuse: chat answers have no log-probabilities of a given text."""
        raise UnsupportedError(
            "this task compares likelihoods, which chat completions do not have; give an "
            "--endpoint that ends in /v1"
        )


def _served(base: str) -> dict[str, int | None] | None:
    """Return the models of a server and their contexts; None where it does not list them."""
    key = os.environ.get("OPENAI_API_KEY", "")
    try:
        answer = requests.get(
            f"{base}/models", headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT
        )
        if answer.status_code in (401, 403):
            raise QuantKitError(f"{base} refuses access; set OPENAI_API_KEY")
        listed = answer.json()["data"] if answer.ok else None
        if not listed:
            return None
        return {str(each["id"]): each.get("max_model_len") for each in listed}
    except requests.JSONDecodeError:
        return None
    except (KeyError, TypeError, AttributeError):
        return None
    except requests.RequestException as error:
        raise QuantKitError(
            f"nothing answers at {base} ({type(error).__name__}); is the server running?"
        ) from error


def _adds_bos(tokenizer: Any, chat_template: bool) -> bool:
    """Return whether texts need the tokenizer's BOS: a chat template may write it itself."""
    if not special_prefix(tokenizer):
        return False
    if not chat_template or not tokenizer.bos_token:
        return True
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    return not str(text).startswith(tokenizer.bos_token)


def _check_log_probabilities(choice: Mapping[str, Any], prompt_tokens: int) -> None:
    given = choice.get("logprobs") or {}
    values, tops = given.get("token_logprobs") or [], given.get("top_logprobs") or []
    complete = len(values) == len(tops) == prompt_tokens + 1
    if complete and all(isinstance(value, (int, float)) for value in values[1:]) and all(tops[1:]):
        return
    raise UnsupportedError(
        f"the server gave {len(values)} log-probabilities for a prompt of {prompt_tokens} tokens "
        "and one more; tasks that compare likelihoods need all of them (echo with logprobs, as "
        "vLLM has it)"
    )


def _listed(outputs: Any) -> list[Any]:
    return outputs if isinstance(outputs, list) else [outputs]


def _choices(output: Any) -> list[Any]:
    choices = output.get("choices") if isinstance(output, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(each, Mapping) for each in choices):
        raise UnsupportedError(f"the server's answer has no choices: {_short(output)}")
    return choices


def _short(output: Any) -> str:
    text = " ".join(str(output).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def _names(served: Mapping[str, Any]) -> str:
    return ", ".join(sorted(served))
