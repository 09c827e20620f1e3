"""Masked language modelling: words that are hidden, told from all the others, by any model that fills.

`weft.tasks.mlm.masking` says which words are chosen, anew each time they are read. How a corpus is read (`task.reads`):

| reads   | a sequence is                                                                              |
|---------|--------------------------------------------------------------------------------------------|
| `packs` | `data.longest` tokens of the documents laid end to end (RoBERTa); with `next_sentence`      |
|         | bos A eos B eos out of a document or of two, of at most as many (BERT)                      |
| `rows`  | a text                                                                                     |

`data.longest` counts bos and eos. With `next_sentence`, by default where the model tells segments apart, it also learns
whether B follows A (`weft.data.batching.sentence_pairs`).

A question is a text with masks, "[MASK]" or as the tokenizer spells it; the answer has the best tokens for each.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from weft.config.schema import Named, Run, Share
from weft.data.batching.lm_stream import Readable, Reading, Spans
from weft.data.batching.loader import plan
from weft.data.batching.packed import PackedItems, pack
from weft.data.batching.sentence_pairs import Documents, Pairs, Signs, Texts, Windows, join_pairs
from weft.data.batching.static_shape import StaticShape
from weft.data.corpus.format import Shards
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.models.base import Role
from weft.registry import resolve
from weft.tasks import base
from weft.tasks.base import IGNORE_INDEX, Answer, Batch, Head, Item, Metrics
from weft.tasks.lm.scoring import device_of
from weft.tasks.mlm.cloze import MASK, Blanks
from weft.tasks.mlm.head import Fill, Fills, MLMHead
from weft.tasks.mlm.masking import Vocabulary, choose, chosen_at_most, hide
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Specials, Tokens

JUDGED = 1 << 13  # tokens in a batch of an evaluation: what is masked there does not hang on the machine
PSEUDO = 1 << 16  # tokens that an evaluation reads for the pseudo-perplexity, a text once for each of its own
EVEN = 64  # the places of a batch of one shape are a multiple of it, which matrix units like


class MLMConfig(Named):
    """`share` of the tokens is chosen, by `whole_words` if asked; of pairs, the share `shorter` of pieces is cut."""

    reads: Literal["packs", "rows"] = "packs"
    share: float = Field(0.15, gt=0, lt=1)
    whole_words: bool = False
    next_sentence: bool | None = None  # None: of packs, where the model tells segments apart
    shorter: Share = 0.1


class MLMExample(base.Example):
    """A text: to learn from, to judge by, or to fill."""

    text: str


class Question(MLMExample):
    """A text whose masks are to be filled."""


class MLM(base.Task):
    """Items are documents (bos w_1 … w_n), where these are read in packs, or texts (bos w_1 … w_n eos)."""

    Config: ClassVar[type[Named]] = MLMConfig
    Example = MLMExample
    Options = Fill
    needs = frozenset({Role.MASKED_LM})
    metrics: tuple[str, ...] = ("perplexity", "masked_accuracy", "next_accuracy", "pseudo_perplexity")
    metric = "perplexity"
    lower_is_better = True
    reads_itself = True
    config: MLMConfig
    pairs = False  # whether segments are read in pairs, to tell which follow
    longest = 512

    def check(self, run: Run) -> None:
        """Settle how the corpus is read, and refuse what the model or the tokenizer cannot."""
        segments = getattr(run.model, "segments", 0) or 0
        packs, asked = self.config.reads == "packs", self.config.next_sentence
        self.pairs = packs and segments > 1 if asked is None else asked
        if self.pairs and not packs:
            raise ConfigError("task.next_sentence: pairs are made of documents, not of rows; set task.reads: packs")
        if self.pairs and Role.ENCODER not in resolve("model", run.model.name).roles(run.model):
            raise ConfigError(f"task.next_sentence: {run.model.name!r} gives no summary of a text; set it to false")
        if resolve("model", run.model.name).uses_chars(run.model):
            raise ConfigError(f"model.name: {run.model.name!r} reads how words are spelt, which a mask does not hide")
        if "mask" not in resolve("tokenizer", run.tokenizer.name).spell(run.tokenizer):
            raise ConfigError(
                f"tokenizer.specials: task 'mlm' hides words behind a mask, but {run.tokenizer.name!r} has none; add "
                f"tokenizer.specials: {{mask: '{MASK}'}}, or use wordpiece"
            )
        self._check_longest(run)
        self.lower_is_better = "accuracy" not in (run.train.metric or self.metric)
        if not self.pairs:
            self.metrics = tuple(name for name in self.metrics if name != "next_accuracy")

    def _check_longest(self, run: Run) -> None:
        self.longest, most = run.data.longest, getattr(run.model, "longest", None)
        reads = None if most is None else most - getattr(run.model, "offset", 0)
        if reads is not None and self.longest > reads:
            raise ConfigError(
                f"data.longest: sequences of {self.longest} tokens, but the model reads {reads}; set it to {reads} or "
                "less, or raise model.longest"
            )
        if self.longest < 6:
            raise ConfigError(f"data.longest: must have room for specials and words, 6 at least: got {self.longest}")

    @cached_property
    def known(self) -> Vocabulary:
        """What masking must know of the vocabulary."""
        known = Vocabulary.of(self.tokenizer)
        if self.config.whole_words:
            known.check_words()
        return known

    @cached_property
    def bounds(self) -> Signs:
        """What stands around segments, and where these may be cut."""
        bos, eos = self.tokenizer.specials.bos, self.tokenizer.specials.eos
        return Signs(bos, self.tokenizer.between, eos, self.known.begins, self.known.ends)

    @cached_property
    def blanks(self) -> Blanks:
        """How questions are read."""
        return Blanks(self.tokenizer, self.known.mask)

    @property
    def num_special_tokens(self) -> int:
        """None: `data.longest` counts all that is read."""
        return 0

    @property
    def added(self) -> int:
        """How many specials a sequence has at least."""
        return 2 + (len(self.bounds.between) if self.pairs else 0)

    def texts(self, example: MLMExample) -> tuple[list[str], list[str]]:
        """The text trains the tokenizer."""
        return [example.text], []

    def asked(self, example: MLMExample) -> Question:
        """A question has masks; elsewhere what spells one is text like any other."""
        return Question(text=example.text)

    def has_question(self, example: MLMExample) -> bool:
        """Whether there are masks in a text."""
        return len(self.blanks.cut(example.text)) > 1

    def encode(self, example: MLMExample, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Encode one text."""
        return self.encode_batch([example], tokenizer, limit)[0]

    def encode_batch(
        self, examples: Sequence[MLMExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many texts: to documents, or where they are read on their own between bos and eos."""
        if examples and isinstance(examples[0], Question):
            return [self._question(self.blanks.ids(example.text), limit) for example in examples]
        found = tokenizer.ids([example.text for example in examples])
        if self.config.reads == "rows":
            return [_pieces(ids, tokenizer.specials, limit) for ids in found]
        return [[(np.array([tokenizer.specials.bos, *ids], np.int32),)] for ids in found]

    def _question(self, ids: Sequence[int], limit: TruncationPolicy) -> list[Item]:
        """Encode a text with masks; of windows, those that have some."""
        mask = self.known.mask
        if mask not in ids:
            raise DataError(f"the text has no {self.blanks.spelt[0]} to fill; put one where a word is asked for")
        return [item for item in _pieces(ids, self.tokenizer.specials, limit) if mask in item[0]]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join texts, or pairs of segments, and mask words; what has masks already is a question."""
        labels: np.ndarray | None = None
        if len(items[0]) > 1:
            tokens, labels = join_pairs(items, self.bounds, rng)
        else:
            tokens = Tokens.pack([item[0] for item in items])
        ids, lengths = tokens.ids.numpy(), tokens.lengths.numpy()
        asked = np.flatnonzero(ids == self.known.mask)
        at = asked if len(asked) else choose(ids, lengths, self.known, self.config.share, self.config.whole_words, rng)
        batch = Batch(tokens, at=_placed(at, tokens))
        if len(asked):
            return batch
        counts = {"masked": len(at), **({} if labels is None else {"next": len(labels)})}
        return replace(
            batch,
            tokens=replace(tokens, ids=torch.from_numpy(hide(ids, at, self.known, rng))),
            targets=torch.from_numpy(ids[at]),
            counts=counts,
            labels=None if labels is None else torch.from_numpy(labels),
        )

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """What texts have, where they are read on their own."""
        return data.sizes[None] if self.config.reads == "rows" else None

    def places(self, frame: StaticShape) -> int:
        """So many words are chosen at most."""
        most = chosen_at_most(self.config.share, frame.sizes[-1], frame.rows, self.added)
        return min(-(-most // EVEN) * EVEN, frame.sizes[-1])

    def reading(self, data: PackedItems, run: Run, world: int) -> Reading | None:
        """Read documents in windows of the stream, or in pairs of segments."""
        if self.config.reads == "rows":
            return None
        return self._pairs(data, run.train.batch_tokens) if self.pairs else self._windows(data, run.train.batch_tokens)

    def _windows(self, data: PackedItems, tokens: int) -> Windows:
        specials = self.tokenizer.specials
        return Windows.of(Texts(data.ids, specials.bos, specials.eos), self.longest, tokens)

    def _pairs(self, data: PackedItems, tokens: int) -> Pairs:
        return Pairs.of(Documents(data.ids, data.starts), self.longest, self.added, tokens, self.config.shorter)

    def head(self, model: Any) -> MLMHead:
        """Put the loss, and the choice of words, on a body."""
        specials = [getattr(self.tokenizer.specials, role.name) for role in fields(Specials)]
        known = sorted({id for id in specials if id is not None})
        return MLMHead(model, known, self.known.mask, self.pairs)

    def answer(self, example: MLMExample, outputs: list[Fills]) -> Answer:
        """Name the best tokens for each mask, and fill the text with the very best."""
        fills = [fill for window in outputs for fill in window]
        named = [[{"token": self.tokenizer.token(id), "score": round(p, 6)} for id, p in fill] for fill in fills]
        return {"fills": named, "text": self.blanks.filled(example.text, [fill[0][0] for fill in fills])}

    def line(self, answer: Answer) -> str:
        """The text with the best tokens filled in, on one line."""
        if "text" not in answer:
            return f"pseudo-log-likelihood {answer['logprob']:.2f}"
        return " ".join(str(answer["text"]).splitlines())

    def preview(self, example: MLMExample) -> tuple[str, str]:
        """The text, which is its own answer."""
        return example.text, ""

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Read the text as it is, its masks as masks."""
        (ids,), eos = items[0], self.tokenizer.specials.eos
        tokens = Tokens.pack([ids if len(ids) > 1 and ids[-1] == eos else np.append(ids, eos)])
        names = [self.tokenizer.token(id) for id in tokens.ids.tolist()]
        at = np.arange(1, len(tokens.ids) - 1)
        targets = tokens.ids[at]
        return (
            names,
            names,
            Batch(tokens, targets.where(targets != self.known.mask, IGNORE_INDEX), at=_placed(at, tokens)),
        )

    def log_probs(self, head: Head, texts: Sequence[str]) -> list[float]:
        """Return the pseudo-log-likelihood of each text."""
        assert isinstance(head, MLMHead)
        whole = [_whole(ids, self.tokenizer.specials) for ids in self.tokenizer.ids(texts)]
        longest, most = max(map(len, whole), default=0), getattr(head.body, "reads", None)
        if most is not None and longest > most:
            raise DataError(f"a text has {longest} tokens, but the model reads {most}; give a shorter one")
        return head.log_probs(whole)

    def unavailable_metric(self, metric: str, examples: Sequence[MLMExample]) -> str:
        """Of one document there is nothing that another follows."""
        return "there is but one document" if metric == "next_accuracy" and len(examples) == 1 else ""

    def measure(self, head: Head, examples: Sequence[MLMExample], limit: TruncationPolicy) -> Metrics:
        """Judge by the texts themselves, with words masked in the same way each time."""
        encoded = self.encode_batch(examples, self.tokenizer, limit)
        return self._measured(head, pack(item for items in encoded for item in items))

    def measure_prepared(self, head: Head, data: Shards) -> Metrics:
        """Do the same with texts of which only the tokens are kept."""
        return self._measured(head, data)

    def _measured(self, head: Head, data: PackedItems) -> Metrics:
        assert isinstance(head, MLMHead)
        sums: dict[str, float] = {}
        for batch in self._judged(data):
            for key, value in head.tally(batch.to(device_of(head))).items():
                sums[key] = sums.get(key, 0) + value
        if not sums.get("masked count"):
            raise DataError("not one word is left to evaluate on")
        parts = [part for part in ("masked", "next") if part in sums]
        losses = {part: sums[part] / sums[f"{part} count"] for part in parts}
        rights = {f"{part}_accuracy": sums[f"{part} right"] / sums[f"{part} count"] for part in parts}
        pseudo, note = self._pseudo(head, data)
        metrics = {"loss": sum(losses.values()), "perplexity": _exp(losses["masked"]), **rights}
        if self.pairs and "next" not in sums:
            note = f"next_accuracy: not given, since there is but one document; {note}"
        return Metrics({**metrics, "pseudo_perplexity": pseudo}, note)

    def _judged(self, data: PackedItems) -> Iterator[Batch]:
        """Yield all that there is, in an order and with masks that are always the same."""
        for number, items in enumerate(self._items(data)):
            yield self.collate(items, np.random.default_rng((0, number)))

    def _items(self, data: PackedItems) -> Iterator[list[Item]]:
        if self.config.reads == "rows":
            yield from ([data[index] for index in batch.tolist()] for batch in plan(data, JUDGED, seed=None))
        elif len(data.ids):
            stream, batches = self._spans(data)
            yield from ([stream.pair(*span) for span in batch.tolist()] for batch in batches)

    def _spans(self, data: PackedItems) -> tuple[Readable, Sequence[Spans]]:
        if self.pairs:
            with suppress(DataError):  # one document makes no pairs
                pairs = self._pairs(data, JUDGED)
                return pairs.stream, pairs.epoch(0, 0, 1)
        windows = self._windows(data, JUDGED)
        return windows.stream, windows.every()

    def _pseudo(self, head: MLMHead, data: PackedItems) -> tuple[float, str]:
        """Find the pseudo-perplexity of the first texts, each no longer than the limit: a text costs its square."""
        inside = slice(1, -1) if self.config.reads == "rows" else slice(1, None)
        texts, cost = list[np.ndarray](), 0
        for number in range(len(data)):
            ids = data[number][0][inside][: self.longest - 2]
            cost += len(ids) * (len(ids) + 2)
            if texts and cost > PSEUDO:
                break
            texts += [_whole(ids, self.tokenizer.specials)] if len(ids) else []
        count = sum(len(text) - 2 for text in texts)
        mean = -sum(head.log_probs(texts)) / max(1, count)
        return _exp(mean), f"pseudo_perplexity: of the first {count:,} tokens, in {len(texts):,} of {len(data):,} texts"


def _whole(ids: Iterable[int], specials: Specials) -> np.ndarray:
    return np.array([specials.bos, *ids, specials.eos], np.int32)


def _pieces(ids: Sequence[int], specials: Specials, limit: TruncationPolicy) -> list[Item]:
    """Cut a text at its limit, which the specials count to; one with no words teaches nothing."""
    if not ids or not limit.apply(range(len(ids) + 2)):
        return []
    room = limit.longest - 2
    cut = [ids[at : at + room] for at in range(0, len(ids), room)]
    return [(_whole(piece, specials),) for piece in (cut[:1] if limit.policy == "cut" else cut)]


def _placed(at: np.ndarray, tokens: Tokens) -> Tokens:
    """Say how many of the places are in each sequence."""
    ends = np.searchsorted(at, tokens.starts.numpy())
    return Tokens.flat(torch.from_numpy(at), torch.from_numpy(np.diff(ends)))


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
