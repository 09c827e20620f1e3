"""Decoding options of transformers: early stopping, renormalized logits, and a forced eos at max_length."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.decoding.config import DecodingConfig
from weft.decoding.generate import generate, stream
from weft.tokens import Tokens

EOS = 0
PROMPT = Tokens.pack([[1]])
steady = settings(max_examples=40, deadline=None, derandomize=True)


def searched(model: Any, options: DecodingConfig, forbid: tuple[int, ...] = ()) -> list[Any]:
    return generate(model, PROMPT, EOS, options, None, forbid)[0]


def plain(model: Any, options: DecodingConfig, forbid: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
    """Search as transformers does, in plain Python: return the texts in the pool, best first, and their scores."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, options.max_length + 1):
        hypotheses = []
        for total, ids in live:
            mass = model.logprobs((), (1, *ids)).copy()
            mass[list(forbid)] = -math.inf
            mass -= math.log(sum(math.exp(logprob) for logprob in mass)) if options.renormalize_logits else 0.0
            if length == options.max_length and options.finish:
                mass[:] = -math.inf
                mass[EOS] = 0.0
            hypotheses += [
                (total + float(logprob), (*ids, token)) for token, logprob in enumerate(mass) if logprob > -math.inf
            ]
        ordered = sorted(hypotheses, reverse=True)
        ends = [(total / options.penalty(length), ids[:-1]) for total, ids in ordered[: options.beam] if ids[-1] == EOS]
        pool = sorted(pool + ends, reverse=True)[: options.beam]
        live = [hypothesis for hypothesis in ordered if hypothesis[1][-1] != EOS][: options.beam]
        full = len(pool) == options.beam
        better = bool(live) and live[0][0] / options.penalty(length) > pool[-1][0] if full else True
        if not live or (full and (options.early_stopping == "first" or not better)):
            break
    return [(ids, score) for score, ids in pool[: options.num_return_sequences]]


@st.composite
def early(draw: st.DrawFn) -> tuple[int, DecodingConfig, tuple[int, ...]]:
    beam = draw(st.integers(2, 4))
    options = DecodingConfig(
        beam=beam,
        num_return_sequences=draw(st.integers(1, beam)),
        length_penalty="average",
        alpha=draw(st.sampled_from([0.0, 0.6, 1.0, 2.0])),
        max_length=draw(st.integers(1, 7)),
        early_stopping=draw(st.sampled_from(["soon", "first"])),
        renormalize_logits=draw(st.booleans()),
        finish=True,
    )
    return draw(st.integers(0, 1000)), options, draw(st.sampled_from([(), (2,), (2, 3)]))


def check(toy: Any, seed: int, options: DecodingConfig, forbid: tuple[int, ...]) -> None:
    model = toy(6, seed)
    hypotheses = [
        (hypothesis.ids, hypothesis.score) for hypothesis in searched(model, options, forbid) if hypothesis.finished
    ]
    must = plain(model, options, forbid)
    assert [ids for ids, _ in hypotheses] == [ids for ids, _ in must]
    assert [score for _, score in hypotheses] == pytest.approx([score for _, score in must])


def test_beams_stop_as_transformers_stops(toy):
    @steady
    @given(early())
    def each(drawn):
        check(toy, *drawn)

    each()


def test_another_stop_is_caught(toy):
    """The negative control: each of the rules gives its own answers."""
    texts = {}
    for stopping in ("sure", "soon", "first"):
        options = DecodingConfig(beam=3, length_penalty="average", alpha=1.0, max_length=9, early_stopping=stopping)
        texts[stopping] = [searched(toy(6, seed), options)[0].ids for seed in range(60)]
    assert len({tuple(hypotheses) for hypotheses in texts.values()}) == 3


@pytest.mark.parametrize("beam", [1, 2, 3])
def test_a_text_that_must_end_ends(toy, beam):
    """Its last token has log-probability 0: it is forced."""
    never = toy(4, table=lambda source, prefix: [-50.0, 0.0, 1.0, 2.0])
    cut = searched(never, DecodingConfig(beam=beam, max_length=4))[0]
    ended = searched(never, DecodingConfig(beam=beam, max_length=4, finish=True))[0]
    assert (len(cut.ids), cut.finished) == (4, False)
    assert (len(ended.ids), ended.finished) == (3, True)
    best = 2.0 - math.log(sum(math.exp(logit) for logit in (-50.0, 0.0, 1.0, 2.0)))
    assert ended.logprob == pytest.approx(3 * best)


def test_a_stream_ends_where_a_text_must(toy):
    never = toy(4, table=lambda source, prefix: [-50.0, 0.0, 1.0, 2.0])
    assert list(stream(never, PROMPT, EOS, DecodingConfig(max_length=4, finish=True))) == [3, 3, 3]


@pytest.mark.parametrize("options", [{}, {"sample": True, "seed": 3}, {"beam": 2}])
def test_what_is_barred_leaves_its_share_to_the_others(toy, options):
    model = toy(3, table=lambda source, prefix: [0.0, 1.0, 5.0])
    unscaled, scaled = (
        searched(model, DecodingConfig(max_length=1, renormalize_logits=rescale, **options), forbid=(1, 2))[0]
        for rescale in (False, True)
    )
    assert unscaled.ids == scaled.ids == ()
    assert unscaled.logprob == pytest.approx(-math.log(1 + math.e + math.exp(5)))
    assert scaled.logprob == pytest.approx(0.0)


def test_before_its_least_length_the_end_is_barred_and_scaled_too(toy):
    model = toy(3, table=lambda source, prefix: [5.0, 1.0, 1.0])
    hypotheses = searched(model, DecodingConfig(max_length=2, min_length=1, renormalize_logits=True))[0]
    sure = 5.0 - math.log(math.exp(5.0) + 2 * math.e)
    assert hypotheses.logprob == pytest.approx(math.log(0.5) + sure)
    assert torch.isfinite(torch.tensor(hypotheses.logprob))
