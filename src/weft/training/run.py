"""A training run from recipe to best model: data, tokenizer, head, run directory, training loop."""

import hashlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import contents
from weft.checkpoint.averaging import read_average_info
from weft.checkpoint.contents import Progress
from weft.checkpoint.store import Store, verify_or_offer
from weft.config.run import Run
from weft.config.schema import Pretrained, position_remedy
from weft.config.sections import Train
from weft.config.yaml import write_yaml
from weft.data.batching.packed_items import GroupedItems, PackedItems
from weft.data.readers.lines import plural
from weft.errors import CheckpointError, ConfigError, DataError, in_task
from weft.formats.pretrained import max_length_of_weights, start_from_weights, started_tokenizer
from weft.models.base import Model, SelfFitted
from weft.tasks.base import Task
from weft.tasks.capabilities import CustomEvaluation, SelfFitting
from weft.tasks.corpus.reuse import prepared_folder, prepared_split
from weft.tasks.encoding import EvaluationData
from weft.tasks.evaluation import evaluate, evaluate_prepared
from weft.tasks.factory import build, make_task, resolve_run
from weft.tasks.head import Head
from weft.tasks.multitask import MultiTask
from weft.tasks.prepare import fit_tokenizer, has_split, pack_split, read_evaluation_data
from weft.tasks.pretrained_embeddings import check_vectors, learn_words, start_from_vectors
from weft.tokenization.trainable import Tokenizer, load_tokenizer
from weft.training.compile import make_loader
from weft.training.distillation import make_distillation, taught_tokenizer
from weft.training.distributed import World, join_world, leave_world
from weft.training.final_averaging import try_average
from weft.training.finetuning import check_tuning, frozen, reinitialized
from weft.training.memory import check_memory
from weft.training.optim import schedule_decays, schedule_uses_budget
from weft.training.process_state import seed_all
from weft.training.reporting import MetricsFile, Notice, Reporter, Reporters, TensorBoard
from weft.training.self_fitting import FitLoop
from weft.training.trainer import Evaluate, Trainer

BUDGET = {"train.steps", "train.epochs", "train.time", "train.flops"}
# recipe keys that may change on resume, since they do not affect the result
FREE = {"data.workers", "train.keep", "train.parallel", "train.activation_checkpointing", "train.rank_timeout"}


@dataclass(frozen=True)
class Trained:
    """The result of a training: the recipe as completed from the data, the best head, and the progress of the run."""

    run: Run
    task: Task
    head: Head
    progress: Progress
    rank: list[float] | None = None  # of the best head, as in `Progress.best`; smaller is better


def train_run(
    run: Run, out: Path, resume: bool = False, report: Reporter | None = None, known: Tokenizer | None = None
) -> Trained:
    """Train in the directory `out` and return the best model; `resume` continues from the last checkpoint there.

    `known` is the tokenizer of another training on the same data, so that it is not trained again.
    """
    check_tuning(run)
    task = make_task(run)
    run = resolve_run(run, task)
    world = join_world(run.train.device, run.train.rank_timeout)
    store = _make_store(run, out)
    with ExitStack() as stack:
        stack.callback(leave_world, world)
        if world.main:
            stack.enter_context(store.lock())
            store.prepare()
        if run.train.deterministic:  # to set it takes an import of a second
            stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        folder = _resume_from(store, resume)
        run = share_update(run, world, folder)
        if folder:
            check_recipe(contents.read_recipe_of(folder), run, folder)
        world.barrier()  # every rank has read the directory before the main rank saves to it
        if not folder:
            check_vectors(run)
        tokenizer = load_tokenizer(run.tokenizer, folder) if folder else known or make_tokenizer(run, task)
        trainer = make_trainer(run, task, tokenizer, world, store, stack, folder, report, resume)
        if folder and trainer.progress.done:
            trainer.report(Notice(_finished_notice(trainer, folder)))
        progress = trainer.fit()
        if run.train.average and isinstance(trainer, Trainer):
            try_average(trainer, run.train.average)
        world.barrier()
        best, head = store.best(), trainer.head
        if isinstance(trainer, Trainer):
            head = trainer.parallel.finish()
        if best:
            contents.load_weights(best, head)
        about = read_average_info(best) if best else None
        world.barrier()
    return Trained(run, trainer.task, head, progress, about.rank if about else progress.best)


