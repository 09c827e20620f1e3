"""Completion of a knowledge base: the object of a tuple from its subject and relation, by a language model.

COMET (Bosselut et al. 2019, "COMET: commonsense transformers for automatic knowledge graph construction",
arXiv:1906.05317): a language model reads the subject and the relation, then writes the object. The loss is on the
object and its end alone (section 3.2, eq. 5),

    L = - Σ_{|s|+|r| <= t <= |s|+|r|+|o|} log p(x_t | x_<t)

A relation is read as words: AtLocation as `at location`, as the paper does for ConceptNet (section 5.1). Perplexity is
that of the objects. Of the tuples that are generated, one for each different subject and relation, the paper counts
(section 4.1) how many are not in the training data (N/T sro: `novel_tuples`), how many have an object that is none
there (N/T o: `novel_objects`), and the latter among the different objects (N/U o: `unique_novel_objects`). Each is a
share here. BLEU-2 is sacreBLEU's for the corpus, with every object that the data has for the question as a reference.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from weft.config.run import Run
from weft.config.sections import Data
from weft.data.batching.packed_items import PackedItems
from weft.data.readers.examples import Skipped
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, WeftError
from weft.models.base import Role
from weft.nn.layers.losses import cross_entropy_sum
from weft.tasks import base
from weft.tasks.bad_words import BadWords
from weft.tasks.base import Answer
from weft.tasks.batch import Batch, Item
from weft.tasks.head import Sums
from weft.tasks.prepare import read_split
from weft.tasks.text_metrics import bleu
from weft.tasks.translate import Translate, TranslateHead
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens

_CASE_CHANGE = re.compile(r"(?<=[a-z])(?=[A-Z])")


class CompletionExample(base.Example):
    """A subject and a relation, and for training and evaluation the object."""

    subject: str
    relation: str
    object: str | None = None

    @property
    def text(self) -> str:
        """The subject and the words of the relation, by the name that a source has in a translation."""
        return f"{self.subject} {_CASE_CHANGE.sub(' ', self.relation).lower()}"

    @property
    def target(self) -> str | None:
        """The object, by the name that it has in a translation."""
        return self.object

    @property
    def references(self) -> list[str]:
        """The right answers: the object."""
        return [] if self.object is None else [self.object]

    @property
    def question(self) -> tuple[str, str]:
        """The subject and the relation."""
        return self.subject, self.relation


class CompletionHead(TranslateHead):
    """The body alone: a language model, which reads the prompt before it writes. `Batch.source` is the prompts."""

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the summed cross-entropy of the objects' tokens; the prompt's have no target."""
        assert batch.targets is not None
        assert batch.positions is not None
        logits = self.body.logits(batch.tokens, at=batch.positions.ids)
        smoothing = self.label_smoothing if self.training else 0.0
        return {"tokens": cross_entropy_sum(logits, batch.targets, smoothing)}, None

    def generator_inputs(self, batch: Batch) -> tuple[Tokens, Tokens | None]:
        """Return the prompts; there is no source beside them."""
        assert batch.source is not None
        return batch.source, None


