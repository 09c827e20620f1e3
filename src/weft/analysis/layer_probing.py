"""Layer probing: choices of a frozen model's layers, scored by logistic regression on labelled data.

Table 7 of Devlin et al. 2019, "BERT: pre-training of deep bidirectional transformers", for any encoder and
any data of `classify` or `tag`: the embeddings, each layer, the last four summed and concatenated, all of them summed.
The paper trains a BiLSTM on top; here it is `weft.analysis.logistic_regression`.

The data is encoded once: all layers of each text (pooled), or of each word (its first sub-word), are kept in an
unlinked temporary file, from which the features of every choice are made. Memory use does not grow with the data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.analysis.logistic_regression import LogisticProbe, row_blocks, temporary_array
from weft.config.overrides import Overrides
from weft.config.recipes import read_recipe, recipe_names
from weft.config.run import Run
from weft.config.schema import Named, read_section
from weft.config.sections import Data, Train
from weft.data.batching.loader import plan_batches
from weft.data.batching.packed_items import PackedItems, pack
from weft.data.readers.column_mapping import ColumnSpec
from weft.data.readers.examples import Skipped
from weft.data.readers.records import read_as_recipe
from weft.data.samples.datasets import SAMPLES
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.registry import resolve
from weft.tasks.base import Task
from weft.tasks.classification.task import Classify, ClassifyConfig
from weft.tasks.encoding import encode_all
from weft.tasks.factory import make_task, resolve_run
from weft.tasks.head import Head
from weft.tasks.label_task import LabelTask
from weft.tasks.prepare import has_split, pack_split, read_split
from weft.tasks.tagging import Tag
from weft.text_embedding import Combine, EmbeddingOptions, LayerSelection, Pool, check_encodes, chosen_layers, pooled
from weft.tokenization.trainable import Tokenizer

BUDGET, BUDGET_ON_GPU = 4096, 1 << 15  # tokens in a batch
POOLS: tuple[Pool, ...] = ("mean", "cls", "last")  # for these, pooling and summing layers commute
# Task options of a trained head, which a probe does not have.
HEAD_OPTIONS = ("crf", "dropout", "layers", "smoothing", "symmetric", "unknown", "weights")


@dataclass(frozen=True)
class LayerChoice:
    """Layers, by number, and how they are combined to one vector."""

    name: str
    layers: tuple[int, ...]
    combine: Combine = "sum"


@dataclass(frozen=True)
class LayerScore:
    """The metrics of a choice on held-out data; `width` is that of its vectors."""

    choice: LayerChoice
    width: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class LayerScores:
    """The scores of all choices, the sizes of the data, and the metric that selects the best."""

    task: str
    split: str
    trained: int  # texts, or words
    scored: int
    metric: str
    scores: tuple[LayerScore, ...]

    @property
    def best(self) -> LayerScore:
        """The highest score; of equal ones, the first."""
        return max(self.scores, key=lambda score: score.metrics[self.metric])

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows, with an asterisk at the best."""
        names = list(self.scores[0].metrics)
        rows = [
            [
                score.choice.name,
                str(score.width),
                *(f"{score.metrics[name]:.4f}" for name in names),
                "*" * (score is self.best),
            ]
            for score in self.scores
        ]
        return ["layers", "width", *names, ""], rows

    def to_dict(self) -> dict[str, Any]:
        """Return the data as JSON-ready values."""
        scores = [
            {
                "name": score.choice.name,
                "layers": list(score.choice.layers),
                "combine": score.choice.combine,
                "width": score.width,
                **score.metrics,
            }
            for score in self.scores
        ]
        about = {"task": self.task, "split": self.split, "trained": self.trained, "scored": self.scored}
        return {**about, "metric": self.metric, "best": self.best.choice.name, "choices": scores}


def score_layers(
    run: Run,
    head: Head,
    task: LabelTask,
    choices: Sequence[LayerChoice],
    pool: Pool = "mean",
    tell: Callable[[str], object] | None = None,
) -> LayerScores:
    """Return the scores of the choices (of `choices_for`) of a head's layers on a task (of `read_task`)."""
    data, split = run.data, "valid" if has_split(run.data, "valid") else "test"
    packed, notice = pack_split(data, "train", task, task.tokenizer)
    _check_labels(packed, task)
    examples, encoded = _read_examples(data, split, task)  # here, so that errors in the data are raised early
    for message in (notice and f"data.train: {notice}", "encoding, once for all choices"):
        if tell and message:
            tell(message)
    train, labels = encode_layers(task, head, packed, pool)
    test, _ = encode_layers(
        task, head, pack((item for items in encoded for item in items), num_token_arrays=task.num_token_arrays), pool
    )
    scores = []
    for choice in choices:
        indices = [head.body.mixable_layers.index(layer) for layer in choice.layers]
        features = layer_features(train, indices, choice.combine)
        probe = LogisticProbe.fit(features, labels, len(task.labels))
        predicted = probe.predict(layer_features(test, indices, choice.combine))
        metrics = task.score(_answers(task, examples, encoded, predicted.tolist()), examples)
        scores.append(LayerScore(choice, features.shape[1], metrics))
    return LayerScores(task.config.name, split, len(labels), test.shape[1], task.metric, tuple(scores))


