"""Segment log-sum-exp, for a softmax over each of several groups: a sequence's tokens, a question's choices."""

from torch import Tensor

MASKED_SCORE = -1e30  # masked scores: finite, so that differences of them are not NaN


def segment_logsumexp(scores: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return log Σ exp(score) over each group, (count,); `groups` (N,) are those of the scores (N,); -inf if empty.

    No tensor's size depends on the groups' values, so that one compiled graph serves all batches.
    """
    groups = groups.long()
    peaks = scores.new_full((count,), MASKED_SCORE).scatter_reduce(0, groups, scores.detach(), "amax")
    sums = scores.new_zeros(count).index_add(0, groups, (scores - peaks[groups]).exp())
    return peaks + sums.log()
