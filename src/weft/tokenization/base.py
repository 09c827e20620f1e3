"""Base class of the tokenizers: encode and decode, train from streams of text, save and load.

Special tokens have the first ids. Text that contains the string of one ("</s>", "[MASK]") is ordinary text and never
gets its id, unless `split_special_tokens` is false. Out-of-vocabulary tokens become the unknown token. `decode` keeps
it and skips the other special tokens.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator
from tokenizers import Tokenizer as Engine

from weft.config.schema import Named, read_section
from weft.errors import CheckpointError, ConfigError, DataError, did_you_mean
from weft.registry import names, resolve
from weft.tokenization.long_texts import MAX_PIECE, group_texts, split_text
from weft.tokenization.tokenizer_file import panics_as_errors, read_tokenizer_file
from weft.tokenization.word_counts import check_text
from weft.tokens import Specials

# Set, so that the tokenizers library does not warn when a process forks. Its threads do not survive the fork, so a data
# worker would deadlock on them: parallelism is off there.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))

_REMEDY = "copy the file from the run that made it, or train again"


@dataclass(frozen=True)
class Encoding:
    """One encoded text; tokens are as in the vocabulary, and `text[a:b]` is the span of a token with offsets (a, b)."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    tokens: list[str]


class TokenizerConfig(Named):
    """Options of every tokenizer; `target` is the tokenizer section of the target side, where it has its own.

    `specials` overrides the strings of special tokens: GPT-2 has {bos: <|endoftext|>, eos: <|endoftext|>}, one token
    for both roles. `num_separators` is the number of eos tokens between the two texts of a pair: RoBERTa has 2.
    """

    lowercase: bool = False  # lower-case texts first
    specials: dict[str, str] | None = None  # strings of the special tokens, by role: {bos: <s>}
    num_separators: int = Field(1, ge=1, le=2)  # eos tokens between the texts of a pair; RoBERTa has 2
    # whether "[MASK]" in a text is text; false: it is the special token, as by default in transformers
    split_special_tokens: bool = True
    target: dict[str, Any] | None = None  # the tokenizer section of the target side, if it has its own

    @field_validator("specials")
    @classmethod
    def _check_specials(cls, specials: dict[str, str] | None) -> dict[str, str] | None:
        roles = [role.name for role in fields(Specials)]
        for role, token in (specials or {}).items():
            if role not in roles:
                raise ValueError(f"names roles of special tokens, but {role!r} is none; {did_you_mean(role, roles)}")
            # The pre-tokenizer splits such a string when it occurs in text, so it never gets the special token's id.
            if not re.search(r"\w", token) or not re.search(r"[^\w\s]", token) or re.search(r"\s", token):
                raise ValueError(f"a special must have letters and signs, as <|end|> has, and no space: got {token!r}")
        return specials

    @field_validator("target")
    @classmethod
    def _check_target(cls, raw: dict[str, Any] | None) -> dict[str, Any] | None:
        if raw is not None:
            read_target(raw)
        return raw


