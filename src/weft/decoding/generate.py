"""Text generation: greedy search, sampling and streaming; `generate` also calls beam search.

A search uses a model's `start` and `step` alone (weft.models.base.Generator). The rows of a batch step together, and a
row leaves the batch when it ends.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.decoding import cuda_graph
from weft.decoding.beam_search import Beam, Hypothesis
from weft.decoding.config import DecodingConfig
from weft.decoding.cuda_graph import capturable
from weft.decoding.logits_processors import (
    NEG_INF,
    ForbiddenTokens,
    HistoryConstraints,
    TokenHistory,
    apply_temperature,
    force_eos,
    log_probs,
    split_bad_words,
    top_k,
    top_p,
)
from weft.decoding.static_state import BeamState, GreedyRules, GreedyState, Pick
from weft.errors import ConfigError, DataError
from weft.models.base import Generator
from weft.tokens import Tokens

__all__ = ["Hypothesis", "generate", "stream"]


def generate(
    model: Generator,
    prompt: Tokens,
    eos: int,
    options: DecodingConfig,
    source: Tokens | None = None,
    forbid: Sequence[int] = (),
    rows: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[list[Hypothesis]]:
    """Return the candidates of each sequence, best first; ids in `forbid` are never produced.

    `bad_words` are the token sequences of `options.bad_words`, which are never produced either.

    A sample depends on `options.seed`, on the number of its sequence in `rows` (by default its index in the batch) and
    on the index of the candidate, not on its neighbours: a list that is sorted and split into batches gives the same
    samples as the whole.
    """
    assert not rows or len(rows) == len(prompt), "a number for each sequence"
    if not len(prompt):
        return []
    rules = search_rules(eos, options, forbid, bad_words, rows or range(len(prompt)), prompt.device)
    captured = options.graph_compatible and capturable(model, prompt)
    if isinstance(rules, Beam):
        return (
            cuda_graph.search(model, BeamState, rules, prompt, source)  # type: ignore[arg-type]
            if captured
            else rules.search(model, prompt, source)
        )
    if captured:
        groups = cuda_graph.search(model, GreedyState, rules, prompt, source)  # type: ignore[arg-type]
        hypotheses = [hypothesis for group in groups for hypothesis in group]
    else:
        hypotheses = _decode_all(model, rules, prompt, source)
    copies = options.num_return_sequences
    return [best_first(hypotheses[start : start + copies]) for start in range(0, len(hypotheses), copies)]


def search_rules(
    eos: int,
    options: DecodingConfig,
    forbid: Sequence[int],
    bad_words: Sequence[Sequence[int]],
    rows: Sequence[int],
    device: torch.device,
) -> Beam | GreedyRules:
    """Return the settings of a search: of a beam search, or of greedy search or sampling for the numbers `rows`."""
    forbid, constraints = _constraints(options, forbid, bad_words)
    if options.beam == 1:
        return _greedy_rules(eos, options, forbid, constraints, rows, device)
    return Beam(
        eos=eos,
        width=options.beam,
        keep=options.num_return_sequences,
        max_length=options.max_length,
        penalty=options.penalty,
        min_length=options.min_length,
        forbid=tuple(forbid),
        early_stopping=options.early_stopping,
        renormalize_logits=options.renormalize_logits,
        finish=options.finish,
        constraints=constraints,
    )


def stream(
    model: Generator,
    prompt: Tokens,
    eos: int,
    options: DecodingConfig,
    source: Tokens | None = None,
    forbid: Sequence[int] = (),
    row: int = 0,
    bad_words: Sequence[Sequence[int]] = (),
) -> Iterator[int]:
    """Yield the ids of one sequence as they are chosen, greedily or by sampling: what `generate` gives for `row`."""
    if len(prompt) != 1 or options.beam > 1 or options.num_return_sequences > 1:
        raise ConfigError(
            "decode: a stream is one sequence with beam: 1 and num_return_sequences: 1, but was asked for "
            f"{len(prompt)} with beam: {options.beam} and num_return_sequences: {options.num_return_sequences}; "
            "ask for whole answers"
        )
    forbid, constraints = _constraints(options, forbid, bad_words)
    rules = _greedy_rules(eos, options, forbid, constraints, (row,), prompt.device)
    steps = map(_check_step, _decode_steps(model, rules, prompt, source))
    return (token for step in steps if (token := int(step.token)) != eos)


def _check_step(step: "_DecodeStep") -> "_DecodeStep":
    """Return a step; raise if the model's own probability of the token is no number."""
    if not math.isfinite(float(step.logprob)):
        raise DataError("the model computes NaN or infinite numbers for this prompt; use another checkpoint")
    return step


