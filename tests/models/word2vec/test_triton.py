"""word2vec's kernel on CUDA against the equations in float64, and what a fit with it promises."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from weft.data.batching.packed_items import pack
from weft.models.base import FitBudget
from weft.models.word2vec.fit import Word2VecCorpus
from weft.models.word2vec.model import Word2Vec, Word2VecConfig
from weft.nn.kernels import dispatch

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and dispatch.has_triton()), reason="needs CUDA and Triton"
)
pytestmark = needs_gpu
RATE, WIDTH, ROWS, USED = 0.05, 100, [1, 2, 4, 5, 5], [3, 9, 10, 11, 12]


def place(method):
    """Train on position 2 of a text, with the target among the negatives; return the weights and the loss."""
    from weft.models.word2vec import triton as kernels

    torch.manual_seed(0)
    weights = [(torch.randn(30, WIDTH) * 0.3).cuda() for _ in range(2)]
    before = [weight.double().clone().requires_grad_() for weight in weights]
    words, documents = (torch.tensor(ids, dtype=torch.int32).cuda() for ids in ([1, 2, 3, 4, 5, 5, 7], [0] * 6 + [1]))
    radii = torch.tensor([0, 0, 3, 0, 0, 0, 0], dtype=torch.int32).cuda()
    negatives, losses = torch.tensor([[9, 10, 3, 11, 12]] * 7, dtype=torch.int32).cuda(), torch.zeros(1, 2).cuda()
    shape = (method == "cbow", 5, 2, 5)
    kernels._learn[(1,)](
        words, documents, radii, negatives, *weights, losses, 7, 7, RATE, RATE, 2, 5, 5, WIDTH, shape[0],
        *kernels.tile_sizes(shape, WIDTH),
    )  # fmt: skip
    return before, weights, float(losses[0, 0])


@pytest.mark.parametrize("method", ["skipgram", "cbow"])
def test_a_place_is_a_step_down_the_gradient(method):
    (inputs, outputs), after, actual_loss = place(method)
    read = inputs[ROWS].mean(0, keepdim=True) if method == "cbow" else inputs[ROWS]
    signs = torch.tensor([1.0, -1, -1, -1, -1]).cuda()
    loss = -F.logsigmoid(signs * (read @ outputs[USED].T)).sum()
    loss.backward()
    whole = len(ROWS) if method == "cbow" else 1
    assert actual_loss == pytest.approx(loss.item(), rel=1e-5)
    assert (after[0] - (inputs - RATE * whole * inputs.grad)).abs().max() < 1e-6
    assert (after[1] - (outputs - RATE * outputs.grad)).abs().max() < 1e-6


@pytest.mark.parametrize("method", ["skipgram", "cbow"])
def test_words_of_a_kind_come_together(method):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 6, 12).astype(np.int32) + 6 * int(rng.integers(2)) for _ in range(400)]
    torch.manual_seed(0)
    model = Word2Vec(Word2VecConfig(name="word2vec", method=method, width=8, subsample=0.0), 12).cuda()
    passes = list(model.fit(pack([(document,) for document in documents]), FitBudget(10, None, 0.05, 1)))
    unit = F.normalize(model.embed.weight.detach(), dim=1)
    near = unit @ unit.T
    assert (near[:6, :6].mean() + near[6:, 6:].mean()) / 2 - near[:6, 6:].mean() > 0.6
    assert [report.done for report in passes] == list(range(1, 11))


def test_the_ends_of_documents_are_put_in():
    from weft.models.word2vec.triton import with_eos

    data = pack([(np.array(document, np.int32),) for document in ([7, 1, 2], [7], [], [7, 3])])
    corpus = Word2VecCorpus.of(data, 9, end=8)
    ids, own, firsts = with_eos(corpus, 0, 6, torch.device("cuda"))
    assert ids.tolist() == [7, 1, 2, 8, 7, 8, 7, 3, 8]
    assert firsts.tolist() == [id == 7 for id in ids.tolist()]
    assert (own.diff() != 0).nonzero().flatten().tolist() == [3, 5]
    ids, own, _ = with_eos(corpus, 1, 5, torch.device("cuda"))  # from the middle of one to the middle of another
    assert ids.tolist() == [1, 2, 8, 7, 8, 7]
