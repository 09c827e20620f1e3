"""Published ELMo models to weft's: an options.json and an HDF5 file of weights, as bilm-tf and AllenNLP have them.

Such a file holds what encodes and not the softmax: the words that it was trained to guess are not in it. The checkpoint
made here is a language model to which all words are equally likely; what it encodes is as published.

    theirs                                       ours
    char_embed (261, E), a sign a row            the signs in the order of weft.tokens
    CNN/W_cnn_n (1, k, E, F)                     a Conv1d, (F, E, k)
    CNN_high_n/W_carry, W_transform (F, F)       gate and transform, turned
    …/LSTMCell/W_0 (I+P, 4·C), gates i g f o     input_weight and state_weight, turned, gates i f g o
    …/LSTMCell/B, to which 1 is added in f       bias, with that 1
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from weft.checkpoint.contents import write_model
from weft.checkpoint.manifest import save_folder
from weft.config.schema import Run, read_section
from weft.errors import CheckpointError, ConfigError, WeftError
from weft.models.elmo import ELMo, ELMoConfig
from weft.tasks.factory import build
from weft.tokenization.trainable import Tokenizer, Words
from weft.tokens import BEGIN, END, FIRST, LAST, LONGEST_SPELLING, PAD

_OTHERS = {FIRST: 256, LAST: 257, BEGIN: 258, END: 259, PAD: 260}  # our sign -> their row of char_embed
SIGNS = [_OTHERS.get(sign, sign) for sign in range(LAST + 1)]
_GATES = [0, 2, 1, 3]  # of theirs, in our order
_SPECIAL = {"<S>", "</S>", "<UNK>", "!!!MAXTERMID"}  # lines of their vocabulary that are no words

Read = Callable[[str], np.ndarray]


class _Options(BaseModel):
    model_config = ConfigDict(extra="ignore")  # how it was trained is told there too


class _LSTM(_Options):
    dim: int
    projection_dim: int
    n_layers: int = 1
    use_skip_connections: bool = False
    cell_clip: float | None = None
    proj_clip: float | None = None


class _Letter(_Options):
    dim: int


class _CharCNN(_Options):
    embedding: _Letter
    filters: list[tuple[int, int]]
    n_highway: int = 0
    activation: str = "relu"
    max_characters_per_token: int = Field(LONGEST_SPELLING, ge=LONGEST_SPELLING, le=LONGEST_SPELLING)


class _ELMoOptions(_Options):
    lstm: _LSTM
    char_cnn: _CharCNN


def import_elmo(options: Path, weights: Path, out: Path, vocab: Path | None = None) -> Path:
    """Write a checkpoint that `load` reads, in the new folder `out`; `vocab` is a file of words, one a line."""
    model, tokenizer = read_options(options), _tokenizer(vocab)
    run = Run.parse(
        {
            "task": {"name": "lm"},
            "data": {"train": []},  # what it was trained on is not told
            "tokenizer": tokenizer.config.model_dump(mode="json", exclude_none=True),
            "model": model.model_dump(mode="json"),
            "train": {"steps": 1},
        }
    )
    _, head = build(run, tokenizer)
    fill_elmo(head.body, weights)
    return save_folder(out, 0, lambda folder: write_model(folder, run, tokenizer, head))


def read_options(path: Path) -> ELMoConfig:
    """Read an options.json as the configuration of a model."""
    try:
        told = read_section(_ELMoOptions, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as the options of an ELMo model: {error}") from None
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    lstm, cnn = told.lstm, told.char_cnn
    if lstm.cell_clip != lstm.proj_clip:
        raise CheckpointError(
            f"{path}: cell_clip is {lstm.cell_clip} and proj_clip is {lstm.proj_clip}, but weft's elmo has one bound "
            "for both"
        )
    if len(dict(cnn.filters)) < len(cnn.filters):
        raise CheckpointError(f"{path}: char_cnn.filters has a width twice: {cnn.filters}; weft's elmo has each once")
    section = {"embedding": cnn.embedding.dim, "filters": dict(cnn.filters), "activation": cnn.activation}
    section |= {"highways": cnn.n_highway, "width": 2 * lstm.projection_dim, "cells": lstm.dim}
    section |= {"layers": lstm.n_layers, "clip": lstm.cell_clip or 0.0, "residual": lstm.use_skip_connections}
    try:
        return read_section(ELMoConfig, {"name": "elmo", **section}, str(path))
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def fill_elmo(model: ELMo, path: Path) -> None:
    """Fill a model with published weights; its softmax, which they leave out, gives every word the same."""
    wanted = {name: value for name, value in model.named_parameters() if not name.startswith("output.")}
    with _datasets(path) as read, torch.no_grad():
        for name, found in _named(read, model.config):
            if wanted[name].shape != found.shape:
                got, must = tuple(found.shape), tuple(wanted.pop(name).shape)
                raise CheckpointError(f"{path}: {name} must be {must} by the options, but is {got} instead")
            wanted.pop(name).copy_(torch.from_numpy(np.array(found, np.float32)))
        assert not wanted, "every weight has its source"
        if model.output is not None:
            model.output.weight.zero_()
            model.output.bias.zero_()


def _named(read: Read, config: ELMoConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each of our weights with its value."""
    cells, half, speller = config.cells, config.width // 2, "speller"
    yield f"{speller}.filters.embed.weight", read("char_embed")[SIGNS]
    for number in range(len(config.filters)):
        yield f"{speller}.filters.convolve.{number}.weight", read(f"CNN/W_cnn_{number}")[0].transpose(2, 1, 0)
        yield f"{speller}.filters.convolve.{number}.bias", read(f"CNN/b_cnn_{number}")
    for number in range(config.highways):
        for ours, theirs in (("gate", "carry"), ("transform", "transform")):
            yield f"{speller}.highways.{number}.{ours}.weight", read(f"CNN_high_{number}/W_{theirs}").T
            yield f"{speller}.highways.{number}.{ours}.bias", read(f"CNN_high_{number}/b_{theirs}")
    yield f"{speller}.project.weight", read("CNN_proj/W_proj").T
    yield f"{speller}.project.bias", read("CNN_proj/b_proj")
    for number, way in enumerate(("ahead", "back")):
        for depth in range(config.layers):
            cell, layer = f"RNN_{number}/RNN/MultiRNNCell/Cell{depth}/LSTMCell", f"{way}.layers.{depth}"
            weight, bias = _ordered(read(f"{cell}/W_0").T), _ordered(read(f"{cell}/B"))
            bias[cells : 2 * cells] += 1
            yield f"{layer}.input_weight", weight[:, :half]
            yield f"{layer}.state_weight", weight[:, half:]
            yield f"{layer}.bias", bias
            yield f"{layer}.project", read(f"{cell}/W_P_0").T


