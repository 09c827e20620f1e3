"""The CUDA kernels of a decoding step, against the eager cache and blocks in float32."""

import pytest
import torch

from weft.nn.attention.kv_cache import KVCache, KVIndex, StaticKVCache, attend_cached
from weft.nn.kernels import dispatch
from weft.nn.transformer.blocks import BlockConfig, Blocks
from weft.tokens import Tokens

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dispatch.has_triton()), reason="needs CUDA and Triton"
)


@pytest.fixture(autouse=True)
def no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def plainly(monkeypatch):
    """Call a function without the kernels."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "decodes_on_triton", lambda x: False)
            return function(*args)

    return call


def reached(rows, columns, held=300):
    places = torch.randint(held, (rows, columns), dtype=torch.int32, device=DEVICE)
    first = torch.randint(columns, (rows,), dtype=torch.int32, device=DEVICE)
    return KVIndex(places, first, first + (torch.rand(rows, device=DEVICE) * (columns + 1 - first)).int())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize(
    ("rows", "columns", "heads", "size"), [(160, 64, 8, 64), (5, 9, 3, 4), (2, 1700, 2, 64), (1, 40, 2, 128)]
)
def test_a_look_at_what_is_held(rows, columns, heads, size, dtype, tolerance, plainly):
    from weft.nn.kernels.triton.decode_attention import attend_cached_triton

    kv_index, q = reached(rows, columns), torch.randn(rows, heads, size, device=DEVICE).to(dtype)
    kv = torch.randn(300, 2, heads, size, device=DEVICE).to(dtype)
    expected = plainly(attend_cached, q.float(), kv.float(), kv_index)
    torch.testing.assert_close(attend_cached_triton(q, kv, kv_index).float(), expected, rtol=0, atol=tolerance)
    nothing = KVIndex(kv_index.slots, kv_index.last, kv_index.last)
    assert not attend_cached_triton(q, kv, nothing).any()


@pytest.mark.parametrize("columns", [9, 1200])
def test_a_look_that_writes_first(columns, plainly):
    from weft.nn.kernels.triton.decode_attention import attend_cached_triton

    rows, heads, size = 4, 3, 8
    places = torch.randperm(rows * columns, device=DEVICE).int().view(rows, columns)
    first = torch.randint(columns - 3, (rows,), dtype=torch.int32, device=DEVICE)
    last = torch.full((1,), columns - 2, dtype=torch.int32, device=DEVICE).expand(rows)
    made, kv = (
        torch.randn(rows, 3, heads, size, device=DEVICE),
        torch.randn(rows * columns, 2, heads, size, device=DEVICE),
    )
    written = kv.clone()
    written[places[:, columns - 3].long()] = made[:, 1:]
    found = attend_cached_triton(made[:, 0], kv, KVIndex(places, first, last), made[:, 1:])
    assert torch.equal(kv, written)
    expected = plainly(attend_cached, made[:, 0], written, KVIndex(places, first, last))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_hypotheses_go_on_in_place(plainly):
    prompt = Tokens.flat(torch.zeros(12, dtype=torch.long), torch.tensor([1, 4, 2, 5])).to(DEVICE)
    begun, rows = (
        KVCache.of(prompt, [torch.randn(12, 2, 2, 4, device=DEVICE)]),
        torch.tensor([0, 1, 1, 2, 3], device=DEVICE),
    )
    held = [StaticKVCache.like(begun, 5, 70) for _ in range(2)]
    for one in held:
        one.copy_from(begun, rows)
    for chosen in ([0, 2, 1, 3, 4], [0, 2, 2, 3, 4], [0, 1, 2, 3, 4]):
        chosen = torch.tensor(chosen, device=DEVICE)
        held[0] = held[0].select(chosen).opened()
        held[1] = plainly(held[1].select(chosen).opened)
        end = int(held[0].at)
        assert end == int(held[1].at)
        assert torch.equal(held[0].index[:, :end], held[1].index[:, :end])


@pytest.mark.parametrize(
    ("norm", "activation", "width", "ffn_width", "rows", "dtype", "tolerance"),
    [
        ("post", "relu", 40, 72, 3, torch.float32, 1e-4),
        ("pre", "gelu", 40, 2048, 3, torch.float32, 1e-4),
        ("pre", "gelu-tanh", 768, 3072, 64, torch.bfloat16, 6e-2),
        ("post", "relu", 512, 2048, 160, torch.bfloat16, 6e-2),
        ("pre", "silu", 256, 512, 33, torch.bfloat16, 6e-2),
        ("pre", "gelu-tanh", 40, 72, 3, torch.float32, 1e-4),
        ("pre", "gelu-tanh", 768, 3072, 16, torch.bfloat16, 6e-2),
        ("post", "relu", 256, 2048, 300, torch.bfloat16, 6e-2),
    ],
)
def test_a_step_through_a_stack(norm, activation, width, ffn_width, rows, dtype, tolerance, plainly):
    from weft.nn.kernels.triton.decode_step import decode_step

    stack = Blocks(BlockConfig(width, 4, ffn_width, activation, norm, off={"1": [2]}), 2, "decoder", True, True).eval()
    for one in stack.parameters():
        one.add_(torch.randn_like(one) * 0.02)
    lengths = torch.arange(rows) % 3 + 1
    prompt = Tokens.flat(torch.zeros(int(lengths.sum()), dtype=torch.long), lengths).to(DEVICE)
    x, count = torch.randn(rows, width, device=DEVICE), len(prompt.ids)
    kept, held = ([torch.randn(count, 2, 4 - layer, width // 4, device=DEVICE) for layer in range(2)] for _ in range(2))
    caches = [KVCache.of(prompt, [one.to(kind) for one in kept]).opened() for kind in (torch.float32, dtype)]
    expected = plainly(stack.to(DEVICE).step, x, caches[0], tuple(held), KVIndex.of(prompt))
    half = tuple(one.to(dtype) for one in held)
    found = decode_step(stack.to(dtype), x.to(dtype), caches[1], half, KVIndex.of(prompt))
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance)
    own = caches[0].index[:, caches[0].end - 1].long()
    for one, other in zip(caches[1].storage.layers, caches[0].storage.layers, strict=True):
        torch.testing.assert_close(one.flatten(0, 1)[own].float(), other.flatten(0, 1)[own], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("activation", "width", "rows", "read", "dtype", "tolerance"),
    [
        ("gelu-tanh", 48, 1, 3, torch.float32, 1e-4),
        ("gelu", 768, 1, 600, torch.bfloat16, 6e-2),
        ("gelu-tanh", 768, 4, 2, torch.bfloat16, 6e-2),
        ("silu", 256, 3, 1000, torch.float16, 1e-2),
    ],
)
def test_a_step_of_few_through_a_stack(activation, width, rows, read, dtype, tolerance, plainly):
    from weft.nn.kernels.triton.decode_step_small_batch import small_batch_step

    stack = Blocks(BlockConfig(width, 4, 4 * width, activation, "pre"), 2, "decoder", True).eval().to(DEVICE)
    for one in stack.parameters():
        one.add_(torch.randn_like(one) * 0.02)
    lengths = torch.arange(rows) % 3 + read
    prompt = Tokens.flat(torch.zeros(int(lengths.sum()), dtype=torch.long), lengths).to(DEVICE)
    x, kept = (
        torch.randn(rows, width, device=DEVICE),
        [torch.randn(len(prompt.ids), 2, 4, width // 4, device=DEVICE) for _ in range(2)],
    )
    caches = [KVCache.of(prompt, [one.to(kind) for one in kept]).opened() for kind in (torch.float32, dtype)]
    expected = plainly(stack.step, x, caches[0])
    stack, x = stack.to(dtype), x.to(dtype)
    assert dispatch.decode_step_kernel(stack, x) is (None if dtype is torch.float32 else small_batch_step)
    assert dispatch.decode_step_kernel(stack, x.repeat(dispatch.MAX_SMALL_BATCH + 1, 1)) is not small_batch_step
    found = small_batch_step(stack, x, caches[1])
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance)
    own = caches[0].index[:, caches[0].end - 1].long()
    for one, other in zip(caches[1].storage.layers, caches[0].storage.layers, strict=True):
        torch.testing.assert_close(one.flatten(0, 1)[own].float(), other.flatten(0, 1)[own], rtol=0, atol=tolerance)


def test_words_and_places():
    from weft.nn.kernels.triton.decode_step import embed_next

    prompt = Tokens.flat(torch.zeros(5, dtype=torch.long), torch.tensor([1, 3, 1])).to(DEVICE)
    held = KVCache.of(prompt, [torch.randn(5, 2, 2, 4, device=DEVICE)]).opened()
    words, places = torch.randn(9, 24, device=DEVICE), torch.randn(7, 24, device=DEVICE)
    ids = torch.tensor([8, 0, 3], device=DEVICE)
    found = embed_next(ids, words, places, held, 2.0)
    torch.testing.assert_close(found, 2 * words[ids] + places[held.position.long()], rtol=0, atol=1e-6)
