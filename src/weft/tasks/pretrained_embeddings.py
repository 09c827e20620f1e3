"""Pre-trained word vectors: a model whose configuration has `vectors` initializes its embeddings from that file.

`target_vectors` does the same for the target of a translation, where that has a vocabulary of its own. A vocabulary of
whole words then has the file's words beside those of the training data: training generalizes to words with similar
vectors. This is done when a training starts, never from a checkpoint, which is complete.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from weft.config.run import Run
from weft.data.word_vectors.read import Vectors, read_layout, read_vector_words, read_vectors
from weft.errors import ConfigError
from weft.models.base import Model
from weft.tokenization.trainable import Tokenizer, Words

_KEYS = ("vectors", "target_vectors")


def check_vectors(run: Run) -> None:
    """Raise if a file is missing, its width does not match or pretrained weights are given, too; no data is read."""
    for key in _vector_files(run) if getattr(run.model, "weights", None) else ():
        raise ConfigError(
            f"model.{key}: the embeddings are those of model.weights, {run.model.weights}, so the file would have no "  # type: ignore[attr-defined]
            "effect; leave one of the two out"
        )
    embedding_width = getattr(run.model, _width_key(run), None)
    if embedding_width is None:
        embedding_width = getattr(run.model, "width", None)
    for key, path in _vector_files(run).items():
        if Path(path).is_dir():
            raise ConfigError(
                f"model.{key}: {path} is a directory; if it is a run's, write its vectors to a file and name that: "
                f"weft vectors export {path} vectors.txt"
            )
        width = read_layout(path, run.data.max_line_bytes).width
        _check_width(run, key, width, width if embedding_width is None else embedding_width)
        if key == "target_vectors" and getattr(run.tokenizer, "target", path) is None:
            raise _no_table(run, key)


def learn_words(run: Run, tokenizer: Tokenizer) -> None:
    """Add the file's words to a vocabulary of whole words, in the file's order, until `tokenizer.size` is reached.

    A vocabulary that a translation is written in gets none: the model would never be trained to write them.
    """
    path = _vector_files(run).get("vectors")
    is_written = "target_vectors" in type(run.model).model_fields and tokenizer.joint
    if path is not None and isinstance(tokenizer, Words) and not is_written:
        tokenizer.extend(read_vector_words(path, run.data.max_line_bytes))


def start_from_vectors(run: Run, tokenizer: Tokenizer, model: Model, num_trained: int | None = None) -> str | None:
    """Copy the files' vectors into the model's embeddings and return a report; None if the recipe names no file.

    The first `num_trained` tokens are from the training data: if the file has none of these, it is the wrong file. A
    token that is not in the file keeps its random vector, scaled to the standard deviation of the file's vectors; a
    model that `keeps_embedding_std` has the file's vectors scaled to that of its own.
    """
    sides = {"vectors": (tokenizer, num_trained), "target_vectors": (tokenizer.target, None)}
    files, tables = _vector_files(run), model.word_embeddings()
    for key in files:
        if not tables.get(key):
            raise _no_table(run, key)
    return "; ".join(_fill_tables(run, key, *sides[key], model, tables[key]) for key in files) or None


def _fill_tables(
    run: Run, key: str, tokenizer: Tokenizer, num_trained: int | None, model: Model, tables: list[nn.Embedding]
) -> str:
    """Copy the vectors of one file into the tables of one vocabulary; return a report."""
    path = _vector_files(run)[key]
    words = [_whole_word(tokenizer, id) for id in range(len(tokenizer))]
    vectors = read_vectors(path, words, run.data.max_line_bytes)
    special_ids = {id for id in asdict(tokenizer.specials).values() if id is not None}
    trained_ids = [id for id in range(len(words) if num_trained is None else num_trained) if id not in special_ids]
    if not vectors.in_file[trained_ids].any():
        raise _none_found(run, key, tokenizer, len(trained_ids))
    for table in tables:
        _check_width(run, key, vectors.rows.shape[1], table.embedding_dim)
        _copy_vectors(table.weight, vectors, model.keeps_embedding_std)
    num_words = sum(map(bool, words))
    rest = f"{num_words:,} of the tokens are whole words, the others can have none"
    if num_words == len(words):
        rest = f"{vectors.in_file[trained_ids].sum():,} of the {len(trained_ids):,} words of the training data have one"
    return f"model.{key}: {vectors.in_file.sum():,} of {len(words):,} rows from {Path(path).name}; {rest}"


def _vector_files(run: Run) -> dict[str, str]:
    """Return the recipe's files of word vectors by key."""
    files = {key: getattr(run.model, key, None) for key in _KEYS}
    return {key: path for key, path in files.items() if path is not None}


def _width_key(run: Run) -> str:
    """Return the recipe key of the embedding width."""
    return "embedding" if "embedding" in type(run.model).model_fields else "width"


def _check_width(run: Run, key: str, width: int, embedding: int) -> None:
    if width != embedding:
        raise ConfigError(
            f"model.{key}: the vectors of {_vector_files(run)[key]} have {width} numbers, and model.{_width_key(run)} "
            f"is {embedding}; set model.{_width_key(run)}: {width}, or take another file"
        )


def _no_table(run: Run, key: str) -> ConfigError:
    """Return the error for vectors that no embeddings of the model can start from."""
    if key == "target_vectors":
        return ConfigError(
            "model.target_vectors: the target has no vocabulary of its own: source and target share one, and its "
            "embeddings start from model.vectors; leave it out, or give the target its own by tokenizer.target"
        )
    return ConfigError(f"model.vectors: {run.model.name!r} has no `embed` that is an nn.Embedding; leave it out")


def _none_found(run: Run, key: str, tokenizer: Tokenizer, size: int) -> ConfigError:
    section, name = "tokenizer.target" if key == "target_vectors" else "tokenizer", tokenizer.config.name
    remedy = "is it for another language, or another way to write words?"
    if name != "words":
        remedy = f"word vectors go with whole words: set {section}: {{name: words}}"
    path = _vector_files(run)[key]
    return ConfigError(f"model.{key}: none of the {size:,} tokens of {section} {name!r} is a word of {path}; {remedy}")


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
def _copy_vectors(weight: torch.Tensor, vectors: Vectors, keep_std: bool) -> None:
    """Copy the vectors that were found; scale the other rows to their std or, with `keep_std`, these to the others'."""
    ids = torch.from_numpy(vectors.in_file).nonzero().squeeze(1)
    rows = torch.from_numpy(vectors.rows)[ids]
    old_std, new_std = weight.std(correction=0), rows.std(correction=0)
    if keep_std and new_std > 0:
        rows = rows * (old_std / new_std).to(rows)
    elif old_std > 0:
        weight *= new_std / old_std
    weight[ids] = rows.to(weight)
