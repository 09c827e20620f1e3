"""What stands on a model in the Hugging Face format: which head, and its task's section of a recipe, both ways."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from weft.config.schema import Run
from weft.errors import CheckpointError
from weft.formats.huggingface.mapping import HFMap
from weft.tasks.factory import make_task
from weft.tasks.mlm.task import MLM

SEVERAL, NUMBER = "multi_label_classification", "regression"  # their words for what a classifier says


def head_of(folder: Path, family: HFMap, told: Mapping[str, Any], held: Collection[str]) -> str:
    """Say which head a folder has: by its class, and where a larger one's weights are there, too, that one."""
    named = told.get("architectures") or [_guessed(family, held)]
    if not isinstance(named, list) or named[0] not in family.tasks:
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures is {named!r}, which weft does not read; of {family.model_type} "
            f"it reads {', '.join(family.tasks)}"
        )
    head = family.tasks[named[0]]
    more = family.outer.get(f"{head}.next", {}).get("next")  # as the first BERTs were published
    return f"{head}.next" if more is not None and f"{more}.weight" in held else head


def _guessed(family: HFMap, held: Collection[str]) -> str:
    """Name a class where none is named: the first, or the bare encoder where that one's weights are not there."""
    first, *rest = family.tasks
    needed = family.outer.get(family.tasks[first], {}).get("body.transform")
    bare = [name for name in rest if family.tasks[name] == "embed"]
    return bare[0] if bare and needed is not None and f"{needed}.weight" not in held else first


def head_for(run: Run) -> str:
    """Say by which name a run's head goes in an HFMap."""
    task = make_task(run)  # which settles what the recipe leaves open
    return f"{run.task.name}.next" if isinstance(task, MLM) and task.pairs else run.task.name


def read_task(folder: Path, family: HFMap, head: str, told: Mapping[str, Any], held: Collection[str]) -> dict[str, Any]:
    """Return the task's section of a recipe."""
    name, _, more = head.partition(".")
    section: dict[str, Any] = {"name": name}
    if name == "mlm":
        section["next_sentence"] = bool(more)
    elif name == "embed":
        section["summary"] = f"{family.modules.get('pool')}.weight" in held
    elif name in ("classify", "tag"):
        section |= _labels(folder, told, numbers=name == "classify")
        if told.get(family.dropout) is not None:
            section["dropout"] = told[family.dropout]
    return section


def _labels(folder: Path, told: Mapping[str, Any], numbers: bool) -> dict[str, Any]:
    named, many = told.get("id2label"), told.get("num_labels", 2)
    if named is None and isinstance(many, int):
        named = {str(number): f"LABEL_{number}" for number in range(many)}
    if not isinstance(named, dict) or not named:
        what, value = ("num_labels", many) if named is None else ("id2label", named)
        raise CheckpointError(f"{folder / 'config.json'}: {what} says how labels are named, but is {value!r}")
    problem = told.get("problem_type")
    if numbers and (problem == NUMBER or (problem is None and len(named) == 1)):
        if len(named) > 1:
            raise CheckpointError(f"{folder / 'config.json'}: a regression of {len(named)} numbers; weft gives one")
        return {"regression": True}
    try:
        labels = [str(named[str(number)]) for number in range(len(named))]
    except KeyError:
        raise CheckpointError(
            f"{folder / 'config.json'}: id2label must name labels 0, 1, …, but is {named!r}"
        ) from None
    return {"labels": labels, **({"multiple": True} if numbers and problem == SEVERAL else {})}


def write_task(family: HFMap, run: Run) -> dict[str, Any]:
    """Say what config.json says of a task, and refuse what it cannot."""
    task, told = run.task.model_dump(mode="json"), dict[str, Any]()
    for key, plain in (("symmetric", False), ("crf", False), ("layers", "last")):
        if task.get(key, plain) != plain:
            raise CheckpointError(
                f"task.{key}: {task[key]!r} cannot be said in the format of {family.model_type}; a model with such a "
                "part stays weft's own"
            )
    if run.task.name in ("classify", "tag"):
        names = task["labels"] or ["LABEL_0"]  # of a number
        told |= {"id2label": {str(id): name for id, name in enumerate(names)}}
        told |= {"label2id": {name: id for id, name in enumerate(names)}, family.dropout: task["dropout"]}
    if run.task.name == "classify":
        one = "single_label_classification"
        told["problem_type"] = NUMBER if task["regression"] else SEVERAL if task["multiple"] else one
    return told
