"""The schema of recipes: a `Run` is one frozen object with the sections task, data, tokenizer, model and train.

`Run.parse` reads a recipe. The sections `task`, `tokenizer` and `model` are checked by the `Config` of the class that
their `name` stands for, so a user's own class is checked as strictly as weft's. A preset, the size of a model, is
expanded: a run has its values.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, SupportsIndex, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializeAsAny,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from weft.config.error_messages import describe_errors
from weft.config.yaml import read_yaml
from weft.errors import ConfigError, WeftError, abbreviate, did_you_mean, in_task, nearest
from weft.registry import Kind, resolve

MAX_RECIPE = 1 << 25  # bytes: a recipe may list hundreds of thousands of labels


def _with_strict_numbers(schema: Any, owner: type) -> Any:
    """Return a core schema in which `"2"` and `true` are no numbers and `1` is no truth value; `1e3` is a whole number.

    A section inside another one has a schema of its own, which is strict already.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(_with_strict_numbers(part, owner) for part in schema)
    if not isinstance(schema, dict) or (schema.get("type") == "model" and schema.get("cls") is not owner):
        return schema
    schema = {key: _with_strict_numbers(part, owner) for key, part in schema.items()}
    if schema.get("type") in ("int", "float", "bool"):
        schema["strict"] = True
    if schema.get("type") == "int":
        return core_schema.no_info_before_validator_function(_whole_number, schema)
    return schema


def _whole_number(value: object) -> object:
    """Return `1e3` or an integer of numpy as an int; anything else as it is."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value.__index__() if isinstance(value, SupportsIndex) and not isinstance(value, int) else value


class Section(BaseModel):
    """A section of a recipe: frozen; unknown keys are errors, and so is text or a truth value in place of a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema with strict numbers; pydantic's own strict mode would refuse a list in place of a tuple."""
        schema: CoreSchema = _with_strict_numbers(handler(source), cls)
        return schema


class Named(Section):
    """A section whose schema is the `Config` of the class that `name` stands for."""

    name: str


class Pretrained(Named):
    """The section of a model that may start from pretrained weights: a directory, or a name on the hub."""

    weights: str | None = None  # the model to start from: a directory, or a name on the hub

    @property
    def position_limit(self) -> int | None:
        """The number of tokens in a sequence that the weights have positions for; None: there is no limit."""
        return None


def position_remedy(model: Named) -> str:
    """Return the remedy of too few positions, to end an error with: none where pretrained weights fix them."""
    return "" if getattr(model, "weights", None) else ", or raise model.max_positions"


