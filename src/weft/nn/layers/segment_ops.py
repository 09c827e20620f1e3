"""A softmax over each of several groups of scores: the tokens of a sequence, the choices of a question."""

from torch import Tensor

LOWEST = -1e30  # the score of what cannot be chosen: finite, so that nothing is taken from it that is no number


def segment_logsumexp(scores: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return log Σ exp(score) over each group, (count,): scores (N,) are of the `groups` (N,); of an empty one, -inf.

    No size hangs on the groups, so that one compiled graph serves all batches.
    """
    groups = groups.long()
    peaks = scores.new_full((count,), LOWEST).scatter_reduce(0, groups, scores.detach(), "amax")
    sums = scores.new_zeros(count).index_add(0, groups, (scores - peaks[groups]).exp())
    return peaks + sums.log()
