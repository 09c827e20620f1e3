"""Input validation of the estimators: texts, sentences of words, and their labels."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sklearn.utils import Tags

from weft.errors import DataError


class InputError(DataError, ValueError):
    """Invalid input to an estimator; a ValueError, as in scikit-learn."""


def read_texts(X: Any) -> list[str]:
    """Return the texts of a list, an array or a column as a list."""
    if isinstance(X, str | Mapping) or not isinstance(X, Iterable) or getattr(X, "ndim", 1) != 1:
        raise InputError(
            f"X: must be texts, in a list, an array or one column, but is {_describe(X)}; reshape your data, or give "
            "[text] for one text"
        )
    texts = list(X)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise InputError(f"X: text {number} must be a text, but is {_describe(text)}")
    return [str(text) for text in texts]


def read_sentences(X: Any, name: str) -> list[list[str]]:
    """Return sentences, or their tags, as lists of lists of strings."""
    if isinstance(X, str | Mapping) or not isinstance(X, Iterable):
        raise InputError(f"{name}: must be a list of lists of words, but is {_describe(X)}")
    sentences = list(X)
    for number, words in enumerate(sentences, 1):
        if isinstance(words, str) or not isinstance(words, Iterable) or any(not isinstance(w, str) for w in words):
            raise InputError(f"{name}: sentence {number} must be a list of words, but is {_describe(words)}")
    return [[str(word) for word in words] for words in sentences]


def check_lengths(X: Sequence[Any], y: Sequence[Any]) -> None:
    """Raise an error if X is empty, or if X and y differ in length."""
    if not len(X):
        raise InputError("X: there are no texts: found 0 samples, where the least is 1")
    if len(X) != len(y):
        raise InputError(f"y: must have one for each of X, but there are {len(y)} for {len(X)}: inconsistent numbers")


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} {repr(value)[:60]}" if shape is None else f"{type(value).__name__} of shape {shape}"


def set_text_tags(tags: Tags) -> Tags:
    """Set the tags of an estimator whose input is a list of texts."""
    tags.input_tags.two_d_array = False
    tags.input_tags.one_d_array = tags.input_tags.string = True
    return tags
