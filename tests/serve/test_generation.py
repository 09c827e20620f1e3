"""Generation over HTTP: streams, and answers that do not depend on who shares the running batch."""

import asyncio
import json
import re
import socket
import threading
import time

import httpx
import pytest
from tests.serve.conftest import TEXTS, language_model, running, together

from weft.decoding.captured_batch import CapturedBatch
from weft.serve import generation
from weft.serve.generation import GenerationEngine

PATH = "/v1/models/gpt/predict"


def events(response):
    """Return the server-sent events of a response, as pairs of a name and data."""
    parts = [block.split("\n") for block in response.text.strip().split("\n\n")]
    return [(lines[0][7:] if len(lines) > 1 else "", json.loads(lines[-1][6:])) for lines in parts]


def test_a_stream_gives_the_answer_of_a_prediction(client, gpt):
    options = {"max_length": 12, "seed": 5}
    body = {"prompt": "good", "options": options}
    response = client.post("/v1/models/gpt/stream", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *tokens, (name, answer) = events(response)
    assert name == "answer"
    assert answer["text"] == gpt("good", options)[0]["text"] == "".join(data["text"] for _, data in tokens)
    assert answer["logprob"] == pytest.approx(gpt("good", options)[0]["logprob"], abs=1e-4)
    assert sum(data["logprob"] for _, data in tokens) == pytest.approx(answer["logprob"], abs=1e-4)


def test_a_translation_can_be_streamed(client, reverser):
    *tokens, (_, answer) = events(client.post("/v1/models/reverse/stream", json={"prompt": {"text": "abcde"}}))
    assert "".join(data["text"] for _, data in tokens) == answer["text"] == reverser("abcde")[0]["text"]


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("classify", {"prompt": "good"}, "generates no text"),
        ("gpt", {"prompt": "good", "options": {"beam": 2, "sample": False}}, "options.beam"),
        ("gpt", {"prompt": "good", "options": {"max_length": 5000}}, "at most 4096"),
        ("gpt", {"prompt": "good", "options": {"num_return_sequences": 100}}, "at a time"),
        ("gpt", {"prompt": "good " * 40}, "tokens"),
        ("gpt", {"text": "good"}, "prompt: Field required"),
    ],
)
def test_what_cannot_be_streamed_is_422(client, name, body, message):
    response = client.post(f"/v1/models/{name}/stream", json=body)
    assert response.status_code == 422
    assert message in response.json()["error"]["message"]


def calls():
    """Return 64 requests with options of their own: greedy, sampled, several samples, beams, stop words."""
    kinds = [
        {"sample": False},
        {"seed": 1},
        {"seed": 2, "num_return_sequences": 2},
        {"beam": 3, "sample": False},
        {"seed": 7, "stop": ["o"], "logprobs": True},
        {"seed": 3, "repetition_penalty": 1.3},
    ]
    return [
        {
            "examples": TEXTS[number % 6][: 3 + number % 9],
            "options": {"max_length": 4 + number % 17, **kinds[number % len(kinds)]},
        }
        for number in range(64)
    ]


def close(answer, other):
    """Return whether two answers are the same, up to rounding."""
    if isinstance(answer, dict):
        return answer.keys() == other.keys() and all(close(answer[key], other[key]) for key in answer)
    if isinstance(answer, list):
        return len(answer) == len(other) and all(map(close, answer, other))
    return answer == pytest.approx(other, abs=1e-4) if isinstance(answer, float) else answer == other


def test_an_answer_does_not_depend_on_who_shares_the_batch(client, gpt):
    bodies = calls()
    alone = [gpt(body["examples"], body["options"])[0] for body in bodies]
    single = [client.post(PATH, json=body).json() for body in bodies[:6]]
    assert all(map(close, single, alone[:6]))
    beside = [response.json() for response in together(client, PATH, bodies)]
    assert [answer["text"] for answer in beside] == [answer["text"] for answer in alone]
    assert all(map(close, beside, alone))

    async def late():
        async with httpx.AsyncClient(base_url=client.base_url, timeout=30) as own:

            async def ask(number):
                await asyncio.sleep(number * 0.004)
                return (await own.post(PATH, json=bodies[number])).json()

            return await asyncio.gather(*map(ask, range(len(bodies))))

    assert all(map(close, asyncio.run(late()), alone))
    assert not close(alone[0], alone[1])  # the comparison can fail