def _seconds(value: object) -> object:
    """Read `90`, `90s`, `15m` or `2h` as seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(value))
    if isinstance(value, bool) or not match:
        raise ValueError("must be a time such as 90s, 15m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


_S = TypeVar("_S", bound=BaseModel)
Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
# Bounds on what a model's section may ask for, well above any model: a typo or a hostile file ends in an error.
MAX_SIZE, MAX_POSITIONS = 1 << 22, 1 << 24
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]  # a width, or another dimension of a weight
Layers = Annotated[int, Field(ge=1, le=1000)]  # modules that are made one by one
Positions = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
Every = Literal["epoch"] | Annotated[int, Field(ge=1)]  # so many steps, or the end of each epoch


def _delimiter(value: object) -> object:
    """Read one character; a tab may be written `\\t` or `tab`, as a shell passes it."""
    character = "\t" if value in ("\\t", "tab") else value
    if not isinstance(character, str) or len(character) != 1 or character in '\r\n"\0':
        raise ValueError("must be one character such as ';', '|' or '\\t', and not a quote or a line end")
    return character


Delimiter = Annotated[str, BeforeValidator(_delimiter)]
Column = StrictInt | StrictStr
Overrides = str | Iterable[str] | Mapping[str, Any]  # key=value, one or several, or keys and their values
Source = str | list[str]  # a path (a glob pattern reads all that match), or a list of parallel files


class Data(Section):
    """The sources of examples, and the treatment of bad and long ones."""

    sample: str | None = None  # a data set that ships with weft, with train, valid and test
    train: Source | None = None  # a file, a glob pattern of files, a prepared corpus, or a list of parallel files
    valid: Source | None = None  # the same, for the evaluations of a training
    test: Source | None = None  # the same, for the evaluation at the end and `weft evaluate`
    # the share of the training rows that is held out for evaluations, in place of data.valid
    validation_fraction: float | None = Field(None, gt=0, lt=1)
    format: Literal["txt", "tsv", "csv", "jsonl", "conll", "labelled", "squad", "parquet"] | None = (
        None  # of the files; None: by the ending
    )
    delimiter: Delimiter | None = None  # between the columns of csv and tsv; None: a comma, a tab
    # the column of each field of the task, by name or by number from 0; a list field has several
    columns: dict[str, Column | Annotated[list[Column], Field(min_length=1)]] | None = None
    documents: Literal["lines", "every-line", "blank", "file"] = (
        "lines"  # txt: what a row is (weft.data.readers.documents)
    )
    header: bool | None = None  # None: there is one if a column goes by name
    on_bad_rows: Literal["error", "skip"] = "error"  # skip: leave a row that cannot be read out, with a notice
    max_length: int = Field(1024, ge=1)  # tokens in one sequence
    # of longer sequences: refuse them, cut, drop, or read them in windows
    truncation: Literal["error", "cut", "drop", "window"] = "error"
    max_line_bytes: int = Field(1 << 24, ge=1, lt=2**31)  # a longer line is a bad row
    workers: int = Field(0, ge=0, le=128)  # processes that collate batches ahead of the trainer

    @model_validator(mode="after")
    def _some_source(self) -> "Data":
        if isinstance(self, TasksData):  # each task has its own
            return self
        if self.sample is None and self.train is None:
            raise ValueError("must say where the examples come from: give data.train, or data.sample")
        if self.sample is not None and self.train is not None:
            raise ValueError("takes data.sample or data.train, not both")
        for key in ("sample", "valid") if self.validation_fraction is not None else ():
            if getattr(self, key):
                has = "has validation data of its own" if key == "sample" else "is validation data already"
                raise ValueError(f"data.validation_fraction: data.{key} {has}; leave one of the two out")
        return self


class Distill(Section):
    """A teacher, whose answers a student learns beside the labels (knowledge distillation)."""

    teacher: str  # a trained model of the same task: a run's directory, a checkpoint, or a name on the hub
    temperature: float = Field(2.0, gt=0)  # of both distributions: above 1 they are flatter
    alpha: float = Field(0.5, ge=0, le=1)  # the weight of the teacher's answers; that of the labels is 1 - alpha
    cosine: float = Field(0.0, ge=0)  # the weight of the cosine distance of the last layers' states


class TasksData(Data):
    """The data of several tasks, by the name of each; what they share was merged into each of them."""

    tasks: dict[str, Data]


class TasksConfig(Named):
    """The sections of several tasks that share one body, by the name of each."""

    tasks: dict[str, SerializeAsAny[Named]]  # a recipe gives them in `tasks`, each with its data, and not here
    # a task with n batches has a share in proportion to n^(1/temperature): 1 is by size, 1e6 the same for all
    temperature: float = Field(1.0, ge=1, le=1e6)


class Train(Section):
    """The budget, the optimizer, and the checkpoints to keep."""

    steps: int | None = Field(None, ge=1)  # the budget in updates; or give `time`
    epochs: float | None = Field(None, gt=0, le=10_000)  # passes over the training data
    time: Seconds | None = None  # the budget in time: 90s, 15m or 2h
    flops: float | None = Field(None, gt=0)  # the budget in operations, forward and backward: 1e15
    batch_tokens: int | None = Field(4096, ge=1)  # tokens in a batch; None: batch_size is given
    batch_size: int | None = Field(None, ge=1)  # items in a batch, in place of batch_tokens
    # batches for each update, which the processes share; None: one for each process
    accumulate: int | None = Field(None, ge=1, le=10_000)
    parallel: Literal["ddp", "fsdp"] = "ddp"  # what a process has: all weights, or a shard of each
    activation_checkpointing: bool = False  # transformer blocks are computed again in the backward pass: less memory
    rank_timeout: Seconds = 1800.0  # of a process that does not go on while the others wait for it
    optimizer: Literal["adamw", "adam", "adagrad", "sgd", "asgd"] = "adamw"  # asgd: SGD, averaged in the end
    lr: float = Field(1e-3, gt=0)  # the peak of the learning rate
    betas: tuple[Share, Share] = (0.9, 0.999)  # of Adam
    weight_decay: float = Field(0.0, ge=0)  # on matrices; vectors, such as biases, have none
    # how the learning rate changes
    schedule: Literal["constant", "warmup-linear", "cosine", "inverse-sqrt", "exponential", "slanted-triangular"] = (
        "constant"
    )
    warmup: float = Field(0.0, ge=0)  # steps, or below 1 a share of the budget
    decay: float = Field(0.01, gt=0, le=1)  # exponential: the share of lr that is left at the end
    ratio: float = Field(32.0, ge=1)  # slanted-triangular: how much smaller the lowest lr is than the peak
    asgd_after: int = Field(5, ge=1)  # evaluations without improvement before asgd begins to average
    clip: float | None = Field(1.0, gt=0)  # the largest norm of the gradient; None: no limit
    freeze: Literal["body"] | StrictInt | None = None  # the body, or its first layer groups (embeddings, layers)
    # the body is frozen at first, and from the top one more layer group learns each epoch, or so many steps
    unfreeze: Every | None = None
    layer_decay: float = Field(1.0, gt=0, le=1)  # the learning rate of a layer group, as a share of the one above it
    distill: Distill | None = None  # a teacher, and how much its answers count
    reinit: int = Field(0, ge=0)  # top layers of pretrained weights to re-initialize
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: the forward pass under autocast
    compile: bool | None = None  # None: on CUDA in bf16, where model and task support it
    seed: int = Field(1, ge=0, lt=2**32)  # of weights, order and dropout
    seeds: int = Field(1, ge=1, le=1000)  # number of runs, with the seeds seed, seed + 1, …
    deterministic: bool = False  # use PyTorch's deterministic kernels only
    device: str = "auto"  # auto (a GPU if there is one), cpu, cuda or cuda:1
    report_every: int = Field(20, ge=1)  # steps between rows of metrics.jsonl
    eval_every: Every | None = None  # None: see `weft.training.budget`
    save_every: Every | None = None  # None: with each evaluation
    keep: int = Field(2, ge=1)  # checkpoints kept beside the best
    average: int | None = Field(None, ge=2)  # at the end, the mean of the last so many checkpoints is evaluated, too
    metric: str | None = None  # selects the best model; None: the task's own
    patience: int | None = Field(None, ge=1)  # evaluations without improvement before stopping early
    bad_steps: int = Field(5, ge=1)  # updates skipped for a loss that is not finite, before an error

    @model_validator(mode="before")
    @classmethod
    def _batch_unit(cls, raw: Any) -> Any:
        """Leave the default of batch_tokens out where batch_size is given."""
        if isinstance(raw, Mapping) and raw.get("batch_size") is not None and "batch_tokens" not in raw:
            return {**raw, "batch_tokens": None}
        return raw

    @model_validator(mode="after")
    def _some_budget(self) -> "Train":
        if self.steps is None and self.epochs is None and self.time is None and self.flops is None:
            raise ValueError("needs a budget: give train.steps, train.epochs, or train.time such as 15m")
        if self.batch_size is not None and self.batch_tokens is not None:
            raise ValueError(
                f"batches have batch_size={self.batch_size} items or batch_tokens={self.batch_tokens} tokens, not "
                "both: set train.batch_tokens=null or train.batch_size=null"
            )
        if self.batch_size is None and self.batch_tokens is None:
            raise ValueError("needs the size of a batch: give train.batch_tokens or train.batch_size")
        if self.optimizer == "asgd" and self.eval_every is None:
            raise ValueError("optimizer asgd starts averaging by the results of evaluations: give train.eval_every")
        return self

    def tokens_per_batch(self, width: int) -> int:
        """Return the tokens in a batch of sequences that have `width` tokens each."""
        return self.batch_tokens or (self.batch_size or 1) * width


def _without_none(value: Any, plain: Any) -> Any:
    """Return the plain data of a value without what is None, unless its default is another, such as `train.clip`."""
    if isinstance(value, BaseModel) and isinstance(plain, dict):
        fields = type(value).model_fields
        usual = {key: fields[key].get_default(call_default_factory=True) for key in plain if key in fields}
        kept = {key: part for key, part in plain.items() if part is not None or usual.get(key) is not None}
        return {key: _without_none(getattr(value, key), part) for key, part in kept.items()}
    if isinstance(value, Mapping) and isinstance(plain, dict):
        pairs = zip(value.values(), plain.items(), strict=True)
        return {key: _without_none(own, part) for own, (key, part) in pairs if part is not None}
    if isinstance(value, list | tuple) and isinstance(plain, list):
        return [_without_none(own, part) for own, part in zip(value, plain, strict=True)]
    return plain


class Run(Section):
    """A whole recipe, checked."""

    task: SerializeAsAny[Named]
    data: SerializeAsAny[Data]
    tokenizer: SerializeAsAny[Named]
    model: SerializeAsAny[Named]
    train: Train

    @classmethod
    def parse(cls, raw: Mapping[str, Any], trust: bool = True) -> "Run":
        """Validate a recipe; with `trust`, names may be `package.module:Class`."""
        if "compare" in raw:
            raise ConfigError(
                "compare: lists variants of a recipe, which weft compare trains; leave it out to train one"
            )
        sections = (*cls.model_fields, "tasks")
        unknown = [str(key) for key in raw if key not in sections]
        if unknown:
            raise ConfigError(f"{unknown[0]}: not a section of a recipe; {did_you_mean(unknown[0], sections)}")
        several = raw.get("tasks") is not None
        return cls(
            task=_read_tasks(raw, trust) if several else _named("task", raw, trust),
            data=_read_tasks_data(raw) if several else read_section(Data, raw.get("data", {}), "data", raw),
            tokenizer=_named("tokenizer", raw, trust),
            model=_named("model", {**raw, "model": expand_preset(raw.get("model"))}, trust),
            train=read_section(Train, raw.get("train", {}), "train", raw),
        )

    def dump(self) -> dict[str, Any]:
        """Return plain data that `parse` reads back to an equal run."""
        plain: dict[str, Any] = _without_none(self, self.model_dump(mode="json"))
        if not isinstance(self.data, TasksData):
            return plain
        task, data = plain.pop("task"), plain.pop("data")
        sections = task.pop("tasks"), data["tasks"]
        tasks = {name: {"task": sections[0][name], "data": sections[1][name]} for name in sections[0]}
        return {"tasks": tasks, "task": task, "data": {"workers": data["workers"]}, **plain}

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of several tasks; none where there is one task, which has no name here."""
        return tuple(self.task.tasks) if isinstance(self.task, TasksConfig) else ()

    def for_task(self, name: str) -> "Run":
        """Return the run of one of several tasks: its task and its data, with the body and the training of all."""
        assert isinstance(self.task, TasksConfig)
        assert isinstance(self.data, TasksData)
        task, _, metric = (self.train.metric or "").partition("/")
        train = {"metric": metric if task == name else None, "patience": None}
        return self.model_copy(
            update={
                "task": self.task.tasks[name],
                "data": self.data.tasks[name],
                "train": self.train.model_copy(update=train),
            }
        )


