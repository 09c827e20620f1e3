"""The head of a language model: its loss, how a text goes on, and what that costs token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from weft.config.schema import Section
from weft.decoding.generate import DecodingConfig, Hypothesis, generate, stream
from weft.errors import DataError, RoleError
from weft.models.base import Direction, Role
from weft.nn.layers.losses import cross_entropy_sum
from weft.tasks.base import Batch, Head, Sums
from weft.tasks.lm import scoring
from weft.tokens import Tokens


class Continue(DecodingConfig):
    """How a text goes on: it ends before the first stop word; `logprobs` gives the log-probability of each token."""

    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # nothing is found everywhere
    logprobs: bool = False


@dataclass(frozen=True)
class Continuation(Hypothesis):
    """What follows a prompt, token by token."""

    prompt: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    asked: Continue = field(default_factory=Continue)


class LMHead(Head):
    """The body alone: its own output layer scores the vocabulary."""

    def __init__(self, body: Any, eos: int, forbid: Sequence[int], carries: bool = False) -> None:
        super().__init__(body)
        self.eos, self.forbid, self.carries = eos, tuple(forbid), carries
        self.directions: tuple[Direction, ...] = type(body).directions(body.config)

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Sum the cross-entropy of what follows each token, and in other directions of what they give."""
        targets = scoring.targets_of(batch, self.directions)
        if self.carries:
            logits, state = self.body.read(batch.tokens, carry)
            return {"tokens": cross_entropy_sum(logits, targets[0])}, self.body.carried(state)
        sums = self.body.loss_each(batch.tokens, targets, self.directions)
        return dict(zip(parts_of(self.directions), sums, strict=True)), None

    def carry_parts(self, carry: Any) -> list[Tensor]:
        """The tensors of a state."""
        return [] if carry is None else list(carry.parts)

    def carry_of(self, parts: Sequence[Tensor]) -> Any:
        """The state of these."""
        return self.body.state_of(parts) if parts else None

    def predict(self, batch: Batch, options: Section) -> list[list[Continuation]]:
        """Search for how each text goes on."""
        assert isinstance(options, Continue)
        prompt, rows = self._prompt(batch), batch.rows or range(len(batch.tokens))
        read, found = prompt.split(), dict[int, list[Continuation]]()
        allowed = [self._within(len(one), options) for one in read]
        for asked in dict.fromkeys(allowed):  # a long text must not shorten what follows the others
            own = [row for row, one in enumerate(allowed) if one == asked]
            part = prompt if len(own) == len(read) else Tokens.flat(*_joined([read[row] for row in own]))
            groups = generate(self.body, part, self.eos, asked, None, self.forbid, [rows[row] for row in own])
            for row, group in zip(own, groups, strict=True):
                found[row] = [self._continued(tuple(read[row].tolist()), one, asked) for one in group]
        return [found[row] for row in range(len(read))]

    def scored(self, options: Section) -> int:
        """The vocabulary, for each hypothesis."""
        assert isinstance(options, Continue)
        vocab: int = self.body.vocab
        return vocab * max(options.beam, options.candidates)

    def stream(self, batch: Batch, options: Continue) -> Iterator[int]:
        """Yield the ids of one continuation as they are chosen."""
        batch = batch.to(scoring.device_of(self))
        prompt = self._prompt(batch)
        asked = self._within(prompt.longest, options)
        return stream(self.body, prompt, self.eos, asked, None, self.forbid, *batch.rows)

    def _prompt(self, batch: Batch) -> Tokens:
        """What is read: without the end, which stands in the batch of a model that goes both ways."""
        if Role.GENERATOR not in type(self.body).roles(self.body.config):
            raise RoleError(
                f"model: {self.body.config.name!r}, as configured, scores texts but does not generate; ask it by "
                "weft evaluate"
            )
        return batch.tokens if len(self.directions) == 1 else without_last(batch.tokens)

    def _within(self, length: int, options: Continue) -> Continue:
        """Generate no more than the model can read, after so many tokens."""
        most = getattr(self.body, "reads", None)
        if most is None or length + options.max_length - 1 <= most:
            return options
        if length > most:
            raise DataError(f"the text has {length} tokens, but the model reads {most}; give a shorter one")
        left = most - length + 1
        return options.model_copy(update={"max_length": left, "min_length": min(options.min_length, left)})

    def _continued(self, prompt: tuple[int, ...], one: Hypothesis, asked: Continue) -> Continuation:
        ids = [*one.ids, self.eos] if one.finished else list(one.ids)
        known: tuple[float, ...] = ()
        if ids and (asked.logprobs or asked.stop):
            whole = Tokens.pack([[*prompt, *ids[:-1]]]).to(scoring.device_of(self))
            targets = torch.tensor([*prompt[1:], *ids], device=whole.device)
            known = tuple(self.body.log_prob(whole, targets)[len(prompt) - 1 :].tolist())
        return Continuation(one.ids, one.logprob, one.score, one.finished, prompt, known, asked)


def parts_of(directions: Sequence[Direction]) -> list[str]:
    """Name the parts of the loss."""
    return ["tokens"] if len(directions) == 1 else list(directions)


def _joined(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(list(rows)), torch.tensor([len(row) for row in rows])


def without_last(tokens: Tokens) -> Tokens:
    """Leave out the last token of each sequence."""
    keep = torch.ones(len(tokens.ids), dtype=torch.bool, device=tokens.device)
    keep[tokens.starts[1:].long() - 1] = False
    kept = Tokens.flat(tokens.ids[keep], tokens.lengths - 1)
    return kept if tokens.chars is None else replace(kept, chars=tokens.chars[keep])