def test_lists_are_answered_as_by_the_pipeline(client, gpt):
    body = {"examples": TEXTS, "options": {"max_length": 9, "seed": 4}}
    assert close(client.post(PATH, json=body).json(), gpt(TEXTS, body["options"]))
    wrong = client.post(PATH, json=["good", "good " * 40])
    assert wrong.json()["error"]["message"].startswith("example 2: ")


def test_recurrent_models_share_a_batch_too(tmp_path):
    rnn = language_model(tmp_path, {"name": "rnn"})
    bodies = calls()[:12]
    with running({"rnn": rnn}) as client:
        answers = [response.json() for response in together(client, "/v1/models/rnn/predict", bodies)]
    assert all(map(close, answers, [rnn(body["examples"], body["options"])[0] for body in bodies]))


@pytest.fixture
def slow_steps(monkeypatch):
    """Make each step of generation take a while, and count the steps of which each model has work."""
    steps, real = [], GenerationEngine.step

    def step(engine):
        worked = real(engine)
        if worked:
            steps.append(engine._batch.rows)
            time.sleep(0.02)
        return worked

    monkeypatch.setattr(GenerationEngine, "step", step)
    return steps


LONG = {"prompt": "good", "options": {"max_length": 80, "min_length": 80, "seed": 1}}


def test_a_client_that_goes_away_stops_its_work_within_a_step(gpt, slow_steps):
    with running({"gpt": gpt}) as client:
        body = json.dumps(LONG).encode()
        request = "POST /v1/models/gpt/stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        for _ in range(3):
            slow_steps.clear()
            with socket.create_connection(("127.0.0.1", client.port)) as connection:
                connection.sendall(f"{request}content-length: {len(body)}\r\n\r\n".encode() + body)
                assert b" 200 " in connection.recv(4096)
            before = len(slow_steps)
            while client.services.admission.active:
                time.sleep(0.005)
            noticed = len(slow_steps)
            time.sleep(0.15)
            assert len(slow_steps) <= noticed + 2 < before + 20 < 80
            assert slow_steps[-1] == 0


def test_a_server_that_ends_finishes_the_streams_it_has_accepted(gpt, slow_steps):
    with running({"gpt": gpt}) as client:
        responses = []
        thread = threading.Thread(
            target=lambda: responses.append(
                httpx.post(f"{client.base_url}/v1/models/gpt/stream", json=LONG, timeout=30)
            )
        )
        thread.start()
        while not client.services.admission.active:
            time.sleep(0.005)
        client.services.admission.draining = True
        assert client.get("/readyz").status_code == 503
        assert client.post("/v1/models/gpt/stream", json=LONG).status_code == 503
        thread.join()
    assert len(events(responses[0])) == 81


def test_a_stream_that_takes_too_long_ends_with_an_error(gpt, slow_steps):
    with running({"gpt": gpt}, time_limit=0.3) as client:
        *tokens, (name, data) = events(client.post("/v1/models/gpt/stream", json=LONG))
        assert (name, bool(tokens)) == ("error", True)
        assert "0.3 seconds" in data["error"]["message"]


def test_an_error_of_a_step_fails_those_in_the_batch_and_the_next_request_works(gpt, monkeypatch):
    def full(*arguments):
        raise MemoryError

    with running({"gpt": gpt}) as client:
        with monkeypatch.context() as patch:
            patch.setattr(gpt.head.body, "step", full)
            assert client.post(PATH, json="good").status_code == 503
        assert client.post(PATH, json="good").status_code == 200


def test_a_batch_in_static_memory_gives_the_same_answers(gpt, monkeypatch):
    monkeypatch.setattr(generation, "make_running_batch", CapturedBatch)
    bodies = calls()[:24]
    with running({"gpt": gpt}) as client:
        answers = [response.json() for response in together(client, PATH, bodies)]
        body = {"prompt": "good", "options": {"max_length": 20, "seed": 5, "stop": ["o"]}}
        *tokens, (_, answer) = events(client.post("/v1/models/gpt/stream", json=body))
        generated = client.services.metrics.text().decode()
    assert all(map(close, answers, [gpt(body["examples"], body["options"])[0] for body in bodies]))
    assert answer["text"] == gpt("good", body["options"])[0]["text"] == "".join(data["text"] for _, data in tokens)
    assert "o" not in answer["text"]
    assert re.search(r'weft_generated_tokens_total{model="gpt"} [1-9]', generated)
