"""A served model: its description, and the functions that a batch of requests runs."""

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from weft.analysis.attention import Attention
from weft.config.json import write_json
from weft.config.schema import Section
from weft.decoding.config import DecodingConfig
from weft.errors import ConfigError, DataError, WeftError
from weft.models.base import Role
from weft.nn.attention.multihead import MultiHeadAttention
from weft.nn.attention.scores import Score
from weft.pipeline import Pipeline, load
from weft.serve.scheduler import BatchKind, Results
from weft.tasks.capabilities import TeacherForcing, TextGeneration
from weft.tasks.inference import predict_or_errors
from weft.tasks.requests import read_options
from weft.text_embedding import Embedder

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
MAX_OPTIONS = 4000  # characters of all options: stop words, say, cost time at every step
MAX_KINDS = 32  # kinds of embeddings that are kept, each with its options
MAX_WEIGHTS = 4_000_000  # numbers of attention in one answer: about 40 MB of JSON

# Inputs to try, by task; by its name, for a model that ships with weft.
EXAMPLES: Mapping[str, Sequence[Any]] = {
    "translate": [{"text": "Thursday, January 12, 2023"}, {"text": "May 1, 1990"}, {"text": "March 14, 2023"}],
    "translator-en-fr": [
        {"text": "The house at the end of the street is very old."},
        {"text": "Where is the station?"},
        {"text": "She has never seen the sea."},
    ],
    "classify": [{"text": "It works, and it was easy to set up."}, {"text": "It broke after two days."}],
    "tag": [{"text": "Meet me in Paris on Friday"}, {"text": "Ada Lovelace wrote to Charles Babbage in London"}],
    "span": [{"question": "Where is the server?", "passage": "The server is in the cellar, under the stairs."}],
    "choice": [{"text": "The cup fell and", "choices": ["broke.", "slept."]}],
    "lm": [{"text": "The function returns"}],
    "writer-en": [{"text": "The history of the city begins"}, {"text": "When she opened the door,"}],
    "mlm": [{"text": "The function [MASK] a list."}],
    "encoder-en": [
        {"text": "The capital of France is [MASK]."},
        {"text": "She [MASK] the door and [MASK] inside."},
        {"text": "A doctor works in a [MASK]."},
    ],
    "electra": [{"text": "The function returns a list."}],
    "contrastive": [
        {"text": "A man is eating lunch.", "pair": "Someone has a meal."},
        {"text": "A woman plays the violin.", "pair": "The stock market fell today."},
        {"text": "Share prices dropped.", "pair": "The market went down."},
    ],
    "embed": [{"text": "A man is eating lunch."}, {"text": "Someone has a meal."}, {"text": "Share prices dropped."}],
    "skipgram": [{"text": "function"}],
}


