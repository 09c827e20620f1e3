import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.decoding.beam_search import ActiveBeams, Beam, FinishedPool, Hypothesis
from weft.decoding.config import DecodingConfig
from weft.decoding.generate import generate
from weft.errors import WeftError
from weft.tokens import Tokens

EOS = 0
BIASES = ["none", "gnmt", "average"]
steady = settings(max_examples=30, deadline=None, derandomize=True)


def penalty(options: DecodingConfig, length: int) -> float:
    if options.length_penalty == "none":
        return 1.0
    return (((5 + length) / 6) if options.length_penalty == "gnmt" else length) ** options.alpha


def rank(hypotheses: list[Hypothesis], keep: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score))[:keep]


def allowed(options: DecodingConfig, forbid: tuple[int, ...], vocab: int, written: int) -> list[int]:
    early = {EOS} if written < options.min_length else set()
    return [token for token in range(vocab) if token not in early | set(forbid)]


def brute_force(
    model: Any,
    prompt: tuple[int, ...],
    options: DecodingConfig,
    source: tuple[int, ...] = (),
    forbid: tuple[int, ...] = (),
) -> list[Hypothesis]:
    """Score every sequence of up to max_length tokens."""
    hypotheses = []

    def visit(ids: tuple[int, ...], logprob: float) -> None:
        if len(ids) == options.max_length:
            hypotheses.append(Hypothesis(ids, logprob, logprob / penalty(options, len(ids)), False))
            return
        after = model.logprobs(source, prompt + ids)
        for token in allowed(options, forbid, model.vocab, len(ids)):
            total = logprob + float(after[token])
            if token == EOS:
                hypotheses.append(Hypothesis(ids, total, total / penalty(options, len(ids) + 1), True))
            else:
                visit((*ids, token), total)

    visit((), 0.0)
    return rank(hypotheses, options.num_return_sequences)


