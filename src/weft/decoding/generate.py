"""From a model's distributions to sequences: greedy, sampled, streamed; `generate` also hands over to beam search.

Search knows a model by `start` and `step` alone (weft.models.base.Generator). The rows of a batch step together, and a
row leaves the batch when it ends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from weft.config.schema import Section
from weft.decoding import cuda_graph
from weft.decoding.beam_search import Beam, Hypothesis, Stopping
from weft.decoding.cuda_graph import capturable
from weft.decoding.logits_processors import ForbiddenTokens, apply_temperature, ending, log_probs, top_k, top_p
from weft.decoding.static_state import BeamState, GreedyState, Pick, Walking
from weft.errors import ConfigError
from weft.models.base import Generator
from weft.tokens import Tokens

__all__ = ["DecodingConfig", "Hypothesis", "generate", "stream"]


class DecodingConfig(Section):
    """How to decode: part of a task's recipe and of each call."""

    beam: int = Field(1, ge=1)  # 1: greedy, or sampled
    candidates: int = Field(1, ge=1)  # how many a sequence are returned: the best of the beam, or so many samples
    length_bias: Literal["none", "gnmt", "average"] = "gnmt"
    alpha: float = Field(0.6, ge=0, le=10)  # how much length counts; average with 1 is the mean log-probability a token
    max_length: int = Field(256, ge=1, le=100_000)  # tokens produced, eos included
    min_length: int = Field(0, ge=0)  # tokens produced before eos may be
    finish: bool = False  # whether max_length ends a text with eos, rather than cutting it off
    rescale: bool = False  # whether tokens that may not be produced leave their probability to the others
    stopping: Stopping = "sure"  # of a beam search (weft.decoding.beam_search)
    sample: bool = False
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _agree(self) -> "DecodingConfig":
        if self.sample and self.beam > 1:
            raise ValueError(
                f"sample draws and beam searches, so sample needs beam: 1, but beam is {self.beam} instead"
            )
        if not self.sample and self.candidates > self.beam:
            raise ValueError(
                f"candidates must be at most beam, unless sample is true: got {self.candidates} and {self.beam}; "
                f"try beam: {self.candidates}"
            )
        if self.min_length > self.max_length:
            raise ValueError(f"min_length must be at most max_length: got {self.min_length} and {self.max_length}")
        return self

    @property
    def plain(self) -> bool:
        """Whether it is a search that can be captured (weft.decoding.cuda_graph)."""
        return self.stopping == "sure" and not (self.rescale or self.finish)

    def penalty(self, length: int) -> float:
        """Return lp, what a log-probability is divided by: gnmt is Wu et al. 2016, eq. 14. `length` counts eos."""
        base = {"none": 1.0, "gnmt": (5 + length) / 6, "average": float(length)}[self.length_bias]
        return float(base**self.alpha)


