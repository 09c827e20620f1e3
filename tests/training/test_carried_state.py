"""Truncated back-propagation: what a batch leaves is where the next one goes on, also after a resume."""

import pytest
import torch

import weft
from weft.checkpoint import contents


def recipe(folder, steps, **task):
    (folder / "a.txt").write_text("\n".join(f"the {word} sat on the {word} mat" for word in "abcdefghijklmnop") * 3)
    return {
        "task": {"name": "lm", "bptt": 6, **task},
        "data": {"train": str(folder / "a.txt")},
        "tokenizer": {"name": "bytes"},
        "model": {"name": "rnn", "width": 12},
        "train": {"steps": steps, "batch_tokens": 48, "lr": 0.01, "save_every": 5, "keep": 9},
    }


def weights(pipeline):
    return torch.cat([parameter.detach().flatten() for parameter in pipeline.head.parameters()])


def test_a_resume_in_the_middle_of_a_stream_changes_nothing(tmp_path):
    whole = weights(weft.train(recipe(tmp_path, 17), out=tmp_path / "whole"))
    weft.train(recipe(tmp_path, 10), out=tmp_path / "parts")
    on = weights(weft.train(recipe(tmp_path, 17), out=tmp_path / "parts", resume=True))
    assert torch.equal(on, whole)


def test_without_what_was_carried_it_would(tmp_path):
    whole = weights(weft.train(recipe(tmp_path, 17), out=tmp_path / "whole"))
    weft.train(recipe(tmp_path, 10), out=tmp_path / "parts")
    original = contents.load_hidden_states
    try:
        contents.load_hidden_states = lambda *args: []
        on = weights(weft.train(recipe(tmp_path, 17), out=tmp_path / "parts", resume=True))
    finally:
        contents.load_hidden_states = original
    assert not torch.equal(on, whole)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_stream_is_read_on_across_batches_and_begins_anew_with_an_epoch(tmp_path, accumulate, monkeypatch):
    from weft.tasks.lm.head import LMHead

    carries = []
    real = LMHead.forward

    def watched(self, batch, carry=None):
        carries.append(None if carry is None else carry.parts[0].clone())
        sums, after = real(self, batch, carry)
        carries.append(after.parts[0].clone())
        return sums, after

    monkeypatch.setattr(LMHead, "forward", watched)
    raw = recipe(tmp_path, 40 // accumulate)
    raw["train"]["accumulate"] = accumulate
    weft.train(raw, out=tmp_path / "run")
    fresh = [number for number in range(0, len(carries), 2) if carries[number] is None]
    assert len(fresh) > 1  # epochs
    before = 2 * accumulate - 1  # the batches of an update are parallel streams: each goes on from its own
    assert all(torch.equal(carries[n], carries[n - before]) for n in range(2, len(carries), 2) if n not in fresh)
