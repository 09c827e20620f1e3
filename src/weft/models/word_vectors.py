"""Configuration of embeddings that start from pre-trained word vectors: which are trained (Kim 2014, section 3.1).

    nonstatic    they are trained with the rest (fine-tuned)
    static       the table stays as it is, with the rows of words that have no vector: only the rest is trained

`weft.tasks.pretrained_embeddings` reads the file when a training starts.
"""

from typing import Literal

from torch import nn

from weft.errors import ConfigError

Channels = Literal["nonstatic", "static"]


def check_channels(channels: str, *files: str | None) -> None:
    """Raise ValueError if embeddings that start from no file would stay as they are."""
    if channels != "nonstatic" and not any(files):
        raise ValueError(
            f"model.channels: {channels} keeps the vectors of a file as they are, but there is no model.vectors; "
            "name a file there, or leave model.channels out"
        )


def keep_static(table: nn.Embedding, tied: bool = False) -> None:
    """Exclude a table from training; refuse one that is `tied` to the output, which must be trained."""
    if tied:
        raise ConfigError(
            "model.channels: static keeps the vectors as they are, but model.tie makes them the weights of the output, "
            "which is trained; set model.tie: false, or model.channels: nonstatic"
        )
    table.weight.requires_grad_(False)
