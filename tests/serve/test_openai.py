"""OpenAI's own client against the compatible routes."""

import numpy as np
import openai
import pytest
from tests.serve.conftest import TEXTS


@pytest.fixture(scope="module")
def api(client):
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
        yield api


def test_models(api):
    assert [model.id for model in api.models.list()] == ["reverse", "classify", "gpt"]
    assert api.models.retrieve("gpt").id == "gpt"
    with pytest.raises(openai.NotFoundError, match="did you mean 'gpt'"):
        api.models.retrieve("gpt2")


def test_a_completion_is_what_the_pipeline_gives(api, gpt):
    options = {"max_length": 10, "seed": 3, "temperature": 0.9, "top_p": 0.8}
    completion = api.completions.create(model="gpt", prompt="good", max_tokens=10, seed=3, temperature=0.9, top_p=0.8)
    assert completion.choices[0].text == gpt("good", options)[0]["text"]
    assert completion.usage.prompt_tokens == 5
    assert completion.usage.total_tokens == 5 + completion.usage.completion_tokens
    greedy = api.completions.create(model="gpt", prompt=["good", "bad"], max_tokens=10, temperature=0)
    assert [choice.text for choice in greedy.choices] == [
        answer["text"] for answer in gpt(["good", "bad"], {"max_length": 10, "sample": False})
    ]


def test_several_samples_and_reasons(api):
    completion = api.completions.create(model="gpt", prompt="good", max_tokens=6, n=3, seed=1, temperature=2)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({choice.text for choice in completion.choices}) > 1
    for choice in completion.choices:
        assert choice.finish_reason in ("stop", "length")
    again = api.completions.create(model="gpt", prompt="good", max_tokens=6, n=3, seed=1, temperature=2)
    assert [choice.text for choice in again.choices] == [choice.text for choice in completion.choices]


def test_stop_words_end_a_text_before_them(api, gpt):
    whole = api.completions.create(model="gpt", prompt="go", max_tokens=20, temperature=0).choices[0].text
    stop = whole[4:6]
    cut = api.completions.create(model="gpt", prompt="go", max_tokens=20, temperature=0, stop=stop).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    chunks = api.completions.create(model="gpt", prompt="go", max_tokens=20, temperature=0, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.text


def test_log_probabilities(api, gpt):
    choice = api.completions.create(model="gpt", prompt="good", max_tokens=8, temperature=0, logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert [choice.text[offset] for offset in logprobs.text_offset] == [token[0] for token in logprobs.tokens]
    assert all(len(top) == 3 for top in logprobs.top_logprobs)
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob == pytest.approx(max(top.values()))


def test_a_stream_gives_the_same_text(api):
    settings = {"model": "gpt", "prompt": ["good", "ba"], "max_tokens": 12, "seed": 8, "n": 2}
    whole = api.completions.create(**settings)
    texts, reasons, usage = [""] * 4, [None] * 4, None
    for chunk in api.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_embeddings(api, classifier):
    for encoding in ("float", "base64"):
        response = api.embeddings.create(model="classify", input=TEXTS, encoding_format=encoding)
        vectors = [entry.embedding for entry in response.data]
        if encoding == "base64":
            import base64

            vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
        assert np.allclose(vectors, classifier.embed(TEXTS), atol=1e-6)
    long = "good " * 100
    with pytest.raises(openai.UnprocessableEntityError, match="tokens"):
        api.embeddings.create(model="classify", input=long)
    cut = api.embeddings.create(model="classify", input=long, extra_body={"truncate": True})
    assert np.allclose(cut.data[0].embedding, classifier.embed(long, truncate=True)[0], atol=1e-6)
    plain = api.embeddings.create(model="classify", input="good")  # base64 between client and server
    assert np.allclose(plain.data[0].embedding, classifier.embed("good")[0], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "classify"}, "generates no text"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"presence_penalty": 1}, "presence_penalty: Extra inputs"),
        ({"echo": True}, "echo"),
    ],
)
def test_what_weft_does_not_have_is_an_error(api, changes, message):
    with pytest.raises(openai.UnprocessableEntityError, match=message):
        api.completions.create(**{"model": "gpt", "prompt": "good", **changes})
    assert api.completions.create(model="gpt", prompt="good").choices