def probing_task(
    data: str | Path | Mapping[str, Any],
    overrides: Overrides,
    run: Run,
    head: Head,
    tokenizer: Tokenizer,
    columns: ColumnSpec | None = None,
) -> tuple[Run, LabelTask]:
    """Return the run and the task that probe a model on labelled data; model and tokenizer are those of `run`."""
    raw = read_recipe(_recipe(data, run, columns), overrides)
    options = {key: value for key, value in dict(raw.get("task") or {}).items() if key not in HEAD_OPTIONS}
    if options.get("name") not in ("classify", "tag"):
        raise ConfigError(
            f"task.name: layers are scored by labels of texts or words, for 'classify' or 'tag', but it is "
            f"{options.get('name')!r} instead; name such data, or set task.name"
        )
    section: Named = read_section(resolve("task", options["name"]).Config, options, "task")
    if isinstance(section, ClassifyConfig) and (section.multiple or section.regression):
        raise ConfigError(
            f"task.{'multiple' if section.multiple else 'regression'}: layers are scored by one label per text or "
            "word; leave it out, and use data with such labels"
        )
    data_section = read_section(Data, raw.get("data", {}), "data")
    if not (has_split(data_section, "valid") or has_split(data_section, "test")):
        raise ConfigError("data.valid: required, to score on data that was not trained on; add data.valid=FILE")
    probed = Run(task=section, data=data_section, tokenizer=run.tokenizer, model=run.model, train=Train(steps=1))
    task = make_task(probed)
    probed = resolve_run(probed, task)
    task.tokenizer = tokenizer
    assert isinstance(task, Classify | Tag)
    longest, max_positions = data_section.max_length, getattr(head.body, "max_positions", None)
    if max_positions is not None:
        longest = min(longest, max(1, max_positions - task.num_special_tokens))
    return probed.model_copy(update={"data": data_section.model_copy(update={"max_length": longest})}), task


def _recipe(data: str | Path | Mapping[str, Any], run: Run, columns: ColumnSpec | None) -> Mapping[str, Any]:
    """Return the recipe of a file or name; for a sample or a file of labelled rows, make one."""
    name = str(data)
    if isinstance(data, Mapping) or name in recipe_names() or name.endswith((".yaml", ".yml")):
        return read_recipe(data)
    if name in SAMPLES:
        return {"task": {"name": SAMPLES[name].task}, "data": {"sample": name}}
    task, fields = ("tag", ["words", "tags"]) if ".conll" in name else ("classify", ["text", "label"])
    own = run.data if run.task.name == task else Data(train=name)
    read = read_as_recipe(own, name, columns, fields).model_dump(include={"format", "columns", "header"})
    return {"task": {"name": task}, "data": {"train": name, **read}}


def _check_labels(data: PackedItems, task: LabelTask) -> None:
    """Raise an error if the training data has fewer than two labels; called before it is encoded."""
    labels = {int(label) for index in range(len(data)) for label in np.unique(data[index][-1])}
    if len(labels) < 2:
        names = ", ".join(repr(task.labels.names[label]) for label in labels) or "none"
        raise DataError(
            f"data.train: must have two labels or more, but has {names}; add rows with another label, or check "
            "data.columns"
        )


def choices_for(head: Head, requested: Sequence[tuple[LayerSelection, Combine]], pool: Pool) -> list[LayerChoice]:
    """Return the choices to score for a model; raise an error for an unsupported one."""
    check_encodes(head)
    if pool not in POOLS:
        raise ConfigError(f"pool: must be one of {', '.join(POOLS)} where layers are compared, but is {pool!r} instead")
    for layers, combine in requested:
        EmbeddingOptions(pool, layers, combine)
    return choices_of(head.body.mixable_layers, requested)


