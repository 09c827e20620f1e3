"""How strongly the loss at the end reaches back to each earlier step: vanishing and exploding gradients, made visible.

For every input x_t, the embedding that step t reads, the norm of ∂L_T / ∂x_t, where L_T is the loss at the last step
(Bengio, Simard & Frasconi 1994; Pascanu, Mikolov & Bengio 2013, section 2). Through a tanh network it is a product
of T - t matrices, and so shrinks or grows like a power; gates let it pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import DataError, RoleError
from weft.models.base import Role
from weft.nn.rnn.cells import CELLS, make_cell
from weft.tasks.base import Batch, Head, Task
from weft.tokens import Tokens

STEPS, WIDTH = 100, 64  # of the sequence that fresh cells read, and of the cells
GAINS = (0.7, 1.0, 2.0, 3.0)


@dataclass(frozen=True)
class GradientNorms:
    """What one model read of one kind, and how strongly the loss at the end reaches each step of it."""

    model: str
    side: str  # "source", "target" or "text"
    tokens: Sequence[str]
    norms: Sequence[float]

    @property
    def points(self) -> list[tuple[float, float]]:
        """The norms by how many steps each is before the last, from the first on."""
        return [(len(self.norms) - step, norm) for step, norm in enumerate(self.norms, 1)]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-ready numbers and words."""
        norms = [float(f"{norm:.6g}") for norm in self.norms]
        return {"model": self.model, "side": self.side, "tokens": list(self.tokens), "norms": norms}


def gradient_norms(task: Task, head: Head, batch: Batch) -> dict[str, list[float]]:
    """Return the norm of the gradient of the last step's loss at each step of each side that a batch of one reads."""
    read = {"text": batch.tokens.ids} if batch.source is None else {"source": batch.source.ids}
    read |= {} if batch.source is None else {"target": batch.tokens.ids}
    head.eval()
    # cuDNN's recurrent kernels have no backward pass in evaluation.
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False), _watching(head, read) as seen:
        loss = _last_loss(task, head, batch)
    if not seen or not loss.requires_grad:
        raise RoleError(
            f"model: {type(head.body).__name__} reads no tokens through an nn.Embedding, so there are no steps that a "
            "gradient could be followed back through"
        )
    found = torch.autograd.grad(loss, list(seen.values()), allow_unused=True)
    return {side: _norms(grad, len(read[side])) for side, grad in zip(seen, found, strict=True)}


def _norms(grad: Tensor | None, steps: int) -> list[float]:
    if grad is None:
        return [0.0] * steps
    found: list[float] = grad.double().flatten(0, -2).norm(dim=-1).tolist()  # in float32 the square of 1e-25 is nothing
    return found


@contextmanager
def _watching(head: nn.Module, read: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Catch what the embeddings give for the ids that are read, as the leaves that gradients stop at."""
    seen: dict[str, Tensor] = {}

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        for side, ids in read.items():
            if side not in seen and inputs[0].numel() == len(ids) and torch.equal(inputs[0].flatten(), ids):
                seen[side] = output.detach().requires_grad_()
                return seen[side]
        return None

    hooks = [part.register_forward_hook(hook) for part in head.modules() if isinstance(part, nn.Embedding)]
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()


def _last_loss(task: Task, head: Head, batch: Batch) -> Tensor:
    """Take -log p of the last token that a scorer is asked for; of a labelling, the loss of the last label it chose."""
    at, targets = batch.at, batch.targets
    assert targets is not None
    if Role.ENCODER in task.needs:
        if at is not None and not len(at.ids):
            raise DataError("the text has no words, so there is no last step to look back from; give one that has some")
        if at is not None:
            batch = replace(batch, at=Tokens.flat(at.ids[-1:], torch.ones(1)), targets=targets[-1:])
        return torch.stack(list(head(batch)[0].values())).sum()
    if targets.dim() > 1:  # a row for each direction, as ELMo has them
        raise RoleError(f"model: {head.body.config.name!r} goes both ways, so no one loss is the last; look at another")
    if batch.source is not None:
        last = torch.tensor([len(targets) - 1], device=batch.tokens.device)
        return _loss(head.body.logits(batch.tokens, batch.source, at=last), targets[-1:])
    (direction,) = type(head.body).directions(head.body.config)
    if direction in ("both", "masked"):
        raise RoleError(f"model: {head.body.config.name!r} sees both sides, so no step is the last; look at another")
    last = torch.tensor([len(targets) - 1 if direction == "forward" else 0], device=batch.tokens.device)
    return _loss(head.body.logits(batch.tokens, at=last, direction=direction), targets[last])


def _loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.double(), targets)  # where p is near 1, float32 sees no loss


def fresh(seed: int = 0) -> list[GradientNorms]:
    """Compare cells at the start of training, on one random sequence; and one with its weights made larger."""
    side, inputs, target = "fresh cells, one random sequence", *_random(seed)
    found = [GradientNorms(name, side, (), _through(_cell(name, seed), inputs, target)) for name in CELLS]
    side = "elman, its weights from state to state enlarged"
    for gain in GAINS:
        cell = _cell("elman", seed)
        with torch.no_grad():
            cell.stages()[0].weight.mul_(gain)
        found.append(GradientNorms(f"×{gain:g}", side, (), _through(cell, inputs, target)))
    return found


def _random(seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    shapes, exact = ((STEPS, 1, WIDTH), (1, WIDTH)), torch.float64
    inputs, target = (torch.randn(*shape, generator=source, dtype=exact) for shape in shapes)
    return inputs, target


def _cell(name: str, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_cell(name, WIDTH, WIDTH).double()  # a gradient that vanishes is soon less than float32 can tell


def _through(cell: nn.Module, inputs: Tensor, target: Tensor) -> list[float]:
    """Take half the squared distance of the last output from a random target for the loss."""
    inputs = inputs.clone().requires_grad_()
    loss = (cell(inputs)[0][-1] - target).square().sum() / 2
    return _norms(torch.autograd.grad(loss, inputs)[0], STEPS)
