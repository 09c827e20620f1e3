"""A running batch in static memory, without a graph: each search gets what it gets alone. On CUDA, graphs."""

import pytest
import torch
from tests.decoding.test_continuous import check, make_gpt, make_requests, make_transformer, run
from tests.decoding.test_cuda_graph import needs_gpu

from weft.decoding import captured_batch
from weft.decoding.captured_batch import CapturedBatch, CapturedSearch, make_running_batch
from weft.decoding.continuous import ContinuousBatch
from weft.decoding.logits_processors import NEG_INF, keep_top, top_k, top_p

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.fixture(params=[make_gpt, make_transformer])
def model(request):
    torch.manual_seed(0)
    model = request.param().eval()
    for parameter in model.parameters():  # sharp, varied distributions
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little memory, so that batches outgrow it."""
    for name in ("MIN_ROWS", "MIN_TOKENS", "MIN_SOURCE"):
        monkeypatch.setattr(captured_batch, name, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_each_gets_what_it_gets_alone_beside_63_others_and_joining_late(model, device):
    requests, batch = make_requests(model, 64), CapturedBatch(model.to(device))
    groups = [requests[:1], requests[1:3], requests[3:40], requests[40:41], requests[41:]]
    searches = run(batch, groups, steps_between=1)
    check(searches, requests, model.cpu())
    captured = [isinstance(search, CapturedSearch) for search in searches]
    assert captured == [number % 8 in (0, 1, 2, 4) for number in range(64)]  # no beams, no memory of tokens, no finish
    assert batch.rows == 0
    assert not batch.searches


def test_rows_are_used_again(model):
    batch, requests = CapturedBatch(model), make_requests(model, 16)
    for _ in range(3):
        check(run(batch, [requests[:8], requests[8:]], 1), requests, model)
    assert len(batch._owners) <= 32


@pytest.mark.parametrize("device", DEVICES)
def test_one_that_is_stopped_leaves_and_its_row_serves_another(model, device):
    requests, batch = make_requests(model, 8), CapturedBatch(model.to(device))
    searches = batch.join(requests)
    batch.step()
    stopped, rows = searches[0], batch.rows
    stopped.stopped = True
    searches += batch.join(requests[1:2])
    batch.step()
    assert stopped.done
    assert batch.rows <= rows
    while batch.searches:
        batch.step()
    check(searches[1:], [*requests[1:], requests[1]], model.cpu())
    length = len(stopped.sequences[0].ids)
    assert length < requests[0].options.max_length
    batch.clear()
    assert batch.rows == 0


def test_what_a_graph_cannot_do_goes_step_by_step(model):
    requests = make_requests(model, 5)
    other = type(requests[0])(**{**vars(requests[4]), "eos": 2})
    best = type(requests[0])(**{**vars(requests[4]), "top_logprobs": 2})
    batch = CapturedBatch(model)
    captured, *searches = batch.join([requests[4], requests[3], best])
    (last,) = batch.join([other])
    assert isinstance(captured, CapturedSearch)
    assert not any(isinstance(search, CapturedSearch) for search in (*searches, last))


def test_on_the_cpu_a_running_batch_goes_step_by_step(model):
    assert isinstance(make_running_batch(model), ContinuousBatch)


def test_each_row_keeps_its_own_top_tokens():
    torch.manual_seed(0)
    logits = torch.randn(6, 40)
    logits[2] = logits[2].round()  # ties
    logits[3, :30] = NEG_INF
    ks, ps = [0, 5, 7, 3, 40, 1], [0.8, 2.0, 0.5, 0.9, 0.3, 0.99]
    kept = keep_top(logits, torch.tensor(ks), torch.tensor(ps))
    for row, (k, p) in enumerate(zip(ks, ps, strict=True)):
        expected = logits[row : row + 1] if k == 0 else top_k(logits[row : row + 1], k)
        torch.testing.assert_close(kept[row : row + 1], top_p(expected, p), rtol=0, atol=0)
    assert not torch.equal(keep_top(logits, torch.tensor(ks), torch.full((6,), 2.0)), kept)
