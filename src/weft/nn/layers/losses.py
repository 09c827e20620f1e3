"""Losses as sums: the trainer divides by counts summed over ranks and accumulation steps."""

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.nn.kernels import dispatch
from weft.nn.transformer.output_projection import OutputProjection


def cross_entropy_sum(logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """Sum -log p(target) over (N, V) logits, in float32 at least; `smoothing` as in Szegedy et al. 2016, section 7.

    `weights` (V,) multiply the term of each target, smoothed or not. A target of -100 is ignored, as in PyTorch.
    """
    if weights is None and (cross_entropy := dispatch.cross_entropy_kernel(logits)):
        losses: Tensor = cross_entropy(logits.contiguous(), targets.contiguous(), logits.shape[-1], smoothing)[0]
        return losses.sum()
    if weights is None:
        return F.cross_entropy(_at_least_float32(logits), targets, reduction="sum", label_smoothing=smoothing)
    terms = F.cross_entropy(_at_least_float32(logits), targets, reduction="none", label_smoothing=smoothing)
    return (weights.to(terms.dtype)[targets.clamp(min=0)] * terms).sum()


def read_out_sum(output: OutputProjection, states: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return `cross_entropy_sum` of the logits of hidden states (N, D)."""
    cross_entropy = dispatch.cross_entropy_kernel(states)
    if cross_entropy is None:
        return cross_entropy_sum(output(states), targets, smoothing)
    # Logits whose number is no multiple of a few are written, and read, several times as slowly: they are padded.
    logits = F.linear(states, *output.padded_parameters())
    losses: Tensor = cross_entropy(logits, targets.contiguous(), output.out_features, smoothing)[0]
    return losses.sum()


def binary_cross_entropy_sum(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None
) -> Tensor:
    """Sum the binary cross-entropy over (N, V) logits: -log p where the target is 1, -log(1 - p) where it is 0.

    `smoothing` moves targets that far towards 1/2; `weights` (V,) multiply the terms of positive targets. NaN targets
    are ignored.
    """
    scores, ignored = _at_least_float32(logits), targets.isnan()
    smoothed = targets.masked_fill(ignored, 0).to(scores.dtype) * (1 - smoothing) + smoothing / 2
    terms = F.binary_cross_entropy_with_logits(scores, smoothed, pos_weight=weights, reduction="none")
    return terms.masked_fill(ignored, 0).sum()


def soft_cross_entropy_sum(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Sum T² KL(softmax(teacher / T) || softmax(logits / T)) over (N, V) (Hinton et al. 2015, section 2).

    The factor T² keeps the size of the gradient, which falls with 1 / T².
    """
    target = (_at_least_float32(teacher) / temperature).log_softmax(-1)
    log_probs = (_at_least_float32(logits) / temperature).log_softmax(-1)
    return temperature**2 * F.kl_div(log_probs, target, reduction="sum", log_target=True)


def soft_binary_cross_entropy_sum(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Sum the same over (N, V) decisions, each a sigmoid: a softmax over its logit and 0."""
    own, target = (torch.stack([scores, torch.zeros_like(scores)], -1).flatten(0, -2) for scores in (logits, teacher))
    return soft_cross_entropy_sum(own, target, temperature)


def cosine_distance_sum(states: Tensor, teacher: Tensor) -> Tensor:
    """Sum 1 - cos(state, teacher's state) over (N, D) (Sanh et al. 2019, section 3)."""
    return (1 - F.cosine_similarity(_at_least_float32(states), _at_least_float32(teacher), dim=-1)).sum()


def squared_error_sum(predictions: Tensor, targets: Tensor) -> Tensor:
    """Sum (prediction - target)² over (N,), in float32 at least; NaN targets are ignored."""
    ignored = targets.isnan()
    errors = _at_least_float32(predictions) - targets.masked_fill(ignored, 0)
    return errors.masked_fill(ignored, 0).square().sum()


def contrastive_sum(
    anchors: Tensor, candidates: Tensor, anchor_groups: Tensor, candidate_groups: Tensor, temperature: float
) -> Tensor:
    """Sum -log softmax(a_i · c / temperature) at c_i over the anchors (B, D): in-batch negatives (Gao et al. 2021).

    The first B of the candidates (C, D) are the positives, in the order of the anchors; all vectors have length 1.
    Other candidates of an anchor's own group, of the group numbers (B,) and (C,), are not negatives: they are left out.
    """
    with torch.autocast(anchors.device.type, enabled=False):  # bf16 would round the cosines to a percent
        logits = _at_least_float32(anchors) @ _at_least_float32(candidates).T / temperature  # (B, C)
    same = anchor_groups[:, None] == candidate_groups
    logits = logits.masked_fill(same.fill_diagonal_(False), -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(anchors), device=logits.device), reduction="sum")


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
