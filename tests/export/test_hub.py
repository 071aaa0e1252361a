"""Pushing to the Hub: what is asked of it, in which order, and what is said when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import UnsupportedError
from quantkit.export.hub import Hub


class FakeApi:
    """Stands in for HfApi: remembers calls, and fails at the one it is told to."""

    token = "hf_secret"

    def __init__(self, failing: str = "", remote: tuple[str, ...] = ()) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._failing = failing
        self._remote = remote

    def _note(self, name: str, **arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name == self._failing:
            raise OSError("connection reset\nby peer")

    def whoami(self) -> dict[str, str]:
        self._note("whoami")
        return {"name": "me"}

    def create_repo(self, repo: str, **arguments: Any) -> str:
        self._note("create_repo", repo=repo, **arguments)
        return f"https://hub.example/{repo}"

    def upload_folder(self, **arguments: Any) -> None:
        self._note("upload_folder", **arguments)

    def list_repo_files(self, repo: str) -> list[str]:
        return list(self._remote)

    def delete_files(self, **arguments: Any) -> None:
        self._note("delete_files", **arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_a_push_creates_the_repository_and_uploads(folder: Path) -> None:
    api = FakeApi()
    url = Hub("me/model", private=True, api=api).push(folder)
    assert url == "https://hub.example/me/model"
    assert [name for name, _ in api.calls] == ["whoami", "create_repo", "upload_folder"]
    assert api.calls[1][1] == {"repo": "me/model", "private": True, "exist_ok": True}
    assert api.calls[2][1]["folder_path"] == folder


def test_weights_of_an_earlier_upload_go_last(folder: Path) -> None:
    remote = ("model.safetensors", "model-00001-of-00002.safetensors", "README.md", "notes.txt")
    api = FakeApi(remote=(*remote, "model.safetensors.index.json"))
    Hub("me/model", api=api).push(folder)
    name, arguments = api.calls[-1]
    assert name == "delete_files"
    stale = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert arguments["delete_patterns"] == stale


@pytest.mark.parametrize("step", ["create_repo", "upload_folder"])
def test_an_upload_that_stops_says_how_to_go_on(folder: Path, step: str) -> None:
    hub = Hub("me/model", api=FakeApi(failing=step))
    with pytest.raises(UnsupportedError, match=r"stopped \(connection reset\).*again to go on"):
        hub.push(folder)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_token_that_the_hub_refuses_is_known_at_once() -> None:
    with pytest.raises(UnsupportedError, match=r"did not confirm the token.*hf auth login"):
        Hub("me/model", api=FakeApi(failing="whoami"))


def test_no_token_is_known_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    api = FakeApi()
    api.token = ""
    with pytest.raises(UnsupportedError, match=r"needs a token.*HF_TOKEN"):
        Hub("me/model", api=api)
    assert api.calls == []


@pytest.mark.parametrize("repo", ["model", "me/", "a/b/c", "me/mo del", "../x/y"])
def test_what_is_no_repository_is_refused(repo: str) -> None:
    with pytest.raises(UnsupportedError, match="give OWNER/NAME"):
        Hub(repo, api=FakeApi())
