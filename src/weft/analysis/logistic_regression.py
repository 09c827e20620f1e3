"""Multinomial logistic regression on features that may be more than memory holds.

With features brought to mean 0 and deviation 1, z = (x - m) / s, and n examples of K labels, W and b are where

    Σ_i -log softmax(W z_i + b)[y_i] + λ/2 ‖W‖²

is least: what scikit-learn's `LogisticRegression(C=1/λ)` finds after its `StandardScaler`. It is found by L-BFGS (Liu
and Nocedal 1989); each of its steps reads all features once, block by block. There is nothing random in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import TemporaryFile

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 1 << 22  # numbers that are worked on at a time
_STEPS, _GRADIENT = 300, 1e-4  # after so many steps, or where no slope is above this, it is done


def mapped(*shape: int) -> np.ndarray:
    """Return float32 room for features in a file that has no name: it goes when nothing refers to it."""
    with TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=shape).view(np.ndarray)


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Cut rows into parts that are worked on at a time."""
    step = max(1, _BLOCK // max(width, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


@dataclass(frozen=True)
class Probe:
    """Weights (K, D) and biases (K,) for features as they are."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def fit(cls, features: np.ndarray, labels: np.ndarray, count: int, penalty: float = 1.0) -> "Probe":
        """Learn to tell `count` labels, by number, from features (n, D)."""
        from scipy.optimize import minimize

        mean, spread = _spread(features)
        right = torch.from_numpy(labels)
        shape = count, features.shape[1] + 1

        def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
            own = torch.from_numpy(flat.reshape(shape))
            total, slope = _loss(own, features, right, mean, spread)
            weight = own[:, :-1]
            slope[:, :-1] += penalty * weight
            total += penalty / 2 * float(weight.square().sum())
            return total / len(right), slope.flatten().numpy() / len(right)

        settings = {"maxiter": _STEPS, "gtol": _GRADIENT, "ftol": 64 * np.finfo(np.float64).eps}
        found = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options=settings).x
        return cls(*_unscaled(torch.from_numpy(found.reshape(shape)), mean, spread))

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return the number of each row's likeliest label, (n,)."""
        parts = (torch.from_numpy(features[part]) for part in blocks(*features.shape))
        found = [(block @ self.weight.T + self.bias).argmax(1).numpy() for block in parts]
        return np.concatenate(found)


def _spread(features: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of each feature; of one that is always the same, 1."""
    total = np.zeros(features.shape[1])
    for part in blocks(*features.shape):
        total += features[part].sum(0, dtype=np.float64)
    mean = total / len(features)
    square = np.zeros_like(mean)
    for part in blocks(*features.shape):
        square += np.square(features[part] - mean).sum(0)
    deviation = np.sqrt(square / len(features))
    same = deviation <= 1e-7 * np.abs(mean)  # what rounding alone makes of one number
    return torch.from_numpy(mean), torch.from_numpy(np.where(same, 1.0, deviation))


def _loss(own: Tensor, features: np.ndarray, right: Tensor, mean: Tensor, spread: Tensor) -> tuple[float, Tensor]:
    """Sum -log p of what is right, and its slope (K, D + 1); products are in float32, sums of blocks in float64."""
    weight, bias = _unscaled(own, mean, spread)
    total, slope, errors = 0.0, torch.zeros(own[:, :-1].shape, dtype=torch.float64), own.new_zeros(len(own))
    for part in blocks(*features.shape):
        x, y = torch.from_numpy(features[part]), right[part]
        likely = F.linear(x, weight, bias).log_softmax(1)
        rows = torch.arange(len(y))
        total -= float(likely[rows, y].sum(dtype=torch.float64))
        wrong = likely.exp_()
        wrong[rows, y] -= 1
        slope += wrong.T @ x
        errors += wrong.sum(0, dtype=torch.float64)
    # The slope is of W, for z: what x has beyond z is taken away.
    return total, torch.cat([(slope - errors[:, None] * mean) / spread, errors[:, None]], 1)


def _unscaled(own: Tensor, mean: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Turn weights for z, with the bias as their last column, into weights and biases for x."""
    weight = own[:, :-1] / spread
    return weight.float(), (own[:, -1] - weight @ mean).float()
