import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.decoding.logits_processors import (
    NEG_INF,
    ForbiddenTokens,
    HistoryConstraints,
    TokenHistory,
    apply_temperature,
    log_probs,
    split_bad_words,
    top_k,
    top_p,
)
from weft.errors import ConfigError
from weft.tokens import Tokens

steady = settings(max_examples=30, deadline=None, derandomize=True)
rows = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12)


def as_logits(row: list[float]) -> Tensor:
    return torch.tensor([row], dtype=torch.float64)


def allowed_ids(filtered: Tensor) -> set[int]:
    return set((filtered[0] > NEG_INF).nonzero()[:, 0].tolist())


class TestTopK:
    @steady
    @given(rows, st.integers(1, 15))
    def test_keeps_what_fewer_than_k_are_better_than(self, row: list[float], k: int) -> None:
        logits = as_logits(row)
        expected = {i for i, value in enumerate(row) if sum(other > value for other in row) < k}
        assert allowed_ids(top_k(logits, k)) == expected
        assert logits.tolist() == [row], "a filter changes nothing in place"

    def test_keeps_all_that_tie_with_the_last(self) -> None:
        assert allowed_ids(top_k(as_logits([1.0, 3.0, 1.0, 0.0]), 2)) == {0, 1, 2}

    def test_leaves_the_values_of_what_it_keeps(self) -> None:
        assert top_k(as_logits([1.0, 3.0, 2.0]), 2).tolist() == [[NEG_INF, 3.0, 2.0]]


def is_nucleus(chosen: set[int], row: list[float], p: float) -> bool:
    """The smallest set: of mass p or more, below p without its least likely token, and of the best tokens."""
    weights = [math.exp(value) for value in row]
    mass = {i: weight / sum(weights) for i, weight in enumerate(weights)}
    total, least = sum(mass[i] for i in chosen), min(mass[i] for i in chosen)
    best = all(mass[i] <= least for i in mass if i not in chosen)
    return best and total >= p - 1e-9 and (len(chosen) == 1 or total - least < p + 1e-9)


class TestTopP:
    @steady
    @given(rows, st.floats(0.01, 1))
    def test_is_the_nucleus(self, row: list[float], p: float) -> None:
        logits = as_logits(row)
        assert is_nucleus(allowed_ids(top_p(logits, p)), row, p)
        assert logits.tolist() == [row]

    def test_the_check_tells_a_nucleus_from_its_neighbours(self) -> None:
        row = [math.log(x) for x in (0.5, 0.3, 0.15, 0.05)]
        assert is_nucleus({0, 1}, row, 0.7)
        assert not is_nucleus({0}, row, 0.7)
        assert not is_nucleus({0, 1, 2}, row, 0.7)
        assert not is_nucleus({0, 2, 3}, row, 0.7)

    def test_always_keeps_the_best(self) -> None:
        assert allowed_ids(top_p(as_logits([0.0, 9.0, 0.0]), 1e-12)) == {1}

    def test_one_keeps_all_however_small(self) -> None:
        assert allowed_ids(top_p(torch.tensor([[0.0, -60.0, -90.0]]), 1.0)) == {0, 1, 2}

    def test_ties_at_the_edge_enter_by_the_lower_id(self) -> None:
        assert allowed_ids(top_p(as_logits([0.0] * 6), 0.5)) == {0, 1, 2}

    def test_goes_on_from_what_is_barred(self) -> None:
        assert allowed_ids(top_p(as_logits([9.0, 0.0, NEG_INF, 8.0]), 0.999)) == {0, 3}


class TestTemper:
    @steady
    @given(rows, st.floats(0.05, 20))
    def test_softmax_is_that_of_the_quotient(self, row: list[float], temperature: float) -> None:
        logits = as_logits(row)
        expected = (logits / temperature).softmax(-1)
        assert torch.allclose(apply_temperature(logits, temperature).softmax(-1), expected, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("temperature", [1e-37, 1e-300])
    def test_a_tiny_temperature_leaves_the_best_alone(self, temperature: float) -> None:
        logits = torch.tensor([[300.0, 299.0, NEG_INF]])
        assert apply_temperature(logits, temperature).softmax(-1).tolist() == [[1.0, 0.0, 0.0]]
        assert not (logits / temperature).softmax(-1).isfinite().all(), "the plain quotient overflows"


class TestBarred:
    def test_bars_eos_until_the_minimum_is_there(self) -> None:
        barred = ForbiddenTokens.for_logits(torch.zeros(1, 9), eos=2, forbid=[5, 0], min_length=3)
        assert [barred.after(written).tolist() for written in (0, 2, 3)] == [[0, 2, 5], [0, 2, 5], [0, 5]]

    def test_log_probs_are_the_models_own(self) -> None:
        logits = torch.tensor([[1.0, 2.0, 3.0]])
        result = log_probs(logits, torch.tensor([2]))
        own = logits.log_softmax(-1)
        assert result[0, 2] == NEG_INF
        assert torch.equal(result[:, :2], own[:, :2]), "not scaled up to make up for the barred ones"
        assert logits.tolist() == [[1.0, 2.0, 3.0]]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_log_probs_are_float32_or_better(self, dtype: torch.dtype) -> None:
        logits = torch.linspace(-3, 3, 50).to(dtype)[None]
        result = log_probs(logits, torch.tensor([], dtype=torch.long))
        assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(result.double(), logits.double().log_softmax(-1), rtol=1e-6, atol=1e-6)

    def test_refuses_ids_outside_the_vocabulary(self) -> None:
        with pytest.raises(ConfigError, match=r"must lie in 0\.\.4.*got \[-1, 5\]"):
            ForbiddenTokens.for_logits(torch.zeros(1, 5), eos=5, forbid=[-1])

    def test_refuses_to_leave_nothing(self) -> None:
        with pytest.raises(ConfigError, match="nothing is left"):
            ForbiddenTokens.for_logits(torch.zeros(1, 3), eos=0, forbid=[1, 2], min_length=1)
        assert ForbiddenTokens.for_logits(torch.zeros(1, 3), eos=0, forbid=[1, 2]).always.tolist() == [1, 2]


class TestTokenHistory:
    def test_aligns_prompts_at_their_ends(self) -> None:
        history = TokenHistory.of(Tokens.pack([[5, 6, 7], [], [8]]))
        assert history.ids.tolist() == [[5, 6, 7], [-1, -1, -1], [-1, -1, 8]]
        longer = history.select(torch.tensor([2, 0])).append(torch.tensor([1, 2]))
        assert longer.ids.tolist() == [[-1, -1, 8, 1], [5, 6, 7, 2]]

    def test_of_empty_prompts_is_empty(self) -> None:
        assert TokenHistory.of(Tokens.pack([[], []])).ids.shape == (2, 0)


VOCAB = 7
histories = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)
words = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), min_size=1, max_size=4)


