import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.schema import read_section
from weft.decoding.config import DecodingConfig
from weft.decoding.generate import Hypothesis, generate, inverse_cdf, stream
from weft.errors import ConfigError, WeftError
from weft.tokens import Tokens

EOS = 0
steady = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32)
prompts = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5)


class TestOptions:
    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            ({"temperature": 0}, "decode.temperature: .*greater than 0"),
            ({"temperature": float("nan")}, "decode.temperature"),
            ({"temperature": 1e300}, "decode.temperature: .*less than or equal to 100"),
            ({"repetition_penalty": 0}, "decode.repetition_penalty: .*greater than or equal to 0.01"),
            ({"repetition_penalty": 1e9}, "decode.repetition_penalty: .*less than or equal to 100"),
            ({"no_repeat_ngram_size": -1}, "decode.no_repeat_ngram_size"),
            ({"bad_words": [""]}, "decode.bad_words.0: .*at least 1 character"),
            ({"bad_words": "word"}, "decode.bad_words: must be a list"),
            ({"top_k": 0}, "decode.top_k: .*greater than or equal to 1"),
            ({"top_p": 0}, "decode.top_p: .*greater than 0"),
            ({"top_p": 1.5}, "decode.top_p: .*less than or equal to 1"),
            ({"alpha": -1}, "decode.alpha"),
            ({"beam": 0}, "decode.beam"),
            (
                {"beam": 2, "num_return_sequences": 3},
                "num_return_sequences must be at most beam.*got 3 and 2; try beam: 3",
            ),
            ({"beam": 2, "sample": True}, "sample needs beam: 1, but beam is 2"),
            ({"min_length": 9, "max_length": 8}, "min_length must be at most max_length: got 9 and 8"),
            ({"length_penalty": "gmnt"}, "did you mean 'gnmt'"),
            ({"beams": 4}, "did you mean 'beam'"),
        ],
    )
    def test_refuses(self, raw: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_section(DecodingConfig, raw, "decode")

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            (
                {"temperature": 0.5},
                "decode.temperature: 0.5 has no effect: sample is false.*set sample: true, or leave",
            ),
            ({"top_k": 5}, "decode.top_k: 5 has no effect: sample is false"),
            ({"top_p": 0.5}, "decode.top_p: 0.5 has no effect: sample is false"),
            ({"seed": 1}, "decode.seed: 1 has no effect: sample is false"),
            ({"beam": 4, "temperature": 0.5}, "decode.temperature: .*sample is false"),
            ({"length_penalty": "average"}, "decode.length_penalty: 'average' has no effect: .*set beam: 4"),
            ({"alpha": 1.0}, "decode.alpha: 1.0 has no effect: beam and num_return_sequences are 1"),
            ({"alpha": 1.0, "sample": True}, "decode.alpha: .*set num_return_sequences: 2"),
            ({"beam": 4, "length_penalty": "none", "alpha": 1.0}, "decode.alpha: .*length_penalty is none"),
            ({"early_stopping": "first"}, "decode.early_stopping: 'first' has no effect: beam is 1"),
        ],
    )
    def test_refuses_what_has_no_effect(self, raw: dict[str, object], message: str) -> None:
        options = read_section(DecodingConfig, raw, "decode")
        with pytest.raises(ConfigError, match=message):
            options.check_effective("decode")
        options.check_effective("decode", given=["max_length"])  # of a call, which the recipe's values do not concern

    @pytest.mark.parametrize(
        "raw",
        [
            {},
            DecodingConfig().model_dump(),
            {"sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "seed": 1},
            {"sample": True, "num_return_sequences": 2, "length_penalty": "average", "alpha": 1.0},
            {"beam": 4, "length_penalty": "average", "alpha": 1.0, "early_stopping": "first"},
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words": ["a"], "min_length": 2},
        ],
    )
    def test_takes_what_has_an_effect(self, raw: dict[str, object]) -> None:
        read_section(DecodingConfig, raw, "decode").check_effective("decode")

    @pytest.mark.parametrize(
        "raw", [{"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}, {"bad_words": ["a"]}, {"finish": True}]
    )
    def test_a_graph_is_for_searches_without_a_history(self, raw: dict[str, object]) -> None:
        assert DecodingConfig().graph_compatible
        assert not DecodingConfig.model_validate(raw).graph_compatible

    def test_takes_many_samples_with_one_beam(self) -> None:
        assert (
            read_section(DecodingConfig, {"sample": True, "num_return_sequences": 9}, "decode").num_return_sequences
            == 9
        )

    @pytest.mark.parametrize(
        ("bias", "alpha", "length", "expected"),
        [
            ("none", 0.6, 9, 1.0),
            ("gnmt", 0.6, 7, 2**0.6),
            ("gnmt", 1.0, 1, 1.0),
            ("average", 1.0, 7, 7.0),
            ("average", 0, 7, 1.0),
        ],
    )
    def test_penalty(self, bias: Any, alpha: float, length: int, expected: float) -> None:
        assert math.isclose(DecodingConfig(length_penalty=bias, alpha=alpha).penalty(length), expected)


def plain_greedy(model: Any, prompt: list[int], options: DecodingConfig, forbid: tuple[int, ...] = ()) -> Hypothesis:
    ids: tuple[int, ...] = ()
    total, token = 0.0, -1
    while token != EOS and len(ids) < options.max_length:
        logprobs = model.logprobs((), (*prompt, *ids))
        barred = {*forbid, EOS} if len(ids) < options.min_length else set(forbid)
        token = max(
            (token for token in range(model.vocab) if token not in barred), key=lambda hypothesis: logprobs[hypothesis]
        )
        total += logprobs[token]
        ids = (*ids, token)
    finished = token == EOS
    score = total / ((5 + len(ids)) / 6) ** options.alpha
    return Hypothesis(ids[:-1] if finished else ids, total, score, finished)


def assert_same(hypotheses: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [(hypothesis.ids, hypothesis.finished) for hypothesis in hypotheses] == [
        (hypothesis.ids, hypothesis.finished) for hypothesis in expected
    ]
    for hypothesis, other in zip(hypotheses, expected, strict=True):
        assert math.isclose(hypothesis.logprob, other.logprob, rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(hypothesis.score, other.score, rel_tol=1e-9, abs_tol=1e-9)


class TestGreedy:
    @steady
    @given(seeds, prompts, st.integers(4, 6), st.integers(1, 9), st.integers(0, 9), st.sampled_from([(), (2,), (1, 2)]))
    def test_takes_the_best_token_each_time(
        self,
        toy: Any,
        seed: int,
        batch: list[list[int]],
        vocab: int,
        longest: int,
        shortest: int,
        forbid: tuple[int, ...],
    ) -> None:
        options = DecodingConfig(max_length=longest, min_length=min(shortest, longest))
        hypotheses = generate(toy(vocab, seed), Tokens.pack(batch), EOS, options, forbid=forbid)
        model = toy(vocab, seed)
        for hypothesis, prompt in zip(hypotheses, batch, strict=True):
            assert_same(hypothesis, [plain_greedy(model, prompt, options, forbid)])

    def test_a_state_that_does_not_reorder_is_caught(self, toy: Any) -> None:
        batch = [[place] for place in range(8)]
        options = DecodingConfig(max_length=20)
        model = toy(8, 1)
        expected = [plain_greedy(model, prompt, options) for prompt in batch]
        wrong = generate(toy(8, 1, forgets=True), Tokens.pack(batch), EOS, options)
        assert [hypothesis[0] for hypothesis in generate(toy(8, 1), Tokens.pack(batch), EOS, options)] != [
            hypothesis[0] for hypothesis in wrong
        ]
        for hypothesis, other in zip(generate(toy(8, 1), Tokens.pack(batch), EOS, options), expected, strict=True):
            assert_same(hypothesis, [other])

    def test_a_tie_goes_to_the_lowest_id(self, toy: Any) -> None:
        model = toy(5, table=lambda source, prefix: [0.0, 1.0, 3.0, 3.0, 3.0])
        assert generate(model, Tokens.pack([[1]]), EOS, DecodingConfig(max_length=3))[0][0].ids == (2, 2, 2)

    def test_rows_leave_the_batch_as_they_end(self, toy: Any) -> None:
        model = toy(3, table=lambda source, prefix: [1.0, 0.0, 0.0] if len(prefix) > prefix[0] else [0.0, 1.0, 0.0])
        hypotheses = generate(model, Tokens.pack([[5], [2], [3], [2]]), EOS, DecodingConfig(max_length=10))
        assert [len(hypothesis[0].ids) for hypothesis in hypotheses] == [5, 2, 3, 2]
        assert model.rows == [4, 4, 2, 1, 1]

    def test_max_length_counts_eos(self, toy: Any) -> None:
        model = toy(3, table=lambda source, prefix: [1.0, 0.0, 0.0] if len(prefix) > 3 else [0.0, 1.0, 0.0])
        prompt = Tokens.pack([[1]])
        assert generate(model, prompt, EOS, DecodingConfig(max_length=4))[0][0].finished
        cut = generate(model, prompt, EOS, DecodingConfig(max_length=3))[0][0]
        assert (cut.ids, cut.finished) == ((1, 1, 1), False)

    def test_nothing_in_nothing_out(self, toy: Any) -> None:
        assert generate(toy(4), Tokens.pack([]), EOS, DecodingConfig()) == []

    def test_refuses_nan(self, toy: Any) -> None:
        model = toy(3, table=lambda source, prefix: [float("nan")] * 3)
        with pytest.raises(WeftError, match="not numbers"):
            generate(model, Tokens.pack([(1,)]), EOS, DecodingConfig(max_length=3))


def ids_of(hypotheses: list[list[Hypothesis]]) -> list[list[tuple[int, ...]]]:
    return [[hypothesis.ids for hypothesis in group] for group in hypotheses]


def misfit(samples: list[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Return Pearson's chi-square in standard deviations above its mean; infinite for an impossible sample."""
    counts = Counter(samples)
    if any(exact.get(ids, 0) == 0 for ids in counts):
        return math.inf
    expected = {ids: p * len(samples) for ids, p in exact.items() if p > 0}
    degrees = len(expected) - 1
    statistic = sum((counts[ids] - many) ** 2 / many for ids, many in expected.items())
    return (statistic - degrees) / math.sqrt(2 * degrees)


def filtered(logprobs: np.ndarray, options: DecodingConfig, forbid: tuple[int, ...]) -> np.ndarray:
    """The distribution that a sample is drawn from, one token at a time."""
    weights = np.exp(logprobs / options.temperature)
    weights[list(forbid)] = 0
    order = np.argsort(-weights)
    weights[order[options.top_k or len(order) :]] = 0
    weights /= weights.sum()
    if options.top_p is not None:
        size = int(np.searchsorted(weights[order].cumsum(), options.top_p)) + 1
        weights[order[size:]] = 0
    return weights / weights.sum()


def two_tokens(model: Any, options: DecodingConfig, forbid: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """The probability of each sample of at most two tokens after the prompt (1,)."""
    exact = {}
    for first, p in enumerate(filtered(model.logprobs((), (1,)), options, forbid)):
        if first == EOS:
            exact[()] = p
            continue
        for second, q in enumerate(filtered(model.logprobs((), (1, first)), options, forbid)):
            exact[(first,) if second == EOS else (first, second)] = p * q
    return exact


class TestSampling:
    @pytest.mark.parametrize(
        "chosen",
        [
            {},
            {"temperature": 0.6},
            {"temperature": 1.7},
            {"top_k": 3},
            {"top_p": 0.7},
            {"temperature": 1.3, "top_k": 5, "top_p": 0.8},
        ],
    )
    def test_follows_the_exact_distribution(self, toy: Any, chosen: dict[str, Any]) -> None:
        options, many, forbid = DecodingConfig(sample=True, max_length=2, **chosen), 4000, (3,)
        # Rows and candidates alike: a seed depends on both.
        hypotheses = generate(
            toy(7, 11),
            Tokens.pack([[1]] * 50),
            EOS,
            options.model_copy(update={"num_return_sequences": many // 50}),
            forbid=forbid,
        )
        samples = [hypothesis.ids for group in hypotheses for hypothesis in group]
        assert misfit(samples, two_tokens(toy(7, 11), options, forbid)) < 4
        wrong = options.model_copy(update={"temperature": options.temperature * 1.2})
        assert misfit(samples, two_tokens(toy(7, 11), wrong, forbid)) > 4, "the test has the power to tell"

    def test_twenty_thousand_samples(self, toy: Any) -> None:
        options = DecodingConfig(sample=True, num_return_sequences=20_000, max_length=1, top_p=0.95)
        hypotheses = generate(toy(12, 5), Tokens.pack([[1]]), EOS, options)[0]
        exact = filtered(toy(12, 5).logprobs((), (1,)), options, ())
        share = np.bincount(
            [hypothesis.ids[0] if hypothesis.ids else EOS for hypothesis in hypotheses], minlength=12
        ) / len(hypotheses)
        assert np.abs(share - exact).sum() / 2 < 0.01
        assert not share[exact == 0].any()

    @steady
    @given(seeds, prompts, st.integers(1, 4), st.sampled_from([None, 2]), st.sampled_from([None, 0.8]))
    def test_does_not_depend_on_the_batch(
        self, toy: Any, seed: int, batch: list[list[int]], many: int, k: int | None, p: float | None
    ) -> None:
        model = toy(6, seed)
        options = DecodingConfig(sample=True, num_return_sequences=many, max_length=6, seed=seed, top_k=k, top_p=p)
        whole = generate(model, Tokens.pack(batch), EOS, options)
        assert whole == generate(model, Tokens.pack(batch), EOS, options), "same seed, same samples"
        cut = [
            generate(model, Tokens.pack([prompt]), EOS, options, rows=[place])[0] for place, prompt in enumerate(batch)
        ]
        assert ids_of(whole) == ids_of(cut)
        fewer = generate(model, Tokens.pack(batch), EOS, options.model_copy(update={"num_return_sequences": 1}))
        assert all(
            hypothesis[0].ids in {other.ids for other in group} for hypothesis, group in zip(fewer, whole, strict=True)
        )

    def test_seeds_rows_and_candidates_differ(self, toy: Any) -> None:
        def draw(seed: int, rows: list[int]) -> list[list[tuple[int, ...]]]:
            options = DecodingConfig(sample=True, num_return_sequences=4, max_length=12, min_length=12, seed=seed)
            return ids_of(generate(toy(9, 2), Tokens.pack([[1]] * len(rows)), EOS, options, rows=rows))

        flat = [ids for seed in (0, 1) for group in draw(seed, [0, 1, 2, 3]) for ids in group]
        assert len(set(flat)) == 32
        first, second = draw(0, [0, 1])
        assert draw(0, [1, 7, 0])[::2] == [second, first]

    def test_a_longer_limit_begins_the_same(self, toy: Any) -> None:
        short, long = (
            generate(toy(9, 2), Tokens.pack([[1]]), EOS, DecodingConfig(sample=True, max_length=n, min_length=n))[0][
                0
            ].ids
            for n in (5, 40)
        )
        assert long[:5] == short

    @pytest.mark.parametrize("chosen", [{"temperature": 1e-5}, {"temperature": 1e-300}, {"top_k": 1}, {"top_p": 1e-9}])
    def test_tends_to_greedy(self, toy: Any, chosen: dict[str, Any]) -> None:
        batch = Tokens.pack([[place] for place in range(10)])
        sampled = generate(toy(9, 2), batch, EOS, DecodingConfig(sample=True, max_length=20, **chosen))
        greedy = generate(toy(9, 2), batch, EOS, DecodingConfig(max_length=20))
        assert ids_of(sampled) == ids_of(greedy)
        warm = generate(toy(9, 2), batch, EOS, DecodingConfig(sample=True, max_length=20))
        assert ids_of(warm) != ids_of(greedy)

    def test_the_log_probability_is_the_models_own(self, toy: Any) -> None:
        options = DecodingConfig(
            sample=True, num_return_sequences=20, max_length=6, temperature=0.5, top_k=3, top_p=0.9
        )
        model = toy(9, 2)
        for hypothesis in generate(model, Tokens.pack([[1]]), EOS, options)[0]:
            tokens = (*hypothesis.ids, EOS) if hypothesis.finished else hypothesis.ids
            total = sum(model.logprobs((), (1, *tokens[:place]))[token] for place, token in enumerate(tokens))
            assert math.isclose(hypothesis.logprob, total)
            assert math.isclose(hypothesis.score, total / ((5 + len(tokens)) / 6) ** 0.6)

    def test_the_best_come_first(self, toy: Any) -> None:
        hypotheses = generate(
            toy(4, 2), Tokens.pack([[1]]), EOS, DecodingConfig(sample=True, num_return_sequences=30, max_length=3)
        )[0]
        keys = [(not hypothesis.finished, -hypothesis.score) for hypothesis in hypotheses]
        assert keys == sorted(keys)
        assert len({hypothesis.finished for hypothesis in hypotheses}) == 2

    @steady
    @given(st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.5]), min_size=1, max_size=9).filter(any), st.booleans())
    def test_never_draws_what_cannot_be(self, weights: list[float], double: bool) -> None:
        probs = torch.tensor([weights], dtype=torch.float64 if double else torch.float32)
        probs = probs / probs.sum()
        for uniform in (0.0, 1 - 2**-24, 0.5):
            assert probs[0, inverse_cdf(probs, torch.tensor([uniform]))] > 0

    def test_the_edges_of_the_unit_interval(self) -> None:
        probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
        drawn = [inverse_cdf(probs, torch.tensor([u])).item() for u in (0.0, 0.2499, 0.25, 0.9999)]
        assert drawn == [1, 1, 3, 3]
        assert inverse_cdf(probs, torch.tensor([1.0])).item() == 3, "however the sum is rounded"


class TestStream:
    @steady
    @given(seeds, st.booleans(), st.integers(1, 8))
    def test_gives_the_ids_of_generate(self, toy: Any, seed: int, sample: bool, longest: int) -> None:
        options = DecodingConfig(sample=sample, max_length=longest, seed=seed, temperature=0.9)
        prompt, source = Tokens.pack([[1, 2]]), Tokens.pack([[3]])
        whole = generate(toy(5, seed), prompt, EOS, options, source, forbid=[2])[0][0]
        assert tuple(stream(toy(5, seed), prompt, EOS, options, source, forbid=[2])) == whole.ids

    def test_yields_as_it_goes(self, toy: Any) -> None:
        model = toy(5, 1)
        flow = stream(model, Tokens.pack([[1]]), EOS, DecodingConfig(min_length=9, max_length=9))
        next(flow)
        next(flow)
        assert model.rows == [1]

    def test_makes_no_graph_and_leaves_grad_mode_alone(self, toy: Any) -> None:
        grad_modes = []
        model = toy(
            5, table=lambda source, prefix: [grad_modes.append(torch.is_grad_enabled()) or 0.0, 1.0, 0.0, 0.0, 0.0]
        )
        flow = stream(model, Tokens.pack([[1]]), EOS, DecodingConfig(max_length=3))
        next(flow)
        assert torch.is_grad_enabled()
        list(flow)
        assert grad_modes == [False, False, False]

    @pytest.mark.parametrize(
        ("batch", "options"),
        [
            ([[1], [2]], DecodingConfig()),
            ([], DecodingConfig()),
            ([[1]], DecodingConfig(beam=2)),
            ([[1]], DecodingConfig(sample=True, num_return_sequences=2)),
        ],
    )
    def test_refuses_at_once_what_is_not_one_sequence(
        self, toy: Any, batch: list[list[int]], options: DecodingConfig
    ) -> None:
        with pytest.raises(ConfigError, match="a stream is one sequence"):
            stream(toy(5), Tokens.pack(batch), EOS, options)


CONSTRAINED = [
    {"repetition_penalty": 1.8},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1, "repetition_penalty": 1.3},
    {"bad_words": ["any"], "min_length": 3},
    {"bad_words": ["any"], "no_repeat_ngram_size": 3, "repetition_penalty": 0.7},
]
SEARCHES = [{}, {"sample": True, "num_return_sequences": 3}, {"beam": 3, "num_return_sequences": 3}]
BAD = ((4,), (1, 2), (3, 1, 5))


def breaks(text: tuple[int, ...], options: DecodingConfig) -> bool:
    """Return whether a prompt and its continuation have what the options forbid."""
    size = options.no_repeat_ngram_size
    ngrams = [text[at : at + size] for at in range(len(text) - size + 1)] if size else []
    bad = BAD if options.bad_words else ()
    return len(set(ngrams)) < len(ngrams) or any(
        text[at : at + len(word)] == word for word in bad for at in range(len(text))
    )


class TestConstraints:
    @pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "sampling", "beam"])
    @pytest.mark.parametrize("constraint", CONSTRAINED)
    def test_holds_in_every_search_whatever_the_neighbours(
        self, toy: Any, constraint: dict[str, Any], search: dict[str, Any]
    ) -> None:
        options = DecodingConfig(max_length=12, **search, **constraint)
        bad = BAD if options.bad_words else ()
        batch = [[6], [7, 8], [], [8, 7, 6]]
        model = toy(9, 4)
        together = generate(model, Tokens.pack(batch), EOS, options, bad_words=bad)
        for row, (prompt, group) in enumerate(zip(batch, together, strict=True)):
            (alone,) = generate(model, Tokens.pack([prompt]), EOS, options, rows=[row], bad_words=bad)
            assert_same(group, alone)
            assert not any(breaks((*prompt, *hypothesis.ids), options) for hypothesis in group)
        free = options.model_copy(update=DecodingConfig().model_dump(include=set(constraint)))
        assert together != generate(model, Tokens.pack(batch), EOS, free), "the negative control"

    @pytest.mark.parametrize("sample", [False, True])
    @pytest.mark.parametrize("constraint", CONSTRAINED)
    def test_a_stream_is_the_answer(self, toy: Any, constraint: dict[str, Any], sample: bool) -> None:
        options = DecodingConfig(max_length=12, sample=sample, **constraint)
        bad = BAD if options.bad_words else ()
        prompt = Tokens.pack([[6, 7]])
        ((whole,),) = generate(toy(9, 4), prompt, EOS, options, bad_words=bad)
        assert tuple(stream(toy(9, 4), prompt, EOS, options, bad_words=bad)) == whole.ids

    def test_greedy_penalizes_logits_and_keeps_the_models_own_log_probability(self, toy: Any) -> None:
        model = toy(3, table=lambda source, prefix: [-9.0, 2.0, 1.5])
        options = DecodingConfig(max_length=4, repetition_penalty=1.5)
        ((hypothesis,),) = generate(model, Tokens.pack([[1]]), EOS, options)
        assert hypothesis.ids == (2, 1, 1, 1), "1.5 beats 2 / 1.5; then both are penalized alike"
        assert math.isclose(hypothesis.logprob, model.logprobs((), (1,))[[2, 1, 1, 1]].sum(), rel_tol=1e-9)

    def test_beams_are_scored_by_penalized_log_probabilities(self, toy: Any) -> None:
        model = toy(3, table=lambda source, prefix: [0.0, 2.0, 1.5])
        options = DecodingConfig(
            beam=9, num_return_sequences=9, max_length=2, length_penalty="none", repetition_penalty=2
        )
        logprobs, expected = model.logprobs((), (1,)), {}
        for first in (1, 2):
            for second in (0, 1, 2):
                penalties = [2 if first == 1 else 1, 2 if second in (1, first) else 1]
                ids = (first,) if second == 0 else (first, second)
                expected[ids] = logprobs[first] * penalties[0] + logprobs[second] * penalties[1]
        expected[()] = logprobs[0]
        (group,) = generate(model, Tokens.pack([[1]]), EOS, options)
        assert len(group) > 5
        for hypothesis in group:
            assert math.isclose(hypothesis.score, expected[hypothesis.ids], rel_tol=1e-9)

    @pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "sampling", "beam"])
    def test_a_text_ends_where_nothing_is_left_to_write(self, toy: Any, search: dict[str, Any]) -> None:
        options = DecodingConfig(max_length=20, min_length=15, no_repeat_ngram_size=1, **search)
        (group,) = generate(toy(5, 2), Tokens.pack([[3]]), EOS, options)
        assert group
        for hypothesis in group:
            assert hypothesis.finished
            assert sorted(hypothesis.ids) == [1, 2, 4]
