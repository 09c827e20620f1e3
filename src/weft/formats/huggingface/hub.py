"""Models by their names: those that ship with weft, else those of the Hugging Face hub, cached or downloaded.

Only files that weft reads are downloaded: safetensors, never a pickle, and text. With HF_HUB_OFFLINE=1, none are.
"""

import re
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError
from weft.zoo import find_bundled

ALLOW_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.spm"]
IGNORE_PATTERNS = ["onnx/*", "openvino/*", "coreml/*"]
NAME_PATTERN = r"[A-Za-z0-9][\w.-]*"
HUB_ID = re.compile(f"{NAME_PATTERN}(/{NAME_PATTERN})?")  # owner/name, or only the name for the oldest models


def find_model(name: str | Path) -> Path:
    """Return the folder of a model: an existing path as it is, else one that ships, else a snapshot of the hub."""
    folder, text = Path(name), str(name)
    try:
        local = folder.exists() or ("/" in text and Path(text.partition("/")[0] or "/").exists())
    except (OSError, ValueError) as error:  # such as a name that is too long
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{text[:200]!r}: cannot be a folder ({reason}); give the path of one") from None
    if local or not HUB_ID.fullmatch(text):
        return folder  # a path, even if it does not exist: reading it raises the error
    return find_bundled(text) or _find_cached(text) or _download(text)


def _find_cached(name: str) -> Path | None:
    """Return the snapshot in the cache; None if it, or its weights, are missing."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(_snapshot(name, local=True))
    except LocalEntryNotFoundError:
        return None
    return folder if _has_weights(folder) else None


def _download(name: str) -> Path:
    from huggingface_hub import constants, errors

    try:
        folder = Path(_snapshot(name, local=False))
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{name}: its owner asks for an agreement first: accept it on the hub, then log in (hf auth login)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{name}: does not exist, as a folder here or as a model on the hub; check the name, or log in if it is "
            "a private one (hf auth login)"
        ) from None
    except Exception as error:  # no network, proxies, and other errors
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else type(error.__cause__ or error).__name__
        raise CheckpointError(
            f"{name}: does not exist as a folder, is not in the hub's cache ({constants.HF_HUB_CACHE}), and cannot be "
            f"downloaded ({reason}); give the path of a folder, or fetch it where there is a network, by "
            f"`hf download {name}`, and copy that cache, or set HF_HOME to where it lies"
        ) from None
    if not _has_weights(folder):
        raise CheckpointError(
            f"{name}: no safetensors of it are in the hub's cache, nor on the hub, as far as that can be reached; "
            "where there is a pickle alone, which can run code as it is read, have it written again by transformers, "
            "as AutoModel.from_pretrained(name).save_pretrained(new), and give that folder"
        )
    return folder


def _snapshot(name: str, local: bool) -> str:
    from huggingface_hub import snapshot_download

    patterns: Any = {"allow_patterns": ALLOW_PATTERNS, "ignore_patterns": IGNORE_PATTERNS}
    return str(snapshot_download(name, local_files_only=local, **patterns))


def _has_weights(folder: Path) -> bool:
    return any(folder.rglob("*.safetensors"))
