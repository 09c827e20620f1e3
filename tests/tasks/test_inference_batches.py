"""Batches side by side: results in order, and an error as if there were one thread."""

import pytest
import torch

from weft.errors import DataError
from weft.tasks.inference_batches import map_in_threads


def test_what_goes_wrong_in_a_batch_is_told(two_threads):
    def fail(number):
        if number == 3:
            raise DataError("the third")
        return number

    found = map_in_threads(fail, range(1, 9))
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(DataError, match="the third"):
        next(found)
    assert torch.get_num_threads() == 2
