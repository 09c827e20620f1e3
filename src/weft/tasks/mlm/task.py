"""Masked language modelling: predict masked tokens from all others, by any masked language model.

`weft.tasks.mlm.masking` chooses the tokens, anew in each epoch; `weft.tasks.mlm.masked_sequences` says what a sequence
is. Of segment pairs, bos A eos B eos, a second objective is learnt:

| objective        | half of the time                                                                         |
|------------------|------------------------------------------------------------------------------------------|
| `next_sentence`  | B is of another document (BERT); by default if the model has segment embeddings          |
| `sentence_order` | A and B, which follow each other, are swapped (ALBERT: Lan et al. 2020, section 3.1)     |

A model whose positions do not read their own token (an `rnn` of both directions, `context2vec`) needs no masks: the
chosen tokens stay as they are.

A question is a text with masks, "[MASK]" or the tokenizer's own; the answer has the best tokens for each.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from weft.config.run import Run
from weft.config.schema import Named
from weft.data.batching.packed_items import PackedItems
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.models.base import Role
from weft.registry import resolve
from weft.tasks.base import Answer
from weft.tasks.batch import IGNORE_INDEX, Batch, Item
from weft.tasks.capabilities import Metrics, TeacherForcing
from weft.tasks.head import Head
from weft.tasks.mlm.cloze import Blanks
from weft.tasks.mlm.head import FillMaskConfig, MaskPredictions, MLMHead, PairObjective
from weft.tasks.mlm.masked_sequences import (
    MaskedSequences,
    MaskedSequencesConfig,
    TextExample,
    add_bos_eos,
    flat_positions,
    windows_of,
)
from weft.tasks.mlm.masking import mask_tokens
from weft.tasks.sharding import add_up, share
from weft.tokens import Specials, Tokens

PAIR_METRICS: dict[PairObjective, str] = {"next": "next_accuracy", "order": "order_accuracy"}
PSEUDO_TOKENS = 1 << 16  # read for the pseudo-perplexity in evaluation, a text once for each of its tokens


class MLMConfig(MaskedSequencesConfig):
    """Which tokens are chosen, and what is learnt of segment pairs."""

    next_sentence: bool | None = None  # None: in windows, if the model has segment embeddings and no sentence_order
    sentence_order: bool = False  # whether two segments are swapped (ALBERT), in place of next_sentence


class MLM(MaskedSequences, TeacherForcing):
    """Masked language modelling, with next-sentence or sentence-order prediction on segment pairs."""

    Config: ClassVar[type[Named]] = MLMConfig
    Options = FillMaskConfig
    required_roles = frozenset({Role.MASKED_LM})
    metrics: tuple[str, ...] = ("perplexity", "masked_accuracy", *PAIR_METRICS.values(), "pseudo_perplexity")
    metric = "perplexity"
    lower_is_better = True
    forces_input = True
    config: MLMConfig
    objective: PairObjective | None = None  # of segment pairs
    sees_own_token = True  # whether a position of the model reads its own token: if so, chosen ones are masked

    def check(self, run: Run) -> None:
        """Set how the corpus is read, and raise for settings that the model or the tokenizer does not support."""
        key = "sentence_order" if self.config.sentence_order else "next_sentence"
        if self.config.sentence_order and self.config.next_sentence:
            raise ConfigError("task.sentence_order: is learnt in place of task.next_sentence; leave one of them out")
        self.pairs = self.makes_pairs(run, key)
        if self.pairs and Role.ENCODER not in resolve("model", run.model.name).roles(run.model):
            raise ConfigError(f"task.{key}: {run.model.name!r} has no pooled output; set it to false")
        super().check(run)
        self.sees_own_token = resolve("model", run.model.name).directions(run.model) == ("masked",)
        self.pairing = "swapped" if self.config.sentence_order else "random"
        self.objective = ("order" if self.config.sentence_order else "next") if self.pairs else None
        self.lower_is_better = "accuracy" not in (run.train.metric or self.metric)
        unused = {metric for objective, metric in PAIR_METRICS.items() if objective != self.objective}
        self.metrics = tuple(metric for metric in type(self).metrics if metric not in unused)

    @cached_property
    def blanks(self) -> Blanks:
        """The masks of questions."""
        return Blanks(self.tokenizer, self.vocabulary.mask)

    def has_question(self, example: TextExample) -> bool:
        """Return whether a text has masks."""
        return len(self.blanks.cut(example.text)) > 1

    def encode_questions(self, texts: Sequence[str], limit: TruncationPolicy) -> list[list[Item]]:
        """Encode texts with masks."""
        return [self._question(self.blanks.ids(text, limit.needed), limit) for text in texts]

    def _question(self, ids: Sequence[int], limit: TruncationPolicy) -> list[Item]:
        """Encode a text with masks; of several windows, those that have masks."""
        mask = self.vocabulary.mask
        if mask not in ids:
            raise DataError(f"the text has no {self.blanks.mask_strings[0]} to fill; put one where a word is asked for")
        return [item for item in windows_of(ids, self.tokenizer.specials, limit) if mask in item[0]]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Return a batch of texts, or of segment pairs, with masked tokens; texts with masks already are questions."""
        tokens, labels = self.join(items, rng)
        ids = tokens.ids.numpy()
        masks = np.flatnonzero(ids == self.vocabulary.mask)
        at = masks if len(masks) else self.choose(tokens, rng)
        batch = Batch(tokens, positions=flat_positions(at, tokens))
        if len(masks):
            return batch
        ids = mask_tokens(ids, at, self.vocabulary, rng) if self.sees_own_token else ids
        counts = {"masked": len(at)}
        if labels is not None:
            assert self.objective is not None
            counts[self.objective] = len(labels)
        return replace(
            batch,
            tokens=replace(tokens, ids=torch.from_numpy(ids)),
            targets=tokens.ids[torch.from_numpy(at)],
            counts=counts,
            labels=None if labels is None else torch.from_numpy(labels),
        )

    def head(self, model: Any) -> MLMHead:
        """Return the head, with loss and mask filling, of a body."""
        specials = [getattr(self.tokenizer.specials, role.name) for role in fields(Specials)]
        special_ids = sorted({id for id in specials if id is not None})
        return MLMHead(model, special_ids, self.vocabulary.mask, self.objective)

    def answer(self, example: TextExample, outputs: list[MaskPredictions]) -> Answer:
        """Return the best tokens for each mask, and the text filled with the first of each."""
        fills = [fill for window in outputs for fill in window]
        answers = [[{"token": self.tokenizer.token(id), "score": round(p, 6)} for id, p in fill] for fill in fills]
        return {"fills": answers, "text": self.blanks.filled(example.text, [fill[0][0] for fill in fills])}

    def format_answer(self, answer: Answer) -> str:
        """Return the text filled with the best tokens, on one line."""
        if "text" not in answer:
            return f"pseudo-log-likelihood {answer['logprob']:.2f}"
        return " ".join(str(answer["text"]).splitlines())

    def format_alternatives(self, answer: Answer) -> str:
        """Return the text and, after a tab for each mask, its best tokens with their probabilities."""
        if "fills" not in answer:
            return self.format_answer(answer)
        fills = (", ".join(f"{one['token'].strip()} {one['score']:.3f}" for one in fill) for fill in answer["fills"])
        return "\t".join([self.format_answer(answer), *fills])

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Return the names of the tokens and the batch of the text itself, with all but its masks as targets."""
        (ids,), eos = items[0], self.tokenizer.specials.eos
        tokens = Tokens.pack([ids if len(ids) > 1 and ids[-1] == eos else np.append(ids, eos)])
        names = [self.tokenizer.token(id) for id in tokens.ids.tolist()]
        at = np.arange(1, len(tokens.ids) - 1)
        targets = tokens.ids[at]
        targets = targets.where(targets != self.vocabulary.mask, IGNORE_INDEX)
        return names, names, Batch(tokens, targets, positions=flat_positions(at, tokens))

    def log_probs(self, head: Head, texts: Sequence[str]) -> list[float]:
        """Return the pseudo-log-likelihood of each text."""
        assert isinstance(head, MLMHead)
        sequences = [add_bos_eos(ids, self.tokenizer.specials) for ids in self.tokenizer.ids(texts)]
        longest, max_positions = max(map(len, sequences), default=0), getattr(head.body, "max_positions", None)
        if max_positions is not None and longest > max_positions:
            raise DataError(f"a text has {longest} tokens, but the model reads {max_positions}; give a shorter one")
        return head.log_probs(sequences)

    def unavailable_metric(self, metric: str, examples: Sequence[TextExample]) -> str:
        """Return why next_accuracy is not given: one document makes no pairs."""
        return "there is but one document" if metric == "next_accuracy" and len(examples) == 1 else ""

    def evaluate_items(self, head: Head, data: PackedItems) -> Metrics:
        """Return the metrics on items, with the same masks each time."""
        assert isinstance(head, MLMHead)
        sums: dict[str, float] = {}
        for _, batch in self.evaluation_batches(data):
            for key, value in head.tally(batch.to(head.device)).items():
                sums[key] = sums.get(key, 0) + value
        sums = add_up(sums)
        if not sums.get("masked count"):
            raise DataError("not one word is left to evaluate on")
        parts = [part for part in ("masked", *PAIR_METRICS) if part in sums]
        losses = {part: sums[part] / sums[f"{part} count"] for part in parts}
        accuracies = {f"{part}_accuracy": sums[f"{part} right"] / sums[f"{part} count"] for part in parts}
        pseudo_perplexity, note = self._pseudo_perplexity(head, data)
        metrics = {"loss": sum(losses.values()), "perplexity": _exp(losses["masked"]), **accuracies}
        if self.objective and self.objective not in sums:
            reason = "there is but one document" if self.objective == "next" else "no document has two tokens"
            note = f"{PAIR_METRICS[self.objective]}: not given, since {reason}; {note}"
        return Metrics({**metrics, "pseudo_perplexity": pseudo_perplexity}, note)

    def _pseudo_perplexity(self, head: MLMHead, data: PackedItems) -> tuple[float, str]:
        """Return the pseudo-perplexity of the first texts, each cut at the limit: the cost of a text is quadratic."""
        inside = slice(1, -1) if self.config.sequences == "documents" else slice(1, None)
        texts, cost = list[np.ndarray](), 0
        for number in range(len(data)):
            ids = data[number][0][inside][: self.longest - 2]
            cost += len(ids) * (len(ids) + 2)
            if texts and cost > PSEUDO_TOKENS:
                break
            texts += [add_bos_eos(ids, self.tokenizer.specials)] if len(ids) else []
        count = sum(len(text) - 2 for text in texts)
        total = add_up({"logprob": math.fsum(head.log_probs(share(texts)))})["logprob"]
        mean = -total / max(1, count)
        return _exp(mean), f"pseudo_perplexity: of the first {count:,} tokens, in {len(texts):,} of {len(data):,} texts"


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
