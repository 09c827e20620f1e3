"""Token classification: a tag for every word of a sentence, by any encoder.

Each word is tokenized by itself as it occurs in a text, with the space before it where that is part of a token; its tag
is predicted at its first sub-word (Devlin et al. 2019, section 5.3). Where the model reads characters, each sub-word
has those of its whole word. `crf: true` scores whole sequences of tags (`weft.nn.layers.crf`).
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import field_validator, model_validator
from torch import Tensor

from weft.config.run import Run
from weft.config.schema import Named, Section
from weft.data.batching.packed_items import PackedItems
from weft.data.labels import Label
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError
from weft.nn.layers.crf import CRF
from weft.nn.layers.losses import cross_entropy_sum, soft_cross_entropy_sum
from weft.registry import resolve
from weft.tasks import base
from weft.tasks.base import Answer
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import ErrorAnalysis, LabelPrediction, StaticBatches, WrongAnswer
from weft.tasks.classification_report import ClassificationReport, present
from weft.tasks.head import Sums
from weft.tasks.label_task import LabelConfig, LabelHead, LabelTask
from weft.tasks.metrics import ConfusionMatrix, Tally, exact_match, tally_entities, tally_labels
from weft.tokenization.pretokenize import split_words
from weft.tokenization.trainable import Tokenizer
from weft.tokens import WORD_END, Tokens, char_ids

TagOutput = tuple[list[int], list[float]]  # for each word, the index of its tag and the tag's probability


class TagConfig(LabelConfig):
    """`scheme`: whether tags mark entities (B-DAY, I-DAY, O), so that F1 is of entities, or are independent labels."""

    scheme: Literal["auto", "bio", "plain"] = "auto"  # auto: bio, if all labels are O or begin with B-, I-, E- or S-
    crf: bool = False  # a conditional random field over the tags

    @model_validator(mode="after")
    def _check_crf(self) -> "TagConfig":
        for key in ("weights", "label_smoothing") if self.crf else ():
            if getattr(self, key):
                raise ValueError(f"task.{key} is of single tags, and task.crf scores whole sequences; leave one out")
        return self


class TagExample(base.Example):
    """Words, or a text to split into words, and for training and evaluation a tag for each."""

    words: list[str] | None = None
    tags: list[Label] | None = None
    text: str | None = None

    @field_validator("words", "tags", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split a line of words or of tags, as parallel files have them, at its spaces."""
        return value.split() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_tags(self) -> "TagExample":
        if (self.words is None) == (self.text is None):
            raise ValueError("must have words or text, one of them")
        if self.tags is not None and len(self.tags) != len(self.get_words()):
            raise ValueError(f"must have a tag a word, and has {len(self.tags)} for {len(self.get_words())}")
        return self

    def get_words(self) -> list[str]:
        """Return the words as given, or those of the text."""
        return split_words(self.text or "") if self.words is None else self.words


