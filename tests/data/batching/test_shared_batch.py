"""A batch in one block of memory: every tensor comes back, to the bit, as a view of the block."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.data.batching.shared_batch import ALIGNMENT, SharedBatch
from weft.tasks.batch import Batch
from weft.tokens import Tokens

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16]
shapes = st.lists(st.integers(0, 5), max_size=3)


def tensors(value):
    """Return the tensors of a batch in order; None stays, since it must come back too."""
    if not is_dataclass(value):
        return [value]
    return [leaf for field in fields(value) for leaf in tensors(getattr(value, field.name))]


def assert_same(left, right):
    for one, other in zip(tensors(left), tensors(right), strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


@given(st.lists(st.lists(st.integers(0, 99), min_size=1), min_size=1), st.sampled_from(DTYPES), shapes)
def test_every_tensor_comes_back(rows, dtype, shape):
    tokens = Tokens.pack([torch.tensor(row).numpy() for row in rows])
    labels = torch.randint(0, 2, shape).to(dtype)
    inner = Batch(replace(tokens, segments=tokens.ids % 2), labels, {"word": 3}, source=tokens)
    batch = replace(inner, unpadded=inner, positions=tokens, task="a", rows=(3, 1))
    shared = SharedBatch.of(batch)
    assert_same(shared.unpack(), batch)
    with pytest.raises(AssertionError):
        assert_same(shared.unpack(), replace(batch, source=replace(tokens, ids=tokens.ids + 1)))


def test_all_tensors_are_aligned_views_of_one_block():
    tokens = Tokens.pack([torch.arange(size).numpy() for size in (3, 5)])
    shared = SharedBatch.of(Batch(tokens, targets=tokens.ids.float().t()))
    views = [leaf for leaf in tensors(shared.unpack()) if isinstance(leaf, torch.Tensor)]
    assert len(views) == 4
    assert {view.untyped_storage().data_ptr() for view in views} == {shared.block.untyped_storage().data_ptr()}
    assert all((view.data_ptr() - shared.block.data_ptr()) % ALIGNMENT == 0 for view in views)


def test_what_is_no_dataclass_goes_as_it_is():
    batch = (torch.arange(3), "text")
    shared = SharedBatch.of(batch)
    assert shared.unpack() is batch
    assert len(shared.block) == 0
