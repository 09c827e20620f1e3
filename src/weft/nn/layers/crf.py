"""A linear-chain conditional random field: whole sequences of labels are scored, not each label alone.

Lafferty et al. 2001, "Conditional random fields", section 3, eq. 1, with a free number for each pair of labels and, for
each token and label, the score of a network below, as in the (Bi)LSTM-CRF of Huang et al. 2015, sections 2.4 and 2.5,
and of Lample et al. 2016, section 2.2. For a sequence of T tokens with scores P (T, K) and transitions A (K, K):

    s(y)      = start[y_1] + Σ_t P[t, y_t] + Σ_t A[y_{t-1}, y_t] + end[y_T]
    log p(y)  = s(y) - log Z,   Z = Σ over all K^T paths of exp s          (Lample et al., eq. 1)
    y*        = argmax s(y)                                                (Lample et al., eq. 2; Viterbi)

Z and the marginals come from two walks over exp P and exp A (Rabiner 1989, section III.A), scaled to sum to one at each
step (his section V.A). The second is the first on the sequence reversed with A transposed: both go in one loop.

    a_t[j] = Σ_i α_{t-1}[i] exp A[i, j]      a_1 = exp start      α_t = a_t exp P[t] / c_t
    b_t[i] = Σ_j exp A[i, j] β_{t+1}[j]      b_T = exp end        β_t = b_t exp P[t] / d_t
    Z      = c_1 ... c_T Σ_k α_T[k] exp end[k]
    p(y_t = k) ∝ a_t[k] β_t[k]               p(y_{t-1} = i, y_t = j) ∝ α_{t-1}[i] exp A[i, j] β_t[j]

The gradient of log Z by a number is how often a path is expected to use it, which is what these two say (Lafferty et
al., section 4). So it is written down here, not found by walking the loop back.

Departures: `start` and `end` are vectors, where Lample et al. add two labels to A. All starts at zero: a new field is a
softmax at each token. The walks are in float64 whatever the scores are in, which is exact for any scores as long as
the transitions lie within 300 of each other; in Z, one that is further below the highest counts as 300 below.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_DEEPEST = -300.0  # e^-300 e^-300 is still a number in float64: no step of a walk can come to nothing


@dataclass(frozen=True)
class _Steps:
    """The order in which all sequences walk abreast, the longest first: the rows of step 1, of step 2, ... to N."""

    counts: list[int]  # how many sequences have a step t: one that has ended drops off
    ahead: Tensor  # (N,) the flat place of each row, where the walk goes from each sequence's first token on
    back: Tensor  # (N,) the same where it goes from the last token back
    home: Tensor  # (N,) each flat place's row of the walk ahead
    across: Tensor  # (N,) for each row of the walk ahead, the row of the same token in the walk back
    before: Tensor  # (N - B,) for each row of the walk ahead, but those of step 1, the row of the token before
    last: Tensor  # (B,) the rows of last tokens in the walk ahead


def _steps(lengths: Tensor, device: torch.device) -> _Steps:
    size, order = lengths[lengths > 0].sort(descending=True, stable=True)
    first = (lengths.cumsum(0) - lengths)[lengths > 0][order]
    time, column = torch.arange(max(size.tolist(), default=0))[:, None], torch.arange(len(size))
    inside = time < size  # (T, B)
    counts = inside.sum(1)
    begins = counts.cumsum(0) - counts  # (T,) the first row of each step
    ahead, left = (first + time)[inside], (size - 1 - time).clamp(min=0)
    places = (
        ahead,
        (first + left)[inside],
        torch.empty_like(ahead).scatter_(0, ahead, torch.arange(len(ahead))),
        (begins[left] + column)[inside],
        (begins[:-1, None] + column)[inside[1:]],
        begins[size - 1] + column,
    )
    return _Steps(counts.tolist(), *(place.to(device, non_blocking=True) for place in places))


def _weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(scores) with the highest at 1, and the log of what that took off."""
    peak = scores.amax()
    return (scores - peak).clamp(min=_DEEPEST).exp(), peak


def _walk(
    scores: Tensor, transitions: Tensor, start: Tensor, end: Tensor, steps: _Steps
) -> tuple[Tensor, Tensor, Tensor]:
    """Return α and β, (N, K) in the order of the walk ahead, and Σ log Z over the sequences."""
    (weight, peak), (begin, begin_peak), (finish, finish_peak) = map(_weights, (transitions, start, end))
    high = scores.amax(-1, keepdim=True).double()
    both = (scores - high).exp_().index_select(0, torch.cat([steps.ahead, steps.back])).view(2, *scores.shape)
    turned, into = torch.stack([weight, weight.T]), torch.stack([begin, finish])[:, None]  # (2, K, K), (2, 1, K)
    scales = [high[:0]]
    for step in both.split(steps.counts, 1):  # in place: exp P becomes α and β; large new tensors cost most of the time
        scale = step.mul_(into[:, : step.shape[1]]).sum(-1, keepdim=True)
        into = torch.bmm(step.div_(scale), turned)
        scales.append(scale[0])
    alpha, beta = both
    peaks = len(steps.before) * peak + len(steps.last) * (begin_peak + finish_peak)
    log_z = torch.cat(scales).log().sum() + high.sum() + (alpha[steps.last] @ finish).log().sum() + peaks
    return alpha, beta.index_select(0, steps.across), log_z


