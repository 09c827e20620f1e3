"""Which layers know most: every choice of a frozen model's layers, scored by logistic regression on labelled data.

Table 7 of Devlin et al. 2019, "BERT: pre-training of deep bidirectional transformers", for any model that encodes and
any data of `classify` or `tag`: the embeddings, each layer, the last four summed and side by side, all of them summed.
The paper puts a BiLSTM on top, and here it is `weft.analysis.logistic_regression`.

The data is encoded once: all layers of each text (pooled), or of each word (its first sub-word), are kept in a file
that has no name, and every choice is made from it. What is held in memory does not grow with the data.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.analysis.logistic_regression import Probe, blocks, mapped
from weft.config.schema import Data, Named, Run, Train, read_recipe, read_section, recipe_names
from weft.data.batching.loader import plan
from weft.data.batching.packed import PackedItems, pack
from weft.data.readers.examples import Skipped
from weft.data.samples.datasets import SAMPLES
from weft.data.truncation import TruncationPolicy
from weft.embedding import Choice, Combine, Layers, Pool, check_encodes, chosen_layers, pooled
from weft.errors import ConfigError, DataError
from weft.registry import resolve
from weft.tasks.base import Head, Task
from weft.tasks.classification.task import Classify, ClassifyConfig
from weft.tasks.factory import make_task
from weft.tasks.label_task import Labelling
from weft.tasks.prepare import encode_all, has_split, pack_split, read_split, settled
from weft.tasks.tagging import Tag
from weft.tokenization.trainable import Tokenizer

BUDGET, BUDGET_ON_GPU = 4096, 1 << 15  # tokens in a batch
POOLS: tuple[Pool, ...] = ("mean", "cls", "last")  # with these the sum of pooled layers is the pool of their sum
# What a recipe says of its own head.
OF_HEADS = ("crf", "dropout", "layers", "smoothing", "symmetric", "unknown", "weights")

Tell = Callable[[str], object]


@dataclass(frozen=True)
class LayerChoice:
    """Layers, by number, and how they become one vector."""

    name: str
    layers: tuple[int, ...]
    combine: Combine = "sum"


@dataclass(frozen=True)
class LayerScore:
    """What a choice is worth on data that the regression has not seen; `width` is of its vectors."""

    choice: LayerChoice
    width: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class LayerScores:
    """All choices, what they were fitted to and scored on, and the metric that counts."""

    task: str
    split: str
    trained: int  # texts, or words
    scored: int
    metric: str
    scores: tuple[LayerScore, ...]

    @property
    def best(self) -> LayerScore:
        """The first of those that score highest."""
        return max(self.scores, key=lambda one: one.metrics[self.metric])

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows, with a star at the best."""
        names = list(self.scores[0].metrics)
        rows = [
            [one.choice.name, str(one.width), *(f"{one.metrics[name]:.4f}" for name in names), "*" * (one is self.best)]
            for one in self.scores
        ]
        return ["layers", "width", *names, ""], rows

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-ready numbers and words."""
        scores = [
            {
                "name": one.choice.name,
                "layers": list(one.choice.layers),
                "combine": one.choice.combine,
                "width": one.width,
                **one.metrics,
            }
            for one in self.scores
        ]
        about = {"task": self.task, "split": self.split, "trained": self.trained, "scored": self.scored}
        return {**about, "metric": self.metric, "best": self.best.choice.name, "choices": scores}


def score_layers(
    run: Run,
    head: Head,
    task: Labelling,
    choices: Sequence[LayerChoice],
    pool: Pool = "mean",
    tell: Tell | None = None,
) -> LayerScores:
    """Score choices of a head's layers, which `choices_for` made, for a task that `read_task` made."""
    data, split = run.data, "valid" if has_split(run.data, "valid") else "test"
    packed, notice = pack_split(data, "train", task, task.tokenizer)
    _check_labels(packed, task)
    examples, encoded = _judged(data, split, task)  # here, for what is wrong with it is to be said soon
    for told in (notice and f"data.train: {notice}", "encoding, once for all choices"):
        if tell and told:
            tell(told)
    cache, labels = encode(task, head, packed, pool)
    test, _ = encode(
        task, head, pack((item for items in encoded for item in items), num_token_arrays=task.num_token_arrays), pool
    )
    scores = []
    for choice in choices:
        places = [head.body.mixable_layers.index(layer) for layer in choice.layers]
        features = combine_layers(cache, places, choice.combine)
        probe = Probe.fit(features, labels, len(task.labels))
        found = probe.predict(combine_layers(test, places, choice.combine))
        metrics = task.score(_answers(task, examples, encoded, found.tolist()), examples)
        scores.append(LayerScore(choice, features.shape[1], metrics))
    return LayerScores(task.config.name, split, len(labels), test.shape[1], task.metric, tuple(scores))


