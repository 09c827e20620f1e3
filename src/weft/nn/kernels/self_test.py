"""Self-test: the Triton kernels for half precision are enabled only if they match eager PyTorch on an example.

An untested GPU, driver or compiler may break them; then eager PyTorch is used, and the reason is returned.
"""

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.attention
from torch import Tensor

from weft.nn.attention.multihead import AttentionLayout
from weft.nn.kernels import dispatch
from weft.nn.layers.losses import cross_entropy_sum
from weft.nn.transformer.blocks import BlockConfig, Blocks
from weft.nn.transformer.output_projection import OutputProjection
from weft.tokens import Tokens

# Eager PyTorch rounds to half precision too, and in a deep network that adds up, so the tolerance is a multiple of its
# own error. A wrong index or mask is far above either.
_ERROR_FACTOR, _RELATIVE = 2.0, 0.01


def try_kernels(device: torch.device, learning: bool = True) -> str:
    """Enable the kernels, for training or inference alone, if they match eager PyTorch; return the reason if not."""
    if device.type != "cuda" or not dispatch.has_triton():
        return ""
    try:
        take_flash3(device)
        with torch.random.fork_rng([device], device_type="cuda"), torch.set_grad_enabled(learning):
            dispatch.trust(False, learning)
            exact, eager = _examples(device, half=False), _examples(device)
            dispatch.trust(True, learning)
            fused = _examples(device)
        error = _relative_error(fused, eager, exact)
    except Exception as exception:  # of any kind that a compiler may raise
        dispatch.trust(False, learning)
        return (
            f"they fail here ({str(exception).splitlines()[0][:200] if str(exception) else type(exception).__name__})"
        )
    dispatch.trust(error < 1, learning)
    return "" if error < 1 else f"they are off by {error:.2g} times what rounding explains here"


@cache
def try_reading(device: torch.device) -> None:
    """Enable the kernels for inference, if they have not been tested yet."""
    if not dispatch.kernels_enabled(learning=False):
        try_kernels(device, learning=False)


def _relative_error(fused: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> float:
    """Return the kernels' largest error, relative to the tolerance; from 1 on they are rejected."""
    errors = [
        (kernel - target).norm()
        / (_ERROR_FACTOR * (reference - target).norm() + _RELATIVE * target.norm()).clamp(min=1e-6)
        for kernel, reference, target in zip(fused, eager, exact, strict=True)
    ]
    return float(torch.stack(errors).max())  # NaN if one of them is NaN


def take_flash3(device: torch.device) -> bool:
    """Make FlashAttention-3 the variable-length kernel, where it is installed and the GPU is a Hopper one."""
    fits = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)  # newer than the oldest PyTorch
    if not fits or activate is None or find_spec("flash_attn_interface") is None:
        return False
    activate("FA3")
    return True


def _examples(device: torch.device, half: bool = True) -> list[Tensor]:
    """Return the results of a decoder with cross-attention, a GPT-like decoder and a BERT-like encoder on examples."""
    results: list[Tensor] = []
    torch.manual_seed(0)
    for shape, lengths, sources, causal in (
        (BlockConfig(128, 2, 256), [3, 120, 1, 40], [5, 9, 64, 130], True),
        (BlockConfig(128, 2, 256, "gelu-tanh", "pre"), [320, 300], [], True),
        (BlockConfig(128, 2, 256, "gelu", eps=1e-12), [3, 200, 1, 300], [], False),
    ):
        blocks = Blocks(shape, 2, "decoder", causal, cross=bool(sources)).to(device)
        output = OutputProjection(128, 131).to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            results += _run_example(blocks, output, lengths, sources, device)
    return results


def _run_example(
    blocks: Blocks, output: OutputProjection, lengths: list[int], sources: list[int], device: torch.device
) -> list[Tensor]:
    """Return the blocks' last hidden states, the loss and, for training, every gradient."""
    tokens, source_tokens = (Tokens.pack([[0] * length for length in side]).to(device) for side in (lengths, sources))
    x, memory = (torch.randn(sum(side), 128, device=device).requires_grad_() for side in (lengths, sources))
    targets = torch.randint(131, (sum(lengths),), device=device)
    states = blocks(x, AttentionLayout.self_attention(tokens), memory, AttentionLayout(tokens, source_tokens))[-1]
    loss = cross_entropy_sum(output(states), targets, 0.1)
    inputs = [x, *([memory] if sources else []), *blocks.parameters(), *output.parameters()]
    gradients = torch.autograd.grad(loss, inputs) if torch.is_grad_enabled() else ()
    return [result.detach().float() for result in (states, loss.reshape(1), *gradients)]