def scores_of(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def constrained(constraints: HistoryConstraints, scores: Tensor, prompts: list[list[int]]) -> Tensor:
    history = TokenHistory.of(Tokens.pack(prompts))
    return constraints.ban(constraints.penalize(scores, history).clone(), history, 0, scores)


def by_transformers(processor: object, scores: Tensor, prompts: list[list[int]]) -> Tensor:
    """Each row alone: transformers has no rows of several lengths without padding."""
    rows = [processor(torch.tensor([ids]), row[None].clone()) for ids, row in zip(prompts, scores, strict=True)]  # type: ignore[operator]
    return torch.cat(rows)


class TestParityWithTransformers:
    """The processors of transformers give the same numbers; where they leave nothing, our row may end."""

    process = pytest.importorskip("transformers.generation.logits_process")

    @steady
    @given(st.lists(histories, min_size=1, max_size=4), st.integers(0, 99), st.floats(0.2, 3))
    def test_repetition_penalty(self, prompts: list[list[int]], seed: int, penalty: float) -> None:
        scores = scores_of(seed, len(prompts))
        theirs = by_transformers(self.process.RepetitionPenaltyLogitsProcessor(penalty), scores, prompts)
        assert torch.equal(constrained(HistoryConstraints(penalty), scores, prompts), theirs)
        if penalty != 1:
            assert not torch.equal(theirs, scores), "the negative control"

    @steady
    @given(st.lists(histories, min_size=1, max_size=4), st.integers(0, 99), st.integers(1, 4))
    def test_no_repeat_ngram_size(self, prompts: list[list[int]], seed: int, size: int) -> None:
        scores = scores_of(seed, len(prompts))
        theirs = by_transformers(self.process.NoRepeatNGramLogitsProcessor(size), scores, prompts)
        self.check_bans(constrained(HistoryConstraints(no_repeat_ngram_size=size), scores, prompts), theirs, scores)

    @steady
    @given(st.lists(histories, min_size=1, max_size=4), st.integers(0, 99), words)
    def test_bad_words(self, prompts: list[list[int]], seed: int, bad: list[list[int]]) -> None:
        scores = scores_of(seed, len(prompts))
        theirs = by_transformers(self.process.NoBadWordsLogitsProcessor(bad, eos_token_id=VOCAB), scores, prompts)
        single, sequences = split_bad_words(bad)
        ours = scores.index_fill(1, torch.tensor(single, dtype=torch.long), NEG_INF)
        self.check_bans(constrained(HistoryConstraints(bad_words=sequences), ours, prompts), theirs, scores)

    def check_bans(self, ours: Tensor, theirs: Tensor, scores: Tensor) -> None:
        left = (theirs > NEG_INF).any(-1)
        assert torch.equal(ours[left], theirs[left])
        assert all(allowed_ids(row[None]) <= {0} for row in ours[~left])

    def test_bans_are_seen(self) -> None:
        """The negative control: a bigram that is there, and one that is not."""
        bigrams = HistoryConstraints(no_repeat_ngram_size=2)
        assert allowed_ids(constrained(bigrams, torch.zeros(1, VOCAB), [[1, 2, 3, 1]])) == {0, 1, 3, 4, 5, 6}
        assert allowed_ids(constrained(bigrams, torch.zeros(1, VOCAB), [[1, 2, 3, 4]])) == set(range(VOCAB))
        bad = HistoryConstraints(bad_words=((3, 1, 5), (1, 6)))
        assert allowed_ids(constrained(bad, torch.zeros(1, VOCAB), [[2, 3, 1]])) == {0, 1, 2, 3, 4}
        assert allowed_ids(constrained(bad, torch.zeros(1, VOCAB), [[1, 3]])) == set(range(VOCAB))


def test_a_row_in_which_nothing_is_left_may_end() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    history = TokenHistory.of(Tokens.pack([[0, 1, 2]]))
    left = HistoryConstraints(no_repeat_ngram_size=1).ban(logits.log_softmax(-1), history, 0, logits)
    assert left.tolist() == [[pytest.approx(float(logits.log_softmax(-1)[0, 0])), NEG_INF, NEG_INF]]
