"""The kinds of tokenizer, on the `tokenizers` library: words, characters, bytes, BPE (two), WordPiece, Unigram.

They differ in how they learn a vocabulary and where they cut; all else is `Tokenizer`. The same stream of text gives
the same `tokenizer.json`, byte by byte.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, ClassVar

from pydantic import Field
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from weft.errors import ConfigError
from weft.text.base import Encoding, Settings, Tokenizer, load_tokenizer, train_tokenizer
from weft.text.counts import count_units, no_text, repeat_units

__all__ = [
    "BPE",
    "Bytes",
    "Characters",
    "Encoding",
    "Tokenizer",
    "Unigram",
    "WordPiece",
    "Words",
    "load_tokenizer",
    "train_tokenizer",
]

_RARE = 2  # sub-words are merged from pairs seen at least this often, as in subword-nmt
_SPACE = "▁"  # SentencePiece's sign for a space


def _byte_signs() -> dict[str, int]:
    """Return GPT-2's printable sign for each byte: the byte as Latin-1 where that prints, else the next above 255."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTES = _byte_signs()


class Words(Tokenizer):
    """Runs of letters, marks, digits and "_"; every other sign that is no space, alone. Decoding puts single spaces."""

    model = "WordLevel"

    class Config(Settings):
        """How many words, how rare the rarest, and whether any digit is read as 0: 1987 and 2012 are then one word."""

        size: int = Field(30_000, ge=4, le=10_000_000)
        min_count: int = Field(1, ge=1)
        zeros: bool = False

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Keep the most frequent words."""
        engine = Engine(models.WordLevel({}, unk_token="<unk>"))
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated")]
        )
        _lower(engine, config)
        if config.zeros:
            before = [] if engine.normalizer is None else [engine.normalizer]
            engine.normalizer = normalizers.Sequence([*before, normalizers.Replace(Regex(r"\d"), "0")])
        vocabulary = _most_frequent(_count_words(engine, count_units(texts)), config, cls.spelling)
        engine.model = models.WordLevel(vocabulary, unk_token="<unk>")
        engine.add_special_tokens(list(cls.spelling.values()))
        return engine

    def extend(self, words: Iterable[str]) -> None:
        """Know these words too, as far as there is room; those that no text is cut into are passed over."""
        vocabulary = self.engine.get_vocab()
        for word in words:
            if len(vocabulary) >= self.config.size:
                break
            cut = self.engine.pre_tokenizer.pre_tokenize_str(_normalize(self.engine, word))
            if word not in vocabulary and [piece for piece, _ in cut] == [word]:
                vocabulary[word] = len(vocabulary)
        self.engine.model = models.WordLevel(vocabulary, unk_token="<unk>")
        self._size = len(vocabulary)


class Characters(Tokenizer):
    """Code points, spaces and line ends among them."""

    model = "BPE"  # without merges: faster than cutting before the model

    class Config(Settings):
        """How many characters (none: all of them), and how rare the rarest."""

        size: int | None = Field(None, ge=4, le=10_000_000)
        min_count: int = Field(1, ge=1)

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Keep the most frequent characters."""
        engine = Engine(models.BPE())
        _lower(engine, config)
        counts: Counter[str] = Counter()
        for unit, count in count_units(texts).items():
            for char in _normalize(engine, unit):
                counts[char] += count
        vocabulary = _most_frequent(counts, config, cls.spelling)
        engine.model = models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=False)
        engine.decoder = decoders.Fuse()
        engine.add_special_tokens(list(cls.spelling.values()))
        return engine


class Bytes(Tokenizer):
    """The 256 bytes of UTF-8: byte `b` has the id `b + 2`. Nothing is unknown and nothing is lost."""

    model = "BPE"
    spelling: ClassVar[Mapping[str, str]] = {"bos": "<s>", "eos": "</s>"}

    class Config(Settings):
        """Nothing to choose."""

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Make sure that there is text; there is nothing to learn from it."""
        if not any(text.strip() for text in texts):
            raise no_text()
        engine = Engine(models.BPE(_numbered([*cls.spelling.values(), *sorted(_BYTES, key=_BYTES.__getitem__)]), []))
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.decoder = decoders.ByteLevel()
        _lower(engine, config)
        engine.add_special_tokens(list(cls.spelling.values()))
        return engine

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives back every text exactly: unless it was put in lower case."""
        return self.engine.normalizer is None

    def _surface(self, token: str) -> str:
        return _from_bytes(token)


