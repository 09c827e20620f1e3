"""A classifier and a tagger that train a recipe, as scikit-learn's estimators."""

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

from weft.errors import ConfigError
from weft.estimators.inputs import InputError, check_lengths, for_texts, read_texts, read_words
from weft.estimators.saved import Saved, plain, read_about, save
from weft.pipeline import Pipeline, load, train

Model = str | Path | Mapping[str, Any] | Pipeline | None
Section = Mapping[str, Any]

_FRESH, _ON = 3e-3, 5e-5  # the learning rate of a model from scratch, and of one that is trained on
_HELD_OUT = 5  # evaluations in a training that has texts to evaluate on


class _Trained(BaseEstimator):  # type: ignore[misc]
    """What the classifier and the tagger share: a recipe, trained on what `fit` is given.

    `model` is what to start from: a path, a name on the hub or a `weft.Pipeline`, whose weights are trained on; a
    mapping is a recipe's section of a model that starts from nothing, and with None that is a small one. `overrides`
    are changes to the recipe as on the command line, such as `["train.schedule=cosine", "data.too_long=cut"]`. Of the
    examples, a share of `validation` is held out, to keep the best of several evaluated models. The run's directory is
    `out`, or else one that goes when it is done.
    """

    _task: ClassVar[str]
    _model: ClassVar[Section]
    _tokenizer: ClassVar[Section]

    def __init__(
        self,
        model: Model = None,
        *,
        tokenizer: Section | None = None,
        steps: int = 300,
        lr: float | None = None,
        batch_tokens: int = 2048,
        validation: float = 0.0,
        overrides: Sequence[str] = (),
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
        """Train on rows, which have one of these labels each or one a word."""
        if not 0 <= self.validation < 1:
            raise ConfigError(f"validation: must be a share from 0 to below 1, but is {self.validation!r} instead")
        with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
            held = int(len(rows) * self.validation)
            order = np.random.default_rng(self.seed).permutation(len(rows)) if held else np.arange(len(rows))
            parts = {"train": order[held:], "valid": order[:held]}
            data = {
                split: _write(Path(scratch), split, [rows[n] for n in own]) for split, own in parts.items() if len(own)
            }
            out = Path(scratch) / "run" if self.out is None else self.out
            self.pipeline_ = train(self._recipe(data, labels, Path(scratch)), self.overrides, out)

    def _recipe(self, data: Section, labels: Sequence[str], scratch: Path) -> dict[str, Any]:
        budget: dict[str, Any] = {"steps": self.steps, "batch_tokens": self.batch_tokens, "seed": self.seed}
        budget |= {"schedule": "warmup-linear", "warmup": 0.1, "device": self.device}
        if "valid" in data:
            budget["eval_every"] = max(1, self.steps // _HELD_OUT)
        recipe: dict[str, Any] = {"task": {"name": self._task, "labels": list(labels)}, "data": dict(data)}
        if self.model is None or isinstance(self.model, Mapping):
            recipe["model"] = dict(self._model if self.model is None else self.model)
        else:
            own = self.model
            recipe["model"] = {"weights": str(own.save(scratch / "start") if isinstance(own, Pipeline) else own)}
        on = recipe["model"].get("weights") is not None
        if not on or self.tokenizer is not None:  # else it comes with the weights
            recipe["tokenizer"] = dict(self.tokenizer or self._tokenizer)
        rate = (_ON if on else _FRESH) if self.lr is None else self.lr
        return {**recipe, "train": {**budget, "lr": rate}}

    def _labels(self, names: Iterable[Any]) -> list[str]:
        """Spell classes as labels, each in its own way."""
        labels = [str(name) for name in names]
        if len(set(labels)) < len(labels) or not all(label.strip() for label in labels):
            raise InputError(f"y: classes must be spelt differently, and none blank, but are {labels}")
        return labels

    def save(self, path: str | Path) -> Path:
        """Write the trained model, and how it was set, in a new folder."""
        check_is_fitted(self, "pipeline_")
        about = Saved(kind=type(self).__name__, parameters=plain(self, "device"), classes=self.classes_.tolist())
        return save(path, self.pipeline_, about.model_copy(update={"dtype": self.classes_.dtype.str}))

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> Self:
        """Read what `save` wrote, whatever device it was on; nothing of a checkpoint is run."""
        about = read_about(cls, path)
        made = cls(**about.parameters | {"device": device})
        made.classes_ = np.array(about.classes, dtype=about.dtype)
        made.pipeline_ = load(path, made.device)
        return made


class TextClassifier(ClassifierMixin, _Trained):  # type: ignore[misc]
    """A label for each text; `model` is what to start from, a small convolutional network if it is not given."""

    _task: ClassVar[str] = "classify"
    _model: ClassVar[Section] = {"name": "cnn", "width": 192, "kernels": [2, 3, 4], "embedding": 64}
    _tokenizer: ClassVar[Section] = {"name": "bpe", "size": 4000}

    def fit(self, X: Iterable[str], y: Iterable[Any]) -> Self:
        """Train on texts and their labels: text, whole numbers, or what else has a name of its own."""
        texts = read_texts(X)
        if y is None:
            raise InputError("y: requires y to be passed, a label a text, but the target y is None")
        right = column_or_1d(y, warn=True)
        check_classification_targets(right)
        check_lengths(texts, right)
        self.classes_, numbers = np.unique(right, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(f"y: there must be two classes to tell apart, but the one class is {self.classes_[0]!r}")
        labels = self._labels(self.classes_)
        self._fit([{"text": text, "label": labels[one]} for text, one in zip(texts, numbers, strict=True)], labels)
        return self

    def predict(self, X: Iterable[str]) -> Any:
        """Return the likeliest class of each text, (n,)."""
        likely = self.predict_proba(X)
        return self.classes_[likely.argmax(1)]

    def predict_proba(self, X: Iterable[str]) -> Any:
        """Return how likely each class is for each text, (n, K), in the order of `classes_`."""
        check_is_fitted(self, "pipeline_")
        # Answers have rounded scores; the labels are in the order of the classes.
        found = np.array([likely for ((_, likely),) in self.pipeline_.outputs({"text": one} for one in read_texts(X))])
        found = found.reshape(-1, len(self.classes_))
        return found / found.sum(1, keepdims=True)

    def __sklearn_tags__(self) -> Tags:
        """Say that it takes texts."""
        return for_texts(super().__sklearn_tags__())


class TextTagger(_Trained):
    """A tag for each word; `model` is what to start from, a small bidirectional LSTM if it is not given."""

    _task: ClassVar[str] = "tag"
    _model: ClassVar[Section] = {"name": "rnn", "direction": "both", "width": 128, "embedding": 64, "chars": 32}
    _tokenizer: ClassVar[Section] = {"name": "words"}

    def fit(self, X: Iterable[Sequence[str]], y: Iterable[Sequence[str]]) -> Self:
        """Train on sentences, each a list of words, and a list of tags for each."""
        sentences, tags = read_words(X, "X"), read_words([] if y is None else y, "y")
        check_lengths(sentences, tags)
        for number, (words, own) in enumerate(zip(sentences, tags, strict=True), 1):
            if len(words) != len(own):
                raise InputError(f"y: sentence {number} has {len(words)} words, but {len(own)} tags")
        self.classes_ = np.unique(np.array([tag for own in tags for tag in own]))
        rows = [{"words": words, "tags": own} for words, own in zip(sentences, tags, strict=True)]
        self._fit(rows, self._labels(self.classes_))
        return self

    def predict(self, X: Iterable[Sequence[str]]) -> list[list[str]]:
        """Return the tags of each sentence's words."""
        return [answer["tags"] for answer in self._answers(read_words(X, "X"))]

    def score(self, X: Iterable[Sequence[str]], y: Iterable[Sequence[str]]) -> float:
        """Return the F1 of entities where tags mark such, or else the share of right tags."""
        sentences, tags = read_words(X, "X"), read_words(y, "y")
        check_lengths(sentences, tags)
        answers = self._answers(sentences)
        task = self.pipeline_.task
        examples = [task.Example(words=words, tags=own) for words, own in zip(sentences, tags, strict=True)]
        return float(task.score(answers, examples)[task.metric])

    def _answers(self, sentences: list[list[str]]) -> list[Any]:
        check_is_fitted(self, "pipeline_")
        return list(self.pipeline_.answers({"words": words} for words in sentences))

    def __sklearn_tags__(self) -> Tags:
        """Say that it takes sentences, and has a list of tags for each."""
        tags = for_texts(super().__sklearn_tags__())
        tags.target_tags.required = True
        return tags


def _write(folder: Path, split: str, rows: list[dict[str, Any]]) -> str:
    path = folder / f"{split}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
