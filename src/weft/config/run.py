"""A whole recipe, checked: a `Run` is one frozen object with the sections task, data, tokenizer, model and train.

`Run.parse` reads a recipe. The sections `task`, `tokenizer` and `model` are checked by the `Config` of the class that
their `name` stands for. A preset, the size of a model, is expanded: a run has its values.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic import BaseModel, SerializeAsAny

from weft.config.recipes import expand_preset
from weft.config.schema import Named, Section, read_section
from weft.config.sections import Data, TasksConfig, TasksData, Train
from weft.errors import ConfigError, WeftError, abbreviate, did_you_mean, in_task
from weft.registry import Kind, resolve


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
            task=_read_tasks(raw, trust) if several else _read_named("task", raw, trust),
            data=_read_tasks_data(raw, trust) if several else _read_data(raw, trust),
            tokenizer=_read_named("tokenizer", raw, trust),
            model=_read_named("model", {**raw, "model": expand_preset(raw.get("model"))}, trust),
            train=read_section(Train, raw.get("train", {}), "train", partial(_schemas, raw, trust)),
        )

    def dump(self) -> dict[str, Any]:
        """Return plain data that `parse` reads back to an equal run."""
        plain: dict[str, Any] = _without_none(self, self.model_dump(mode="json"))
        if not isinstance(self.data, TasksData):
            return plain
        task, data = plain.pop("task"), plain.pop("data")
        sections, workers = (task.pop("tasks"), data["tasks"]), data.get("workers")
        tasks = {name: {"task": sections[0][name], "data": sections[1][name]} for name in sections[0]}
        return {"tasks": tasks, "task": task, "data": {} if workers is None else {"workers": workers}, **plain}

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


def _read_named(kind: Kind, raw: Mapping[str, Any], trust: bool) -> Any:
    """Read a section by the `Config` of the class that it names."""
    section = named_section(kind, raw)
    if (kind, section["name"]) == ("task", "multitask"):
        raise ConfigError("task.name: several tasks are given by name in tasks, in place of task and data")
    return read_section(resolve(kind, section["name"], trust).Config, section, kind, partial(_schemas, raw, trust))


def _read_data(raw: Mapping[str, Any], trust: bool) -> Data:
    return read_section(Data, raw.get("data", {}), "data", partial(_schemas, raw, trust))


def _read_tasks(raw: Mapping[str, Any], trust: bool) -> TasksConfig:
    """Read the task of each of `tasks`; a section `task` beside them is what says how they are trained together."""
    tasks: dict[str, Named] = {}
    for name, section in _task_sections(raw).items():
        with in_task(name):
            tasks[name] = _read_named("task", section, trust)
    own = raw.get("task") or {}
    if not isinstance(own, Mapping) or own.get("name", "multitask") != "multitask" or "tasks" in own:
        raise ConfigError(
            f"task: {abbreviate(own)} stands beside tasks, which have their own; give here what they share, such as "
            "{temperature: 2}, and each task in tasks"
        )
    section = {"name": "multitask", **own, "tasks": tasks}
    return read_section(TasksConfig, section, "task", partial(_schemas, raw, trust))


def _read_tasks_data(raw: Mapping[str, Any], trust: bool) -> TasksData:
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
            data[name] = _read_data({**raw, **section, "data": merged}, trust)
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


def _schemas(recipe: Mapping[str, Any], trust: bool) -> dict[str, type[BaseModel]]:
    """Return the schema of each section of a recipe, as far as its names are known and may be imported."""
    schemas: dict[str, type[BaseModel]] = {"data": Data, "train": Train}
    kinds: tuple[Kind, ...] = ("task", "tokenizer", "model")
    for kind in kinds:
        with suppress(WeftError, KeyError, TypeError):  # what is wrong there is an error of its own
            section = expand_preset(recipe[kind]) if kind == "model" else recipe[kind]
            schemas[kind] = resolve(kind, section["name"], trust).Config
    return schemas
