"""Linear-chain conditional random field: scores whole label sequences, not each label alone.

Lafferty et al. 2001, "Conditional random fields", section 3, eq. 1, with a parameter for each pair of labels and, for
each token and label, an emission score from the network below, as in the (Bi)LSTM-CRF of Huang et al. 2015, sections
2.4 and 2.5, and of Lample et al. 2016, section 2.2. For a sequence of T tokens with
scores P (T, K) and transitions A (K, K):

    s(y)      = start[y_1] + Σ_t P[t, y_t] + Σ_t A[y_{t-1}, y_t] + end[y_T]
    log p(y)  = s(y) - log Z,   Z = Σ over all K^T paths of exp s          (Lample et al., eq. 1)
    y*        = argmax s(y)                                                (Lample et al., eq. 2; Viterbi)

Z and the marginals come from the forward-backward algorithm over exp P and exp A (Rabiner 1989, section III.A), scaled
to sum to one at each step (his section V.A). The backward pass is the forward pass over the reversed sequence with A
transposed: both run in one loop.

    a_t[j] = Σ_i α_{t-1}[i] exp A[i, j]      a_1 = exp start      α_t = a_t exp P[t] / c_t
    b_t[i] = Σ_j exp A[i, j] β_{t+1}[j]      b_T = exp end        β_t = b_t exp P[t] / d_t
    Z      = c_1 ... c_T Σ_k α_T[k] exp end[k]
    p(y_t = k) ∝ a_t[k] β_t[k]               p(y_{t-1} = i, y_t = j) ∝ α_{t-1}[i] exp A[i, j] β_t[j]

The gradient of log Z with respect to a score is the expected number of times that a path uses it, which is these two
marginals (Lafferty et al., section 4). So it is computed directly, not by autograd through the loop.

Departures: `start` and `end` are vectors, where Lample et al. add two labels to A. All
parameters start at zero: a new CRF is a softmax at each token. Forward-backward runs in float64 whatever the scores'
dtype, which is exact for any scores as long as the transitions lie within 300 of each other; in Z, one that is further
below the highest counts as 300 below.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.tokens import to_device

_MIN_LOG_WEIGHT = -300.0  # e^-300 e^-300 is no underflow in float64: no step's scale can be zero


@dataclass(frozen=True)
class _TimeMajor:
    """Time-major order of the tokens, longest sequence first: the rows of step 1, of step 2, ... to N."""

    counts: list[int]  # the number of sequences that have a step t
    forward: Tensor  # (N,) the flat position of each row of the forward pass, from each sequence's first token
    backward: Tensor  # (N,) the same of the backward pass, from the last token
    inverse: Tensor  # (N,) the row of each flat position in the forward pass
    to_backward: Tensor  # (N,) for each row of the forward pass, the row of the same token in the backward pass
    previous: Tensor  # (N - B,) for each row of the forward pass but those of step 1, the row of the token before
    last: Tensor  # (B,) the rows of last tokens in the forward pass


def _time_major(lengths: Tensor, device: torch.device) -> _TimeMajor:
    size, order = lengths[lengths > 0].sort(descending=True, stable=True)
    first = (lengths.cumsum(0) - lengths)[lengths > 0][order]
    time, column = torch.arange(max(size.tolist(), default=0))[:, None], torch.arange(len(size))
    valid = time < size  # (T, B)
    counts = valid.sum(1)
    offsets = counts.cumsum(0) - counts  # (T,) the first row of each step
    forward, remaining = (first + time)[valid], (size - 1 - time).clamp(min=0)
    indices = (
        forward,
        (first + remaining)[valid],
        torch.empty_like(forward).scatter_(0, forward, torch.arange(len(forward))),
        (offsets[remaining] + column)[valid],
        (offsets[:-1, None] + column)[valid[1:]],
        offsets[size - 1] + column,
    )
    return _TimeMajor(counts.tolist(), *(to_device(index, device) for index in indices))


def _exp_weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(scores - max), clamped at e^-300, and the maximum."""
    peak = scores.amax()
    return (scores - peak).clamp(min=_MIN_LOG_WEIGHT).exp(), peak


