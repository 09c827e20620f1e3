"""Pre-trained word vectors: a model whose configuration has `vectors` initializes its embeddings from that file.

The vocabulary of a tokenizer of whole words then has the file's words beside those of the training data: training
generalizes to words with similar vectors. This is done when a training starts, never from a checkpoint, which is
complete.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from weft.config.schema import Run
from weft.data.word_vectors.read import Vectors, read_layout, read_vector_words, read_vectors
from weft.errors import ConfigError
from weft.models.base import Model
from weft.tokenization.trainable import Tokenizer, Words


def check_vectors(run: Run) -> None:
    """Raise if the file is missing or its width does not match, before the tokenizer is trained."""
    path, embedding_width = _vectors_path(run), getattr(run.model, _width_key(run), None)
    if path is not None and Path(path).is_dir():
        raise ConfigError(
            f"model.vectors: {path} is a directory; if it is a run's, write its vectors to a file and name that: "
            f"weft vectors export {path} vectors.txt"
        )
    if path is not None:
        width = read_layout(path, run.data.max_line_bytes).width
        _check_width(run, path, width, width if embedding_width is None else embedding_width)


def learn_words(run: Run, tokenizer: Tokenizer) -> None:
    """Add the file's words to a vocabulary of whole words, in the file's order, until `tokenizer.size` is reached."""
    path = _vectors_path(run)
    if path is not None and isinstance(tokenizer, Words):
        tokenizer.extend(read_vector_words(path, run.data.max_line_bytes))


def start_from_vectors(run: Run, tokenizer: Tokenizer, model: Model, num_trained: int | None = None) -> str | None:
    """Copy the file's vectors into `model.embed` and return a report; None if the recipe names no file.

    The first `num_trained` tokens are from the training data: if the file has none of these, it is the wrong file. A
    token that is not in the file keeps its random vector, scaled to the standard deviation of the file's vectors.
    """
    path = _vectors_path(run)
    if path is None:
        return None
    embed = getattr(model, "embed", None)
    if not isinstance(embed, nn.Embedding):
        raise ConfigError(f"model.vectors: {run.model.name!r} has no `embed` that is an nn.Embedding; leave it out")
    words = [_whole_word(tokenizer, id) for id in range(len(tokenizer))]
    vectors = read_vectors(path, words, run.data.max_line_bytes)
    _check_width(run, path, vectors.rows.shape[1], embed.embedding_dim)
    special_ids = {id for id in asdict(tokenizer.specials).values() if id is not None}
    trained_ids = [id for id in range(len(words) if num_trained is None else num_trained) if id not in special_ids]
    if not vectors.in_file[trained_ids].any():
        raise _none_found(run, path, len(trained_ids))
    _copy_vectors(embed.weight, vectors)
    num_words = sum(map(bool, words))
    rest = f"{num_words:,} of the tokens are whole words, the others can have none"
    if num_words == len(words):
        rest = f"{vectors.in_file[trained_ids].sum():,} of the {len(trained_ids):,} words of the training data have one"
    return f"model.vectors: {vectors.in_file.sum():,} of {len(words):,} rows from {Path(path).name}; {rest}"


def _vectors_path(run: Run) -> str | None:
    path: str | None = getattr(run.model, "vectors", None)
    return path


def _width_key(run: Run) -> str:
    """Return the recipe key of the embedding width."""
    return "embedding" if "embedding" in type(run.model).model_fields else "width"


def _check_width(run: Run, path: str, width: int, embedding: int) -> None:
    if width != embedding:
        raise ConfigError(
            f"model.vectors: the vectors of {path} have {width} numbers, and model.{_width_key(run)} is {embedding}; "
            f"set model.{_width_key(run)}: {width}, or take another file"
        )


def _none_found(run: Run, path: str, size: int) -> ConfigError:
    remedy = "is it for another language, or another way to write words?"
    if run.tokenizer.name != "words":
        remedy = "word vectors go with whole words: set tokenizer: {name: words}"
    return ConfigError(
        f"model.vectors: none of the {size:,} tokens of tokenizer {run.tokenizer.name!r} is a word of {path}; {remedy}"
    )


def _whole_word(tokenizer: Tokenizer, id: int) -> str:
    """Return the word that a token stands for, "" for a part of a word.

    WordPiece prefixes tokens that continue a word; other subword tokenizers prefix those that begin one with a space.
    """
    token = tokenizer.token(id)
    if tokenizer.model == "WordLevel":
        return token
    if tokenizer.model == "WordPiece":
        return "" if token.startswith("##") else token
    return token[1:] if token.startswith(" ") else ""


@torch.no_grad()
def _copy_vectors(weight: torch.Tensor, vectors: Vectors) -> None:
    ids = torch.from_numpy(vectors.in_file).nonzero().squeeze(1)
    rows = torch.from_numpy(vectors.rows)[ids]
    old_std, new_std = weight.std(correction=0), rows.std(correction=0)
    if old_std > 0:
        weight *= new_std / old_std
    weight[ids] = rows.to(weight)