def make_tokenizer(run: Run, task: Task) -> Tokenizer:
    """Return the tokenizer that comes with `model.weights`, or a teacher's if it is the recipe's, or train one."""
    return started_tokenizer(run) or taught_tokenizer(run) or fit_tokenizer(run.tokenizer, run.data, task)


def _make_store(run: Run, out: Path) -> Store:
    """Return the store of a run; it keeps the checkpoints that `train.average` needs."""
    return Store(out, max(run.train.keep, run.train.average or 0))


def share_update(run: Run, world: World, folder: Path | None = None) -> Run:
    """Return the run with the batches of an update: the recipe's, the checkpoint's in `folder`, else one a process."""
    batches = run.train.accumulate
    if batches is None:
        then = contents.read_recipe_of(folder).get("train", {}) if folder else {}
        batches = then.get("accumulate") or world.size
    if batches % world.size:
        raise ConfigError(
            f"train.accumulate: an update has {plural(batches, 'batch')}, which {world.size} processes cannot share "
            f"evenly; {'start as many as divide it' if folder else f'make it a multiple of {world.size}'}"
        )
    return run.model_copy(update={"train": run.train.model_copy(update={"accumulate": batches})})


def _resume_from(store: Store, resume: bool) -> Path | None:
    """Return the verified checkpoint to resume from, or None; without `resume`, refuse a directory that holds a run."""
    if not resume:
        if store.last():
            raise CheckpointError(
                f"{store.root}: holds a run already; go on with it by --resume, or choose another --out"
            )
        return None
    return verify_or_offer(store)


def check_recipe(then: dict[str, Any], now: Run, folder: Path) -> None:
    """Refuse to resume with another recipe, except for keys that do not affect the steps already made."""
    free = FREE if schedule_uses_budget(now.train) else FREE | BUDGET
    with suppress(ConfigError):  # keys that the old recipe lacks take today's defaults
        then = Run.parse(then, trust=False).dump()
    changed = {key: pair for key, pair in contents.differences(then, now.dump()).items() if key not in free}
    for key, (old, new) in changed.items():
        reason, remedy = "", "train afresh in another --out"
        if key in BUDGET:
            setting = _budget_dependent(now.train)
            reason = f", and {setting} depends on the budget: the steps already made would have had another lr"
            remedy = _train_on(now, folder)
        raise CheckpointError(
            f"{folder}: the recipe has changed since this checkpoint was written: {key} was {old!r} and is "
            f"{new!r} now ({len(changed)} such in all){reason}; set it back, or {remedy}"
        )


def _budget_dependent(train: Train) -> str:
    """Return the setting that makes the learning rate depend on the budget."""
    return f"train.schedule={train.schedule}" if schedule_decays(train) else f"train.warmup={train.warmup:g}, a share,"


def _train_on(run: Run, folder: Path) -> str:
    """Return the way to train further from a checkpoint's weights: a new run, if its model can start from them."""
    if not isinstance(run.model, Pretrained):
        return "train afresh in another --out"
    return f"start a new run from its weights: model.weights={folder.parent.parent} and another --out"


def _finished_notice(trainer: Trainer | FitLoop, folder: Path) -> str:
    """Return why a resumed run has nothing left to do, and how to go on."""
    run, step = trainer.run, trainer.progress.step
    budget = {key.partition(".")[2]: getattr(run.train, key.partition(".")[2]) for key in sorted(BUDGET)}
    given = ", ".join(f"train.{name}={value:g}" for name, value in budget.items() if value is not None)
    done = f"--resume: nothing was done: {folder.parent.parent} is finished, at step {step:,}"
    if isinstance(trainer, Trainer) and trainer.spent() < 1:
        return f"{done}, ended by train.patience={run.train.patience}; {_train_on(run, folder)}"
    if schedule_uses_budget(run.train) and not isinstance(trainer, FitLoop):
        return f"{done} ({given}); to train further, {_train_on(run, folder)}"
    return f"{done} ({given}); give a larger budget to go on"


