"""Where a checkpoint's model comes from: what its own model card says of licence and tags."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.export.hub import REPO_ID

logger = logging.getLogger("quantkit")

CARD = "README.md"
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
LICENCE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True, slots=True)
class Origin:
    """The source's name, and the metadata at the head of its model card, if it has one."""

    name: str
    metadata: Mapping[str, Any]
    has_licence_file: bool = False

    @property
    def base_model(self) -> str | None:
        """The Hub id of the model that was quantized, if it is known."""
        if REPO_ID.fullmatch(self.name):
            return self.name
        named = self.metadata.get("base_model")
        return named if isinstance(named, str) else None

    @property
    def licence(self) -> dict[str, str]:
        """What the Hub is to be told of the licence; empty if nothing is known."""
        found = {key: str(self.metadata[key]) for key in LICENCE_KEYS if self.metadata.get(key)}
        if not found and self.has_licence_file:
            return {"license": "other", "license_name": "see-license-file"}
        return found

    @property
    def tags(self) -> list[str]:
        """The source's tags."""
        return _words(self.metadata.get("tags"))

    @property
    def languages(self) -> list[str]:
        """The source's languages."""
        return _words(self.metadata.get("language"))


def read_origin(folder: Path, card: str, name: str | None) -> Origin:
    """Read the source's card, kept in a folder with its side files; `name` is the source's."""
    licence = any((folder / file).is_file() for file in LICENCE_FILES)
    return Origin(name or folder.name, _metadata(folder / card), licence)


def _metadata(card: Path) -> Mapping[str, Any]:
    from huggingface_hub import metadata_load

    if not card.is_file():
        return {}
    try:
        found = metadata_load(card)
    except Exception as error:  # of the YAML parser, or not UTF-8
        reason = " ".join(str(error).split())
        logger.warning("the metadata of %s cannot be read (%s); none is carried over", card, reason)
        return {}
    return found or {}


def _words(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(word) for word in value] if isinstance(value, list) else []
