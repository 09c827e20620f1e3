"""A model under test, with ragged input batches and calls of all methods that its roles define."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.config.schema import Named
from weft.models.base import LMDirection, Model, Role
from weft.tokens import Tokens, char_ids

LENGTHS, SOURCE_LENGTHS = (4, 1, 7, 3), (3, 6, 1, 5)
Sequences = Sequence[Sequence[int]]
Answers = dict[str, list[Tensor]]  # outputs of each method, one tensor per sequence


class Case:
    """A model, a ragged batch for it, and its outputs by role."""

    def __init__(self, kind: type[Model], config: Named, vocab: int, target_vocab: int | None = None) -> None:
        self.kind, self.config, self.roles = kind, config, kind.roles(config)
        has_logits = bool({Role.LANGUAGE_MODEL, Role.MASKED_LM} & set(self.roles))
        self.directions: tuple[LMDirection, ...] = kind.directions(config) if has_logits else ()
        self.promises: set[Role | str] = {*self.roles, *self.directions}
        self.target_vocab = target_vocab or vocab
        self._sizes = (vocab,) if target_vocab is None else (vocab, target_vocab)
        self.model: Any = self.fresh()
        self.rows = [self.draw(length) for length in LENGTHS]
        self.sources = [torch.randint(vocab, (length,)).tolist() for length in SOURCE_LENGTHS]
        self.other_sources = [[(token + 1) % vocab for token in source] for source in self.sources]

    def fresh(self) -> Model:
        """Return a model with new random weights."""
        model = self.kind(self.config, *self._sizes).double().eval()
        model.prune_unused(set(self.roles) - {Role.SELF_FITTED})  # parameters that only `fit` uses get no gradient
        if self.kind.uses_chars(self.config):  # with the characters that `reads` gives the tokens
            words = Tokens.pack([range(self.target_vocab)]).with_chars([_make_chars(range(self.target_vocab))])
            assert words.chars is not None
            model.set_char_table(words.chars)
        return model

    def draw(self, length: int) -> Any:
        """Draw random input ids; a model with a source reads ids of the target vocabulary."""
        return torch.randint(self.target_vocab, (length,)).tolist()

    def reads(self, rows: Sequences, sources: Sequences) -> list[Tokens]:
        """Pack the inputs: the rows and, for SEQ2SEQ, the sources; with characters, if the model uses them."""
        packed = [Tokens.pack(rows)] + ([Tokens.pack(sources)] if Role.SEQ2SEQ in self.roles else [])
        if not self.kind.uses_chars(self.config):
            return packed
        return [tokens.with_chars([_make_chars(ids.tolist()) for ids in tokens.split()]) for tokens in packed]

    def answers(self, rows: Sequences, sources: Sequences, model: Any = None) -> Answers:
        """Return the outputs of all methods that the roles define."""
        model, reads, lengths = model or self.model, self.reads(rows, sources), [len(row) for row in rows]
        outputs = {
            f"{direction} logits": list(self.logits(reads, direction, None, model).split(lengths))
            for direction in self.directions
        }
        if Role.GENERATOR in self.roles:
            outputs["start"] = list(model.start(*reads)[0])
        if Role.ENCODER in self.roles:
            outputs["encode"] = list(model.encode(reads[-1], layers=(-1, -1)).split(reads[-1].lengths.tolist(), 1))
            outputs["summary"] = list(model.pooled_output(reads[-1]))
        return outputs

    def logits(self, reads: list[Tokens], direction: str, at: Tensor | None = None, model: Any = None) -> Any:
        """Return the logits of a direction; a forward model need not have the parameter `direction`."""
        if direction == "forward":
            return (model or self.model).logits(*reads, at=at)
        return (model or self.model).logits(*reads, at=at, direction=direction)

    def following(self, rows: Sequences, sources: Sequences) -> Any:
        """Return the logits of the token after each row, (B, V), by reading the whole row."""
        if "forward" not in self.directions:
            return self.model.start(*self.reads(rows, sources))[0]
        return self.model.logits(*self.reads(rows, sources))[torch.tensor([len(row) for row in rows]).cumsum(0) - 1]


def _make_chars(ids: Iterable[int]) -> np.ndarray:
    """Return characters of tokens, in different lengths, so that a batch has padding."""
    return char_ids(str(id) * (id % 4) for id in ids)
