"""TextClassifier and TextTagger: scikit-learn estimators that train a recipe."""

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from weft.config.overrides import Overrides
from weft.config.starters import NEEDS_VALIDATION, STARTERS, Starter, has_few_words
from weft.estimators.inputs import InputError, check_lengths, read_sentences, read_texts, set_text_tags
from weft.estimators.persistence import EstimatorInfo, json_parameters, read_estimator_info, save_estimator
from weft.pipeline import Pipeline, load, train

ModelSource = str | Path | Mapping[str, Any] | Pipeline | None
RecipeSection = Mapping[str, Any]
_Rows = list[dict[str, Any]]

MIN_ROWS_TO_STOP_EARLY = 200  # below, a tenth of the rows says too little of when to stop

_FINETUNING = Starter(
    "pretrained weights",
    {"train": {"lr": 5e-5, "schedule": "warmup-linear", "warmup": 0.1}},
    {
        2_000: {"train": {"epochs": 10, "batch_size": 16}},
        math.inf: {"train": {"epochs": 3, "batch_size": 32}},
    },
)


class _TrainedEstimator(BaseEstimator):  # type: ignore[misc]
    """The base of classifier and tagger: builds a recipe, and trains it on the data of `fit`.

    `model` is a path, a name on the hub or a `weft.Pipeline` to fine-tune; or a mapping, the model section of a recipe,
    to train from scratch; None is a small model from scratch. What is None is chosen by the amount of data, as `weft
    init` does (`weft.config.starters`): `epochs` (or `steps`, updates), `batch_size` and `lr`.

    With `early_stopping`, `validation_fraction` of the examples is held out: the model is evaluated on them after each
    epoch, the best one is kept, and the training ends after `n_iter_no_change` epochs without improvement. Of fewer
    than 200 examples none is held out.

    `overrides` are changes to the recipe as on the command line, such as `["train.schedule=cosine",
    "data.max_length=200"]`, or a mapping. The run's directory is `out`, by default a temporary one.
    """

    _task: ClassVar[str]
    _truncation: ClassVar[str]

    def __init__(
        self,
        model: ModelSource = None,
        *,
        tokenizer: RecipeSection | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        lr: float | None = None,
        batch_size: int | None = None,
        early_stopping: bool = True,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 3,
        overrides: Overrides = (),
        seed: int = 1,
        device: str = "auto",
        out: str | Path | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.epochs = epochs
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.overrides = overrides
        self.seed = seed
        self.device = device
        self.out = out

    def _starter(self, rows: _Rows) -> Starter:
        """Return the recipe to start from, of a model from scratch."""
        return STARTERS[self._task]

    def _fit(self, rows: _Rows, labels: Sequence[str]) -> None:
        """Train on rows, each of which has one of these labels, or one a word."""
        with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
            path = Path(scratch) / "train.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            out = Path(scratch) / "run" if self.out is None else self.out
            recipe = self._recipe(rows, labels, Path(scratch))
            recipe["data"] = {"train": str(path), "truncation": self._truncation, **recipe["data"]}
            self.pipeline_ = train(recipe, self.overrides, out)

    def _recipe(self, rows: _Rows, labels: Sequence[str], scratch: Path) -> dict[str, Any]:
        """Return the recipe for these rows, without the file that they are in."""
        model = self._model_section(scratch)
        finetuning = model.get("weights") is not None
        starter = _FINETUNING if finetuning else self._starter(rows)
        recipe: dict[str, Any] = starter.recipe(len(rows))
        own_task = recipe["task"] if self.model is None else {}  # its dropout is for the model of the starter
        recipe["task"] = {"name": self._task, "labels": list(labels), **own_task}
        if self.model is not None:
            recipe["model"] = model
        if self.tokenizer is not None:
            recipe["tokenizer"] = dict(self.tokenizer)
        elif finetuning:
            del recipe["tokenizer"]  # it comes with the weights
        validates = self.early_stopping and len(rows) >= MIN_ROWS_TO_STOP_EARLY
        if validates:
            recipe["data"]["validation_fraction"] = self.validation_fraction
        recipe["train"] = self._train_section(recipe["train"], validates)
        return recipe

    def _model_section(self, scratch: Path) -> dict[str, Any]:
        """Return the model section; a pipeline is written to `scratch`. Empty: that of the starter."""
        if self.model is None or isinstance(self.model, Mapping):
            return dict(self.model or {})
        weights = self.model.save(scratch / "start") if isinstance(self.model, Pipeline) else self.model
        return {"weights": str(weights)}

    def _train_section(self, section: RecipeSection, validates: bool) -> dict[str, Any]:
        """Return the starter's train section with the parameters that are given."""
        excluded = {*(() if validates else NEEDS_VALIDATION), *(() if self.steps is None else ("epochs", "eval_every"))}
        given = {"lr": self.lr, "batch_size": self.batch_size, "epochs": self.epochs, "steps": self.steps}
        given |= {"patience": self.n_iter_no_change} if validates else {}
        own = {key: value for key, value in section.items() if key not in excluded}
        own |= {key: value for key, value in given.items() if value is not None}
        return {**own, "seed": self.seed, "device": self.device}

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
    """A label for each text; by default, `model` is fastText's mean of words and bigrams, from scratch.

    Texts of a few words, such as names, and those without spaces are read by characters, by a bidirectional LSTM. A
    text that is longer than the model reads (1,024 tokens, or as many as pretrained weights allow) is cut.
    """

    _task: ClassVar[str] = "classify"
    _truncation: ClassVar[str] = "cut"

    def _starter(self, rows: _Rows) -> Starter:
        """Return fastText, or where texts have few words a network over characters."""
        lengths = np.array([(len(row["text"].split()), len(row["text"])) for row in rows])
        words, characters = np.median(lengths, axis=0)
        few_words = has_few_words(words, np.percentile(lengths[:, 0], 95), characters)
        return STARTERS["classify-characters" if few_words else "classify"]

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
    """A tag for each word; by default, `model` is a bidirectional LSTM over words and their characters, from scratch.

    A sentence that is longer than the model reads is tagged in windows.
    """

    _task: ClassVar[str] = "tag"
    _truncation: ClassVar[str] = "window"

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
