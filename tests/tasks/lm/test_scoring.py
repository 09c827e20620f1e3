"""A stream that is read on has one log-probability a token, wherever it is computed and whatever else runs there."""

import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from weft.data.batching.lm_stream import TokenStream
from weft.models.rnn import RNN, RNNConfig
from weft.tasks.lm.head import LMHead
from weft.tasks.lm.scoring import stream_log_probs

VOCAB, CHUNK = 65, 128
BUSY = "import torch; x = torch.randn(4096, 4096, device='cuda'); print()\nwhile True: x = (x @ x).clamp(-1, 1)"


def head_and_stream(width, size):
    torch.manual_seed(0)
    model = RNN(RNNConfig(name="rnn", cell="lstm", width=width, layers=2, embedding=16), VOCAB).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # far from equal probabilities
    ids = np.random.default_rng(0).integers(2, VOCAB, size).astype(np.int32)
    ids[::97] = 0
    return LMHead(model, 1, (), carries=True), TokenStream(ids, 0, 1)


@torch.inference_mode()
def test_chunks_that_are_read_on_give_what_the_whole_gives():
    head, stream = head_and_stream(8, 700)  # one row: fewer than 4 * WARMUP_TOKENS
    whole = stream_log_probs(head, stream, len(stream))
    np.testing.assert_allclose(stream_log_probs(head, stream, CHUNK), whole, atol=1e-5)
    carried, head.body.read = head.body.read, lambda tokens, state: carried(tokens, None)
    assert np.abs(stream_log_probs(head, stream, CHUNK) - whole).max() > 0.1, "a state that is lost is seen"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@torch.inference_mode()
def test_beside_other_processes_a_gpu_gives_what_the_cpu_gives(half):
    head, stream = head_and_stream(256, 40_000)
    expected = stream_log_probs(head, stream, CHUNK)
    head.cuda()
    with ExitStack() as stack, torch.autocast("cuda", torch.bfloat16, enabled=half):
        for _ in range(2):
            other = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE))
            stack.callback(other.kill)
            assert other.stdout is not None
            other.stdout.readline()
        for _ in range(5):
            loss = -stream_log_probs(head, stream, CHUNK)
            assert loss.mean() == pytest.approx(-expected.mean(), rel=0.02 if half else 2e-3)
            assert np.abs(loss + expected).max() < (1 if half else 0.1)