def _forward_backward(
    scores: Tensor, transitions: Tensor, start: Tensor, end: Tensor, steps: _TimeMajor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return α and β, (N, K) in the order of the forward pass, and Σ log Z over the sequences."""
    (weight, peak), (begin, begin_peak), (finish, finish_peak) = map(_exp_weights, (transitions, start, end))
    row_max = scores.amax(-1, keepdim=True).double()
    rows = torch.cat([steps.forward, steps.backward])
    alpha_beta = (scores - row_max).exp_().index_select(0, rows).view(2, *scores.shape)
    matrices, incoming = torch.stack([weight, weight.T]), torch.stack([begin, finish])[:, None]  # (2, K, K), (2, 1, K)
    scales = [row_max[:0]]
    # In place: exp P becomes α and β; large new tensors would take most of the time.
    for step in alpha_beta.split(steps.counts, 1):
        scale = step.mul_(incoming[:, : step.shape[1]]).sum(-1, keepdim=True)
        incoming = torch.bmm(step.div_(scale), matrices)
        scales.append(scale[0])
    alpha, beta = alpha_beta
    peaks = len(steps.previous) * peak + len(steps.last) * (begin_peak + finish_peak)
    log_z = torch.cat(scales).log().sum() + row_max.sum() + (alpha[steps.last] @ finish).log().sum() + peaks
    return alpha, beta.index_select(0, steps.to_backward), log_z


def _unnormalized_marginals(
    alpha: Tensor, beta: Tensor, transitions: Tensor, start: Tensor, steps: _TimeMajor
) -> tuple[Tensor, Tensor]:
    """Return a β, (N, K) in the order of the forward pass, and α_{t-1} of each token but the first ones."""
    rows, previous = len(steps.last), alpha.index_select(0, steps.previous)
    marginals = torch.empty_like(beta)
    marginals[:rows] = _exp_weights(start)[0]
    torch.mm(previous, _exp_weights(transitions)[0], out=marginals[rows:])
    return marginals.mul_(beta), previous


class _LogPartitionSum(torch.autograd.Function):
    """Σ log Z over the sequences, with its gradient from forward-backward."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, transitions: Tensor, start: Tensor, end: Tensor, steps: _TimeMajor) -> Tensor:
        alpha, beta, log_z = _forward_backward(scores, transitions, start, end, steps)
        ctx.save_for_backward(alpha, beta, transitions, start)
        ctx.steps, ctx.dtype = steps, scores.dtype
        return log_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        alpha, beta, transitions, start = ctx.saved_tensors
        steps: _TimeMajor = ctx.steps
        rows = len(steps.last)
        joint, previous = _unnormalized_marginals(alpha, beta, transitions, start, steps)
        scale = grad / joint.sum(-1, keepdim=True)
        marginals = joint.mul_(scale)
        pairs = _exp_weights(transitions)[0] * (previous.mul_(scale[rows:]).T @ beta[rows:])  # (K, K)
        grad_scores = marginals.to(ctx.dtype).index_select(0, steps.inverse)
        return grad_scores, pairs, marginals[:rows].sum(0), marginals[steps.last].sum(0), None


class CRF(nn.Module):
    """A linear-chain CRF over K labels; its input is an emission score for each token and label."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(labels, labels))  # from the row's label to the column's
        self.start = nn.Parameter(torch.zeros(labels))
        self.end = nn.Parameter(torch.zeros(labels))

    def loss_sum(self, scores: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
        """Sum -log p(tags) over concatenated sequences: scores (N, K), tags (N,), lengths (B,) on the CPU."""
        with torch.autocast(scores.device.type, enabled=False):
            steps = _time_major(lengths, scores.device)
            transitions, start, end = self._double_parameters()
            log_z = _LogPartitionSum.apply(scores, transitions, start, end, steps)  # type: ignore[no-untyped-call]
            path, rows = tags[steps.forward], len(steps.last)
            emitted = scores.gather(1, tags[:, None]).double().sum()
            inner = transitions[path[steps.previous], path[rows:]].sum() + emitted
            outer = start[path[:rows]].sum() + end[path[steps.last]].sum()
            loss: Tensor = log_z - inner - outer
            return loss.to(torch.promote_types(scores.dtype, torch.float32))

    @torch.no_grad()
    def decode(self, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tags (N,) of each sequence's best path, and the probability (N,) of each of these tags."""
        with torch.autocast(scores.device.type, enabled=False):
            steps = _time_major(lengths, scores.device)
            transitions, start, end = self._double_parameters()
            path = _best_path(scores.double(), transitions, start, end, steps)
            alpha, beta, _ = _forward_backward(scores, transitions, start, end, steps)
            marginals, _ = _unnormalized_marginals(alpha, beta, transitions, start, steps)
            probs = marginals.gather(1, path[:, None]).squeeze(1) / marginals.sum(-1)
            return path[steps.inverse], probs[steps.inverse].to(torch.promote_types(scores.dtype, torch.float32))

    def _double_parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.transitions.double(), self.start.double(), self.end.double()


def _best_path(scores: Tensor, transitions: Tensor, start: Tensor, end: Tensor, steps: _TimeMajor) -> Tensor:
    """Return y* by the Viterbi algorithm (Viterbi 1967), in the order of the forward pass.

    Instead of back-pointers for all labels, the argmax is recomputed on the way back, along the best path alone.
    """
    inward = transitions.T.contiguous()  # row j: the transitions into j
    best = [scores[:0]]
    for emission in scores[steps.forward].split(steps.counts):
        previous = best[-1][: len(emission)]
        best.append(emission + ((previous[:, None] + inward).amax(-1) if len(previous) else start))
    path = [steps.forward[:0]]
    for scores_t in reversed(best[1:]):
        outgoing = torch.cat([inward[path[-1]], end.expand(len(scores_t) - len(path[-1]), -1)])
        path.append((scores_t + outgoing).argmax(-1))
    return torch.cat(path[::-1])
