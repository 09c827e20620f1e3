"""Generation for requests: a running batch of each model, which requests join and leave step by step."""

import asyncio
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weft.decoding.captured_batch import make_running_batch
from weft.decoding.config import DecodingConfig
from weft.decoding.continuous import GeneratedSequence, GenerationRequest, GreedySearch, Search
from weft.errors import ConfigError, DataError
from weft.serve.config import ServerConfig
from weft.serve.errors import RequestError
from weft.serve.metrics import Metrics
from weft.serve.models import ServedModel
from weft.serve.scheduler import Scheduler, served_error
from weft.tasks.base import Answer
from weft.tasks.capabilities import TextGeneration
from weft.tasks.finite_answers import NOT_FINITE, finite_answer
from weft.tasks.incremental_text import IncrementalText, find_stop_word


@dataclass(frozen=True)
class TokenEvent:
    """A token that was generated, or the last of several: the text that they add, and its log-probability."""

    text: str  # perhaps none yet
    candidate: int
    id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
    finish_reason: str | None = None  # "stop" or "length" with the last token


@dataclass(frozen=True)
class Generated:
    """What was generated for a job: the answer, and the ids of each candidate, eos included."""

    answer: Answer
    sequences: Sequence[GeneratedSequence]  # in the order of their numbers; of a beam search none


