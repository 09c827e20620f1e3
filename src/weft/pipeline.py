"""Inference pipeline: a trained model with its task and tokenizer, returned by `train` and `load`."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal

import torch

from weft.analysis.attention import Attention, views_of
from weft.analysis.gradient_flow import GradientNorms, gradient_norms
from weft.analysis.layer_probing import LayerScores, choices_for, probing_task, score_layers
from weft.checkpoint import contents
from weft.checkpoint.storage import Storage, check_storage
from weft.checkpoint.store import save_folder
from weft.config.overrides import Overrides
from weft.config.run import Run
from weft.data.corpus.format import find_corpus, read_manifest
from weft.data.readers.column_mapping import ColumnSpec
from weft.data.truncation import TruncationPolicy
from weft.errors import CheckpointError, ConfigError, DataError, RoleError, in_task
from weft.formats.huggingface.hub import find_model
from weft.formats.pretrained import open_model, read_run
from weft.formats.sentence_transformers import Pooling, read_pooling, write_pooling
from weft.nn.attention.capture import capture
from weft.nn.layers.quantization import lower
from weft.tasks.base import Answer, Task
from weft.tasks.batch import Batch
from weft.tasks.capabilities import ErrorAnalysis, TeacherForcing, TextStreaming
from weft.tasks.contrastive import Contrastive
from weft.tasks.corpus.reuse import prepared_split
from weft.tasks.dataframe import answers_frame, frame_examples, is_dataframe
from weft.tasks.encoding import EvaluationData
from weft.tasks.evaluation import EvaluationResult, evaluate, evaluate_prepared
from weft.tasks.factory import num_parameters
from weft.tasks.finite_answers import NOT_FINITE
from weft.tasks.head import Head
from weft.tasks.inference import outputs, predict, predict_or_errors, teacher_forced_batch
from weft.tasks.lm.minimal_pairs import MinimalPairsResult, evaluate_minimal_pairs
from weft.tasks.lm.task import LM
from weft.tasks.mlm.task import MLM
from weft.tasks.multitask import MultiHead, MultiTask
from weft.tasks.prepare import check_answer, data_for, has_split, labelled_fields, read_evaluation_data
from weft.tasks.requests import Request, check_overrides, is_single, parse_example, read_options
from weft.text_embedding import Combine, Embedder, EmbeddingOptions, LayerSelection, Pool
from weft.tokenization.trainable import Tokenizer
from weft.training.distributed import pick_device
from weft.training.multi_seed import check_single, train_seeds
from weft.training.reporting import Reporter
from weft.training.run import Trained, train_run

SPECIAL_TOKENS = 2  # at the beginning and end of a text, not counted by data.max_length


@dataclass(frozen=True)
class Pipeline:
    """A trained model with its task and tokenizer: from examples to answers, metrics, vectors and attention.

    Answers are lists, in the order of the examples; one example needs no list around it:

        pipeline(["May 1, 1990", "June 2"])         the answers; `predict` is the same
        pipeline({"text": "May 1, 1990"})           an example by its fields
        pipeline([("A man eats.", "He sleeps.")])   pairs of texts, as tuples
        pipeline(df)                                a pandas DataFrame; the answers are one, too
        pipeline("May 1, 1990", {"beam": 5})        options of the task's decoding
        pipeline("May 1, 1990", task="dates")       of a model of several tasks, one of them
        pipeline.for_task("dates")                  that task alone, as a pipeline
        pipeline.answers(lines)                     the answers to a stream, one by one
        pipeline.truncation_policy("cut")           what happens to long texts, for `answers(…, limit=)`
        pipeline.stream("The function")             pieces of one answer, while it is generated
        pipeline.outputs(["May 1, 1990"])           the head's raw outputs

        pipeline.evaluate("dev.tsv")                metrics on a file, a sample, examples or the recipe's own data
        pipeline.evaluate_in_detail()               the metrics and the confusion matrix
        pipeline.embed(["one text"], pool="mean")   vectors, float32 (B, D)
        pipeline.embedder(pool="cls").all(texts)    the same with the options chosen once
        pipeline.layer_scores("langid")             how much each layer knows of some labels
        pipeline.log_probs(["a text"])              the log-probabilities of texts under a language model
        pipeline.minimal_pairs("blimp")             the share of minimal pairs that it gets right

        pipeline.attention("May 1, 1990").weights   where each step of the answer looked, (T, S)
        pipeline.gradients("May 1, 1990")           how far back the gradient reaches
        pipeline.teacher_forced("May 1, 1990")      tokens, and the batch that feeds the model its own answer
        pipeline.read(batch)                        the tokens of a batch, as strings
        pipeline.example("May 1, 1990")             an example, parsed and checked

        pipeline.save("mine")                       a checkpoint, which `weft.load` reads
        pipeline.write(folder)                      the same into a folder that exists

    `about`, `parameters`, `device` and `has_data` say what it is; `run` is its recipe.
    """

    run: Run
    task: Task
    tokenizer: Tokenizer
    head: Head
    precision: str = "fp32"  # of inference
    pooling: Pooling | None = None  # of a sentence-embedding model, where its folder or its task says it
    trained: int = 0  # parameters before int8 quantization, which replaces them by buffers

    def __call__(
        self,
        examples: Request | Iterable[Request],
        options: Mapping[str, Any] | None = None,
        task: str | None = None,
    ) -> list[Answer]:
        """Return the answers to examples, as `predict` does."""
        return self.predict(examples, options, task)

    def predict(
        self,
        examples: Request | Iterable[Request],
        options: Mapping[str, Any] | None = None,
        task: str | None = None,
    ) -> list[Answer]:
        """Return the answers to examples, a list; of one example, which needs no list around it, a list of one.

        An example is a text, a mapping with the fields of the task's example, or a tuple of their values, such as a
        pair of texts. A pandas DataFrame, whose columns are fields, gives a DataFrame: the answers' fields are its
        columns, and the index is the same. A model of several tasks answers as the one that `task` names.
        """
        answers = self.for_task(task).answers(examples, options)
        return answers_frame(examples, answers) if is_dataframe(examples) else list(answers)

    def for_task(self, name: str | None = None) -> "Pipeline":
        """Return the pipeline of one of several tasks, on the body of all; of a model of one task, itself."""
        if not isinstance(self.task, MultiTask):
            if name is not None:
                raise ConfigError(f"task: {name!r} is named, but this model has one task alone; leave it out")
            return self
        part = self.task.part(name)
        assert name is not None
        assert isinstance(self.head, MultiHead)
        return replace(self, run=self.run.for_task(name), task=part, head=self.head.head_of(name))

    def answers(
        self,
        examples: Request | Iterable[Request | DataError],
        options: Mapping[str, Any] | None = None,
        start: int = 0,
        on_error: Literal["raise", "return"] = "raise",
        limit: TruncationPolicy | None = None,
    ) -> Iterator[Answer]:
        """Yield the answers to a stream of examples, in order, in constant memory; `start` is the first one's index.

        With `on_error="return"` the answer to an example that is wrong or too long is `{"error": "…"}`, and the others
        are answered; an error among the examples, such as that of a row which could not be read, is returned as well.
        `limit`, of `truncation_policy`, says what happens to texts that are too long, and counts them.
        """
        self.for_task()  # raises where there are several tasks
        parsed_options, limit = read_options(self.task, options), limit or self.truncation_policy()
        several = self._several(examples)
        if on_error == "raise":
            parsed = (self.example(example, number) for number, example in enumerate(several, start + 1))
            return predict(self.task, self.head, parsed, limit, parsed_options, start=start)
        if on_error != "return":
            raise ConfigError(f"on_error: must be 'raise' or 'return', but is {on_error!r} instead")
        tried = (self._example_or_error(example, number) for number, example in enumerate(several, start + 1))
        results = predict_or_errors(self.task, self.head, tried, limit, parsed_options, start)
        return ({"error": str(answer)} if isinstance(answer, DataError) else answer for answer in results)

    def _several(self, examples: Any) -> Iterable[Request]:
        """Return examples one by one: of a DataFrame its rows, of a single example itself."""
        if is_dataframe(examples):
            return frame_examples(self.task, examples)
        config = self.run.task
        pairs = bool(getattr(config, "pairs", False) or getattr(config, "symmetric", False))
        pairs = pairs or "pair" in (self.run.data.columns or {})
        return [examples] if is_single(self.task, examples, pairs) else examples

    def outputs(self, examples: Iterable[Request]) -> Iterator[list[Any]]:
        """Yield the raw outputs of the head for each example, from which the task makes an answer."""
        parsed = (self.example(example, number) for number, example in enumerate(self._several(examples), 1))
        pairs = outputs(self.task, self.head, parsed, self.truncation_policy(), read_options(self.task, None))
        return (output for _, output in pairs)

    def stream(
        self, prompt: Request | DataError, options: Mapping[str, Any] | None = None, start: int = 0
    ) -> Iterator[str]:
        """Yield the answer's text piece by piece, as it is generated; `start` is the index of the prompt."""
        example = self.example(prompt, start + 1)
        if not isinstance(self.task, TextStreaming):
            raise RoleError(f"task: {self.run.task.name!r} does not generate text, so it cannot be streamed")
        return self.task.stream(self.head, example, self.truncation_policy(), read_options(self.task, options), start)

    def evaluate(
        self, data: str | Path | Iterable[Request] | None = None, tell: Callable[[str], object] | None = None
    ) -> dict[str, float]:
        """Return the metrics on a file, a sample that ships with weft, examples, or by default the recipe's test data.

        `tell` is called with a line on the rows that were skipped or truncated, if any.
        """
        return self.evaluate_in_detail(data, tell).metrics

    def evaluate_in_detail(
        self,
        data: str | Path | Iterable[Request] | None = None,
        tell: Callable[[str], object] | None = None,
        errors: bool = False,
        columns: ColumnSpec | None = None,
        advance: Callable[[int], object] | None = None,
        by_length: bool = False,
    ) -> EvaluationResult:
        """Evaluate as `evaluate` does; return metrics and, of labels, the confusion matrix and classification report.

        With `errors` also the wrong answers: the example's fields, `gold`, `predicted` and `score`, the worst first.
        With `by_length`, where answers are no labels, also the metrics of short, longer and long inputs.
        `columns` of a file, by field, override the recipe's. `advance` is called with the number of examples that were
        answered since the last call.
        """
        if isinstance(self.task, MultiTask) and data is None and not (errors or by_length):
            return self._evaluate_tasks(self.task, tell, advance)
        self.for_task()
        if errors and not isinstance(self.task, ErrorAnalysis):
            raise RoleError(
                f"errors: the task {self.run.task.name!r} has no answers that are right or wrong; leave it out"
            )
        if tell and data is None and data_for(self.run.data, None, columns)[1] == "valid":
            tell("evaluated on the validation data: the recipe has no data.test")
        result = self._evaluate_prepared(data, columns) if data is None or isinstance(data, str | Path) else None
        if result is None:
            examples, notice = self._evaluation_data(data, columns)
            if notice and tell:
                tell(notice)
            result = evaluate(self.task, self.head, examples, errors=errors, advance=advance, by_length=by_length)
        if wrong := [name for name, value in result.metrics.items() if math.isnan(value)]:
            raise DataError(f"evaluate: {wrong[0]} is not a number: for some example {NOT_FINITE}")
        if result.note and tell:
            tell(result.note)
        return result

    def _evaluate_tasks(
        self, task: MultiTask, tell: Callable[[str], object] | None, advance: Callable[[int], object] | None
    ) -> EvaluationResult:
        """Return the metrics of each of several tasks that has data to evaluate on, and their mean."""
        results: dict[str, dict[str, float]] = {}
        for name in task.parts:
            own = self.for_task(name)
            if own.has_data:
                with in_task(name):
                    note = (lambda line, name=name: tell(f"tasks.{name}: {line}")) if tell else None
                    results[name] = own.evaluate_in_detail(tell=note, advance=advance).metrics
        if not results:
            raise ConfigError("tasks: none has data to evaluate on; name one, and give it data")
        return EvaluationResult(task.join(results))

    def _evaluate_prepared(self, data: str | Path | None, columns: ColumnSpec | None) -> EvaluationResult | None:
        """Evaluate on a prepared corpus, if `data` is one; a named corpus by its split `test`, else `valid`."""
        recipe, split = data_for(self.run.data, data, columns, labelled_fields(self.task))
        if data is not None and (folder := find_corpus(str(data))):
            split = next((name for name in ("test", "valid") if name in read_manifest(folder).splits), "train")
            recipe = recipe.model_copy(update={split: str(data)})
        prepared = prepared_split(recipe, split, self.task, self.tokenizer)
        return evaluate_prepared(self.task, self.head, prepared[0], f"data.{split}") if prepared else None

    def embed(
        self,
        texts: str | Iterable[str],
        pool: Pool | None = None,
        layers: LayerSelection = -1,
        combine: Combine = "sum",
        normalize: bool | None = None,
        truncate: bool | None = None,
    ) -> Any:
        """Return one vector per text, float32 (B, D); with `pool="tokens"` one per token, a list of (T, D).

        Defaults are the pooling that the model was trained with (task contrastive: normalized) or comes with, or else
        `pool="mean"`, not normalized. A text that is too long is cut if the recipe cuts or windows such texts, and else
        an error; `truncate` overrides. See `weft.text_embedding`.
        """
        return self.embedder(pool, layers, combine, normalize, truncate).all(_as_texts(texts, "embed"))

    def embedder(
        self,
        pool: Pool | None = None,
        layers: LayerSelection = -1,
        combine: Combine = "sum",
        normalize: bool | None = None,
        truncate: bool | None = None,
        on_error: Literal["raise", "nan"] = "raise",
    ) -> Embedder:
        """Return the embedder of texts, for one call or for a stream; the arguments are those of `embed`."""
        if isinstance(self.task, MultiTask):  # a text is read as by the first task
            return self.for_task(next(iter(self.task.parts))).embedder(
                pool, layers, combine, normalize, truncate, on_error
            )
        pooling = self.pooling or Pooling("mean")
        normalize = pooling.normalize if normalize is None else normalize
        options = EmbeddingOptions(pool or pooling.pool, layers, combine, normalize)
        max_positions = getattr(self.head.body, "max_positions", None)
        limits = (self.run.data.max_length + SPECIAL_TOKENS, max_positions, pooling.longest)
        longest = min(limit for limit in limits if limit is not None)
        truncate = self.run.data.truncation in ("cut", "window") if truncate is None else truncate
        return Embedder(self.task, self.head, options, longest, truncate, pooling.lowercase, on_error)

    def layer_scores(
        self,
        data: str | Path | Mapping[str, Any],
        overrides: Overrides = (),
        choices: Sequence[tuple[LayerSelection, Combine]] = (),
        pool: Pool = "mean",
        tell: Callable[[str], object] | None = None,
        columns: ColumnSpec | None = None,
    ) -> LayerScores:
        """Score each choice of frozen layers by a linear probe on labelled data: a recipe, a sample or a file.

        `choices` are scored in addition to the default ones, such as `[("1,3", "concat")]`. A file is read as the
        model's own training data, where that has labels of the same task; `columns` of it, by field, override. See
        `weft.analysis.layer_probing`.
        """
        layer_choices = choices_for(self.head, choices, pool)
        run, task = probing_task(data, overrides, self.run, self.head, self.tokenizer, columns)
        return score_layers(run, self.head, task, layer_choices, pool, tell)

    def log_probs(self, texts: str | Iterable[str]) -> list[float]:
        """Return the log-probability of each text, from its beginning to its end, under a language model: a list.

        Of a masked language model (mlm) it is the pseudo-log-likelihood: each token is masked in turn.
        """
        if not isinstance(self.task, LM | MLM):
            raise RoleError(f"task: {self.run.task.name!r} gives texts no probability; a language model (lm) does")
        texts = list(_as_texts(texts, "log_probs"))
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise DataError(f"log_probs: takes texts, but got {repr(wrong[0])[:60]}; give strings")
        with torch.inference_mode():
            log_probs = self.task.log_probs(self.head.eval(), texts)
        for number, value in enumerate(log_probs, 1):
            if math.isnan(value):
                raise DataError(f"text {number}: {NOT_FINITE}")
        return log_probs

    def minimal_pairs(self, folder: str | Path) -> MinimalPairsResult:
        """Return the accuracy on minimal pairs (BLiMP): the share in which the right sentence is more probable."""
        return evaluate_minimal_pairs(self.log_probs, Path(folder))

    @property
    def has_data(self) -> bool:
        """Return whether the recipe names data to evaluate on."""
        if self.run.task_names:
            return any(self.for_task(name).has_data for name in self.run.task_names)
        return has_split(self.run.data, data_for(self.run.data, None)[1])

    def attention(
        self, example: Request, layers: Collection[int] | None = None, heads: Collection[int] | None = None
    ) -> Attention:
        """Return the attention weights of a teacher-forced pass over the answer, of all or some layers and heads."""
        parsed = self.example(example)
        source, target, batch = self.teacher_forced(parsed)
        with torch.inference_mode(), capture(layers, heads) as maps:
            self.head.eval()(batch)
        if not maps.weights and layers is not None:
            raise ConfigError(f"layers: none of {sorted(layers)} has attention to look at; layers are counted from 0")
        if not maps.weights:
            raise RoleError(f"model: {self.run.model.name!r}, as configured, has no attention to look at")
        if missing := set(layers or ()) - {layer for _, layer in maps.weights}:
            raise ConfigError(f"layers: {min(missing)} has no attention to look at; layers are counted from 0")
        text = example if isinstance(example, str) else self.task.preview(parsed)[0]
        asks = not isinstance(self.task, TeacherForcing) or self.task.has_question(parsed)
        answer = self(parsed)[0] if asks else {"logprob": self.log_probs([parsed.text])[0]}
        inputs = self.read(batch)
        views = views_of(maps, source if batch.source else inputs, target, inputs)
        return Attention(text, answer, self.task.format_answer(answer), views)

    def gradients(self, example: Request, name: str = "") -> list[GradientNorms]:
        """Return the gradient norms, at each input step, of the loss at the last step of the model's own answer."""
        if self.precision == "int8":
            raise ConfigError("precision: int8 is for answers and has no gradients; load the model in fp32 or bf16")
        source, _, batch = self.teacher_forced(example)
        tokens = {"source": source, "target": self.read(batch), "text": self.read(batch)}
        sides = gradient_norms(self.task, self.head, batch)
        return [GradientNorms(name or self.run.model.name, side, tokens[side], norms) for side, norms in sides.items()]

    def teacher_forced(self, example: Request) -> tuple[list[str], list[str], Batch]:
        """Answer, then return the tokens of source and target and the batch that feeds the model its own answer."""
        source, target, batch = teacher_forced_batch(
            self.task, self.head, self.example(example), self.truncation_policy()
        )
        return source, target, batch.to(self.device)

    def read(self, batch: Batch) -> list[str]:
        """Return the input tokens of a batch as strings; with a source they are the target's."""
        tokenizer = self.tokenizer.target if batch.source else self.tokenizer
        return [tokenizer.token(id) for id in batch.tokens.ids.tolist()]

    def save(self, path: str | Path, storage: Storage = "fp32", base: str | None = None) -> Path:
        """Write a checkpoint for `load` in a new folder; return its path.

        `storage` is how the weights are stored: fp32 as they are, bf16 in half the space, or int8 with a scale for each
        row in a quarter. Loading gives fp32 again, rounded to what was stored. Weights that equal those of `base`, a
        model that ships with weft, are not stored but read from there: of a frozen encoder only the head is left.
        """
        if self.precision != "fp32":
            raise ConfigError(
                f"precision: a checkpoint holds fp32, but this is {self.precision}; load it in fp32 to save it"
            )
        check_storage(storage)
        return save_folder(Path(path), 0, partial(self.write, storage=storage, base=base))

    def write(self, folder: Path, storage: Storage = "fp32", base: str | None = None) -> None:
        """Write the files of a checkpoint into an existing folder."""
        contents.write_model(folder, self.run, self.tokenizer, self.head, storage, base)
        if self.pooling is not None:
            write_pooling(folder, self.pooling)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.head.device

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return self.trained or num_parameters(self.head)

    @property
    def about(self) -> str:
        """Model, task and number of parameters, in a line."""
        return f"{self.run.model.name} for {self.run.task.name}, {self.parameters:,} parameters"

    def example(self, request: Request | DataError, number: int = 1) -> Any:
        """Parse and check an example: a plain text is the task's first field, or JSON if the task needs several."""
        if isinstance(request, DataError):
            raise request
        self.for_task()  # raises where there are several tasks
        return parse_example(self.task, request, number)

    def _evaluation_data(
        self, data: str | Path | Iterable[Request] | None, columns: ColumnSpec | None
    ) -> tuple[EvaluationData, str]:
        """Read and encode labelled examples; return them and a notice on skipped rows."""
        if data is None or isinstance(data, str | Path):
            return read_evaluation_data(*data_for(self.run.data, data, columns, labelled_fields(self.task)), self.task)
        rows = frame_examples(self.task, data, with_labels=True) if is_dataframe(data) else data
        examples = [(f"example {number}", self.example(item, number)) for number, item in enumerate(rows, 1)]
        for place, example in examples:
            check_answer(self.task, place, example)
        limit = TruncationPolicy(self.run.data.max_length, self.run.data.truncation)
        return EvaluationData.of(self.task, examples, limit), ""

    def truncation_policy(self, truncation: Literal["error", "cut", "window"] | None = None) -> TruncationPolicy:
        """Return what happens to an input that is too long, by default as in the recipe; it counts what it changes.

        An example of training may be dropped, but a question is answered: with `drop` it is an error.
        """
        data = self.run.data
        if truncation == "window" != data.truncation:  # a task may refuse it
            self.task.check(self.run.model_copy(update={"data": data.model_copy(update={"truncation": truncation})}))
        policy = truncation or ("error" if data.truncation == "drop" else data.truncation)
        if policy not in (allowed := ("error", "cut", "window")):
            raise ConfigError(f"truncation: must be {', '.join(allowed)}, but is {policy!r} instead")
        return TruncationPolicy(data.max_length, policy, at_inference=True)

    def _example_or_error(self, request: Request | DataError, number: int) -> Any:
        try:
            return self.example(request, number)
        except DataError as error:
            return error

    def __sklearn_clone__(self) -> "Pipeline":
        """Return itself: scikit-learn's clones of an estimator share the pipeline, since it is immutable."""
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
    overrides: Overrides = (),
    out: str | Path | None = None,
    resume: bool = False,
    report: Reporter | None = None,
) -> Pipeline:
    """Train a recipe, given by path, name or mapping, in the directory `out`; return its best model.

    `overrides` change the recipe: `["train.steps=10"]`, `{"train.steps": 10}` or `{"train": {"steps": 10}}`.
    With several seeds (`train.seeds`) each is trained in a folder of `out`, and the best of all is returned.
    """
    folder = Path(out) if out is not None else Path("runs") / run_name(recipe)
    raw = recipe.dump() if isinstance(recipe, Run) else recipe
    run = read_run(raw, overrides, folder if resume else None)
    if run.train.seeds > 1:
        return _make_pipeline(train_seeds(run, folder, resume, report, _evaluate))
    check_single(folder)
    return _make_pipeline(train_run(run, folder, resume, report))