def _joint(alpha: Tensor, beta: Tensor, transitions: Tensor, start: Tensor, steps: _Steps) -> tuple[Tensor, Tensor]:
    """Return a β, (N, K) in the order of the walk ahead, and the α before each token but the first ones."""
    rows, before = len(steps.last), alpha.index_select(0, steps.before)
    joint = torch.empty_like(beta)
    joint[:rows] = _weights(start)[0]
    torch.mm(before, _weights(transitions)[0], out=joint[rows:])
    return joint.mul_(beta), before


class _LogPartitionSum(torch.autograd.Function):
    """Σ log Z over the sequences, with its gradient from the two walks."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, transitions: Tensor, start: Tensor, end: Tensor, steps: _Steps) -> Tensor:
        alpha, beta, log_z = _walk(scores, transitions, start, end, steps)
        ctx.save_for_backward(alpha, beta, transitions, start)
        ctx.steps, ctx.dtype = steps, scores.dtype
        return log_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        alpha, beta, transitions, start = ctx.saved_tensors
        steps: _Steps = ctx.steps
        rows = len(steps.last)
        joint, before = _joint(alpha, beta, transitions, start, steps)
        share = grad / joint.sum(-1, keepdim=True)
        found = joint.mul_(share)
        pairs = _weights(transitions)[0] * (before.mul_(share[rows:]).T @ beta[rows:])  # (K, K)
        flat = found.to(ctx.dtype).index_select(0, steps.home)
        return flat, pairs, found[:rows].sum(0), found[steps.last].sum(0), None


class CRF(nn.Module):
    """A field over K labels; its input is a score for each token and label."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(labels, labels))  # from the row's label to the column's
        self.start = nn.Parameter(torch.zeros(labels))
        self.end = nn.Parameter(torch.zeros(labels))

    def loss_sum(self, scores: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
        """Sum -log p(tags) over sequences laid end to end: scores (N, K), tags (N,), lengths (B,) on the CPU."""
        with torch.autocast(scores.device.type, enabled=False):
            steps = _steps(lengths, scores.device)
            transitions, start, end = self._exact()
            log_z = _LogPartitionSum.apply(scores, transitions, start, end, steps)  # type: ignore[no-untyped-call]
            path, rows = tags[steps.ahead], len(steps.last)
            taken = transitions[path[steps.before], path[rows:]].sum() + scores.gather(1, tags[:, None]).double().sum()
            edges = start[path[:rows]].sum() + end[path[steps.last]].sum()
            loss: Tensor = log_z - taken - edges
            return loss.to(torch.promote_types(scores.dtype, torch.float32))

    @torch.no_grad()
    def decode(self, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tags (N,) of each sequence's best path, and the probability (N,) of each of these tags."""
        with torch.autocast(scores.device.type, enabled=False):
            steps = _steps(lengths, scores.device)
            transitions, start, end = self._exact()
            path = _best_path(scores.double(), transitions, start, end, steps)
            alpha, beta, _ = _walk(scores, transitions, start, end, steps)
            joint, _ = _joint(alpha, beta, transitions, start, steps)
            found = joint.gather(1, path[:, None]).squeeze(1) / joint.sum(-1)
            return path[steps.home], found[steps.home].to(torch.promote_types(scores.dtype, torch.float32))

    def _exact(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.transitions.double(), self.start.double(), self.end.double()


def _best_path(scores: Tensor, transitions: Tensor, start: Tensor, end: Tensor, steps: _Steps) -> Tensor:
    """Find y* (Viterbi 1967), in the order of the walk ahead.

    Where a best path came from is not written down for all labels, but asked again on the way back, along that path.
    """
    inward = transitions.T.contiguous()  # row j: what it takes to come to j
    best = [scores[:0]]
    for emission in scores[steps.ahead].split(steps.counts):
        known = best[-1][: len(emission)]
        best.append(emission + ((known[:, None] + inward).amax(-1) if len(known) else start))
    path = [steps.ahead[:0]]
    for reached in reversed(best[1:]):
        onward = torch.cat([inward[path[-1]], end.expand(len(reached) - len(path[-1]), -1)])
        path.append((reached + onward).argmax(-1))
    return torch.cat(path[::-1])
