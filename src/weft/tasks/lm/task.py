"""Language modelling: how likely a text is, and how it goes on, by any model that scores.

A text is f = bos w_1 … w_n eos. A model that goes forward reads f without its end and gives each next token; one that
goes backward reads f without its beginning and gives each token before; one that sees both sides, or goes both ways
(ELMo), reads the whole, and what stands at an end has no target there.

How a corpus is read (`task.reads`):

| reads     | a sequence is                                                             | by default for              |
|-----------|---------------------------------------------------------------------------|-----------------------------|
| `rows`    | a document                                                                | models that go both ways    |
| `packs`   | `data.longest` tokens of the documents laid end to end                    | gpt, a backward rnn         |
| `streams` | the documents laid end to end: what is read is carried from batch to batch | models that read on: an rnn |
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from weft.config.schema import Named, Run, Section
from weft.data.batching.lm_stream import Packs, Reading, Stream, Streams
from weft.data.batching.packed import PackedItems, pack
from weft.data.corpus.format import Shards
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.models.base import Direction, Fitted, Role
from weft.registry import resolve
from weft.tasks import base
from weft.tasks.base import IGNORE_INDEX, Answer, Batch, Head, Item, Metrics
from weft.tasks.char_inputs import Spelling
from weft.tasks.incremental_text import first_of, grown
from weft.tasks.lm import scoring
from weft.tasks.lm.head import Continuation, Continue, LMHead, parts_of
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens


class LMConfig(Named):
    """`stride`: in `packs`, how far one window of an evaluation is from the next; less gives each token more to see."""

    reads: Literal["rows", "packs", "streams"] | None = None
    bptt: int = Field(64, ge=1)  # in `streams`, the tokens of a row in one batch
    stride: int | None = Field(None, ge=1)  # None: the window, data.longest
    decode: Continue = Continue()


class LMExample(base.Example):
    """A text: to learn from, to judge by, or to go on with."""

    text: str


class LM(base.Task):
    """Items are pairs (what is read, what follows), of streams whole documents (bos w_1 … w_n)."""

    Config: ClassVar[type[Named]] = LMConfig
    Example = LMExample
    Options = Continue
    needs = frozenset({Role.LANGUAGE_MODEL})
    metrics = ("perplexity", "bits_per_byte")
    metric = "perplexity"
    lower_is_better = True
    supports_fit = True
    num_token_arrays = 1
    reads_itself = True
    config: LMConfig
    reads = "rows"
    fitted = False

    @property
    def end(self) -> int:
        """A document's end, which its ids leave out."""
        return self.tokenizer.specials.eos

    def needed(self, roles: frozenset[Role]) -> frozenset[Role]:
        """A model that fills a place from both its sides will do as well."""
        return (
            frozenset({Role.MASKED_LM}) if Role.MASKED_LM in roles and Role.LANGUAGE_MODEL not in roles else self.needs
        )

    def check(self, run: Run) -> None:
        """Settle how the corpus is read, and refuse what the model cannot."""
        model = resolve("model", run.model.name)
        self.directions: tuple[Direction, ...] = model.directions(run.model)
        self.fitted, one_way = issubclass(model, Fitted), self.directions in (("forward",), ("backward",))
        if self.directions == ("masked",):
            raise ConfigError(
                f"task.name: 'lm' needs a model that scores what comes next; {run.model.name!r} fills masks: try mlm"
            )
        carries = hasattr(model, "read") and self.directions == ("forward",)
        self.reads = self.config.reads or ("streams" if carries else "packs" if one_way or self.fitted else "rows")
        if self.reads == "streams" and not carries:
            raise ConfigError(f"task.reads: the model {run.model.name!r} cannot read on; try packs or rows")
        if self.reads == "packs" and not one_way:
            raise ConfigError("task.reads: a model that sees both sides of a word reads whole documents; try rows")
        if self.reads == "rows" and self.fitted:
            raise ConfigError(f"task.reads: the model {run.model.name!r} is fitted to the stream; leave it out")
        if run.train.metric == "bits_per_byte" and "both" in self.directions:
            raise ConfigError("train.metric: a model that sees both sides of a word has no bits_per_byte; try loss")
        most = getattr(run.model, "longest", None)
        if self.reads == "packs" and not self.fitted and most is not None and run.data.longest > most:
            raise ConfigError(
                f"data.longest: windows of {run.data.longest} tokens, but the model learns {most} positions; set it to "
                f"{most} or less, or raise model.longest"
            )
        self.longest = run.data.longest
        if self.config.stride is not None and self.config.stride > self.longest:
            raise ConfigError(f"task.stride: must be at most data.longest: got {self.config.stride} and {self.longest}")
        if self.config.stride is not None and self.reads != "packs":
            raise ConfigError("task.stride: is of windows, but here there are none; leave it out, or read packs")

    def texts(self, example: LMExample) -> tuple[list[str], list[str]]:
        """The text trains the tokenizer."""
        return [example.text], []

    @property
    def special_token_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A model that goes one way never read the mark at which it is done; one that is fitted read neither."""
        before, after = super().special_token_affixes
        if self.fitted:
            return (), ()
        return () if self.directions == ("backward",) else before, () if self.directions == ("forward",) else after

    def spelt(self, texts: Sequence[str]) -> list[list[np.ndarray]]:
        """Spell tokens as the vocabulary has them, and unknown ones as they are written."""
        return Spelling.of(self.tokenizer).of_texts(texts)

    def encode(self, example: LMExample, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Encode one text."""
        return self.encode_batch([example], tokenizer, limit)[0]

    def encode_batch(
        self, examples: Sequence[LMExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many texts: to documents, or where they are read on their own to pairs."""
        texts = [example.text for example in examples]
        bos, eos = tokenizer.specials.bos, tokenizer.specials.eos
        if self.reads != "rows":
            return [[(np.array([bos, *ids], np.int32),)] for ids in tokenizer.ids(texts)]
        whole = [np.array([bos, *ids, eos], np.int32) for ids in tokenizer.ids(texts)]
        spelt = Spelling.of(tokenizer).of_texts(texts) if self.uses_chars else None
        return [self._pieces(f, limit, spelt[row] if spelt else None) for row, f in enumerate(whole)]

    def _pieces(self, f: np.ndarray, limit: TruncationPolicy, spelt: list[np.ndarray] | None) -> list[Item]:
        """Cut a document at its limit: a piece begins with the token that the one before ended with."""
        pieces: list[Item] = []
        for places in limit.apply(np.arange(len(f) - 1)):
            a, b = int(places[0]), int(places[-1]) + 2
            item: Item = (f[a : b - 1], f[a + 1 : b])
            pieces.append((*item, np.concatenate(spelt[a:b])) if spelt else item)
        return pieces

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join pairs to a batch for the model's directions."""
        pairs = [self._pair(item) for item in items]
        read, follow = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if self.directions == ("forward",):
            return _batch(Tokens.pack(read), [np.concatenate(follow)], self.directions)
        if self.directions == ("backward",):
            return _batch(Tokens.pack(follow), [np.concatenate(read)], self.directions)
        tokens = Tokens.pack([np.append(x, y[-1:]) for x, y in pairs])
        if self.uses_chars and all(len(item) > 2 for item in items):  # else they are spelt as the vocabulary has them
            tokens = tokens.spelt([item[2] for item in items])
        ahead = np.concatenate([np.append(y, IGNORE_INDEX) for y in follow])
        behind = np.concatenate([np.append(IGNORE_INDEX, x) for x in read])
        inside = np.concatenate([np.concatenate([[IGNORE_INDEX], x[1:], [IGNORE_INDEX]]) for x in read])
        return _batch(tokens, [{"forward": ahead, "backward": behind, "both": inside}[d] for d in self.directions],
                      self.directions)  # fmt: skip

    def _pair(self, item: Item) -> tuple[np.ndarray, np.ndarray]:
        return (item[0], item[1]) if len(item) > 1 else (item[0], np.append(item[0][1:], self.tokenizer.specials.eos))

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """What documents have, where they are read on their own by a model that goes one way."""
        return data.sizes[None] if self.reads == "rows" and len(self.directions) == 1 and not self.uses_chars else None

    def reading(self, data: PackedItems, run: Run, world: int) -> Reading | None:
        """Read the documents as one stream."""
        if self.reads == "rows":
            return None
        stream = self._stream(data.ids)
        if self.reads == "streams":
            return Streams.of(stream, self.config.bptt, run.train.batch_tokens, world)
        return Packs.of(stream, self.longest, run.train.batch_tokens)

    def _stream(self, ids: np.ndarray) -> Stream:
        return Stream(ids, self.tokenizer.specials.bos, self.tokenizer.specials.eos)

    def head(self, model: Any) -> LMHead:
        """Put the loss and the search on a body."""
        specials = self.tokenizer.specials
        hidden = {specials.bos, specials.unk, specials.pad, specials.mask} - {None, specials.eos}
        forbid = sorted(id for id in hidden if id is not None)
        return LMHead(model, specials.eos, forbid, self.reads == "streams")

    def options(self) -> Section:
        """The recipe's way of decoding."""
        return self.config.decode

    def answer(self, example: LMExample, outputs: list[Any]) -> Answer:
        """Decode the likeliest continuation, and the others where several were asked for."""
        candidates = [self._answer(one) for one in outputs[-1]]
        answer: Answer = dict(candidates[0])
        if len(candidates) > 1:
            answer["candidates"] = candidates
        return answer

    def _answer(self, one: Continuation) -> Answer:
        """Cut a continuation at its first stop word: the tokens that bring it count, its text does not."""
        ids, stop = list(one.ids), one.asked.stop
        text = self.continued(one.prompt, ids)
        logprob = one.logprob
        if (end := first_of(text, stop)) is not None:
            texts = (self.continued(one.prompt, ids[:size]) for size in range(len(ids) + 1))
            size = next(size for size, text in enumerate(texts) if first_of(text, stop) is not None)
            ids, text, logprob = ids[:size], text[:end], sum(one.logprobs[:size])
        answer: Answer = {"text": text, "logprob": round(logprob, 6)}
        if one.asked.logprobs:
            shown = ids if end is not None or not one.finished else [*ids, self.tokenizer.specials.eos]
            names = [self.tokenizer.token(id) for id in shown]
            answer["tokens"] = [[name, round(value, 6)] for name, value in zip(names, one.logprobs, strict=end is None)]
        return answer

    def continued(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Decode what follows a prompt: the text with it, without what it has of its own."""
        before = self.tokenizer.decode(list(prompt))
        return self.tokenizer.decode([*prompt, *ids]).removeprefix(before)

    def stream(
        self, head: Head, example: LMExample, limit: TruncationPolicy, options: Section, row: int = 0
    ) -> Iterator[str]:
        """Yield the continuation as it grows."""
        assert isinstance(head, LMHead)
        assert isinstance(options, Continue)
        batch = self.collate(self.encode(example, self.tokenizer, limit)[-1:], np.random.default_rng(0)).numbered([row])
        prompt = [self.tokenizer.specials.bos, *self.tokenizer.ids([example.text])[0]]
        return grown(head.stream(batch, options), lambda ids: self.continued(prompt, ids), options.stop)

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Read the text: a language model's answer to it is what it makes of each token."""
        batch = self._collate(items)
        names = [self.tokenizer.token(id) for id in batch.tokens.ids.tolist()]
        return names, names, batch

    def line(self, answer: Answer) -> str:
        """The continuation; a line break in it would be taken for the next answer."""
        if "text" not in answer:
            return f"log-probability {answer['logprob']:.2f}"
        return " ".join(str(answer["text"]).splitlines())

    def preview(self, example: LMExample) -> tuple[str, str]:
        """The text, which is its own answer."""
        return example.text, ""

    def log_probs(self, head: Head, texts: Sequence[str]) -> list[float]:
        """Return the log-probability of each text; of a model that sees both sides, the sum of its tokens'."""
        f = [self._whole(ids) for ids in self.tokenizer.ids(texts)]
        longest, most = max((len(one) - 1 for one in f), default=0), getattr(head.body, "reads", None)
        if most is not None and longest > most:
            raise DataError(f"a text has {longest} tokens, but the model reads {most}; give a shorter one")
        items: list[Item] = [(one[:-1], one[1:]) for one in f]
        if self.uses_chars:
            spelt = Spelling.of(self.tokenizer).of_texts(texts)
            items = [(*item, np.concatenate(own)) for item, own in zip(items, spelt, strict=True)]
        scored = scoring.score_items(head, items, self._collate, self.directions)
        found: list[float] = scored.mean(0).tolist()
        return found

    def _whole(self, ids: Sequence[int]) -> np.ndarray:
        return np.array([self.tokenizer.specials.bos, *ids, self.tokenizer.specials.eos], np.int32)

    def _collate(self, items: Sequence[Item]) -> Batch:
        return self.collate(items, np.random.default_rng(0))

    def unavailable_metric(self, metric: str, examples: Sequence[LMExample]) -> str:
        """Bits per byte are only given where the tokens hold the whole text."""
        if metric != "bits_per_byte" or self.tokenizer.lossless:
            return ""
        holds = examples and scoring.spelling_cost([one.text for one in examples], self.tokenizer) is not None
        return "" if holds else "the tokenizer loses some of the text"

    def measure(self, head: Head, examples: Sequence[LMExample], limit: TruncationPolicy) -> Metrics:
        """Judge by the texts themselves."""
        texts = [example.text for example in examples]
        encoded = self.encode_batch(examples, self.tokenizer, limit)
        data = pack((item for items in encoded for item in items), num_token_arrays=1)
        if not len(data):
            raise DataError("not one example is left to evaluate on")
        size = sum(len((text if self.tokenizer.lossless else text.strip(" ")).encode()) + 1 for text in texts)
        return self._measured(head, data, scoring.spelling_cost(texts, self.tokenizer), size, len(texts))

    def measure_prepared(self, head: Head, data: Shards) -> Metrics:
        """Judge by texts of which only the tokens, and how many bytes they were, are kept."""
        paid = 0.0 if self.tokenizer.lossless else None
        return self._measured(head, data, paid, int(data.bytes.sum()) + len(data.bytes), len(data.bytes))

    def _measured(self, head: Head, data: PackedItems, paid: float | None, size: int, texts: int) -> Metrics:
        """Put the metrics together; `paid` are the nats that unknown words pay, None if text is lost."""
        sums, counts = self._totals(head, data)
        losses = [-total / max(1, count) for total, count in zip(sums, counts, strict=True)]
        metrics = {"loss": sum(losses), "perplexity": _exp(losses[0])}
        if len(losses) > 1:
            metrics["backward_perplexity"] = _exp(losses[1])
        if "both" in self.directions:
            return Metrics(metrics, "perplexity: of each token given all the others, which is not that of the text")
        if paid is None:
            return Metrics(metrics, "bits_per_byte: not given, since the tokenizer loses some of the text")
        if self.reads == "rows" and not scoring.are_whole(data, self.end, texts):
            return Metrics(metrics, "bits_per_byte: not given, since data.too_long leaves out some of the text")
        return Metrics({**metrics, "bits_per_byte": (paid - sums[0]) / math.log(2) / size})

    def _totals(self, head: Head, data: PackedItems) -> tuple[list[float], list[int]]:
        """Sum the log-probabilities in each direction, and count the tokens that have one."""
        if self.reads == "rows" or self.fitted:
            items = [data[number] for number in range(len(data))]
            unseen = 1 if "both" in self.directions else 0  # the end of a text has but one side
            count = sum(len(item[0]) - unseen for item in items)
            scored = scoring.score_items(head, items, self._collate, self.directions)
            return scored.sum(1).tolist(), [count] * len(self.directions)
        stream = self._stream(data.ids)
        if self.reads == "streams":
            return [scoring.score_stream(head, stream, self.config.bptt)], [len(stream)]
        width = min(self.longest, len(stream))
        stride = min(self.config.stride or width, width)
        return [scoring.score_windows(head, stream, width, stride, self.directions[0])], [len(stream)]


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _batch(tokens: Tokens, targets: Sequence[np.ndarray], directions: Sequence[Direction]) -> Batch:
    wanted = torch.from_numpy(np.stack(targets).astype(np.int64))
    counts = [int((row != IGNORE_INDEX).sum()) for row in wanted]
    flat = wanted[0] if len(directions) == 1 else wanted
    return Batch(tokens, flat, dict(zip(parts_of(directions), counts, strict=True)))
