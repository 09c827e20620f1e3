"""OpenAI's routes, for clients that exist: completions of language models, and embeddings."""

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from weft.decoding.continuous import GeneratedSequence
from weft.errors import ConfigError
from weft.serve.errors import JSONResponse
from weft.serve.events import EventStream, event
from weft.serve.generation import Generated, GenerationJob, TokenEvent, check_generates
from weft.serve.models import MAX_OPTIONS
from weft.serve.schemas import CompletionRequest, EmbeddingsRequest, answer_example

if TYPE_CHECKING:
    from weft.serve.app import Services

MAX_STOP = 16  # stop words

COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "gpt",
    "choices": [{"index": 0, "text": " a list", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
EMBEDDINGS = {
    "object": "list",
    "model": "encoder",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.1, -0.2]}],
    "usage": {"prompt_tokens": 0, "total_tokens": 0},
}


def openai_routes(services: "Services") -> APIRouter:
    """Return the routes of completions and embeddings."""
    router = APIRouter(prefix="/v1", tags=["openai"])

    @router.post("/completions", responses=answer_example(COMPLETION))
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue prompts, as OpenAI's completions do; of a translation model, translate them."""
        completion = Completion(services, body)
        if body.stream:
            return EventStream(services.admission, completion.chunks, completion.cancel)
        results = await services.generated(request, completion.jobs)
        return JSONResponse(completion.whole(results))

    @router.post("/embeddings", responses=answer_example(EMBEDDINGS))
    async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
        """Return the vectors of texts, with the model's own pooling."""
        model = services.model(body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors = await services.answers(request, model.embed_kind({"truncate": body.truncate}), texts, "text")
        encode = _as_base64 if body.encoding_format == "base64" else _as_list
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": 0, "total_tokens": 0}  # not counted
        return JSONResponse({"object": "list", "model": model.name, "data": data, "usage": usage})

    return router


def _as_base64(vector: Any) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def _as_list(vector: Any) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


class Completion:
    """One request of a completion: its jobs, and how their results are written."""

    def __init__(self, services: "Services", body: CompletionRequest) -> None:
        self.body, model = body, services.model(body.model)
        check_generates(model)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        services.check_size(len(prompts) * (body.n or 1), sum(map(len, prompts)))
        self._engine = services.engines[model.name]
        stop = _stop_words(body.stop)
        options = decoding_options(body, has_stop="stop" in type(model.pipeline.task.options()).model_fields)
        self.jobs = []
        for row, prompt in enumerate(prompts):
            example = model.pipeline.example(prompt, row + 1)
            job = self._engine.make_job(example, options, row, bool(body.stream), body.logprobs or 0)
            job.stop, job.merges = stop or job.stop, body.logprobs is None
            self.jobs.append(job)
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model.name

    def whole(self, results: Sequence[Generated]) -> dict[str, Any]:
        """Return the response that is not streamed."""
        choices: list[dict[str, Any]] = []
        for job, result in zip(self.jobs, results, strict=True):
            for sequence in result.sequences:
                choices.append(self._choice(len(choices), job, sequence))
        return {**self._head, "choices": choices, "usage": self._usage(results)}

    def _choice(self, index: int, job: GenerationJob, sequence: GeneratedSequence) -> dict[str, Any]:
        finished = sequence.ids[-1] == job.request.eos
        ids = sequence.ids[:-1] if finished else sequence.ids
        text, reason = job.text_of(ids), "stop" if finished or job.is_stopped(sequence) else "length"
        logprobs = None if self.body.logprobs is None else _logprobs(job, sequence, ids)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self, results: Sequence[Generated]) -> dict[str, int]:
        prompt = sum(job.prompt_tokens for job in self.jobs)
        completion = sum(len(sequence.ids) for result in results for sequence in result.sequences)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def cancel(self) -> None:
        """Stop the work."""
        for job in self.jobs:
            job.cancelled = True

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the response piece by piece, as it is generated."""
        self._engine.submit(self.jobs)
        merged: asyncio.Queue[tuple[int, TokenEvent | None]] = asyncio.Queue()
        readers = [asyncio.ensure_future(_forward(number, job, merged)) for number, job in enumerate(self.jobs)]
        try:
            left = len(self.jobs)
            while left:
                number, token = await merged.get()
                if token is not None:
                    yield event(self._chunk(number, token))
                else:
                    left -= 1
                    self.jobs[number].future.result()  # raises the error of a job that failed
        finally:
            for reader in readers:
                reader.cancel()
        if (self.body.stream_options or {}).get("include_usage"):
            usage = self._usage([job.future.result() for job in self.jobs])
            yield event({**self._head, "choices": [], "usage": usage})
        yield event("[DONE]")

    def _chunk(self, number: int, token: TokenEvent) -> dict[str, Any]:
        index, job = number * (self.body.n or 1) + token.candidate, self.jobs[number]
        logprobs = None
        if self.body.logprobs is not None and token.id != job.request.eos:
            top = {job.token_text(id): value for id, value in token.top}
            logprobs = {"tokens": [job.token_text(token.id)], "token_logprobs": [token.logprob]}
            logprobs |= {"top_logprobs": [top], "text_offset": [0]}
        choice = {"index": index, "text": token.text, "logprobs": logprobs, "finish_reason": token.finish_reason}
        return {**self._head, "choices": [choice]}


async def _forward(number: int, job: GenerationJob, merged: "asyncio.Queue[tuple[int, TokenEvent | None]]") -> None:
    """Put the events of a job, with its number, into the queue of all jobs."""
    assert job.events is not None
    while (token := await job.events.get()) is not None:
        merged.put_nowait((number, token))
    merged.put_nowait((number, None))


def decoding_options(body: CompletionRequest, has_stop: bool) -> dict[str, Any]:
    """Return weft's options of decoding for OpenAI's."""
    options: dict[str, Any] = {"beam": 1, "num_return_sequences": body.n or 1}
    if body.max_tokens is not None:
        options["max_length"] = body.max_tokens
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature == 0 and options["num_return_sequences"] == 1:
        options["sample"] = False
    else:
        seed = secrets.randbits(31) if body.seed is None else body.seed
        options |= {"sample": True, "temperature": temperature or 1.0, "seed": seed, "top_p": body.top_p or None}
        options["top_k"] = None if temperature else 1  # several samples at temperature 0 are the same
    if has_stop:
        options["stop"] = _stop_words(body.stop)
    return options


def _stop_words(stop: str | list[str] | None) -> tuple[str, ...]:
    words = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(words) > MAX_STOP or not all(words) or sum(map(len, words)) > MAX_OPTIONS:
        raise ConfigError(f"stop: must be at most {MAX_STOP} words that are not empty, but is {stop!r:.100} instead")
    return words


def _logprobs(job: GenerationJob, sequence: GeneratedSequence, ids: Sequence[int]) -> dict[str, Any]:
    """Return the log-probabilities of tokens, each named by the text that it adds."""
    texts = [job.decode(ids[:size]) for size in range(len(ids) + 1)]
    return {
        "tokens": [after.removeprefix(before) for before, after in pairwise(texts)],
        "token_logprobs": sequence.logprobs[: len(ids)],
        "top_logprobs": [{job.token_text(id): value for id, value in top} for top in sequence.top[: len(ids)]],
        "text_offset": [len(text) for text in texts[:-1]],
    }