class BPE(Tokenizer):
    """Byte-pair encoding: over bytes as in GPT-2, or (`bytes: false`) over characters.

    Over bytes nothing is unknown and nothing is lost (Radford et al., 2019). Over characters it is that of Sennrich et
    al., 2016, "Neural machine translation of rare words with subword units", except that the sign of a word is
    SentencePiece's "▁" at its start, not "</w>" at its end; line ends and tabs are tokens of their own.
    """

    model = "BPE"

    class Config(Settings):
        """The size of the vocabulary, with its alphabet and specials."""

        size: int = Field(8_000, ge=4, le=10_000_000)
        bytes: bool = True

    @classmethod
    def spell(cls, config: Config) -> Mapping[str, str]:
        """Say which token has which role; over bytes nothing is unknown."""
        return Bytes.spelling if config.bytes else cls.spelling

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Merge the most frequent pairs."""
        engine = _byte_engine() if config.bytes else _character_engine()
        _lower(engine, config)
        units = count_units(texts)
        specials = list(cls.spell(config).values())
        alphabet = sorted(_BYTES if config.bytes else _alphabet(_count_words(engine, units)))
        _check_size(config, len(specials) + len(alphabet))
        trainer = trainers.BpeTrainer(
            vocab_size=config.size,
            min_frequency=_RARE,
            special_tokens=specials,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        engine.train_from_iterator(repeat_units(units), trainer)
        return engine

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives back every text exactly: over bytes, unless they were put in lower case."""
        return self.config.bytes and self.engine.normalizer is None

    def encode(self, text: str) -> Encoding:
        """Cut one text into tokens and say where each stands; no specials are added."""
        return _without_prefix(super().encode(text))

    def _surface(self, token: str) -> str:
        return _from_bytes(token) if self.config.bytes else token.replace(_SPACE, " ")


class WordPiece(Tokenizer):
    """BERT's: its normaliser, its cuts at punctuation, "##" before a piece that goes on (Devlin et al., 2019)."""

    model = "WordPiece"
    spelling: ClassVar[Mapping[str, str]] = {
        "pad": "[PAD]",
        "unk": "[UNK]",
        "bos": "[CLS]",
        "eos": "[SEP]",
        "mask": "[MASK]",
    }

    class Config(Settings):
        """The size of the vocabulary, with its alphabet and specials; lower case also takes accents off."""

        size: int = Field(30_000, ge=6, le=10_000_000)

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Merge the most frequent pairs, which is how the library learns it: BERT's own trainer was not published."""
        engine = cls._engine({}, config)
        units = count_units(texts)
        words = _count_words(engine, units)
        specials = list(cls.spelling.values())
        # The library numbers these in an order that changes from run to run, unless they are there before.
        inner = sorted({f"##{char}" for word in words for char in word[1:]})
        _check_size(config, len(specials) + len(inner) + len(_alphabet(words)))
        trainer = trainers.WordPieceTrainer(
            vocab_size=config.size, min_frequency=_RARE, special_tokens=[*specials, *inner], show_progress=False
        )
        engine.train_from_iterator(repeat_units(units), trainer)
        trained = cls._engine(engine.get_vocab(), config)  # afresh, without `inner` among the specials
        trained.add_special_tokens(specials)
        return trained

    @staticmethod
    def _engine(vocabulary: dict[str, int], config: Config) -> Engine:
        engine = Engine(models.WordPiece(vocabulary, unk_token="[UNK]"))
        engine.normalizer = normalizers.BertNormalizer(lowercase=config.lowercase)
        engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        engine.decoder = decoders.WordPiece()
        return engine


