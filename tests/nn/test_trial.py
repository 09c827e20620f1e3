"""Kernels that fail or disagree are left aside, and it is said why."""

import pytest
import torch

from weft.nn import cuda, trial

GPU = torch.device("cuda")


@pytest.fixture
def tried(monkeypatch):
    """Try kernels whose answers are given, the plain ones first."""

    def run(*answers):
        given = iter(answers)
        monkeypatch.setattr(cuda, "available", lambda: True)
        monkeypatch.setattr(trial, "_example", lambda device: next(given))
        monkeypatch.setattr(torch.random, "fork_rng", lambda *_, **__: torch.no_grad())
        return trial.try_kernels(GPU)

    yield run
    cuda.trust(False)


def test_without_a_gpu_there_is_nothing_to_try():
    assert trial.try_kernels(torch.device("cpu")) == ""
    assert not cuda._trusted


def test_kernels_that_agree_are_trusted(tried):
    assert tried([torch.ones(4)], [torch.full((4,), 1.01)]) == ""
    assert cuda._trusted


def test_kernels_that_disagree_are_not(tried):
    assert (
        tried([torch.ones(4), torch.ones(2)], [torch.ones(4), torch.tensor([1.0, 2.0])]) == "they are off by 0.71 here"
    )
    assert not cuda._trusted


def test_kernels_that_give_no_numbers_are_not(tried):
    assert "off by nan" in tried([torch.ones(4)], [torch.full((4,), float("nan"))])
    assert "off by nan" in tried([torch.ones(4)] * 2, [torch.ones(4), torch.full((4,), float("nan"))])
    assert tried([torch.ones(4)] * 2, [torch.ones(4)]).startswith("they fail here (")  # a gradient that is nought
    assert not cuda._trusted


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_what_a_compiler_or_a_driver_says_is_told(monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: True)
    assert trial.try_kernels(GPU).startswith("they fail here (")
    assert not cuda._trusted


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("card", [(9, 0), (8, 0)])
def test_the_newer_attention_is_taken_where_it_is_installed_and_fits(monkeypatch, installed, card):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(trial, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", taken.append)
    assert trial.take_flash3(GPU) is (installed and card == (9, 0))
    assert taken == (["FA3"] if installed and card == (9, 0) else [])
