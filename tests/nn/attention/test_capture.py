"""Attention weights are recorded inside `capture`, only there, and only those of the chosen layers and heads."""

import pytest
import torch

from weft.nn.attention.capture import capture, capturing, record


def test_nothing_is_kept_while_nobody_looks():
    assert not capturing()
    record("cross", torch.ones(1, 2, 3))
    with capture() as maps:
        assert capturing()
    assert not capturing()
    record("cross", torch.ones(1, 2, 3))
    assert maps.weights == {}


def test_each_call_is_kept_in_order_by_place_and_layer():
    calls = [torch.rand(1, 2, 3) for _ in range(3)]
    with capture() as maps:
        record("cross", calls[0])
        record("cross", calls[1])
        record("self", calls[2], layer=1)
    assert list(maps.weights) == [("cross", 0), ("self", 1)]
    assert [
        torch.equal(actual, expected) for actual, expected in zip(maps.weights["cross", 0], calls, strict=False)
    ] == [True, True]
    assert torch.equal(maps.weights["self", 1][0], calls[2])


def test_only_the_layers_asked_for_are_kept():
    with capture(layers=[1, 3]) as maps:
        assert [layer for layer in range(4) if capturing(layer)] == [1, 3]
        for layer in range(4):
            record("self", torch.ones(1, 2, 2), layer)
    assert list(maps.weights) == [("self", 1), ("self", 3)]


def test_only_the_heads_asked_for_are_kept_where_there_are_heads():
    many, one = torch.rand(2, 4, 3, 3), torch.rand(2, 3, 3)
    with capture(heads=[2, 0]) as maps:
        record("self", many)
        record("cross", one)
    assert torch.equal(maps.weights["self", 0][0], many[:, [2, 0]])
    assert torch.equal(maps.weights["cross", 0][0], one)


def test_what_is_kept_holds_no_graph():
    weights = torch.ones(1, 2, 2, requires_grad=True) * 1
    with capture() as maps:
        record("cross", weights)
    assert not maps.weights["cross", 0][0].requires_grad


def test_an_inner_look_has_its_own_maps_and_an_error_ends_it():
    def fail(collected):
        with capture() as inner:
            collected.append(inner)
            record("cross", torch.ones(1, 1, 1))
            raise ZeroDivisionError

    with capture() as outer:
        maps = []
        with pytest.raises(ZeroDivisionError):
            fail(maps)
        record("self", torch.ones(1, 1, 1))
    assert list(maps[0].weights) == [("cross", 0)]
    assert list(outer.weights) == [("self", 0)]
    assert not capturing()
