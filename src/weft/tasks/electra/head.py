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

With `mlm_weight` μ the body is a masked language model as well, so that it can fill masks afterwards (after COCO-LM,
Meng et al. 2021, section 3.2). A share of the chosen positions shows [MASK] in x_corrupt; there the discriminator has
no loss. The body predicts the original token at all chosen positions:

    loss      += μ Σ_{i in m} -log p_body(x_i | x_corrupt) / |m|
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
GENERATOR_EPS = 1e-5  # of its layer norms: with BERT's 1e-12 the gradient of states that are all but equal has no bound
STILL_MASKED = 0.3  # the share of the chosen tokens that the body sees masked, if it learns to fill masks
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
    fixed = {"tie": True, "pooler": "none", "pruned_heads": {}, "weights": None, "eps": GENERATOR_EPS}
    return config.model_copy(update={**sizes, **fixed})


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

    def __init__(
        self, body: BERT, generator: BERT | None, mask: int, discriminator_weight: float, mlm_weight: float = 0.0
    ) -> None:
        super().__init__(body)
        body.drop_pooler()
        self.generator, self.mask = generator, mask
        self.discriminator_weight, self.mlm_weight = discriminator_weight, mlm_weight
        self.dense, self.output = nn.Linear(body.width, body.width), nn.Linear(body.width, 1)
        self.activation = ACTIVATIONS[body.config.activation]
        for layer in (self.dense, self.output):
            init_normal_(layer)

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the summed cross-entropies of the masked tokens, and the discriminator's, each with its weight."""
        logits, corrupted = self._corrupt(batch)
        assert batch.targets is not None
        assert batch.positions is not None
        masked, states = cross_entropy_sum(logits, batch.targets), self.body.encode(corrupted)[0]
        if self.mlm_weight:
            masked = masked + self.mlm_weight * self.body.masked_loss_of(states, batch.positions.ids, batch.targets)
        replaced = binary_cross_entropy_sum(self._scores(states), self._replaced(batch, corrupted))
        return {"masked": masked, "replaced": self.discriminator_weight * replaced}, None

    def _corrupt(self, batch: Batch, rng: torch.Generator | None = None) -> tuple[Tensor, Tokens]:
        """Return the generator's logits (M, V) at the chosen positions, and the tokens with its samples there.

        If the body learns to fill masks, some of the chosen positions have [MASK] instead of a sample.
        """
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
        if self.mlm_weight:
            draws = torch.rand(len(at), device=ids.device, generator=rng)
            samples = samples.masked_fill(is_chosen & (draws < STILL_MASKED), self.mask)
        return logits, replace(batch.tokens, ids=ids.scatter(0, at, samples))

    def _replaced(self, batch: Batch, corrupted: Tokens) -> Tensor:
        """Return for each token 1 if it was replaced, else 0; NaN for masks and tokens of filler sequences: (N,)."""
        assert batch.labels is not None
        labels = (corrupted.ids != batch.tokens.ids) + batch.labels[rows_of(corrupted)]
        return labels.masked_fill(corrupted.ids == self.mask, torch.nan) if self.mlm_weight else labels

    def discriminate(self, tokens: Tokens) -> Tensor:
        """Return the logits of each token being replaced, (N,)."""
        return self._scores(self.body.encode(tokens)[0])

    def _scores(self, states: Tensor) -> Tensor:
        logits: Tensor = self.output(self.activation(self.dense(states)))
        return logits[:, 0]

    def flops(self, batch: Batch) -> int:
        """Return the FLOPs of both models; their output projections are at the chosen positions alone."""
        own_size = num_matrix_parameters(self.dense) + num_matrix_parameters(self.output)
        flops = super().flops(batch) + 2 * own_size * len(batch.tokens.ids)
        if self.generator is not None:
            flops += self.generator.flops(batch.tokens)
        skipped = len(batch.tokens.ids) - (0 if batch.positions is None else len(batch.positions.ids))
        for model in (self.body, self.generator):
            if model is not None and model.transform is not None:
                flops -= 2 * (model.transform.weight.numel() + model.embed.weight.numel()) * skipped
        return flops

    def tally(self, batch: Batch, rng: torch.Generator) -> dict[str, float]:
        """Return the summed losses of a batch, and what both models predict right."""
        logits, corrupted = self._corrupt(batch, rng)
        states, labels = self.body.encode(corrupted)[0], self._replaced(batch, corrupted)
        scores, counted = self._scores(states), ~labels.isnan()
        assert batch.targets is not None
        predicted, replaced = (scores > 0) & counted, labels > 0
        return {
            "masked": float(cross_entropy_sum(logits, batch.targets)),
            "masked right": int((logits.argmax(-1) == batch.targets).sum()),
            "masked count": len(batch.targets),
            "replaced": float(binary_cross_entropy_sum(scores, labels)),
            "replaced right": int(((predicted == replaced) & counted).sum()),
            "replaced count": int(counted.sum()),
            "both": int((predicted & replaced).sum()),
            "predicted": int(predicted.sum()),
            "actual": int(replaced.sum()),
            **(self._tally_fills(batch, corrupted, states) if self.mlm_weight else {}),
        }

    def _tally_fills(self, batch: Batch, corrupted: Tokens, states: Tensor) -> dict[str, float]:
        """Return the body's summed loss at the chosen positions, and how many of the masked it predicts right."""
        assert batch.targets is not None
        assert batch.positions is not None
        at = batch.positions.ids
        logits = self.body.masked_logits_of(states, at)
        is_masked = corrupted.ids[at] == self.mask
        return {
            "filled": float(cross_entropy_sum(logits, batch.targets)),
            "filled right": int(((logits.argmax(-1) == batch.targets) & is_masked).sum()),
            "filled count": int(is_masked.sum()),
        }

    def predict(self, batch: Batch, options: Section) -> list[list[float]]:
        """Return for each token of a text the probability that it was replaced."""
        probabilities = self.discriminate(batch.tokens).float().sigmoid()
        return [part.tolist() for part in batch.tokens.split(probabilities)]
