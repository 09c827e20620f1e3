"""The application: its routes, and what they share. `weft.serve.run` serves it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Body, FastAPI, Request
from fastapi import Path as PathParameter
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST

from weft import __version__
from weft.analysis.render.page import ASSETS
from weft.errors import DataError, WeftError, did_you_mean
from weft.serve.admission import Admission
from weft.serve.config import ServerConfig
from weft.serve.errors import JSONResponse, RequestError, add_error_handlers
from weft.serve.events import EventStream, event
from weft.serve.generation import Generated, GenerationEngine, GenerationJob, check_generates
from weft.serve.guard import Guard
from weft.serve.metrics import Metrics
from weft.serve.models import ServedModel, num_characters, on_cpu, renumbered
from weft.serve.openai import openai_routes
from weft.serve.scheduler import BatchKind, Scheduler, split_jobs
from weft.serve.schemas import (
    AttentionRequest,
    EmbedRequest,
    ErrorResponse,
    PredictBody,
    PredictRequest,
    StreamRequest,
    answer_example,
)
from weft.tasks.base import Answer

BATCH_TOKENS = 16384  # tokens in a batch by default
BATCH_TOKENS_ON_CPU = 512  # more are not faster there, and a core takes 50 ms for them with six layers of 384
STATIC = Path(__file__).with_name("static")  # the page at /; attention is drawn by the script of `weft look`


class Services:
    """What the routes share: the models, the thread that runs them, the limits and the metrics."""

    def __init__(self, models: Mapping[str, ServedModel], config: ServerConfig) -> None:
        self.models, self.config, self.metrics = models, config, Metrics()
        self.admission = Admission(config, self.metrics)
        is_cpu = on_cpu(models.values())
        self.batch_tokens = config.batch_tokens or (BATCH_TOKENS_ON_CPU if is_cpu else BATCH_TOKENS)
        self.scheduler = Scheduler(self.batch_tokens, self.metrics, torch.get_num_threads() if is_cpu else 1)
        self.engines = {
            name: GenerationEngine(model, config, self.batch_tokens, self.metrics, self.scheduler)
            for name, model in models.items()
            if model.generates
        }
        for engine in self.engines.values():
            self.scheduler.add_engine(engine)

    def model(self, name: str) -> ServedModel:
        """Return a model by its name; raise 404 for any other."""
        if name not in self.models:
            raise RequestError(404, f"model: there is no {name[:100]!r}; {did_you_mean(name[:100], self.models)}")
        return self.models[name]

    async def answers(self, request: Request, kind: BatchKind, inputs: Sequence[Any], noun: str = "example") -> Any:
        """Return the results of a request's inputs; raise the first error among them."""
        sizes = [num_characters(value) for value in inputs]
        self.check_size(len(inputs), sum(sizes))
        loop, budget = asyncio.get_running_loop(), self.batch_tokens
        jobs = split_jobs(kind, inputs, sizes, budget, loop)
        async with self.admission.admitted():
            results = await self.admission.results(request, self.scheduler, jobs)
        for number, result in enumerate(results, 1):
            if isinstance(result, WeftError):
                raise renumbered(result, number, noun)
        return results

    async def generate(
        self, request: Request, model: ServedModel, examples: Sequence[Any], options: Mapping[str, Any]
    ) -> list[Answer]:
        """Return the answers of a model that generates text."""
        self.check_size(len(examples), sum(map(num_characters, examples)))
        engine = self.engines[model.name]
        jobs = []
        for row, example in enumerate(examples):
            try:
                jobs.append(engine.make_job(example, options, row))
            except DataError as error:
                raise renumbered(error, row + 1) from None
        return [result.answer for result in await self.generated(request, jobs)]

    async def generated(self, request: Request, jobs: Sequence[GenerationJob]) -> list[Generated]:
        """Return what is generated for the jobs of a request, all of one model; raise the first error among them."""
        async with self.admission.admitted():
            if jobs:
                self.engines[jobs[0].model.name].submit(jobs)
            work = asyncio.gather(*(job.future for job in jobs), return_exceptions=True)
            try:
                results = await self.admission.finished(request, work)
            finally:
                for job in jobs:
                    job.cancelled = True
        for number, result in enumerate(results, 1):
            if isinstance(result, Exception):
                raise renumbered(result, number) if isinstance(result, WeftError) else result
        return list(results)

    def check_size(self, inputs: int, characters: int) -> None:
        """Raise an error if a request has too many inputs, or too long ones."""
        if inputs > self.config.max_inputs:
            raise DataError(f"the request has {inputs:,} inputs, and {self.config.max_inputs:,} are answered at most")
        if characters > self.config.max_characters:
            limit = f"{self.config.max_characters:,} are read at most; send fewer or shorter inputs"
            raise DataError(f"the request has {characters:,} characters, and {limit}")


