"""Models by their names on the Hugging Face hub: from the local cache, else downloaded into it.

Only what weft reads is downloaded: weights as safetensors, never a pickle, and text. With HF_HUB_OFFLINE=1 nothing is.
"""

import re
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError

WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.spm"]
UNWANTED = ["onnx/*", "openvino/*", "coreml/*"]
PART = r"[A-Za-z0-9][\w.-]*"
HUB_ID = re.compile(f"{PART}(/{PART})?")  # owner/name, or the name alone of the oldest models


def find_model(name: str | Path) -> Path:
    """Return the folder of a model: one that is there, as it is, or that of a name on the hub."""
    folder, asked = Path(name), str(name)
    local = folder.exists() or ("/" in asked and Path(asked.partition("/")[0] or "/").exists())
    if local or not HUB_ID.fullmatch(asked):
        return folder  # a path, even where nothing is there: what reads it says so
    return _cached(asked) or _downloaded(asked)


def _cached(name: str) -> Path | None:
    """Return the folder in the cache; None where it is not there, or its weights are not."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(_snapshot(name, local=True))
    except LocalEntryNotFoundError:
        return None
    return folder if _has_weights(folder) else None


def _downloaded(name: str) -> Path:
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
    except Exception as error:  # no network, and whatever else may be between here and there
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else type(error.__cause__ or error).__name__
        raise CheckpointError(
            f"{name}: does not exist as a folder, is not in the hub's cache ({constants.HF_HUB_CACHE}), and cannot be "
            f"downloaded ({why}); give the path of a folder, or fetch it where there is a network, by "
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

    wanted: Any = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    return str(snapshot_download(name, local_files_only=local, **wanted))


def _has_weights(folder: Path) -> bool:
    return any(folder.rglob("*.safetensors"))
