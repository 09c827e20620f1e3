"""Memory of a training: a model that cannot fit is refused before its weights are allocated.

An operating system grants more memory than it has, and ends the process once that is used. So the model is first built
on PyTorch's meta device, where weights have shapes and no data, and what they will take is compared with the machine's.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch

from weft.config.run import Run
from weft.config.schema import Named
from weft.errors import ConfigError
from weft.tasks.base import Task
from weft.tasks.factory import build
from weft.tokenization.trainable import Tokenizer
from weft.training.finetuning import frozen

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "adagrad": 1, "sgd": 0, "asgd": 1}  # tensors for each parameter
WARN_SHARE = 0.7  # of the memory: activations and data need the rest
_SMALL = 1 << 28  # parameters, by a rough bound, of a model that is not looked at: building it twice takes a while
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def check_memory(run: Run, tokenizer: Tokenizer, task: Task, device: torch.device, processes: int = 1) -> str:
    """Return a notice if weights, gradients and optimizer take most of the memory, else ""; raise if they exceed it.

    With FSDP a process has its share of them; an evaluation gathers the whole weights beside it.
    """
    if _rough_bound(run.model, len(tokenizer) + len(tokenizer.target)) < _SMALL:
        return ""
    with torch.device("meta"):
        _, head = build(run, tokenizer, task)
    with frozen(head, run.train):
        weights = sum(4 * parameter.numel() for parameter in head.parameters())
        trained = sum(4 * parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    needed, total = weights + trained * (1 + OPTIMIZER_STATES[run.train.optimizer]), total_memory(device)
    if run.train.parallel == "fsdp" and processes > 1:
        needed = needed // processes + weights
    if needed <= WARN_SHARE * total:
        return ""
    place = "this machine" if device.type == "cpu" else str(device)
    message = f"model: weights, gradients and optimizer take {needed / 1e9:,.1f} GB, and {place} has {total / 1e9:,.1f}"
    if needed > total:
        raise ConfigError(f"{message}; choose a smaller model.width, model.layers or tokenizer.size")
    return f"{message}: there may be too little left for a batch; if so, lower train.batch_tokens"


def total_memory(device: torch.device) -> int:
    """Return the memory of a device in bytes: the GPU's, or what this machine or its container has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit: the file is missing, or has the word "max"
        return min(physical, int(_CGROUP_LIMIT.read_text(encoding="ascii")))
    return physical


def _rough_bound(model: Named, vocab: int) -> int:
    """Return more than the parameters of a model by the numbers of its section: of embeddings and of its layers."""
    numbers = {key: value for key, value in model if isinstance(value, int)}
    layers = sum(value for key, value in numbers.items() if "layers" in key) + 1
    largest = max((value for key, value in numbers.items() if "layers" not in key), default=1)
    return largest * (vocab + 16 * largest * layers)