class Complete(Translate):
    """Items are (bos + subject and relation, object + eos)."""

    Example = CompletionExample
    required_roles = frozenset({Role.LANGUAGE_MODEL, Role.GENERATOR})
    metrics = ("perplexity", "exact_match", "bleu2", "novel_tuples", "novel_objects", "unique_novel_objects")
    metric = "perplexity"
    lower_is_better = True
    label_fields = ("object",)
    json_example = '{"subject": "…", "relation": "…"}'
    text_field = "subject"
    _data: Data
    _known: set[tuple[str, ...]] | None = None  # what is known from the training data: tuples, and objects as (object,)

    def check(self, run: Run) -> None:
        """Raise an error for what is for `translate` alone, and keep where the training data is, to measure novelty."""
        super().check(run)
        for key in ("metrics", "group_references", "prefix"):
            if getattr(self.config, key):
                raise ConfigError(f"task.{key}: is of the task 'translate', and 'complete' has none; leave it out")
        self._data = run.data

    @property
    def special_token_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what stands before a prompt: bos."""
        return (self.tokenizer.specials.bos,), ()

    def texts(self, example: Any) -> tuple[list[str], list[str]]:
        """Return a tuple as it is read."""
        return [example.text if example.object is None else f"{example.text} {example.object}"], []

    def encode_batch(self, examples: Sequence[Any], tokenizer: Tokenizer, limit: TruncationPolicy) -> list[list[Item]]:
        """Encode many tuples with one call of the tokenizer for prompts, and one for objects."""
        prompts = tokenizer.ids([example.text for example in examples], limit.needed)
        objects = tokenizer.ids([f" {example.object}" if example.object else "" for example in examples], limit.needed)
        return [self._items(*pair, tokenizer, limit) for pair in zip(prompts, objects, strict=True)]

    def _items(self, source: list[int], target: list[int], tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        prompt, written = limit.apply(source, windows=False), limit.apply(target, windows=False)
        if not prompt or not written:
            return []
        specials = tokenizer.specials
        return [(np.array([specials.bos, *prompt[0]], np.int32), np.array([*written[0], specials.eos], np.int32))]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join tuples: each is read without its eos, and has a target from the last token of its prompt on."""
        tokens = Tokens.pack([np.append(prompt, written[:-1]) for prompt, written in items])
        lengths = torch.tensor([len(written) for _, written in items])
        ends = tokens.starts[1:].long()
        positions = torch.cat([torch.arange(end - size, end) for end, size in zip(ends, lengths, strict=True)])
        targets = torch.from_numpy(np.concatenate([written for _, written in items]).astype(np.int64))
        source = Tokens.pack([prompt for prompt, _ in items])
        return Batch(tokens, targets, {"tokens": len(targets)}, source, Tokens.flat(positions, lengths))

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return None: tuples are too short for batches of one shape."""
        return None

    def head(self, model: Any) -> CompletionHead:
        """Return the body with the loss and the decoding."""
        specials = self.tokenizer.specials
        special = {specials.bos, specials.pad, specials.mask, None if self.config.unknown else specials.unk}
        forbid = sorted(id for id in special - {specials.eos} if id is not None)
        return CompletionHead(model, specials.eos, forbid, self.config.label_smoothing, BadWords(self.tokenizer))

    def answer(self, example: Any, outputs: list[Any]) -> Answer:
        """Return the best object with its score, and the others where several were requested."""
        answer = super().answer(example, outputs)
        for candidate in (answer, *answer.get("candidates", ())):
            candidate["text"] = candidate["text"].strip()
        return answer

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Return the tokens of the prompt and the best object, as they are read, on both sides; and their batch."""
        best = outputs[0][0]
        written = [*best.ids, self.tokenizer.specials.eos] if best.finished else list(best.ids)
        batch = self.collate([(items[0][0], np.array(written, np.int32))], np.random.default_rng(0))
        names = [self.tokenizer.token(id) for id in batch.tokens.ids.tolist()]
        return names, names, batch

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """Return the perplexity of the objects."""
        return {"perplexity": math.exp(min(loss, 700))}

    def score(self, answers: Sequence[Answer], examples: Sequence[Any]) -> dict[str, float]:
        """Compute exact match, BLEU-2 and, where the training data can be read, the shares of what is new."""
        references: dict[tuple[str, str], list[str]] = {}
        for example in examples:
            references.setdefault(example.question, []).append(example.object or "")
        written = {
            example.question: str(answer["text"]) for answer, example in zip(answers, examples, strict=True)
        }  # an answer hangs on its question alone, unless it is sampled
        exact = sum(text in references[question] for question, text in written.items()) / max(len(written), 1)
        bleu2 = bleu([[text] for text in written.values()], [references[question] for question in written], order=2)
        return {"exact_match": exact, "bleu2": bleu2, **self._novelty(written)}

    def _novelty(self, written: dict[tuple[str, str], str]) -> dict[str, float]:
        with suppress(WeftError):  # a checkpoint may be where its training data is not
            known = self._known_tuples()
            objects, unique = list(written.values()), set(written.values())
            return {
                "novel_tuples": _share((*question, text) not in known for question, text in written.items()),
                "novel_objects": _share((text,) not in known for text in objects),
                "unique_novel_objects": _share((text,) not in known for text in unique),
            }
        return {}

    def _known_tuples(self) -> set[tuple[str, ...]]:
        if self._known is None:
            examples = [example for _, example in read_split(self._data, "train", self, Skipped())]
            self._known = {known for e in examples for known in ((*e.question, e.object), (e.object,))}
        return self._known


def _share(values: Iterator[bool]) -> float:
    """Return the share of values that are true; 0 where there are none."""
    listed = list(values)
    return sum(listed) / max(len(listed), 1)
