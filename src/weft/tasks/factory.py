"""From a checked recipe to a task and a head with fresh weights, and how many numbers a head has."""

import torch

from weft.config.schema import Run
from weft.errors import ConfigError, did_you_mean
from weft.models.base import Model, Role, check_roles
from weft.registry import resolve
from weft.tasks.base import Head, Task
from weft.tasks.char_inputs import Spelling
from weft.tokenization.trainable import Tokenizer


def make_task(run: Run) -> Task:
    """Make the task, and refuse a model that cannot do what it needs; no data is read."""
    kind, model = resolve("task", run.task.name), resolve("model", run.model.name)
    for place, found, wanted in (("task", kind, Task), ("model", model, Model)):
        if not (isinstance(found, type) and issubclass(found, wanted)):
            raise ConfigError(f"{place}.name: must be a weft {wanted.__name__}, but is {found!r} instead")
    task: Task = kind(run.task)
    roles = model.roles(run.model)
    task.needs = task.needed(roles)
    check_roles(run.task.name, task.needs, run.model.name, roles)
    task.uses_chars = model.uses_chars(run.model)
    task.check(run)
    _check_metric(task, run)
    return task


def _check_metric(task: Task, run: Run) -> None:
    """Refuse now what would otherwise be found out at the first evaluation, or never."""
    known, asked = ("loss", *task.metrics), run.train.metric
    if asked is not None and _declared(task) and asked not in known:
        raise ConfigError(f"train.metric: the task has no metric {asked!r}; {did_you_mean(asked, known)}")
    for key in ("metric", "patience"):
        if getattr(run.train, key) is not None and not (run.data.sample or run.data.valid):
            raise ConfigError(f"train.{key}: needs validation data to go by; add data.valid")


def _declared(task: Task) -> bool:
    """Whether its metrics are known: a class that scores anew without saying what it gives is judged when it does."""
    line = type(task).__mro__
    declares = next((depth for depth, kind in enumerate(line) if vars(kind).get("metrics")), len(line))
    return declares <= next(depth for depth, kind in enumerate(line) if "score" in vars(kind))


def build(run: Run, tokenizer: Tokenizer) -> tuple[Task, Head]:
    """Make the task and its head on a fresh model."""
    task = make_task(run)
    task.tokenizer = tokenizer
    kind = resolve("model", run.model.name)
    sizes = [len(tokenizer)]
    if Role.SEQ2SEQ in kind.roles(run.model) and not tokenizer.joint:
        sizes.append(len(tokenizer.target))
    model = kind(run.model, *sizes)
    model.keep(task.needs)
    if task.uses_chars:
        model.set_char_table(torch.from_numpy(Spelling.of(tokenizer).table))
    return task, task.head(model)


def numbers_of(head: Head) -> int:
    """Count what was learned: parameters, and of a model that only counts its tables."""
    return sum(one.numel() for one in (head.parameters() if not head.body.data_sized_buffers else head.buffers()))