def make_trainer(
    run: Run,
    task: Task,
    tokenizer: Tokenizer,
    world: World,
    store: Store | None,
    stack: ExitStack,
    folder: Path | None,
    report: Reporter | None,
    resume: bool = False,
) -> Trainer | FitLoop:
    """Build the trainer, fresh or from the checkpoint in `folder`; a fresh run saves a checkpoint of step 0.

    Without a store nothing is written.
    """
    memory_notice = check_memory(run, tokenizer, task, world.device, world.size)
    seed_all(run.train.seed, world, run.train.deterministic)
    trained_vocab = len(tokenizer)  # before words of pre-trained vectors are added
    if not folder:
        learn_words(run, tokenizer)
    _, head = build(run, tokenizer, task)
    freeze_notice = stack.enter_context(frozen(head, run.train))
    start_notice = None if folder else _load_pretrained(run, head, tokenizer, trained_vocab)
    length_notice = None if folder else _length_notice(run, tokenizer)
    packed, data_notice = pack_split(run.data, "train", task, tokenizer, store.root if store else None)
    valid, valid_notice = _read_validation(run, task)
    _check_lengths(run, task, head.body, packed, valid)
    reporters = _make_reporters(store, world, folder, report)
    stack.callback(reporters.close)
    afresh = f"{store.root}: there is no checkpoint to go on from: training starts afresh" if store else ""
    resume_notice = afresh if resume and not folder else ""
    train_notice = data_notice and f"data.train: {data_notice}"
    for message in (
        train_notice,
        start_notice,
        length_notice,
        freeze_notice,
        memory_notice,
        resume_notice,
        valid_notice,
    ):
        if message:
            reporters(Notice(message))
    examples = valid.examples if valid else []
    if run.train.metric and (reason := task.unavailable_metric(run.train.metric, examples)):
        raise ConfigError(
            f"train.metric: {run.train.metric} will not be given for data.valid: {reason}; choose another"
        )
    if isinstance(task, SelfFitting) and isinstance(head.body, SelfFitted):
        head.to(world.device)
        fitting = FitLoop(run, task, head, packed, world, reporters, store, _make_evaluate(run, task, valid, world))
        fitting.begin(folder, _digest(packed.digest, examples))
        return fitting
    loader = make_loader(run, task, head.body, packed, world)
    distillation = make_distillation(run, task, head, packed, world.device)
    evaluation = _make_evaluate(run, task, valid, world)
    trainer = Trainer(run, task, head, loader, world, reporters, store, evaluation, distillation=distillation)
    trainer.progress.data = _digest(packed.digest, examples)
    _resume_or_save(trainer, folder, world)
    return trainer


def _load_pretrained(run: Run, head: Head, tokenizer: Tokenizer, trained_vocab: int) -> str | None:
    """Load the pre-trained weights or word vectors that the recipe names into a fresh head; return a notice."""
    with reinitialized(head.body, run.train.reinit):
        return start_from_weights(run, head) or start_from_vectors(run, tokenizer, head.body, trained_vocab)


def _length_notice(run: Run, tokenizer: Tokenizer) -> str:
    """Return a notice if `data.max_length` is as large as the pretrained weights allow; "" otherwise."""
    if run.task_names:
        notices = {name: _length_notice(run.for_task(name), tokenizer) for name in run.task_names}
        return "; ".join(f"tasks.{name}.{notice}" for name, notice in notices.items() if notice)
    limit, positions = max_length_of_weights(run, tokenizer), getattr(run.model, "position_limit", 0)
    if limit != run.data.max_length:
        return ""
    less = f", of which {positions - limit} are for special tokens" if positions > limit else ""
    return f"data.max_length: {limit}, as model.weights has {positions} positions{less}"


