"""A training from recipe to result: the data, the tokenizer, the head, the directory of the run, and the loop."""

import hashlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import contents
from weft.checkpoint.averaging import read_about
from weft.checkpoint.contents import Progress
from weft.checkpoint.store import Store, verify_or_offer
from weft.config.schema import Run
from weft.config.yaml import write_yaml
from weft.data.batching.packed import PackedItems
from weft.data.truncation import TruncationPolicy
from weft.errors import CheckpointError, ConfigError, DataError
from weft.formats.pretrained import start_from_weights, started_tokenizer
from weft.models.base import Fitted, Model
from weft.tasks.base import Head, Task
from weft.tasks.corpus.reuse import prepared_folder, prepared_split
from weft.tasks.factory import build, make_task
from weft.tasks.inference import evaluate, judge_prepared
from weft.tasks.prepare import fit_tokenizer, has_split, pack_split, read_whole, settled
from weft.tasks.pretrained_embeddings import check_vectors, learn_words, start_from_vectors
from weft.tokenization.trainable import Tokenizer, load_tokenizer
from weft.training.checkpoint_averaging import try_average
from weft.training.compile import make_loader
from weft.training.distributed import World, join_world, leave_world
from weft.training.finetuning import check_tuning, frozen, renewed
from weft.training.fit_loop import Fitting
from weft.training.optim import schedule_uses_budget
from weft.training.reporting import MetricsFile, Notice, Reporter, Reporters, TensorBoard
from weft.training.rng_state import seed_all
from weft.training.trainer import Evaluate, Trainer

FREE = {"data.workers", "train.keep"}  # what may change on resume without changing a number


@dataclass(frozen=True)
class Trained:
    """What a training leaves: the recipe with what the data settled, the best head, and where the run stands."""

    run: Run
    task: Task
    head: Head
    progress: Progress
    rank: list[float] | None = None  # how good the best head is, as in `Progress.best`


def train_run(
    run: Run, out: Path, resume: bool = False, report: Reporter | None = None, known: Tokenizer | None = None
) -> Trained:
    """Train in the directory `out`, and return the best model; `resume` goes on from the last checkpoint there.

    `known` is the tokenizer of another training on the same data, which need not be made again.
    """
    check_tuning(run)
    run = settle(run, make_task(run))
    task = make_task(run)
    world = join_world(run.train.device)
    store = _store(run, out)
    with ExitStack() as stack:
        stack.callback(leave_world, world)
        if world.main:
            stack.enter_context(store.lock())
            store.prepare()
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        folder = _resume_from(store, run, resume)
        world.barrier()  # before the first of them saves, all have seen what was there
        if not folder:
            check_vectors(run)
        tokenizer = load_tokenizer(run.tokenizer, folder) if folder else known or make_tokenizer(run, task)
        trainer = make_trainer(run, tokenizer, world, store, stack, folder, report, resume)
        progress = trainer.fit()
        if run.train.average and world.main and isinstance(trainer, Trainer):
            try_average(trainer, run.train.average)
        world.barrier()
        best = store.best()
        if best:
            contents.load_weights(best, trainer.head)
        about = read_about(best) if best else None
        world.barrier()
    return Trained(run, trainer.task, trainer.head, progress, about.rank if about else progress.best)


def make_tokenizer(run: Run, task: Task) -> Tokenizer:
    """Take the tokenizer that comes with `model.weights`, or train one."""
    return started_tokenizer(run) or fit_tokenizer(run.tokenizer, run.data, task)


def _store(run: Run, out: Path) -> Store:
    train = run.train
    if not train.average:
        return Store(out, train.keep)
    return Store(out, max(train.keep, train.average), train.save_every or train.eval_every)


def settle(run: Run, task: Task) -> Run:
    """Fill in what the recipe leaves to the training data, so that a checkpoint is whole in itself."""
    return run.model_copy(update={"task": settled(run.data, task)})


def _resume_from(store: Store, run: Run, resume: bool) -> Path | None:
    """Return the checkpoint to go on from, verified; a directory that is in use without `resume` is refused."""
    if not resume:
        if store.last():
            raise CheckpointError(
                f"{store.root}: holds a run already; go on with it by --resume, or choose another --out"
            )
        return None
    folder = verify_or_offer(store)
    if folder:
        check_recipe(contents.read_recipe_of(folder), run, folder)
    return folder


def check_recipe(then: dict[str, Any], now: Run, folder: Path) -> None:
    """Refuse to resume with another recipe, except for what changes no step already made."""
    free = FREE if schedule_uses_budget(now.train) else FREE | {"train.steps", "train.time"}
    with suppress(ConfigError):  # what it did not say is what a recipe that says nothing means now
        then = Run.parse(then, trust=False).dump()
    changed = {key: pair for key, pair in contents.differences(then, now.dump()).items() if key not in free}
    for key, (was, now_is) in changed.items():
        raise CheckpointError(
            f"{folder}: the recipe has changed since this checkpoint was written: {key} was {was!r} and is "
            f"{now_is!r} now ({len(changed)} such in all); set it back, or train afresh in another --out"
        )


