"""The bodies of requests: strict, with unknown fields refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from weft.text_embedding import Combine, Pool

MAX_LAYERS = 64  # layers or heads that a request names: their concatenation is as much wider

Example = str | dict[str, JsonValue] | list[JsonValue]  # a text, the fields of an example, or their values


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


class PredictRequest(Body):
    """Examples and options, by the names of the arguments of `Pipeline.predict`."""

    model_config = _example(examples=[{"text": "May 1, 1990"}], options={})

    examples: str | dict[str, JsonValue] | list[Example]
    options: dict[str, JsonValue] = {}


def _is_call(body: Any) -> str:
    return "call" if isinstance(body, PredictRequest) or (isinstance(body, dict) and "examples" in body) else "bare"


# One example, a list of examples, or an object with examples and options.
PredictBody = Annotated[
    Annotated[PredictRequest, Tag("call")] | Annotated[str | dict[str, JsonValue] | list[Example], Tag("bare")],
    Discriminator(_is_call),
]


class EmbedRequest(Body):
    """Texts, and which vectors they get: the arguments of `Pipeline.embed`."""

    model_config = _example(texts=["A man is eating.", "Someone has lunch."])

    texts: str | list[str]
    pool: Pool | None = None
    layers: int | Annotated[str, Field(max_length=100)] | Annotated[list[int], Field(max_length=MAX_LAYERS)] = -1
    combine: Combine = "sum"
    normalize: bool | None = None
    truncate: bool | None = None


class AttentionRequest(Body):
    """An example, and which layers and heads to show: the arguments of `Pipeline.attention`."""

    model_config = _example(example={"text": "May 1, 1990"}, layers=[0])

    example: Example
    layers: Annotated[list[int], Field(max_length=MAX_LAYERS)] | None = None
    heads: Annotated[list[int], Field(max_length=MAX_LAYERS)] | None = None


class StreamRequest(Body):
    """A prompt and options: the arguments of `Pipeline.stream`."""

    model_config = _example(prompt={"text": "The function returns"}, options={"max_length": 20})

    prompt: Example
    options: dict[str, JsonValue] = {}


class CompletionRequest(Body):
    """OpenAI's request of a completion, as far as weft has it."""

    model_config = _example(model="gpt", prompt="The function returns", max_tokens=16, temperature=0.7)

    model: str
    prompt: str | list[str]
    max_tokens: int | None = Field(16, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    n: int | None = Field(1, ge=1, le=128)
    stream: bool | None = False
    stream_options: dict[str, bool] | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0)
    user: str | None = None


class EmbeddingsRequest(Body):
    """OpenAI's request of embeddings, as far as weft has it."""

    model_config = _example(model="encoder", input=["A man is eating."])

    model: str
    input: str | list[str]
    encoding_format: Literal["float", "base64"] = "float"
    truncate: bool = False  # not OpenAI's: whether texts that are too long are cut off
    user: str | None = None


class ErrorDetails(BaseModel):
    """What is wrong, and with what."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """An error, as OpenAI's clients read it."""

    error: ErrorDetails


REFUSALS = (401, 403, 404, 413, 415, 422, 429, 503)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorResponse} for status in REFUSALS}


def answer_example(content: Any, media_type: str = "application/json") -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI says of a route's responses: an example of the answer, and the errors."""
    return {200: {"content": {media_type: {"example": content}}}, **ERRORS}
