"""Kernel dispatch: which implementation serves an operation on a device, in a dtype, for a shape.

| device               | Triton                                         | numba                            | PyTorch  |
|----------------------|------------------------------------------------|----------------------------------|----------|
| CUDA, from Ampere on | half precision, once its self-test has passed  |                                  | all else |
| CUDA                 | recurrent scans; decoding steps but in float64 |                                  | all else |
| CPU                  |                                                | float32 without autocast, int8   | all else |

There is one function an operation. It returns weft's kernel, or None where PyTorch's operations serve; where there is
nothing to return, whether weft's implementation serves. The limits are where that was measured to be faster. Kernels
are imported here, when they are first needed: Triton may not be installed, and numba takes long to load.

A caller that wants what a kernel does not give, such as attention weights or keys and values, does not ask.
`weft models --kernels` prints this machine's answers (`weft.nn.kernels.report`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.layers.activations import gelu_tanh

Kernel = Callable[..., Any]

MAX_RAGGED, HEAD_SIZES = 512, (16, 32, 64)  # of varlen_self_attention: the longest sequence, the sizes of a head
MAX_SHORT, MAX_HEAD_SIZE = 256, 64  # the same of short_attention
MAX_SMALL_BATCH, MAX_SMALL_DEPTH = 4, 8192  # rows of small_batch_step; inner dimension that fits into registers
ALIGNED_VOCAB = 8  # on CUDA in half precision, logits whose number is no multiple of this are slow
MIN_CHUNKED_VOCAB = 4096  # outputs from which on the CPU multiplies a part of a vocabulary at a time
MIN_SCAN_STEPS = 4  # steps from which on a scan is worth a compilation
SCAN_DTYPE = torch.float32  # of scans in numba
MIN_PACKED_ROWS = 48  # rows from which on a matrix is worth packing
MIN_ENCODER_TOKENS = 512  # tokens from which on the numba encoder is worth its compilation; in int8 it always is


# Switches. They run at every layer, and torch.compile traces them.

_enabled = {"training": False, "inference": False}


def trust(agreed: bool, learning: bool = True) -> None:
    """Enable the kernels for half precision, or not, after their self-test: for training too, or inference alone."""
    _enabled["inference"] = agreed
    if learning:
        _enabled["training"] = agreed


_is_lasting: ContextVar[bool] = ContextVar("is_lasting", default=False)


@contextmanager
def lasting_inference() -> Iterator[None]:
    """Context of inference that goes on for long, as a server's: every kernel on the CPU is worth its compilation."""
    token = _is_lasting.set(True)
    try:
        yield
    finally:
        _is_lasting.reset(token)


def min_packed_rows() -> int:
    """Return the number of rows from which on a matrix is worth packing."""
    return 1 if _is_lasting.get() else MIN_PACKED_ROWS


def min_encoder_tokens() -> int:
    """Return the number of tokens from which on the numba encoder is worth its compilation."""
    return 1 if _is_lasting.get() else MIN_ENCODER_TOKENS


def kernels_enabled(learning: bool) -> bool:
    """Return whether the half-precision kernels are enabled, for training or for inference."""
    return _enabled["training" if learning else "inference"]


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def is_ampere(device: torch.device) -> bool:
    """Return whether a GPU is Ampere or newer: on older ones neither torch's attention nor our kernels run."""
    return torch.compiler.is_compiling() or torch.cuda.get_device_capability(device) >= (8, 0)


