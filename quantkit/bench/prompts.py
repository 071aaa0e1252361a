"""Prompts to measure drafting on: text that comes back, text that does not, and some of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["copy", "prose", "varied"]

PASSAGE = (
    "The lighthouse at Carrow Point was built in 1864 after three ships were lost on the reef "
    "within one winter. Its keeper, Thomas Hale, lived there with his wife and two daughters for "
    "twenty-six years. Every evening he climbed the one hundred and twelve steps to light the "
    "lamp, and every morning he wrote the weather, the state of the sea and the names of passing "
    "ships into a log book. When the lamp was replaced by an electric one in 1921, the log books "
    "were carried to the county museum, where visitors can still read them today."
)
LETTER = (
    "Dear Ms Alvarez, thank you for your order of 14 March. Unfortunately the blue ceramic lamp "
    "that you chose is out of stock until the end of April. We can send you the green one at once, "
    "or keep your order open until the blue one arrives. Please tell us by Friday which of the two "
    "you would prefer. With kind regards, Daniel Osei, customer service."
)
CODE = '''def moving_average(values, size):
    """Return the means of all windows of `size` values."""
    result = []
    for start in range(len(values) - size + 1):
        window = values[start : start + size]
        total = 0
        for value in window:
            total = total + value
        result.append(total / size)
    return result


def print_report(values, size):
    averages = moving_average(values, size)
    for number, average in enumerate(averages):
        print("window", number, "average", average)
    print("largest", max(averages), "smallest", min(averages))
'''


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked; `kind` says what drafting can expect of the answer."""

    name: str
    kind: Kind
    text: str


PROMPTS = (
    Prompt("repeat-passage", "copy", f"Repeat the following text word for word.\n\n{PASSAGE}"),
    Prompt(
        "rewrite-letter",
        "copy",
        f"Rewrite this letter with 'Ms Alvarez' replaced by 'Mr Brandt', and change nothing else."
        f"\n\n{LETTER}",
    ),
    Prompt(
        "edit-code",
        "copy",
        f"Rename the function moving_average to rolling_mean in this program and print the whole "
        f"program.\n\n{CODE}",
    ),
    Prompt(
        "annotate-code",
        "copy",
        f"Add type hints to this program and print the whole program.\n\n{CODE}",
    ),
    Prompt("story", "prose", "Write a story about a fisherman who finds a letter in a bottle."),
    Prompt("essay", "prose", "Explain why cities grew along rivers."),
    Prompt("advice", "prose", "What should I think of before I adopt a dog?"),
    Prompt("history", "prose", "Describe daily life in a medieval monastery."),
    Prompt("list", "varied", "List twenty countries with their capitals."),
    Prompt("summary", "varied", f"Summarize this text in two sentences.\n\n{PASSAGE}"),
    Prompt(
        "program", "varied", "Write a Python function that checks whether a word is a palindrome."
    ),
    Prompt(
        "arithmetic", "varied", "A train leaves at 9:40 and arrives at 13:05. How long is the trip?"
    ),
    Prompt(
        "json", "varied", "Give three made-up customers as a JSON list with name, city and age."
    ),
    Prompt("dialogue", "varied", "Write a conversation between a baker and a customer."),
)
