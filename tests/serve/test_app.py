"""The routes of models and of the server's health, asked over HTTP."""

import json

import numpy as np
import pytest
from tests.serve.conftest import TEXTS, running, together

from weft.serve.models import num_characters


def predict(client, name, body):
    return client.post(f"/v1/models/{name}/predict", json=body)


def test_models_are_listed_with_task_methods_and_examples(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    models = {model["id"]: model for model in listed["data"]}
    assert set(models) == {"reverse", "classify", "gpt"}
    assert models["reverse"]["task"] == "translate"
    assert models["reverse"]["model"] == "seq2seq"
    assert models["classify"]["methods"] == ["predict", "embed", "attention"]
    assert "stream" in models["gpt"]["methods"]
    assert models["gpt"]["examples"]
    assert client.get("/v1/models/gpt").json() == models["gpt"]


def test_one_example_or_a_list_or_a_call_with_options(client, reverser):
    single = predict(client, "reverse", {"text": "abcde"})
    assert single.json() == reverser("abcde")[0]
    several = predict(client, "reverse", ["abcde", {"text": "fedcb"}])
    assert several.json() == reverser(["abcde", "fedcb"])
    call = predict(client, "reverse", {"examples": "abcde", "options": {"beam": 3, "num_return_sequences": 2}})
    assert call.json() == reverser("abcde", {"beam": 3, "num_return_sequences": 2})[0]
    assert len(call.json()["candidates"]) == 2
    assert predict(client, "reverse", []).json() == []


def test_labels_and_scores(client, classifier):
    assert predict(client, "classify", TEXTS).json() == classifier(TEXTS)


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("reverse", {"txt": "a"}, "example 1: text: Field required"),
        ("reverse", ["a", {"text": 5}], "example 2: text:"),
        ("reverse", 5, "body: "),
        ("reverse", {"examples": "a", "options": {"bem": 3}}, "did you mean 'beam'?"),
        ("reverse", {"examples": "a", "option": {}}, "option: Extra inputs"),
        ("classify", ["good", "bad " * 60], "example 2: "),
        ("classify", {"examples": "a", "options": {"beam": 3}}, "has no options"),
        ("gpt", {"examples": "a", "options": {"stop": ["ab"] * 3000}}, "options: have 6,000 characters"),
    ],
)
def test_what_is_wrong_is_said_with_422(client, name, body, message):
    answer = predict(client, name, body)
    assert answer.status_code == 422
    assert message in answer.json()["error"]["message"]


def test_an_unknown_model_is_not_found(client):
    answer = predict(client, "revers", "abc")
    assert answer.status_code == 404
    assert "did you mean 'reverse'?" in answer.json()["error"]["message"]
    for name in ("..%2F..%2Fetc", "%00", "%2E%2E", "reverse%2Fbest"):
        assert client.get(f"/v1/models/{name}").status_code == 404


def test_vectors(client, classifier, reverser):
    vectors = client.post("/v1/models/classify/embed", json={"texts": TEXTS, "normalize": True}).json()["vectors"]
    assert np.allclose(vectors, classifier.embed(TEXTS, normalize=True), atol=1e-6)
    tokens = client.post("/v1/models/classify/embed", json={"texts": TEXTS[0], "pool": "tokens"}).json()
    assert len(tokens["tokens"][0]) == len(tokens["vectors"][0]) == 5
    wrong = client.post("/v1/models/classify/embed", json={"texts": ["good", "bad " * 80], "truncate": False})
    assert wrong.status_code == 422
    assert wrong.json()["error"]["message"].startswith("text 2: has 82 tokens")
    translator = client.post("/v1/models/reverse/embed", json={"texts": "a"}).json()["vectors"]
    assert np.allclose(translator, reverser.embed("a"), atol=1e-6)
    many = {"texts": "good", "layers": [1] * 1000, "combine": "concat"}
    assert client.post("/v1/models/classify/embed", json=many).status_code == 422


def test_attention(client, reverser):
    maps = client.post("/v1/models/reverse/attention", json={"example": "abcde"}).json()
    assert maps == reverser.attention("abcde").to_dict()
    wrong = client.post("/v1/models/reverse/attention", json={"example": "abcde", "layers": [7]})
    assert (wrong.status_code, "layers" in wrong.json()["error"]["message"]) == (422, True)


def test_health_and_metrics(client):
    assert client.get("/livez").json() == client.get("/readyz").json() == {"status": "ok"}
    predict(client, "reverse", "abcde")
    client.get("/no/such/path/secret")
    text = client.get("/metrics").text
    assert 'weft_requests_total{route="/v1/models/{name}/predict",status="200"}' in text
    assert "weft_batch_size_bucket" in text
    assert "secret" not in text  # a path that a client chooses is no label


def test_openapi_has_an_example_of_each_route(client):
    paths = client.get("/openapi.json").json()["paths"]
    posts = [route["post"] for route in paths.values() if "post" in route]
    assert len(posts) >= 3
    for route in posts:
        assert "example" in json.dumps(route["responses"]["200"])
        assert {"422", "429"} <= set(route["responses"])


def test_a_batch_is_shared_and_changes_no_answer(client, classifier):
    texts = [f"{text} {other}" for text in TEXTS for other in TEXTS[:3]] + TEXTS
    alone = [predict(client, "classify", {"text": text}).json() for text in texts]
    before = client.services.metrics.registry.get_sample_value(*COUNT)
    answers = [answer.json() for answer in together(client, "/v1/models/classify/predict", texts)]
    assert [answer["label"] for answer in answers] == [answer["label"] for answer in alone]
    for answer, other in zip(answers, alone, strict=True):
        assert answer["scores"] == pytest.approx(other["scores"], abs=1e-5)
    batches = client.services.metrics.registry.get_sample_value(*COUNT) - before
    assert batches < len(texts)


COUNT = "weft_batch_size_count", {"model": "classify", "kind": "predict"}


def test_limits_of_a_request(classifier):
    with running({"classify": classifier}, max_inputs=2, max_characters=100, max_body=1000) as client:
        assert predict(client, "classify", ["good", "bad"]).status_code == 200
        assert predict(client, "classify", ["good", "bad", "bad"]).status_code == 422
        assert predict(client, "classify", "good " * 30).status_code == 422
        assert predict(client, "classify", "good " * 300).status_code == 413
        chunked = client.post(
            "/v1/models/classify/predict",
            content=iter([b'"', b"good " * 300, b'"']),
            headers={"content-type": "application/json"},
        )
        assert chunked.status_code == 413


def test_characters_of_nested_inputs_are_counted():
    assert num_characters({"text": "abc", "choices": ["de", "f"]}) == 6
    assert num_characters(["abc", ("d", "e")]) == 5
