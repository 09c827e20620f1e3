"""word2vec against its equations in float64, gensim's quality, and what its fit and its language model promise."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from weft.config.schema import read_section
from weft.data.batching.packed_items import pack
from weft.errors import ConfigError, DataError, RoleError
from weft.models.base import FitBudget, Role
from weft.models.word2vec import numba as kernels
from weft.models.word2vec.fit import Word2VecCorpus, alias_table, run_passes
from weft.models.word2vec.model import Word2Vec, Word2VecConfig
from weft.testing import check_model
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=12)
WIDTH = 2 * kernels.ROW


def make(vocab=12, **config):
    torch.manual_seed(0)
    return Word2Vec(Word2VecConfig(name="word2vec", **{"width": 8, "subsample": 0.0, **config}), vocab)


def topics(documents=400, seed=0, vocab=12):
    """Return documents of words from one of two halves of the vocabulary."""
    rng = np.random.default_rng(seed)
    half = vocab // 2
    return [rng.integers(0, half, 12).astype(np.int32) + half * int(rng.integers(2)) for _ in range(documents)]


def fit(model, documents, **budget):
    spent = FitBudget(**{"passes": 3, "seconds": None, "lr": 0.05, "seed": 1, **budget})
    return list(model.fit(pack([(document,) for document in documents]), spent))


# One place, against the loss under autograd.


def updated(method, rows, targets, rate, dtype=torch.float64):
    """Return the weights before and after one position, and the loss, by autograd of the paper's equation 4."""
    rng = np.random.default_rng(len(rows) * 31 + len(targets))
    first = [torch.tensor(rng.normal(0, 0.5, (9, WIDTH)), dtype=dtype) for _ in range(2)]
    inputs, outputs = (weight.clone().requires_grad_() for weight in first)
    used = [0] + [j for j in range(1, len(targets)) if targets[j] != targets[0]]
    read = inputs[rows] if method == "skipgram" else inputs[rows].mean(0, keepdim=True)
    scores = read @ outputs[[targets[j] for j in used]].T
    signs = torch.tensor([1.0 if j == 0 else -1.0 for j in used], dtype=dtype)
    loss = -F.logsigmoid(signs * scores).sum()
    loss.backward()
    # In CBOW a word gets all of what goes back to the mean, as in word2vec's own code.
    whole = len(rows) if method == "cbow" else 1
    return first, [first[0] - rate * whole * inputs.grad, first[1] - rate * outputs.grad], loss.item()


def by_kernel(method, weights, rows, targets, rate):
    arrays = tuple(weight.numpy().astype(np.float32) for weight in weights)
    work, around = kernels.make_workspace(WIDTH, 5, len(targets) - 1), np.array([*rows, *[0] * 10], np.int64)
    padded = np.array([*targets, 0, 0], np.int64)
    step = kernels.skipgram if method == "skipgram" else kernels.cbow
    loss = step(arrays, around, len(rows), padded, len(targets), rate, work, True)
    return arrays, loss


@quick
@given(
    st.sampled_from(["skipgram", "cbow"]),
    st.lists(st.integers(0, 8), min_size=1, max_size=10),
    st.permutations(range(9)),
    st.integers(1, 7),
    st.booleans(),
)
def test_a_place_is_a_step_down_the_gradient(method, rows, order, drawn, again):
    targets = order[: drawn + 1]
    if again and drawn > 1:
        targets[1] = targets[0]  # the right word, drawn: it counts for nothing
    before, after, loss = updated(method, rows, targets, 0.1)
    weights, actual_loss = by_kernel(method, before, rows, targets, 0.1)
    assert actual_loss == pytest.approx(loss, rel=1e-5)
    for actual, expected in zip(weights, after, strict=True):
        np.testing.assert_allclose(actual, expected.numpy(), atol=2e-6)


@pytest.mark.parametrize("method", ["skipgram", "cbow"])
def test_a_wrong_gradient_would_be_seen(method):
    """The negative control of the test above: half a step, and one from other rows, are far away."""
    before, after, _ = updated(method, [1, 2, 3], [4, 5, 6], 0.1)
    for rows, rate in (([1, 2, 3], 0.05), ([1, 2, 2], 0.1)):
        weights, _ = by_kernel(method, before, rows, [4, 5, 6], rate)
        assert (
            max(np.abs(actual - expected.numpy()).max() for actual, expected in zip(weights, after, strict=True)) > 1e-3
        )


def test_a_drawn_word_that_comes_twice_counts_twice_in_skipgram():
    before, after, _ = updated("skipgram", [1, 1, 2], [4, 5, 5, 6], 0.1)
    weights, _ = by_kernel("skipgram", before, [1, 1, 2], [4, 5, 5, 6], 0.1)
    np.testing.assert_allclose(weights[1], after[1].numpy(), atol=2e-6)


