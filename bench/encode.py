"""Vectors of short sentences by one small encoder: weft beside sentence-transformers and ONNX Runtime, on the CPU.

    pip install --no-deps --target .cache/encoders sentence-transformers onnxruntime flatbuffers onnx ml_dtypes
    python bench/encode.py                                # sentences/s, from texts to vectors, 2 threads
    python bench/encode.py --model FOLDER --texts FILE    # another encoder of sentence-transformers, other sentences

The encoder has the shape of all-MiniLM-L6 (6 layers, width 384, 12 heads, 30,522 words), with random weights, and takes
the mean over the tokens. Sentences are drawn, with the lengths of SST-2's in BERT's word pieces (24 in the mean). All
sides read the same folder and the same texts, and cut them into tokens themselves. sentence-transformers sorts by
length and takes 32 sentences at a time, which are filled up to the longest; so does ONNX Runtime here: on the graph as
it was exported (plain) and on what its optimizer for BERT makes of that (fused), each also in int8, by its dynamic
quantization, with a scale for each output.

Each side has a process of its own; they take turns, and the medians over the rounds are printed, of the rate and of its
ratio to the first side's in the same round. "cosine" is the least over all sentences to sentence-transformers in fp32;
beside it stands what it is when the mean over the sentences is taken away, for vectors of random weights have much in
common.
"""

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

WORDS, SPECIAL, BATCH = 30_522, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], 32


class Side(Protocol):
    """One of those that are compared, in a process of its own."""

    def encode(self, texts: list[str]) -> np.ndarray:
        """Return a vector a text."""


class SentenceTransformers:
    """The library's own `encode`."""

    def __init__(self, folder: Path, precision: str) -> None:
        from sentence_transformers import SentenceTransformer

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})

    def encode(self, texts: list[str]) -> np.ndarray:
        found: np.ndarray = self.model.encode(texts, batch_size=BATCH, show_progress_bar=False)
        return found


class ONNXRuntime:
    """A session, and around it what sentence-transformers does around its model."""

    def __init__(self, folder: Path, file: str, threads: int) -> None:
        import onnxruntime
        from transformers import AutoTokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(folder / file, options, providers=["CPUExecutionProvider"])
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        found = [self._batch([texts[row] for row in order[at : at + BATCH]]) for at in range(0, len(order), BATCH)]
        return np.concatenate(found)[np.argsort(order)]

    def _batch(self, texts: list[str]) -> np.ndarray:
        read = self.tokenizer(texts, padding=True, return_tensors="np")
        states = self.session.run(None, {name: value.astype(np.int64) for name, value in read.items()})[0]
        mask = read["attention_mask"][..., None].astype(np.float32)
        mean: np.ndarray = (states * mask).sum(1) / mask.sum(1)
        return mean


class Weft:
    """What `weft embed` does."""

    def __init__(self, folder: Path, precision: str) -> None:
        import weft

        self.pipeline = weft.load(folder, device="cpu", precision=precision)

    def encode(self, texts: list[str]) -> np.ndarray:
        found: np.ndarray = self.pipeline.embed(texts)
        return found


