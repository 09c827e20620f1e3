"""Gradient norms of the last step's loss at each input step: vanishing and exploding gradients.

For every input x_t, the embedding of step t, the norm of ∂L_T / ∂x_t, where L_T is the loss at the last step
(Bengio, Simard & Frasconi 1994; Pascanu, Mikolov & Bengio 2013, section 2). Through a tanh network it is a product
of T - t matrices, and so shrinks or grows exponentially; gates let it pass.
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
from weft.tasks.base import Task
from weft.tasks.batch import Batch
from weft.tasks.head import Head
from weft.tokens import Tokens

STEPS, WIDTH = 100, 64  # length of the random sequence, and width of the cells
GAINS = (0.7, 1.0, 2.0, 3.0)


@dataclass(frozen=True)
class GradientNorms:
    """The gradient norm at each input token of one side of one model."""

    model: str
    side: str  # "source", "target" or "text"
    tokens: Sequence[str]
    norms: Sequence[float]

    @property
    def points(self) -> list[tuple[float, float]]:
        """Pairs (steps before the last, norm), from the first step on."""
        return [(len(self.norms) - step, norm) for step, norm in enumerate(self.norms, 1)]

    def to_dict(self) -> dict[str, Any]:
        """Return the data as JSON-ready values."""
        norms = [float(f"{norm:.6g}") for norm in self.norms]
        return {"model": self.model, "side": self.side, "tokens": list(self.tokens), "norms": norms}


def gradient_norms(task: Task, head: Head, batch: Batch) -> dict[str, list[float]]:
    """Return the norms of the gradient of the last step's loss at each input step, for each side of a batch of one."""
    inputs = {"text": batch.tokens.ids} if batch.source is None else {"source": batch.source.ids}
    inputs |= {} if batch.source is None else {"target": batch.tokens.ids}
    head.eval()
    # cuDNN's recurrent kernels have no backward pass in eval mode.
    with (
        torch.enable_grad(),
        torch.backends.cudnn.flags(enabled=False),
        _capture_embeddings(head, inputs) as embeddings,
    ):
        loss = _last_loss(task, head, batch)
    if not embeddings or not loss.requires_grad:
        raise RoleError(
            f"model: {type(head.body).__name__} has no nn.Embedding of its input tokens, so no gradients at the input "
            "steps; use another model"
        )
    grads = torch.autograd.grad(loss, list(embeddings.values()), allow_unused=True)
    return {side: _norms(grad, len(inputs[side])) for side, grad in zip(embeddings, grads, strict=True)}


def _norms(grad: Tensor | None, steps: int) -> list[float]:
    """Return the L2 norm of each step; zeros if the loss does not depend on the input."""
    if grad is None:
        return [0.0] * steps
    norms: list[float] = grad.double().flatten(0, -2).norm(dim=-1).tolist()  # in float32 the square of 1e-25 is zero
    return norms


@contextmanager
def _capture_embeddings(head: nn.Module, ids_by_side: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that the forward pass fills with the embeddings of the ids, as leaves of the autograd graph."""
    captured: dict[str, Tensor] = {}

    def hook(embedding: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        for side, ids in ids_by_side.items():
            if side not in captured and inputs[0].numel() == len(ids) and torch.equal(inputs[0].flatten(), ids):
                captured[side] = output.detach().requires_grad_()
                return captured[side]
        return None

    hooks = [module.register_forward_hook(hook) for module in head.modules() if isinstance(module, nn.Embedding)]
    try:
        yield captured
    finally:
        for handle in hooks:
            handle.remove()


def _last_loss(task: Task, head: Head, batch: Batch) -> Tensor:
    """Compute -log p of the last target token or, for a labelling task, the loss of the last predicted label."""
    at, targets = batch.positions, batch.targets
    assert targets is not None
    if Role.ENCODER in task.required_roles:
        if at is not None and not len(at.ids):
            raise DataError("the text has no words, so there is no last step; give a text that has words")
        if at is not None:
            batch = replace(batch, positions=Tokens.flat(at.ids[-1:], torch.ones(1)), targets=targets[-1:])
        return torch.stack(list(head(batch)[0].values())).sum()
    if targets.dim() > 1:  # one row per direction, as in ELMo
        raise RoleError(f"model: {head.body.config.name!r} is bidirectional, so it has no last step; use another model")
    if batch.source is not None:
        last = torch.tensor([len(targets) - 1], device=batch.tokens.device)
        return _loss(head.body.logits(batch.tokens, batch.source, at=last), targets[-1:])
    (direction,) = type(head.body).directions(head.body.config)
    if direction in ("both", "masked"):
        raise RoleError(f"model: {head.body.config.name!r} reads both sides, so it has no last step; use another model")
    last = torch.tensor([len(targets) - 1 if direction == "forward" else 0], device=batch.tokens.device)
    return _loss(head.body.logits(batch.tokens, at=last, direction=direction), targets[last])


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.double(), targets)  # with p near 1, the loss is zero in float32


def untrained_cell_norms(seed: int = 0) -> list[GradientNorms]:
    """Return the norms of untrained recurrent cells on one random sequence, and of Elman cells with scaled weights."""
    side, inputs, target = "untrained cells, one random sequence", *_random_sequence(seed)
    results = [GradientNorms(name, side, (), _cell_norms(_make_cell(name, seed), inputs, target)) for name in CELLS]
    side = "elman, recurrent weights scaled"
    for gain in GAINS:
        cell = _make_cell("elman", seed)
        with torch.no_grad():
            cell.stages()[0].weight.mul_(gain)
        results.append(GradientNorms(f"×{gain:g}", side, (), _cell_norms(cell, inputs, target)))
    return results


def _random_sequence(seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs (T, 1, D) and a target (1, D) of standard normal values."""
    generator = torch.Generator().manual_seed(seed)
    shapes, dtype = ((STEPS, 1, WIDTH), (1, WIDTH)), torch.float64
    inputs, target = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)
    return inputs, target


def _make_cell(name: str, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_cell(name, WIDTH, WIDTH).double()  # a vanishing gradient soon underflows float32


def _cell_norms(cell: nn.Module, inputs: Tensor, target: Tensor) -> list[float]:
    """Return the norms for the loss ½ ‖h_T - target‖², h_T being the last output."""
    inputs = inputs.clone().requires_grad_()
    loss = (cell(inputs)[0][-1] - target).square().sum() / 2
    return _norms(torch.autograd.grad(loss, inputs)[0], STEPS)