def test_the_sigmoid_is_one():
    x = np.linspace(-40, 40, 4001).astype(np.float32)
    actual = x.copy()
    kernels.sigmoid(actual, len(actual))
    np.testing.assert_allclose(actual, 1 / (1 + np.exp(-x.astype(np.float64))), atol=1e-6)


# What is drawn and what is kept.


@quick
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50).filter(any))
def test_the_alias_table_has_the_probabilities(counts):
    p = np.array(counts) / sum(counts)
    cuts, others = alias_table(p)
    own = cuts / 2**32
    actual = (own + np.bincount(others, 1 - own, len(p))) / len(p)
    np.testing.assert_allclose(actual, p, atol=1e-8)
    assert not actual[p == 0].any()


def test_words_are_drawn_by_the_table():
    p = np.array([0.5, 0.0, 0.3, 0.2])
    state, (cuts, others) = np.array([7], np.uint64), alias_table(p)
    drawn = np.bincount([kernels.draw_negative(cuts, others, state) for _ in range(20000)], minlength=4) / 20000
    np.testing.assert_allclose(drawn, p, atol=0.012)
    assert drawn[1] == 0


def test_the_corpus_counts_what_is_read_and_what_is_guessed():
    data = pack([(np.array(document, np.int32),) for document in ([0, 3, 3], [0], [0, 4])])
    plain = Word2VecCorpus.of(data, 6)
    assert plain.counts.tolist() == plain.target_counts.tolist() == [3, 0, 0, 2, 1, 0]
    ended = Word2VecCorpus.of(data, 6, end=5)
    assert ended.counts.tolist() == [3, 0, 0, 2, 1, 3]
    assert ended.target_counts.tolist() == [0, 0, 0, 2, 1, 3]  # what begins a document is never guessed
    t = 0.1
    rarity = t * 9 / np.maximum(ended.counts, 1)
    np.testing.assert_allclose(ended.keep_probabilities(t), np.minimum(np.sqrt(rarity) + rarity, 1))
    assert (ended.keep_probabilities(0) == 1).all()
    q = ended.noise_distribution(0.75)
    np.testing.assert_allclose(q, np.array([0, 0, 0, 2, 1, 3]) ** 0.75 / (2**0.75 + 1 + 3**0.75))
    assert (ended.noise_distribution(0.75, least=1.0) > 0).all()


def test_a_corpus_of_nothing_is_refused():
    with pytest.raises(DataError, match="there is no word to learn from"):
        fit(make(), [np.zeros(0, np.int32)])


# A fit.