def create_app(models: Mapping[str, ServedModel], config: ServerConfig) -> FastAPI:
    """Return the application that serves these models."""
    services = Services(models, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services.scheduler.start()
        yield
        await asyncio.to_thread(services.scheduler.stop)

    app = FastAPI(
        title="weft", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.state.services = services
    add_error_handlers(app)
    app.include_router(openai_routes(services))  # routes are tried in this order
    app.include_router(model_routes(services))
    app.include_router(health_routes(services))
    for name in ("CompletionRequest", "EmbeddingsRequest"):
        app.openapi()["components"]["schemas"][name]["properties"]["model"]["enum"] = list(models)
    app.mount("/look", StaticFiles(directory=ASSETS))
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    app.add_middleware(Guard, config=config, metrics=services.metrics)
    return app


def health_routes(services: Services) -> APIRouter:
    """Return the routes that say how the server is."""
    router = APIRouter(tags=["health"])

    @router.get("/livez")
    async def live() -> dict[str, str]:
        """Say that the process is there."""
        return {"status": "ok"}

    @router.get("/readyz", responses={503: {"model": ErrorResponse}})
    async def ready() -> dict[str, str]:
        """Say whether requests are accepted: 503 once the server is about to end."""
        if services.admission.draining:
            raise RequestError(503, "the server is shutting down")
        return {"status": "ok"}

    @router.get("/metrics", responses={200: {"content": {"text/plain": {"example": "weft_active_requests 0.0"}}}})
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(services.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


def model_routes(services: Services) -> APIRouter:
    """Return the routes of models: their list, predictions, embeddings and attention."""
    router = APIRouter(prefix="/v1/models", tags=["models"])
    Name = Annotated[str, PathParameter(json_schema_extra={"enum": list(services.models)})]
    listed = {"object": "list", "data": [{"id": "dates", "object": "model", "task": "translate", "model": "seq2seq"}]}

    @router.get("", responses=answer_example(listed))
    async def models() -> Response:
        """List the models, each with its task, what it answers, and inputs to try."""
        return JSONResponse({"object": "list", "data": [model.describe() for model in services.models.values()]})

    @router.get("/{name}", responses=answer_example(listed["data"]))
    async def model(name: Name) -> Response:
        """Describe a model."""
        return JSONResponse(services.model(name).describe())

    @router.post("/{name}/predict", responses=answer_example({"text": "jeudi 12 janvier 2023", "score": -0.01}))
    async def predict(
        request: Request,
        name: Name,
        body: Annotated[PredictBody, Body(examples=[{"text": "Thursday, January 12, 2023"}])],
    ) -> Response:
        """Answer an example, or each of a list of examples."""
        model = services.model(name)
        examples: Any = body.examples if isinstance(body, PredictRequest) else body
        options = body.options if isinstance(body, PredictRequest) else {}
        several = examples if isinstance(examples, list) else [examples]
        parsed = [model.pipeline.example(example, number) for number, example in enumerate(several, 1)]
        if model.generates:
            answers = await services.generate(request, model, parsed, options)
        else:
            answers = await services.answers(request, model.predict_kind(options), parsed)
        return JSONResponse(answers if isinstance(examples, list) else answers[0])

    @router.post("/{name}/embed", responses=answer_example({"vectors": [[0.12, -0.5]]}))
    async def embed(request: Request, name: Name, body: EmbedRequest) -> Response:
        """Return the vectors of texts; with `pool: tokens`, the tokens of each text and a vector for each."""
        model = services.model(name)
        texts = [body.texts] if isinstance(body.texts, str) else body.texts
        options = body.model_dump(exclude={"texts"})
        if body.pool == "tokens":
            pairs = await services.answers(request, model.tokens_kind(options), texts, "text")
            return JSONResponse({"tokens": [own for own, _ in pairs], "vectors": [own.tolist() for _, own in pairs]})
        vectors = await services.answers(request, model.embed_kind(options), texts, "text")
        return JSONResponse({"vectors": [vector.tolist() for vector in vectors]})

    @router.post("/{name}/attention", responses=answer_example({"text": "May 1", "answer": {}, "views": []}))
    async def attention(request: Request, name: Name, body: AttentionRequest) -> Response:
        """Return where each token looked, by layer and head."""
        model = services.model(name)
        parsed = model.pipeline.example(body.example)
        (maps,) = await services.answers(request, model.attention_kind(body.layers, body.heads), [parsed])
        return JSONResponse(maps)

    streamed = 'data: {"text": " a", "token": "a", "logprob": -0.5}'

    @router.post("/{name}/stream", responses=answer_example(streamed, "text/event-stream"))
    async def stream(name: Name, body: StreamRequest) -> Response:
        """Send the answer's text piece by piece, as server-sent events: `token` events, and `answer` at the end."""
        model = services.model(name)
        check_generates(model)
        example = model.pipeline.example(body.prompt)
        services.check_size(1, num_characters(example))
        job = services.engines[name].make_job(example, body.options, stream=True)
        return EventStream(services.admission, lambda: token_events(services.engines[name], job), job.cancel)

    return router


async def token_events(engine: GenerationEngine, job: GenerationJob) -> AsyncIterator[bytes]:
    """Yield an event for each token, with the text that it adds, and at the end one with the whole answer."""
    assert job.events is not None
    engine.submit([job])
    while (token := await job.events.get()) is not None:
        data = {"text": token.text, "token": job.token_text(token.id), "logprob": round(token.logprob, 6)}
        yield event(data | ({"candidate": token.candidate} if job.request.options.num_return_sequences > 1 else {}))
    yield event((await job.future).answer, "answer")
