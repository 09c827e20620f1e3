"""Task and head from a validated recipe, with new weights; the number of parameters of a head."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.config.run import Run
from weft.config.schema import Pretrained
from weft.errors import ConfigError, did_you_mean, in_task
from weft.models.base import Model, Role, check_roles
from weft.registry import resolve
from weft.tasks.base import Task
from weft.tasks.char_inputs import Spelling
from weft.tasks.head import Head
from weft.tasks.multitask import MultiTask
from weft.tasks.prepare import has_split, resolve_task_config
from weft.tasks.requests import check_effective
from weft.tokenization.trainable import Tokenizer


def make_task(run: Run) -> Task:
    """Return the task; raise if the model lacks a role that it needs. No data is read."""
    task_class, model = resolve("task", run.task.name), resolve("model", run.model.name)
    for section, cls, base in (("task", task_class, Task), ("model", model, Model)):
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise ConfigError(f"{section}.name: must be a weft {base.__name__}, but is {cls!r} instead")
    task: Task = task_class(run.task)
    if isinstance(task, MultiTask):
        task.combine({name: _make_part(run, name) for name in run.task_names})
    roles = model.roles(run.model)
    task.required_roles = task.roles_for(roles)
    check_roles(run.task.name, task.required_roles, run.model.name, roles)
    task.uses_chars = model.uses_chars(run.model)
    if isinstance(run.model, Pretrained) and run.model.weights:
        task.position_limit = run.model.position_limit
    _check(task, run)
    return task


def _make_part(run: Run, name: str) -> Task:
    """Return one of several tasks."""
    with in_task(name):
        return make_task(run.for_task(name))


def resolve_run(run: Run, task: Task) -> Run:
    """Return the recipe with task fields filled in from the training data; the task is configured with them."""
    run = run.model_copy(update={"task": resolve_task_config(run.data, task)})
    task.configure(run.task)
    _check(task, run)
    check_options(task)
    return run


def check_options(task: Task) -> None:
    """Raise an error for a decoding option of the recipe that has no effect."""
    for name, part in task.parts.items() if isinstance(task, MultiTask) else ():
        with in_task(name):
            check_options(part)
    check_effective(task.options(), "task.decode")


def _check(task: Task, run: Run) -> None:
    task.check(run)
    _check_metric(task, run)


def _check_metric(task: Task, run: Run) -> None:
    """Raise now for settings that would otherwise fail at the first evaluation, or never."""
    known, metric = ("loss", *task.metrics), run.train.metric
    if metric is not None and _declares_metrics(task) and metric not in known:
        raise ConfigError(f"train.metric: the task has no metric {metric!r}; {did_you_mean(metric, known)}")
    for key in ("metric", "patience"):
        if getattr(run.train, key) is not None and not has_split(run.data, "valid"):
            raise ConfigError(f"train.{key}: needs validation data; add data.valid, or data.validation_fraction: 0.1")


def _declares_metrics(task: Task) -> bool:
    """Return whether `metrics` is declared by the class that defines `score`, or by a subclass of it."""
    mro = type(task).__mro__
    metrics_depth = next((depth for depth, cls in enumerate(mro) if vars(cls).get("metrics")), len(mro))
    return metrics_depth <= next(depth for depth, cls in enumerate(mro) if "score" in vars(cls))


def build(run: Run, tokenizer: Tokenizer, task: Task | None = None) -> tuple[Task, Head]:
    """Return the task, made if not given, and its head on a new model."""
    task = task or make_task(run)
    task.tokenizer = tokenizer
    model_class = resolve("model", run.model.name)
    sizes = [len(tokenizer)]
    if Role.SEQ2SEQ in model_class.roles(run.model) and not tokenizer.joint:
        sizes.append(len(tokenizer.target))
    model = model_class(run.model, *sizes)
    model.prune_unused(task.required_roles)
    if task.uses_chars:
        model.set_char_table(torch.from_numpy(Spelling.of(tokenizer).table))
    return task, task.head(model)


class _NoInitialization(TorchFunctionMode):
    """Leaves out the drawing of weights: on the meta device it has no effect, but takes a second."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def build_on_meta(run: Run, tokenizer: Tokenizer) -> Head:
    """Return the head of a recipe with weights that have shapes and no data: nothing is allocated."""
    with torch.device("meta"), _NoInitialization():
        return build(run, tokenizer)[1]


def body_on_meta(run: Run, vocab: int) -> Model:
    """Return the body of a recipe for a vocabulary of this size, without data as in `build_on_meta`."""
    with torch.device("meta"), _NoInitialization():
        model: Model = resolve("model", run.model.name)(run.model, vocab)
        model.prune_unused(make_task(run).required_roles)
        return model


def num_parameters(head: Head) -> int:
    """Return the number of parameters, or of buffer elements for a model that counts (an n-gram model)."""
    return sum(tensor.numel() for tensor in (head.parameters() if not head.body.data_sized_buffers else head.buffers()))
