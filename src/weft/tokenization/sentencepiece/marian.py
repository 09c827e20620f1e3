"""Marian's tokenizer: a SentencePiece model for each side of a translation, and a vocabulary from pieces to ids.

Both sides share one vocabulary, or each has its own. A piece outside it is unknown. A piece that is unknown to the
SentencePiece model may still be in the vocabulary, from the other side. A text may begin with a target-language code,
such as ">>fra<<", which is one token.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import field_validator
from tokenizers import Tokenizer as Engine
from tokenizers import models

from weft.config.small_files import read_small_text
from weft.errors import CheckpointError, ConfigError
from weft.tokenization.backend import SPACE
from weft.tokenization.base import Encoding, Tokenizer, TokenizerConfig, read_target
from weft.tokenization.sentencepiece.model_file import SentencePieceModel, parse_spm, read_spm
from weft.tokenization.word_counts import check_text

if TYPE_CHECKING:
    from weft.tokenization.sentencepiece.segmenter import Segmentation


class SentencePiece(Tokenizer):
    """SentencePiece segmentation with ids from a separate vocabulary. It is loaded with a model, never trained.

    The decoder's bos is `<pad>`. `decode` skips unknown tokens too, as transformers does.
    """

    model = "WordLevel"
    default_special_tokens: ClassVar[Mapping[str, str]] = {
        "unk": "<unk>",
        "bos": "<pad>",
        "eos": "</s>",
        "pad": "<pad>",
    }

    class Config(TokenizerConfig):
        """No options of its own."""

        @field_validator("split_special_tokens")
        @classmethod
        def _check_special_tokens(cls, split_special_tokens: bool) -> bool:
            if not split_special_tokens:
                raise ValueError("must be true: a sentencepiece model cuts special tokens as any text; leave it out")
            return split_special_tokens

        @field_validator("lowercase")
        @classmethod
        def _check_lowercase(cls, lowercase: bool) -> bool:
            if lowercase:
                raise ValueError("must be false: how texts are prepared is in the model's files; leave it out")
            return lowercase

    def __init__(self, config: Any, engine: Engine, spm: SentencePieceModel, target: "SentencePiece | None" = None):
        from weft.tokenization.sentencepiece.segmenter import Segmenter  # it imports numba

        super().__init__(config, engine, target)
        self.spm, self._segmenter, self._vocab = spm, Segmenter(spm), dict(engine.get_vocab())
        assert self.specials.unk is not None
        self._unknown: int = self.specials.unk
        for token in self.special_tokens(config):
            del self._vocab[token]  # text never gets a special token's id
        ids = [self._vocab.get(piece, self._unknown) for piece in spm.pieces]
        ids[spm.unk] = -1  # looked up by its text instead
        self._vocab_ids = np.array(ids, np.int64)

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Raise: the files come with a pretrained model."""
        raise ConfigError(
            "tokenizer.name: 'sentencepiece' comes with a model that is named in model.weights, and is not trained; "
            "train 'unigram', which is learnt and cuts in the same way"
        )

    @classmethod
    def load(cls, directory: Path, config: Any) -> Self:
        """Load a tokenizer that `save` wrote."""
        if config.target is None:
            return cls._load_side(directory, config, "tokenizer")
        other = read_target(config.target)
        if other.name != config.name:
            raise CheckpointError(f"{directory}: tokenizer.target must be {config.name!r}, but is {other.name!r}")
        return cls._load_side(directory, config, "tokenizer", cls._load_side(directory, other, "tokenizer.target"))

    @classmethod
    def _load_side(cls, directory: Path, config: Any, name: str, target: "SentencePiece | None" = None) -> Self:
        engine = cls._read_engine(directory / f"{name}.json", config)
        return cls(config, engine, read_spm(directory / f"{name}.spm"), target)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and `tokenizer.spm`, and `tokenizer.target.…` for the target side."""
        super().save(directory)
        (directory / "tokenizer.spm").write_bytes(self.spm.raw)
        if isinstance(self.target, SentencePiece) and self.target is not self:
            (directory / "tokenizer.target.spm").write_bytes(self.target.spm.raw)

    def __reduce__(self) -> tuple[Any, ...]:
        target = None if self.target is self else self.target
        return _unpickle, (type(self), self.config, self.engine.to_str(), self.spm.raw, target)

    @property
    def identity(self) -> str:
        """The serialised tokenizer of this side, as input of a digest."""
        return f"{super().identity}\0{hashlib.sha256(self.spm.raw).hexdigest()}"

    @property
    def joint(self) -> bool:
        """Return whether both sides have the same vocabulary."""
        return self.target is self or self.target.engine.get_vocab() == self.engine.get_vocab()

    def _encode_text(self, text: str) -> Encoding:
        check_text(text)
        code, rest = _split_language_code(text)
        segmentation, shift = self._segmenter.segment(rest), len(code)
        offsets = [(begin + shift, end + shift) for begin, end in segmentation.offsets(rest)]
        if not code:
            return Encoding(self._piece_ids(segmentation), offsets, segmentation.pieces())
        ids = [self._code_id(code), *self._piece_ids(segmentation)]
        return Encoding(ids, [(0, shift), *offsets], [code, *segmentation.pieces()])

    def _ids_of_texts(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            check_text(text)
        parts = [_split_language_code(text) for text in texts]
        pieces = [self._piece_ids(self._segmenter.segment(rest)) for _, rest in parts]
        return [[self._code_id(code)] * bool(code) + ids for (code, _), ids in zip(parts, pieces, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, skipping special and unknown tokens."""
        self._check_id(min(ids, default=0))
        self._check_id(max(ids, default=0))
        pieces = (str(self.engine.id_to_token(id)) for id in ids if id not in self._skipped_ids and id != self._unknown)
        return "".join(pieces).replace(SPACE, " ").strip()

    def _piece_ids(self, segmentation: "Segmentation") -> list[int]:
        """Return the vocabulary ids of pieces; those unknown to the SentencePiece model are looked up by their text."""
        ids = self._vocab_ids[segmentation.ids]
        for position in np.flatnonzero(ids < 0).tolist():
            ids[position] = self._vocab.get(segmentation.surface(position), self._unknown)
        output: list[int] = ids.tolist()
        return output

    def _code_id(self, code: str) -> int:
        return self._vocab.get(code, self._unknown)

    def _surface(self, token: str) -> str:
        return token.replace(SPACE, " ")


def word_engine(path: Path, unknown: str, specials: Sequence[str]) -> Engine:
    """Return a WordLevel engine with the vocabulary of a JSON file, an object of tokens and their ids."""
    try:
        vocab = json.loads(read_small_text(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(vocab, dict) or sorted(vocab.values(), key=str) != sorted(range(len(vocab)), key=str):
        raise CheckpointError(f"{path}: must give each token an id of its own, from 0 on")
    missing = [token for token in specials if token not in vocab]
    if missing:
        raise CheckpointError(f"{path}: lacks the special token {missing[0]}")
    return Engine(models.WordLevel(vocab, unk_token=unknown))


def _split_language_code(text: str) -> tuple[str, str]:
    """Return the leading language code of a text ("" if there is none), and the rest."""
    end = text.find("<<") + 2 if text.startswith(">>") else 1
    return ("", text) if end < 2 else (text[:end], text[end:])


def _unpickle(
    tokenizer_class: type[SentencePiece], config: Any, engine: str, spm: bytes, target: SentencePiece | None
) -> SentencePiece:
    return tokenizer_class(config, Engine.from_str(engine), parse_spm(spm, "tokenizer"), target)