def choices_of(levels: Sequence[int], requested: Sequence[tuple[LayerSelection, Combine]] = ()) -> list[LayerChoice]:
    """Return the choices of the paper's table for a model with these layers, then the requested ones."""
    hidden = tuple(level for level in levels if level != 0)  # without the embeddings
    names = {0: "0 (embeddings)", **({hidden[-2]: f"{hidden[-2]} (second to last)"} if len(hidden) > 1 else {})}
    names |= {hidden[-1]: f"{hidden[-1]} (last)"} if hidden else {}
    choices = [LayerChoice(names.get(level, str(level)), (level,)) for level in levels]
    four = hidden[-4:]
    if len(four) > 1:
        choices.append(LayerChoice(f"sum of the last {len(four)}", four))
        choices.append(LayerChoice(f"concat of the last {len(four)}", four, "concat"))
    if len(hidden) > len(four):
        choices.append(LayerChoice(f"sum of all {len(hidden)}", hidden))
    for layers, combine in requested:
        numbers = _resolve_negative(chosen_layers(layers, levels), levels)
        choices.append(LayerChoice(f"{combine} of {', '.join(map(str, numbers))}", numbers, combine))
    return choices


def _resolve_negative(layers: Sequence[int], levels: Sequence[int]) -> tuple[int, ...]:
    """Return layers as numbers in `levels`; negative ones count from the end."""
    if not all(layer in levels or (layer < 0 <= layer + len(levels)) for layer in layers):
        raise ConfigError(f"layers: this model has {', '.join(map(str, levels))}, but {list(layers)} are requested")
    return tuple(layer if layer in levels else levels[layer] for layer in layers)


def encode_layers(task: LabelTask, head: Head, data: PackedItems, pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    """Return all layers (L, rows, D) of each text or word, and the label ids (rows,)."""
    body, device = head.eval().body, head.device
    tags_words = isinstance(task, Tag)
    sizes = np.array([len(data[index][1]) if tags_words else 1 for index in range(len(data))], np.int64)
    ends = sizes.cumsum()
    rows = int(ends[-1])
    cache, labels = temporary_array(len(body.mixable_layers), rows, body.width), np.zeros(rows, np.int64)
    for indices in plan_batches(data, BUDGET if device.type == "cpu" else BUDGET_ON_GPU, seed=None):
        batch = task.collate([data[index] for index in indices.tolist()], np.random.default_rng(0)).to(device)
        assert batch.targets is not None
        with torch.inference_mode():
            hidden = body.encode(batch.tokens, body.mixable_layers)  # (L, N, D)
            if batch.positions is not None:
                vectors = hidden[:, batch.positions.ids].float()
            else:
                vectors = torch.stack([pooled(layer[None], batch.tokens, pool, "sum") for layer in hidden])
        rows_of_batch = np.concatenate([np.arange(ends[index] - sizes[index], ends[index]) for index in indices])
        cache[:, rows_of_batch], labels[rows_of_batch] = vectors.cpu().numpy(), batch.targets.cpu().numpy()
    return cache, labels


def layer_features(cache: np.ndarray, indices: Sequence[int], combine: Combine) -> np.ndarray:
    """Return the features (rows, D or L·D) of a choice from all layers (L, rows, D)."""
    if len(indices) == 1:
        layer: np.ndarray = cache[indices[0]]
        return layer
    rows, width = cache.shape[1:]
    features = temporary_array(rows, width * (len(indices) if combine == "concat" else 1))
    for block in row_blocks(rows, width * len(indices)):
        if combine == "concat":
            features[block] = np.concatenate([cache[index, block] for index in indices], 1)
        else:
            features[block] = sum(cache[index, block] for index in indices) / (len(indices) if combine == "mean" else 1)
    return features


def _read_examples(data: Data, split: str, task: Task) -> tuple[list[Any], list[list[Any]]]:
    """Return the examples to score on and the encoded items of each; examples without items are left out."""
    skipped, limit = Skipped(), TruncationPolicy(data.max_length, data.truncation)
    numbered = list(read_split(data, split, task, skipped))
    encoded = encode_all(numbered, task, task.tokenizer, limit, skipped if data.on_bad_rows == "skip" else None)
    pairs = [(example, items) for (_, example), items in zip(numbered, encoded, strict=True) if items]
    if not pairs:
        raise DataError(f"data.{split}: no example is left to score on; {limit}")
    return [example for example, _ in pairs], [items for _, items in pairs]


def _answers(task: LabelTask, examples: list[Any], encoded: list[list[Any]], predicted: list[int]) -> list[Any]:
    """Return the answers to the examples, from the predicted label ids of all rows."""
    remaining, answers = iter(predicted), []
    for example, items in zip(examples, encoded, strict=True):
        outputs = []
        for item in items:
            ids = [next(remaining) for _ in range(len(item[1]) if isinstance(task, Tag) else 1)]
            probs = [1.0] * len(ids) if isinstance(task, Tag) else _one_hot(ids[0], len(task.labels))
            outputs.append((ids, probs))
        answers.append(task.answer(example, outputs))
    return answers


def _one_hot(label: int, labels: int) -> list[float]:
    return [float(index == label) for index in range(labels)]
