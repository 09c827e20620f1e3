"""TextEncoder: a scikit-learn transformer of texts to vectors."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags

from weft.errors import ConfigError
from weft.estimators.inputs import InputError, read_texts, set_text_tags
from weft.estimators.persistence import EstimatorInfo, json_parameters, read_estimator_info, save_estimator
from weft.pipeline import Pipeline, load


class TextEncoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Texts to vectors (n, D), by a frozen model.

    `model` is a path, a name on the hub or a `weft.Pipeline`; clones share a pipeline, but each loads a path again.
    The rest is as in `Pipeline.embed`, also for texts that are too long. There is nothing to fit: `fit` loads the
    model, and checks the texts.
    """

    def __init__(
        self,
        model: str | Path | Pipeline | None = None,
        *,
        pool: str | None = None,
        layers: int | str | Sequence[int] = -1,
        combine: str = "sum",
        normalize: bool | None = None,
        truncate: bool | None = None,
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
        """Load the model; check that it supports these options, and that X are texts."""
        if not read_texts(X):
            raise InputError("X: there are no texts: found 0 samples, where the least is 1")
        self._n_features_out = self._embedder().width
        return self

    def transform(self, X: Iterable[str]) -> Any:
        """Return the vector of each text, float32 (n, D)."""
        return self._embedder().all(read_texts(X))

    def save(self, path: str | Path) -> Path:
        """Write the model and the estimator's parameters to a new folder."""
        pipeline = self._pipeline()
        exact = pipeline if pipeline.precision == "fp32" or isinstance(self.model, Pipeline) else load(self._path())
        return save_estimator(
            path, exact, EstimatorInfo(kind=type(self).__name__, parameters=json_parameters(self, "model", "device"))
        )

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> Self:
        """Load what `save` wrote, onto any device; no code from the checkpoint is run."""
        encoder: Self = cls(str(path), **read_estimator_info(cls, path).parameters | {"device": device})
        return encoder

    def _embedder(self) -> Any:
        pool: Any = self.pool  # checked by Pipeline.embedder
        combine: Any = self.combine
        if self.pool == "tokens":
            raise ConfigError("pool: 'tokens' gives several vectors a text, but a transformer has one; try mean")
        return self._pipeline().embedder(pool, self.layers, combine, self.normalize, self.truncate)

    def _pipeline(self) -> Pipeline:
        """Return the model; a loaded one is cached until path, device or precision change."""
        if isinstance(self.model, Pipeline):
            return self.model
        key = self._path(), self.device, self.precision
        if getattr(self, "_cached", (None,))[0] != key:
            self._cached = key, load(key[0], self.device, precision=self.precision)
        pipeline: Pipeline = self._cached[1]
        return pipeline

    def _path(self) -> str:
        if not isinstance(self.model, str | Path):
            raise ConfigError(f"model: must be a path, a name on the hub or a weft.Pipeline, but is {self.model!r}")
        return str(self.model)

    def __getstate__(self) -> Any:
        state = dict(super().__getstate__())
        state.pop("_cached", None)  # the model is loaded again
        return state

    def __sklearn_tags__(self) -> Tags:
        """Return tags: the input is text, and no fit is required."""
        tags = set_text_tags(super().__sklearn_tags__())
        tags.requires_fit = False
        tags.transformer_tags.preserves_dtype = []  # texts have no dtype
        return tags