class Tokenizer:
    """Encodes text to ids and decodes ids to text; a subclass learns its vocabulary in `fit`."""

    Config: ClassVar[type[TokenizerConfig]]
    model: ClassVar[str]  # class name of the tokenizers library's model
    default_special_tokens: ClassVar[Mapping[str, str]] = {
        "unk": "<unk>",
        "bos": "<s>",
        "eos": "</s>",
    }  # role in `Specials` -> token

    def __init__(self, config: Any, engine: Engine, target: "Tokenizer | None" = None):
        engine.encode_special_tokens = config.split_special_tokens  # not kept in tokenizer.json
        engine.post_processor = None  # tasks add the special tokens
        engine.no_truncation()
        engine.no_padding()
        self.config = config
        self.engine = engine
        self.target = self if target is None else target
        ids: dict[str, Any] = {
            role: engine.token_to_id(token) for role, token in self.special_tokens_map(config).items()
        }
        self.specials = Specials(**ids)
        self._skipped_ids = {id for role, id in ids.items() if role != "unk"}
        self._size = int(engine.get_vocab_size())

    @classmethod
    def special_tokens_map(cls, config: Any) -> Mapping[str, str]:
        """Return the token of each role in `Specials`."""
        return {**cls.default_special_tokens, **(config.specials or {})}

    @classmethod
    def special_tokens(cls, config: Any) -> list[str]:
        """Return the special tokens without duplicates: one token may have several roles."""
        return list(dict.fromkeys(cls.special_tokens_map(config).values()))

    @classmethod
    def fit(cls, texts: Iterable[str], config: Any) -> Engine:
        """Train on a stream of texts and return the engine with the learnt vocabulary."""
        raise ConfigError(f"tokenizer.name: {cls.__name__} does not define fit(), which a tokenizer needs")

    @classmethod
    def train(cls, texts: Iterable[str], config: Any, targets: Iterable[str] | None = None) -> Self:
        """Train on streams that are read once: a joint vocabulary, or one per side where the config has a target."""
        if config.target is None:
            return cls(config, cls.fit(chain(texts, () if targets is None else targets), config))
        if targets is None:
            raise ConfigError("tokenizer.target: there is no target side to learn it from; leave it out")
        return cls(config, cls.fit(texts, config), _train_target(read_target(config.target), targets))

    @classmethod
    def load(cls, directory: Path, config: Any) -> Self:
        """Load a tokenizer that `save` wrote."""
        engine = cls._read_engine(directory / "tokenizer.json", config)
        if config.target is None:
            return cls(config, engine)
        target_config = read_target(config.target)
        target_class: type[Tokenizer] = resolve("tokenizer", target_config.name)
        target = target_class._read_engine(directory / "tokenizer.target.json", target_config)
        return cls(config, engine, target_class(target_config, target))

    @classmethod
    def _read_engine(cls, path: Path, config: Any) -> Engine:
        try:
            engine = read_tokenizer_file(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_REMEDY}") from None
        model_name = type(engine.model).__name__
        if model_name != cls.model:
            raise CheckpointError(f"{path}: must hold a {cls.model} model, but holds {model_name} instead; {_REMEDY}")
        missing = [token for token in cls.special_tokens_map(config).values() if engine.token_to_id(token) is None]
        if missing:
            raise CheckpointError(f"{path}: lacks the special tokens {', '.join(missing)}; {_REMEDY}")
        return engine

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json`, and `tokenizer.target.json` where the target side has its own tokenizer."""
        (directory / "tokenizer.json").write_text(self.engine.to_str(), encoding="utf-8")
        if self.target is not self:
            (directory / "tokenizer.target.json").write_text(self.target.engine.to_str(), encoding="utf-8")

    def __reduce__(self) -> tuple[Any, ...]:
        # For spawned data workers: the library's own pickling drops the flag `encode_special_tokens`.
        target = None if self.target is self else self.target
        return _unpickle, (type(self), self.config, self.engine.to_str(), target)

    def __len__(self) -> int:
        """Return the size of the vocabulary, V."""
        return self._size

    @property
    def identity(self) -> str:
        """The serialised tokenizer of this side, as input of a digest."""
        return str(self.engine.to_str()) + ("" if self.config.split_special_tokens else "\0special tokens in texts")

    @property
    def joint(self) -> bool:
        """Return whether both sides share one vocabulary, so that a model has one embedding matrix for both."""
        return self.target is self

    @property
    def lossless(self) -> bool:
        """Return whether `decode(encode(text))` returns every text exactly."""
        return False

    @property
    def unknown_slots(self) -> range:
        """The ids that stand for the first, the second, … unknown word of a text; none, the default."""
        return range(0)

    @property
    def pair_separator(self) -> list[int]:
        """The separator ids between the two texts of a pair: `sep` (Radford et al. 2018, section 3.3), or else eos."""
        if self.specials.sep is not None:
            return [self.specials.sep]
        return [self.specials.eos] * int(self.config.num_separators)

    @classmethod
    def with_leading_space(cls, config: Any, word: str) -> str:
        """Return a word as it occurs after another word: with the leading space, where tokens include it."""
        return word

    def encode(self, text: str, needed: int | None = None) -> Encoding:
        """Encode one text to ids, offsets and tokens, without special tokens.

        A text of over `MAX_PIECE` characters is encoded in pieces; with `needed`, until there are so many tokens.
        """
        if len(text) <= MAX_PIECE:
            return self._encode_text(text)
        whole, start = Encoding([], [], []), 0
        for piece in split_text(text):
            part = self._encode_text(piece)
            whole.ids.extend(part.ids)
            whole.offsets.extend((start + begin, start + end) for begin, end in part.offsets)
            whole.tokens.extend(part.tokens)
            start += len(piece)
            if needed is not None and len(whole.ids) >= needed:
                break
        return whole

    def ids(self, texts: Sequence[str], needed: int | None = None) -> list[list[int]]:
        """Return the ids of many texts, encoded in parallel, without offsets or special tokens.

        A text of over `MAX_PIECE` characters is encoded in pieces; with `needed`, until there are so many tokens.
        """
        batch: list[list[int]] = []
        for group in group_texts(texts):
            if len(group[0]) > MAX_PIECE:
                batch.append(self._ids_of_pieces(group[0], needed))
            else:
                batch += self._ids_of_texts(group)
        return batch

    def _ids_of_pieces(self, text: str, needed: int | None) -> list[int]:
        ids: list[int] = []
        for piece in split_text(text):
            ids += self._ids_of_texts([piece])[0]
            if needed is not None and len(ids) >= needed:
                break
        return ids

    def _encode_text(self, text: str) -> Encoding:
        """Encode one text, or a piece of it, in one call of the library."""
        check_text(text)
        with _library_errors():
            encoding = self.engine.encode(text, add_special_tokens=False)
            return Encoding(encoding.ids, encoding.offsets, encoding.tokens)

    def _ids_of_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts in one call of the library."""
        try:
            with _library_errors():
                return [item.ids for item in self.engine.encode_batch_fast(list(texts), add_special_tokens=False)]
        except TypeError:  # the library raises it for a lone surrogate
            for text in texts:
                check_text(text)
            raise

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; the unknown token is kept, other special tokens are skipped."""
        self._check_id(min(ids, default=0))
        self._check_id(max(ids, default=0))
        text_ids = [id for id in ids if id not in self._skipped_ids]
        with _library_errors():
            return str(self.engine.decode(text_ids, skip_special_tokens=False))

    def token(self, id: int) -> str:
        r"""Return a token in printable form, for labels: " the" for "Ġthe", "\n" for a newline."""
        self._check_id(id)
        surface = self._surface(str(self.engine.id_to_token(id)))
        return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in surface)

    def _surface(self, token: str) -> str:
        return token

    def _check_id(self, id: int) -> None:
        if not 0 <= id < self._size:
            raise DataError(f"token id {id} is not in this vocabulary of {self._size}; is it another tokenizer's?")


@contextmanager
def _library_errors() -> Iterator[None]:
    """Turn an error of the library on a text, or a panic, into a DataError; a TypeError stays one."""
    try:
        with panics_as_errors():
            yield
    except TypeError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"the tokenizer cannot read the text: {error}; leave it out, or use another model") from None


def train_tokenizer(config: Any, texts: Iterable[str], targets: Iterable[str] | None = None) -> Tokenizer:
    """Train a tokenizer of the class that its config section names."""
    tokenizer_class: type[Tokenizer] = resolve("tokenizer", config.name)
    return tokenizer_class.train(texts, config, targets)


def load_tokenizer(config: Any, directory: Path) -> Tokenizer:
    """Load a saved tokenizer of the class that its config section names."""
    tokenizer_class: type[Tokenizer] = resolve("tokenizer", config.name)
    return tokenizer_class.load(directory, config)


def read_target(raw: Mapping[str, Any]) -> TokenizerConfig:
    """Validate the section `tokenizer.target` and return its config.

    Its name must be one of weft's tokenizers: an import path would bypass the check whether a checkpoint is trusted.
    """
    name = raw.get("name")
    if name not in names("tokenizer"):
        hint = did_you_mean(str(name), names("tokenizer"))
        raise ConfigError(f"tokenizer.target.name: must be a tokenizer of weft's, but is {name!r} instead; {hint}")
    if raw.get("target") is not None:
        raise ConfigError("tokenizer.target.target: a target has no target of its own; leave it out")
    config: TokenizerConfig = read_section(resolve("tokenizer", name).Config, raw, "tokenizer.target")
    return config


def _train_target(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    try:
        return train_tokenizer(config, texts)
    except (ConfigError, DataError) as error:
        raise type(error)(re.sub(r"^tokenizer", "tokenizer.target", str(error))) from None


def _unpickle(tokenizer_class: type[Tokenizer], config: Any, engine: str, target: Tokenizer | None) -> Tokenizer:
    return tokenizer_class(config, Engine.from_str(engine), target)
