"""weft trains, compares, inspects and serves sequence models, from n-grams to BERT, behind one interface.

weft.train("dates")                         train a recipe
weft.load("runs/dates")("May 1, 2024")      load a run and ask it
weft.compare(["dates-fixed", "dates"], 1000, "compared")
weft.vectors.load("glove.txt").most_similar("king")
help(weft.Pipeline)                         what a loaded model can do
weft.estimators, weft.testing               scikit-learn's estimators; the property suite for models of your own
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.errors import CheckpointError, ConfigError, DataError, RoleError, TrainingError, WeftError

if TYPE_CHECKING:
    from weft import estimators, testing, vectors
    from weft.comparison.run import compare
    from weft.pipeline import Pipeline, load, train

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Pipeline",
    "RoleError",
    "TrainingError",
    "WeftError",
    "compare",
    "estimators",
    "load",
    "testing",
    "train",
    "vectors",
]

# Imported on first use: they bring torch, which takes longer to import than most commands take to run.
_LAZY = {
    "train": "weft.pipeline",
    "load": "weft.pipeline",
    "Pipeline": "weft.pipeline",
    "compare": "weft.comparison.run",
}
_MODULES = ("estimators", "testing", "vectors")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"weft.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
