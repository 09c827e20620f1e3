"""What each process has of its own comes back to it, and to no other number of processes."""

from pathlib import Path

import pytest
import torch

from weft.data.batching.loader import Position
from weft.errors import CheckpointError
from weft.training.distributed import World
from weft.training.process_state import (
    gather_hidden_states,
    gather_rng_states,
    restore_rng_state,
    seed_all,
    seed_batch,
)

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def test_random_numbers_go_on_from_where_they_stood():
    seed_all(3, ALONE)
    torch.rand(5)
    states = gather_rng_states(ALONE)
    must = torch.rand(4)
    assert not torch.equal(torch.rand(4), must)
    assert restore_rng_state(states, ALONE, Path("random"))
    assert torch.equal(torch.rand(4), must)


@pytest.mark.parametrize("names", [["cpu.0", "cpu.1"], []])
def test_those_of_other_processes_are_left_alone(names):
    seed_all(3, ALONE)
    before = torch.get_rng_state()
    assert not restore_rng_state(dict.fromkeys(names, before), ALONE, Path("random"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "state", [torch.zeros(3), torch.zeros(()), torch.zeros(5056), torch.zeros(7, dtype=torch.uint8), torch.zeros(0)]
)
def test_what_is_no_state_of_a_generator_is_refused(state):
    with pytest.raises(CheckpointError, match="some/file: holds no state of a random generator: "):
        restore_rng_state({"cpu.0": state}, ALONE, Path("some/file"))


def test_each_rank_draws_its_own():
    drawn = []
    for rank in range(2):
        seed_all(3, World(rank=rank, size=2, device=torch.device("cpu")))
        drawn.append(torch.rand(4))
    assert not torch.equal(*drawn)


def test_what_is_carried_is_named_by_part_and_stream():
    streams = [[torch.ones(2, 3).T, torch.zeros(1)], [torch.ones(2, 3), torch.ones(1)]]
    gathered = gather_hidden_states(streams, ALONE)
    assert list(gathered) == ["0.0", "1.0", "0.1", "1.1"]
    assert gathered["0.0"].is_contiguous()
    assert torch.equal(gathered["0.0"], streams[0][0])
    assert torch.equal(gathered["1.1"], streams[1][1])


def test_dropout_is_drawn_by_the_place_of_a_batch_alone():
    drawn = []
    for position in (Position(0, 3), Position(1, 3), Position(0, 3)):
        torch.rand(len(drawn))  # whatever was drawn before
        seed_batch(7, position, ALONE.device)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
