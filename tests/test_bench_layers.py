"""What `bench/layers.py` says it counts is what its layers do."""

import argparse

import pytest
import torch
from bench import layers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

LAWS = {law.name: law for law in layers.LAWS}
SIZES = [(64, 64), (48, 128), (200, 64)]


def counted(name, length, dim, rows=1):
    """Count the operations of a layer, kind by kind, on tensors that have no numbers."""
    run = layers.layers(length, dim, rows, "meta")[name]
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return {str(kind): count for kind, count in counter.get_flop_counts()["Global"].items()}


def test_at_a_thousand_by_a_thousand_they_are_four_sixteen_and_six():
    assert [law.inside(1000, 1000) for law in layers.LAWS] == [4 * 10**9, 16 * 10**9, 6 * 10**9]
    assert counted("self-attention", 1000, 1000) == {
        "aten.bmm": 4 * 10**9,  # scores and mix
        "aten.addmm": 8 * 10**9,  # projections
    }
    assert counted("LSTM", 10, 1000) == {"aten.addmm": 16 * 10**7}  # a hundredth: step after step it takes its time
    assert LAWS["LSTM"].inside(10, 1000) == 16 * 10**7
    assert counted("convolution", 1000, 1000) == {"aten.convolution": 6 * 10**9}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(("length", "dim"), SIZES)
def test_a_layer_does_as_many_operations_as_are_counted(name, length, dim):
    law = LAWS[name]
    assert sum(counted(name, length, dim).values()) == law.all(length, dim)
    assert sum(counted(name, length, dim, rows=2).values()) == 2 * law.all(length, dim)


def test_another_law_is_caught():
    for name, law in LAWS.items():
        found = sum(counted(name, 48, 128).values())
        assert found not in {other.all(48, 128) for other in LAWS.values() if other is not law}
        assert found not in {law.all(49, 128), law.all(48, 64)}


@pytest.mark.parametrize(("name", "longer", "wider"), [("self-attention", 4, 2), ("LSTM", 2, 4), ("convolution", 2, 4)])
def test_twice_as_long_or_as_wide_is_as_much_more_as_the_law_says(name, longer, wider):
    law = LAWS[name]
    assert law.inside(200, 64) == longer * law.inside(100, 64)
    assert law.inside(100, 128) == wider * law.inside(100, 64)


def test_each_layer_reads_every_token_of_every_text():
    for name, run in layers.layers(10, 64, rows=3).items():
        assert run().numel() == 3 * 10 * 64, name


def test_it_measures_prints_and_draws(tmp_path, capsys):
    args = argparse.Namespace(rows=1, device="cpu", rounds=1)
    found = layers.measure(8, 64, args) | layers.measure(16, 64, args)
    assert set(found) == {(name, length, 64) for name in LAWS for length in (8, 16)}
    assert all(took > 0 for took in found.values())
    layers.show(found, 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [[str(n), "64", name] for n in (8, 16) for name in LAWS]
    layers.draw(found, str(tmp_path / "layers.png"), "here")
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