def spelt(number: int) -> str:
    """Spell a number with the letters a to z."""
    return (spelt(number // 26 - 1) if number >= 26 else "") + chr(97 + number % 26)


def make_encoder(folder: Path, seed: int) -> None:
    """Write an encoder with weights of about the size that trained ones have."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    from weft.formats.sentence_transformers import Pooling, export_pooling

    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    torch.manual_seed(seed)
    model = BertModel(BertConfig(vocab_size=WORDS, **sizes))
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "LayerNorm.weight" in name else 0.0, 0.06)
    model.save_pretrained(folder)
    words = SPECIAL + [spelt(number) for number in range(WORDS - len(SPECIAL))]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    export_pooling(folder, Pooling("mean", longest=256), sizes["hidden_size"])


def draw_texts(count: int, rng: np.random.Generator) -> list[str]:
    """Draw sentences, of 4 to 53 tokens with the marks at both ends."""
    lengths = rng.gamma(4.9, 4.4, count).round().clip(2, 51).astype(int)
    return [" ".join(map(spelt, rng.integers(0, WORDS - len(SPECIAL), length))) for length in lengths]


class _States(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor, kinds: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids=ids, attention_mask=mask, token_type_ids=kinds).last_hidden_state
        return states


def export(folder: Path) -> None:
    """Write the encoder for ONNX Runtime: as it is and as its optimizer leaves it, each in int8, too."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "rows", 1: "tokens"} for name in [*names, "states"]}
    given, how = tuple(torch.ones(2, 8, dtype=torch.long) for _ in names), {"dynamo": False, "opset_version": 17}
    plain, fused = folder / "plain.onnx", folder / "fused.onnx"
    torch.onnx.export(
        _States(model), given, str(plain), input_names=names, output_names=["states"], dynamic_axes=axes, **how
    )
    sizes = {"num_heads": model.config.num_attention_heads, "hidden_size": model.config.hidden_size}
    optimize_model(str(plain), "bert", **sizes).save_model_to_file(str(fused))
    for path in (plain, fused):
        own = {"per_channel": True, "extra_options": {"DefaultTensorType": onnx.TensorProto.FLOAT}}
        quantize_dynamic(path, path.with_stem(f"{path.stem}-int8"), weight_type=QuantType.QInt8, **own)


class _Here:
    """What a side's process holds."""

    side: Side


def _load(make: Callable[[], Side], threads: int, peers: str) -> None:
    sys.path.append(peers)
    torch.set_num_threads(threads)
    _Here.side = make()


def _measure(texts: list[str]) -> tuple[float, np.ndarray]:
    began = time.perf_counter()
    found = _Here.side.encode(texts)
    return time.perf_counter() - began, found


def compare(sides: dict[str, Callable[[], Side]], texts: list[str], args: argparse.Namespace) -> None:
    """Let the sides take turns, each once to warm up; print what they did, beside the first."""
    with ExitStack() as stack:
        workers: dict[str, Any] = {
            name: stack.enter_context(
                ProcessPoolExecutor(1, get_context("spawn"), _load, (make, args.threads, args.peers))
            )
            for name, make in sides.items()
        }
        found = {name: worker.submit(_measure, texts).result()[1] for name, worker in workers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(args.rounds):
            for name, worker in workers.items():
                seconds[name].append(worker.submit(_measure, texts).result()[0])
    first = next(iter(sides))
    for name, times in seconds.items():
        plain, apart = least_cosine(found[name], found[first]), least_cosine(found[name], found[first], apart=True)
        rate, ratio = len(texts) / np.median(times), np.median(np.divide(seconds[first], times))
        print(f"{name:30} {rate:7,.0f} sentences/s {ratio:5.2f}x  cosine {plain:.5f} ({apart:.5f} apart)", flush=True)


def least_cosine(found: np.ndarray, must: np.ndarray, apart: bool = False) -> float:
    """The least cosine of a vector and what it must be; `apart` from what all have in common."""
    found, must = (one - must.mean(0) * apart for one in (found, must))
    return float(((found * must).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(must, axis=1)).min())


def sides_of(folder: Path, args: argparse.Namespace) -> dict[str, Callable[[], Side]]:
    """Name all sides."""
    kinds = ["fp32", "bf16"] if args.bf16 else ["fp32"]
    found: dict[str, Callable[[], Side]] = {
        f"sentence-transformers {kind}": partial(SentenceTransformers, folder, kind) for kind in kinds
    }
    for name in ("plain", "plain-int8", "fused", "fused-int8"):
        found[f"ONNX Runtime {name}"] = partial(ONNXRuntime, folder, f"{name}.onnx", args.threads)
    return found | {f"weft {kind}": partial(Weft, folder, kind) for kind in [*kinds, "int8"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder of sentence-transformers that pools by the mean")
    parser.add_argument("--texts", type=Path, help="a sentence a line; what follows a tab is left out")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sides", nargs="+", default=["sentence-transformers", "ONNX", "weft"], help="by first words")
    parser.add_argument("--bf16", action="store_true", help="also in bf16: for machines that have products of it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", default=".cache/encoders", help="the folder that holds their packages")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": str(args.threads)}
    sys.path.append(args.peers)
    warnings.simplefilter("ignore")  # the exporter warns of what it will be,
    logging.disable()  # and the quantizer of what it could be
    with tempfile.TemporaryDirectory() as name:
        folder, texts = Path(name), draw_texts(args.sentences, np.random.default_rng(args.seed))
        if args.texts:
            texts = [line.partition("\t")[0] for line in args.texts.read_text(encoding="utf-8").splitlines()]
            texts = texts[: args.sentences]
        if args.model:
            shutil.copytree(args.model, folder, dirs_exist_ok=True)
        else:
            make_encoder(folder, args.seed)
        export(folder)
        names = ("torch", "transformers", "sentence-transformers", "onnxruntime")
        print(", ".join(f"{name} {version(name)}" for name in names), flush=True)
        sides = {name: make for name, make in sides_of(folder, args).items() if name.startswith(tuple(args.sides))}
        compare(sides, texts, args)


if __name__ == "__main__":
    main()