def plain_beam(
    model: Any,
    prompt: tuple[int, ...],
    options: DecodingConfig,
    source: tuple[int, ...] = (),
    forbid: tuple[int, ...] = (),
) -> list[Hypothesis]:
    """Search one sequence by the rules of the module's docstring, in plain Python, without early stopping."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    hypotheses = []
    for length in range(1, options.max_length + 1):
        options_now = [
            (logprob + float(model.logprobs(source, prompt + ids)[token]), (*ids, token))
            for logprob, ids in live
            for token in allowed(options, forbid, model.vocab, length - 1)
        ]
        ordered = sorted(options_now, reverse=True)
        for logprob, ids in ordered[: options.beam]:
            if ids[-1] == EOS:
                hypotheses.append(Hypothesis(ids[:-1], logprob, logprob / penalty(options, length), True))
        live = [(logprob, ids) for logprob, ids in ordered if ids[-1] != EOS][: options.beam]
    hypotheses += [Hypothesis(ids, logprob, logprob / penalty(options, len(ids)), False) for logprob, ids in live]
    return rank(hypotheses, options.num_return_sequences)


def assert_same(hypotheses: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [(hypothesis.ids, hypothesis.finished) for hypothesis in hypotheses] == [
        (hypothesis.ids, hypothesis.finished) for hypothesis in expected
    ]
    for hypothesis, other in zip(hypotheses, expected, strict=True):
        assert math.isclose(hypothesis.logprob, other.logprob, rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(hypothesis.score, other.score, rel_tol=1e-9, abs_tol=1e-9)


def beam_of(options: DecodingConfig, kind: type[Beam] = Beam, forbid: tuple[int, ...] = ()) -> Beam:
    return kind(
        eos=EOS,
        width=options.beam,
        keep=options.num_return_sequences,
        max_length=options.max_length,
        penalty=options.penalty,
        min_length=options.min_length,
        forbid=forbid,
    )


class Patient(Beam):
    """Never stops early."""

    def done(self, beams: ActiveBeams, pool: FinishedPool, length: int) -> Tensor:
        return torch.zeros_like(pool.score[:, 0], dtype=torch.bool)


class Hasty(Beam):
    """A wrong rule: stop as soon as the pool is full."""

    def done(self, beams: ActiveBeams, pool: FinishedPool, length: int) -> Tensor:
        return pool.score[:, -1] > float("-inf")


@st.composite
def searches(draw: st.DrawFn, exhaustive: bool = False) -> tuple[int, DecodingConfig]:
    """A vocabulary and options; exhaustive: a beam that holds every prefix."""
    vocab = draw(st.integers(2, 4 if exhaustive else 9))
    longest = draw(st.integers(1, {2: 6, 3: 4, 4: 3}[vocab] if exhaustive else 9))
    width = vocab**longest if exhaustive else draw(st.integers(1, 6))
    return vocab, DecodingConfig(
        beam=width,
        num_return_sequences=draw(st.integers(1, width)),
        length_penalty=draw(st.sampled_from(BIASES)),
        alpha=draw(st.sampled_from([0.0, 0.6, 1.0, 2.5])),
        max_length=longest,
        min_length=draw(st.integers(0, longest)),
    )


seeds = st.integers(0, 2**32)


class TestExhaustive:
    @steady
    @given(searches(exhaustive=True), seeds, st.booleans())
    def test_equals_brute_force(self, toy: Any, search: tuple[int, DecodingConfig], seed: int, bar: bool) -> None:
        vocab, options = search
        model, forbid = toy(vocab, seed), (vocab - 1,) if bar and vocab > 2 else ()
        prompts, sources = [(1,), (1, 1, 0)], [(3,), ()]
        hypotheses = beam_of(options, forbid=forbid).search(model, Tokens.pack(prompts), Tokens.pack(sources))
        for hypothesis, prompt, source in zip(hypotheses, prompts, sources, strict=True):
            assert_same(hypothesis, brute_force(model, prompt, options, source, forbid))

    def test_a_state_that_does_not_reorder_is_caught(self, toy: Any) -> None:
        options = DecodingConfig(beam=81, num_return_sequences=81, max_length=4)
        prompt = Tokens.pack([(1,)])
        expected = brute_force(toy(3, 5), (1,), options)
        assert_same(generate(toy(3, 5), prompt, EOS, options)[0], expected)
        with pytest.raises(AssertionError):
            assert_same(generate(toy(3, 5, forgets=True), prompt, EOS, options)[0], expected)

    def test_width_beyond_the_number_of_sequences_returns_each_once(self, toy: Any) -> None:
        options = DecodingConfig(beam=50, num_return_sequences=50, max_length=3)
        hypotheses = generate(toy(2, 1), Tokens.pack([(1,)]), EOS, options)[0]
        assert {hypothesis.ids for hypothesis in hypotheses} == {(), (1,), (1, 1), (1, 1, 1)}
        assert len(hypotheses) == 4
        assert all(math.isfinite(hypothesis.score) for hypothesis in hypotheses)


class TestRule:
    @steady
    @given(searches(), seeds)
    def test_equals_a_plain_beam_search(self, toy: Any, search: tuple[int, DecodingConfig], seed: int) -> None:
        vocab, options = search
        model = toy(vocab, seed)
        hypotheses = beam_of(options).search(model, Tokens.pack([(2, 1)]))
        assert_same(hypotheses[0], plain_beam(model, (2, 1), options))

    def test_an_ending_that_the_beam_would_prune_does_not_count(self, toy: Any) -> None:
        model = toy(
            4, table=lambda source, prefix: [-3.0, 0.0, -0.1, -0.2] if len(prefix) == 1 else [9.0, 0.0, 0.0, 0.0]
        )
        options = DecodingConfig(beam=3, num_return_sequences=3, length_penalty="none", max_length=5)
        hypotheses = generate(model, Tokens.pack([(1,)]), EOS, options)[0]
        assert [hypothesis.ids for hypothesis in hypotheses] == [(1,), (2,), (3,)]
        wide = options.model_copy(update={"beam": 4, "num_return_sequences": 4})
        assert () in [hypothesis.ids for hypothesis in generate(model, Tokens.pack([(1,)]), EOS, wide)[0]]

    def test_unfinished_hypotheses_come_last_whatever_their_score(self, toy: Any) -> None:
        model = toy(3, table=lambda source, prefix: [0.0, 2.0, -1.0])
        options = DecodingConfig(
            beam=2, num_return_sequences=2, length_penalty="average", alpha=1.0, max_length=2, min_length=1
        )
        ended, cut = generate(model, Tokens.pack([(1,)]), EOS, options)[0]
        assert (ended.ids, ended.finished) == ((1,), True)
        assert (cut.ids, cut.finished) == ((1, 1), False)
        assert cut.score > ended.score

    def test_a_model_that_never_ends_is_cut_off(self, toy: Any) -> None:
        model = toy(3, table=lambda source, prefix: [float("-inf"), 1.0, 0.0])
        options = DecodingConfig(beam=2, num_return_sequences=2, length_penalty="average", alpha=1.0, max_length=7)
        best, second = generate(model, Tokens.pack([(1,)]), EOS, options)[0]
        assert best.ids == (1,) * 7
        assert not best.finished
        assert not second.finished
        assert math.isclose(best.score, best.logprob / 7)
        assert best.score > second.score


class TestEarlyStop:
    @steady
    @given(searches(), seeds)
    def test_changes_no_answer(self, toy: Any, search: tuple[int, DecodingConfig], seed: int) -> None:
        vocab, options = search
        eager, patient = toy(vocab, seed), toy(vocab, seed)
        prompt = Tokens.pack([(1,), (1, 1), (0,)])
        assert beam_of(options).search(eager, prompt) == beam_of(options, Patient).search(patient, prompt)
        assert sum(eager.rows) <= sum(patient.rows)

    def test_saves_steps(self, toy: Any) -> None:
        options = DecodingConfig(beam=4, num_return_sequences=2, length_penalty="gnmt", max_length=40)
        eager, patient = toy(8, 3), toy(8, 3)
        prompt = Tokens.pack([(1,), (2,), (3,)])
        assert beam_of(options).search(eager, prompt) == beam_of(options, Patient).search(patient, prompt)
        assert sum(eager.rows) < sum(patient.rows) / 2

    def test_stopping_when_the_pool_is_full_would_change_it(self, toy: Any) -> None:
        first, later = [math.log(x) for x in (0.4, 0.5, 0.1)], [math.log(x) for x in (0.5, 0.49, 0.01)]
        model = toy(3, table=lambda source, prefix: first if len(prefix) == 1 else later)
        options = DecodingConfig(beam=2, length_penalty="average", alpha=1.0, max_length=4)
        prompt = Tokens.pack([(1,)])
        assert beam_of(options, Hasty).search(model, prompt)[0][0].ids == ()
        assert generate(model, prompt, EOS, options)[0][0].ids == (1,)
        assert_same(generate(model, prompt, EOS, options)[0], brute_force(model, (1,), options))

    def test_the_bound_needs_the_penalty_of_the_longest(self, toy: Any) -> None:
        """The bound logprob / lp(length now) is tempting and wrong: a longer hypothesis may gain by its length."""

        class Tempted(Beam):
            def done(self, beams: ActiveBeams, pool: FinishedPool, length: int) -> Tensor:
                return beams.logprob[:, 0] / self.penalty(1) <= pool.score[:, -1]

        sure = [-9.0, 9.0, -9.0]
        tables = {1: [math.log(x) for x in (0.4, 0.3, 0.3)], 2: sure, 3: sure, 4: [9.0, -9.0, -9.0]}
        model = toy(3, table=lambda source, prefix: tables[min(len(prefix), 4)])
        options = DecodingConfig(beam=2, length_penalty="average", alpha=1.0, max_length=6)
        prompt = Tokens.pack([(1,)])
        assert beam_of(options, Tempted).search(model, prompt)[0][0].ids == ()
        assert beam_of(options).search(model, prompt)[0][0].ids == (1, 1, 1)


class TestBatch:
    @steady
    @given(searches(), seeds, st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5))
    def test_equals_one_at_a_time(
        self, toy: Any, search: tuple[int, DecodingConfig], seed: int, sources: list[list[int]]
    ) -> None:
        vocab, options = search
        model = toy(vocab, seed)
        prompts = [[1] * (1 + place % 2) for place in range(len(sources))]
        together = generate(model, Tokens.pack(prompts), EOS, options, Tokens.pack(sources))
        for hypotheses, prompt, source in zip(together, prompts, sources, strict=True):
            alone = generate(model, Tokens.pack([prompt]), EOS, options, Tokens.pack([source]))
            assert_same(hypotheses, alone[0])

    def test_finished_sources_leave_the_batch(self, toy: Any) -> None:
        def table(source: tuple[int, ...], prefix: tuple[int, ...]) -> list[float]:
            return [20.0, 0.0, -1.0, -2.0] if len(prefix) > source[0] else [-20.0, 0.0, -1.0, -2.0]

        model = toy(4, table=table)
        options = DecodingConfig(beam=3, length_penalty="none", max_length=20)
        sources = [[6], [2], [4], [2]]
        hypotheses = generate(model, Tokens.pack([[1]] * 4), EOS, options, Tokens.pack(sources))
        assert [len(hypothesis[0].ids) for hypothesis in hypotheses] == [6, 2, 4, 2]
        assert model.rows == [12, 12, 6, 6, 3, 3]

    def test_nothing_in_nothing_out(self, toy: Any) -> None:
        assert generate(toy(4), Tokens.pack([]), EOS, DecodingConfig(beam=3)) == []


class TestNumbers:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_adds_in_float32(self, toy: Any, dtype: torch.dtype) -> None:
        options = DecodingConfig(beam=3, num_return_sequences=3, max_length=60, min_length=50)
        model, prompt = toy(6, 2, dtype=dtype), Tokens.pack([(1,)])
        for hypothesis in generate(model, prompt, EOS, options)[0]:
            tokens, total = (*hypothesis.ids, EOS) if hypothesis.finished else hypothesis.ids, 0.0
            for place, token in enumerate(tokens):
                logits = torch.tensor(model.logits((), (1, *tokens[:place]))).to(dtype).double()
                total += float(logits.log_softmax(-1)[token])
            assert math.isclose(hypothesis.logprob, total, rel_tol=1e-5)

    def test_refuses_nan(self, toy: Any) -> None:
        model = toy(3, table=lambda source, prefix: [float("nan")] * 3)
        with pytest.raises(WeftError, match="not numbers"):
            generate(model, Tokens.pack([(1,)]), EOS, DecodingConfig(beam=2, max_length=3))

    def test_makes_no_graph(self, toy: Any) -> None:
        weight = torch.ones((), requires_grad=True)
        inner, needs_grad = toy(5, 4), []

        class Trained:
            def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, Any]:
                logits, state = inner.start(prompt, source)
                needs_grad.append((logits * weight).requires_grad)
                return logits * weight, state

            def step(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
                logits, state = inner.step(ids, state)
                return logits * weight, state

        generate(Trained(), Tokens.pack([(1,)]), EOS, DecodingConfig(beam=2, max_length=3))
        assert needs_grad == [False]