def _check_lengths(run: Run, task: Task, body: Model, train: PackedItems, valid: EvaluationData | None) -> None:
    """Refuse sequences longer than the model has positions, before training rather than in the middle of it."""
    if isinstance(task, MultiTask):
        assert isinstance(train, GroupedItems)
        for (name, part), items in zip(task.parts.items(), train.parts, strict=True):
            with in_task(name):
                _check_lengths(run.for_task(name), part, body, items, valid.parts.get(name) if valid else None)
        return
    splits = {"train": train, **({"valid": valid.items} if valid else {})}
    max_positions = getattr(body, "max_positions", None)
    if max_positions is None or task.max_sequence_length(splits["train"]) is None:
        return
    generates = "valid" in splits and not isinstance(task, CustomEvaluation)
    max_length = getattr(task.options(), "max_length", 0)
    if generates and max_length > max_positions:
        raise ConfigError(
            f"task.decode.max_length: {max_length} tokens may be written, but the model learns {max_positions} "
            f"positions; set it to {max_positions} or less{position_remedy(run.model)}"
        )
    for split, data in splits.items():
        longest = task.max_sequence_length(data) or 0
        if longest > max_positions:
            raise DataError(
                f"data.{split}: a sequence has {longest} tokens, its mark included, but the model learns "
                f"{max_positions} positions; set data.max_length to {max_positions - task.num_special_tokens} and "
                f"data.truncation to cut or drop{position_remedy(run.model)}"
            )


def _resume_or_save(trainer: Trainer, folder: Path | None, world: World) -> None:
    """Resume from the checkpoint in `folder`, or save a checkpoint of step 0."""
    if world.main and trainer.store:
        trainer.store.write_text("run.yaml", write_yaml(trainer.run.dump()))
    if folder:
        trainer.resume(folder)
        return
    # Saving at once fails on a full or read-only disk now, not after an hour. There must be room for two checkpoints,
    # each of weights and two optimizer states in fp32.
    parameters = sum(parameter.numel() for parameter in trainer.head.parameters())
    if world.main and trainer.store:
        trainer.store.check_space(2 * parameters * 4 * 3)
    seed_all(trainer.train.seed, world)
    trainer.save()
    if trainer.saver:
        trainer.saver.join()


def _make_reporters(store: Store | None, world: World, folder: Path | None, report: Reporter | None) -> Reporters:
    if not world.main:
        return Reporters([])
    given = [report] if report else []
    if store is None:
        return Reporters(given)
    upto = contents.load_progress(folder).step if folder else -1
    metrics = MetricsFile(store.root / "metrics.jsonl", upto)
    boards = [TensorBoard(store.root / "tensorboard")] if TensorBoard.installed() else []
    reporters = Reporters([metrics, *boards, *given])
    if metrics.notice:
        reporters(Notice(metrics.notice))
    return reporters


def _read_validation(run: Run, task: Task) -> tuple[EvaluationData | None, str]:
    """Return the validation data, encoded once for all evaluations, and a notice; None without it, or if prepared."""
    if not has_split(run.data, "valid") or prepared_folder(run.data, "valid"):
        return None, ""
    data, notice = read_evaluation_data(run.data, "valid", task)
    if run.data.validation_fraction is not None:
        held_out = f"{plural(len(data.examples), 'row')} of data.train held out for evaluations"
        return data, f"data.validation_fraction: {'; '.join(part for part in (held_out, notice) if part)}"
    return data, notice and f"data.valid: {notice}"


def _make_evaluate(run: Run, task: Task, data: EvaluationData | None, world: World) -> Evaluate | None:
    """Return the evaluation, which all ranks share; None without validation data."""
    prepared = prepared_split(run.data, "valid", task, task.tokenizer)
    if not (prepared or data):
        return None

    def metrics_of(head: Head) -> dict[str, float]:
        with world.sharing():
            if prepared:
                return evaluate_prepared(task, head, prepared[0], "data.valid").metrics
            assert data
            return evaluate(task, head, data).metrics

    return metrics_of


def _digest(train_digest: str, examples: list[Any]) -> str:
    """Return a digest of training and validation data: other validation data could make another model the best."""
    digest = hashlib.sha256(train_digest.encode())
    for example in examples:
        digest.update(repr(example).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
