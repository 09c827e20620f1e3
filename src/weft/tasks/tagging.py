"""Tagging: a label for every word of a sentence, by any model that encodes.

Words stay whole: each is cut into sub-words by itself, as it stands in a text, with the space before it where that is a
part of a token, and its tag is read at the first of them (Devlin et al. 2019, section 5.3). Where the model reads how
words are spelt, each sub-word is spelt as the word that it is a piece of. `crf: true` scores whole sequences of tags
(`weft.nn.layers.crf`).
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from weft.config.schema import Named, Run, Section
from weft.data.batching.packed import PackedItems
from weft.data.labels import Label
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError
from weft.nn.layers.crf import CRF
from weft.nn.layers.losses import cross_entropy_sum
from weft.registry import resolve
from weft.tasks import base
from weft.tasks.base import Answer, Batch, Item, Sums
from weft.tasks.label_task import Labelling, LabellingConfig, LabellingHead
from weft.tasks.metrics import Confusion, exact_match, tally_entities
from weft.tokenization.pretokenize import split_words
from weft.tokenization.trainable import Tokenizer
from weft.tokens import END, Tokens, spell

Output = tuple[list[int], list[float]]  # for each word, the number of its tag and the tag's probability


class TagConfig(LabellingConfig):
    """`scheme`: whether tags mark the words of entities (B-DAY, I-DAY, O), and F1 is of those, or each stands alone."""

    scheme: Literal["auto", "bio", "plain"] = "auto"  # auto: bio, if all labels are O or begin with B-, I-, E- or S-
    crf: bool = False

    @model_validator(mode="after")
    def _whole_paths(self) -> "TagConfig":
        for key in ("weights", "smoothing") if self.crf else ():
            if getattr(self, key):
                raise ValueError(f"task.{key} is of single tags, and task.crf scores whole sequences; leave one out")
        return self


class TagExample(base.Example):
    """Words, or a text to cut into words, and for training and evaluation a tag for each."""

    words: list[str] | None = None
    tags: list[Label] | None = None
    text: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> "TagExample":
        if (self.words is None) == (self.text is None):
            raise ValueError("must have words or text, one of them")
        if self.tags is not None and len(self.tags) != len(self.cut()):
            raise ValueError(f"must have a tag a word, and has {len(self.tags)} for {len(self.cut())}")
        return self

    def cut(self) -> list[str]:
        """Return the words as given, or those of the text."""
        return split_words(self.text or "") if self.words is None else self.words


class TagHead(LabellingHead):
    """Scores on the body's states at the places that the batch names: a softmax at each, or a CRF over all of them."""

    def __init__(
        self, body: Any, labels: int, config: TagConfig, weights: Tensor | None, unknown: int | None = None
    ) -> None:
        super().__init__(body, labels, config, weights, unknown)
        self.crf = CRF(labels) if config.crf else None
        body.drop_pooler()

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Sum -log p of the right tags over the words."""
        assert batch.targets is not None
        scores, lengths = self._read(batch)
        if self.crf is not None:
            return {"words": self.crf.loss_sum(scores, batch.targets, lengths)}, None
        return {"words": cross_entropy_sum(scores, batch.targets, *self.bent)}, None

    def predict(self, batch: Batch, options: Section) -> list[Output]:
        """Choose the likeliest tag of each word, or with a CRF the likeliest sequence of them."""
        scores, lengths = self._read(batch)
        if self.crf is not None:
            tags, likely = self.crf.decode(scores.float(), lengths)
        else:
            likely, tags = scores.float().softmax(-1).max(-1)
        sizes = lengths.tolist()
        pairs = zip(tags.cpu().split(sizes), likely.cpu().split(sizes), strict=True)
        return [(numbers.tolist(), found.tolist()) for numbers, found in pairs]

    def _read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Score every word's tags, (M, K); the words of each sequence, (B,), are M in all."""
        assert batch.at is not None
        states = self.states(self.seen(batch.tokens)).index_select(0, batch.at.ids)
        return self.scores(states), batch.at.lengths


