"""A trained model with its task and tokenizer: made by `train`, read by `load`, asked by calling it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from weft.analysis.attention import Attention, views_of
from weft.analysis.gradients import GradientNorms, trace
from weft.analysis.layer_probing import LayerScores, choices_for, read_task, score_layers
from weft.checkpoint import contents
from weft.checkpoint.store import save_folder
from weft.config.schema import Run
from weft.data.corpus.format import find_corpus, read_manifest
from weft.data.truncation import TruncationPolicy
from weft.embedding import Choice, Combine, Embedder, Layers, Pool
from weft.errors import CheckpointError, ConfigError, DataError, RoleError
from weft.formats.huggingface.hub import find_model
from weft.formats.pretrained import open_model, read_run
from weft.formats.sentence_transformers import Pooling, read_pooling, write_pooling
from weft.nn.attention.capture import capture
from weft.nn.layers.quantization import lower
from weft.tasks.base import Answer, Batch, Head, Task
from weft.tasks.corpus.reuse import prepared_split
from weft.tasks.factory import numbers_of
from weft.tasks.inference import EvaluationResult, judge, judge_prepared, outputs, predict, reread
from weft.tasks.lm.minimal_pairs import Judged, judge_pairs
from weft.tasks.lm.task import LM
from weft.tasks.mlm.task import MLM
from weft.tasks.prepare import check_answer, data_for, has_split, read_whole
from weft.tasks.requests import Asked, read_asked, read_options
from weft.tokenization.trainable import Tokenizer
from weft.training.distributed import pick_device
from weft.training.multi_seed import check_single, train_seeds
from weft.training.reporting import Reporter
from weft.training.run import Trained, train_run

MARKS = 2  # of a text's beginning and end, which data.longest does not count


@dataclass(frozen=True)
class Pipeline:
    """Ask it by calling it: `pipeline(["Thursday, January 12, 2023"])`."""

    run: Run
    task: Task
    tokenizer: Tokenizer
    head: Head
    precision: str = "fp32"  # that it answers in
    pooling: Pooling | None = None  # how it was made to give texts vectors, where that is known
    trained: int = 0  # how many numbers it had before they were rounded to int8, which are parameters no more

    def __call__(self, examples: Asked | Iterable[Asked], options: Mapping[str, Any] | None = None) -> list[Answer]:
        """Answer examples: plain texts, or mappings with the fields of the task's example."""
        single = isinstance(examples, str | Mapping | BaseModel)
        return list(self.answers([examples] if single else examples, options))  # type: ignore[list-item, arg-type]

    def answers(
        self, examples: Iterable[Asked], options: Mapping[str, Any] | None = None, start: int = 0
    ) -> Iterator[Answer]:
        """Answer a stream of examples, in order, in memory that does not grow; `start` is the first one's number."""
        chosen = read_options(self.task, options)
        asked = (self.example(one, number) for number, one in enumerate(examples, start + 1))
        return predict(self.task, self.head, asked, self._limit(), chosen, start=start)

    def outputs(self, examples: Iterable[Asked]) -> Iterator[list[Any]]:
        """Yield what the head itself gives for each example, of which the task makes an answer.

        An example that is too long is cut where the recipe cuts such.
        """
        asked = (self.example(one, number) for number, one in enumerate(examples, 1))
        limit = self._limit("cut" if self.run.data.too_long == "cut" else None)
        found = outputs(self.task, self.head, asked, limit, read_options(self.task, None))
        return (output for _, output in found)

    def stream(self, prompt: Asked, options: Mapping[str, Any] | None = None, start: int = 0) -> Iterator[str]:
        """Yield the answer's text piece by piece, as it is generated; `start` is the question's number."""
        asked = self.example(prompt, start + 1)
        return self.task.stream(self.head, asked, self._limit(), read_options(self.task, options), start)

    def evaluate(
        self, data: str | Path | Iterable[Asked] | None = None, tell: Callable[[str], object] | None = None
    ) -> dict[str, float]:
        """Score on a file, a sample that ships with weft, examples, or, with none given, the recipe's own test data.

        `tell` is called with a line on the rows that were skipped or cut, if any were.
        """
        return self.judge(data, tell).metrics

    def judge(
        self, data: str | Path | Iterable[Asked] | None = None, tell: Callable[[str], object] | None = None
    ) -> EvaluationResult:
        """Do what `evaluate` does; return the metrics and, where answers are labels, the confusion matrix."""
        found = self._judge_prepared(data) if data is None or isinstance(data, str | Path) else None
        if found is None:
            examples, notice = self._examples(data)
            if notice and tell:
                tell(notice)
            found = judge(self.task, self.head, examples, self._limit(self.run.data.too_long))
        if found.note and tell:
            tell(found.note)
        return found

    def _judge_prepared(self, data: str | Path | None) -> EvaluationResult | None:
        """Judge by a prepared corpus, if it is one; of one that is named, by its split `test`, else `valid`."""
        recipe, split = data_for(self.run.data, data)
        if data is not None and (folder := find_corpus(str(data))):
            split = next((one for one in ("test", "valid") if one in read_manifest(folder).splits), "train")
            recipe = recipe.model_copy(update={split: str(data)})
        prepared = prepared_split(recipe, split, self.task, self.tokenizer)
        return judge_prepared(self.task, self.head, prepared[0], f"data.{split}") if prepared else None

    def embed(
        self,
        texts: str | Iterable[str],
        pool: Pool | None = None,
        layers: Layers = -1,
        combine: Combine = "sum",
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> Any:
        """Return a vector a text, float32 (B, D); with `pool="tokens"` one a token, a list of (T, D).

        What is not given is as the model was made for, or else `pool="mean"`, not normalized. See `weft.embedding`.
        """
        return self.embedder(pool, layers, combine, normalize, truncate).all(
            [texts] if isinstance(texts, str) else texts
        )

    def embedder(
        self,
        pool: Pool | None = None,
        layers: Layers = -1,
        combine: Combine = "sum",
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> Embedder:
        """Return what makes vectors of texts, in one call or of a stream of them."""
        own = self.pooling or Pooling("mean")
        choice = Choice(pool or own.pool, layers, combine, own.normalize if normalize is None else normalize)
        limits = (self.run.data.longest + MARKS, getattr(self.head.body, "reads", None), own.longest)
        longest = min(limit for limit in limits if limit is not None)
        return Embedder(self.task, self.head, choice, longest, truncate, own.lowercase)

    def layer_scores(
        self,
        data: str | Path | Mapping[str, Any],
        overrides: Iterable[str] = (),
        choices: Sequence[tuple[Layers, Combine]] = (),
        pool: Pool = "mean",
        tell: Callable[[str], object] | None = None,
    ) -> LayerScores:
        """Score every choice of its layers, frozen, on labelled data: a recipe, a sample or a file, and overrides.

        `choices` are scored beside those of the table, such as `[("1,3", "concat")]`. See
        `weft.analysis.layer_probing`.
        """
        chosen = choices_for(self.head, choices, pool)
        run, task = read_task(data, overrides, self.run, self.head, self.tokenizer)
        return score_layers(run, self.head, task, chosen, pool, tell)

    def log_probs(self, texts: Sequence[str]) -> list[float]:
        """Say how likely each text is to a language model, from its beginning to its end.

        Of one that fills masks (mlm) it is the pseudo-log-likelihood: each token is masked in turn.
        """
        if not isinstance(self.task, LM | MLM):
            raise RoleError(f"task: {self.run.task.name!r} gives texts no probability; a language model (lm) does")
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise DataError(f"log_probs: takes a list of texts, but got {repr(texts)[:60]}; for one text give [text]")
        with torch.inference_mode():
            return self.task.log_probs(self.head.eval(), list(texts))

    def minimal_pairs(self, folder: str | Path) -> Judged:
        """Say of which share of minimal pairs the right sentence is the likelier (BLiMP)."""
        return judge_pairs(self.log_probs, Path(folder))

    @property
    def has_data(self) -> bool:
        """Whether the recipe names data to evaluate on."""
        return has_split(self.run.data, data_for(self.run.data, None)[1])

    def attention(
        self, example: Asked, layers: Collection[int] | None = None, heads: Collection[int] | None = None
    ) -> Attention:
        """Read the winning output again and return where each step looked, in all layers and heads or the chosen."""
        asked = self.example(example)
        source, target, batch = self.teacher_forced(asked)
        with torch.inference_mode(), capture(layers, heads) as maps:
            self.head.eval()(batch)
        if not maps.weights and layers is not None:
            raise ConfigError(f"layers: none of {sorted(layers)} has attention to look at; layers are counted from 0")
        if not maps.weights:
            raise RoleError(f"model: {self.run.model.name!r}, as configured, has no attention to look at")
        if missing := set(layers or ()) - {layer for _, layer in maps.weights}:
            raise ConfigError(f"layers: {min(missing)} has no attention to look at; layers are counted from 0")
        text = example if isinstance(example, str) else self.task.preview(asked)[0]
        answer = self(asked)[0] if self.task.has_question(asked) else {"logprob": self.log_probs([asked.text])[0]}
        read = self.read(batch)
        views = views_of(maps, source if batch.source else read, target, read)
        return Attention(text, answer, self.task.line(answer), views)

    def gradients(self, example: Asked, name: str = "") -> list[GradientNorms]:
        """Say how strongly the loss of the last step of its own answer reaches back to each step that was read."""
        if self.precision == "int8":
            raise ConfigError("precision: int8 is for answers and has no gradients; load the model in fp32 or bf16")
        source, _, batch = self.teacher_forced(example)
        tokens = {"source": source, "target": self.read(batch), "text": self.read(batch)}
        found = trace(self.task, self.head, batch)
        return [GradientNorms(name or self.run.model.name, side, tokens[side], norms) for side, norms in found.items()]

    def teacher_forced(self, example: Asked) -> tuple[list[str], list[str], Batch]:
        """Answer; return the tokens on both sides, and the batch in which the model reads the answer that it chose."""
        source, target, batch = reread(self.task, self.head, self.example(example), self._limit())
        return source, target, batch.to(self.device)

    def read(self, batch: Batch) -> list[str]:
        """Name the tokens that a batch reads; beside a source they are the target's."""
        tokenizer = self.tokenizer.target if batch.source else self.tokenizer
        return [tokenizer.token(id) for id in batch.tokens.ids.tolist()]

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint that `load` reads, in a new folder."""
        if self.precision != "fp32":
            raise ConfigError(
                f"precision: a checkpoint holds fp32, but this is {self.precision}; load it in fp32 to save it"
            )
        return save_folder(Path(path), 0, self.write)

    def write(self, folder: Path) -> None:
        """Put what `load` reads into a folder that is there."""
        contents.write_model(folder, self.run, self.tokenizer, self.head)
        if self.pooling is not None:
            write_pooling(folder, self.pooling)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(chain(self.head.parameters(), self.head.buffers())).device

    @property
    def parameters(self) -> int:
        """How many numbers were trained."""
        return self.trained or numbers_of(self.head)

    @property
    def about(self) -> str:
        """What it is, in a line."""
        return f"{self.run.model.name} for {self.run.task.name}, {self.parameters:,} parameters"

    def example(self, asked: Asked, number: int = 1) -> Any:
        """Check one example: a plain text fills the task's first field, or is JSON where one field is not enough."""
        return read_asked(self.task, asked, number)

    def _examples(self, data: str | Path | Iterable[Asked] | None) -> tuple[list[Any], str]:
        if data is None or isinstance(data, str | Path):
            return read_whole(*data_for(self.run.data, data), self.task, self.tokenizer)
        examples = [self.example(one, number) for number, one in enumerate(data, 1)]
        for number, example in enumerate(examples, 1):
            check_answer(self.task, f"example {number}", example)
        return examples, ""

    def _limit(self, policy: str | None = None) -> TruncationPolicy:
        """A question that is too long is an error, unless its windows are answered, which leaves nothing out."""
        asked = "window" if self.run.data.too_long == "window" else "error"
        return TruncationPolicy(self.run.data.longest, policy or asked, asked=policy is None)  # type: ignore[arg-type]

    def __sklearn_clone__(self) -> "Pipeline":
        """What scikit-learn's clones of an estimator have in common: nothing changes it."""
        return self

    def __repr__(self) -> str:
        return f"<weft.Pipeline: {self.about}>"

    def _repr_html_(self) -> str:
        rows = {
            "task": self.run.task.name,
            "model": self.run.model.name,
            "parameters": f"{self.parameters:,}",
            "vocabulary": f"{len(self.tokenizer):,} ({self.run.tokenizer.name})",
            "device": str(self.device),
        }
        cells = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items())
        return f"<table>{cells}</table>"


def train(
    recipe: str | Path | Mapping[str, Any] | Run,
    overrides: Iterable[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    report: Reporter | None = None,
) -> Pipeline:
    """Train a recipe, by its path, its name or as a mapping, in the directory `out`; return its best model.

    With several seeds (`train.seeds`) there is a training for each in a folder of `out`, and the best of all is it.
    """
    folder = Path(out) if out is not None else Path("runs") / run_name(recipe)
    raw = recipe.dump() if isinstance(recipe, Run) else recipe
    run = read_run(raw, overrides, folder if resume else None)
    if run.train.seeds > 1:
        return _asked(train_seeds(run, folder, resume, report, _measured))
    check_single(folder)
    return _asked(train_run(run, folder, resume, report))


def _asked(trained: Trained) -> Pipeline:
    return Pipeline(trained.run, trained.task, trained.task.tokenizer, trained.head.eval())


def _measured(trained: Trained) -> dict[str, float]:
    """Do what ends a training: evaluate, if there is data to."""
    pipeline = _asked(trained)
    return pipeline.evaluate() if pipeline.has_data else {}


def run_name(recipe: str | Path | Mapping[str, Any] | Run) -> str:
    """Name a run's directory after its recipe."""
    return Path(recipe).stem if isinstance(recipe, str | Path) else "run"


def load(
    path: str | Path,
    device: str = "auto",
    trust: bool = False,
    overrides: Iterable[str] = (),
    precision: str = "fp32",
) -> Pipeline:
    """Read a run's directory, one of its checkpoints or a Hugging Face directory.

    `trust` lets a checkpoint run classes from outside weft.
    `overrides` change its recipe where that fits the weights, such as `model.heads_off={3: [1, 5]}`. It answers in
    `precision`: fp32, bf16, or on the CPU int8.
    """
    if "\0" in str(path):
        raise CheckpointError(f"{str(path)!r}: no folder has such a name; give a run's directory")
    run, task, head = open_model(path, trust, overrides)
    head.to(pick_device(device, "device")).eval()
    if precision != "fp32" and not head.body.supports_low_precision:
        raise ConfigError(
            f"precision: the model {run.model.name!r} answers in fp32 alone, but {precision!r} is asked for"
        )
    trained = numbers_of(head)
    lower(head, precision)
    return Pipeline(run, task, task.tokenizer, head, precision, read_pooling(find_model(path)), trained)