@pytest.mark.parametrize("method", ["skipgram", "cbow"])
def test_one_thread_and_a_seed_give_the_same_vectors(method):
    models = [make(method=method) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        fit(model, topics(), seed=seed)
    same, other = ([torch.equal(a, b) for a, b in zip(models[0].parameters(), m.parameters(), strict=True)]
                   for m in models[1:])  # fmt: skip
    assert all(same)
    assert not any(other)


@pytest.mark.parametrize("method", ["skipgram", "cbow"])
def test_a_run_gone_on_with_is_the_run(method):
    whole, parts = make(method=method), make(method=method)
    passes = fit(whole, topics())
    first = parts.fit(pack([(document,) for document in topics()]), FitBudget(3, None, 0.05, 1))
    assert next(first).whole
    first.close()
    fit(parts, topics(), done=1)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    assert [report.done for report in passes] == [1, 2, 3]
    assert sum(report.tokens for report in passes) == 3 * 400 * 12
    assert all(report.whole for report in passes)


def apart(model):
    """Return how much more similar words are within their half than across."""
    unit = F.normalize(model.embed.weight.detach(), dim=1)
    near = unit @ unit.T
    half = len(near) // 2
    own = (near[:half, :half].mean() + near[half:, half:].mean()) / 2
    return float(own - near[:half, half:].mean())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("method", ["skipgram", "cbow"])
@pytest.mark.parametrize("context", ["both", "left"])
def test_words_of_a_kind_come_together_with_any_number_of_threads(method, context, threads):
    model = make(method=method, context=context)
    assert apart(model) < 0.3
    passes = fit(model, topics(), threads=threads, passes=10)
    assert apart(model) > 0.7
    assert min(later.loss for later in passes[1:]) < passes[0].loss  # one pass of threads that race may be unlucky
    shuffled = make(method=method, context=context)  # the negative control: nothing to learn
    rng = np.random.default_rng(0)
    fit(shuffled, [rng.integers(0, 12, 12).astype(np.int32) for _ in range(400)], passes=10)
    assert apart(shuffled) < 0.4


def test_the_loss_is_that_of_texts_not_learnt_from():
    model, held = make(), pack([(document,) for document in topics(50, seed=9)])
    before = model.loss(held)
    assert before == pytest.approx(
        6 * math.log(2), rel=0.1
    )  # nothing is known: all are as likely, but for those left out
    fit(model, topics())
    was = [parameter.clone() for parameter in model.parameters()]
    assert model.loss(held) < before - 0.5
    assert model.loss(held) == model.loss(held) != model.loss(held, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(was, model.parameters(), strict=True))


def test_time_ends_a_fit():
    reports = fit(make(), topics(), passes=1 << 31, seconds=0.05)
    assert 1 <= len(reports) < 1000


def test_windows_do_not_cross_documents_and_what_begins_one_is_never_guessed():
    """Two words that never share a document keep their output vectors apart; the output vector of bos is unchanged."""
    documents = [np.array([0, 3, 4], np.int32), np.array([0, 5, 6], np.int32)] * 50
    model = make(vocab=8, method="cbow", context="left", negatives=1, exponent=1.0)
    before = model.embed.weight.detach().clone()
    fit(model, documents, eos=1)
    output = model.output.weight.detach()
    assert not output[0].any()  # the mark
    assert not output[[2, 7]].any()  # what never occurs
    assert output[[1, 3, 4, 5, 6]].abs().sum(1).gt(0).all()
    assert torch.equal(model.embed.weight[[1, 2, 7]], before[[1, 2, 7]])  # the end is guessed, and never read


@pytest.mark.parametrize("threads", [1, 3])
def test_a_long_document_is_read_in_parts(threads):
    long = np.concatenate(topics(3 * kernels.MAX_WORDS // 12))
    model = make()
    (report,) = fit(model, [long], passes=1, threads=threads)
    assert report.tokens == len(long)
    assert np.isfinite(report.loss)
    assert apart(model) > 0.5


# As a body, and as a language model.


@pytest.mark.parametrize("config", [{}, {"method": "cbow"}, {"method": "cbow", "window": 1}])
def test_it_keeps_what_every_model_promises(config):
    assert check_model(Word2Vec, {"width": 6, **config})


def test_its_roles_are_those_of_its_method():
    roles = {method: Word2Vec.roles(Word2VecConfig(name="w", method=method)) for method in ("skipgram", "cbow")}
    assert roles["skipgram"] == {Role.ENCODER, Role.SELF_FITTED}
    assert roles["cbow"] - roles["skipgram"] == {Role.LANGUAGE_MODEL, Role.GENERATOR}


def test_what_is_not_needed_is_dropped():
    for needs, held in (
        ({Role.ENCODER}, False),
        ({Role.ENCODER, Role.SELF_FITTED}, True),
        ({Role.LANGUAGE_MODEL}, True),
    ):
        model = make()
        model.prune_unused(needs)
        assert ("output.weight" in model.state_dict()) is held
        assert ("noise_log_probs" in model.state_dict()) is held


def test_a_text_is_the_mean_of_its_words():
    model, tokens = make().double(), Tokens.pack([[1, 2, 2], [], [5]])
    vectors = model.embed.weight
    torch.testing.assert_close(model.pooled_output(tokens)[0], (vectors[1] + 2 * vectors[2]) / 3)
    assert not model.pooled_output(tokens)[1].any()
    torch.testing.assert_close(model.encode(tokens)[0], vectors[tokens.ids])
    with pytest.raises(ConfigError, match="word2vec has one"):
        model.encode(tokens, layers=(1,))


def test_logits_are_of_noise_and_scores_of_the_mean_of_the_last_words():
    model = make(method="cbow", window=2).double()
    for weight in (model.output.weight, model.noise_log_probs, model.keep_log_probs):
        torch.nn.init.normal_(weight)
    text = [3, 1, 4, 1, 5]
    actual = model.logits(Tokens.pack([[7], text]))[1:]
    for place in range(len(text)):
        mean = model.embed.weight[text[max(0, place - 1) : place + 1]].mean(0)
        odds = model.output.weight @ mean + model.noise_log_probs + math.log(5)
        expected = F.logsigmoid(odds) - model.keep_log_probs
        torch.testing.assert_close(actual[place], expected)
    with pytest.raises(RoleError, match="asked for backward"):
        model.logits(Tokens.pack([text]), direction="backward")


def test_cbow_learns_the_probabilities_of_a_bigram_model():
    """With a window of one word s(w, c) has a number for each pair, so that p(w | c) can be learnt exactly."""
    rng = np.random.default_rng(0)
    truth = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.5, 0.4, 0.1]])
    text = [0]
    for _ in range(30000):
        text.append(int(rng.choice(3, p=truth[text[-1]])))
    documents = [np.array([3, *part], np.int32) for part in np.array_split(text, 100)]
    model = make(vocab=6, method="cbow", context="left", window=1, negatives=5, width=16)
    fit(model, documents, passes=40, lr=0.05, eos=4)
    learnt = model.logits(Tokens.pack([[0], [1], [2]])).softmax(-1).detach().numpy()
    np.testing.assert_allclose(learnt[:, :3], truth, atol=0.06)
    without = replace_noise(model)  # the negative control: scores alone are not probabilities
    assert np.abs(without.logits(Tokens.pack([[0], [1], [2]])).softmax(-1).detach().numpy()[:, :3] - truth).max() > 0.1