def is_half(x: Tensor) -> bool:
    """Return whether matrix products with `x` run on CUDA in half precision, and Triton kernels can run there."""
    half = x.is_cuda and (x.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda"))
    # torch.compile for CUDA generates Triton.
    return half and (torch.compiler.is_compiling() or (has_triton() and is_ampere(x.device)))


def to_half(x: Tensor) -> Tensor:
    """Cast `x` to the dtype of matrix products: autocast's, if enabled."""
    return x.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else x


def use_kernels(x: Tensor) -> bool:
    """Return whether the half-precision kernels are enabled in the current grad mode and apply to `x`."""
    return kernels_enabled(torch.is_grad_enabled()) and is_half(x)


def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile and weft's kernels run on a GPU."""
    return has_triton() and is_ampere(device)


def decodes_on_triton(x: Tensor) -> bool:
    """Return whether the Triton kernels serve a decoding step: on CUDA, without gradient and without autocast."""
    if not x.is_cuda or x.dtype is torch.float64 or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    return has_triton() and (x.dtype is torch.float32 or is_ampere(x.device))


def infers_on_cpu(x: Tensor) -> bool:
    """Return whether the numba kernels apply to `x`: on the CPU in float32, without gradient, not compiled."""
    if torch.is_grad_enabled() or x.dtype is not torch.float32 or x.device.type != "cpu":
        return False
    return not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()


# Attention.


def schedules_self_attention(x: Tensor, size: int, longest: int, equal_lengths: bool) -> bool:
    """Return whether self-attention goes by a block schedule; long sequences of equal length have faster kernels."""
    return longest <= (MAX_SHORT if equal_lengths else MAX_RAGGED) and size in HEAD_SIZES and use_kernels(x)


def varlen_self_attention_kernel() -> Kernel:
    """Return the kernel for self-attention by a block schedule."""
    from weft.nn.kernels.triton.varlen_self_attention import varlen_self_attention

    return varlen_self_attention  # type: ignore[no-any-return]


def short_attention_kernel(x: Tensor, size: int, longest: int) -> Kernel | None:
    """Return the kernel for short sequences, of self- and cross-attention; without gradient PyTorch's is faster."""
    most = MAX_SHORT if torch.is_grad_enabled() else MAX_SHORT // 2
    if size > MAX_HEAD_SIZE or longest > most or not use_kernels(x):
        return None
    from weft.nn.kernels.triton.short_attention import short_attention

    return short_attention  # type: ignore[no-any-return]


def library_attention(q: Tensor, equal_lengths: bool) -> Literal["dense", "varlen", "padded"]:
    """Return which of PyTorch's kernels serves: only half precision on CUDA has one for sequences end to end."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and is_ampere(q.device):
        return "dense" if equal_lengths else "varlen"
    return "padded"


def library_varlen_attention() -> Kernel:
    """Return PyTorch's attention for sequences end to end; to import it imports half of the compiler."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


# Transformer blocks, losses and the output projection.


def linear_activation_kernel(x: Tensor, activation: Kernel) -> Kernel | None:
    """Return the kernel for act(x Wᵀ + b): one pass for the activation, and for all that its gradient needs."""
    if activation not in (F.relu, F.gelu, gelu_tanh) or not use_kernels(x):
        return None
    from weft.nn.kernels.triton.linear_activation import linear_exact_gelu, linear_relu, linear_tanh_gelu

    return linear_relu if activation is F.relu else linear_exact_gelu if activation is F.gelu else linear_tanh_gelu


def add_norm_kernel(x: Tensor) -> Kernel | None:
    """Return the kernel for the residual sum, dropout and norm of a post-norm layer."""
    if not use_kernels(x):
        return None
    from weft.nn.kernels.triton.add_norm import add_norm

    return add_norm  # type: ignore[no-any-return]


def residual_norm_kernel(x: Tensor) -> Kernel | None:
    """Return the kernel for the residual sum and dropout of a pre-norm layer, and the next layer's norm."""
    if not use_kernels(x):
        return None
    from weft.nn.kernels.triton.residual_norm import residual_norm

    return residual_norm  # type: ignore[no-any-return]


def cross_entropy_kernel(x: Tensor) -> Kernel | None:
    """Return the kernel for cross-entropy, which reads the logits once and keeps no copy of them in float32."""
    if not use_kernels(x):
        return None
    from weft.nn.kernels.triton.cross_entropy import cross_entropy

    return cross_entropy  # type: ignore[no-any-return]


def encoder_kernel(blocks: Any, x: Tensor) -> Kernel | None:
    """Return the encoder for inference on the CPU: numba loops between matrix products, a part of the batch at once."""
    if blocks.training or not infers_on_cpu(x):
        return None
    int8 = not isinstance(blocks.blocks[0].feed_forward.fc1, nn.Linear)
    if len(x) < (1 if int8 else min_encoder_tokens()):
        return None
    from weft.nn.kernels.numba import encoder

    return encoder.encode


def pads_vocab(x: Tensor, vocab: int) -> bool:
    """Return whether the output projection is computed with a padded number of outputs."""
    return vocab % ALIGNED_VOCAB > 0 and is_half(x)


def chunks_vocab(x: Tensor, vocab: int) -> bool:
    """Return whether the output projection is computed in parts: PyTorch's product of few rows with all is slower."""
    return not torch.is_grad_enabled() and x.device.type == "cpu" and vocab >= MIN_CHUNKED_VOCAB


# Decoding: one token a hypothesis.


def decode_step_kernel(blocks: Any, x: Tensor) -> Kernel | None:
    """Return the kernels for a step of a stack of blocks; pre-norm decoders have others for a batch of very few."""
    if not decodes_on_triton(x) or x.dtype is torch.float32 or blocks.training:
        return None
    if _is_small_step(blocks, len(x)):
        from weft.nn.kernels.triton.decode_step_small_batch import small_batch_step

        return small_batch_step
    from weft.nn.kernels.triton.decode_step import decode_step

    return decode_step


def _is_small_step(blocks: Any, rows: int) -> bool:
    first = blocks.blocks[0]
    depth = max(first.feed_forward.fc2.in_features, first.feed_forward.fc1.in_features)
    fits = rows <= MAX_SMALL_BATCH and depth <= MAX_SMALL_DEPTH
    return fits and isinstance(blocks.norm, nn.LayerNorm) and first.cross_attention is None


def cached_attention_kernel(q: Tensor) -> Kernel | None:
    """Return the kernel for one query a hypothesis over the key-value cache, which reads its entries in place."""
    if decodes_on_triton(q):
        from weft.nn.kernels.triton.decode_attention import attend_cached_triton

        return attend_cached_triton
    if q.dtype is torch.float32 and not q.is_cuda and not torch.is_grad_enabled():
        from weft.nn.kernels.numba.decode_attention import attend_cached_numba

        return attend_cached_numba
    return None


def cache_advance_kernel(x: Tensor) -> Kernel | None:
    """Return the kernel that reorders the cache's index for the next step, in place."""
    if not decodes_on_triton(x):
        return None
    from weft.nn.kernels.triton.decode_attention import advance

    return advance


def next_embedding_kernel(table: Tensor, training: bool) -> Kernel | None:
    """Return the kernel for the embeddings of the next tokens at their positions."""
    if training or not decodes_on_triton(table):
        return None
    from weft.nn.kernels.triton.decode_step import embed_next

    return embed_next


def large_vocab_kernel(x: Tensor) -> Kernel | None:
    """Return the kernel for the logits of few rows, where their number is not aligned."""
    if not decodes_on_triton(x):
        return None
    from weft.nn.kernels.triton.decode_step import MAX_ROWS, linear_large_vocab

    return linear_large_vocab if len(x) <= MAX_ROWS else None


# Recurrent networks.


def library_rnn(inputs: Tensor, dropped: bool) -> bool:
    """Return whether torch's fused network serves Elman, LSTM and GRU layers.

    Not on CUDA in half precision, where cuDNN would run in float16 whatever the dtype; nor with dropped weights, which
    it would copy at every call.
    """
    return not (is_half(inputs) and len(inputs) >= MIN_SCAN_STEPS) and not (inputs.is_cuda and dropped)


def fused_scan(input_proj: Tensor) -> bool:
    """Return whether a scan over input_proj (T, B, G·D) uses fused kernels; on the CPU in training only."""
    if input_proj.device.type == "cuda":
        fits = has_triton()
    else:
        fits = input_proj.dtype is SCAN_DTYPE and not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    return fits and len(input_proj) >= MIN_SCAN_STEPS and input_proj.shape[1] > 0


def numba_scan(input_proj: Tensor) -> bool:
    """Return whether a scan that has fused kernels for the CPU alone uses them."""
    return not input_proj.is_cuda and fused_scan(input_proj)


def persistent_scan(input_proj: Tensor, width: int) -> bool:
    """Return whether all steps of a scan are one launch: on CUDA, where all programs are resident at once."""
    if not input_proj.is_cuda:
        return False
    from weft.nn.rnn.fused.persistent_triton import choose_block

    return choose_block(input_proj.shape[1], width, input_proj.device) is not None


def step_kernel_generator(input_proj: Tensor) -> Kernel:
    """Return the generator of the kernels of a scan's stages."""
    if input_proj.is_cuda:
        from weft.nn.rnn.fused.codegen_triton import triton_step_kernels

        return triton_step_kernels
    from weft.nn.rnn.fused.codegen_numba import numba_step_kernels

    return numba_step_kernels


def additive_step_class(memory: Tensor) -> Kernel:
    """Return the class for additive attention inside a scan."""
    if memory.is_cuda:
        from weft.nn.rnn.fused.additive_triton import TritonAdditiveStep

        return TritonAdditiveStep
    from weft.nn.rnn.fused.additive_numba import NumbaAdditiveStep

    return NumbaAdditiveStep


# Matrix products on the CPU, and word2vec.


def packed_matmul(x: Tensor, weight: Tensor) -> bool:
    """Return whether products with packed weights serve; the version of an inference tensor is not tracked."""
    return x.ndim == 2 and infers_on_cpu(x) and not weight.is_inference()


def matmul_module() -> ModuleType:
    """Return the matrix products with packed weights, float32 and int8."""
    from weft.nn.kernels.numba import matmul

    return matmul


def row_quantizer() -> Kernel:
    """Return the quantization of the rows of a matrix, the input of int8 products."""
    from weft.nn.kernels.numba.rowwise import quantize_rows

    return quantize_rows


def word2vec_on_triton(weight: Tensor) -> bool:
    """Return whether word2vec's own training runs on the GPU; else in threads on the CPU."""
    return weight.is_cuda and has_triton()