def _named(kind: Kind, raw: Mapping[str, Any], trust: bool) -> Any:
    section = named_section(kind, raw)
    if (kind, section["name"]) == ("task", "multitask"):
        raise ConfigError("task.name: several tasks are given by name in tasks, in place of task and data")
    return read_section(resolve(kind, section["name"], trust).Config, section, kind, raw if trust else None)


def _read_tasks(raw: Mapping[str, Any], trust: bool) -> TasksConfig:
    """Read the task of each of `tasks`; a section `task` beside them is what says how they are trained together."""
    tasks: dict[str, Named] = {}
    for name, section in _task_sections(raw).items():
        with in_task(name):
            tasks[name] = _named("task", section, trust)
    own = raw.get("task") or {}
    if not isinstance(own, Mapping) or own.get("name", "multitask") != "multitask" or "tasks" in own:
        raise ConfigError(
            f"task: {abbreviate(own)} stands beside tasks, which have their own; give here what they share, such as "
            "{temperature: 2}, and each task in tasks"
        )
    section = {"name": "multitask", **own, "tasks": tasks}
    return read_section(TasksConfig, section, "task", raw if trust else None)


def _read_tasks_data(raw: Mapping[str, Any]) -> TasksData:
    """Read the data of each of `tasks`; a section `data` beside them is merged into each."""
    shared = raw.get("data") or {}
    if not isinstance(shared, Mapping):
        raise ConfigError(f"data: must be a section, but is {abbreviate(shared)} instead")
    workers = {key: shared[key] for key in ("workers",) if key in shared}
    data: dict[str, Data] = {}
    for name, section in _task_sections(raw).items():
        with in_task(name):
            own = section.get("data", {})
            merged = {**shared, **own, "workers": 0} if isinstance(own, Mapping) else own
            if isinstance(own, Mapping) and own.get("workers"):
                raise ConfigError("data.workers: collate the batches of all tasks; set it in the recipe's section data")
            data[name] = read_section(Data, merged, "data", {**raw, **section})
    return read_section(TasksData, {**workers, "tasks": data}, "data")


