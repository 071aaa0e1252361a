"""Rules on the files beside the weights: tokenizer, chat template, generation settings."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.lint.documents import whole_number
from quantkit.lint.engines import ENGINES, SERVERS, TRANSFORMERS
from quantkit.lint.finding import Finding, note, warning
from quantkit.lint.folder import CONFIG_NAME, GENERATION_NAME, TOKENIZER_CONFIG_NAME
from quantkit.lint.subject import Subject

COPY = "copy it from the original"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "typical_p": 1.0}
"""Settings of sampling, and the values that mean nothing."""


def tokenizer(subject: Subject) -> Iterator[Finding]:
    """Servers read the tokenizer from the same folder, unless told otherwise."""
    files = subject.folder.files
    has_one = any(name in files for name in TOKENIZERS)
    if not has_one and not any(name.endswith(".tiktoken") for name in files):
        problem = "is not there, nor another tokenizer: no text goes in or out"
        yield warning("tokenizer-missing", ENGINES, TOKENIZERS[0], problem, COPY)
    elif TOKENIZER_CONFIG_NAME not in files and "tekken.json" not in files:
        problem = "is not there: special tokens are guessed"
        yield warning("tokenizer-config", ENGINES, TOKENIZER_CONFIG_NAME, problem, COPY)
    if TOKENIZER_CONFIG_NAME in subject.folder.unreadable:
        problem = subject.folder.unreadable[TOKENIZER_CONFIG_NAME]
        yield warning("tokenizer-config", ENGINES, TOKENIZER_CONFIG_NAME, problem, COPY)


def chat_template(subject: Subject) -> Iterator[Finding]:
    """Chat endpoints need one; models without instruction tuning have none."""
    folder = subject.folder
    names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    is_inside = folder.documents.get(TOKENIZER_CONFIG_NAME, {}).get("chat_template")
    if not is_inside and not any(name in folder.files for name in names):
        problem = "is not there, and tokenizer_config.json has none: no chat endpoint"
        advice = "copy it, if the original has one"
        yield note("chat-template", SERVERS, names[0], problem, advice)


def processor(subject: Subject) -> Iterator[Finding]:
    """Models that see or hear need their preprocessor's settings."""
    config, files = subject.folder.config, subject.folder.files
    sees = any(key in config for key in ("vision_config", "audio_config"))
    if sees and not any(name in files for name in PROCESSORS):
        problem = "is not there, and the model takes images or sound"
        yield warning("processor-missing", ENGINES, PROCESSORS[0], problem, COPY)


def generation_config(subject: Subject) -> Iterator[Finding]:
    """transformers: generation/configuration_utils.py, validate; older versions refuse to save.

    transformers 5.24 saves what it loaded unchanged, with a warning (save_pretrained).
    """
    folder = subject.folder
    if GENERATION_NAME in folder.unreadable:
        problem = f"{folder.unreadable[GENERATION_NAME]}: defaults are used"
        yield warning("generation-config", ENGINES, GENERATION_NAME, problem, COPY)
        return
    settings = folder.documents.get(GENERATION_NAME)
    if settings is None:
        problem = "is not there: engines use their own defaults"
        yield note("generation-config", ENGINES, GENERATION_NAME, problem, COPY)
        return
    for key, neutral in SAMPLING.items():
        value = settings.get(key)
        if settings.get("do_sample") is not True and value is not None and value != neutral:
            problem = f"is {value!r} without do_sample: older transformers refuse to save the model"
            place, advice = f"{GENERATION_NAME}: {key}", "set do_sample to true, or remove it"
            yield warning("generation-sampling", (TRANSFORMERS,), place, problem[:200], advice)


def end_of_text(subject: Subject) -> Iterator[Finding]:
    """Without an end-of-text token nothing stops but the limit of tokens."""
    folder = subject.folder
    settings = (folder.documents.get(GENERATION_NAME, {}), folder.config, folder.text_config)
    found = [value.get("eos_token_id") for value in settings]
    if not any(whole_number(value) is not None or isinstance(value, list) for value in found):
        problem = f"is in neither {GENERATION_NAME} nor {CONFIG_NAME}: generation does not stop"
        yield warning("no-eos", ENGINES, "eos_token_id", problem, COPY)


RULES = (tokenizer, chat_template, processor, generation_config, end_of_text)
