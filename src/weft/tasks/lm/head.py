"""Language-model head: loss, continuation of prompts, and log-probabilities of the tokens of a continuation."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from weft.config.schema import Section
from weft.decoding.config import DecodingConfig
from weft.decoding.continuous import GenerationRequest
from weft.decoding.generate import Hypothesis, generate
from weft.errors import DataError, RoleError
from weft.models.base import LMDirection, Role
from weft.nn.layers.losses import cross_entropy_sum, soft_cross_entropy_sum
from weft.tasks.bad_words import BadWords, bad_word_ids
from weft.tasks.batch import IGNORE_INDEX, Batch
from weft.tasks.head import Sums
from weft.tasks.lm import scoring
from weft.tasks.soft_targets import SoftTargetHead
from weft.tokens import Tokens


class ContinuationConfig(DecodingConfig):
    """Options of a continuation: it ends before the first stop word; `logprobs` adds each token's log-probability.

    It is sampled by default: the most probable text of a language model repeats itself (Holtzman et al. 2020).
    """

    sample: bool = True
    temperature: float = Field(0.7, gt=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(0.95, gt=0, le=1)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # an empty string would match everywhere
    logprobs: bool = False  # whether answers have each token's log-probability


@dataclass(frozen=True)
class Continuation(Hypothesis):
    """A hypothesis with its prompt and the log-probability of each token."""

    prompt: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    options: ContinuationConfig = field(default_factory=ContinuationConfig)


class LMHead(SoftTargetHead):
    """The body alone, with its own output projection to the vocabulary."""

    def __init__(
        self, body: Any, eos: int, forbid: Sequence[int], carries: bool = False, bad_words: BadWords | None = None
    ) -> None:
        super().__init__(body)
        self.eos, self.forbid, self.carries = eos, tuple(forbid), carries
        self.bad_words = bad_words  # the tokens of texts
        self.directions: tuple[LMDirection, ...] = type(body).directions(body.config)
        self.has_soft_targets, self.has_states = not carries and self.directions == ("forward",), False

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the summed cross-entropy of the targets of each direction (of the next token, forward)."""
        targets = scoring.targets_of(batch, self.directions)
        if self.carries:
            logits, state = self.body.read(batch.tokens, carry)
            return {"tokens": cross_entropy_sum(logits, targets[0])}, self.body.carried(state)
        sums = self.body.loss_each(batch.tokens, targets, self.directions)
        return dict(zip(loss_names(self.directions), sums, strict=True)), None

    def read(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the next tokens, (N, V)."""
        return self.body.logits(batch.tokens), None

    def losses(self, logits: Tensor, batch: Batch) -> Sums:
        """Return the summed cross-entropy of the next tokens."""
        return {"tokens": cross_entropy_sum(logits, scoring.targets_of(batch, self.directions)[0])}

    def soft_losses(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Sums:
        """Return the distance from a teacher's distributions, summed over the tokens that have a next one."""
        has_next = scoring.targets_of(batch, self.directions)[0] != IGNORE_INDEX
        return {"tokens": soft_cross_entropy_sum(logits[has_next], teacher[has_next], temperature)}

    def carry_tensors(self, carry: Any) -> list[Tensor]:
        """Return the tensors of a carried state."""
        return [] if carry is None else list(carry.parts)

    def carry_from_tensors(self, parts: Sequence[Tensor]) -> Any:
        """Return the carried state made of these tensors."""
        return self.body.state_of(parts) if parts else None

    def predict(self, batch: Batch, options: Section) -> list[list[Continuation]]:
        """Return the continuations of each prompt, best first."""
        assert isinstance(options, ContinuationConfig)
        prompt, rows = self._prompt(batch), batch.rows or range(len(batch.tokens))
        prompts, continuations = prompt.split(), dict[int, list[Continuation]]()
        limited = [self._limit_length(len(ids), options) for ids in prompts]
        bad_words = bad_word_ids(self.bad_words, options)
        for limit in dict.fromkeys(limited):  # a long prompt must not shorten the other continuations
            members = [row for row, limits in enumerate(limited) if limits == limit]
            subset = (
                prompt if len(members) == len(prompts) else Tokens.flat(*_concat([prompts[row] for row in members]))
            )
            numbers = [rows[row] for row in members]
            groups = generate(self.body, subset, self.eos, limit, None, self.forbid, numbers, bad_words)
            for row, group in zip(members, groups, strict=True):
                ids = tuple(prompts[row].tolist())
                continuations[row] = [self._to_continuation(ids, hypothesis, limit) for hypothesis in group]
        return [continuations[row] for row in range(len(prompts))]

    def logits_per_item(self, options: Section) -> int:
        """Return the number of logits a step: the vocabulary, for each hypothesis."""
        assert isinstance(options, ContinuationConfig)
        vocab: int = self.body.vocab
        return vocab * max(options.beam, options.num_return_sequences)

    def generation_request(self, batch: Batch, options: ContinuationConfig) -> GenerationRequest:
        """Return what to generate for a batch of one prompt."""
        prompt = self._prompt(batch)
        limited = self._limit_length(prompt.longest, options)
        row = batch.rows[0] if batch.rows else 0
        bad_words = tuple(bad_word_ids(self.bad_words, options))
        return GenerationRequest(prompt, self.eos, limited, None, self.forbid, bad_words, row)

    def continuation(self, request: GenerationRequest, hypothesis: Hypothesis) -> Continuation:
        """Return what was generated for a request, with the log-probabilities that its options ask for."""
        assert isinstance(request.options, ContinuationConfig)
        return self._to_continuation(tuple(request.prompt.ids.tolist()), hypothesis, request.options)

    def _prompt(self, batch: Batch) -> Tokens:
        """Return the prompts: without eos, which the batch of a bidirectional model has."""
        if Role.GENERATOR not in type(self.body).roles(self.body.config):
            raise RoleError(
                f"model: {self.body.config.name!r}, as configured, scores texts but does not generate; ask it by "
                "weft evaluate"
            )
        return batch.tokens if len(self.directions) == 1 else drop_last_token(batch.tokens)

    def _limit_length(self, length: int, options: ContinuationConfig) -> ContinuationConfig:
        """Return the options with max_length limited to the model's positions after `length` tokens."""
        max_positions = getattr(self.body, "max_positions", None)
        if max_positions is None or length + options.max_length - 1 <= max_positions:
            return options
        if length > max_positions:
            raise DataError(f"the text has {length} tokens, but the model reads {max_positions}; give a shorter one")
        max_length = max_positions - length + 1
        return options.model_copy(update={"max_length": max_length, "min_length": min(options.min_length, max_length)})

    def _to_continuation(
        self, prompt: tuple[int, ...], hypothesis: Hypothesis, options: ContinuationConfig
    ) -> Continuation:
        ids = [*hypothesis.ids, self.eos] if hypothesis.finished else list(hypothesis.ids)
        logprobs: tuple[float, ...] = ()
        penalized = options.beam > 1 and options.repetition_penalty != 1  # such a search has no log-probability
        if ids and (options.logprobs or options.stop or penalized):
            tokens = Tokens.pack([[*prompt, *ids[:-1]]]).to(self.device)
            targets = torch.tensor([*prompt[1:], *ids], device=tokens.device)
            logprobs = tuple(self.body.log_prob(tokens, targets)[len(prompt) - 1 :].tolist())
        logprob = sum(logprobs) if penalized else hypothesis.logprob
        return Continuation(hypothesis.ids, logprob, hypothesis.score, hypothesis.finished, prompt, logprobs, options)


def loss_names(directions: Sequence[LMDirection]) -> list[str]:
    """Return the names of the parts of the loss."""
    return ["tokens"] if len(directions) == 1 else list(directions)


def _concat(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(list(rows)), torch.tensor([len(row) for row in rows])


def drop_last_token(tokens: Tokens) -> Tokens:
    """Return the tokens without the last of each sequence."""
    keep = torch.ones(len(tokens.ids), dtype=torch.bool, device=tokens.device)
    keep[tokens.starts[1:].long() - 1] = False
    shortened = Tokens.flat(tokens.ids[keep], tokens.lengths - 1)
    return shortened if tokens.chars is None else replace(shortened, chars=tokens.chars[keep])