class TagHead(LabelHead):
    """A linear layer on the hidden state of each word's first token: a softmax for each word, or a CRF over all."""

    def __init__(
        self, body: Any, labels: int, config: TagConfig, weights: Tensor | None, unknown: int | None = None
    ) -> None:
        super().__init__(body, labels, config, weights, unknown)
        self.crf = CRF(labels) if config.crf else None
        self.has_soft_targets = self.crf is None
        body.drop_pooler()

    def read(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the logits of all words, (M, K), and the hidden states."""
        assert batch.positions is not None
        states = self.states(self.seen(batch.tokens))
        return self.scores(states.index_select(0, batch.positions.ids)), states

    def losses(self, logits: Tensor, batch: Batch) -> Sums:
        """Return the sum of -log p of the gold tags over the words."""
        assert batch.targets is not None
        assert batch.positions is not None
        if self.crf is not None:
            return {"words": self.crf.loss_sum(logits, batch.targets, batch.positions.lengths)}
        return {"words": cross_entropy_sum(logits, batch.targets, *self.loss_args)}

    def soft_losses(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Sums:
        """Return the distance from a teacher's distributions, summed over the words."""
        return {"words": soft_cross_entropy_sum(logits, teacher, temperature)}

    def predict(self, batch: Batch, options: Section) -> list[TagOutput]:
        """Return the most probable tag of each word, or with a CRF the most probable sequence (Viterbi)."""
        assert batch.positions is not None
        logits, lengths = self.read(batch)[0], batch.positions.lengths  # (M, K), (B,) which sum to M
        if self.crf is not None:
            tags, probabilities = self.crf.decode(logits.float(), lengths)
        else:
            probabilities, tags = logits.float().softmax(-1).max(-1)
        sizes = lengths.tolist()
        pairs = zip(tags.cpu().split(sizes), probabilities.cpu().split(sizes), strict=True)
        return [(indices.tolist(), values.tolist()) for indices, values in pairs]


class Tag(LabelTask, StaticBatches, LabelPrediction, ErrorAnalysis):
    """Items are (bos words eos, as sub-words; the first sub-word of each word; characters, if used; tags, if known)."""

    Config: ClassVar[type[Named]] = TagConfig
    Example = TagExample
    metrics: tuple[str, ...] = ("f1", "precision", "recall", "accuracy")
    metric = "f1"
    label_fields = ("tags",)
    json_fields = frozenset({"words"})
    config: TagConfig

    _add_space: Callable[[str], str] = staticmethod(str)  # a word as it occurs in a text, with its leading space

    def configure(self, config: Any) -> None:
        """Set the labels, and the metrics: of entities, or of tags."""
        super().configure(config)
        self.bio = config.scheme == "bio" or (config.scheme == "auto" and _is_bio(self.labels))
        # With no labels yet and scheme auto, the metrics are not known yet.
        if not self.bio and (config.labels or config.scheme == "plain"):
            self.metrics, self.metric = ("accuracy",), "accuracy"

    def check(self, run: Run) -> None:
        """Raise an error for `scheme: bio` with a tag that is not BIO."""
        super().check(run)
        self._add_space = partial(resolve("tokenizer", run.tokenizer.name).with_leading_space, run.tokenizer)
        odd = [label for label in self.labels if len(label) > 1 and label[1] != "-"]  # T-POS is allowed
        if self.config.scheme == "bio" and odd:
            raise ConfigError(
                f"task.scheme: bio is for tags such as B-DAY, I-DAY and O, which mark entities; {odd[0]!r} is none; "
                "set task.scheme: plain, or leave it out"
            )

    def right(self, example: TagExample) -> list[str]:
        """Return the tags of the words."""
        return example.tags or []

    def texts(self, example: TagExample) -> tuple[list[str], list[str]]:
        """Return each word by itself: the tokenizer is trained on what it will encode."""
        return [self._add_space(word) for word in example.get_words()], []

    def tokenize(self, texts: Sequence[str], needed: int | None = None) -> list[list[int]]:
        """Split texts into words, and these into sub-words."""
        return [item[0][1:-1].tolist() for item in self._encode_texts(texts)]

    def char_ids(self, texts: Sequence[str], needed: int | None = None) -> list[list[np.ndarray]]:
        """Return for each sub-word the characters of its whole word."""
        return [np.split(item[2], np.flatnonzero(item[2] == WORD_END)[:-1] + 1) for item in self._encode_texts(texts)]

    def _encode_texts(self, texts: Sequence[str]) -> list[Item]:
        examples, untruncated = [TagExample(text=text) for text in texts], TruncationPolicy(sys.maxsize, "error")
        return [items[0] for items in self.encode_batch(examples, self.tokenizer, untruncated)]

    def parse_sequence(self, values: Sequence[Any], place: str) -> Mapping[str, Any]:
        """Return a tuple or list of strings as the words of a sentence."""
        return {"words": list(values)}

    def encode_batch(
        self, examples: Sequence[TagExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many sentences with one call of the tokenizer, each distinct word once."""
        sentences = [example.get_words() for example in examples]
        words = list(dict.fromkeys(chain.from_iterable(sentences)))
        specials = tokenizer.specials
        empty = [specials.eos if specials.unk is None else specials.unk]  # for a word that has no tokens
        encoded = tokenizer.ids([tokenizer.with_leading_space(tokenizer.config, word) for word in words], limit.needed)
        subwords = {word: ids or empty for word, ids in zip(words, encoded, strict=True)}
        return [
            self._items(example, [subwords[word] for word in sentence], tokenizer, limit)
            for example, sentence in zip(examples, sentences, strict=True)
        ]

    def _items(
        self, example: TagExample, subwords: list[list[int]], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[Item]:
        indices = None if example.tags is None else np.array([self.labels.index(tag) for tag in example.tags], np.int32)
        if indices is not None and not len(indices):
            return []  # an empty sentence has no loss and no metric
        items: list[Item] = []
        for window in _split_windows(subwords, limit):
            kept = [word[: limit.max_length] for word in subwords[window]]
            starts = list(accumulate(map(len, kept), initial=1))[:-1]
            ids = [tokenizer.specials.bos, *chain.from_iterable(kept), tokenizer.specials.eos]
            item: Item = np.array(ids, np.int32), np.array(starts, np.int32)
            if self.uses_chars:
                item = (*item, _word_chars(example.get_words()[window], kept))
            items.append(item if indices is None else (*item, indices[window]))
        return items

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join sentences into a batch; it has targets where all tags are known."""
        tokens, labels = self.tokens(items), self.known_labels(items)
        offsets = tokens.starts.tolist()
        positions = Tokens.pack([item[1] + offset for item, offset in zip(items, offsets, strict=False)])
        targets = None if labels is None else torch.from_numpy(np.concatenate(labels).astype(np.int64))
        return Batch(tokens, targets, {"words": len(positions.ids)}, positions=positions)

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return the sub-words of each sentence; None with a CRF or characters, which have no static shape."""
        return None if self.uses_chars or self.config.crf else self.lengths(data)

    def head(self, model: Any) -> TagHead:
        """Return the body with a linear layer for the tags."""
        return TagHead(model, len(self.labels), self.config, self.weights(), self.tokenizer.specials.unk)

    def answer(self, example: TagExample, outputs: list[TagOutput]) -> Answer:
        """Join the tags of the windows; a truncated word has the tag "", which is never correct."""
        words = example.get_words()
        tags = [self.labels.names[index] for indices, _ in outputs for index in indices]
        scores = [round(score, 6) for _, probabilities in outputs for score in probabilities]
        missing = len(words) - len(tags)
        return {"words": words, "tags": tags + [""] * missing, "scores": scores + [0.0] * missing}

    def format_answer(self, answer: Answer) -> str:
        """Return `word/TAG word/TAG`."""
        return _format_tags(answer["words"], answer["tags"])

    def preview(self, example: TagExample) -> tuple[str, str]:
        """Return the words, and the words with their tags."""
        words = example.get_words()
        return " ".join(words), _format_tags(words, example.tags or [""] * len(words))

    def score(self, answers: Sequence[Answer], examples: Sequence[TagExample]) -> dict[str, float]:
        """Compute the accuracy by word, and where tags mark entities, their F1 as seqeval does."""
        predicted, gold = [answer["tags"] for answer in answers], [self.right(example) for example in examples]
        accuracy = exact_match(list(chain.from_iterable(predicted)), list(chain.from_iterable(gold)))
        if not self.bio:
            return {"accuracy": accuracy}
        entities = sum(tally_entities(predicted, gold).values(), Tally())
        return {"f1": entities.f1, "precision": entities.precision, "recall": entities.recall, "accuracy": accuracy}

    def confusion(self, answers: Sequence[Answer], examples: Sequence[TagExample]) -> ConfusionMatrix | None:
        """Return the confusion matrix over words."""
        pairs = (
            zip(self.right(example), answer["tags"], strict=True)
            for example, answer in zip(examples, answers, strict=True)
        )
        return ConfusionMatrix.of(self.labels.names, chain.from_iterable(pairs))

    def report(self, answers: Sequence[Answer], examples: Sequence[TagExample]) -> ClassificationReport | None:
        """Return the classification report of entity types as in seqeval; of tags, where they mark no entities."""
        predicted, gold = [answer["tags"] for answer in answers], [self.right(example) for example in examples]
        if self.bio:
            return ClassificationReport.of(tally_entities(predicted, gold), "entity")
        predicted_tags, gold_tags = ([[tag] for tag in chain.from_iterable(side)] for side in (predicted, gold))
        return ClassificationReport.of(present(tally_labels(predicted_tags, gold_tags, self.labels)), "tag")

    def errors(self, answers: Sequence[Answer], examples: Sequence[TagExample]) -> list[WrongAnswer | None]:
        """Return the sentences with a wrong tag, each with the probability of its most confident wrong tag."""
        return [self._error(*pair) for pair in zip(answers, examples, strict=True)]

    def _error(self, answer: Answer, example: TagExample) -> WrongAnswer | None:
        gold, predicted = self.right(example), answer["tags"]
        triples = zip(gold, predicted, answer["scores"], strict=True)
        wrong = [score for expected, tag, score in triples if tag != expected]
        return WrongAnswer(gold, predicted, max(wrong), details={"words": answer["words"]}) if wrong else None


def _is_bio(labels: Iterable[str]) -> bool:
    """Return whether tags are like B-DAY, I-DAY, O."""
    entity_tags = [label for label in labels if label != "O"]
    return bool(entity_tags) and all(label[0] in "BIES" and label[1:2] in ("", "-") for label in entity_tags)


def _split_windows(subwords: Sequence[Sequence[int]], limit: TruncationPolicy) -> list[slice]:
    """Split a sentence with more sub-words than the limit between words, into as few windows as possible."""
    if not limit.apply(range(sum(map(len, subwords)))):
        return []
    starts, room = [0], limit.max_length
    for index, ids in enumerate(subwords):
        size = min(len(ids), limit.max_length)
        if size > room:
            starts.append(index)
            room = limit.max_length
        room -= size
    windows = [slice(*pair) for pair in zip(starts, [*starts[1:], len(subwords)], strict=True)]
    return windows[:1] if limit.policy == "cut" else windows


def _word_chars(words: Sequence[str], subwords: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the characters of a sentence's tokens, bos and eos included: for each sub-word, those of its word."""
    repeated = chain.from_iterable([word] * len(ids) for word, ids in zip(words, subwords, strict=True))
    return char_ids(["", *repeated, ""])


def _format_tags(words: Sequence[str], tags: Sequence[str]) -> str:
    return " ".join(" ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True)).splitlines())
