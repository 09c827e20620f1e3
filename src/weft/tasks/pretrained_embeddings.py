"""Word vectors as first weights: a model whose configuration has `vectors` starts its embeddings from that file.

A tokenizer of whole words then knows the file's words beside those of the training data: what was learnt about a word
serves the words near it. It is so when a training starts afresh, and only then: a checkpoint is whole in itself.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from weft.config.schema import Run
from weft.data.word_vectors.read import Vectors, read_layout, read_vectors, read_words
from weft.errors import ConfigError
from weft.models.base import Model
from weft.tokenization.trainable import Tokenizer, Words


def check_vectors(run: Run) -> None:
    """Refuse a file that is not there, or too wide or narrow, before the tokenizer is trained."""
    path, asked = _asked(run), getattr(run.model, _key(run), None)
    if path is not None and Path(path).is_dir():
        raise ConfigError(
            f"model.vectors: {path} is a directory; if it is a run's, write its vectors to a file and name that: "
            f"weft vectors export {path} vectors.txt"
        )
    if path is not None:
        width = read_layout(path, run.data.max_line_bytes).width
        _check_width(run, path, width, width if asked is None else asked)


def learn_words(run: Run, tokenizer: Tokenizer) -> None:
    """Add the file's words to a vocabulary of whole words, in the file's order, until `tokenizer.size` is reached."""
    path = _asked(run)
    if path is not None and isinstance(tokenizer, Words):
        tokenizer.extend(read_words(path, run.data.max_line_bytes))


def start_from_vectors(run: Run, tokenizer: Tokenizer, model: Model, own: int | None = None) -> str | None:
    """Put the file's vectors into `model.embed`, and say how many there were; None where the recipe names no file.

    The first `own` tokens are of the training data: if the file has not one of these, it is the wrong file.
    A token that the file does not have keeps its random start, scaled to the standard deviation of those that it has.
    """
    path = _asked(run)
    if path is None:
        return None
    embed = getattr(model, "embed", None)
    if not isinstance(embed, nn.Embedding):
        raise ConfigError(f"model.vectors: {run.model.name!r} has no `embed` that is an nn.Embedding; leave it out")
    words = [_whole_word(tokenizer, id) for id in range(len(tokenizer))]
    vectors = read_vectors(path, words, run.data.max_line_bytes)
    _check_width(run, path, vectors.rows.shape[1], embed.embedding_dim)
    special = {id for id in asdict(tokenizer.specials).values() if id is not None}
    trained = [id for id in range(len(words) if own is None else own) if id not in special]
    if not vectors.found[trained].any():
        raise _none_found(run, path, len(trained))
    _fill(embed.weight, vectors)
    whole = sum(map(bool, words))
    rest = f"{whole:,} of the tokens are whole words, the others can have none"
    if whole == len(words):
        rest = f"{vectors.found[trained].sum():,} of the {len(trained):,} words of the training data have one"
    return f"model.vectors: {vectors.found.sum():,} of {len(words):,} rows from {Path(path).name}; {rest}"


def _asked(run: Run) -> str | None:
    path: str | None = getattr(run.model, "vectors", None)
    return path


def _key(run: Run) -> str:
    """Where the recipe says how wide the embeddings are."""
    return "embedding" if "embedding" in type(run.model).model_fields else "width"


def _check_width(run: Run, path: str, width: int, embedding: int) -> None:
    if width != embedding:
        raise ConfigError(
            f"model.vectors: the vectors of {path} have {width} numbers, and model.{_key(run)} is {embedding}; "
            f"set model.{_key(run)}: {width}, or take another file"
        )


def _none_found(run: Run, path: str, size: int) -> ConfigError:
    remedy = "is it for another language, or another way to write words?"
    if run.tokenizer.name != "words":
        remedy = "word vectors go with whole words: set tokenizer: {name: words}"
    return ConfigError(
        f"model.vectors: none of the {size:,} tokens of tokenizer {run.tokenizer.name!r} is a word of {path}; {remedy}"
    )


def _whole_word(tokenizer: Tokenizer, id: int) -> str:
    """Return the word that a token stands for, or "" for a piece of one.

    WordPiece marks a piece that goes on; the others, but for plain words, mark what begins a word by a space before it.
    """
    token = tokenizer.token(id)
    if tokenizer.model == "WordLevel":
        return token
    if tokenizer.model == "WordPiece":
        return "" if token.startswith("##") else token
    return token[1:] if token.startswith(" ") else ""


@torch.no_grad()
def _fill(weight: torch.Tensor, vectors: Vectors) -> None:
    known = torch.from_numpy(vectors.found).nonzero().squeeze(1)
    rows = torch.from_numpy(vectors.rows)[known]
    before, after = weight.std(correction=0), rows.std(correction=0)
    if before > 0:
        weight *= after / before
    weight[known] = rows.to(weight)