def _constraints(
    options: DecodingConfig, forbid: Sequence[int], bad_words: Sequence[Sequence[int]]
) -> tuple[list[int], HistoryConstraints]:
    """Return the forbidden ids with the bad words of one token, and what depends on the tokens so far."""
    assert bool(options.bad_words) or not bad_words, "the token sequences of options.bad_words"
    single, sequences = split_bad_words(bad_words)
    return [*forbid, *single], HistoryConstraints(options.repetition_penalty, options.no_repeat_ngram_size, sequences)


def _greedy_rules(
    eos: int,
    options: DecodingConfig,
    forbid: Sequence[int],
    constraints: HistoryConstraints,
    rows: Sequence[int],
    device: torch.device,
) -> GreedyRules:
    """Return the settings of greedy search, or of sampling with all its uniform numbers, drawn at once."""
    rules = GreedyRules(
        eos,
        options.max_length,
        options.penalty,
        options.min_length,
        tuple(forbid),
        options.num_return_sequences,
        options.renormalize_logits,
        options.finish,
        constraints,
    )
    if not options.sample:
        return rules
    sampling = options.temperature, options.top_k, options.top_p
    return replace(rules, pick=_sampler(*sampling), uniform=_uniform_draws(options, rows).to(device), pick_key=sampling)


class _DecodeStep(NamedTuple):
    row: Tensor  # (A,) the rows that are still in the batch
    token: Tensor  # (A,) the tokens chosen for them
    logprob: Tensor  # (A,) the model's own log-probabilities of these


