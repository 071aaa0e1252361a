"""Models by Hub id: from the local cache without the network when they are there."""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import SourceError

_SKIPPED = ["*.bin", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*"]


def download(repo: str) -> Path:
    """Return the local folder of a Hub model, downloading what the cache lacks.

    Raises SourceError that says what is missing, where it was looked for, and how to fetch it.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
        if _has_weights(folder):
            return folder
    except (LocalEntryNotFoundError, ValueError):
        pass  # not in the cache: ask the Hub
    try:
        folder = Path(snapshot_download(repo, ignore_patterns=_SKIPPED, etag_timeout=4))
        if not _has_weights(folder):
            folder = Path(snapshot_download(repo, allow_patterns=["*.bin*"], etag_timeout=4))
    except Exception as error:  # the Hub client raises its own, requests' and httpx's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(
            f"{repo} is neither a local folder nor in the cache {constants.HF_HUB_CACHE}, and the "
            f"Hub did not give it ({reason}); fetch it first with 'hf download {repo}'"
        ) from error
    return folder


def _has_weights(folder: Path) -> bool:
    """Tell whether a snapshot holds weights, not only the config that another tool fetched."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
