"""ELMo's fixtures through our model, and its LSTM with a projection beside the library's.

    python -W ignore bench/elmo.py FIXTURES     a folder with allennlp/ and bilm-tf/model/ as those projects ship them

The fixtures are embeddings that a published biLM gave for three streams of ten sentences, states carried from one to
the next in both directions, and in allennlp those of the words alone: ours must be the same to 1e-5.
"""

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import h5py
import numpy as np
import torch
from torch import nn

from weft.formats.elmo import import_elmo
from weft.nn.rnn.projected_lstm import ProjectedLSTM
from weft.nn.rnn.time_major import TimeMajor
from weft.pipeline import load
from weft.tokens import Tokens, char_ids

ALLOWED = 1e-5


def check(name, folder, sentences):
    with TemporaryDirectory() as out:
        path = import_elmo(
            folder / "options.json", folder / "lm_weights.hdf5", Path(out) / "m", folder / "vocab_test.txt"
        )
        pipeline = load(path, device="cpu")
    model, special = pipeline.head.body.eval(), pipeline.tokenizer.specials
    streams = json.loads((folder / sentences).read_text(encoding="utf-8"))
    files = [h5py.File(folder / f"lm_embeddings_{number}.hdf5") for number in range(len(streams))]
    states, worst, count = [None, None], 0.0, 0
    for turn in range(len(streams[0])):
        words = [stream[turn].split() for stream in streams]
        tokens = Tokens.pack([[special.bos, *[special.unk] * len(one), special.eos] for one in words])
        tokens = tokens.with_chars([char_ids(["", *one, ""]) for one in words])
        grid, embedded, found = TimeMajor(tokens), model._embed(tokens), []
        for number, way in enumerate((model.forward_lstm, model.backward_lstm)):
            outputs, states[number] = way.run(grid.pad(embedded, way.reverse), states[number], grid.mask)
            found.append(tokens.split(grid.unpad(outputs[-1], way.reverse)))
        for row, file in enumerate(files):
            got = np.stack([way[row][1:-1].numpy() for way in found])
            worst, count = max(worst, float(np.abs(got - file[str(turn)][()]).max())), count + got.size
    print(f"{name}: the last layer of {count:,} numbers differs by {worst:.2g} at most (allowed: {ALLOWED:g})")
    if (folder / "elmo_token_embeddings.hdf5").exists():
        worst = max(worst, check_words(name, folder, model, special))
    return worst


def check_words(name, folder, model, special):
    words = (folder / "vocab_test.txt").read_text(encoding="utf-8").split("\n")
    ids = [{"<S>": special.bos, "</S>": special.eos}.get(word, special.unk) for word in words]
    tokens = Tokens.pack([ids]).with_chars([char_ids("" if word in ("<S>", "</S>") else word for word in words)])
    must = h5py.File(folder / "elmo_token_embeddings.hdf5")["embedding"][()]
    worst = float(np.abs(model._embed(tokens).numpy() - must).max())
    print(f"{name}: the vectors of {len(words)} words alone differ by {worst:.2g} at most")
    return worst


def measure(rows, steps, width, cells, rounds=5):
    ours, theirs = ProjectedLSTM(width, width, cells, 3.0), nn.LSTM(width, cells, proj_size=width)
    inputs = torch.randn(steps, rows, width)
    times = {"weft": [], "torch": []}
    for _ in range(rounds + 1):
        for name, layer in (("weft", ours), ("torch", theirs)):
            start = time.perf_counter()
            layer(inputs)[0].sum().backward()
            times[name].append(time.perf_counter() - start)
    mine, other = (float(np.median(times[name][1:])) for name in ("weft", "torch"))
    told = f"{mine * 1e3:.0f} ms, torch {other * 1e3:.0f} ms: {other / mine:.2f}"
    print(f"{rows} x {steps}, {cells} cells to {width}: {told}")


def main():
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        root = Path(sys.argv[1]).expanduser()
        with torch.no_grad():
            worst = [
                check("allennlp", root / "allennlp", "sentences.json"),
                check("bilm-tf", root / "bilm-tf" / "model", "lm_embeddings_sentences.json"),
            ]
        if max(worst) > ALLOWED:
            sys.exit("the fixtures are not met")
    for rows, steps, width, cells in ((16, 32, 64, 256), (32, 64, 128, 1024), (16, 20, 512, 4096)):
        measure(rows, steps, width, cells)


if __name__ == "__main__":
    main()
