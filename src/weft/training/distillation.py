"""Knowledge distillation: a student learns its teacher's answers beside the labels.

    L = α T² KL(p_T || q_T) + (1 - α) L_labels + c Σ (1 - cos(h, h'))
    p_T = softmax(z' / T),   q_T = softmax(z / T)

z are the student's logits and z' the teacher's (Hinton et al. 2015, section 2); h and h' their last layers' hidden
states, where both are as wide (Sanh et al. 2019, section 3). The logits are those of a text's labels, of a word's tag,
of an answer's start and end, or of a masked token. Each part is divided by its count, as all losses are.

The teacher answers each batch as it comes, without dropout and without a gradient. If it has the student's tokenizer it
reads the same batch, with the same tokens masked. If not, it reads the same examples in tokens of its own: then the
logits must be in the order of the examples (`SoftTargetHead.any_tokenizer`), such as one row a text. Nothing of the
teacher is saved with the student; a run that is resumed loads it again.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from weft.config.run import Run
from weft.config.sections import Distill
from weft.data.batching.loader import LoadedBatch
from weft.data.batching.packed_items import PackedItems
from weft.data.readers.lines import plural
from weft.errors import ConfigError, DataError
from weft.formats.pretrained import describe_model, open_model, read_teacher
from weft.nn.layers.losses import cosine_distance_sum
from weft.tasks.base import Task
from weft.tasks.batch import Batch
from weft.tasks.head import Head, Sums
from weft.tasks.prepare import pack_split
from weft.tasks.soft_targets import SoftTargetHead
from weft.tokenization.trainable import Tokenizer

PLACE = "train.distill.teacher"
STATES = "states"  # the part of the loss that compares hidden states
_SAME = ("labels", "multiple", "regression", "scheme")  # settings of a task by which logits mean the same
_READING = ("orders", "uses_chars")  # attributes of a task by which two make the same items of an example


@dataclass(frozen=True)
class TaughtBatch(Batch):
    """A batch, and the same examples as the teacher reads them."""

    teacher: Batch | None = None

    def to(self, device: torch.device | str) -> "TaughtBatch":
        """Move both to a device."""
        assert self.teacher is not None
        return replace(cast(TaughtBatch, super().to(device)), teacher=self.teacher.to(device))


@dataclass
class Teacher:
    """A trained head with its task; `items` are the training examples in its own tokens, if not in the student's."""

    task: Task
    head: SoftTargetHead
    items: PackedItems | None = None

    def batch(self, indices: np.ndarray) -> Batch:
        """Return examples as the teacher reads them, by their number in the training data."""
        assert self.items is not None
        return self.task.collate([self.items[index] for index in indices.tolist()], np.random.default_rng(0))


class Distillation(nn.Module):
    """What a student minimises: its own loss and the distance from its teacher, which is no part of this module."""

    def __init__(self, student: SoftTargetHead, teacher: Teacher, config: Distill) -> None:
        super().__init__()
        self.student, self.config = student, config
        self._teacher = (teacher,)  # in a tuple: its parameters are neither trained nor saved

    @property
    def teacher(self) -> Teacher:
        """The teacher."""
        return self._teacher[0]

    def attach(self, loaded: LoadedBatch[Batch]) -> LoadedBatch[Batch]:
        """Return a batch with what the teacher reads, if that is another, and with the count of hidden states."""
        batch = loaded.batch
        if self.config.cosine:
            batch = replace(batch, counts={**batch.counts, STATES: len(batch.tokens.ids)})
        if self.teacher.items is not None:
            own = {part.name: getattr(batch, part.name) for part in fields(Batch)}
            batch = TaughtBatch(**own, teacher=self.teacher.batch(loaded.batch_index.items))
        return loaded._replace(batch=batch)

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the sum of each part of the loss."""
        config = self.config
        with torch.no_grad():
            answers, taught_states = self.teacher.head.read(getattr(batch, "teacher", batch))
        logits, states = self.student.read(batch)
        if answers.shape != logits.shape:
            raise DataError(
                f"{PLACE}: gives {tuple(answers.shape)} answers where the student gives {tuple(logits.shape)}: the "
                "two cut texts at another place; lower data.max_length, or take a teacher with the same tokenizer"
            )
        soft = self.student.soft_losses(logits, answers.to(logits.dtype), batch, config.temperature)
        sums = {part: config.alpha * value for part, value in soft.items()}
        if config.alpha < 1:
            for part, value in self.student.losses(logits, batch).items():
                sums[part] = sums[part] + (1 - config.alpha) * value
        if config.cosine:
            assert states is not None
            assert taught_states is not None
            sums[STATES] = config.cosine * cosine_distance_sum(states, taught_states)
        return sums, None

    def teacher_flops(self, batch: Batch) -> int:
        """Return the FLOPs of the teacher's answers."""
        return self.teacher.head.flops(getattr(batch, "teacher", batch))


