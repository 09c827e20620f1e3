"""Heads in the Hugging Face format: which head a directory has, and the task's section of a recipe, both ways."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from weft.config.run import Run
from weft.errors import CheckpointError
from weft.formats.huggingface.mapping import HFMapping, WeightFiles
from weft.tasks.factory import make_task
from weft.tasks.mlm.task import MLM, PAIR_METRICS

MULTI_LABEL, REGRESSION = "multi_label_classification", "regression"  # their values of problem_type


def detect_head(folder: Path, family: HFMapping, config: Mapping[str, Any], weight_names: Collection[str]) -> str:
    """Return the head of a directory by its class; with next-sentence weights, the head that has them."""
    classes = config.get("architectures") or [_guess_class(family, weight_names)]
    if not isinstance(classes, list) or not isinstance(classes[0], str) or classes[0] not in family.architectures:
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures is {repr(classes)[:60]}, which weft does not read; "
            f"of {family.model_type} it reads {', '.join(family.architectures)}"
        )
    head = family.architectures[classes[0]]
    for objective in PAIR_METRICS:  # as the first BERTs were published
        module = family.head_modules.get(f"{head}.{objective}", {}).get("next")
        if f"{module}.weight" in weight_names:
            return f"{head}.{objective}"
    return head


def _guess_class(family: HFMapping, weight_names: Collection[str]) -> str:
    """Return a class where config.json has none: the first, or the bare encoder if the first one's head is missing."""
    first, *others = family.architectures
    transform = family.head_modules.get(family.architectures[first], {}).get("body.transform")
    bare = [name for name in others if family.architectures[name] == "embed"]
    return bare[0] if bare and transform is not None and f"{transform}.weight" not in weight_names else first


def head_name(run: Run) -> str:
    """Return the name of a run's head in an HFMapping."""
    task = make_task(run)  # resolves what the recipe leaves open
    return f"{run.task.name}.{task.objective}" if isinstance(task, MLM) and task.objective else run.task.name


def read_task(
    folder: Path, family: HFMapping, head: str, config: Mapping[str, Any], weight_files: WeightFiles
) -> dict[str, Any]:
    """Return the task's section of a recipe."""
    name, _, variant = head.partition(".")
    section: dict[str, Any] = {"name": name}
    if name == "mlm":
        section |= {"next_sentence": variant == "next", "sentence_order": variant == "order"}
    elif name == "electra":
        section["generator_size"] = 0  # it is another model there
    elif name == "embed":
        section["pooler"] = f"{family.modules.get('pooler')}.weight" in weight_files
    elif name in ("classify", "tag"):
        output = weight_files.get(f"{family.head_modules[head]['output']}.weight")
        num_outputs = len(output.value) if output is not None and output.value.ndim else 0
        section |= _labels(folder, config, name == "classify", num_outputs)
        if config.get(family.dropout_key) is not None:
            section["dropout"] = config[family.dropout_key]
    return section


def _labels(folder: Path, config: Mapping[str, Any], classify: bool, num_outputs: int) -> dict[str, Any]:
    """Return the task's labels; the output layer has `num_outputs`."""
    id2label, num_labels = config.get("id2label"), config.get("num_labels", 2)
    if id2label is None and type(num_labels) is int and num_labels == num_outputs:
        id2label = {str(number): f"LABEL_{number}" for number in range(num_labels)}
    if not isinstance(id2label, dict) or not id2label:
        key, value = ("num_labels", num_labels) if id2label is None else ("id2label", id2label)
        raise CheckpointError(
            f"{folder / 'config.json'}: {key} says how the {num_outputs} labels are named, but is {repr(value)[:60]}"
        )
    if wrong := [label for label in id2label.values() if not isinstance(label, str | int | float)]:
        raise CheckpointError(f"{folder / 'config.json'}: id2label must name labels, but has {repr(wrong[0])[:60]}")
    problem_type = config.get("problem_type")
    if classify and (problem_type == REGRESSION or (problem_type is None and len(id2label) == 1)):
        if len(id2label) > 1:
            raise CheckpointError(f"{folder / 'config.json'}: a regression of {len(id2label)} numbers; weft gives one")
        return {"regression": True}
    try:
        labels = [str(id2label[str(number)]) for number in range(len(id2label))]
    except KeyError:
        raise CheckpointError(
            f"{folder / 'config.json'}: id2label must name labels 0, 1, …, but is {repr(id2label)[:60]}"
        ) from None
    return {"labels": labels, **({"multiple": True} if classify and problem_type == MULTI_LABEL else {})}


def check_task(family: HFMapping, run: Run) -> None:
    """Raise an error for options of the task that config.json cannot express."""
    task = run.task.model_dump(mode="json")
    for key, default in (("symmetric", False), ("crf", False), ("layers", "last"), ("pooling", "body")):
        if task.get(key, default) != default:
            raise CheckpointError(
                f"task.{key}: {task[key]!r} cannot be expressed in the format of {family.model_type}; such a model "
                "cannot be exported"
            )


def write_task(family: HFMapping, run: Run) -> dict[str, Any]:
    """Return the task's keys of config.json."""
    task, config = run.task.model_dump(mode="json"), dict[str, Any]()
    if run.task.name in ("classify", "tag"):
        names = task["labels"] or ["LABEL_0"]  # for regression
        config |= {"id2label": {str(id): name for id, name in enumerate(names)}}
        config |= {"label2id": {name: id for id, name in enumerate(names)}}
        config |= {family.dropout_key: task["dropout"]} if family.dropout_key else {}
    if run.task.name == "classify":
        single_label = "single_label_classification"
        config["problem_type"] = REGRESSION if task["regression"] else MULTI_LABEL if task["multiple"] else single_label
    return config
