"""TextClassifier and TextTagger: scikit-learn estimators that train a recipe."""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from weft.config.schema import Overrides
from weft.errors import ConfigError
from weft.estimators.inputs import InputError, check_lengths, read_sentences, read_texts, set_text_tags
from weft.estimators.persistence import EstimatorInfo, json_parameters, read_estimator_info, save_estimator
from weft.pipeline import Pipeline, load, train

ModelSource = str | Path | Mapping[str, Any] | Pipeline | None
RecipeSection = Mapping[str, Any]

_LR_FROM_SCRATCH, _LR_FINETUNING = 3e-3, 5e-5  # default learning rates
_NUM_EVALUATIONS = 5  # evaluations during a training that has validation data


class _TrainedEstimator(BaseEstimator):  # type: ignore[misc]
    """The base of classifier and tagger: builds a recipe, and trains it on the data of `fit`.

    `model` is a path, a name on the hub or a `weft.Pipeline` to fine-tune; or a mapping, the model section of a recipe,
    to train from scratch; None is a small model from scratch. `overrides` are changes to the recipe as on the command
    line, such as `["train.schedule=cosine", "data.truncation=cut"]`, or a mapping. The share `validation` of the
    examples is held out, to keep the best of several evaluated models. The run's directory is `out`, by default a
    temporary one.
    """

    _task: ClassVar[str]
    _model: ClassVar[RecipeSection]
    _tokenizer: ClassVar[RecipeSection]

    def __init__(
        self,
        model: ModelSource = None,
        *,
        tokenizer: RecipeSection | None = None,
        steps: int = 300,
        lr: float | None = None,
        batch_tokens: int = 2048,
        validation: float = 0.0,
        overrides: Overrides = (),
        seed: int = 1,
        device: str = "auto",
        out: str | Path | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.steps = steps
        self.lr = lr
        self.batch_tokens = batch_tokens
        self.validation = validation
        self.overrides = overrides
        self.seed = seed
        self.device = device
        self.out = out

    def _fit(self, rows: list[dict[str, Any]], labels: Sequence[str]) -> None:
        """Train on rows, each of which has one of these labels, or one a word."""
        if not 0 <= self.validation < 1:
            raise ConfigError(f"validation: must be a share from 0 to below 1, but is {self.validation!r} instead")
        with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
            num_held_out = int(len(rows) * self.validation)
            order = np.random.default_rng(self.seed).permutation(len(rows)) if num_held_out else np.arange(len(rows))
            splits = {"train": order[num_held_out:], "valid": order[:num_held_out]}
            data = {
                split: _write_jsonl(Path(scratch), split, [rows[index] for index in indices])
                for split, indices in splits.items()
                if len(indices)
            }
            out = Path(scratch) / "run" if self.out is None else self.out
            self.pipeline_ = train(self._recipe(data, labels, Path(scratch)), self.overrides, out)

    def _recipe(self, data: RecipeSection, labels: Sequence[str], scratch: Path) -> dict[str, Any]:
        section: dict[str, Any] = {"steps": self.steps, "batch_tokens": self.batch_tokens, "seed": self.seed}
        section |= {"schedule": "warmup-linear", "warmup": 0.1, "device": self.device}
        if "valid" in data:
            section["eval_every"] = max(1, self.steps // _NUM_EVALUATIONS)
        recipe: dict[str, Any] = {"task": {"name": self._task, "labels": list(labels)}, "data": dict(data)}
        if self.model is None or isinstance(self.model, Mapping):
            recipe["model"] = dict(self._model if self.model is None else self.model)
        else:
            model = self.model
            recipe["model"] = {"weights": str(model.save(scratch / "start") if isinstance(model, Pipeline) else model)}
        finetuning = recipe["model"].get("weights") is not None
        if not finetuning or self.tokenizer is not None:  # otherwise it comes with the weights
            recipe["tokenizer"] = dict(self.tokenizer or self._tokenizer)
        lr = (_LR_FINETUNING if finetuning else _LR_FROM_SCRATCH) if self.lr is None else self.lr
        return {**recipe, "train": {**section, "lr": lr}}

    def _labels(self, names: Iterable[Any]) -> list[str]:
        """Return the classes as strings, which must be distinct and not blank."""
        labels = [str(name) for name in names]
        if len(set(labels)) < len(labels) or not all(label.strip() for label in labels):
            raise InputError(f"y: classes must be spelt differently, and none blank, but are {labels}")
        return labels

    def save(self, path: str | Path) -> Path:
        """Write the trained model and the estimator's parameters to a new folder."""
        check_is_fitted(self, "pipeline_")
        about = EstimatorInfo(kind=type(self).__name__, parameters=json_parameters(self, "device"))
        classes = {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}
        return save_estimator(path, self.pipeline_, about.model_copy(update=classes))

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> Self:
        """Load what `save` wrote, onto any device; no code from the checkpoint is run."""
        about = read_estimator_info(cls, path)
        estimator = cls(**about.parameters | {"device": device})
        estimator.classes_ = np.array(about.classes, dtype=about.dtype)
        estimator.pipeline_ = load(path, estimator.device)
        return estimator


class TextClassifier(ClassifierMixin, _TrainedEstimator):  # type: ignore[misc]
    """A label for each text; by default, `model` is a small convolutional network from scratch."""

    _task: ClassVar[str] = "classify"
    _model: ClassVar[RecipeSection] = {"name": "cnn", "width": 192, "kernels": [2, 3, 4], "embedding": 64}
    _tokenizer: ClassVar[RecipeSection] = {"name": "bpe", "size": 4000}

    def fit(self, X: Iterable[str], y: Iterable[Any]) -> Self:
        """Train on texts and their labels: strings, integers, or others with distinct strings."""
        texts = read_texts(X)
        if y is None:
            raise InputError("y: requires y to be passed, a label a text, but the target y is None")
        targets = column_or_1d(y, warn=True)
        check_classification_targets(targets)
        check_lengths(texts, targets)
        self.classes_, class_indices = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(f"y: there must be two classes to tell apart, but the one class is {self.classes_[0]!r}")
        labels = self._labels(self.classes_)
        rows = [{"text": text, "label": labels[index]} for text, index in zip(texts, class_indices, strict=True)]
        self._fit(rows, labels)
        return self

    def predict(self, X: Iterable[str]) -> Any:
        """Return the most probable class of each text, (n,)."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]

    def predict_proba(self, X: Iterable[str]) -> Any:
        """Return the probability of each class for each text, (n, K), in the order of `classes_`."""
        check_is_fitted(self, "pipeline_")
        # `Pipeline.answers` would round the probabilities; the labels are in the order of the classes.
        outputs = self.pipeline_.outputs({"text": text} for text in read_texts(X))
        probabilities = np.array([row for ((_, row),) in outputs], np.float64).reshape(-1, len(self.classes_))
        return probabilities / probabilities.sum(1, keepdims=True)

    def __sklearn_tags__(self) -> Tags:
        """Return tags: the input is text."""
        return set_text_tags(super().__sklearn_tags__())


class TextTagger(_TrainedEstimator):
    """A tag for each word; by default, `model` is a small bidirectional LSTM from scratch."""

    _task: ClassVar[str] = "tag"
    _model: ClassVar[RecipeSection] = {"name": "rnn", "direction": "both", "width": 128, "embedding": 64, "chars": 32}
    _tokenizer: ClassVar[RecipeSection] = {"name": "words"}

    def fit(self, X: Iterable[Sequence[str]], y: Iterable[Sequence[str]]) -> Self:
        """Train on sentences, each a list of words, and a list of tags for each."""
        sentences, tags = read_sentences(X, "X"), read_sentences([] if y is None else y, "y")
        check_lengths(sentences, tags)
        for number, (words, word_tags) in enumerate(zip(sentences, tags, strict=True), 1):
            if len(words) != len(word_tags):
                raise InputError(f"y: sentence {number} has {len(words)} words, but {len(word_tags)} tags")
        self.classes_ = np.unique(np.array([tag for word_tags in tags for tag in word_tags]))
        rows = [{"words": words, "tags": word_tags} for words, word_tags in zip(sentences, tags, strict=True)]
        self._fit(rows, self._labels(self.classes_))
        return self

    def predict(self, X: Iterable[Sequence[str]]) -> list[list[str]]:
        """Return the tags of each sentence's words."""
        return [answer["tags"] for answer in self._answers(read_sentences(X, "X"))]

    def score(self, X: Iterable[Sequence[str]], y: Iterable[Sequence[str]]) -> float:
        """Return the F1 of entities where tags denote entities, otherwise the accuracy of tags."""
        sentences, tags = read_sentences(X, "X"), read_sentences(y, "y")
        check_lengths(sentences, tags)
        answers = self._answers(sentences)
        task = self.pipeline_.task
        examples = [task.Example(words=words, tags=word_tags) for words, word_tags in zip(sentences, tags, strict=True)]
        return float(task.score(answers, examples)[task.metric])

    def _answers(self, sentences: list[list[str]]) -> list[Any]:
        check_is_fitted(self, "pipeline_")
        return list(self.pipeline_.answers({"words": words} for words in sentences))

    def __sklearn_tags__(self) -> Tags:
        """Return tags: the input is sentences, and the target a list of tags for each."""
        tags = set_text_tags(super().__sklearn_tags__())
        tags.target_tags.required = True
        return tags


def _write_jsonl(folder: Path, split: str, rows: list[dict[str, Any]]) -> str:
    path = folder / f"{split}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