def read_task(
    data: str | Path | Mapping[str, Any], overrides: Iterable[str], run: Run, head: Head, tokenizer: Tokenizer
) -> tuple[Run, Labelling]:
    """Make the task that data asks for, read by a model as if it had been trained for it."""
    raw = read_recipe(_recipe(data), overrides)
    told = {key: value for key, value in dict(raw.get("task") or {}).items() if key not in OF_HEADS}
    if told.get("name") not in ("classify", "tag"):
        raise ConfigError(
            f"task.name: layers are scored by labels of texts or words, for 'classify' or 'tag', but it is "
            f"{told.get('name')!r} instead; name such data, or set task.name"
        )
    section: Named = read_section(resolve("task", told["name"]).Config, told, "task")
    if isinstance(section, ClassifyConfig) and (section.multiple or section.regression):
        raise ConfigError(
            f"task.{'multiple' if section.multiple else 'regression'}: layers are scored by one label a text or word; "
            "leave it out, for data that has such"
        )
    own = read_section(Data, raw.get("data", {}), "data")
    if not (has_split(own, "valid") or has_split(own, "test")):
        raise ConfigError("data.valid: needed to score on what was not learnt from; add data.valid=FILE")
    fresh = Run(task=section, data=own, tokenizer=run.tokenizer, model=run.model, train=Train(steps=1))
    fresh = fresh.model_copy(update={"task": settled(own, make_task(fresh))})
    task = make_task(fresh)
    task.tokenizer = tokenizer
    assert isinstance(task, Classify | Tag)
    reads = getattr(head.body, "reads", None)
    longest = own.longest if reads is None else min(own.longest, max(1, reads - task.num_special_tokens))
    return fresh.model_copy(update={"data": own.model_copy(update={"longest": longest})}), task