class Unigram(Tokenizer):
    """SentencePiece's unigram model, with its normaliser (NFKC; one space for many, for a tab and for a line's end).

    Kudo, 2018, "Subword regularization: improving neural network translation models with multiple subword candidates".
    """

    model = "Unigram"

    class Config(Settings):
        """The size of the vocabulary, with its alphabet and specials."""

        size: int = Field(8_000, ge=4, le=10_000_000)

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Start from the frequent substrings and drop those that matter least to the likelihood."""
        engine = Engine(models.Unigram())
        clean = [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
        engine.normalizer = normalizers.Sequence(clean + [normalizers.Lowercase()] * config.lowercase)
        _mark_spaces(engine)
        units = count_units(texts)
        specials = list(cls.spelling.values())
        _check_size(config, len(specials) + len(_alphabet(_count_words(engine, units))))
        trainer = trainers.UnigramTrainer(
            vocab_size=config.size, unk_token="<unk>", special_tokens=specials, show_progress=False
        )
        engine.train_from_iterator(repeat_units(units), trainer)
        learnt = [(piece, score) for piece, score in _scores(engine) if piece not in specials]
        settled = _settle(learnt, config.size - len(specials))
        engine.model = models.Unigram([(token, 0.0) for token in specials] + settled, unk_id=0)
        return engine

    def encode(self, text: str) -> Encoding:
        """Cut one text into tokens and say where each stands; no specials are added."""
        return _without_prefix(super().encode(text))

    def _surface(self, token: str) -> str:
        return token.replace(_SPACE, " ")


def _byte_engine() -> Engine:
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def _character_engine() -> Engine:
    engine = Engine(models.BPE(unk_token="<unk>", fuse_unk=False))
    _mark_spaces(engine, pre_tokenizers.Split(Regex(r"\s"), "isolated"))
    return engine


def _mark_spaces(engine: Engine, *cuts: Any) -> None:
    # Where a text spells a special, its "<" stands alone, so that no piece can be the special itself.
    spelt = pre_tokenizers.Split(Regex(r"<(?=(?:/?s|unk)>)"), "isolated")
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(_SPACE), *cuts, spelt])
    engine.decoder = decoders.Metaspace(_SPACE)


def _lower(engine: Engine, config: Settings) -> None:
    if config.lowercase:
        engine.normalizer = normalizers.Lowercase()


def _normalize(engine: Engine, text: str) -> str:
    return text if engine.normalizer is None else str(engine.normalizer.normalize_str(text))


def _count_words(engine: Engine, units: Counter[str]) -> Counter[str]:
    """Count what the engine's pre-tokenizer makes of the units."""
    counts: Counter[str] = Counter()
    for unit, count in units.items():
        for word, _ in engine.pre_tokenizer.pre_tokenize_str(_normalize(engine, unit)):
            counts[word] += count
    if not counts:
        raise no_text()
    return counts


def _alphabet(words: Iterable[str]) -> set[str]:
    return set(chain.from_iterable(words))


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}


def _most_frequent(counts: Counter[str], config: Any, spelling: Mapping[str, str]) -> dict[str, int]:
    """Number the specials, then the most frequent entries; of equals, the first by code point."""
    order = sorted((-count, token) for token, count in counts.items() if count >= config.min_count)
    if not order:
        most = max(counts.values(), default=0)
        raise ConfigError(f"tokenizer.min_count: must be at most {most}, but is {config.min_count} instead; lower it")
    room = None if config.size is None else config.size - len(spelling)
    return _numbered([*spelling.values(), *(token for _, token in order[:room])])


def _check_size(config: Any, least: int) -> None:
    """Refuse a size that the library would exceed without a word or (Unigram) never come down to."""
    if config.size < least:
        raise ConfigError(
            f"tokenizer.size: must be at least {least}, for the specials and the alphabet of the training text, "
            f"but is {config.size} instead; raise it, or use the tokenizer bytes"
        )


def _scores(engine: Engine) -> list[tuple[str, float]]:
    return [(piece, score) for piece, score in json.loads(engine.to_str())["model"]["vocab"]]


def _settle(learnt: list[tuple[str, float]], room: int) -> list[tuple[str, float]]:
    """Take out of a Unigram vocabulary what changes from run to run, and what is more than there is room for.

    The library sums in the order of a hash table, whose noise rounding removes; and it scores the characters that the
    model had dropped by steps of 1e-4 up from the least score, in such an order too: these all get the least.
    """
    least = min(score for _, score in learnt)
    near = least + 1e-4 * sum(len(piece) == 1 for piece, _ in learnt)
    scores = {piece: round(least if len(piece) == 1 and score <= near else score, 4) for piece, score in learnt}
    kept = sorted(scores, key=lambda piece: (len(piece) > 1, -scores[piece], piece))[:room]  # the alphabet before all
    return [(piece, scores[piece]) for piece in sorted(kept, key=lambda piece: (-scores[piece], piece))]


def _without_prefix(encoding: Encoding) -> Encoding:
    """Give the sign of a space that the text does not have an empty place: the library gives it the first character."""
    if len(encoding.ids) > 1 and encoding.tokens[0] == _SPACE and encoding.offsets[1][0] == 0:
        encoding.offsets[0] = (0, 0)
    return encoding


def _from_bytes(token: str) -> str:
    r"""Read a byte-level token; bytes that are no whole character show as \xe2, a special as itself."""
    if not all(sign in _BYTES for sign in token):
        return token
    return bytes(_BYTES[sign] for sign in token).decode("utf-8", "backslashreplace")
