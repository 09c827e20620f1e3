"""A run is one frozen object: task, data, tokenizer, model, train. Recipes and overrides come in by one strict door.

`Run.parse` reads a recipe. The sections `task`, `tokenizer` and `model` are checked by the `Config` of the class that
their `name` stands for, so a user's own class is checked as strictly as weft's. A preset, the size of a model, is
filled in there: a run has the values themselves.
"""

import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from weft.config.error_messages import describe_errors
from weft.config.yaml import read_yaml
from weft.errors import ConfigError, did_you_mean
from weft.registry import Kind, resolve


class Section(BaseModel):
    """A part of a recipe: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class Named(Section):
    """A section that a class of its own reads, chosen by `name`."""

    name: str


class Pretrained(Named):
    """A model that may start from one that was trained before: a directory, or a name on the hub."""

    weights: str | None = None


def _seconds(value: object) -> object:
    """Read `90`, `90s`, `15m` or `2h` as seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(value))
    if isinstance(value, bool) or not match:
        raise ValueError("must be a time such as 90s, 15m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


S = TypeVar("S", bound=BaseModel)
Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Column = StrictInt | StrictStr
Source = str | list[str]  # a path (a glob pattern reads all that match), or a list of parallel files


class Data(Section):
    """Where the examples come from and what is done with bad and long ones."""

    sample: str | None = None  # a data set that ships with weft: gives train, valid and test
    train: Source | None = None
    valid: Source | None = None
    test: Source | None = None
    format: Literal["txt", "tsv", "csv", "jsonl", "conll", "squad", "parquet"] | None = None  # None: by the ending
    # A field of the task's example -> its column, by name or number; several make a list.
    columns: dict[str, Column | Annotated[list[Column], Field(min_length=1)]] | None = None
    documents: Literal["lines", "every-line", "blank", "file"] = (
        "lines"  # txt: what a row is (weft.data.readers.documents)
    )
    header: bool | None = None  # None: there is one if a column goes by name
    on_bad_rows: Literal["error", "skip"] = "error"
    max_length: int = Field(1024, ge=1)  # tokens in one sequence
    too_long: Literal["error", "cut", "drop", "window"] = "error"
    max_line_bytes: int = Field(1 << 24, ge=1, lt=2**31)
    workers: int = Field(0, ge=0)  # processes that collate batches ahead of the trainer

    @model_validator(mode="after")
    def _some_source(self) -> "Data":
        if self.sample is None and self.train is None:
            raise ValueError("must say where the examples come from: give data.train, or data.sample")
        if self.sample is not None and self.train is not None:
            raise ValueError("takes data.sample or data.train, not both")
        return self


class Train(Section):
    """The budget, the optimiser, and what is kept."""

    steps: int | None = Field(None, ge=1)
    time: Seconds | None = None
    batch_tokens: int = Field(4096, ge=1)
    accumulate: int = Field(1, ge=1)
    optimizer: Literal["adamw", "adam", "adagrad", "sgd", "asgd"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    betas: tuple[Share, Share] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "warmup-linear", "cosine", "inverse-sqrt", "exponential"] = "constant"
    warmup: float = Field(0.0, ge=0)  # steps, or below 1 a share of the budget
    decay: float = Field(0.01, gt=0, le=1)  # exponential: the share of lr that is left at the end
    asgd_after: int = Field(5, ge=1)  # evaluations without a better one before asgd begins to average
    clip: float | None = Field(1.0, gt=0)
    freeze: Literal["body"] | StrictInt | None = None  # the body, or its first floors (embeddings, layers)
    layer_decay: float = Field(1.0, gt=0, le=1)  # the rate of each floor, as a share of that above it
    reinit: int = Field(0, ge=0)  # top layers of pre-trained weights that start afresh
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool | None = None  # None: on CUDA in bf16, where the model and the task can
    seed: int = Field(1, ge=0, lt=2**32)
    seeds: int = Field(1, ge=1)  # so many trainings, each with the next seed
    deterministic: bool = False
    device: str = "auto"
    report_every: int = Field(20, ge=1)
    eval_every: int | None = Field(None, ge=1)  # None: at the end alone
    save_every: int | None = Field(None, ge=1)  # None: with each evaluation
    keep: int = Field(2, ge=1)  # checkpoints kept beside the best
    average: int | None = Field(None, ge=2)  # at the end the mean of so many checkpoints may become the best
    metric: str | None = None  # what makes a model the best; None: the task's own choice
    patience: int | None = Field(None, ge=1)  # evaluations without a better one before stopping early
    bad_steps: int = Field(5, ge=1)  # updates skipped because the loss was not finite, before giving up

    @model_validator(mode="after")
    def _some_budget(self) -> "Train":
        if self.steps is None and self.time is None:
            raise ValueError("needs a budget: give train.steps, or train.time such as 15m")
        if self.optimizer == "asgd" and self.eval_every is None:
            raise ValueError("optimizer asgd begins to average by what evaluations find: give train.eval_every, too")
        return self


class Run(Section):
    """A whole recipe, checked."""

    task: SerializeAsAny[Named]
    data: Data
    tokenizer: SerializeAsAny[Named]
    model: SerializeAsAny[Named]
    train: Train

    @classmethod
    def parse(cls, raw: Mapping[str, Any], trust: bool = True) -> "Run":
        """Check a recipe; with `trust`, names may be `package.module:Class`."""
        unknown = [str(key) for key in raw if key not in cls.model_fields]
        if unknown:
            raise ConfigError(f"{unknown[0]}: not a section of a recipe; {did_you_mean(unknown[0], cls.model_fields)}")
        return cls(
            task=_named("task", raw, trust),
            data=read_section(Data, raw.get("data", {}), "data"),
            tokenizer=_named("tokenizer", raw, trust),
            model=_named("model", {"model": expand_preset(raw.get("model"))}, trust),
            train=read_section(Train, raw.get("train", {}), "train"),
        )

    def dump(self) -> dict[str, Any]:
        """Return plain data that `parse` reads back to an equal run."""
        return self.model_dump(mode="json", exclude_none=True)


def _named(kind: Kind, raw: Mapping[str, Any], trust: bool) -> Any:
    section = raw.get(kind)
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise ConfigError(f"{kind}.name: must say which {kind}, but is {section!r} instead; add {kind}: {{name: ...}}")
    return read_section(resolve(kind, section["name"], trust).Config, section, kind)


def read_section(schema: type[S], raw: object, place: str) -> S:
    """Validate `raw` by `schema`; an error names the place in the recipe, what was got and the remedy."""
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(describe_errors(error.errors(), schema, raw, place))) from None


