"""What every tokenizer does: text to ids and back, training from streams, saving and loading.

The special tokens have the first ids. A text that spells one ("</s>", "[MASK]") is text like any other and never gets
its id. What a vocabulary does not hold becomes the unknown token, which `decode` shows; it leaves other specials out.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator
from tokenizers import Tokenizer as Engine

from weft.config.schema import Named, read_section
from weft.errors import CheckpointError, ConfigError, DataError, did_you_mean
from weft.registry import names, resolve
from weft.tokenization.word_counts import check_text
from weft.tokens import Specials

# Set, so that the library does not warn where a process forks. Its threads do not come along into the new process (a
# data worker), which would wait for them for ever: there it must do without.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))

_REMEDY = "copy the file from the run that made it, or train again"


@dataclass(frozen=True)
class Encoding:
    """One text as tokens, spelt as in the vocabulary; `text[a:b]` is what a token with offsets `(a, b)` stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    tokens: list[str]


class Settings(Named):
    """What every kind can be told; `target` is a tokenizer section for the other side, where it differs.

    `specials` spells special tokens in another way than the kind does: GPT-2's is {bos: <|endoftext|>, eos:
    <|endoftext|>}, one token for both. `gap` is how many eos stand between the two texts of a pair: RoBERTa has 2.
    """

    lowercase: bool = False
    specials: dict[str, str] | None = None
    gap: int = Field(1, ge=1, le=2)
    target: dict[str, Any] | None = None

    @field_validator("specials")
    @classmethod
    def _check_specials(cls, spelt: dict[str, str] | None) -> dict[str, str] | None:
        roles = [role.name for role in fields(Specials)]
        for role, token in (spelt or {}).items():
            if role not in roles:
                raise ValueError(f"names roles of special tokens, but {role!r} is none; {did_you_mean(role, roles)}")
            # Such a one is cut in pieces where a text spells it, and so never taken for it.
            if not re.search(r"\w", token) or not re.search(r"[^\w\s]", token) or re.search(r"\s", token):
                raise ValueError(f"a special must have letters and signs, as <|end|> has, and no space: got {token!r}")
        return spelt

    @field_validator("target")
    @classmethod
    def _check_target(cls, raw: dict[str, Any] | None) -> dict[str, Any] | None:
        if raw is not None:
            read_target(raw)
        return raw