def make_distillation(run: Run, task: Task, head: Head, data: PackedItems, device: torch.device) -> Distillation | None:
    """Return what a run with `train.distill` minimises, None without; raise if the two do not go together."""
    config = run.train.distill
    if config is None:
        return None
    taught_run, taught_task, teacher = read_teacher(config.teacher, open_model)
    _check_tasks(run, head, taught_run, teacher)
    same_tokens = taught_task.tokenizer.identity == task.tokenizer.identity
    same_items = same_tokens and all(getattr(taught_task, key, 1) == getattr(task, key, 1) for key in _READING)
    assert isinstance(head, SoftTargetHead)
    assert isinstance(teacher, SoftTargetHead)
    _check_states(config, head, teacher, same_items)
    items = None if same_items else _own_items(run, head, data, taught_run, taught_task)
    teacher.to(device).eval().requires_grad_(False)
    return Distillation(head, Teacher(taught_task, teacher, items), config)


def taught_tokenizer(run: Run) -> Tokenizer | None:
    """Return the teacher's tokenizer, if the recipe's section of the tokenizer is the teacher's; else None."""
    if run.train.distill is None:
        return None
    taught, tokenizer = read_teacher(run.train.distill.teacher, describe_model)
    return tokenizer if taught.tokenizer == run.tokenizer else None


def _check_tasks(run: Run, head: Head, taught: Run, teacher: Head) -> None:
    """Raise unless both predict the same by logits."""
    if taught.task.name != run.task.name:
        raise ConfigError(f"{PLACE}: has learnt the task {taught.task.name!r}, and the student's is {run.task.name!r}")
    for name, part in (("the student's", head), ("the teacher's", teacher)):
        if not isinstance(part, SoftTargetHead) or not part.has_soft_targets:
            raise ConfigError(
                f"train.distill: {name} task {run.task.name!r} does not predict by logits alone, which a student "
                "learns; those that do are classify, tag without task.crf, span, mlm without pairs, and lm that reads "
                "forward and is not carried on"
            )
    for key in _SAME:
        own, theirs = getattr(run.task, key, None), getattr(taught.task, key, None)
        if own != theirs:
            raise ConfigError(
                f"{PLACE}: its task.{key} is {theirs!r}, and the student's is {own!r}; set the student's to the same"
            )


def _check_states(config: Distill, head: SoftTargetHead, teacher: SoftTargetHead, same_items: bool) -> None:
    """Raise if hidden states are to be compared that cannot be."""
    reason = ""
    if not same_items:
        reason = "the teacher has other tokens"
    elif not (head.has_states and teacher.has_states):
        reason = "a head reads the pooled output of its body alone; classify has states with task.pooling=concat"
    elif head.body.width != teacher.body.width:
        reason = f"the teacher's states are {teacher.body.width} wide, and the student's {head.body.width}"
    if config.cosine and reason:
        raise ConfigError(f"train.distill.cosine: {reason}; leave it out")


def _own_items(run: Run, head: SoftTargetHead, data: PackedItems, taught_run: Run, taught_task: Task) -> PackedItems:
    """Return the training examples in the teacher's tokens; long ones are cut to what it can read."""
    if not head.any_tokenizer or run.data.truncation == "drop":
        reason = "data.truncation=drop" if head.any_tokenizer else f"the task {run.task.name!r}"
        raise ConfigError(f"{PLACE}: has a tokenizer of its own, which {reason} does not allow; take the same for both")
    positions = getattr(taught_run.model, "position_limit", None)
    longest = positions - taught_task.num_special_tokens if positions else taught_run.data.max_length
    section = run.data.model_copy(update={"max_length": longest, "truncation": "cut"})
    items, _ = pack_split(section, "train", taught_task, taught_task.tokenizer)
    if len(items) != len(data):
        raise DataError(f"{PLACE}: reads {plural(len(items), 'example')}, and the student {len(data)}; see data.train")
    return items
