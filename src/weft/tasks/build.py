"""From a checked recipe to a task and a head with fresh weights."""

from weft.config import Run
from weft.models.base import Role, check_roles
from weft.registry import resolve
from weft.tasks.base import Head, Task
from weft.text.tokenizer import Tokenizer


def make_task(run: Run) -> Task:
    """Make the task, and refuse a model that cannot do what it needs; no data is read."""
    kind, model = resolve("task", run.task.name), resolve("model", run.model.name)
    check_roles(run.task.name, kind.needs, run.model.name, model.roles(run.model))
    task: Task = kind(run.task)
    task.check(run)
    return task


def build(run: Run, tokenizer: Tokenizer) -> tuple[Task, Head]:
    """Make the task and its head on a fresh model."""
    task = make_task(run)
    task.tokenizer = tokenizer
    kind = resolve("model", run.model.name)
    sizes = [len(tokenizer)]
    if Role.CONDITIONAL in kind.roles(run.model) and tokenizer.target is not tokenizer:
        sizes.append(len(tokenizer.target))
    return task, task.head(kind(run.model, *sizes))
