"""The sections `data` and `train` of a recipe, and `task` and `data` of one with several tasks."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, StrictInt, StrictStr, model_validator

from weft.config.schema import Named, Section, Share


def _delimiter(value: object) -> object:
    """Read one character; a tab may be written `\\t` or `tab`, as a shell passes it."""
    character = "\t" if value in ("\\t", "tab") else value
    if not isinstance(character, str) or len(character) != 1 or character in '\r\n"\0':
        raise ValueError("must be one character such as ';', '|' or '\\t', and not a quote or a line end")
    return character


Delimiter = Annotated[str, BeforeValidator(_delimiter)]
Column = StrictInt | StrictStr
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
    # processes that collate batches ahead of the trainer; None: on a GPU up to 4, on a CPU none
    workers: int | None = Field(None, ge=0, le=128)

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


class TasksData(Data):
    """The data of several tasks, by the name of each; what they share was merged into each of them."""

    tasks: dict[str, Data]


class TasksConfig(Named):
    """The sections of several tasks that share one body, by the name of each."""

    tasks: dict[str, SerializeAsAny[Named]]  # a recipe gives them in `tasks`, each with its data, and not here
    # a task with n batches has a share in proportion to n^(1/temperature): 1 is by size, 1e6 the same for all
    temperature: float = Field(1.0, ge=1, le=1e6)


def _seconds(value: object) -> object:
    """Read `90`, `90s`, `15m` or `2h` as seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(value))
    if isinstance(value, bool) or not match:
        raise ValueError("must be a time such as 90s, 15m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]
Every = Literal["epoch"] | Annotated[int, Field(ge=1)]  # so many steps, or the end of each epoch


class Distill(Section):
    """A teacher, whose answers a student learns beside the labels (knowledge distillation)."""

    teacher: str  # a trained model of the same task: a run's directory, a checkpoint, or a name on the hub
    temperature: float = Field(2.0, gt=0)  # of both distributions: above 1 they are flatter
    alpha: float = Field(0.5, ge=0, le=1)  # the weight of the teacher's answers; that of the labels is 1 - alpha
    cosine: float = Field(0.0, ge=0)  # the weight of the cosine distance of the last layers' states


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
