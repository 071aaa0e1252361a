"""Upload of a finished folder to the Hugging Face Hub.

Resumable: what the Hub has is not sent again. Nothing here runs unless `--push` is given.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from quantkit.errors import UnsupportedError
from quantkit.side_files import WEIGHT_PATTERNS

REPO_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""OWNER/NAME, as the Hub names its repositories."""


class Hub:
    """A repository to push to; `api` is huggingface_hub's HfApi, or stands in for it in tests.

    Raises UnsupportedError at once for what cannot work: no repository's name, no token.
    """

    def __init__(self, repo: str, private: bool = False, api: Any = None) -> None:
        if not REPO_ID.fullmatch(repo):
            raise UnsupportedError(f"--push {repo!r} is no repository; give OWNER/NAME")
        self.repo = repo
        self._private = private
        self._api = api or _client()
        self._log_in()

    def _log_in(self) -> None:
        """Ask the Hub who we are: a token that is missing or refused is known before any work."""
        from huggingface_hub import get_token

        if not (self._api.token or get_token()):
            raise UnsupportedError(
                f"--push {self.repo} needs a token of the Hub and there is none; run 'hf auth "
                "login', or set HF_TOKEN"
            )
        try:
            self._api.whoami()
        except Exception as error:  # the client raises its own errors and those of httpx
            raise UnsupportedError(
                f"--push {self.repo}: the Hub did not confirm the token ({_first_line(error)}); "
                "run 'hf auth login', or set HF_TOKEN"
            ) from error

    def push(self, folder: Path) -> str:
        """Upload every file of a folder; return the address of the repository.

        Weights of an earlier upload that the folder does not have are deleted, last: a loader may
        take whatever weights it finds. Raises UnsupportedError if the Hub refuses or cannot be
        reached; the folder is as it was.
        """
        try:
            url = self._api.create_repo(self.repo, private=self._private, exist_ok=True)
            self._api.upload_folder(
                repo_id=self.repo,
                folder_path=folder,
                commit_message="Quantized checkpoint by quantkit",
            )
            stale = self._stale_weights(folder)
            if stale:
                self._api.delete_files(
                    repo_id=self.repo,
                    delete_patterns=stale,
                    commit_message="Remove weights of an earlier upload",
                )
        except Exception as error:
            raise UnsupportedError(
                f"the upload to {self.repo} stopped ({_first_line(error)}); {folder} is complete: "
                "give the same command again to go on"
            ) from error
        return str(url)

    def _stale_weights(self, folder: Path) -> list[str]:
        names = self._api.list_repo_files(self.repo)
        weights = [n for n in names if any(fnmatch(n, pattern) for pattern in WEIGHT_PATTERNS)]
        return [name for name in weights if not (folder / name).exists()]


def _client() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
