"""Marian's way with SentencePiece: a model for each side of a translation cuts, and a vocabulary numbers the pieces.

The vocabulary is one for both sides, or each has its own. A piece that it does not have is unknown, and one that the
cutting model does not know may yet be in it, from the other side. A text may begin with the code of a language to
translate into, such as ">>fra<<", which is one token.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import field_validator
from tokenizers import Tokenizer as Engine
from tokenizers import models

from weft.errors import CheckpointError, ConfigError
from weft.tokenization.backend import SPACE
from weft.tokenization.base import Encoding, Settings, Tokenizer, read_target
from weft.tokenization.sentencepiece.model_file import Spm, parse_spm, read_spm
from weft.tokenization.sentencepiece.segmenter import Cut, Pieces
from weft.tokenization.word_counts import check_text


class SentencePiece(Tokenizer):
    """Pieces as SentencePiece cuts them, numbered by a vocabulary. It comes with a model, and is not learnt here.

    Texts begin with what fills others up, `<pad>`; `decode` leaves out what was unknown, too, as transformers does.
    """

    model = "WordLevel"
    spelling: ClassVar[Mapping[str, str]] = {"unk": "<unk>", "bos": "<pad>", "eos": "</s>", "pad": "<pad>"}

    class Config(Settings):
        """Nothing to choose."""

        @field_validator("lowercase")
        @classmethod
        def _as_it_came(cls, lowercase: bool) -> bool:
            if lowercase:
                raise ValueError("must be false: how texts are prepared is in the model's files; leave it out")
            return lowercase

    def __init__(self, config: Any, engine: Engine, spm: Spm, target: "SentencePiece | None" = None):
        super().__init__(config, engine, target)
        self.spm, self._pieces, self._vocab = spm, Pieces(spm), dict(engine.get_vocab())
        assert self.specials.unk is not None
        self._unknown: int = self.specials.unk
        for token in self.special_tokens(config):
            del self._vocab[token]  # what a text spells is never one
        ids = [self._vocab.get(piece, self._unknown) for piece in spm.pieces]
        ids[spm.unk] = -1  # as it is spelt
        self._ids = np.array(ids, np.int64)

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Refuse: its files come with a model."""
        raise ConfigError(
            "tokenizer.name: 'sentencepiece' comes with a model that is named in model.weights, and is not trained; "
            "train 'unigram', which is learnt and cuts in the same way"
        )

    @classmethod
    def load(cls, directory: Path, config: Any) -> Self:
        """Read what `save` wrote."""
        if config.target is None:
            return cls._side(directory, config, "tokenizer")
        other = read_target(config.target)
        if other.name != config.name:
            raise CheckpointError(f"{directory}: tokenizer.target must be {config.name!r}, but is {other.name!r}")
        return cls._side(directory, config, "tokenizer", cls._side(directory, other, "tokenizer.target"))

    @classmethod
    def _side(cls, directory: Path, config: Any, name: str, target: "SentencePiece | None" = None) -> Self:
        return cls(config, cls._read(directory / f"{name}.json", config), read_spm(directory / f"{name}.spm"), target)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and `tokenizer.spm`, and `tokenizer.target.…` for the target side."""
        super().save(directory)
        (directory / "tokenizer.spm").write_bytes(self.spm.raw)
        if isinstance(self.target, SentencePiece) and self.target is not self:
            (directory / "tokenizer.target.spm").write_bytes(self.target.spm.raw)

    def __reduce__(self) -> tuple[Any, ...]:
        target = None if self.target is self else self.target
        return _revive, (type(self), self.config, self.engine.to_str(), self.spm.raw, target)

    @property
    def identity(self) -> str:
        """What makes this side the tokenizer that it is, for a digest."""
        return f"{super().identity}\0{hashlib.sha256(self.spm.raw).hexdigest()}"

    @property
    def joint(self) -> bool:
        """Whether both sides have the same ids."""
        return self.target is self or self.target.engine.get_vocab() == self.engine.get_vocab()

    def encode(self, text: str) -> Encoding:
        """Cut one text into tokens and say where each stands; no specials are added."""
        check_text(text)
        code, rest = _coded(text)
        cut, shift = self._pieces.cut(rest), len(code)
        offsets = [(begin + shift, end + shift) for begin, end in cut.offsets(rest)]
        if not code:
            return Encoding(self._numbered(cut), offsets, cut.pieces())
        return Encoding([self._code(code), *self._numbered(cut)], [(0, shift), *offsets], [code, *cut.pieces()])

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Cut many texts, without offsets."""
        for text in texts:
            check_text(text)
        parts = [_coded(text) for text in texts]
        return [[self._code(code)] * bool(code) + self._numbered(self._pieces.cut(rest)) for code, rest in parts]

    def decode(self, ids: Sequence[int]) -> str:
        """Put tokens together to a text, without what is special or unknown."""
        self._check_id(min(ids, default=0))
        self._check_id(max(ids, default=0))
        shown = (str(self.engine.id_to_token(id)) for id in ids if id not in self._hidden and id != self._unknown)
        return "".join(shown).replace(SPACE, " ").strip()

    def _numbered(self, cut: Cut) -> list[int]:
        """Number pieces by the vocabulary, where what the cutting model does not know may be, too."""
        ids = self._ids[cut.ids]
        for place in np.flatnonzero(ids < 0).tolist():
            ids[place] = self._vocab.get(cut.surface(place), self._unknown)
        found: list[int] = ids.tolist()
        return found

    def _code(self, code: str) -> int:
        return self._vocab.get(code, self._unknown)

    def _surface(self, token: str) -> str:
        return token.replace(SPACE, " ")


def word_engine(path: Path, unknown: str, specials: Sequence[str]) -> Engine:
    """Read a vocabulary, a JSON object of tokens and their ids."""
    try:
        vocab = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(vocab, dict) or sorted(vocab.values(), key=str) != sorted(range(len(vocab)), key=str):
        raise CheckpointError(f"{path}: must give each token an id of its own, from 0 on")
    missing = [token for token in specials if token not in vocab]
    if missing:
        raise CheckpointError(f"{path}: lacks the special token {missing[0]}")
    return Engine(models.WordLevel(vocab, unk_token=unknown))


def _coded(text: str) -> tuple[str, str]:
    """Take the code of a language off the beginning of a text, if there is one."""
    end = text.find("<<") + 2 if text.startswith(">>") else 1
    return ("", text) if end < 2 else (text[:end], text[end:])


def _revive(
    kind: type[SentencePiece], config: Any, engine: str, spm: bytes, target: SentencePiece | None
) -> SentencePiece:
    return kind(config, Engine.from_str(engine), parse_spm(spm, "tokenizer"), target)