def _task_sections(raw: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the sections of `tasks` by name, not yet validated further; one that is null is left out."""
    example = "{intent: {task: {name: classify}, data: {train: …}}, slots: …}"
    given = raw["tasks"]
    sections = {name: part for name, part in given.items() if part is not None} if isinstance(given, Mapping) else {}
    if not sections:
        raise ConfigError(f"tasks: must be tasks by name, such as {example}, but is {abbreviate(given)} instead")
    for name, section in sections.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
            raise ConfigError(f"tasks: {abbreviate(name)}: the name of a task is of letters, digits, '_' and '-'")
        if not isinstance(section, Mapping):
            raise ConfigError(f"tasks.{name}: must have a task and its data, but is {abbreviate(section)} instead")
        for key in section:
            if key not in ("task", "data"):
                raise ConfigError(f"tasks.{name}.{key}: unknown key; {did_you_mean(str(key), ('task', 'data'))}")
    return sections


def named_section(kind: Kind, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a section of a recipe that has a name, not yet validated further."""
    section = raw.get(kind)
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise ConfigError(
            f"{kind}.name: must say which {kind}, but is {abbreviate(section)} instead; add {kind}: {{name: ...}}"
        )
    return section


def read_section(schema: type[_S], raw: object, section: str, recipe: Mapping[str, Any] | None = None) -> _S:
    """Validate `raw` by `schema`; an error names the key in `section`, the value and the remedy.

    With the whole `recipe`, a key that belongs to another section is told which.
    """
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        schemas = {} if recipe is None else _schemas(recipe)
        raise ConfigError("\n".join(describe_errors(error.errors(), schema, raw, section, schemas))) from None


def _schemas(recipe: Mapping[str, Any]) -> dict[str, type[BaseModel]]:
    """Return the schema of each section of a recipe, as far as its names are known."""
    schemas: dict[str, type[BaseModel]] = {"data": Data, "train": Train}
    kinds: tuple[Kind, ...] = ("task", "tokenizer", "model")
    for kind in kinds:
        with suppress(WeftError, KeyError, TypeError):  # what is wrong there is an error of its own
            section = recipe[kind]
            schemas[kind] = resolve(kind, (expand_preset(section) if kind == "model" else section)["name"]).Config
    return schemas


def expand_preset(model: Any) -> Any:
    """Return a model's section with its preset expanded; keys of the section itself override the preset's."""
    if not isinstance(model, Mapping) or "preset" not in model:
        return model
    own = {key: value for key, value in model.items() if key != "preset"}
    if model["preset"] is None:  # an override that removes a recipe's preset
        return own
    preset = read_preset(model["preset"])
    if own.get("name", preset["name"]) != preset["name"]:
        raise ConfigError(
            f"model.preset: {model['preset']!r} is a size of {preset['name']!r}, but model.name is {own['name']!r} "
            "instead; give a preset of that model, or leave one of the two out"
        )
    if preset.keys() <= own.keys():
        raise ConfigError(
            f"model.preset: the recipe sets every key of {model['preset']!r} itself, so it has no effect; leave it "
            "out, or give it as model={preset: ...}, without the other keys"
        )
    return {**preset, **own}


def preset_names() -> list[str]:
    """Return the names of the presets, the sizes of models that ship with weft."""
    return _shipped("presets")


def read_preset(name: object) -> dict[str, Any]:
    """Return a preset: the section of a model, including its name."""
    if name not in preset_names():
        hint = did_you_mean(str(name), preset_names())
        raise ConfigError(f"model.preset: there is no preset {abbreviate(name)}; {hint}")
    preset: dict[str, Any] = read_yaml(shipped_text("presets", str(name)), f"presets/{name}.yaml")
    return preset


def shipped_text(folder: Literal["recipes", "presets"], name: str) -> str:
    """Return the YAML of a recipe or a preset that ships with weft, with its comments."""
    return files("weft").joinpath(folder, f"{name}.yaml").read_text(encoding="utf-8")


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with weft."""
    return _shipped("recipes")


def _shipped(folder: str) -> list[str]:
    return sorted(entry.name.removesuffix(".yaml") for entry in files("weft").joinpath(folder).iterdir())


def read_recipe(recipe: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> dict[str, Any]:
    """Return a recipe by its path or the name of one that ships with weft, with overrides applied."""
    if isinstance(recipe, Mapping):
        raw: Any = _deep_copy(recipe)
    else:
        raw = read_yaml(_recipe_text(recipe), str(recipe))
    if not isinstance(raw, dict):
        keys = ", ".join(Run.model_fields)
        raise ConfigError(f"{recipe}: must be a mapping with the keys {keys}, but is {abbreviate(raw)}")
    apply_overrides(raw, overrides)
    return raw


def apply_overrides(raw: dict[str, Any], overrides: Overrides) -> None:
    """Change a recipe in place by `key=value` strings, or by a mapping: {"train.lr": 3e-5} or {"train": {"lr": 3e-5}}.

    A dotted key replaces its value; nested mappings are merged with the recipe's own, key by key.
    """
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _apply_value(raw, key, value)
        return
    if not isinstance(overrides, Iterable):
        raise ConfigError(
            "overrides: must be a list, such as ['train.lr=3e-5'], or a mapping, such as {'train.lr': 3e-5}, "
            f"but is {abbreviate(overrides)} instead"
        )
    for override in [overrides] if isinstance(overrides, str) else overrides:
        apply_override(raw, override)


def _apply_value(raw: dict[str, Any], dotted: object, value: Any) -> None:
    """Set one dotted key to a value; a section, whose key has no dot, is merged."""
    keys = dotted.split(".") if isinstance(dotted, str) else [""]
    if not all(keys):
        raise ConfigError(f"overrides: {abbreviate(dotted)}: a key is dotted, such as 'train.lr'")
    if len(keys) == 1 and isinstance(value, Mapping):
        _merge(raw, keys[0], value)
    else:
        _enter(raw, keys, dotted)[keys[-1]] = _deep_copy(value)


def _merge(raw: dict[str, Any], key: Any, value: Any) -> None:
    """Set a key; a mapping is merged with the one that is there."""
    if isinstance(value, Mapping) and isinstance(raw.get(key), dict):
        for inner, part in value.items():
            _merge(raw[key], inner, part)
    else:
        raw[key] = _deep_copy(value)


def _deep_copy(raw: Any) -> Any:
    """Copy nested mappings, since an override must not change the caller's; a `Path` becomes a string."""
    if isinstance(raw, Mapping):
        return {key: _deep_copy(value) for key, value in raw.items()}
    return str(raw) if isinstance(raw, Path) else raw


def _recipe_text(recipe: str | Path) -> str:
    path = Path(recipe)
    try:
        if not path.is_file() and str(recipe) in recipe_names():
            return shipped_text("recipes", str(recipe))
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE + 1)
        if len(data) > MAX_RECIPE:
            raise ConfigError(f"{recipe}: has more than {MAX_RECIPE >> 20} MB; is it a recipe?")
        return data.decode("utf-8")
    except FileNotFoundError:
        near = _nearest_recipe(path)
        hint = f"did you mean {near!r}?" if near else "weft models lists those"
        raise ConfigError(f"{recipe}: neither a file nor a recipe that ships with weft; {hint}") from None
    except (OSError, ValueError) as error:  # also an invalid path, or text that is not UTF-8
        raise ConfigError(f"{str(recipe)[:200]!r}: cannot be read as a recipe: {error}") from None


def _nearest_recipe(path: Path) -> str | None:
    """Return the recipe whose name resembles a path's: a file of the same folder, or one that ships with weft."""
    files_there = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
    by_stem = {name: name for name in recipe_names()} | {file.stem: str(file) for file in files_there}
    near = nearest(path.stem, by_stem)  # by stems: "a.yaml" and "b.yaml" are not alike
    return None if near is None else by_stem[near]


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one dotted key in place: `train.lr=3e-5`, `model.layers=2`."""
    dotted, equals, text = override.partition("=") if isinstance(override, str) else ("", "", "")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{abbreviate(override)}: an override is key=value, such as train.lr=3e-5")
    _enter(raw, keys, override)[keys[-1]] = read_yaml(text, override[:60])


def _enter(raw: dict[str, Any], keys: Sequence[str], override: object) -> dict[str, Any]:
    """Return the mapping that holds the last of `keys`; sections that are missing are made."""
    mapping = raw
    for depth, key in enumerate(keys[:-1]):
        mapping = mapping.setdefault(key, {})
        if not isinstance(mapping, dict):
            parent = ".".join(keys[: depth + 1])
            raise ConfigError(f"{abbreviate(override)}: {parent} is {abbreviate(mapping)}, which has no keys")
    return mapping
