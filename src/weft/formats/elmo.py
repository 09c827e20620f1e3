"""Import of published ELMo models: options.json and HDF5 weights, in the format of bilm-tf and AllenNLP.

These files have the encoder without the output softmax and its vocabulary. The resulting checkpoint is a language model
with uniform word probabilities; its hidden states are as published.

    theirs                                       ours
    char_embed (261, E), a row a character       the character ids of weft.tokens
    CNN/W_cnn_n (1, k, E, F)                     a Conv1d, (F, E, k)
    CNN_high_n/W_carry, W_transform (F, F)       gate and transform, transposed
    …/LSTMCell/W_0 (I+P, 4·C), gates i g f o     input_weight and state_weight, transposed, gates i f g o
    …/LSTMCell/B, to which 1 is added in f       bias, with this 1 included
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict, Field

from weft.checkpoint.contents import write_model
from weft.checkpoint.manifest import save_folder
from weft.checkpoint.tensor_files import check_finite
from weft.config.run import Run
from weft.config.schema import Section, read_section
from weft.config.small_files import read_small_text
from weft.errors import CheckpointError, ConfigError, WeftError
from weft.models.elmo import ELMo, ELMoConfig
from weft.tasks.factory import build, build_on_meta
from weft.tokenization.trainable import Tokenizer, Words
from weft.tokens import CHAR_PAD, MAX_WORD_CHARS, TEXT_BEGIN, TEXT_END, WORD_BEGIN, WORD_END

_SPECIAL_CHARS = {
    TEXT_BEGIN: 256,
    TEXT_END: 257,
    WORD_BEGIN: 258,
    WORD_END: 259,
    CHAR_PAD: 260,
}  # our character id -> their row of char_embed
CHAR_ROWS = [_SPECIAL_CHARS.get(char, char) for char in range(TEXT_END + 1)]
_GATES = [0, 2, 1, 3]  # their gates in our order
_SPECIAL = {"<S>", "</S>", "<UNK>", "!!!MAXTERMID"}  # special tokens in their vocabulary

Read = Callable[[str], np.ndarray]


class _Options(Section):
    model_config = ConfigDict(extra="ignore")  # training options are there, too


class _LSTM(_Options):
    dim: int
    projection_dim: int
    n_layers: int = 1
    use_skip_connections: bool = False
    cell_clip: float | None = None
    proj_clip: float | None = None


class _CharEmbedding(_Options):
    dim: int


class _CharCNN(_Options):
    embedding: _CharEmbedding
    filters: list[tuple[int, int]]
    n_highway: int = 0
    activation: str = "relu"
    max_characters_per_token: int = Field(MAX_WORD_CHARS, ge=MAX_WORD_CHARS, le=MAX_WORD_CHARS)


class _ELMoOptions(_Options):
    lstm: _LSTM
    char_cnn: _CharCNN


def import_elmo(options: Path, weights: Path, out: Path, vocab: Path | None = None) -> Path:
    """Convert ELMo to a checkpoint in the new folder `out`; `vocab` is a file of words, one a line."""
    model, tokenizer = read_elmo_config(options), _tokenizer(vocab)
    run = Run.parse(
        {
            "task": {"name": "lm"},
            "data": {"train": []},  # the training data is unknown
            "tokenizer": tokenizer.config.model_dump(mode="json", exclude_none=True),
            "model": model.model_dump(mode="json"),
            "train": {"steps": 1},
        }
    )
    fill_elmo(build_on_meta(run, tokenizer).body, weights)  # compares the sizes before anything is allocated
    _, head = build(run, tokenizer)
    fill_elmo(head.body, weights)
    return save_folder(out, 0, lambda folder: write_model(folder, run, tokenizer, head))


def read_elmo_config(path: Path) -> ELMoConfig:
    """Return the model configuration of an options.json."""
    try:
        options = read_section(_ELMoOptions, json.loads(read_small_text(path)), str(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as the options of an ELMo model: {error}") from None
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    lstm, cnn = options.lstm, options.char_cnn
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
    """Load published weights into a model; its output softmax, which they lack, is uniform."""
    parameters = {name: value for name, value in model.named_parameters() if not name.startswith("output.")}
    with _open_hdf5(path) as read, torch.no_grad():
        for name, array in _convert_weights(read, model.config):
            if parameters[name].shape != array.shape:
                shape, expected = tuple(array.shape), tuple(parameters.pop(name).shape)
                raise CheckpointError(f"{path}: {name} must be {expected} by the options, but is {shape} instead")
            if array.dtype.kind != "f":
                raise CheckpointError(f"{path}: {name} must be of float32, but is of {array.dtype} instead")
            value = torch.from_numpy(np.array(array, np.float32))
            check_finite(f"{path}: {name}", value)
            parameters.pop(name).copy_(value)
        assert not parameters, "every weight has its source"
        if model.output is not None:
            model.output.weight.zero_()
            model.output.bias.zero_()


def _convert_weights(read: Read, config: ELMoConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and value of each of our weights."""
    cells, half, char_encoder = config.cells, config.width // 2, "char_encoder"
    yield f"{char_encoder}.filters.embed.weight", read("char_embed")[CHAR_ROWS]
    for number in range(len(config.filters)):
        yield f"{char_encoder}.filters.convolve.{number}.weight", read(f"CNN/W_cnn_{number}")[0].transpose(2, 1, 0)
        yield f"{char_encoder}.filters.convolve.{number}.bias", read(f"CNN/b_cnn_{number}")
    for number in range(config.highways):
        for ours, theirs in (("gate", "carry"), ("transform", "transform")):
            yield f"{char_encoder}.highways.{number}.{ours}.weight", read(f"CNN_high_{number}/W_{theirs}").T
            yield f"{char_encoder}.highways.{number}.{ours}.bias", read(f"CNN_high_{number}/b_{theirs}")
    yield f"{char_encoder}.project.weight", read("CNN_proj/W_proj").T
    yield f"{char_encoder}.project.bias", read("CNN_proj/b_proj")
    for number, direction in enumerate(("forward_lstm", "backward_lstm")):
        for depth in range(config.layers):
            cell, layer = f"RNN_{number}/RNN/MultiRNNCell/Cell{depth}/LSTMCell", f"{direction}.layers.{depth}"
            weight, bias = _reorder_gates(read(f"{cell}/W_0").T), _reorder_gates(read(f"{cell}/B"))
            bias[cells : 2 * cells] += 1
            yield f"{layer}.input_weight", weight[:, :half]
            yield f"{layer}.state_weight", weight[:, half:]
            yield f"{layer}.bias", bias
            yield f"{layer}.project", read(f"{cell}/W_P_0").T


