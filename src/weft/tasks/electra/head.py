"""ELECTRA's pre-training head: a generator, which is a small masked language model, and a discriminator on the body.

    x_masked   = x with [MASK] at the chosen positions m                                 (Clark et al. 2020, section 2)
    x̂_i       ~ p_G(x_i | x_masked), i in m                                             a token of the generator
    x_corrupt  = x with x̂ at the positions m
    D(x, t)    = sigmoid(w · gelu(W h_t + b) + c)                                        h = the body's hidden states
    loss       = Σ_{i in m} -log p_G(x_i | x_masked) / |m| + λ Σ_t BCE(D(x_corrupt, t), [x_corrupt_t ≠ x_t]) / N

A sampled token that equals the original counts as original. Sampling has no gradient: the generator learns by masked
language modelling alone. Token, position and segment embeddings with their norm are shared, as in the authors' code; a
generator that is narrower than they are projects them. Departure from the paper, after the authors' code: 15 % of the
chosen tokens are left as they are, and the generator predicts them, too.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.schema import Section
from weft.errors import TrainingError
from weft.models.base import num_matrix_parameters
from weft.models.bert import BERT, BERTConfig
from weft.nn.attention.positions import rows_of
from weft.nn.layers.activations import ACTIVATIONS
from weft.nn.layers.losses import binary_cross_entropy_sum, cross_entropy_sum
from weft.nn.transformer.blocks import init_normal_
from weft.tasks.batch import Batch
from weft.tasks.head import Head, Sums
from weft.tokens import Tokens

MASKED = 0.85  # the share of the chosen tokens that are masked
SHARED = ("embed", "positions", "segments", "norm")  # the embeddings' modules of both models


def generator_config(config: BERTConfig, size: float, layers: int | None) -> BERTConfig:
    """Return the generator's configuration: `size` of the discriminator's heads, each as wide as there."""
    heads = max(1, round(size * config.heads))
    width, embedding = config.width // config.heads * heads, config.embedding or config.width
    assert config.ffn_width is not None
    sizes = {
        "heads": heads,
        "width": width,
        "embedding": None if embedding == width else embedding,
        "ffn_width": max(1, config.ffn_width * heads // config.heads),
        "layers": layers or config.layers,
    }
    return config.model_copy(update={**sizes, "tie": True, "pooler": "none", "pruned_heads": {}, "weights": None})


def make_generator(body: BERT, size: float, layers: int | None) -> BERT:
    """Return a generator that shares the embeddings of a body."""
    generator = BERT(generator_config(body.config, size, layers), body.embed.num_embeddings)
    for name in SHARED:
        setattr(generator, name, getattr(body, name))
    assert generator.output is not None
    generator.output.weight = body.embed.weight
    return generator


def sample_tokens(logits: Tensor, rng: torch.Generator | None = None) -> Tensor:
    """Sample a token from softmax(logits) for each row of (M, V), by the largest of logits + Gumbel noise."""
    uniform = torch.rand(logits.shape, device=logits.device, generator=rng)
    return (logits.float() - (-uniform.log()).log()).argmax(-1)


class ElectraHead(Head):
    """Generator and discriminator; without a generator, as read from other libraries, it only predicts."""

    def __init__(self, body: BERT, generator: BERT | None, mask: int, discriminator_weight: float) -> None:
        super().__init__(body)
        body.drop_pooler()
        self.generator, self.mask, self.discriminator_weight = generator, mask, discriminator_weight
        self.dense, self.output = nn.Linear(body.width, body.width), nn.Linear(body.width, 1)
        self.activation = ACTIVATIONS[body.config.activation]
        for layer in (self.dense, self.output):
            init_normal_(layer)

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the generator's summed cross-entropy, and the discriminator's with its weight."""
        logits, corrupted = self._corrupt(batch)
        assert batch.targets is not None
        masked = cross_entropy_sum(logits, batch.targets)
        replaced = binary_cross_entropy_sum(self.discriminate(corrupted), self._replaced(batch, corrupted))
        return {"masked": masked, "replaced": self.discriminator_weight * replaced}, None

    def _corrupt(self, batch: Batch, rng: torch.Generator | None = None) -> tuple[Tensor, Tokens]:
        """Return the generator's logits (M, V) at the chosen positions, and the tokens with its samples there."""
        if self.generator is None:
            raise TrainingError("task.generator_size: this model has no generator; set a size, and train one")
        assert batch.positions is not None
        assert batch.targets is not None
        ids, at, is_chosen = batch.tokens.ids, batch.positions.ids, batch.targets >= 0
        # Padding of the positions points at the first token, which is special and never chosen: it stays as it is.
        original, draws = ids[at], torch.rand(len(at), device=ids.device, generator=rng)
        masked = ids.scatter(0, at, original.masked_fill(is_chosen & (draws < MASKED), self.mask))
        logits = self.generator.logits(replace(batch.tokens, ids=masked), at=at)
        samples = torch.where(is_chosen, sample_tokens(logits.detach(), rng), original)
        return logits, replace(batch.tokens, ids=ids.scatter(0, at, samples))

    def _replaced(self, batch: Batch, corrupted: Tokens) -> Tensor:
        """Return for each token 1 if it was replaced, else 0; NaN for the tokens of filler sequences: (N,)."""
        assert batch.labels is not None
        return (corrupted.ids != batch.tokens.ids) + batch.labels[rows_of(corrupted)]

    def discriminate(self, tokens: Tokens) -> Tensor:
        """Return the logits of each token being replaced, (N,)."""
        logits: Tensor = self.output(self.activation(self.dense(self.body.encode(tokens)[0])))
        return logits[:, 0]

    def flops(self, batch: Batch) -> int:
        """Return the FLOPs of both models; the generator's output projection is at the chosen positions alone."""
        own_size = num_matrix_parameters(self.dense) + num_matrix_parameters(self.output)
        own_flops = 2 * own_size * len(batch.tokens.ids)
        if self.generator is None:
            return super().flops(batch) + own_flops
        assert self.generator.transform is not None
        output_size = self.generator.transform.weight.numel() + self.generator.embed.weight.numel()
        skipped = len(batch.tokens.ids) - (0 if batch.positions is None else len(batch.positions.ids))
        return super().flops(batch) + own_flops + self.generator.flops(batch.tokens) - 2 * output_size * skipped

    def tally(self, batch: Batch, rng: torch.Generator) -> dict[str, float]:
        """Return the summed losses of a batch, and what both models predict right."""
        logits, corrupted = self._corrupt(batch, rng)
        scores, labels = self.discriminate(corrupted), self._replaced(batch, corrupted)
        assert batch.targets is not None
        predicted, replaced = scores > 0, labels > 0
        return {
            "masked": float(cross_entropy_sum(logits, batch.targets)),
            "masked right": int((logits.argmax(-1) == batch.targets).sum()),
            "masked count": len(batch.targets),
            "replaced": float(binary_cross_entropy_sum(scores, labels)),
            "replaced right": int((predicted == replaced).sum()),
            "replaced count": len(labels),
            "both": int((predicted & replaced).sum()),
            "predicted": int(predicted.sum()),
            "actual": int(replaced.sum()),
        }

    def predict(self, batch: Batch, options: Section) -> list[list[float]]:
        """Return for each token of a text the probability that it was replaced."""
        probabilities = self.discriminate(batch.tokens).float().sigmoid()
        return [part.tolist() for part in batch.tokens.split(probabilities)]
