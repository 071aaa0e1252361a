"""A folder of small tasks in the words of the tiny tokenizer: questions, free answers, texts.

`words_mc` 12 multiple-choice questions, `words_gen` 5 free answers, `words_text` 3 texts,
`words_group` the questions twice, averaged.
"""

from __future__ import annotations

from pathlib import Path

from tests import tiny

QUESTIONS = 12
CHOICES = 3


def write_tasks(folder: Path) -> Path:
    """Write the task files and their data; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "question": tiny.sentence(8, seed=number),
            "choices": [
                tiny.sentence(1 + (number + n) % 3, seed=100 + 3 * number + n)
                for n in range(CHOICES)
            ],
            "answer": number % CHOICES,
        }
        for number in range(QUESTIONS)
    ]
    tiny.write_jsonl(folder / "questions.jsonl", rows)
    texts = [{"text": tiny.sentence(20 * n, seed=n)} for n in range(1, 4)]
    tiny.write_jsonl(folder / "texts.jsonl", texts)
    _write(folder, "words_mc", MULTIPLE_CHOICE)
    _write(folder, "words_mc_2", MULTIPLE_CHOICE)
    _write(folder, "words_gen", FREE)
    _write(folder, "words_text", TEXTS)
    (folder / "group.yaml").write_text(GROUP)
    return folder


def _write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.yaml").write_text(f"task: {name}\n{text}")


MULTIPLE_CHOICE = r"""
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: multiple_choice
test_split: test
fewshot_split: test
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""

FREE = r"""
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["house"], max_gen_toks: 6, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""

TEXTS = r"""
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""

GROUP = r"""
group: words_group
task: [words_mc, words_mc_2]
aggregate_metric_list:
  - {metric: acc, aggregation: mean, weight_by_size: true}
"""