def _reorder_gates(gates: np.ndarray) -> np.ndarray:
    """Reorder the rows of the four gates."""
    parts = np.split(gates, 4)
    return np.concatenate([parts[gate] for gate in _GATES])


@contextmanager
def _open_hdf5(path: Path) -> Iterator[Read]:
    try:
        import h5py
    except ImportError:
        raise WeftError("to read ELMo's weights, h5py is needed: pip install 'weft[elmo]'") from None
    try:
        with h5py.File(path, "r") as file:
            yield lambda name: np.asarray(_read_dataset(file, name, path)[()])
    except (OSError, IndexError, ValueError) as error:  # not HDF5, or another number of dimensions
        raise CheckpointError(f"{path}: cannot be read as the weights of an ELMo model: {error}") from None


def _read_dataset(file: Mapping[str, Any], name: str, path: Path) -> Any:
    try:
        dataset = file[name]
    except KeyError:
        raise CheckpointError(
            f"{path}: has no {name!r}, which the options require; are both files of one model?"
        ) from None
    size = getattr(dataset, "nbytes", None)  # a group has none
    if size is None or size > path.stat().st_size:
        raise CheckpointError(f"{path}: {name!r} must be an array, but is {dataset!r}")
    return dataset


def _tokenizer(vocab: Path | None) -> Tokenizer:
    """Return a tokenizer for pre-tokenized text, as the models were trained on; it has at least one word."""
    try:
        lines = ["."] if vocab is None else read_small_text(vocab).split()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{vocab}: cannot be read as a list of words: {error}") from None
    words = [word for word in lines if word not in _SPECIAL]
    return Words.train(words, Words.Config(name="words", split="whitespace", size=len(words) + 3))
