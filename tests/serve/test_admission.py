"""A bounded number of requests, a time limit for each, and an end when the client goes away."""

import socket
import threading
import time

import pytest
from tests.serve.conftest import running, together

from weft.serve import models

PATH = "/v1/models/classify/predict"


class Gate:
    """Holds up the thread that computes until it is opened; counts the batches."""

    def __init__(self, monkeypatch):
        self.opened, self.entered, self.inputs = threading.Event(), threading.Event(), []
        real = models.predict_or_errors

        def held(task, head, examples, limit, options):
            self.entered.set()
            assert self.opened.wait(timeout=30)
            self.inputs.append([example.text for example in examples])
            return real(task, head, examples, limit, options)

        monkeypatch.setattr(models, "predict_or_errors", held)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def test_beyond_the_queue_requests_get_429_and_the_others_are_answered(classifier, gate):
    with running({"classify": classifier}, queue=3) as client:
        threading.Timer(0.5, gate.opened.set).start()
        statuses = [answer.status_code for answer in together(client, PATH, ["good"] * 8)]
        assert sorted(statuses) == [200] * 3 + [429] * 5
        refused = [answer for answer in together(client, PATH, ["good"] * 2) if answer.status_code != 200]
        assert refused == []
        assert client.services.admission.active == 0


def test_a_connection_whose_request_was_refused_goes_on(classifier, gate):
    """A body of any size is received and not kept; the next request on the same connection is answered."""

    def exchange(connection, text):
        body = f'"{text}"'.encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
            answer += connection.recv(65536)
        return answer

    with running({"classify": classifier}, queue=1) as client:
        first = threading.Thread(target=client.post, args=(PATH,), kwargs={"json": "good"})
        first.start()
        assert gate.entered.wait(timeout=30)
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            for text in ("good", "good " * 20_000, "good"):
                refused = exchange(connection, text)
                assert refused.startswith(b"HTTP/1.1 429 ")
                assert b"retry-after: 1\r\n" in refused
                assert b"content-security-policy: " in refused
            gate.opened.set()
            first.join()
            assert exchange(connection, "good").startswith(b"HTTP/1.1 200 ")
        assert 'weft_requests_total{route="refused",status="429"} 3.0' in client.get("/metrics").text
        assert gate.inputs == [["good"], ["good"]]


def test_a_request_that_takes_too_long_gets_503(classifier, gate):
    with running({"classify": classifier}, time_limit=0.2) as client:
        answer = client.post(PATH, json="good")
        assert (answer.status_code, "0.2 seconds" in answer.text) == (503, True)
        gate.opened.set()
        assert client.post(PATH, json="good").status_code == 200


def test_the_work_of_a_client_that_goes_away_is_not_done(classifier, gate):
    with running({"classify": classifier}) as client:
        first = threading.Thread(target=client.post, args=(PATH,), kwargs={"json": "good"})
        first.start()
        assert gate.entered.wait(timeout=30)
        request = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 6\r\n"
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.sendall(f'{request}\r\n"gone"'.encode())
            while client.services.admission.active < 2:
                time.sleep(0.01)
        while client.services.admission.active > 1:
            time.sleep(0.01)
        gate.opened.set()
        first.join()
        assert client.post(PATH, json="bad").status_code == 200
        assert gate.inputs == [["good"], ["bad"]]


def test_out_of_memory_is_503_and_the_next_request_works(classifier, monkeypatch):
    def full(*arguments):
        raise MemoryError

    with running({"classify": classifier}) as client:
        with monkeypatch.context() as patch:
            patch.setattr(models, "predict_or_errors", full)
            answer = client.post(PATH, json="good")
            assert (answer.status_code, "out of memory" in answer.text) == (503, True)
        assert client.post(PATH, json="good").status_code == 200