def replace_noise(model):
    model.noise_log_probs.zero_()
    return model


def test_subsampling_is_made_good_in_the_language_model():
    """Sub-sampling drops frequent words three times in four, and they keep their probability."""
    rng = np.random.default_rng(0)
    p = np.array([0.8, 0.1, 0.1])
    documents = [np.array([3, *rng.choice(3, 50, p=p)], np.int32) for _ in range(400)]
    model = make(vocab=6, method="cbow", context="left", window=3, subsample=0.02, width=8)
    fit(model, documents, passes=10, eos=4)
    assert model.keep_log_probs[0].exp() < 0.3
    learnt = model.logits(Tokens.pack([[0, 0, 0]])).softmax(-1).detach().numpy()[0, :3]
    np.testing.assert_allclose(learnt / learnt.sum(), p, atol=0.1)
    model.keep_log_probs.zero_()
    assert model.logits(Tokens.pack([[0, 0, 0]])).softmax(-1)[0, 0] < 0.6  # the negative control


def test_a_state_holds_the_last_words():
    model = make(method="cbow", window=3)
    torch.nn.init.normal_(model.output.weight)
    text = [3, 1, 4, 1, 5, 9]
    logits, state = model.start(Tokens.pack([text[:1], text[:1]]))
    for place, id in enumerate(text[1:], 1):
        logits, state = model.step(torch.tensor([id, id]), state)
        torch.testing.assert_close(logits[0], model.logits(Tokens.pack([text[: place + 1]]))[-1])
    assert state.ids.tolist() == [[1, 5, 9]] * 2
    assert replace(state).select(torch.tensor([1])).ids.tolist() == [[1, 5, 9]]


@pytest.mark.parametrize(("key", "value"), [("width", 0), ("window", 0), ("negatives", 0), ("subsample", -1.0)])
def test_sizes_are_checked(key, value):
    with pytest.raises(ConfigError, match=f"model.{key}"):
        read_section(Word2VecConfig, {"name": "word2vec", key: value}, "model")


# Beside gensim.


def test_its_vectors_are_as_good_as_gensims():
    """Five kinds of words, in sentences of two kinds each: how often is the nearest word one of the same kind?"""
    from gensim.models import Word2Vec as Gensim

    rng = np.random.default_rng(0)
    vocab, kinds = 60, 6
    documents = []
    for _ in range(1500):
        pair = rng.choice(kinds, 2, replace=False)
        documents.append((rng.integers(0, vocab // kinds, 14) * kinds + rng.choice(pair, 14)).astype(np.int32))

    def score(vectors, order):
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        near = unit @ unit.T
        np.fill_diagonal(near, -1)
        return float(np.mean([order[near[row].argmax()] % kinds == order[row] % kinds for row in range(vocab)]))

    for method, sg in (("skipgram", 1), ("cbow", 0)):
        texts = [[str(id) for id in document] for document in documents]
        peer = Gensim(texts, vector_size=16, window=5, negative=5, sg=sg, min_count=1, sample=1e-3, epochs=5, seed=1,
                      workers=1)  # fmt: skip
        theirs = score(peer.wv.vectors, [int(key) for key in peer.wv.index_to_key])
        model = make(vocab=vocab, method=method, width=16, subsample=1e-3)
        fit(model, documents, passes=5, lr=0.025)
        ours = score(model.embed.weight.detach().numpy(), list(range(vocab)))
        assert ours >= theirs - 0.1, method


def test_a_rate_that_falls_with_time_goes_on_from_where_it_was():
    corpus, rates = Word2VecCorpus.of(pack([(document,) for document in topics(4)]), 12), []

    def learn(low, high, own, seed):
        rates.append(own)
        return 0.0, 0.0

    budget = FitBudget(1 << 31, 1000.0, 1.0, 1, done=7, elapsed=600.0)
    next(run_passes(corpus, budget, learn, len(corpus.ids), lambda: None))
    assert rates[0][0] == pytest.approx(0.4, abs=0.01)
    next(run_passes(corpus, replace(budget, elapsed=0.0), learn, len(corpus.ids), lambda: None))
    assert rates[1][0] == pytest.approx(1.0, abs=0.01)
