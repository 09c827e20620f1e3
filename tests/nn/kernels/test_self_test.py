"""Kernels that fail or disagree are left aside, and it is said why."""

import pytest
import torch

from weft.nn.kernels import dispatch, self_test

GPU = torch.device("cuda")


@pytest.fixture
def tried(monkeypatch):
    """Run the self-test with given results: exact, of eager PyTorch, and of the kernels."""

    def run(*answers, learning=True):
        given = iter(answers)
        monkeypatch.setattr(dispatch, "has_triton", lambda: True)
        monkeypatch.setattr(self_test, "_examples", lambda device, half=True: next(given))
        monkeypatch.setattr(torch.random, "fork_rng", lambda *_, **__: torch.no_grad())
        return self_test.try_kernels(GPU, learning)

    yield run
    dispatch.trust(False)


def test_without_a_gpu_there_is_nothing_to_try():
    assert self_test.try_kernels(torch.device("cpu")) == ""
    assert not dispatch.kernels_enabled(learning=False)


ONES = torch.ones(4)


@pytest.mark.parametrize("rounded", [1.0, 0.97])  # by eager PyTorch; the kernels may be off by twice that and a little
def test_kernels_that_are_as_exact_as_the_plain_way_are_trusted(tried, rounded):
    assert tried([ONES], [ONES * rounded], [ONES * (2 - rounded) * 1.009]) == ""
    assert dispatch.kernels_enabled(learning=True)


def test_what_was_tried_on_reading_alone_is_not_trusted_to_learn(tried):
    assert tried([ONES], [ONES], [ONES], learning=False) == ""
    assert dispatch.kernels_enabled(learning=False)
    assert not dispatch.kernels_enabled(learning=True)


@pytest.mark.parametrize("rounded", [1.0, 0.97])
def test_kernels_that_are_less_exact_are_not(tried, rounded):
    told = tried([ONES] * 2, [ONES * rounded] * 2, [ONES, ONES * (1 + 2 * (1 - rounded) + 0.02)])
    assert told == f"they are off by {'2' if rounded == 1 else '1.1'} times what rounding explains here"
    assert not dispatch.kernels_enabled(learning=False)


def test_kernels_that_give_no_numbers_are_not(tried):
    assert "off by nan" in tried([ONES], [ONES], [ONES * float("nan")])
    assert "off by nan" in tried([ONES] * 2, [ONES] * 2, [ONES, ONES * float("nan")])
    assert tried([ONES] * 2, [ONES] * 2, [ONES]).startswith("they fail here (")  # a gradient that is missing
    assert not dispatch.kernels_enabled(learning=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_what_a_compiler_or_a_driver_says_is_told(monkeypatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    assert self_test.try_kernels(GPU).startswith("they fail here (")
    assert not dispatch.kernels_enabled(learning=False)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("card", [(9, 0), (8, 0)])
def test_the_newer_attention_is_taken_where_it_is_installed_and_fits(monkeypatch, installed, card):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(self_test, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", taken.append)
    assert self_test.take_flash3(GPU) is (installed and card == (9, 0))
    assert taken == (["FA3"] if installed and card == (9, 0) else [])