@dataclass(frozen=True)
class ServedModel:
    """A pipeline under the name by which requests call it."""

    name: str
    pipeline: Pipeline
    _kinds: dict[tuple[str, str], BatchKind] = field(default_factory=dict, compare=False)  # by method and options

    @property
    def methods(self) -> list[str]:
        """The routes that this model answers."""
        task, body = self.pipeline.task, self.pipeline.head.body
        roles = type(body).roles(body.config)
        methods = ["predict"] if type(task).answer is not TeacherForcing.answer else []
        methods += ["stream"] if self.generates else []
        methods += ["embed"] if Role.ENCODER in roles else []
        has_attention = any(isinstance(module, MultiHeadAttention | Score) for module in body.modules())
        return methods + (["attention"] if has_attention and isinstance(task, TeacherForcing) else [])

    @property
    def required_fields(self) -> list[str]:
        """The fields that every example has; of a task that takes the one or the other, none may be required."""
        task = self.pipeline.task
        fields = task.Example.model_fields
        required = {name for name in task.input_fields if fields[name].is_required()}
        return [name for name in task.input_fields if name in required | set(task.required_optional_fields)]

    @property
    def generates(self) -> bool:
        """Whether answers are texts that are generated."""
        body = self.pipeline.head.body
        return isinstance(self.pipeline.task, TextGeneration) and Role.GENERATOR in type(body).roles(body.config)

    def describe(self) -> dict[str, Any]:
        """Return what the list of models says of it."""
        run = self.pipeline.run
        return {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "weft",
            "task": run.task.name,
            "model": run.model.name,
            "parameters": self.pipeline.parameters,
            "methods": self.methods,
            "fields": list(self.pipeline.task.input_fields),
            "required": self.required_fields,
            "options": self.pipeline.task.options().model_dump(mode="json"),
            "examples": list(EXAMPLES.get(self.name, EXAMPLES.get(run.task.name, ()))),
        }

    def read_options(self, options: Mapping[str, Any]) -> Section:
        """Return the options of a call, validated; raise an error for those that are wrong or too long."""
        if (size := num_characters(options)) > MAX_OPTIONS:
            raise ConfigError(
                f"options: have {size:,} characters, and {MAX_OPTIONS:,} are read at most; give fewer words"
            )
        return read_options(self.pipeline.task, options)

    def predict_kind(self, options: Mapping[str, Any]) -> BatchKind:
        """Return the kind of predictions with these options; raise an error if they are wrong."""
        parsed, task, head = self.read_options(options), self.pipeline.task, self.pipeline.head

        def run(examples: list[Any]) -> Results:
            return list(predict_or_errors(task, head, examples, self.pipeline.truncation_policy(), parsed))

        # Samples depend on the place in a list, so such lists do not share a batch.
        shared: Any = object() if isinstance(parsed, DecodingConfig) else write_json(parsed.model_dump(mode="json"))
        return BatchKind(self.name, "predict", shared, run)

    def embed_kind(self, options: Mapping[str, Any]) -> BatchKind:
        """Return the kind of embeddings with these options; raise an error if they are wrong."""

        def run(embedder: Embedder, texts: list[Any]) -> Results:
            vectors = embedder.all(texts)
            return [embedder.errors.get(number, vector) for number, vector in enumerate(vectors, 1)]

        return self._embedding_kind("embed", options, run)

    def tokens_kind(self, options: Mapping[str, Any]) -> BatchKind:
        """Return the kind of embeddings with a vector for each token; results are pairs of tokens and vectors."""

        def run(embedder: Embedder, texts: list[Any]) -> Results:
            vectors = embedder.all(texts)
            numbered = enumerate(zip(texts, vectors, strict=True), 1)
            return [embedder.errors.get(n, (embedder.tokens(text), own)) for n, (text, own) in numbered]

        return self._embedding_kind("embed tokens", options, run)

    def _embedding_kind(
        self, method: str, options: Mapping[str, Any], run: Callable[[Embedder, list[Any]], Results]
    ) -> BatchKind:
        """Return the kind of a method with these options: it is kept, and so is an embedder for each thread."""
        key = method, write_json(dict(options))
        if key not in self._kinds:
            own = threading.local()
            own.embedder = self.pipeline.embedder(**options, on_error="nan")  # checks the options

            def run_in_thread(texts: list[Any]) -> Results:
                if not hasattr(own, "embedder"):
                    own.embedder = self.pipeline.embedder(**options, on_error="nan")
                return run(own.embedder, texts)

            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            self._kinds[key] = BatchKind(self.name, *key, run_in_thread)
        return self._kinds[key]

    def attention_kind(self, layers: Sequence[int] | None, heads: Sequence[int] | None) -> BatchKind:
        """Return the kind of attention maps, one example a batch."""

        def run(examples: list[Any]) -> Results:
            return [_checked(self.pipeline.attention(example, layers, heads)) for example in examples]

        return BatchKind(self.name, "attention", object(), run)


def on_cpu(models: Iterable[ServedModel]) -> bool:
    """Return whether all models are on the CPU."""
    devices = {parameter.device.type for model in models for parameter in islice(model.pipeline.head.parameters(), 1)}
    return devices == {"cpu"}


def num_characters(value: Any) -> int:
    """Return the number of characters in all texts of an input, which may be nested."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_characters, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(num_characters, value))
    return sum(num_characters(part) for _, part in value) if hasattr(value, "model_fields_set") else 1


def _checked(attention: Attention) -> dict[str, Any]:
    """Return attention as plain data; raise an error if it would be too much to send."""
    size = sum(view.weights.size for view in attention.views)
    if size > MAX_WEIGHTS:
        raise ConfigError(
            f"attention: all layers and heads have {size:,} weights for this text, and {MAX_WEIGHTS:,} are sent at "
            "most; give some layers or heads, or a shorter text"
        )
    return attention.to_dict()


def renumbered(error: WeftError, number: int, noun: str = "example") -> WeftError:
    """Return the error of one input with its number in its own request, rather than in the batch."""
    if not isinstance(error, DataError):
        return error
    return DataError(f"{noun} {number}: {re.sub(rf'^{noun} [0-9]+: ', '', str(error))}")


def load_models(models: Sequence[str], device: str, trust: bool, precision: str) -> dict[str, ServedModel]:
    """Load models, each given as a path or as NAME=PATH; return them by name, each of several tasks as NAME.TASK."""
    served: dict[str, ServedModel] = {}
    for model in models:
        name, path = _name_and_path(model)
        pipeline = load(path, device, trust, (), precision)
        tasks = {f"{name}.{task}": pipeline.for_task(task) for task in pipeline.run.task_names}
        for own_name, own in (tasks or {name: pipeline}).items():
            if own_name in served:
                raise ConfigError(f"MODEL: two models are called {own_name!r}; name one of them: NAME={path}")
            served[own_name] = ServedModel(own_name, own)
    return served


def _name_and_path(model: str) -> tuple[str, str]:
    """Return the name and the path of a model: by default its folder's name, of a checkpoint the run's."""
    name, separator, path = model.partition("=")
    if separator and NAME.fullmatch(name) and not Path(model).exists():
        return name, path
    folder = Path(model)
    parts = [part for part in folder.resolve().parts if part not in ("best", "last", "checkpoints")] or [model]
    if folder.resolve().parent.name == "checkpoints":
        parts = parts[:-1]
    return re.sub(r"[^\w.-]", "-", parts[-1] if folder.exists() else folder.name), model
