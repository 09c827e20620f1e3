"""Trainable tokenizers on the `tokenizers` library: words, characters, bytes, BPE (two), WordPiece, Unigram.

They differ in pre-tokenization and in how they learn a vocabulary; the rest is in `Tokenizer`. Training is
deterministic: the same stream of text gives the same `tokenizer.json`, byte by byte.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from weft.tokenization.backend import (
    BYTES,
    SPACE,
    alphabet_of,
    apply_normalizer,
    assign_ids,
    byte_level_engine,
    character_engine,
    check_size,
    count_words,
    decode_byte_level,
    fix_prefix_offsets,
    most_frequent,
    set_lowercase,
    set_metaspace,
    stabilize_unigram,
    unigram_scores,
)
from weft.tokenization.base import Encoding, Tokenizer, TokenizerConfig, load_tokenizer, train_tokenizer
from weft.tokenization.word_counts import check_text, count_units, no_text, repeat_units

if TYPE_CHECKING:
    from weft.tokenization.whitespace import WordTable

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

UNKNOWN_SLOT = "<unk:{}>"  # the token of an unknown word by its number in the text
_MIN_FREQUENCY = 2  # of a pair that is merged, as in subword-nmt


class Words(Tokenizer):
    """Runs of letters, marks, digits and "_", and every other non-space character alone; decoded with single spaces.

    With `split: whitespace`, for text that is already tokenized, words are separated by whitespace, and the word
    "<unk>" is the unknown token.

    With `unknown_slots` the vocabulary has the tokens <unk:0>, <unk:1>, …, which a task may give to the first unknown
    word of a text, to the second and so on (weft.tasks.unknown_words). A tokenizer by itself gives them to no word.
    """

    model = "WordLevel"
    _whitespace: "tuple[int, WordTable] | None" = None

    class Config(TokenizerConfig):
        """Vocabulary size, minimum count, and whether all digits are replaced by 0: 1987 and 2012 are then one word."""

        size: int = Field(30_000, ge=4, le=10_000_000)  # of the vocabulary, special tokens included
        min_count: int = Field(1, ge=1)  # rarer ones are unknown
        zeros: bool = False  # read all digits as 0
        split: Literal["punctuation", "whitespace"] = "punctuation"  # punctuation: marks are words of their own
        # how many different unknown words of a text have tokens of their own, to be copied
        unknown_slots: int = Field(0, ge=0, le=10_000)

        @model_validator(mode="after")
        def _check_slots(self) -> "Words.Config":
            if self.unknown_slots and self.size < self.unknown_slots + 4:
                raise ValueError(
                    f"tokenizer.size counts the unknown_slots, too, so it must be at least {self.unknown_slots + 4}: "
                    f"got {self.size}; raise it, or lower unknown_slots"
                )
            return self

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Train: keep the most frequent words."""
        unknown = cls.special_tokens_map(config)["unk"]
        engine = Engine(models.WordLevel({}, unk_token=unknown))
        splits = [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated")]
        engine.pre_tokenizer = pre_tokenizers.Sequence(splits if config.split == "punctuation" else splits[:1])
        set_lowercase(engine, config)
        if config.zeros:
            existing = [] if engine.normalizer is None else [engine.normalizer]
            engine.normalizer = normalizers.Sequence([*existing, normalizers.Replace(Regex(r"\d"), "0")])
        specials = cls.special_tokens(config)
        reserved = [*specials, *map(UNKNOWN_SLOT.format, range(config.unknown_slots))]
        counts = count_words(engine, count_units(texts))
        for token in reserved:
            counts.pop(token, None)
        vocabulary = most_frequent(counts, config, reserved)
        engine.model = models.WordLevel(vocabulary, unk_token=unknown)
        engine.add_special_tokens(specials)
        return engine

    @property
    def unknown_slots(self) -> range:
        """The ids that stand for the first, the second, … unknown word of a text."""
        first = self.engine.token_to_id(UNKNOWN_SLOT.format(0)) or 0
        return range(first, first + self.config.unknown_slots)

    def _encode_text(self, text: str) -> Encoding:
        """Encode one text to ids, offsets and words."""
        encoding = super()._encode_text(text)
        return replace(encoding, ids=self._mask_special_ids(encoding.ids)) if self._whole_words else encoding

    def _ids_of_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, encoded in parallel, without offsets."""
        if not self._whole_words or self.engine.normalizer is not None:
            batch = super()._ids_of_texts(texts)
            return [self._mask_special_ids(ids) for ids in batch] if self._whole_words else batch
        try:
            return self._whitespace_tokenizer().ids(texts)
        except UnicodeEncodeError:  # a lone surrogate
            for text in texts:
                check_text(text)
            raise

    @property
    def _whole_words(self) -> bool:
        """Return whether a word may be the string of a special token, which is then unknown."""
        return self.config.split == "whitespace" and bool(self.config.split_special_tokens)

    def _whitespace_tokenizer(self) -> "WordTable":
        """Return the compiled whitespace tokenizer, which is faster than the library."""
        from weft.tokenization.whitespace import WordTable

        if self._whitespace is None or self._whitespace[0] != self._size:
            unknown = self.specials.unk
            assert unknown is not None
            reserved = self._skipped_ids.union(self.unknown_slots)
            vocabulary = {word: id for word, id in self.engine.get_vocab().items() if id not in reserved}
            self._whitespace = self._size, WordTable(vocabulary, unknown)
        return self._whitespace[1]

    def _mask_special_ids(self, ids: list[int]) -> list[int]:
        """Return ids with bos, eos and slots replaced by unk: in text, "<s>" or "<unk:0>" is an unknown word."""
        unknown, reserved = self.specials.unk, self._skipped_ids.union(self.unknown_slots)
        assert unknown is not None
        return [unknown if id in reserved else id for id in ids] if reserved & set(ids) else ids

    def extend(self, words: Iterable[str]) -> None:
        """Add words to the vocabulary up to its size; words that the pre-tokenizer would split are skipped."""
        vocabulary = self.engine.get_vocab()
        for word in words:
            if len(vocabulary) >= self.config.size:
                break
            parts = self.engine.pre_tokenizer.pre_tokenize_str(apply_normalizer(self.engine, word))
            if word not in vocabulary and [part for part, _ in parts] == [word]:
                vocabulary[word] = len(vocabulary)
        self.engine.model = models.WordLevel(vocabulary, unk_token=self.special_tokens_map(self.config)["unk"])
        self._size = len(vocabulary)


class Characters(Tokenizer):
    """Character-level tokenizer: Unicode code points, including spaces and newlines."""

    model = "BPE"  # without merges: faster than a pre-tokenizer that splits

    class Config(TokenizerConfig):
        """Vocabulary size (none: all characters), and minimum count."""

        # of the vocabulary, special tokens included; None: all characters
        size: int | None = Field(None, ge=4, le=10_000_000)
        min_count: int = Field(1, ge=1)  # rarer ones are unknown

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Train: keep the most frequent characters."""
        engine = Engine(models.BPE())
        set_lowercase(engine, config)
        counts: Counter[str] = Counter()
        for unit, count in count_units(texts).items():
            for char in apply_normalizer(engine, unit):
                counts[char] += count
        specials = cls.special_tokens(config)
        engine.model = models.BPE(
            most_frequent(counts, config, specials), [], unk_token=cls.special_tokens_map(config)["unk"], fuse_unk=False
        )
        engine.decoder = decoders.Fuse()
        engine.add_special_tokens(specials)
        return engine


class Bytes(Tokenizer):
    """Byte-level tokenizer of UTF-8: byte `b` has the id `b + 2`. Lossless, with no unknown token."""

    model = "BPE"
    default_special_tokens: ClassVar[Mapping[str, str]] = {"bos": "<s>", "eos": "</s>"}

    class Config(TokenizerConfig):
        """No options of its own."""

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Return the fixed vocabulary of 256 bytes; raise if there is no text."""
        if not any(text.strip() for text in texts):
            raise no_text()
        specials = cls.special_tokens(config)
        engine = Engine(models.BPE(assign_ids([*specials, *sorted(BYTES, key=BYTES.__getitem__)]), []))
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.decoder = decoders.ByteLevel()
        set_lowercase(engine, config)
        engine.add_special_tokens(specials)
        return engine

    @property
    def lossless(self) -> bool:
        """Return whether decoding returns every text exactly: true without lower-casing."""
        return self.engine.normalizer is None

    def _surface(self, token: str) -> str:
        return decode_byte_level(token)


class BPE(Tokenizer):
    """Byte-pair encoding: byte-level as in GPT-2, or (`bytes: false`) character-level.

    Byte-level BPE is lossless and has no unknown token (Radford et al., 2019). Character-level BPE is that of Sennrich
    et al., 2016, "Neural machine translation of rare words with subword units", except that a word boundary is
    SentencePiece's "▁" at the word's start, not "</w>" at its end; newlines and tabs are tokens of their own.
    """

    model = "BPE"

    class Config(TokenizerConfig):
        """Vocabulary size, including alphabet and special tokens."""

        size: int = Field(8_000, ge=4, le=10_000_000)  # of the vocabulary, special tokens included
        bytes: bool = True  # byte-level as in GPT-2; false: over characters

    @classmethod
    def special_tokens_map(cls, config: Config) -> Mapping[str, str]:
        """Return the token of each role; byte-level BPE has no unknown token."""
        return {
            **(Bytes.default_special_tokens if config.bytes else cls.default_special_tokens),
            **(config.specials or {}),
        }

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Train: merge the most frequent pairs."""
        engine = byte_level_engine() if config.bytes else character_engine(cls.special_tokens_map(config))
        set_lowercase(engine, config)
        units = count_units(texts)
        specials = cls.special_tokens(config)
        alphabet = sorted(BYTES if config.bytes else alphabet_of(count_words(engine, units)))
        check_size(config, len(specials) + len(alphabet))
        trainer = trainers.BpeTrainer(
            vocab_size=config.size,
            min_frequency=_MIN_FREQUENCY,
            special_tokens=specials,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        engine.train_from_iterator(repeat_units(units), trainer)
        return engine

    @classmethod
    def with_leading_space(cls, config: Config, word: str) -> str:
        """Return a word with its leading space if byte-level; character-level BPE adds one to every text anyway."""
        return f" {word}" if config.bytes and word and not word.startswith(" ") else word

    @property
    def lossless(self) -> bool:
        """Return whether decoding is exact: it is byte-level, and has no normalizer and no added prefix space."""
        prefix_space = getattr(self.engine.pre_tokenizer, "add_prefix_space", False)  # some imported tokenizers set it
        return self.config.bytes and self.engine.normalizer is None and not prefix_space

    def _encode_text(self, text: str) -> Encoding:
        """Encode one text to ids, offsets and tokens, without special tokens."""
        return fix_prefix_offsets(super()._encode_text(text))

    def _surface(self, token: str) -> str:
        return decode_byte_level(token) if self.config.bytes else token.replace(SPACE, " ")


class WordPiece(Tokenizer):
    """BERT's WordPiece: its normalizer, its punctuation splitting, "##" continuation prefix (Devlin et al., 2019)."""

    model = "WordPiece"
    default_special_tokens: ClassVar[Mapping[str, str]] = {
        "pad": "[PAD]",
        "unk": "[UNK]",
        "bos": "[CLS]",
        "eos": "[SEP]",
        "mask": "[MASK]",
    }

    class Config(TokenizerConfig):
        """Vocabulary size, including alphabet and special tokens; `lowercase` also strips accents."""

        size: int = Field(30_000, ge=6, le=10_000_000)  # of the vocabulary, special tokens included

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Train by merging the most frequent pairs, as the library does: BERT's own trainer was not published."""
        engine = cls._build_engine({}, config)
        units = count_units(texts)
        words = count_words(engine, units)
        specials = cls.special_tokens(config)
        # The library assigns their ids in an order that changes from run to run, unless they exist beforehand.
        continuations = sorted({f"##{char}" for word in words for char in word[1:]})
        check_size(config, len(specials) + len(continuations) + len(alphabet_of(words)))
        trainer = trainers.WordPieceTrainer(
            vocab_size=config.size,
            min_frequency=_MIN_FREQUENCY,
            special_tokens=[*specials, *continuations],
            show_progress=False,
        )
        engine.train_from_iterator(repeat_units(units), trainer)
        # A new engine, without `continuations` among the special tokens.
        trained = cls._build_engine(engine.get_vocab(), config)
        trained.add_special_tokens(specials)
        return trained

    @classmethod
    def _build_engine(cls, vocabulary: dict[str, int], config: Config) -> Engine:
        engine = Engine(models.WordPiece(vocabulary, unk_token=cls.special_tokens_map(config)["unk"]))
        engine.normalizer = normalizers.BertNormalizer(lowercase=config.lowercase)
        engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        engine.decoder = decoders.WordPiece()
        return engine


class Unigram(Tokenizer):
    """SentencePiece's unigram model, with its normalizer (NFKC; runs of spaces, tabs and newlines become one space).

    Kudo, 2018, "Subword regularization: improving neural network translation models with multiple subword candidates".
    """

    model = "Unigram"

    class Config(TokenizerConfig):
        """Vocabulary size, including alphabet and special tokens."""

        size: int = Field(8_000, ge=4, le=10_000_000)  # of the vocabulary, special tokens included

    @classmethod
    def fit(cls, texts: Iterable[str], config: Config) -> Engine:
        """Train: start from frequent substrings and prune those that contribute least to the likelihood."""
        engine = Engine(models.Unigram())
        steps = [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
        engine.normalizer = normalizers.Sequence(steps + [normalizers.Lowercase()] * config.lowercase)
        set_metaspace(engine, cls.special_tokens_map(config))
        units = count_units(texts)
        specials, unknown = cls.special_tokens(config), cls.special_tokens_map(config)["unk"]
        check_size(config, len(specials) + len(alphabet_of(count_words(engine, units))))
        trainer = trainers.UnigramTrainer(
            vocab_size=config.size, unk_token=unknown, special_tokens=specials, show_progress=False
        )
        engine.train_from_iterator(repeat_units(units), trainer)
        pieces = [(piece, score) for piece, score in unigram_scores(engine) if piece not in specials]
        vocabulary = stabilize_unigram(pieces, config.size - len(specials))
        engine.model = models.Unigram([(token, 0.0) for token in specials] + vocabulary, unk_id=specials.index(unknown))
        return engine

    def _encode_text(self, text: str) -> Encoding:
        """Encode one text to ids, offsets and tokens, without special tokens."""
        return fix_prefix_offsets(super()._encode_text(text))

    def _surface(self, token: str) -> str:
        return token.replace(SPACE, " ")
