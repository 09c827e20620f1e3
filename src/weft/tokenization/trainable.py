"""The kinds of tokenizer, on the `tokenizers` library: words, characters, bytes, BPE (two), WordPiece, Unigram.

They differ in how they learn a vocabulary and where they cut; all else is `Tokenizer`. The same stream of text gives
the same `tokenizer.json`, byte by byte.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from weft.tokenization.backend import (
    BYTES,
    SPACE,
    byte_engine,
    character_engine,
    check_size,
    count_words,
    from_bytes,
    letters,
    lower,
    mark_spaces,
    most_frequent,
    normalize,
    numbered,
    scores,
    settle,
    without_prefix,
)
from weft.tokenization.base import Encoding, Settings, Tokenizer, load_tokenizer, train_tokenizer
from weft.tokenization.word_counts import check_text, count_units, no_text, repeat_units

if TYPE_CHECKING:
    from weft.tokenization.whitespace import Spaces

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


class Words(Tokenizer):
    """Runs of letters, marks, digits and "_"; every other sign that is no space, alone. Decoding puts single spaces.

    With `split: spaces`, for text that is already cut into words, a word is what stands between spaces, and one that is
    spelt "<unk>" is the unknown word.
    """

    model = "WordLevel"
    _fast: "tuple[int, Spaces] | None" = None

    class Config(Settings):
        """How many words, how rare the rarest, and whether any digit is read as 0: 1987 and 2012 are then one word."""

        size: int = Field(30_000, ge=4, le=10_000_000)
        min_count: int = Field(1, ge=1)
        zeros: bool = False
        split: Literal["signs", "spaces"] = "signs"

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Keep the most frequent words."""
        unknown = cls.spell(config)["unk"]
        engine = Engine(models.WordLevel({}, unk_token=unknown))
        cuts = [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated")]
        engine.pre_tokenizer = pre_tokenizers.Sequence(cuts if config.split == "signs" else cuts[:1])
        lower(engine, config)
        if config.zeros:
            before = [] if engine.normalizer is None else [engine.normalizer]
            engine.normalizer = normalizers.Sequence([*before, normalizers.Replace(Regex(r"\d"), "0")])
        specials = cls.special_tokens(config)
        counts = count_words(engine, count_units(texts))
        for special in specials:
            counts.pop(special, None)
        vocabulary = most_frequent(counts, config, specials)
        engine.model = models.WordLevel(vocabulary, unk_token=unknown)
        engine.add_special_tokens(specials)
        return engine

    def encode(self, text: str) -> Encoding:
        """Cut one text into words and say where each stands."""
        found = super().encode(text)
        return found if self.config.split == "signs" else replace(found, ids=self._known(found.ids))

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Cut many texts, in parallel, without offsets."""
        if self.config.split == "signs" or self.engine.normalizer is not None:
            found = super().ids(texts)
            return found if self.config.split == "signs" else [self._known(ids) for ids in found]
        try:
            return self._spaces().ids(texts)
        except UnicodeEncodeError:  # a lone surrogate
            for text in texts:
                check_text(text)
            raise

    def _spaces(self) -> "Spaces":
        """Return what cuts at spaces faster than the library does."""
        from weft.tokenization.whitespace import Spaces

        if self._fast is None or self._fast[0] != self._size:
            unknown = self.specials.unk
            assert unknown is not None
            known = {word: id for word, id in self.engine.get_vocab().items() if id not in self._hidden}
            self._fast = self._size, Spaces(known, unknown)
        return self._fast[1]

    def _known(self, ids: list[int]) -> list[int]:
        """A word that is spelt like the sign of a text's beginning or end is a word, though not a known one."""
        unknown = self.specials.unk
        assert unknown is not None
        return [unknown if id in self._hidden else id for id in ids] if self._hidden & set(ids) else ids

    def extend(self, words: Iterable[str]) -> None:
        """Know these words too, as far as there is room; those that no text is cut into are passed over."""
        vocabulary = self.engine.get_vocab()
        for word in words:
            if len(vocabulary) >= self.config.size:
                break
            cut = self.engine.pre_tokenizer.pre_tokenize_str(normalize(self.engine, word))
            if word not in vocabulary and [piece for piece, _ in cut] == [word]:
                vocabulary[word] = len(vocabulary)
        self.engine.model = models.WordLevel(vocabulary, unk_token=self.spell(self.config)["unk"])
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
        lower(engine, config)
        counts: Counter[str] = Counter()
        for unit, count in count_units(texts).items():
            for char in normalize(engine, unit):
                counts[char] += count
        specials = cls.special_tokens(config)
        engine.model = models.BPE(
            most_frequent(counts, config, specials), [], unk_token=cls.spell(config)["unk"], fuse_unk=False
        )
        engine.decoder = decoders.Fuse()
        engine.add_special_tokens(specials)
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
        specials = cls.special_tokens(config)
        engine = Engine(models.BPE(numbered([*specials, *sorted(BYTES, key=BYTES.__getitem__)]), []))
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.decoder = decoders.ByteLevel()
        lower(engine, config)
        engine.add_special_tokens(specials)
        return engine

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives back every text exactly: unless it was put in lower case."""
        return self.engine.normalizer is None

    def _surface(self, token: str) -> str:
        return from_bytes(token)


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
        return {**(Bytes.spelling if config.bytes else cls.spelling), **(config.specials or {})}

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Merge the most frequent pairs."""
        engine = byte_engine() if config.bytes else character_engine(cls.spell(config))
        lower(engine, config)
        units = count_units(texts)
        specials = cls.special_tokens(config)
        alphabet = sorted(BYTES if config.bytes else letters(count_words(engine, units)))
        check_size(config, len(specials) + len(alphabet))
        trainer = trainers.BpeTrainer(
            vocab_size=config.size,
            min_frequency=_RARE,
            special_tokens=specials,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        engine.train_from_iterator(repeat_units(units), trainer)
        return engine

    @classmethod
    def spaced(cls, config: Config, word: str) -> str:
        """Over bytes a token takes the space before it in; over characters every text is given one anyway."""
        return f" {word}" if config.bytes and word and not word.startswith(" ") else word

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives back every text exactly: over bytes, unless these are changed before."""
        widened = getattr(self.engine.pre_tokenizer, "add_prefix_space", False)  # as some do that were made elsewhere
        return self.config.bytes and self.engine.normalizer is None and not widened

    def encode(self, text: str) -> Encoding:
        """Cut one text into tokens and say where each stands; no specials are added."""
        return without_prefix(super().encode(text))

    def _surface(self, token: str) -> str:
        return from_bytes(token) if self.config.bytes else token.replace(SPACE, " ")


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
        words = count_words(engine, units)
        specials = cls.special_tokens(config)
        # The library numbers these in an order that changes from run to run, unless they are there before.
        inner = sorted({f"##{char}" for word in words for char in word[1:]})
        check_size(config, len(specials) + len(inner) + len(letters(words)))
        trainer = trainers.WordPieceTrainer(
            vocab_size=config.size, min_frequency=_RARE, special_tokens=[*specials, *inner], show_progress=False
        )
        engine.train_from_iterator(repeat_units(units), trainer)
        trained = cls._engine(engine.get_vocab(), config)  # afresh, without `inner` among the specials
        trained.add_special_tokens(specials)
        return trained

    @classmethod
    def _engine(cls, vocabulary: dict[str, int], config: Config) -> Engine:
        engine = Engine(models.WordPiece(vocabulary, unk_token=cls.spell(config)["unk"]))
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
        mark_spaces(engine, cls.spell(config))
        units = count_units(texts)
        specials, unknown = cls.special_tokens(config), cls.spell(config)["unk"]
        check_size(config, len(specials) + len(letters(count_words(engine, units))))
        trainer = trainers.UnigramTrainer(
            vocab_size=config.size, unk_token=unknown, special_tokens=specials, show_progress=False
        )
        engine.train_from_iterator(repeat_units(units), trainer)
        learnt = [(piece, score) for piece, score in scores(engine) if piece not in specials]
        settled = settle(learnt, config.size - len(specials))
        engine.model = models.Unigram([(token, 0.0) for token in specials] + settled, unk_id=specials.index(unknown))
        return engine

    def encode(self, text: str) -> Encoding:
        """Cut one text into tokens and say where each stands; no specials are added."""
        return without_prefix(super().encode(text))

    def _surface(self, token: str) -> str:
        return token.replace(SPACE, " ")
