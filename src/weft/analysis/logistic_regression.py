"""Multinomial logistic regression on features that may be larger than memory.

With standardized features z = (x - m) / s, and n examples of K labels, W and b minimise

    Σ_i -log softmax(W z_i + b)[y_i] + λ/2 ‖W‖²

as scikit-learn's `LogisticRegression(C=1/λ)` after its `StandardScaler`. The optimizer is L-BFGS (Liu and Nocedal
1989); each step reads all features once, block by block. The result is deterministic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import TemporaryFile

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 1 << 22  # values per block
_STEPS, _GRADIENT = 300, 1e-4  # it stops after so many steps, or when no gradient component is above this


def temporary_array(*shape: int) -> np.ndarray:
    """Return a float32 array in an unlinked temporary file, which is deleted with the array."""
    with TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=shape).view(np.ndarray)


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices of rows with at most `_BLOCK` values each."""
    step = max(1, _BLOCK // max(width, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


@dataclass(frozen=True)
class LogisticProbe:
    """A fitted model: weights (K, D) and biases (K,) for unscaled features."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def fit(cls, features: np.ndarray, labels: np.ndarray, count: int, penalty: float = 1.0) -> "LogisticProbe":
        """Fit features (n, D) to label ids (n,) below `count`; `penalty` is λ."""
        from scipy.optimize import minimize

        mean, std = _mean_and_std(features)
        targets = torch.from_numpy(labels)
        shape = count, features.shape[1] + 1

        def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
            parameters = torch.from_numpy(flat.reshape(shape))
            total, gradient = _loss(parameters, features, targets, mean, std)
            weight = parameters[:, :-1]
            gradient[:, :-1] += penalty * weight
            total += penalty / 2 * float(weight.square().sum())
            return total / len(targets), gradient.flatten().numpy() / len(targets)

        options = {"maxiter": _STEPS, "gtol": _GRADIENT, "ftol": 64 * np.finfo(np.float64).eps}
        solution = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options=options).x
        return cls(*_unscale(torch.from_numpy(solution.reshape(shape)), mean, std))

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return the id of each row's most probable label, (n,)."""
        parts = (torch.from_numpy(features[block]) for block in row_blocks(*features.shape))
        ids = [(part @ self.weight.T + self.bias).argmax(1).numpy() for part in parts]
        return np.concatenate(ids)


def _mean_and_std(features: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each feature; 1 for a constant feature."""
    total = np.zeros(features.shape[1])
    for block in row_blocks(*features.shape):
        total += features[block].sum(0, dtype=np.float64)
    mean = total / len(features)
    squares = np.zeros_like(mean)
    for block in row_blocks(*features.shape):
        squares += np.square(features[block] - mean).sum(0)
    std = np.sqrt(squares / len(features))
    constant = std <= 1e-7 * np.abs(mean)  # rounding errors of a constant
    return torch.from_numpy(mean), torch.from_numpy(np.where(constant, 1.0, std))


def _loss(parameters: Tensor, features: np.ndarray, targets: Tensor, mean: Tensor, std: Tensor) -> tuple[float, Tensor]:
    """Return the sum of -log p of the targets and its gradient (K, D + 1).

    Products are in float32, sums over blocks in float64.
    """
    weight, bias = _unscale(parameters, mean, std)
    total, gradient = 0.0, torch.zeros(parameters[:, :-1].shape, dtype=torch.float64)
    bias_gradient = parameters.new_zeros(len(parameters))
    for block in row_blocks(*features.shape):
        x, y = torch.from_numpy(features[block]), targets[block]
        log_probs = F.linear(x, weight, bias).log_softmax(1)
        rows = torch.arange(len(y))
        total -= float(log_probs[rows, y].sum(dtype=torch.float64))
        errors = log_probs.exp_()  # softmax - one-hot: the gradient at the logits
        errors[rows, y] -= 1
        gradient += errors.T @ x
        bias_gradient += errors.sum(0, dtype=torch.float64)
    # The sum is over x; the gradient at W is over z = (x - mean) / std.
    return total, torch.cat([(gradient - bias_gradient[:, None] * mean) / std, bias_gradient[:, None]], 1)


def _unscale(parameters: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Convert weights for z, with the bias as the last column, to weights and biases for x."""
    weight = parameters[:, :-1] / std
    return weight.float(), (parameters[:, -1] - weight @ mean).float()
