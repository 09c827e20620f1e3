"""ELECTRA: pre-train a text encoder as a discriminator (Clark et al. 2020), a BERT.

A small generator fills masked tokens with samples of its own, and the model says of every token whether it was
replaced; `weft.tasks.electra.head` has the equations. The model learns from all tokens, not from the masked 15 % alone.
It is what is kept: fine-tuning takes the discriminator's body, and the generator is for going on with the training.

Sequences are those of `weft.tasks.mlm.masked_sequences`: windows, pairs of segments that follow each other, or texts.
Which tokens are chosen follows from seed, epoch and batch; what is sampled for them, from the random state that a
checkpoint holds.

With `mlm_weight` the model learns to fill masks beside: its weights then start `task: mlm` as well as fine-tuning.

A question is a text; the answer says of each token how probably it was replaced.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from weft.config.run import Run
from weft.config.schema import Named
from weft.data.batching.packed_items import PackedItems
from weft.errors import ConfigError, DataError
from weft.models.base import Role
from weft.models.bert import BERTConfig
from weft.tasks.base import Answer
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import Metrics
from weft.tasks.electra.head import ElectraHead, make_generator
from weft.tasks.head import Head
from weft.tasks.mlm.masked_sequences import MaskedSequences, MaskedSequencesConfig, TextExample, flat_positions
from weft.tasks.sharding import add_up

REPLACED = 0.5  # a token of at least this probability is shown as replaced


class ElectraConfig(MaskedSequencesConfig):
    """How the corpus is read, the size of the generator, and the weight of the discriminator's loss."""

    pairs: bool | None = None  # in windows, segment pairs; None: if the model has segment embeddings
    generator_size: float = Field(0.25, ge=0, le=1)  # its width as a share of the model's; 0: no generator
    generator_layers: int | None = Field(None, ge=1)  # None: as many as the model has
    discriminator_weight: float = Field(50.0, gt=0)  # of the discriminator's loss, beside the generator's
    mlm_weight: float = Field(0.0, ge=0)  # of the model's own masked-LM loss; above 0 it learns to fill masks, too


class Electra(MaskedSequences):
    """Replaced token detection, with a generator that is trained beside it."""

    Config: ClassVar[type[Named]] = ElectraConfig
    required_roles = frozenset({Role.ENCODER})
    metrics: tuple[str, ...] = ("replaced_accuracy", "replaced_precision", "replaced_recall", "masked_accuracy")
    # Losses do not rank checkpoints: the better the generator, the harder it is to tell what it replaced.
    metric = "masked_accuracy"
    config: ElectraConfig

    def roles_for(self, roles: frozenset[Role]) -> frozenset[Role]:
        """Return the roles needed of the model: masked LM where it learns to fill masks."""
        return self.required_roles | ({Role.MASKED_LM} if self.config.mlm_weight else set())

    def check(self, run: Run) -> None:
        """Set how the corpus is read, and raise for settings that the model or the tokenizer does not support."""
        if not isinstance(run.model, BERTConfig):
            raise ConfigError(f"model.name: task 'electra' pre-trains a bert, but this is {run.model.name!r}")
        if self.config.mlm_weight:
            self.metric = "mlm_accuracy"  # of the model; `masked_accuracy` is the generator's
            self.metrics = (*type(self).metrics, self.metric)
        self.pairs = self.makes_pairs(run, "pairs")
        super().check(run)

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Return a batch of texts, or of segment pairs, with the positions of tokens to mask; its tokens are as read.

        The labels, 0 for each sequence, tell the tokens of sequences from filler, whose label is NaN.
        """
        tokens, _ = self.join(items, rng)
        at = self.choose(tokens, rng)
        return Batch(
            tokens,
            targets=tokens.ids[torch.from_numpy(at)],
            counts={"masked": len(at), "replaced": len(tokens.ids)},
            positions=flat_positions(at, tokens),
            labels=torch.zeros(len(tokens)),
        )

    def head(self, model: Any) -> ElectraHead:
        """Return the head: the body as discriminator, and a generator of its own."""
        size, layers = self.config.generator_size, self.config.generator_layers
        generator = make_generator(model, size, layers) if size else None
        weights = self.config.discriminator_weight, self.config.mlm_weight
        return ElectraHead(model, generator, self.vocabulary.mask, *weights)

    def answer(self, example: TextExample, outputs: list[list[float]]) -> Answer:
        """Return the tokens of a text, and for each the probability that it was replaced."""
        scores = [round(score, 6) for window in outputs for score in window[1:-1]]
        ids = self.tokenizer.ids([example.text], len(scores))[0]
        tokens = [self.tokenizer.token(id) for id in ids[: len(scores)]]
        return {"tokens": tokens, "scores": scores}

    def format_answer(self, answer: Answer) -> str:
        """Return the tokens on one line, those that were probably replaced in brackets."""
        pairs = zip(answer["tokens"], answer["scores"], strict=True)
        return " ".join(f"[{token.strip()}]" if score >= REPLACED else token.strip() for token, score in pairs)

    def evaluate_items(self, head: Head, data: PackedItems) -> Metrics:
        """Return the metrics on items, with the same masks and the same samples each time."""
        assert isinstance(head, ElectraHead)
        sums, device = dict[str, float](), head.device
        rng = torch.Generator(device)
        for number, batch in self.evaluation_batches(data):
            for key, value in head.tally(batch.to(device), rng.manual_seed(number)).items():
                sums[key] = sums.get(key, 0) + value
        sums = add_up(sums)
        if not sums.get("masked count"):
            raise DataError("not one word is left to evaluate on")
        masked, replaced = (sums[part] / sums[f"{part} count"] for part in ("masked", "replaced"))
        filled = sums.get("filled", 0.0) / sums["masked count"]
        mlm = {"mlm_accuracy": sums["filled right"] / max(sums["filled count"], 1)} if "filled" in sums else {}
        return Metrics(
            {
                "loss": masked + self.config.mlm_weight * filled + self.config.discriminator_weight * replaced,
                "replaced_accuracy": sums["replaced right"] / sums["replaced count"],
                "replaced_precision": sums["both"] / max(sums["predicted"], 1),
                "replaced_recall": sums["both"] / max(sums["actual"], 1),
                "masked_accuracy": sums["masked right"] / sums["masked count"],
                **mlm,
            }
        )