def generate(
    model: Generator,
    prompt: Tokens,
    eos: int,
    options: DecodingConfig,
    source: Tokens | None = None,
    forbid: Sequence[int] = (),
    rows: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Return the candidates of each sequence, best first; ids in `forbid` are never produced.

    A sample depends on `options.seed`, on the number of its sequence in `rows` (its place in the batch, where none are
    given) and on which of the candidates it is, not on its neighbours: a list that is sorted and cut into batches gives
    the samples that it gives whole.
    """
    assert not rows or len(rows) == len(prompt), "a number for each sequence"
    if not len(prompt):
        return []
    if options.beam > 1:
        beam = Beam(
            eos=eos,
            width=options.beam,
            keep=options.candidates,
            max_length=options.max_length,
            penalty=options.penalty,
            min_length=options.min_length,
            forbid=tuple(forbid),
            stopping=options.stopping,
            rescale=options.rescale,
            finish=options.finish,
        )
        if options.plain and capturable(model, prompt):
            return cuda_graph.search(model, BeamState, beam, prompt, source)
        return beam.search(model, prompt, source)
    rules = _walking(eos, options, forbid, rows or range(len(prompt)), prompt.device)
    if options.plain and capturable(model, prompt):
        found = [one for group in cuda_graph.search(model, GreedyState, rules, prompt, source) for one in group]
    else:
        found = _walk_all(model, rules, prompt, source)
    return _best_first(found, options.candidates)


def stream(
    model: Generator,
    prompt: Tokens,
    eos: int,
    options: DecodingConfig,
    source: Tokens | None = None,
    forbid: Sequence[int] = (),
    row: int = 0,
) -> Iterator[int]:
    """Yield the ids of one sequence as they are chosen, greedily or by sampling: what `generate` gives for `row`."""
    if len(prompt) != 1 or options.beam > 1 or options.candidates > 1:
        raise ConfigError(
            "decode: a stream is one sequence with beam: 1 and candidates: 1, but was asked for "
            f"{len(prompt)} with beam: {options.beam} and candidates: {options.candidates}; ask for whole answers"
        )
    steps = _walk(model, _walking(eos, options, forbid, (row,), prompt.device), prompt, source)
    return (token for step in steps if (token := int(step.token)) != eos)


def _walking(
    eos: int, options: DecodingConfig, forbid: Sequence[int], rows: Sequence[int], device: torch.device
) -> Walking:
    """Set a greedy search up, or a sampled one, for which every number that it can need is drawn at once."""
    rules = Walking(
        eos,
        options.max_length,
        options.penalty,
        options.min_length,
        tuple(forbid),
        options.candidates,
        options.rescale,
        options.finish,
    )
    if not options.sample:
        return rules
    picking = options.temperature, options.top_k, options.top_p
    return replace(rules, pick=_picker(*picking), uniform=_draws(options, rows).to(device), picking=picking)


class _Step(NamedTuple):
    row: Tensor  # (A,) the rows that are still in the batch
    token: Tensor  # (A,) what was chosen for them
    logprob: Tensor  # (A,) the model's own log-probability of it


@torch.no_grad()
def _walk(model: Generator, rules: Walking, prompt: Tokens, source: Tokens | None) -> Iterator[_Step]:
    """Choose token after token for each sequence and candidate, until eos or max_length."""
    logits, state = model.start(prompt, source)
    barred = ForbiddenTokens.over(logits, rules.eos, rules.forbid, rules.min_length)
    row = torch.arange(len(prompt) * rules.copies, device=logits.device)
    if rules.copies > 1:
        copies = row // rules.copies
        logits, state = logits[copies], state.select(copies)
    for written in range(rules.max_length):
        logprobs = log_probs(logits, barred.after(written), rescale=rules.rescale)
        if rules.finish and written + 1 == rules.max_length:
            logprobs = ending(logprobs, rules.eos)
        token = rules.pick(logprobs, logprobs[:, 0] if rules.uniform is None else rules.uniform[row, written])
        yield _Step(row, token, logprobs.gather(1, token[:, None])[:, 0])
        if written + 1 == rules.max_length:
            return
        stay = (token != rules.eos).nonzero()[:, 0]  # the one sync of a step
        if len(stay) < len(row):
            row, token, state = row[stay], token[stay], state.select(stay)
        if not len(row):
            return
        logits, state = model.step(token, state)


def _walk_all(model: Generator, rules: Walking, prompt: Tokens, source: Tokens | None) -> list[Hypothesis]:
    """Put the steps of each row together."""
    row, token, logprob = (torch.cat(parts).cpu() for parts in zip(*_walk(model, rules, prompt, source), strict=True))
    rows = len(prompt) * rules.copies
    total = torch.zeros(rows, dtype=torch.float64).index_add_(0, row, logprob.double()).tolist()
    parts = torch.split(token[row.argsort(stable=True)], row.bincount(minlength=rows).tolist())
    return [rules.hypothesis(ids.tolist(), logprob) for ids, logprob in zip(parts, total, strict=True)]


def _draws(options: DecodingConfig, rows: Sequence[int]) -> Tensor:
    """Draw from [0, 1) for each row, candidate and token (R, max_length): each row has a generator of its own."""
    generator = torch.Generator()
    draws = [
        torch.rand(options.max_length, generator=generator.manual_seed(_seed(options.seed, row, candidate)))
        for row in rows
        for candidate in range(options.candidates)
    ]
    return torch.stack(draws)


def _picker(temperature: float, best: int | None, mass: float | None) -> Pick:
    """Sample by log-probabilities (A, V) and a number a row (A,)."""

    def pick(logprobs: Tensor, uniform: Tensor) -> Tensor:
        kept = apply_temperature(logprobs, temperature)
        kept = kept if best is None else top_k(kept, best)
        kept = kept if mass is None else top_p(kept, mass)
        return _inverse_cdf(kept.softmax(-1), uniform)

    return pick


def _seed(*parts: int) -> int:
    """Mix numbers into one seed, so that neighbouring rows get unrelated ones."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def _inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token at which the running sum of `probs` (A, V) exceeds `uniform` (A,), a number in [0, 1)."""
    cdf = probs.cumsum(-1)
    level = uniform[:, None].to(cdf.dtype) * cdf[:, -1:]
    token = torch.searchsorted(cdf, level, right=True).clamp_(max=cdf.shape[-1] - 1)
    # A parallel sum may step up by rounding where a probability is 0: such a token must not be drawn.
    return torch.where(probs.gather(1, token) > 0, token, probs.argmax(-1, keepdim=True))[:, 0]


def _best_first(found: Sequence[Hypothesis], candidates: int) -> list[list[Hypothesis]]:
    """Put the candidates of each sequence together: finished ones first, by score."""
    groups = [found[at : at + candidates] for at in range(0, len(found), candidates)]
    return [sorted(group, key=lambda one: (not one.finished, -one.score)) for group in groups]
