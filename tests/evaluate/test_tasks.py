from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from quantkit.errors import DataError
from quantkit.evaluate.tasks import load_tasks
from tests.evaluate.task_files import write_tasks

pytest.importorskip("lm_eval", reason="needs the extra eval")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


def test_data_lie_beside_the_task_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    found = load_tasks(["words_mc", "words_text"], Path("tasks"))
    assert Path.cwd() == folder.parent
    assert found.members == {"words_mc": ("words_mc",), "words_text": ("words_text",)}
    assert len(found.tasks["words_mc"].eval_docs) == 12


def test_a_group_names_its_tasks(folder: Path) -> None:
    found = load_tasks(["words_group"], folder)
    assert found.members == {"words_group": ("words_mc", "words_mc_2")}
    assert list(found.groups) == ["words_group"]


def test_a_task_may_bring_code(folder: Path) -> None:
    text = (folder / "words_mc.yaml").read_text().replace("words_mc", "coded")
    (folder / "code.py").write_text("def question(doc):\n    return doc['question'] + ' cat'\n")
    text = text.replace('"{{question}}"', "!function code.question")
    (folder / "coded.yaml").write_text(text)
    task = load_tasks(["coded"], folder).tasks["coded"]
    assert task.doc_to_text(task.eval_docs[0]).endswith(" cat")


def test_examples_are_what_was_asked_for(folder: Path) -> None:
    task = load_tasks(["words_mc"], folder, num_fewshot=3).tasks["words_mc"]
    assert task.get_config("num_fewshot") == 3
    assert load_tasks(["words_mc"], folder).tasks["words_mc"].get_config("num_fewshot") == 0


def test_an_unknown_task_is_named_with_the_nearest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.tasks

    own = partial(lm_eval.tasks.TaskManager, include_defaults=False)  # the others take 15 s to read
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own)
    with pytest.raises(DataError, match="no task is called 'words_txt'") as caught:
        load_tasks(["words_mc", "words_txt"], folder)
    assert "did you mean 'words_text'?" in str(caught.value)
    assert "has words_gen, words_group, words_mc, words_mc_2, words_text" in str(caught.value)
    assert "--include-path adds your own" in str(caught.value)


def test_data_that_are_missing_are_an_error_of_the_task(folder: Path) -> None:
    (folder / "questions.jsonl").unlink()
    with pytest.raises(DataError, match=r"task 'words_mc' cannot be loaded: .*questions\.jsonl"):
        load_tasks(["words_mc"], folder)