class Tokenizer:
    """Text to ids and back; a kind says in `fit` how its vocabulary is learnt."""

    Config: ClassVar[type[Settings]]
    model: ClassVar[str]  # the library's name for what does the work
    spelling: ClassVar[Mapping[str, str]] = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}  # by role in `Specials`

    def __init__(self, config: Any, engine: Engine, target: "Tokenizer | None" = None):
        engine.encode_special_tokens = True  # what spells a special is text; not kept in tokenizer.json
        engine.post_processor = None  # tasks add the specials
        engine.no_truncation()
        engine.no_padding()
        self.config = config
        self.engine = engine
        self.target = self if target is None else target
        ids: dict[str, Any] = {role: engine.token_to_id(token) for role, token in self.spell(config).items()}
        self.specials = Specials(**ids)
        self._hidden = {id for role, id in ids.items() if role != "unk"}
        self._size = int(engine.get_vocab_size())

    @classmethod
    def spell(cls, config: Any) -> Mapping[str, str]:
        """Say which token has which of the roles in `Specials`."""
        return {**cls.spelling, **(config.specials or {})}

    @classmethod
    def special_tokens(cls, config: Any) -> list[str]:
        """List the special tokens, each once: one may have several roles."""
        return list(dict.fromkeys(cls.spell(config).values()))

    @classmethod
    def fit(cls, texts: Iterable[str], config: Any) -> Engine:
        """Learn a vocabulary from a stream of texts."""
        raise ConfigError(f"tokenizer.name: {cls.__name__} does not define fit(), which a tokenizer needs")

    @classmethod
    def train(cls, texts: Iterable[str], config: Any, targets: Iterable[str] | None = None) -> Self:
        """Learn from streams that are read once: a vocabulary of both, or one each where the config has a target."""
        if config.target is None:
            return cls(config, cls.fit(chain(texts, () if targets is None else targets), config))
        if targets is None:
            raise ConfigError("tokenizer.target: there is no target side to learn it from; leave it out")
        return cls(config, cls.fit(texts, config), _train_target(read_target(config.target), targets))

    @classmethod
    def load(cls, directory: Path, config: Any) -> Self:
        """Read what `save` wrote."""
        engine = cls._read(directory / "tokenizer.json", config)
        if config.target is None:
            return cls(config, engine)
        other = read_target(config.target)
        kind: type[Tokenizer] = resolve("tokenizer", other.name)
        return cls(config, engine, kind(other, kind._read(directory / "tokenizer.target.json", other)))

    @classmethod
    def _read(cls, path: Path, config: Any) -> Engine:
        try:
            engine = Engine.from_str(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: there is no such file; {_REMEDY}") from None
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path}: cannot be read as a tokenizer: {error}; {_REMEDY}") from None
        kind = type(engine.model).__name__
        if kind != cls.model:
            raise CheckpointError(f"{path}: must hold a {cls.model} model, but holds {kind} instead; {_REMEDY}")
        missing = [token for token in cls.spell(config).values() if engine.token_to_id(token) is None]
        if missing:
            raise CheckpointError(f"{path}: lacks the special tokens {', '.join(missing)}; {_REMEDY}")
        return engine

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json`, and `tokenizer.target.json` where the target side has its own."""
        (directory / "tokenizer.json").write_text(self.engine.to_str(pretty=True), encoding="utf-8")
        if self.target is not self:
            (directory / "tokenizer.target.json").write_text(self.target.engine.to_str(pretty=True), encoding="utf-8")

    def __reduce__(self) -> tuple[Any, ...]:
        # For data workers that are spawned: the library's own way forgets that what spells a special is text.
        target = None if self.target is self else self.target
        return _revive, (type(self), self.config, self.engine.to_str(), target)

    def __len__(self) -> int:
        """Return the size of the vocabulary, V."""
        return self._size

    @property
    def identity(self) -> str:
        """What makes this side the tokenizer that it is, for a digest."""
        return str(self.engine.to_str())

    @property
    def joint(self) -> bool:
        """Whether both sides have the same ids, so that a model has one table for both."""
        return self.target is self

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives back every text exactly."""
        return False

    @property
    def between(self) -> list[int]:
        """The ids that stand between the two texts of a pair: `sep` (Radford et al. 2018, section 3.3), or else eos."""
        if self.specials.sep is not None:
            return [self.specials.sep]
        return [self.specials.eos] * int(self.config.gap)

    @classmethod
    def spaced(cls, config: Any, word: str) -> str:
        """Spell a word as it stands in a text after another: with the space, where that is no token of its own."""
        return word

    def encode(self, text: str) -> Encoding:
        """Cut one text into tokens and say where each stands; no specials are added."""
        check_text(text)
        encoding = self.engine.encode(text, add_special_tokens=False)
        return Encoding(encoding.ids, encoding.offsets, encoding.tokens)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Cut many texts, in parallel, without offsets."""
        try:
            return [item.ids for item in self.engine.encode_batch_fast(list(texts), add_special_tokens=False)]
        except TypeError:  # what the library makes of a lone surrogate
            for text in texts:
                check_text(text)
            raise

    def decode(self, ids: Sequence[int]) -> str:
        """Put tokens together to a text; the unknown token is shown, other specials are left out."""
        self._check_id(min(ids, default=0))
        self._check_id(max(ids, default=0))
        shown = [id for id in ids if id not in self._hidden]
        return str(self.engine.decode(shown, skip_special_tokens=False))

    def token(self, id: int) -> str:
        r"""Return one token in print, for labels: " the" for "Ġthe", "\n" for a line's end."""
        self._check_id(id)
        surface = self._surface(str(self.engine.id_to_token(id)))
        return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in surface)

    def _surface(self, token: str) -> str:
        return token

    def _check_id(self, id: int) -> None:
        if not 0 <= id < self._size:
            raise DataError(f"token id {id} is not in this vocabulary of {self._size}; is it another tokenizer's?")


def train_tokenizer(config: Any, texts: Iterable[str], targets: Iterable[str] | None = None) -> Tokenizer:
    """Learn a tokenizer of the kind that its section names."""
    kind: type[Tokenizer] = resolve("tokenizer", config.name)
    return kind.train(texts, config, targets)


def load_tokenizer(config: Any, directory: Path) -> Tokenizer:
    """Read a saved tokenizer of the kind that its section names."""
    kind: type[Tokenizer] = resolve("tokenizer", config.name)
    return kind.load(directory, config)


def read_target(raw: Mapping[str, Any]) -> Settings:
    """Check the section `tokenizer.target`.

    Its kind must be one of weft's: a name that is code would slip past the question whether a checkpoint is trusted.
    """
    name = raw.get("name")
    if name not in names("tokenizer"):
        hint = did_you_mean(str(name), names("tokenizer"))
        raise ConfigError(f"tokenizer.target.name: must be a tokenizer of weft's, but is {name!r} instead; {hint}")
    if raw.get("target") is not None:
        raise ConfigError("tokenizer.target.target: a target has no target of its own; leave it out")
    config: Settings = read_section(resolve("tokenizer", name).Config, raw, "tokenizer.target")
    return config


def _train_target(config: Settings, texts: Iterable[str]) -> Tokenizer:
    try:
        return train_tokenizer(config, texts)
    except (ConfigError, DataError) as error:
        raise type(error)(re.sub(r"^tokenizer", "tokenizer.target", str(error))) from None


def _revive(kind: type[Tokenizer], config: Any, engine: str, target: Tokenizer | None) -> Tokenizer:
    return kind(config, Engine.from_str(engine), target)
