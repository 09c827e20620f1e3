"""N-gram models against their equations in float64, in memory and from the disk, and the properties of all models."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.ngram_equations import BOS, EOS, Equations

from weft.checkpoint.contents import load_weights, weights
from weft.config.schema import read_section
from weft.data.batching.packed_items import PackedItems, pack
from weft.errors import CheckpointError, ConfigError, RoleError, TrainingError
from weft.models.base import FitBudget, FitProgress, Role
from weft.models.ngram import counting
from weft.models.ngram.model import BUFFERS, NGram, NGramConfig
from weft.models.ngram.trie import CODES, NGramTables, code_values
from weft.testing import check_model
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=12)

VOCAB = 7  # <unk> <s> </s> and four words
documents = st.lists(st.lists(st.integers(3, VOCAB - 1), max_size=8), min_size=1, max_size=8)


def packed(texts, bos: int = BOS) -> PackedItems:
    return pack((np.array([bos, *text], np.int32),) for text in texts)


def fit(texts, vocab: int = VOCAB, bos: int = BOS, eos: int = EOS, threads: int = 1, folder=None, **config) -> NGram:
    model = NGram(NGramConfig(name="ngram", **config), vocab)
    *_, last = model.fit(packed(texts, bos), FitBudget(1, None, 1.0, 1, threads=threads, folder=folder, eos=eos))
    assert (last.done, last.whole) == (1.0, True)
    return model


def contexts(order: int, vocab: int = VOCAB, bos: int = BOS):
    """Return all prefixes of texts of up to two words, and all contexts of three from their middle."""
    words = [word for word in range(vocab) if word not in (bos, EOS)]
    begun = [(bos, *rest) for length in range(3) for rest in product(words, repeat=length)]
    return begun + [(bos, 4, 4, 4, *rest) for rest in product(words, repeat=min(order, 3) - 1)]


def distributions(model: NGram, queries) -> np.ndarray:
    return model.start(Tokens.pack(queries))[0].double().exp().numpy()


def expect(model: NGram, p, queries) -> None:
    must = np.array([[p(word, u) for word in range(model.vocab)] for u in queries])
    np.testing.assert_allclose(distributions(model, queries), must, rtol=2e-5, atol=1e-12)


# Against the equations.


@quick
@given(documents, st.integers(1, 4), st.sampled_from([(), (1,), (0, 1), (0, 0, 2)]))
def test_kneser_ney_is_its_equations(texts, order, prune):
    prune = prune[:order]
    model, must = fit(texts, order=order, prune=prune), Equations(texts, VOCAB, order, prune)
    np.testing.assert_allclose(model.discounts.numpy(), must.discounts, rtol=1e-6)
    expect(model, lambda w, u: must.kneser_ney(w, must.context(u)), contexts(order))


@quick
@given(documents, st.integers(1, 4), st.sampled_from([0.01, 1.0, 3.0]), st.sampled_from([(), (0, 1)]))
def test_add_k_is_its_equation(texts, order, k, prune):
    prune = prune[:order]
    model = fit(texts, order=order, smoothing="add-k", k=k, prune=prune)
    must = Equations(texts, VOCAB, order, prune)
    expect(model, lambda w, u: must.add_k(w, must.context(u), k), contexts(order))


@quick
@given(documents, st.integers(1, 4), st.sampled_from([(), (0, 1)]))
def test_maximum_likelihood_is_its_equation(texts, order, prune):
    prune = prune[:order]
    model, must = fit(texts, order=order, smoothing="mle", prune=prune), Equations(texts, VOCAB, order, prune)
    expect(model, lambda w, u: must.mle(w, must.context(u)), contexts(order))


TEXTS = [[3, 4, 5, 3, 4], [3, 4, 6], [5, 3, 4, 5, 5, 5, 3], [6, 6, 3, 4], [], [4, 3, 5, 6, 3, 4, 5]] * 2 + [[5, 6, 4]]


@pytest.mark.parametrize("flaw", ["bos", "counts"])
def test_another_equation_is_noticed(flaw):
    model, other = fit(TEXTS, order=3), Equations(TEXTS, VOCAB, 3, flaw=flaw)
    with pytest.raises(AssertionError):
        expect(model, lambda w, u: other.kneser_ney(w, other.context(u)), contexts(3))


def test_discounts_have_estimates_where_there_is_enough_text():
    rng = np.random.default_rng(0)
    texts = [(3 + rng.zipf(1.7, 9).clip(max=300)).tolist() for _ in range(300)]
    must = Equations(texts, 304, 3)
    assert all(d != [0.5, 1.0, 1.5] for d in must.discounts)
    model = fit(texts, 304, order=3)
    np.testing.assert_allclose(model.discounts.numpy(), must.discounts, rtol=1e-6)
    queries = [(BOS, *text[:length]) for text in texts[:3] for length in (0, 1, 5)]
    expect(model, lambda w, u: must.kneser_ney(w, must.context(u)), queries)


@quick
@given(documents, st.integers(1, 5), st.sampled_from(["kneser-ney", "add-k", "mle"]), st.sampled_from([(), (0, 1, 2)]))
def test_probabilities_sum_to_one_after_every_context(texts, order, smoothing, prune):
    model = fit(texts, order=order, smoothing=smoothing, prune=prune[:order])
    queries = [*contexts(order), (3,), (4, 3), (6, 5, 4, 3, 3)]  # some that begin in the middle of a text
    p = distributions(model, queries)
    np.testing.assert_allclose(p.sum(1), 1.0, rtol=1e-5)
    assert not p[:, BOS].any()


def test_a_word_that_no_text_had_is_as_likely_as_any_other_such():
    model = fit([[3, 4], [4, 3]], order=2)
    p = distributions(model, [(BOS, 3)])[0]
    assert p[0] == p[5] == p[6] > 0


def test_one_token_may_begin_and_end_texts():
    texts = [[3, 4, 5], [3, 3], [5, 4, 3, 4]]
    model, must = fit(texts, bos=BOS, eos=BOS, order=3), Equations(texts, VOCAB, 3, eos=BOS)
    queries = [u for u in contexts(3) if u.count(BOS) == 1]
    expect(model, lambda w, u: must.kneser_ney(w, must.context(u)), queries)
    np.testing.assert_allclose(distributions(model, queries).sum(1), 1, rtol=1e-5)


# How it is counted changes nothing.


def same_tables(a: NGram, b: NGram) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in (*BUFFERS, "discounts"))


@quick
@given(documents, st.integers(1, 4), st.integers(1, 9), st.integers(1, 3))
def test_runs_from_the_disk_give_what_memory_gives(tmp_path_factory, texts, order, at_once, threads):
    folder = tmp_path_factory.mktemp("runs")
    whole = fit(texts, order=order)
    assert same_tables(whole, fit(texts, order=order, at_once=at_once, threads=threads, folder=folder))
    assert not list(folder.iterdir())
    assert same_tables(whole, fit(texts[::-1], order=order, threads=threads))
    assert not same_tables(whole, fit([*texts, [0]], order=order))


def test_each_run_is_reported():
    model = NGram(NGramConfig(name="ngram", order=2, at_once=4), VOCAB)
    reports = list(model.fit(packed([[3, 4, 5], [3], [4, 4]]), FitBudget(1, None, 1.0, 1, eos=EOS)))
    assert [(report.tokens, report.whole) for report in reports] == [(4, False), (4, False), (1, True)]
    assert all(math.isnan(report.loss) for report in reports)
    assert [report.done < 1 for report in reports] == [True, True, False]
    assert not list(model.fit(packed([[3]]), FitBudget(1, None, 1.0, 1, done=1, eos=EOS)))
    assert isinstance(reports[0], FitProgress)


def test_a_large_vocabulary_takes_wider_words():
    texts = [[69_999, 3, 69_998], [3, 69_999], [40_000]]
    model = fit(texts, 70_000, order=3)
    assert model.words.dtype == torch.uint32
    must = Equations(texts, 70_000, 3)
    queries, targets = [BOS, 69_999, 3], [69_999, 3, 69_998]
    logp = model.log_prob(Tokens.pack([queries]), torch.tensor(targets))
    wanted = [must.kneser_ney(w, must.context(queries[: place + 1])) for place, w in enumerate(targets)]
    np.testing.assert_allclose(logp.exp().numpy(), wanted, rtol=1e-5)


def test_more_n_grams_than_a_pointer_holds_are_refused(monkeypatch):
    monkeypatch.setattr(counting, "MAX_NGRAMS", 10)
    with pytest.raises(TrainingError, match=r"more than its tables hold, 10; lower model\.order"):
        fit(TEXTS, order=3)


def test_a_full_disk_is_told(tmp_path):
    with pytest.raises(TrainingError, match=r"nowhere: n-grams are sorted here, but: No such file"):
        fit(TEXTS, order=3, at_once=4, folder=tmp_path / "nowhere")


# How it is asked changes nothing.


class Counted(NGram):
    """A model that has counted a text."""

    def __init__(self, config: NGramConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        rng = np.random.default_rng(0)
        list(self.fit(packed(rng.integers(3, vocab, (60, 9)).tolist()), FitBudget(1, None, 1.0, 1, eos=EOS)))


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("smoothing", ["kneser-ney", "add-k", "mle"])
def test_it_is_a_model_like_all_others(order, smoothing):
    proved = check_model(Counted, {"name": "ngram", "order": order, "smoothing": smoothing}, vocab=9)
    assert "start and step agree with reading all at once" in proved
    assert "a sequence alone answers as in any batch" in proved


@pytest.mark.usefixtures("wide_bound")
def test_one_that_forgets_a_word_is_noticed():
    class Forgetful(Counted):
        def step(self, ids, state):
            return super().step((ids + 1) % self.vocab, state)

    with pytest.raises(AssertionError, match="start and step agree"):
        check_model(Forgetful, {"name": "ngram", "order": 3}, vocab=9)


def test_what_has_read_nothing_knows_nothing():
    model = NGram(NGramConfig(name="ngram", order=3), 8)
    torch.testing.assert_close(model.logits(Tokens.pack([[1, 3]])).exp(), torch.full((2, 8), 1 / 8))


@quick
@given(documents, st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7), min_size=1, max_size=4))
def test_log_prob_looks_up_what_logits_spread_out(texts, rows):
    model, tokens = fit(texts, order=3), Tokens.pack(rows)
    logits = model.logits(tokens)
    for targets in (torch.arange(len(tokens.ids)) % VOCAB, tokens.ids.roll(-1)):  # some are the next word, some not
        log_probs = model.log_prob(tokens, targets)
        assert torch.equal(log_probs, logits.gather(1, targets[:, None])[:, 0])


def test_threads_score_alike():
    model = Counted(NGramConfig(name="ngram", order=4), 40)
    rng = np.random.default_rng(1)
    tokens = Tokens.pack([[BOS, *rng.integers(3, 40, rng.integers(0, 30))] for _ in range(4000)])
    ids, starts = tokens.ids.numpy(), tokens.starts.numpy()
    single_threaded, multi_threaded = (model.tables.score(ids, starts, np.roll(ids, -1), threads) for threads in (1, 3))
    assert len(ids) > 1 << 15
    np.testing.assert_array_equal(single_threaded, multi_threaded)


def test_a_bos_in_the_middle_begins_a_text_anew():
    model = fit(TEXTS, order=4)
    logits = model.logits(Tokens.pack([[BOS, 3, 4, 5, BOS, 3, 4]]))
    assert torch.equal(logits[4:], logits[:3])


def test_values_without_codes_are_looked_up_alike():
    tables = fit(TEXTS, order=3).tables
    every = slice(0, len(tables.codes))
    plain = NGramTables(tables.orders, tables.words, tables.first, tables.logp, tables.codes[:0], tables.gammas(every))
    ids, starts = np.array([1, 3, 4, 5, 1, 6, 6]), np.array([0, 4, 7])
    np.testing.assert_array_equal(plain.score(ids, starts, ids[::-1]), tables.score(ids, starts, ids[::-1]))
    np.testing.assert_array_equal(plain.rows(plain.contexts(ids, starts)), tables.rows(tables.contexts(ids, starts)))
    assert plain.is_consistent(VOCAB, 3)


@pytest.mark.parametrize("size", [1, 7, CODES, CODES + 1])
def test_few_values_have_codes(size):
    numbers = np.random.default_rng(0).permutation(np.repeat(-np.arange(size, dtype=np.float32), 2))
    codes, values = code_values(numbers)
    assert (len(codes), len(values)) == ((2 * size, size) if size <= CODES else (0, 2 * size))
    np.testing.assert_array_equal(values[codes] if len(codes) else values, numbers)


# What is saved, and what is refused.


def test_tables_are_taken_from_the_file_as_they_are(tmp_path):
    model, back = fit(TEXTS, order=3), NGram(NGramConfig(name="ngram", order=3), VOCAB)
    save_file(weights(model), tmp_path / "model.safetensors")
    load_weights(tmp_path, back)
    assert same_tables(model, back)
    back.double().to(torch.float16)
    assert back.logp.dtype == torch.float32
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) in maps.read_text()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("words", lambda x: (x.int() + 100).to(torch.uint16), "do not fit together"),
        ("first", lambda x: x.long().flip(0).to(torch.uint32), "do not fit together"),
        ("first", lambda x: (x.long() + 1).to(torch.uint32), "do not fit together"),
        ("logp", lambda x: x[:-1].clone(), "do not fit together"),
        ("codes", lambda x: (x.int() + 9999).to(torch.uint16), "do not fit together"),
        ("codes", lambda x: x[:-1].clone(), "do not fit together"),
        ("orders", lambda x: x + 1, "do not fit together"),
        ("orders", lambda x: x[:-1].clone(), "do not fit together"),
        ("discounts", lambda x: x[:-1].clone(), "do not fit together"),
        ("logp", lambda x: x.double(), "must be torch.float32, but is torch.float64"),
        ("words", lambda x: x[None], r"words must be \(7,\), but is"),
        ("values", None, "values: the file lacks it"),
    ],
)
def test_damaged_tables_are_refused(tmp_path, name, damage, message):
    tensors = weights(fit(TEXTS, order=3))
    tensors = {key: value for key, value in tensors.items() if key != name} | (
        {name: damage(tensors[name])} if damage else {}
    )
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path, NGram(NGramConfig(name="ngram", order=3), VOCAB))
    assert load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"order": 0}, "model.order: .*greater than or equal to 1"),
        ({"smoothing": "kneser"}, "did you mean 'kneser-ney'"),
        ({"order": 2, "prune": [0, 1, 1]}, "model.prune has a number an order: got 3 for model.order 2"),
        ({"prune": [1, 0]}, r"model.prune must not fall from one order to the next: got \[1, 0\]"),
        ({"k": 0}, "model.k"),
    ],
)
def test_a_wrong_recipe_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        read_section(NGramConfig, {"name": "ngram", **config}, "model")


def test_it_goes_forward_alone():
    model = NGram(NGramConfig(name="ngram"), 5)
    assert NGram.roles(model.config) == {Role.LANGUAGE_MODEL, Role.GENERATOR}
    with pytest.raises(RoleError, match="goes forward, but 'backward' is asked for"):
        model.logits(Tokens.pack([[1]]), direction="backward")
