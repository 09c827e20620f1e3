"""The kernels for training in half precision are believed once they have been seen to agree with what they stand for.

A GPU, a driver or a compiler that nobody has tried them on may break them; then the plain way is taken, and said so.
"""

from importlib.util import find_spec

import torch
import torch.nn.attention
from torch import Tensor

from weft.nn import cuda
from weft.nn.attention import Layout
from weft.nn.losses import cross_entropy_sum
from weft.nn.transformer import Blocks, Shape
from weft.tokens import Tokens

_APART = 0.05  # of a norm: a wrong index or mask is far above it, rounding to half precision far below


def try_kernels(device: torch.device) -> str:
    """Let training use the kernels if they agree with the plain way on a small example; return why not."""
    if device.type != "cuda" or not cuda.available():
        return ""
    try:
        take_flash3(device)
        with torch.random.fork_rng([device], device_type="cuda"):
            cuda.trust(False)
            plain = _example(device)
            cuda.trust(True)
            quick = _example(device)
        off = [(a - b).norm() / b.norm().clamp(min=1e-6) for a, b in zip(quick, plain, strict=True)]
        apart = float(torch.stack(off).max())  # not a number, if one of them is not
    except Exception as error:  # whatever a compiler may have to say
        cuda.trust(False)
        return f"they fail here ({str(error).splitlines()[0][:200] if str(error) else type(error).__name__})"
    cuda.trust(apart < _APART)
    return "" if apart < _APART else f"they are off by {apart:.2g} here"


def take_flash3(device: torch.device) -> bool:
    """Let the variable-length kernel be FlashAttention-3, where that is installed, on the cards that it is for."""
    fits = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)  # newer than the oldest PyTorch
    if not fits or activate is None or find_spec("flash_attn_interface") is None:
        return False
    activate("FA3")
    return True


def _example(device: torch.device) -> list[Tensor]:
    """Read a few sequences with two blocks of a decoder; return what comes out and every gradient."""
    torch.manual_seed(0)
    shape, lengths, sources = Shape(128, 2, 256), [3, 200, 1, 40], [5, 9, 64, 130]
    blocks = Blocks(shape, 2, "decoder", causal=True, cross=True).to(device)
    read, given = (Tokens.pack([[0] * length for length in side]).to(device) for side in (lengths, sources))
    x = torch.randn(sum(lengths), 128, device=device).requires_grad_()
    memory = torch.randn(sum(sources), 128, device=device).requires_grad_()
    targets = torch.randint(128, (sum(lengths),), device=device)
    with torch.autocast("cuda", torch.bfloat16):
        states = blocks(x, Layout.itself(read), memory, Layout(read, given))[-1]
        loss = cross_entropy_sum(states, targets, 0.1)
    grads = torch.autograd.grad(loss, [x, memory, *blocks.parameters()])
    # What the keys' bias would get is nought but for rounding.
    return [states.float(), loss.reshape(1), *(one.float() for one in grads if one.norm() > 1e-2 * grads[0].norm())]