def _ordered(gates: np.ndarray) -> np.ndarray:
    """Bring the rows of four gates to our order."""
    parts = np.split(gates, 4)
    return np.concatenate([parts[gate] for gate in _GATES])


@contextmanager
def _datasets(path: Path) -> Iterator[Read]:
    try:
        import h5py
    except ImportError:
        raise WeftError("to read ELMo's weights, h5py is needed: pip install 'weft[elmo]'") from None
    try:
        with h5py.File(path, "r") as file:
            yield lambda name: np.asarray(_dataset(file, name, path)[()])
    except (OSError, IndexError, ValueError) as error:  # what is no HDF5, and what has another number of dimensions
        raise CheckpointError(f"{path}: cannot be read as the weights of an ELMo model: {error}") from None


def _dataset(file: Mapping[str, Any], name: str, path: Path) -> Any:
    try:
        return file[name]
    except KeyError:
        raise CheckpointError(
            f"{path}: has no {name!r}, which the options tell of; are the two of one model?"
        ) from None


def _tokenizer(vocab: Path | None) -> Tokenizer:
    """Make a tokenizer for text that is already cut, as the models were trained on; it knows at least one word."""
    try:
        lines = ["."] if vocab is None else vocab.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{vocab}: cannot be read as a list of words: {error}") from None
    words = [word for word in lines if word not in _SPECIAL]
    return Words.train(words, Words.Config(name="words", split="spaces", size=len(words) + 3))
