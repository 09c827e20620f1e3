"""The field by its definition: every path of small fields is listed, scored and summed, in float64."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from weft.nn.layers.crf import CRF
from weft.nn.layers.losses import cross_entropy_sum

quick = settings(deadline=None, derandomize=True, max_examples=20)
ragged = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def field(labels: int, spread: float = 1.0, dtype: torch.dtype = torch.float64) -> CRF:
    crf = CRF(labels).to(dtype)
    with torch.no_grad():
        for weight in crf.parameters():
            weight.normal_(std=spread)
    return crf


def batch(labels: int, lengths: list[int], spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    total = sum(lengths)
    scores = torch.randn(total, labels, dtype=torch.float64) * spread
    return scores.requires_grad_(), torch.randint(labels, (total,)), torch.tensor(lengths)


def score(crf: CRF, scores: Tensor, path: tuple[int, ...]) -> Tensor:
    """s(y), term by term."""
    found = sum((scores[step, label] for step, label in enumerate(path)), scores.new_zeros(()))
    for before, after in pairwise(path):
        found = found + crf.transitions[before, after]
    return found + crf.start[path[0]] + crf.end[path[-1]] if path else found


def listed(crf: CRF, scores: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
    """All paths of one sequence, and their log-probabilities."""
    paths = list(product(range(len(crf.start)), repeat=len(scores)))
    return paths, torch.stack([score(crf, scores, path) for path in paths]).log_softmax(0)


def brute_loss(crf: CRF, scores: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
    total = scores.sum() * 0
    for own, path in zip(scores.split(lengths.tolist()), tags.split(lengths.tolist()), strict=True):
        paths, logs = listed(crf, own)
        total = total - logs[paths.index(tuple(path.tolist()))]
    return total


@torch.no_grad()
def brute_decode(crf: CRF, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    tags, sure = [], []
    for own in scores.split(lengths.tolist()):
        paths, logs = listed(crf, own)
        best = paths[int(logs.argmax())]
        tags += best
        for step, label in enumerate(best):
            sure.append(sum(log.exp() for path, log in zip(paths, logs, strict=True) if path[step] == label))
    return torch.tensor(tags, dtype=torch.long), torch.tensor(sure, dtype=torch.float64)


def gradients(crf: CRF, scores: Tensor, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [scores, *crf.parameters()], allow_unused=True, materialize_grads=True))


def check_definition(crf: CRF, scores: Tensor, tags: Tensor, lengths: Tensor) -> None:
    actual, expected = crf.loss_sum(scores, tags, lengths), brute_loss(crf, scores, tags, lengths)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(gradients(crf, scores, actual / 3), gradients(crf, scores, expected / 3), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
    for mine, theirs in zip(crf.decode(scores, lengths), brute_decode(crf, scores, lengths), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@quick
@given(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 999))
def test_loss_gradient_best_path_and_marginals_are_those_of_the_listed_paths(labels, lengths, seed):
    torch.manual_seed(seed)
    check_definition(field(labels), *batch(labels, lengths))


def test_the_gradient_is_that_of_small_changes():
    torch.manual_seed(0)
    crf = field(3)
    scores, tags, lengths = batch(3, [3, 1, 0, 5])
    names = [name for name, _ in crf.named_parameters()]

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.crf = crf

        def forward(self, scores: Tensor) -> Tensor:
            return self.crf.loss_sum(scores, tags, lengths)

    def loss(scores: Tensor, *weights: Tensor) -> Tensor:
        given = {f"crf.{name}": weight for name, weight in zip(names, weights, strict=True)}
        return functional_call(Loss(), given, (scores,))

    assert torch.autograd.gradcheck(loss, (scores, *crf.parameters()))


@pytest.mark.parametrize("broken", ["transposed", "no end", "no start", "run together"])
def test_what_is_not_the_definition_is_caught(broken):
    """The negative controls: a CRF that differs in one respect is detected."""
    torch.manual_seed(1)
    crf, (scores, tags, lengths) = field(3), batch(3, [3, 4])
    other = field(3)
    other.load_state_dict(crf.state_dict())
    with torch.no_grad():
        if broken == "transposed":
            other.transitions.copy_(crf.transitions.T)
        elif broken != "run together":
            getattr(other, broken.removeprefix("no ")).zero_()
    expected = brute_loss(crf, scores, tags, lengths)
    joined = torch.tensor([7]) if broken == "run together" else lengths
    torch.testing.assert_close(crf.loss_sum(scores, tags, lengths), expected)
    assert not torch.isclose(other.loss_sum(scores, tags, joined), expected, rtol=1e-3, atol=0)


@quick
@given(ragged, st.integers(1, 6), st.integers(0, 999))
def test_a_ragged_batch_is_each_sequence_alone(lengths, labels, seed):
    torch.manual_seed(seed)
    crf, (scores, tags, sizes) = field(labels), batch(labels, lengths)
    together = crf.loss_sum(scores, tags, sizes)
    grads = gradients(crf, scores, together)
    pieces = list(zip(scores.split(lengths), tags.split(lengths), sizes.split(1), strict=True))
    alone = sum((crf.loss_sum(*piece) for piece in pieces), scores.new_zeros(()))
    torch.testing.assert_close(together, alone, rtol=1e-11, atol=1e-11)
    for one, other in zip(grads, gradients(crf, scores, alone), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    tags_of, sure_of = zip(*(crf.decode(own, size) for own, _, size in pieces), strict=True)
    best, sure = crf.decode(scores, sizes)
    assert torch.equal(best, torch.cat(tags_of))
    torch.testing.assert_close(sure, torch.cat(sure_of), rtol=1e-11, atol=1e-12)


def test_no_tokens_cost_nothing_and_have_no_tags():
    crf, scores = field(3), torch.zeros(0, 3, requires_grad=True)
    for lengths in (torch.tensor([0, 0]), torch.zeros(0, dtype=torch.long)):
        loss = crf.loss_sum(scores, torch.zeros(0, dtype=torch.long), lengths)
        assert loss.item() == 0
        assert all(not grad.any() for grad in gradients(crf, scores, loss))
        tags, sure = crf.decode(scores, lengths)
        assert (tags.shape, tags.dtype, sure.shape, sure.dtype) == ((0,), torch.int64, (0,), torch.float32)


def test_a_new_field_is_a_softmax_at_each_token():
    torch.manual_seed(0)
    scores, tags, lengths = batch(5, [4, 2, 1])
    crf = CRF(5).double()
    torch.testing.assert_close(crf.loss_sum(scores, tags, lengths), cross_entropy_sum(scores, tags))
    best, sure = crf.decode(scores, lengths)
    assert torch.equal(best, scores.argmax(-1))
    torch.testing.assert_close(sure, scores.softmax(-1).amax(-1))


# Another hand's


def padded_loss(crf: CRF, scores: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
    """The textbook algorithm: a padded batch, a mask, log-sum-exp, and autograd through the loop."""
    cut = lengths.tolist()
    grid, gold = pad_sequence(list(scores.split(cut))), pad_sequence(list(tags.split(cut)))  # (T, B, K), (T, B)
    alpha, taken = crf.start + grid[0], crf.start[gold[0]]
    for step in range(len(grid)):
        real = step < lengths
        if step:
            inner = (alpha[:, :, None] + crf.transitions + grid[step][:, None]).logsumexp(1)
            alpha = torch.where(real[:, None], inner, alpha)
            taken = taken + torch.where(real, crf.transitions[gold[step - 1], gold[step]], 0.0)
        taken = taken + torch.where(real, grid[step].gather(1, gold[step][:, None]).squeeze(1), 0.0)
    last = gold.gather(0, lengths[None] - 1).squeeze(0)
    return ((alpha + crf.end).logsumexp(1) - taken - crf.end[last]).sum()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_it_is_the_padded_and_masked_loop(dtype, tolerance):
    torch.manual_seed(0)
    scores, tags, lengths = batch(45, torch.randint(1, 40, (16,)).tolist())
    crf, scores = field(45, dtype=dtype), scores.detach().to(dtype).requires_grad_()
    actual, expected = crf.loss_sum(scores, tags, lengths), padded_loss(crf, scores, tags, lengths)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=0)
    for mine, theirs in zip(gradients(crf, scores, actual), gradients(crf, scores, expected), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


def wave(step: float, *shape: int) -> Tensor:
    return 2 * (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * step).sin().view(shape)


def test_it_says_what_pytorch_crf_says():
    """Recorded from pytorch-crf 0.7.2, batch_first, float64, with its three sets of weights set as here."""
    crf, scores, tags = CRF(3).double(), wave(0.7, 11, 3).requires_grad_(), torch.arange(11) * 2 % 3
    crf.load_state_dict({"transitions": wave(1.1, 3, 3), "start": wave(1.3, 3), "end": wave(1.7, 3)})
    lengths = torch.tensor([4, 1, 6])
    loss = crf.loss_sum(scores, tags, lengths)
    loss.backward()
    exact = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(loss.item(), 29.97919300795261, **exact)
    assert crf.decode(scores, lengths)[0].tolist() == [2, 0, 2, 1, 1, 2, 2, 0, 2, 2, 1]
    recorded = {
        "transitions": [
            [0.24415979390201717, 0.28723333905365206, -1.190057539020669],
            [-2.320202581352693, 0.037359166303795016, 0.15580015221761537],
            [1.3222510883402028, -0.010412502595540829, 1.4738690831516084],
        ],
        "start": [-0.716487511951194, 0.27763382546397386, 0.43885368648721723],
        "end": [-0.8116148049966678, 2.7188570910571643, -1.9072422860604974],
    }
    for name, expected in recorded.items():
        torch.testing.assert_close(crf.get_parameter(name).grad, torch.tensor(expected, dtype=torch.float64), **exact)
    fourth = torch.tensor([-0.9897073491960967, 0.9140006899432829, 0.07570665925281271], dtype=torch.float64)
    torch.testing.assert_close(scores.grad[3], fourth, **exact)


# What numbers can do


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_walked_in_full(half):
    torch.manual_seed(0)
    crf, lengths = field(7, dtype=torch.float32), torch.full((64,), 32)
    scores, tags = torch.randn(2048, 7).to(half).requires_grad_(), torch.randint(7, (2048,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = crf.loss_sum(scores, tags, lengths)
        best, sure = crf.decode(scores, lengths)
    assert (loss.dtype, sure.dtype) == (torch.float32, torch.float32)
    whole = field(7)
    whole.load_state_dict(crf.state_dict())
    torch.testing.assert_close(loss, whole.loss_sum(scores.double(), tags, lengths).float(), rtol=1e-6, atol=0)
    assert torch.equal(best, whole.decode(scores.double(), lengths)[0])
    loss.backward()
    assert scores.grad is not None
    assert scores.grad.dtype == half
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the negative control
        coarse = padded_loss(crf.to(half), scores, tags, lengths)
    assert not torch.isclose(coarse.float(), loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("transitions", "scores"), [(1.0, 2000.0), (60.0, 1.0), (60.0, 2000.0)])
def test_large_numbers_are_exact(transitions, scores):
    """Standard deviations: such transitions lie up to 300 apart, such scores thousands."""
    torch.manual_seed(3)
    crf = field(3, transitions)
    assert crf.transitions.max() - crf.transitions.min() < 300
    check_definition(crf, *batch(3, [4, 1, 4], scores))


def test_the_same_for_all_labels_changes_nothing():
    torch.manual_seed(0)
    crf, (scores, tags, lengths) = field(3), batch(3, [4, 2])
    before = crf.loss_sum(scores, tags, lengths)
    with torch.no_grad():
        for weight in crf.parameters():
            weight += 1000.0
    torch.testing.assert_close(crf.loss_sum(scores + 1e4, tags, lengths), before, rtol=1e-9, atol=0)


@pytest.mark.parametrize("never", [-1e4, -torch.inf])
def test_a_forbidden_step_is_never_taken(never):
    torch.manual_seed(0)
    crf, (scores, _, lengths) = field(3), batch(3, [6, 5, 1], 9.0)
    free = crf.decode(scores, lengths)[0]
    with torch.no_grad():
        crf.transitions[0, 1] = crf.start[2] = never
    tags, sure = crf.decode(scores, lengths)
    for path in tags.split(lengths.tolist()):
        assert path[0] != 2
        assert (0, 1) not in pairwise(path.tolist())
    assert not torch.equal(tags, free)  # they were taken before
    torch.testing.assert_close(sure, brute_decode(crf, scores, lengths)[1])
    loss = crf.loss_sum(scores, tags, lengths)
    torch.testing.assert_close(loss, brute_loss(crf, scores, tags, lengths))
    assert gradients(crf, scores, loss)[1][0, 1] < 1e-99


@pytest.mark.parametrize("never", [-1e4, -torch.inf])
def test_scores_that_insist_on_what_is_forbidden_give_finite_numbers(never):
    crf, lengths = CRF(2).double(), torch.tensor([3])
    with torch.no_grad():
        crf.transitions[:, 1] = never
    scores = torch.tensor([[0.0, 0], [0, 5000], [0, 0]], dtype=torch.float64, requires_grad=True)
    loss = crf.loss_sum(scores, torch.zeros(3, dtype=torch.long), lengths)
    assert all(number.isfinite().all() for number in (loss, *gradients(crf, scores, loss)))
    tags, sure = crf.decode(scores, lengths)
    assert tags[1:].tolist() == [0, 0]
    assert ((sure >= 0) & (sure <= 1)).all()


def test_a_label_may_be_masked_out_by_its_scores():
    torch.manual_seed(0)
    crf, (scores, tags, lengths) = field(3), batch(2, [4, 1])
    masked = torch.cat([scores.detach(), torch.full((5, 1), -torch.inf)], 1).requires_grad_()
    two = CRF(2).double()
    two.load_state_dict(
        {name: weight[:2, :2] if weight.dim() > 1 else weight[:2] for name, weight in crf.state_dict().items()}
    )
    loss = crf.loss_sum(masked, tags, lengths)
    torch.testing.assert_close(loss, two.loss_sum(scores, tags, lengths))
    assert all(grad.isfinite().all() for grad in gradients(crf, masked, loss))


def test_it_learns_what_follows_what():
    """Scores that say nothing: all there is to learn is in the transitions."""
    crf, tags, lengths = CRF(3), torch.tensor([0, 1, 2, 0, 1, 2, 0] * 3), torch.tensor([7] * 3)
    blank = torch.zeros(21, 3)
    optimizer = torch.optim.Adam(crf.parameters(), lr=0.3)
    for _ in range(60):
        optimizer.zero_grad()
        crf.loss_sum(blank, tags, lengths).backward()
        optimizer.step()
    best, sure = crf.decode(blank, lengths)
    assert torch.equal(best, tags)
    assert sure.min() > 0.95