class Tag(Labelling):
    """Items are (bos words eos, as sub-words; where each word begins; spelling, if asked for; the tags, if known)."""

    Config: ClassVar[type[Named]] = TagConfig
    Example = TagExample
    metrics: tuple[str, ...] = ("f1", "precision", "recall", "accuracy")
    metric = "f1"
    label_fields = ("tags",)
    fields = frozenset({"words"})
    config: TagConfig

    _spaced: Callable[[str], str] = staticmethod(str)  # a word as the tokenizer reads it

    def __init__(self, config: TagConfig) -> None:
        super().__init__(config)
        self.bio = config.scheme == "bio" or (config.scheme == "auto" and _marks_entities(self.labels))
        # With no labels yet, and none of the schemes chosen, it is too early to tell which metrics there will be.
        if not self.bio and (config.labels or config.scheme == "plain"):
            self.metrics, self.metric = ("accuracy",), "accuracy"

    def check(self, run: Run) -> None:
        """Entities must be marked by the tags."""
        super().check(run)
        self._spaced = partial(resolve("tokenizer", run.tokenizer.name).spaced, run.tokenizer)
        odd = [label for label in self.labels if len(label) > 1 and label[1] != "-"]  # T-POS may be meant
        if self.config.scheme == "bio" and odd:
            raise ConfigError(
                f"task.scheme: bio is for tags such as B-DAY, I-DAY and O, which mark entities; {odd[0]!r} is none; "
                "set task.scheme: plain, or leave it out"
            )

    def right(self, example: TagExample) -> list[str]:
        """The words' tags."""
        return example.tags or []

    def texts(self, example: TagExample) -> tuple[list[str], list[str]]:
        """Each word trains the tokenizer by itself, as it is encoded."""
        return [self._spaced(word) for word in example.cut()], []

    def cut(self, texts: Sequence[str]) -> list[list[int]]:
        """Cut texts into words, and these into sub-words."""
        return [item[0][1:-1].tolist() for item in self._read(texts)]

    def spelt(self, texts: Sequence[str]) -> list[list[np.ndarray]]:
        """Spell each sub-word as the word that it is a piece of."""
        return [np.split(item[2], np.flatnonzero(item[2] == END)[:-1] + 1) for item in self._read(texts)]

    def _read(self, texts: Sequence[str]) -> list[Item]:
        examples, whole = [TagExample(text=text) for text in texts], TruncationPolicy(sys.maxsize, "error")
        return [items[0] for items in self.encode_batch(examples, self.tokenizer, whole)]

    def encode(self, example: TagExample, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Encode one sentence."""
        return self.encode_batch([example], tokenizer, limit)[0]

    def encode_batch(
        self, examples: Sequence[TagExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many with one call of the tokenizer, each different word once."""
        sentences = [example.cut() for example in examples]
        words = list(dict.fromkeys(chain.from_iterable(sentences)))
        special = tokenizer.specials
        nothing = [special.eos if special.unk is None else special.unk]  # for a word of which no token is left
        cut = tokenizer.ids([tokenizer.spaced(tokenizer.config, word) for word in words])
        pieces = {word: ids or nothing for word, ids in zip(words, cut, strict=True)}
        return [
            self._items(example, [pieces[word] for word in sentence], tokenizer, limit)
            for example, sentence in zip(examples, sentences, strict=True)
        ]

    def _items(
        self, example: TagExample, pieces: list[list[int]], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[Item]:
        numbers = (
            None if example.tags is None else np.array([self.labels.number(tag) for tag in example.tags], np.int32)
        )
        if numbers is not None and not len(numbers):
            return []  # it can neither teach nor judge
        items: list[Item] = []
        for window in _windows(pieces, limit):
            inside = [piece[: limit.longest] for piece in pieces[window]]
            begins = list(accumulate(map(len, inside), initial=1))[:-1]
            ids = [tokenizer.specials.bos, *chain.from_iterable(inside), tokenizer.specials.eos]
            item: Item = np.array(ids, np.int32), np.array(begins, np.int32)
            if self.uses_chars:
                item = (*item, _spelt(example.cut()[window], inside))
            items.append(item if numbers is None else (*item, numbers[window]))
        return items

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join sentences; there are targets where all tags are known."""
        tokens, known = self.tokens(items), self.known(items)
        firsts = tokens.starts.tolist()
        at = Tokens.pack([item[1] + first for item, first in zip(items, firsts, strict=False)])
        targets = None if known is None else torch.from_numpy(np.concatenate(known).astype(np.int64))
        return Batch(tokens, targets, {"words": len(at.ids)}, at=at)

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """The sub-words of each sentence; the walk of a CRF, and spellings, have no one shape."""
        return None if self.uses_chars or self.config.crf else self.lengths(data)

    def head(self, model: Any) -> TagHead:
        """Put the scores of the tags on a body."""
        return TagHead(model, len(self.labels), self.config, self.weights(), self.tokenizer.specials.unk)

    def answer(self, example: TagExample, outputs: list[Output]) -> Answer:
        """Join the windows' tags; a word that was cut off has the tag "", which is never right."""
        words = example.cut()
        tags = [self.labels.names[number] for numbers, _ in outputs for number in numbers]
        scores = [round(likely, 6) for _, found in outputs for likely in found]
        missing = len(words) - len(tags)
        return {"words": words, "tags": tags + [""] * missing, "scores": scores + [0.0] * missing}

    def line(self, answer: Answer) -> str:
        """`word/TAG word/TAG`."""
        return _line(answer["words"], answer["tags"])

    def preview(self, example: TagExample) -> tuple[str, str]:
        """The words, and the words with their tags."""
        words = example.cut()
        return " ".join(words), _line(words, example.tags or [""] * len(words))

    def score(self, answers: Sequence[Answer], examples: Sequence[TagExample]) -> dict[str, float]:
        """Accuracy by word, and where tags mark entities, their F1 as seqeval has it."""
        given, right = [answer["tags"] for answer in answers], [self.right(example) for example in examples]
        accuracy = exact_match(list(chain.from_iterable(given)), list(chain.from_iterable(right)))
        if not self.bio:
            return {"accuracy": accuracy}
        found = tally_entities(given, right)
        return {"f1": found.f1, "precision": found.precision, "recall": found.recall, "accuracy": accuracy}

    def confusion(self, answers: Sequence[Answer], examples: Sequence[TagExample]) -> Confusion | None:
        """Count, by word, which tag was taken for which."""
        pairs = (
            zip(self.right(example), answer["tags"], strict=True)
            for example, answer in zip(examples, answers, strict=True)
        )
        return Confusion.of(self.labels.names, chain.from_iterable(pairs))


def _marks_entities(labels: Iterable[str]) -> bool:
    """Whether tags are of the kind B-DAY, I-DAY, O."""
    marked = [label for label in labels if label != "O"]
    return bool(marked) and all(label[0] in "BIES" and label[1:2] in ("", "-") for label in marked)


def _windows(pieces: Sequence[Sequence[int]], limit: TruncationPolicy) -> list[slice]:
    """Cut a sentence where its sub-words are more than the limit: between words, as few times as can be."""
    if not limit.apply(range(sum(map(len, pieces)))):
        return []
    starts, room = [0], limit.longest
    for place, piece in enumerate(pieces):
        size = min(len(piece), limit.longest)
        if size > room:
            starts.append(place)
            room = limit.longest
        room -= size
    windows = [slice(*pair) for pair in zip(starts, [*starts[1:], len(pieces)], strict=True)]
    return windows[:1] if limit.policy == "cut" else windows


def _spelt(words: Sequence[str], pieces: Sequence[Sequence[int]]) -> np.ndarray:
    """Spell a sentence's tokens, bos and eos among them."""
    each = chain.from_iterable([word] * len(piece) for word, piece in zip(words, pieces, strict=True))
    return spell(["", *each, ""])


def _line(words: Sequence[str], tags: Sequence[str]) -> str:
    return " ".join(" ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True)).splitlines())
