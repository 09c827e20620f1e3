"""CUDA kernels against the eager scan in float64. Without a GPU: the generated source is valid Python."""

import ast

import pytest
import torch

from weft.models.seq2seq.model import Seq2Seq, Seq2SeqConfig
from weft.nn.kernels import dispatch
from weft.nn.rnn.cells import CELLS, _elman, _jordan_output, _lstm, _peephole, make_cell
from weft.nn.rnn.fused import persistent_triton, scan
from weft.nn.rnn.fused.codegen_numba import StageShape
from weft.tokens import Tokens

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and dispatch.has_triton()), reason="needs CUDA and Triton"
)


def run_scan(name, weights, input_proj, state, grad_outputs, device, dtype):
    """Return the outputs of a scan, and the gradients of all its inputs."""
    exact = torch.float64 if device == "cpu" else torch.float32
    cell = make_cell(name, 4, input_proj.shape[-1] // make_cell(name, 4, 4).gates).to(device, exact)
    cell.load_state_dict(weights)
    read = input_proj.to(device, dtype).requires_grad_()
    start = tuple(part.to(device, exact).requires_grad_() for part in state)
    kernels = (scan.scan_eager if device == "cpu" else scan.scan_fused)(cell, read, start)
    loss = sum((out.double() * back.to(device)).sum() for out, back in zip(kernels, grad_outputs, strict=True))
    grads = torch.autograd.grad(loss, [read, *start, *cell.parameters()], allow_unused=True)
    return [part.detach().double().cpu() for part in (*kernels, *(tensor for tensor in grads if tensor is not None))]


@needs_gpu
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize(("steps", "rows", "width"), [(9, 5, 24), (6, 40, 64), (5, 70, 100)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_walk_in_one_launch_is_the_walk_step_by_step(name, steps, rows, width, dtype, tolerance):
    torch.manual_seed(0)
    cell = make_cell(name, 4, width)
    if name == "peephole":
        torch.nn.init.normal_(cell.peepholes, std=0.3)  # they start at zero, which would hide a misplaced one
    input_proj, state = (
        torch.randn(steps, rows, cell.gates * width),
        [torch.randn(rows, width) for _ in range(cell.states)],
    )
    grad_outputs = [torch.randn(steps, rows, width, dtype=torch.float64) for _ in state]
    expected = run_scan(name, cell.state_dict(), input_proj, state, grad_outputs, "cpu", torch.float64)
    actual = run_scan(name, cell.state_dict(), input_proj, state, grad_outputs, "cuda", dtype)
    for tensor, reference in zip(actual, expected, strict=True):
        assert (tensor - reference).abs().max() <= tolerance * (reference.abs().max() + 1)


@needs_gpu
@pytest.mark.parametrize("attention", ["additive", "dot", "general", "scaled-dot"])
@pytest.mark.parametrize("cell", CELLS)
def test_an_attending_walk_is_the_loop_under_autograd(attention, cell, monkeypatch):
    torch.manual_seed(0)
    config = Seq2SeqConfig(name="seq2seq", width=32, attention=attention, cell=cell, layers=2)
    model = Seq2Seq(config, 11, 7).cuda()
    tokens = Tokens.flat(torch.randint(7, (15,)), torch.tensor([6, 4, 0, 5])).to("cuda")
    source = Tokens.flat(torch.randint(11, (13,)), torch.tensor([5, 3, 2, 3])).to("cuda")

    def read():
        logits = model.logits(tokens, source)
        return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]

    fused = read()
    monkeypatch.setattr(dispatch, "fused_scan", lambda input_proj: False)
    for tensor, reference in zip(fused, read(), strict=True):
        assert (
            tensor - reference
        ).norm() <= 5e-4 * reference.norm() + 1e-6  # by norm: single numbers may nearly cancel out


@pytest.mark.parametrize(
    ("functions", "shapes"),
    [
        ((_lstm,), (StageShape(4, 4, 2, 0, 2),)),
        ((_peephole,), (StageShape(4, 4, 2, 3, 2),)),
        ((_elman, _jordan_output), (StageShape(1, 1, 1, 0, 1), StageShape(1, 1, 1, 0, 1))),
    ],
)
def test_what_is_written_for_triton_is_a_function_of_its_arrays(functions, shapes, monkeypatch):
    monkeypatch.setattr(persistent_triton, "load_source", lambda name, source: ast.parse(source).body[0])
    persistent_triton.scan_kernels.cache_clear()
    kernels = persistent_triton.scan_kernels(functions, shapes, (True,) * shapes[0].state)
    for kernel, arrays in ((kernels.forward, kernels.arrays), (kernels.backward, kernels.backward_arrays)):
        parameters = [argument.arg for argument in kernel.args.args]
        assert parameters[2 : 2 + len(arrays)] == arrays
        loaded = {node.id for node in ast.walk(kernel) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        stored = {
            node.id for node in ast.walk(kernel) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        assert loaded <= {*parameters, *stored, "tl", "libdevice", "range", "triton"}
    persistent_triton.scan_kernels.cache_clear()


def test_a_walk_too_wide_for_all_its_programs_at_once_is_not_tried(monkeypatch):
    room = type("Properties", (), {"multi_processor_count": 132})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: room)
    assert persistent_triton.choose_block(64, 1024, torch.device("cuda")) == (16, 32)
    assert persistent_triton.choose_block(8, 128, torch.device("cuda")) == (16, 16)
    assert persistent_triton.choose_block(4096, 4096, torch.device("cuda")) is None
