"""What a target is asked to write about when a drafter head is to learn from it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from quantkit.runtime.model import Fp8Model
from quantkit.speculative.head_questions import own_questions

TASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a letter to a friend about {}.",
    "List ten facts about {}.",
    "Describe the history of {}.",
    "Write a conversation between two people about {}.",
    "How would you teach somebody about {}?",
    "Summarize what is known about {} in one paragraph.",
    "Write a poem about {}.",
    "What questions should I ask about {}?",
    "Give step by step instructions that have to do with {}.",
    "Compare {} with something similar.",
    "Write a Python function that has to do with {}, with comments.",
    "Write a newspaper article about {}.",
    "Make a table of terms about {} and what they mean.",
    "What do most people get wrong about {}?",
    "Imagine a world without {}. What would be different?",
    "Write an e-mail to a colleague that mentions {}.",
    "Write a product description for something that has to do with {}.",
)
TOPICS = (
    "bread", "the moon", "bicycles", "volcanoes", "public libraries", "electric cars", "chess",
    "the Roman Empire", "honey bees", "gravity", "cooking rice", "learning a language", "rivers",
    "the stock market", "gardening", "sleep", "earthquakes", "photography", "trains", "vaccines",
    "the French Revolution", "computers", "sorting numbers", "good manners", "mountain climbing",
    "the water cycle", "painting a house", "jazz", "whales", "renewable energy", "tea", "taxes",
    "the human heart", "football", "deserts", "job interviews", "black holes", "wood", "bridges",
    "email", "old age", "the printing press", "dinosaurs", "time zones", "friendship", "coffee",
    "databases", "the Amazon rainforest", "a lost dog", "birthdays", "glass", "insurance",
    "online shopping", "fractions", "climate", "museums", "knitting", "robots", "salt", "maps",
    "regular expressions", "hospitals", "camping", "democracy", "a broken computer", "wolves",
)  # fmt: skip
EXCERPT_CHARACTERS = (80, 500)
"""Shortest and longest excerpt that is given to go on from."""
MOST_TOKENS = 160
"""A prompt is cut to so many."""
KINDS = ("free", "question", "excerpt", "question", "task", "question", "excerpt", "question")
"""Prompts take these in turn."""


def head_prompts(model: Fp8Model, texts: Sequence[str], seed: int) -> Iterator[list[int]]:
    """Yield prompts without end, as token ids.

    They are questions that the target asks itself, excerpts of `texts`, built-in tasks, and nothing
    at all, from where the target begins as it likes. Without texts there are more questions; where
    the tokenizer has no chat template there are more tasks, and these are plain text.
    """
    generator = random.Random(seed)
    most = min(MOST_TOKENS, model.engine.max_context // 2)
    tasks = _tasks(model, generator)
    questions = own_questions(model, seed) if model.tokenizer.chat_template else tasks
    excerpts = _excerpts(model, texts, generator) if texts else questions
    sources = {"excerpt": excerpts, "question": questions, "task": tasks}
    for kind in itertools.cycle(KINDS):
        ids = model.encode("") if kind == "free" else next(sources[kind])
        if ids:
            yield ids[:most]


def _tasks(model: Fp8Model, generator: random.Random) -> Iterator[list[int]]:
    """Yield every task about every topic, and then all of them again."""
    pairs = list(itertools.product(TASKS, TOPICS))
    generator.shuffle(pairs)
    for task, topic in itertools.cycle(pairs):
        text = task.format(topic)
        if model.tokenizer.chat_template:
            yield model.encode_chat([{"role": "user", "content": text}])
        else:
            yield model.encode(f"{text}\n\n")


def _excerpts(
    model: Fp8Model, texts: Sequence[str], generator: random.Random
) -> Iterator[list[int]]:
    """Yield pieces of texts, each beginning at a word; longer texts are used more."""
    lengths = [len(text) for text in texts]
    while True:
        (text,) = generator.choices(texts, lengths)
        start = generator.randrange(len(text))
        start = text.find(" ", start) + 1  # 0, the beginning, if no word begins after it
        yield model.encode(text[start : start + generator.randint(*EXCERPT_CHARACTERS)])