def _recipe(data: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Read a recipe, by its file or name; make one of a sample, or of a file of labelled rows."""
    name = str(data)
    if isinstance(data, Mapping) or name in recipe_names() or name.endswith((".yaml", ".yml")):
        return read_recipe(data)
    if name in SAMPLES:
        return {"task": {"name": SAMPLES[name].task}, "data": {"sample": name}}
    words = ".conll" in name
    return {"task": {"name": "tag" if words else "classify"}, "data": {"train": name}}


def _check_labels(data: PackedItems, task: Labelling) -> None:
    """Refuse data with one label before it is encoded."""
    found = {int(label) for number in range(len(data)) for label in np.unique(data[number][-1])}
    if len(found) < 2:
        names = ", ".join(repr(task.labels.names[label]) for label in found) or "none"
        raise DataError(
            f"data.train: the labels of what is read are {names}, where two are needed to tell apart; add rows of "
            "another, or see data.columns"
        )


def choices_for(head: Head, given: Sequence[tuple[Layers, Combine]], pool: Pool) -> list[LayerChoice]:
    """List what is scored of a model, and refuse what it cannot give before any data is read."""
    check_encodes(head)
    if pool not in POOLS:
        raise ConfigError(f"pool: must be one of {', '.join(POOLS)} where layers are compared, but is {pool!r} instead")
    for layers, combine in given:
        Choice(pool, layers, combine)
    return choices_of(head.body.mixable_layers, given)


def choices_of(levels: Sequence[int], given: Sequence[tuple[Layers, Combine]] = ()) -> list[LayerChoice]:
    """Name the choices of the paper's table for a model with these layers, then those that are given."""
    above = tuple(level for level in levels if level != 0)
    named = {0: "0 (embeddings)", **({above[-2]: f"{above[-2]} (second to last)"} if len(above) > 1 else {})}
    named |= {above[-1]: f"{above[-1]} (last)"} if above else {}
    found = [LayerChoice(named.get(level, str(level)), (level,)) for level in levels]
    four = above[-4:]
    if len(four) > 1:
        found.append(LayerChoice(f"sum of the last {len(four)}", four))
        found.append(LayerChoice(f"concat of the last {len(four)}", four, "concat"))
    if len(above) > len(four):
        found.append(LayerChoice(f"sum of all {len(above)}", above))
    for layers, combine in given:
        chosen = _counted(chosen_layers(layers, levels), levels)
        found.append(LayerChoice(f"{combine} of {', '.join(map(str, chosen))}", chosen, combine))
    return found


def _counted(layers: Sequence[int], levels: Sequence[int]) -> tuple[int, ...]:
    """Turn layers that are counted from the end, too, into the numbers in `levels`."""
    if not all(layer in levels or (layer < 0 <= layer + len(levels)) for layer in layers):
        raise ConfigError(f"layers: this model has {', '.join(map(str, levels))}, but {list(layers)} is asked for")
    return tuple(layer if layer in levels else levels[layer] for layer in layers)


def encode(task: Labelling, head: Head, data: PackedItems, pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    """Return all layers (L, rows, D) of each text, or of each word, and their labels (rows,) by number."""
    body, device = head.eval().body, next(head.parameters()).device
    words = isinstance(task, Tag)
    sizes = np.array([len(data[number][1]) if words else 1 for number in range(len(data))], np.int64)
    ends = sizes.cumsum()
    cache, labels = mapped(len(body.mixable_layers), int(ends[-1]), body.width), np.zeros(int(ends[-1]), np.int64)
    for chosen in plan(data, BUDGET if device.type == "cpu" else BUDGET_ON_GPU, seed=None):
        batch = task.collate([data[number] for number in chosen.tolist()], np.random.default_rng(0)).to(device)
        assert batch.targets is not None
        with torch.inference_mode():
            states = body.encode(batch.tokens, body.mixable_layers)
            if batch.at is not None:
                found = states[:, batch.at.ids].float()
            else:
                found = torch.stack([pooled(layer[None], batch.tokens, pool, "sum") for layer in states])
        rows = np.concatenate([np.arange(ends[one] - sizes[one], ends[one]) for one in chosen])
        cache[:, rows], labels[rows] = found.cpu().numpy(), batch.targets.cpu().numpy()
    return cache, labels


def combine_layers(cache: np.ndarray, places: Sequence[int], combine: Combine) -> np.ndarray:
    """Make the features (rows, D or L·D) of a choice from all layers (L, rows, D)."""
    if len(places) == 1:
        alone: np.ndarray = cache[places[0]]
        return alone
    rows, width = cache.shape[1:]
    found = mapped(rows, width * (len(places) if combine == "concat" else 1))
    for part in blocks(rows, width * len(places)):
        if combine == "concat":
            found[part] = np.concatenate([cache[place, part] for place in places], 1)
        else:
            found[part] = sum(cache[place, part] for place in places) / (len(places) if combine == "mean" else 1)
    return found


def _judged(data: Data, split: str, task: Task) -> tuple[list[Any], list[list[Any]]]:
    """Read the examples to score on, and what each is encoded to."""
    skipped, limit = Skipped(), TruncationPolicy(data.longest, data.too_long)
    placed = list(read_split(data, split, task, skipped))
    encoded = encode_all(placed, task, task.tokenizer, limit, skipped if data.on_bad_rows == "skip" else None)
    both = [(example, items) for (_, example), items in zip(placed, encoded, strict=True) if items]
    if not both:
        raise DataError(f"data.{split}: not one example is left to score on; {limit}")
    return [example for example, _ in both], [items for _, items in both]


def _answers(task: Labelling, examples: list[Any], encoded: list[list[Any]], found: list[int]) -> list[Any]:
    """Turn the labels of all rows, by number, into the answers to the examples that they belong to."""
    left, answers = iter(found), []
    for example, items in zip(examples, encoded, strict=True):
        outputs = []
        for item in items:
            numbers = [next(left) for _ in range(len(item[1]) if isinstance(task, Tag) else 1)]
            likely = [1.0] * len(numbers) if isinstance(task, Tag) else _certain(numbers[0], len(task.labels))
            outputs.append((numbers, likely))
        answers.append(task.answer(example, outputs))
    return answers


def _certain(number: int, labels: int) -> list[float]:
    return [float(one == number) for one in range(labels)]
