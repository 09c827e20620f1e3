"""What a model is asked while its properties are checked."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.config.schema import Named
from weft.models.base import Direction, Model, Role
from weft.tokens import Tokens, spell

LENGTHS, SOURCE_LENGTHS = (4, 1, 7, 3), (3, 6, 1, 5)
Rows = Sequence[Sequence[int]]
Answers = dict[str, list[Tensor]]  # for each method, one tensor a sequence


class Case:
    """A model, a ragged batch for it, and ways to ask for what its roles promise."""

    def __init__(self, kind: type[Model], config: Named, vocab: int, target_vocab: int | None = None) -> None:
        self.kind, self.config, self.roles = kind, config, kind.roles(config)
        says = bool({Role.LANGUAGE_MODEL, Role.MASKED_LM} & set(self.roles))
        self.directions: tuple[Direction, ...] = kind.directions(config) if says else ()
        self.promises: set[Role | str] = {*self.roles, *self.directions}
        self.target_vocab = target_vocab or vocab
        self._sizes = (vocab,) if target_vocab is None else (vocab, target_vocab)
        self.model: Any = self.fresh()
        self.rows = [self.draw(length) for length in LENGTHS]
        self.sources = [torch.randint(vocab, (length,)).tolist() for length in SOURCE_LENGTHS]
        self.other_sources = [[(token + 1) % vocab for token in source] for source in self.sources]

    def fresh(self) -> Model:
        """Make a model with new random weights."""
        model = self.kind(self.config, *self._sizes).double().eval()
        model.keep(set(self.roles) - {Role.SELF_FITTED})  # what only a fit of its own uses gets no gradient
        if self.kind.uses_chars(self.config):  # as the tokens of `reads` are
            words = Tokens.pack([range(self.target_vocab)]).spelt([_spelt(range(self.target_vocab))])
            assert words.chars is not None
            model.set_char_table(words.chars)
        return model

    def draw(self, length: int) -> Any:
        """Draw ids for the model to read; one with a source reads the ids that it writes."""
        return torch.randint(self.target_vocab, (length,)).tolist()

    def reads(self, rows: Rows, sources: Rows) -> list[Tokens]:
        """Pack what the methods take: the rows, and with the role a source; spelt out, if the model asks for it."""
        packed = [Tokens.pack(rows)] + ([Tokens.pack(sources)] if Role.SEQ2SEQ in self.roles else [])
        if not self.kind.uses_chars(self.config):
            return packed
        return [one.spelt([_spelt(own.tolist()) for own in one.split()]) for one in packed]

    def answers(self, rows: Rows, sources: Rows, model: Any = None) -> Answers:
        """Ask for all that the roles promise."""
        model, reads, lengths = model or self.model, self.reads(rows, sources), [len(row) for row in rows]
        found = {f"{one} logits": list(self.logits(reads, one, None, model).split(lengths)) for one in self.directions}
        if Role.GENERATOR in self.roles:
            found["start"] = list(model.start(*reads)[0])
        if Role.ENCODER in self.roles:
            found["encode"] = list(model.encode(*reads, layers=(-1, -1)).split(lengths, 1))
            found["summary"] = list(model.summary(*reads))
        return found

    def logits(self, reads: list[Tokens], direction: str, at: Tensor | None = None, model: Any = None) -> Any:
        """Score in a direction; a model that knows only one need not have heard of others."""
        if direction == "forward":
            return (model or self.model).logits(*reads, at=at)
        return (model or self.model).logits(*reads, at=at, direction=direction)

    def following(self, rows: Rows, sources: Rows) -> Any:
        """Score what follows each row, (B, V), reading all of it anew."""
        if "forward" not in self.directions:
            return self.model.start(*self.reads(rows, sources))[0]
        return self.model.logits(*self.reads(rows, sources))[torch.tensor([len(row) for row in rows]).cumsum(0) - 1]


def _spelt(ids: Iterable[int]) -> np.ndarray:
    """Spell tokens in different lengths, so that a batch has places past the end of most."""
    return spell(str(id) * (id % 4) for id in ids)
