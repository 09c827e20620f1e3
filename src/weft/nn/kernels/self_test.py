"""The kernels for half precision are believed once they have been seen to agree with what they stand for.

A GPU, a driver or a compiler that nobody has tried them on may break them; then the plain way is taken, and said so.
"""

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.attention
from torch import Tensor

from weft.nn.attention.multihead import AttentionLayout
from weft.nn.layers.losses import cross_entropy_sum
from weft.nn.rnn.fused import codegen_triton
from weft.nn.transformer.blocks import BlockConfig, Blocks
from weft.nn.transformer.output import OutputProjection
from weft.tokens import Tokens

# The plain way rounds to half precision too, and in a deep network that adds up, so what is allowed is some of its own
# error. A wrong index or mask is far above either.
_TIMES, _ROUNDING = 2.0, 0.01


def try_kernels(device: torch.device, learning: bool = True) -> str:
    """Let kernels be used, to learn or only to read, if they agree with the plain way on an example; return why not."""
    if device.type != "cuda" or not codegen_triton.available():
        return ""
    try:
        take_flash3(device)
        with torch.random.fork_rng([device], device_type="cuda"), torch.set_grad_enabled(learning):
            codegen_triton.trust(False, learning)
            exact, plain = _examples(device, half=False), _examples(device)
            codegen_triton.trust(True, learning)
            quick = _examples(device)
        apart = _apart(quick, plain, exact)
    except Exception as error:  # whatever a compiler may have to say
        codegen_triton.trust(False, learning)
        return f"they fail here ({str(error).splitlines()[0][:200] if str(error) else type(error).__name__})"
    codegen_triton.trust(apart < 1, learning)
    return "" if apart < 1 else f"they are off by {apart:.2g} times what rounding explains here"


@cache
def try_reading(device: torch.device) -> None:
    """Let them be used to read, if nobody has tried them yet."""
    if not codegen_triton.believed(learning=False):
        try_kernels(device, learning=False)


def _apart(quick: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> float:
    """Say how far the kernels are from what is exact, as a multiple of what may be; from 1 on they are too far."""
    found = [
        (one - must).norm() / (_TIMES * (other - must).norm() + _ROUNDING * must.norm()).clamp(min=1e-6)
        for one, other, must in zip(quick, plain, exact, strict=True)
    ]
    return float(torch.stack(found).max())  # not a number, if one of them is not


def take_flash3(device: torch.device) -> bool:
    """Let the variable-length kernel be FlashAttention-3, where that is installed, on the cards that it is for."""
    fits = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)  # newer than the oldest PyTorch
    if not fits or activate is None or find_spec("flash_attn_interface") is None:
        return False
    activate("FA3")
    return True


def _examples(device: torch.device, half: bool = True) -> list[Tensor]:
    """Read a few sequences with a decoder that looks at sources, with one of GPT's kind, and an encoder of BERT's."""
    found: list[Tensor] = []
    torch.manual_seed(0)
    for shape, lengths, sources, causal in (
        (BlockConfig(128, 2, 256), [3, 120, 1, 40], [5, 9, 64, 130], True),
        (BlockConfig(128, 2, 256, "gelu-tanh", "pre"), [320, 300], [], True),
        (BlockConfig(128, 2, 256, "gelu", eps=1e-12), [3, 200, 1, 300], [], False),
    ):
        blocks = Blocks(shape, 2, "decoder", causal, cross=bool(sources)).to(device)
        output = OutputProjection(128, 131).to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            found += _read(blocks, output, lengths, sources, device)
    return found


def _read(
    blocks: Blocks, output: OutputProjection, lengths: list[int], sources: list[int], device: torch.device
) -> list[Tensor]:
    """Return what comes out of the blocks, the loss and, to learn, every gradient."""
    read, given = (Tokens.pack([[0] * length for length in side]).to(device) for side in (lengths, sources))
    x, memory = (torch.randn(sum(side), 128, device=device).requires_grad_() for side in (lengths, sources))
    targets = torch.randint(131, (sum(lengths),), device=device)
    states = blocks(x, AttentionLayout.itself(read), memory, AttentionLayout(read, given))[-1]
    loss = cross_entropy_sum(output(states), targets, 0.1)
    learnt = [x, *([memory] if sources else []), *blocks.parameters(), *output.parameters()]
    back = torch.autograd.grad(loss, learnt) if torch.is_grad_enabled() else ()
    return [one.detach().float() for one in (states, loss.reshape(1), *back)]