def _as_texts(texts: str | Iterable[str], method: str) -> Iterable[str]:
    """Return texts; of one text, a list of it."""
    if is_dataframe(texts):
        raise DataError(f"{method}: takes texts, but got a DataFrame; give one of its columns, such as df['text']")
    return [texts] if isinstance(texts, str) else texts


def _make_pipeline(trained: Trained) -> Pipeline:
    task = trained.task
    return Pipeline(trained.run, task, task.tokenizer, trained.head.eval(), pooling=_trained_pooling(task))


def _trained_pooling(task: Task) -> Pooling | None:
    """Return the pooling that a contrastive training used, with vectors of length 1, as its cosines have them."""
    return Pooling(task.config.pool, normalize=True) if isinstance(task, Contrastive) else None


def _evaluate(trained: Trained) -> dict[str, float]:
    """Return the metrics of a trained model; {} without data to evaluate on."""
    pipeline = _make_pipeline(trained)
    return pipeline.evaluate() if pipeline.has_data else {}


def run_name(recipe: str | Path | Mapping[str, Any] | Run) -> str:
    """Return the name of a run's directory, after its recipe."""
    return Path(recipe).stem if isinstance(recipe, str | Path) else "run"


def load(
    path: str | Path,
    device: str = "auto",
    trust: bool = False,
    overrides: Overrides = (),
    precision: str = "fp32",
) -> Pipeline:
    """Load a run's directory, one of its checkpoints or a Hugging Face directory.

    `trust` allows a checkpoint to run classes from outside weft.
    `overrides`, as those of `train`, change its recipe as far as the weights allow, such as
    `{"model.pruned_heads": {3: [1, 5]}}`. `precision` is that of inference: fp32, bf16, or on the CPU int8.
    """
    if "\0" in str(path):
        raise CheckpointError(f"{str(path)!r}: no folder has such a name; give a run's directory")
    overrides = overrides if isinstance(overrides, str | Mapping) else list(overrides)
    run, task, head = open_model(path, trust, overrides)
    check_overrides(task, overrides)
    head.to(pick_device(device, "device")).eval()
    if precision != "fp32" and not head.body.supports_low_precision:
        raise ConfigError(
            f"precision: the model {run.model.name!r} answers in fp32 alone, but {precision!r} is asked for"
        )
    parameters = num_parameters(head)
    lower(head, precision)
    pooling = read_pooling(find_model(path)) or _trained_pooling(task)
    return Pipeline(run, task, task.tokenizer, head, precision, pooling, parameters)