def make_trainer(
    run: Run,
    tokenizer: Tokenizer,
    world: World,
    store: Store | None,
    stack: ExitStack,
    folder: Path | None,
    report: Reporter | None,
    resume: bool = False,
) -> Trainer | Fitting:
    """Put the parts together, at the beginning or where the checkpoint left off; a fresh run saves its step 0.

    Without a store nothing is written.
    """
    seed_all(run.train.seed, world, run.train.deterministic)
    own = len(tokenizer)
    if not folder:
        learn_words(run, tokenizer)
    task, head = build(run, tokenizer)
    fixed = stack.enter_context(frozen(head, run.train))
    started = None if folder else _start(run, head, tokenizer, own)
    packed, notice = pack_split(run.data, "train", task, tokenizer, store.root if store else None)
    _check_lengths(run, task, head.body, packed)
    listening = _reporters(store, world, folder, report)
    stack.callback(listening.close)
    afresh = f"{store.root}: there is no checkpoint to go on from: training starts afresh" if store else ""
    for told in (notice and f"data.train: {notice}", started, fixed, afresh if resume and not folder else ""):
        if told:
            listening(Notice(told))
    head.to(world.device)
    examples = _validation(run, task, listening)
    if run.train.metric and (why := task.unavailable_metric(run.train.metric, examples)):
        raise ConfigError(f"train.metric: {run.train.metric} will not be given for data.valid: {why}; choose another")
    if task.supports_fit and isinstance(head.body, Fitted):
        fitting = Fitting(run, task, head, packed, world, listening, store, _evaluator(run, task, examples))
        fitting.begin(folder, _digest(packed.digest, examples))
        return fitting
    loader = make_loader(run, task, head.body, packed, world)
    trainer = Trainer(run, task, head, loader, world, listening, store, _evaluator(run, task, examples))
    trainer.progress.data = _digest(packed.digest, examples)
    _begin(trainer, folder, world)
    return trainer


def _start(run: Run, head: Head, tokenizer: Tokenizer, own: int) -> str | None:
    """Give a fresh head the weights or the vectors that the recipe names, and say what it got."""
    with renewed(head.body, run.train.reinit):
        return start_from_weights(run, head) or start_from_vectors(run, tokenizer, head.body, own)


def _check_lengths(run: Run, task: Task, body: Model, packed: PackedItems) -> None:
    """Refuse now what the model could not read when it meets it, in the middle of the training or at its end."""
    reads = getattr(body, "reads", None)
    if reads is None or task.longest_of(packed) is None:
        return
    writes = 0 if task.reads_itself else getattr(task.options(), "max_length", 0)  # such is judged as it is read
    if writes > reads and has_split(run.data, "valid"):
        raise ConfigError(
            f"task.decode.max_length: {writes} tokens may be written, but the model learns {reads} positions; set it "
            f"to {reads} or less, or raise model.longest"
        )
    valid = [("valid", pack_split(run.data, "valid", task, task.tokenizer)[0])] if has_split(run.data, "valid") else []
    for split, data in (("train", packed), *valid):
        longest = task.longest_of(data) or 0
        if longest > reads:
            raise DataError(
                f"data.{split}: a sequence has {longest} tokens, its mark included, but the model learns {reads} "
                f"positions; set data.longest to {reads - task.num_special_tokens} and data.too_long to cut or drop, "
                "or raise model.longest"
            )


def _begin(trainer: Trainer, folder: Path | None, world: World) -> None:
    if world.main and trainer.store:
        trainer.store.write_text("run.yaml", write_yaml(trainer.run.dump()))
    if folder:
        trainer.resume(folder)
        return
    # Saving at once shows a full or read-only disk now, not after the first hour. Room for the next must be there too.
    numbers = sum(parameter.numel() for parameter in trainer.head.parameters())
    if world.main and trainer.store:
        trainer.store.check_space(2 * numbers * 4 * 3)
    seed_all(trainer.train.seed, world)
    trainer.save()


def _reporters(store: Store | None, world: World, folder: Path | None, report: Reporter | None) -> Reporters:
    if not world.main:
        return Reporters([])
    given = [report] if report else []
    if store is None:
        return Reporters(given)
    upto = contents.load_progress(folder).step if folder else -1
    reporters: list[Reporter] = [MetricsFile(store.root / "metrics.jsonl", upto)]
    if TensorBoard.installed():
        reporters.append(TensorBoard(store.root / "tensorboard"))
    return Reporters([*reporters, *given])


def _validation(run: Run, task: Task, report: Reporter) -> list[Any]:
    if not has_split(run.data, "valid") or prepared_folder(run.data, "valid"):
        return []
    examples, notice = read_whole(run.data, "valid", task, task.tokenizer)
    if notice:
        report(Notice(f"data.valid: {notice}"))
    return examples


def _evaluator(run: Run, task: Task, examples: list[Any]) -> Evaluate | None:
    limit = TruncationPolicy(run.data.longest, run.data.too_long)
    if prepared := prepared_split(run.data, "valid", task, task.tokenizer):
        return lambda head: judge_prepared(task, head, prepared[0], "data.valid").metrics
    return (lambda head: evaluate(task, head, examples, limit)) if examples else None


def _digest(trained: str, examples: list[Any]) -> str:
    """Sum up all the data: other validation data would make another model the best."""
    found = hashlib.sha256(trained.encode())
    for example in examples:
        found.update(repr(example).encode("utf-8", "surrogatepass"))
    return found.hexdigest()