@dataclass(eq=False)
class GenerationJob:
    """A prompt of a request, with what it is generated from and who waits for it."""

    model: ServedModel
    example: Any
    request: GenerationRequest
    future: asyncio.Future[Generated]
    stop: tuple[str, ...] = ()
    events: asyncio.Queue[TokenEvent | None] | None = None  # of a stream; None in it is the end
    merges: bool = False  # whether an event may be of several tokens
    cancelled: bool = False
    search: Search | None = None
    texts: list[IncrementalText] = field(default_factory=list)
    followed: list[int] = field(default_factory=list)  # tokens of each sequence that events have been made of

    def cancel(self) -> None:
        """Stop the work before its next step."""
        self.cancelled = True

    @property
    def task(self) -> TextGeneration:
        """The task, which decodes what is generated."""
        assert isinstance(self.model.pipeline.task, TextGeneration)
        return self.model.pipeline.task

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt and of the source."""
        source = self.request.source
        return len(self.request.prompt.ids) + (0 if source is None else len(source.ids))

    def begin(self, search: Search) -> None:
        """Begin to follow the search of this job."""
        self.search = search
        if isinstance(search, GreedySearch) and (self.events is not None or self.stop):
            self.texts = [self.task.incremental_text(self.request, self.stop) for _ in search.sequences]
            self.followed = [0] * len(self.texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids."""
        return self.task.decode_generated(self.request, ids)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids up to the first stop word."""
        text = self.decode(ids)
        return text[: find_stop_word(text, self.stop)]

    def is_stopped(self, sequence: GeneratedSequence) -> bool:
        """Return whether a sequence has come to a stop word."""
        return bool(self.texts) and self.texts[sequence.number].stopped

    def token_text(self, id: int) -> str:
        """Return the name of a token."""
        return self.task.tokenizer.target.token(id)

    def follow(self) -> list[TokenEvent]:
        """Return the newest tokens as events; end the sequences that have come to a stop word."""
        if not isinstance(self.search, GreedySearch):
            return []
        events = []
        for text, sequence in zip(self.texts, self.search.sequences, strict=False):  # no texts: nobody follows
            while (first := self.followed[sequence.number]) < len(sequence.ids):
                end = len(sequence.ids) if self.merges and not self.stop else first + 1
                events.append(self._event(sequence, text, first, end))
                self.followed[sequence.number] = end
        return events

    def _event(self, sequence: GeneratedSequence, text: IncrementalText, first: int, end: int) -> TokenEvent:
        """Return the event of the tokens from `first` to `end` of a sequence."""
        ids, logprob = sequence.ids[first:end], sequence.logprobs[end - 1]
        if not math.isfinite(logprob):
            raise DataError(NOT_FINITE)
        ended = ids[-1] == self.request.eos
        added = text.add(*(ids[:-1] if ended else ids))
        if text.stopped:
            sequence.end_after(first)
        parts = sequence.number, ids[-1], logprob, sequence.top[end - 1]
        if not sequence.done or end < len(sequence.ids):
            return TokenEvent(added, *parts)
        return TokenEvent(added + text.end(), *parts, "stop" if ended or text.stopped else "length")

    def result(self) -> Generated:
        """Return the whole result, once the search is done."""
        assert self.search is not None
        outputs = self.task.generated_outputs(self.model.pipeline.head, self.request, self.search.hypotheses())
        answer = finite_answer(self.task, self.example, outputs, 1)
        return Generated(answer, self.search.sequences if isinstance(self.search, GreedySearch) else ())


class GenerationEngine:
    """The running batch of one model, stepped by the scheduler's thread."""

    def __init__(
        self, model: ServedModel, config: ServerConfig, batch_tokens: int, metrics: Metrics, scheduler: Scheduler
    ) -> None:
        self.model, self._config, self._metrics, self._scheduler = model, config, metrics, scheduler
        self._batch_tokens = batch_tokens
        self._batch = make_running_batch(model.pipeline.head.body)
        self._waiting: list[GenerationJob] = []
        self._running: list[GenerationJob] = []
        self._lock = threading.Lock()

    def make_job(
        self, example: Any, options: Mapping[str, Any], row: int = 0, stream: bool = False, top_logprobs: int = 0
    ) -> GenerationJob:
        """Return the job of an example; raise an error for options that are wrong or too much."""
        pipeline = self.model.pipeline
        assert isinstance(pipeline.task, TextGeneration)
        parsed = self.model.read_options(options)
        assert isinstance(parsed, DecodingConfig)
        self._check(parsed, stream)
        limit = pipeline.truncation_policy()
        request = pipeline.task.generation_request(pipeline.head, example, limit, parsed, row)
        request = replace(request, top_logprobs=top_logprobs)
        future = asyncio.get_running_loop().create_future()
        events: asyncio.Queue[TokenEvent | None] | None = asyncio.Queue() if stream else None
        return GenerationJob(self.model, example, request, future, getattr(parsed, "stop", ()), events)

    def _check(self, options: DecodingConfig, stream: bool) -> None:
        rows, limit = max(options.beam, options.num_return_sequences), self._config
        if rows > limit.running:
            raise ConfigError(f"options: {rows} sequences for one input, and {limit.running} are generated at a time")
        if options.max_length > limit.max_tokens:
            raise ConfigError(
                f"options.max_length: must be at most {limit.max_tokens}, but is {options.max_length} instead"
            )
        if stream and options.beam > 1:
            raise ConfigError(
                f"options.beam: a stream has one sequence, but beam is {options.beam}; set beam: 1, or use predict"
            )

    def submit(self, jobs: Sequence[GenerationJob]) -> None:
        """Queue jobs."""
        with self._lock:
            self._waiting += jobs
        self._scheduler.wake()

    def step(self) -> bool:
        """Let jobs join, and generate a token of each sequence; return whether there was anything to do."""
        self._drop_cancelled()
        joining = self._take()
        if not joining and not self._batch.searches:
            return False
        before = self._batch.generated
        with torch.inference_mode():
            self._join(joining)
            self._deliver()
            self._batch.step()
            self._deliver()
        self._metrics.running.labels(self.model.name).set(self._batch.rows)
        self._metrics.tokens.labels(self.model.name).inc(self._batch.generated - before)
        return True

    def _drop_cancelled(self) -> None:
        """Let the sequences leave that nobody waits for."""
        for job in self._running:
            if job.cancelled and job.search is not None:
                job.search.stopped = True
        self._running = [job for job in self._running if not job.cancelled]

    def fail(self, error: Exception) -> None:
        """Give up all that is running."""
        self._batch.clear()
        failed, self._running = self._running, []
        for job in failed:
            _post(job, error)

    def _take(self) -> list[GenerationJob]:
        """Return the waiting jobs that can join now: as many as there is room for, up to a budget of tokens."""
        taken: list[GenerationJob] = []
        rows, tokens = self._batch.rows, 0
        with self._lock:
            self._waiting = [job for job in self._waiting if not job.cancelled]
            while self._waiting and self._batch.can_join:
                job = self._waiting[0]
                rows += max(job.request.options.beam, job.request.options.num_return_sequences)
                tokens += job.prompt_tokens
                is_full = rows > self._config.running and bool(taken or self._batch.rows)
                if is_full or (taken and tokens > self._batch_tokens):
                    break
                taken.append(self._waiting.pop(0))
        return taken

    def _join(self, jobs: list[GenerationJob]) -> None:
        """Let jobs join the batch; one that cannot be answered fails alone."""
        if not jobs:
            return
        try:
            searches = self._batch.join([job.request for job in jobs])
        except Exception as error:  # the others must go on
            if len(jobs) == 1:
                _post(jobs[0], served_error(error))
                return
            for job in jobs:
                self._join([job])
            return
        self._metrics.batch.labels(self.model.name, "generate").observe(len(jobs))
        for job, search in zip(jobs, searches, strict=True):
            job.begin(search)
        self._running += jobs

    def _deliver(self) -> None:
        """Send what the last step has generated to those who wait for it; drop the jobs that are done."""
        posts = [(job, *self._progress(job)) for job in self._running]
        self._running = [job for job, _, result in posts if result is None]
        posts = [(job, events, result) for job, events, result in posts if events or result is not None]
        if posts:
            posts[0][0].future.get_loop().call_soon_threadsafe(_post_all, posts)

    def _progress(self, job: GenerationJob) -> tuple[list[TokenEvent], Generated | Exception | None]:
        """Return the new events of a job, and its result or error once it has one."""
        assert job.search is not None
        try:
            events = job.follow()
            over = job.search.done or (isinstance(job.search, GreedySearch) and _all_done(job.search))
            return events, job.result() if over else None
        except Exception as error:
            job.search.stopped = True
            return [], served_error(error)


def _all_done(search: GreedySearch) -> bool:
    return all(sequence.done for sequence in search.sequences)


Post = tuple[GenerationJob, list[TokenEvent], Generated | Exception | None]


def _post_all(posts: Sequence[Post]) -> None:
    """Hand events and results to those who wait; called in the event loop."""
    for job, events, result in posts:
        if job.events is not None:
            for event in events:
                job.events.put_nowait(event)
        if result is not None:
            _finish(job, result)


def _finish(job: GenerationJob, result: Generated | Exception) -> None:
    if not job.future.done() and not job.cancelled:
        if isinstance(result, Exception):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)
    if job.events is not None:
        job.events.put_nowait(None)


def _post(job: GenerationJob, error: Exception) -> None:
    job.future.get_loop().call_soon_threadsafe(_finish, job, error)


def check_generates(model: ServedModel) -> None:
    """Raise an error if a model does not generate text."""
    if not model.generates:
        name = model.pipeline.run.task.name
        raise RequestError(422, f"model: {model.name!r} is for {name}, which generates no text; use its predict route")
