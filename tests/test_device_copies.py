"""Copies that nobody waits for: what goes to a GPU is kept until it has arrived, and what comes is not read before."""

import ast

import pytest
import torch

from tests.test_layering import SOURCE
from weft.tokens import Tokens, to_device

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def unsafe_copies(source):
    """Return the lines of copies with `non_blocking=True`, but for those to the host whose function records an event.

    Such an event is what a reader waits for. Copies to a device are made by `to_device` alone.
    """
    lines = []
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        names = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
        copies = [call for call in calls if any(keyword.arg == "non_blocking" for keyword in call.keywords)]
        lines += [] if function.name == "to_device" else [
            copy.lineno for copy in copies if not (is_to_host(copy) and "record" in names)
        ]  # fmt: skip
    return sorted(set(lines))


def is_to_host(copy):
    """Return whether a call is `x.to("cpu", …)`, or `buffer.copy_(…)`, which is of page-locked buffers here."""
    into = isinstance(copy.func, ast.Attribute) and copy.func.attr
    return into == "copy_" or (into == "to" and ast.unparse(copy.args[0]) == "'cpu'")


def test_every_copy_that_is_not_awaited_is_safe():
    found = {str(path): unsafe_copies(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f(x):\n    return x.to('cpu', non_blocking=True).tolist()", [2]),
        ("def f(x, y):\n    y.copy_(x, non_blocking=True)\n    return y", [2]),
        ("def f(x, y):\n    return x.to(y.device, non_blocking=True)", [2]),
        ("def f(x, y, event):\n    event.record()\n    return x.to(y.device, non_blocking=True)", [3]),
        ("def f(x, y, event):\n    y.copy_(x, non_blocking=True)\n    event.record()", []),
        ("def f(x, event):\n    y = x.to('cpu', non_blocking=True)\n    event.record()\n    return y", []),
    ],
)
def test_copies_that_are_read_too_early_are_caught(source, lines):
    assert unsafe_copies(source) == lines


def test_on_the_host_nothing_is_copied():
    ids = torch.arange(3)
    assert to_device(ids, "cpu") is ids
    assert Tokens.flat(ids, torch.tensor([3])).to("cpu").ids is ids


@needs_cuda
def test_what_is_freed_at_once_arrives_all_the_same():
    for size in (64, 1 << 14, 1 << 22):
        torch.cuda._sleep(100_000_000)  # the device has other work to do first
        values = torch.arange(size)
        moved = to_device(values, "cuda")
        values.zero_()
        assert torch.equal(moved.cpu(), torch.arange(size))