@torch.no_grad()
def _decode_steps(model: Generator, rules: GreedyRules, prompt: Tokens, source: Tokens | None) -> Iterator[_DecodeStep]:
    """Yield the tokens chosen at each step for each sequence and candidate, until eos or max_length."""
    logits, state = model.start(prompt, source)
    forbidden = ForbiddenTokens.for_logits(logits, rules.eos, rules.forbid, rules.min_length)
    row = torch.arange(len(prompt) * rules.copies, device=logits.device)
    if rules.copies > 1:
        prompts = row // rules.copies
        logits, state = logits[prompts], state.select(prompts)
    history = TokenHistory.of(prompt).select(row // rules.copies) if rules.constraints else None
    for written in range(rules.max_length):
        uniform = None if rules.uniform is None else rules.uniform[row, written]
        token, logprobs = choose_tokens(rules, logits, forbidden, written, uniform, history)
        yield _DecodeStep(row, token, logprobs.gather(1, token[:, None])[:, 0])
        if written + 1 == rules.max_length:
            return
        staying = (token != rules.eos).nonzero()[:, 0]  # the one sync of a step
        if len(staying) < len(row):
            row, token, state = row[staying], token[staying], state.select(staying)
            history = None if history is None else history.select(staying)
        if not len(row):
            return
        logits, state = model.step(token, state)
        history = None if history is None else history.append(token)


def choose_tokens(
    rules: GreedyRules,
    logits: Tensor,
    forbidden: ForbiddenTokens,
    written: int,
    uniform: Tensor | None,
    history: TokenHistory | None,
) -> tuple[Tensor, Tensor]:
    """Return the next token of each row (A,), and the log-probabilities (A, V) of all; `uniform` (A,): to draw by."""
    logprobs = log_probs(logits, forbidden.after(written), renormalize_logits=rules.renormalize_logits)
    scores = logprobs
    if history is not None:
        logprobs, scores = _constrain(rules, logits, logprobs, history)
    if rules.finish and written + 1 == rules.max_length:
        logprobs = scores = force_eos(logprobs, rules.eos)
    return rules.pick(scores, logprobs[:, 0] if uniform is None else uniform), logprobs


def _constrain(rules: GreedyRules, logits: Tensor, logprobs: Tensor, history: TokenHistory) -> tuple[Tensor, Tensor]:
    """Return the model's log-probabilities without banned tokens, and the scores that the next token is chosen by.

    As in transformers, the repetition penalty is of the logits, not of the log-probabilities.
    """
    logprobs = rules.constraints.ban(logprobs, history, rules.eos, logits)
    logprobs = logprobs.log_softmax(-1) if rules.renormalize_logits else logprobs
    if rules.constraints.repetition_penalty == 1:
        return logprobs, logprobs
    scores = rules.constraints.penalize(logits.to(logprobs.dtype), history)
    return logprobs, scores.masked_fill(logprobs == NEG_INF, NEG_INF)


def _decode_all(model: Generator, rules: GreedyRules, prompt: Tokens, source: Tokens | None) -> list[Hypothesis]:
    """Return the hypothesis of each row, put together from its steps."""
    row, token, logprob = (
        torch.cat(sequences).cpu() for sequences in zip(*_decode_steps(model, rules, prompt, source), strict=True)
    )
    num_rows = len(prompt) * rules.copies
    logprobs = torch.zeros(num_rows, dtype=torch.float64).index_add_(0, row, logprob.double()).tolist()
    sequences = torch.split(token[row.argsort(stable=True)], row.bincount(minlength=num_rows).tolist())
    return [rules.hypothesis(ids.tolist(), logprob) for ids, logprob in zip(sequences, logprobs, strict=True)]


def _uniform_draws(options: DecodingConfig, rows: Sequence[int]) -> Tensor:
    """Draw uniform numbers in [0, 1) by row, candidate and token (R, max_length): each row has its own seed."""
    generator = torch.Generator()
    draws = [
        torch.rand(options.max_length, generator=generator.manual_seed(_seed(options.seed, row, candidate)))
        for row in rows
        for candidate in range(options.num_return_sequences)
    ]
    return torch.stack(draws)


def _sampler(temperature: float, k: int | None, p: float | None) -> Pick:
    """Return a function that samples tokens by log-probabilities (A, V) and uniform numbers (A,)."""

    def pick(logprobs: Tensor, uniform: Tensor) -> Tensor:
        logits = apply_temperature(logprobs, temperature)
        logits = logits if k is None else top_k(logits, k)
        logits = logits if p is None else top_p(logits, p)
        return inverse_cdf(logits.softmax(-1), uniform)

    return pick


def _seed(*parts: int) -> int:
    """Hash numbers into one seed, so that the seeds of neighbouring rows are unrelated."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token at which the cumulative sum of `probs` (A, V) exceeds `uniform` (A,), in [0, 1)."""
    cdf = probs.cumsum(-1)
    level = uniform[:, None].to(cdf.dtype) * cdf[:, -1:]
    token = torch.searchsorted(cdf, level, right=True).clamp_(max=cdf.shape[-1] - 1)
    # A parallel sum may step up by rounding where a probability is 0: such a token must not be drawn.
    return torch.where(probs.gather(1, token) > 0, token, probs.argmax(-1, keepdim=True))[:, 0]


def best_first(candidates: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Sort the candidates of a sequence: finished ones first, by score."""
    return sorted(candidates, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score))
