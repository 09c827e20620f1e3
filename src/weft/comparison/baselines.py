"""Classical baselines of `classify` and `tag`: logistic regression on counted features, by scikit-learn.

| name                   | task       | features                                                               |
|------------------------|------------|------------------------------------------------------------------------|
| `bag of words`         | `classify` | TF-IDF of words; of a pair, of each text                               |
| `character n-grams`    | `classify` | TF-IDF of 1 to 4 characters within words                               |
| `words and neighbours` | `tag`      | the word, its affixes and shape, and the two words before and after it |

The regression is fitted by stochastic gradient descent, one label against the others. Its strength of regularisation, C
of 1, 10 or 100, is chosen on the validation data, as a deep model's best checkpoint is; without any it is 10.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.config.run import Run
from weft.data.readers.examples import Skipped
from weft.tasks.base import Answer, Task
from weft.tasks.classification.task import Classify
from weft.tasks.prepare import has_split, read_split
from weft.tasks.tagging import Tag

STRENGTHS = (1.0, 10.0, 100.0)  # C of LogisticRegression; alpha of SGDClassifier is 1 / (C n)
DEFAULT_STRENGTH = 10.0
WORDS = r"(?u)\w+|[^\w\s]+"
NO_WORD = "\0"  # before the first word and after the last one


@dataclass(frozen=True)
class FittedBaseline:
    """A baseline fitted to the training data."""

    task: Any
    features: Callable[[Sequence[Any]], Any]  # from examples to a sparse matrix
    model: Any  # of scikit-learn
    seconds: float = 0.0

    @property
    def parameters(self) -> int:
        """The number of weights."""
        models = getattr(self.model, "estimators_", [self.model])
        return sum(model.coef_.size + model.intercept_.size for model in models if hasattr(model, "coef_"))

    def answers(self, examples: Sequence[Any]) -> list[Answer]:
        """Return answers as the task's own models give them."""
        rows = self.features(examples)
        if isinstance(self.task, Tag):
            return self._tags(examples, rows)
        probabilities = self.model.predict_proba(rows)
        names = [str(name) for name in self.model.classes_] if not self.task.config.multiple else self.task.labels.names
        return [self._labels(dict(zip(names, row, strict=True))) for row in probabilities.tolist()]

    def _labels(self, probabilities: Mapping[str, float]) -> Answer:
        order = sorted(probabilities, key=lambda name: -probabilities[name])
        ranked = {name: round(probabilities[name], 6) for name in order}
        if not self.task.config.multiple:
            return {"label": next(iter(ranked)), "scores": ranked}
        chosen = [name for name in ranked if probabilities[name] > self.task.config.threshold]
        return {"labels": chosen, "scores": ranked}

    def _tags(self, examples: Sequence[Any], rows: Any) -> list[Answer]:
        probabilities = self.model.predict_proba(rows)
        tags = [str(self.model.classes_[index]) for index in probabilities.argmax(1)]
        scores, answers, start = probabilities.max(1).round(6).tolist(), list[Answer](), 0
        for example in examples:
            words = example.get_words()
            stop = start + len(words)
            answers.append({"words": words, "tags": tags[start:stop], "scores": scores[start:stop]})
            start = stop
        return answers


@dataclass(frozen=True)
class Baseline:
    """A kind of features, for one task."""

    task: str
    options: Mapping[str, Any]  # of TfidfVectorizer

    def serves(self, run: Run) -> bool:
        """Return whether a recipe's task is one that it answers: a number is no label."""
        return run.task.name == self.task and not getattr(run.task, "regression", False)

    def fit(self, run: Run, task: Task) -> FittedBaseline:
        """Fit to the training data, at the strength of regularisation that is best on the validation data."""
        examples = _examples(run, task, "train")
        valid = _examples(run, task, "valid") if has_split(run.data, "valid") else []
        features = _tag_features() if isinstance(task, Tag) else _text_features(self.options)
        began = time.perf_counter()  # scikit-learn is imported by now
        rows, targets = features(examples), _targets(task, examples)
        fitted: list[tuple[float, FittedBaseline]] = []
        for strength in STRENGTHS if valid else (DEFAULT_STRENGTH,):
            baseline = FittedBaseline(task, features, _regression(strength, rows, targets, run.train.seed))
            score = task.score(baseline.answers(valid), valid)[run.train.metric or task.metric] if valid else 0.0
            fitted.append((score, baseline))
        best = max(fitted, key=lambda pair: pair[0])[1]
        return FittedBaseline(task, features, best.model, time.perf_counter() - began)