def expand_preset(model: Any) -> Any:
    """Put the fields of the preset that a model's section names before its own; what the section says itself wins."""
    if not isinstance(model, Mapping) or "preset" not in model:
        return model
    own = {key: value for key, value in model.items() if key != "preset"}
    if model["preset"] is None:  # so an override takes a recipe's preset away
        return own
    preset = read_preset(model["preset"])
    if own.get("name", preset["name"]) != preset["name"]:
        raise ConfigError(
            f"model.preset: {model['preset']!r} is a size of {preset['name']!r}, but model.name is {own['name']!r} "
            "instead; give a preset of that model, or leave one of the two out"
        )
    if preset.keys() <= own.keys():
        raise ConfigError(
            f"model.preset: the recipe says all that {model['preset']!r} would, and what it says itself wins, so "
            "nothing would change; leave the preset out, or give it as model={preset: ...}, without the rest"
        )
    return {**preset, **own}


def preset_names() -> list[str]:
    """List the sizes of models that ship with weft."""
    return _shipped("presets")


def read_preset(name: object) -> dict[str, Any]:
    """Read a preset: the section of a model, its name included."""
    if name not in preset_names():
        raise ConfigError(f"model.preset: there is no preset {name!r}; {did_you_mean(str(name), preset_names())}")
    text = files("weft").joinpath("presets", f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = read_yaml(text, f"presets/{name}.yaml")
    return found


def recipe_names() -> list[str]:
    """List the recipes that ship with weft."""
    return _shipped("recipes")


def _shipped(folder: str) -> list[str]:
    return sorted(entry.name.removesuffix(".yaml") for entry in files("weft").joinpath(folder).iterdir())


def read_recipe(recipe: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read a recipe by its path or, for one that ships with weft, its name; then apply `key=value` overrides."""
    if isinstance(recipe, Mapping):
        raw: Any = _copied(recipe)
    else:
        raw = read_yaml(_recipe_text(recipe), str(recipe))
    if not isinstance(raw, dict):
        raise ConfigError(f"{recipe}: must be a mapping with the keys {', '.join(Run.model_fields)}, but is {raw!r}")
    if isinstance(overrides, str | Mapping) or not isinstance(overrides, Iterable):
        raise ConfigError(f"overrides: must be a list, such as ['train.lr=3e-5'], but is {overrides!r} instead")
    for override in overrides:
        apply_override(raw, override)
    return raw


def _copied(raw: Any) -> Any:
    """Copy all the way down: an override must not reach into what the caller holds."""
    return {key: _copied(value) for key, value in raw.items()} if isinstance(raw, Mapping) else raw


def _recipe_text(recipe: str | Path) -> str:
    path = Path(recipe)
    try:
        if not path.is_file() and str(recipe) in recipe_names():
            return files("weft").joinpath("recipes", f"{recipe}.yaml").read_text(encoding="utf-8")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{recipe}: neither a file nor a recipe that ships with weft; {did_you_mean(str(recipe), recipe_names())}"
        ) from None
    except (OSError, ValueError) as error:  # also what is no path, and what is no UTF-8
        raise ConfigError(f"{str(recipe)[:200]!r}: cannot be read as a recipe: {error}") from None


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one dotted key in place: `train.lr=3e-5`, `model.layers=2`."""
    dotted, equals, text = override.partition("=") if isinstance(override, str) else ("", "", "")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{override!r}: an override is key=value, such as train.lr=3e-5")
    here = raw
    for depth, key in enumerate(keys[:-1]):
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{override!r}: {'.'.join(keys[: depth + 1])} is {here!r}, which has no keys inside")
    here[keys[-1]] = read_yaml(text, override)
