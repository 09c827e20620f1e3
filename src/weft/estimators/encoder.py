"""Texts to vectors, as a transformer of scikit-learn's."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags

from weft.errors import ConfigError
from weft.estimators.inputs import InputError, for_texts, read_texts
from weft.estimators.saved import Saved, plain, read_about, save
from weft.pipeline import Pipeline, load


class TextEncoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Texts to vectors (n, D), by a model that stays as it is.

    `model` is a path, a name on the hub or a `weft.Pipeline`; clones share a pipeline, and load a path each for itself.
    The rest is as in `Pipeline.embed`. There is nothing to fit: `fit` loads the model, and looks at the texts.
    """

    def __init__(
        self,
        model: str | Path | Pipeline | None = None,
        *,
        pool: str | None = None,
        layers: int | str | Sequence[int] = -1,
        combine: str = "sum",
        normalize: bool | None = None,
        truncate: bool = False,
        device: str = "auto",
        precision: str = "fp32",
    ) -> None:
        self.model = model
        self.pool = pool
        self.layers = layers
        self.combine = combine
        self.normalize = normalize
        self.truncate = truncate
        self.device = device
        self.precision = precision

    def fit(self, X: Iterable[str], y: Any = None) -> Self:
        """Load the model and check that it does what is asked, and that these are texts."""
        if not read_texts(X):
            raise InputError("X: there are no texts: found 0 samples, where the least is 1")
        self._n_features_out = self._embedder().width
        return self

    def transform(self, X: Iterable[str]) -> Any:
        """Return the vector of each text, float32 (n, D)."""
        return self._embedder().all(read_texts(X))

    def save(self, path: str | Path) -> Path:
        """Write the model, and how it is read, in a new folder."""
        pipeline = self._pipeline()
        whole = pipeline if pipeline.precision == "fp32" or isinstance(self.model, Pipeline) else load(self._path())
        return save(path, whole, Saved(kind=type(self).__name__, parameters=plain(self, "model", "device")))

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> Self:
        """Read what `save` wrote, whatever device it was on; nothing of a checkpoint is run."""
        found: Self = cls(str(path), **read_about(cls, path).parameters | {"device": device})
        return found

    def _embedder(self) -> Any:
        pool: Any = self.pool  # checked there
        combine: Any = self.combine
        if self.pool == "tokens":
            raise ConfigError("pool: 'tokens' gives several vectors a text, but a transformer has one; try mean")
        return self._pipeline().embedder(pool, self.layers, combine, self.normalize, self.truncate)

    def _pipeline(self) -> Pipeline:
        """Return the model; what was loaded is kept as long as it is the one that is asked for."""
        if isinstance(self.model, Pipeline):
            return self.model
        asked = self._path(), self.device, self.precision
        if getattr(self, "_held", (None,))[0] != asked:
            self._held = asked, load(asked[0], self.device, precision=self.precision)
        held: Pipeline = self._held[1]
        return held

    def _path(self) -> str:
        if not isinstance(self.model, str | Path):
            raise ConfigError(f"model: must be a path, a name on the hub or a weft.Pipeline, but is {self.model!r}")
        return str(self.model)

    def __getstate__(self) -> Any:
        state = dict(super().__getstate__())
        state.pop("_held", None)  # it is loaded again
        return state

    def __sklearn_tags__(self) -> Tags:
        """Say that it takes texts, and needs no fit."""
        tags = for_texts(super().__sklearn_tags__())
        tags.requires_fit = False
        tags.transformer_tags.preserves_dtype = []  # texts have none to keep
        return tags