BASELINES = {
    "bag of words": Baseline("classify", {"token_pattern": WORDS}),
    "character n-grams": Baseline("classify", {"analyzer": "char_wb", "ngram_range": (1, 4), "lowercase": False}),
    "words and neighbours": Baseline("tag", {}),
}


def _examples(run: Run, task: Task, split: str) -> list[Any]:
    return [example for _, example in read_split(run.data, split, task, Skipped())]


def _regression(strength: float, rows: Any, targets: Any, seed: int) -> Any:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import SGDClassifier
    from sklearn.multiclass import OneVsRestClassifier

    alpha = 1 / (strength * rows.shape[0])
    model: Any = SGDClassifier(loss="log_loss", alpha=alpha, max_iter=30, tol=1e-4, random_state=seed)
    if isinstance(targets, np.ndarray) and targets.ndim == 2:  # several labels a text
        model = OneVsRestClassifier(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it is close enough, as the validation data says
        warnings.filterwarnings("ignore", "Label .* is present in all training examples")
        return model.fit(rows, targets)


def _targets(task: Any, examples: Sequence[Any]) -> Any:
    """Return the gold labels: a label a text, a row of 0 and 1 where a text may have several, or a tag a word."""
    if isinstance(task, Classify) and task.config.multiple:
        names = task.labels.names
        return np.array([[name in task.right(example) for name in names] for example in examples], int)
    return [label for example in examples for label in task.right(example)]


def _text_features(options: Mapping[str, Any]) -> Callable[[Sequence[Any]], Any]:
    """Return a function from examples to TF-IDF; the first call, on the training data, learns the vocabulary."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizers: list[Any] = []

    def features(examples: Sequence[Any]) -> Any:
        sides = [[example.text for example in examples], [example.pair or "" for example in examples]]
        if not vectorizers:
            used = sides if any(sides[1]) else sides[:1]
            vectorizers.extend(TfidfVectorizer(sublinear_tf=True, **options).fit(texts) for texts in used)
        pairs = zip(vectorizers, sides, strict=False)  # without pairs there is one vectorizer
        return hstack([vectorizer.transform(texts) for vectorizer, texts in pairs]).tocsr()

    return features


def _tag_features() -> Callable[[Sequence[Any]], Any]:
    """Return a function from sentences to features, a row a word; the first call learns the vocabulary."""
    from sklearn.feature_extraction import DictVectorizer

    vectorizer = DictVectorizer()

    def features(examples: Sequence[Any]) -> Any:
        rows = [row for example in examples for row in _word_features(example.get_words())]
        matrix = vectorizer.transform(rows) if hasattr(vectorizer, "vocabulary_") else vectorizer.fit_transform(rows)
        matrix.indices, matrix.indptr = matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32)  # as SGD takes
        return matrix

    return features


def _word_features(words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the features of each word of a sentence."""
    padded = [NO_WORD, NO_WORD, *words, NO_WORD, NO_WORD]
    for place, word in enumerate(words, 2):
        near = {f"word {offset:+}": padded[place + offset].lower() for offset in (-2, -1, 0, 1, 2)}
        ends = {f"prefix {size}": word[:size] for size in (1, 2, 3)} | {
            f"suffix {size}": word[-size:] for size in (1, 2, 3)
        }
        shapes = {f"shape {offset:+}": _shape(padded[place + offset]) for offset in (-1, 0, 1)}
        yield {**near, **ends, **shapes, "cased": word}


def _shape(word: str) -> str:
    """Return the kinds of a word's characters, repetitions left out: `Xx` of Paris, `d.d` of 3.14."""
    kinds = ("X" if c.isupper() else "x" if c.isalpha() else "d" if c.isdigit() else c for c in word)
    shape = ""
    for kind in kinds:
        shape += "" if shape.endswith(kind) else kind
    return shape
