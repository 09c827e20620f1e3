"""BERT-base pre-trained and encoding on a GPU: weft beside transformers; tokens/s, MFU, sentences/s.

    python bench/bert.py                          # one GPU, bf16: training on full and on ragged rows, then encoding
    python bench/bert.py full ragged --spans 3    # training alone
    python bench/bert.py encode                   # sentences of 8 to 512 tokens, and of 8 to 128
    python bench/bert.py --tiny --device cpu      # to try the script out

Training: both sides have the same shapes and vocabulary (30,522), hidden dropout 0.1, none on attention, bf16 autocast,
clipped gradients and a fused AdamW, whose step counts. "full": rows of 128 tokens, masked words and next sentences.
"ragged": rows of 8 to 512 tokens, masked words. weft trains as `weft train` does: file, tokenizer, loader, masks,
compiled step, checks, reports. transformers gets ids that are ready on the device, masked already, and its model is
compiled; ragged rows are padded to the longest. What compiling takes is printed, not counted. MFU counts useful
operations alone: three passes of 2 x the numbers of each matrix x the real tokens that meet it (the vocabulary's
meets the masked 15 %), and 4 x width a layer for each pair of tokens of a row; over what a large product reaches here.

Encoding: random weights, the same in both; the mean over the tokens, in bf16. transformers sorts by length and takes 64
rows at a time, padded to their longest. Both begin at ids and end with vectors on the host.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import weft
from gpt import spent
from training import Listener, Result, Span, first, learner, peak, top
from weft.config.run import Run
from weft.models.bert import BERT
from weft.nn.kernels.self_test import try_reading
from weft.tasks.factory import make_task
from weft.tasks.prepare import fit_tokenizer
from weft.tokens import Tokens
from weft.training.distributed import join_world
from weft.training.run import make_trainer
from weft.training.trainer import Trainer

CLIP, RATE, SHARE, IGNORE_INDEX = 1.0, 1e-4, 0.15, -100
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
Sizes = dict[str, int]


def sizes(tiny: bool) -> Sizes:
    """Name what both sides are built of, and how many tokens a batch has."""
    if tiny:
        return {"width": 64, "heads": 2, "layers": 2, "vocab": 400, "tokens": 2048, "most": 64, "full": 32}
    return {"width": 768, "heads": 12, "layers": 12, "vocab": 30_522, "tokens": 65_536, "most": 512, "full": 128}


def useful(size: Sizes, lengths: np.ndarray, chosen: int) -> float:
    """Count the operations of an update on rows of these lengths."""
    width, layers = size["width"], size["layers"]
    met = int(lengths.sum()) * layers * 12 * width * width + chosen * (width * width + width * size["vocab"])
    return 3.0 * (2 * met + 4 * width * layers * int((lengths**2).sum()))


def draw(size: Sizes, ragged: bool, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the lengths of rows, of so many tokens in all."""
    if not ragged:
        return np.full(tokens // size["full"], size["full"])
    return rng.integers(8, size["most"] + 1, 2 * tokens // (8 + size["most"]))


# --- transformers -----------------------------------------------------------------------------------------------------


def theirs(size: Sizes, pairs: bool) -> nn.Module:
    """Make transformers' BERT."""
    from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

    config = BertConfig(
        vocab_size=size["vocab"],
        hidden_size=size["width"],
        num_attention_heads=size["heads"],
        num_hidden_layers=size["layers"],
        intermediate_size=4 * size["width"],
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = (BertForPreTraining if pairs else BertForMaskedLM)(config)
    return model


def padded(size: Sizes, lengths: np.ndarray, pairs: bool, device: str) -> dict[str, Tensor]:
    """Lay rows out as a rectangle, with 15 % to be guessed."""
    real = torch.arange(size["most"] if not pairs else size["full"]) < torch.from_numpy(lengths)[:, None]
    ids = torch.randint(len(SPECIALS), size["vocab"], real.shape)
    chosen = (torch.rand(real.shape) < SHARE) & real
    given = {"input_ids": ids, "labels": torch.where(chosen, ids, IGNORE_INDEX)}
    if pairs:
        given["token_type_ids"] = (torch.arange(real.shape[1]) >= real.shape[1] // 2).long().expand(real.shape)
        given["next_sentence_label"] = torch.randint(2, (len(real),))
    else:
        given["attention_mask"] = real.long()
    return {name: value.to(device) for name, value in given.items()}


def train_theirs(size: Sizes, ragged: bool, args: argparse.Namespace) -> Result:
    """Train a span to warm up and then those that count."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    model = theirs(size, not ragged).to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    lengths = [draw(size, ragged, size["tokens"], rng) for _ in range(4)]
    batches = [padded(size, one, not ragged, args.device) for one in lengths]

    def loss(given: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(**given).loss
        return found

    learn = learner(loss if args.eager else torch.compile(loss, dynamic=False), model, optimizer, args.device)
    first(lambda: learn(batches[0]), args.device)
    tokens = int(sum(one.sum() for one in lengths))
    work = sum(useful(size, one, int(SHARE * one.sum())) for one in lengths)
    seconds = [spent(lambda: [learn(one) for one in batches], args.device) for _ in range(args.spans)]
    most = top(args.device)
    return Result([Span(tokens / one, work / one / most) for one in seconds], peak(args.device), tokens / 4)


# --- weft -------------------------------------------------------------------------------------------------------------


def recipe(folder: Path, size: Sizes, ragged: bool, args: argparse.Namespace) -> Run:
    """Write texts of random words, and what `weft train` would be given."""
    rng, path = np.random.default_rng(args.seed), folder / "words.txt"
    lengths = draw(size, ragged, 30 * size["tokens"], rng) - 2 if ragged else np.full(30 * size["tokens"] // 1000, 1000)
    words = rng.integers(0, size["vocab"] - len(SPECIALS), lengths.sum())
    words[: size["vocab"] - len(SPECIALS)] = np.arange(size["vocab"] - len(SPECIALS))
    rows = np.split(words, lengths.cumsum()[:-1])
    path.write_text("".join(" ".join(f"w{word}" for word in row) + "\n" for row in rows))
    train = {"batch_tokens": size["tokens"], "lr": RATE, "clip": CLIP, "device": args.device, "seed": args.seed}
    train |= {"steps": args.steps * (args.spans + 1), "report_every": args.steps, "schedule": "constant"}
    train |= {"precision": "bf16" if args.device == "cuda" else "fp32"}
    names = {"pad": "[PAD]", "unk": "[UNK]", "bos": "[CLS]", "eos": "[SEP]", "mask": "[MASK]"}
    return Run.parse(
        {
            "task": {"name": "mlm", "sequences": "documents"}
            if ragged
            else {"name": "mlm", "short_sequence_probability": 0.0},
            "data": {
                "train": str(path),
                "format": "txt",
                "max_length": size["most" if ragged else "full"],
                "workers": args.workers,
            },
            "tokenizer": {"name": "words", "size": size["vocab"], "specials": names},
            "model": {"name": "bert", **{name: size[name] for name in ("width", "heads", "layers")}},
            "train": train,
        }
    )


def train_weft(size: Sizes, ragged: bool, args: argparse.Namespace) -> Result:
    """Train as `weft train` does, but write no checkpoint; its own reports say the rest."""
    heard = Listener()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = recipe(Path(folder), size, ragged, args)
        task = make_task(run)
        tokenizer = fit_tokenizer(run.tokenizer, run.data, task)
        assert len(tokenizer) == size["vocab"], f"{len(tokenizer)} words"
        trainer = make_trainer(run, task, tokenizer, join_world(args.device), None, stack, None, heard)
        assert isinstance(trainer, Trainer)
        batch = next(trainer.loader.stream(trainer.progress.position)).batch
        lengths = (batch.unpadded or batch).tokens.lengths.numpy()
        ratio = 3 * trainer.head.flops(batch) / useful(size, lengths, batch.counts["masked"])
        print(
            f"{len(lengths)} rows of {lengths.mean():.1f} tokens; operations as counted here x {ratio:.3f}", flush=True
        )
        trainer.fit()
    spans = [Span(step.tokens_per_s, step.mfu) for step in heard.steps[1:]]  # the first is to warm up
    return Result(spans, peak(args.device), int(lengths.sum()))


def training(size: Sizes, ragged: bool, args: argparse.Namespace) -> None:
    """Train both sides, and print the table."""
    print(f"ceiling {top(args.device) / 1e12:,.1f} TFLOP/s", flush=True)
    peak(args.device)
    results = {"weft": train_weft(size, ragged, args)}
    torch.compiler.reset()
    results = {"transformers": train_theirs(size, ragged, args), **results}
    base = statistics.median(span.tokens_per_s for span in results["transformers"].spans)
    print("training, rows of", f"8 to {size['most']}" if ragged else size["full"], "tokens")
    for name, result in results.items():
        rate, mfu = (statistics.median(values) for values in zip(*result.spans, strict=True))
        print(f"{name:12} {rate:10,.0f} tokens/s {rate / base:6.2f}x  MFU {mfu:6.1%}", end="")
        print(f"  {result.peak / result.batch:10,.0f} bytes a token")


# --- encoding ---------------------------------------------------------------------------------------------------------


def to_weft(model: nn.Module) -> BERT:
    """Give weft's model transformers' weights, as `weft.load` does."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        words = SPECIALS + [f"w{number}" for number in range(model.config.vocab_size - len(SPECIALS))]  # type: ignore[union-attr, operator]
        (Path(folder) / "vocab.txt").write_text("\n".join(words))
        body = weft.load(folder, device="cpu").head.body
    assert isinstance(body, BERT)
    return body


@torch.inference_mode()
def vectors_of_theirs(model: nn.Module, rows: list[np.ndarray], device: str) -> Tensor:
    """Encode padded batches of like lengths."""
    order, found = sorted(range(len(rows)), key=lambda row: -len(rows[row])), []
    for at in range(0, len(order), 64):
        some = [torch.from_numpy(rows[row]) for row in order[at : at + 64]]
        ids = nn.utils.rnn.pad_sequence(some, batch_first=True).to(device)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(one) for one in some])[:, None]
        mask = mask.to(device)
        states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        found.append((states * mask[..., None]).sum(1).float() / mask.sum(1, keepdim=True))
    return torch.cat([one.cpu() for one in found])[torch.tensor(order).argsort()]


@torch.inference_mode()
def vectors_of_weft(model: BERT, rows: list[np.ndarray], device: str) -> Tensor:
    """Encode flat batches, as `Pipeline.embed` does."""
    order, found = sorted(range(len(rows)), key=lambda row: -len(rows[row])), []
    for some in cut(order, [len(row) for row in rows]):
        tokens = Tokens.pack([rows[row] for row in some]).to(device)
        states, lengths = model.encode(tokens)[0], tokens.lengths.to(device)
        owners = torch.repeat_interleave(lengths, output_size=len(states))
        sums = torch.zeros(len(some), states.shape[1], device=device).index_add(0, owners, states.float())
        found.append(sums / lengths[:, None])
    return torch.cat([one.cpu() for one in found])[torch.tensor(order).argsort()]


def cut(order: list[int], lengths: list[int], budget: int = 65_536) -> Iterator[list[int]]:
    """Fill batches with so many tokens."""
    batch: list[int] = []
    held = 0
    for row in order:
        if batch and held + lengths[row] > budget:
            yield batch
            batch, held = [], 0
        batch.append(row)
        held += lengths[row]
    yield batch


def encoding(size: Sizes, args: argparse.Namespace) -> None:
    """Encode with both, and print the table."""
    from transformers import BertModel

    torch.manual_seed(args.seed)
    half = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = BertModel(theirs(size, True).config, add_pooling_layer=False).eval()
    own = to_weft(model).to(args.device, half).eval().requires_grad_(False)
    model = model.to(args.device, half)
    try_reading(next(own.parameters()).device)  # as `Pipeline.embed` does where there is much to read
    for most in (size["most"], size["most"] // 4):
        rng = np.random.default_rng(args.seed)
        rows = [rng.integers(5, size["vocab"], length) for length in rng.integers(8, most + 1, args.sentences)]
        sides = {"transformers": (vectors_of_theirs, model), "weft": (vectors_of_weft, own)}
        found = {name: work(one, rows, args.device) for name, (work, one) in sides.items()}  # and warm up
        alike = nn.functional.cosine_similarity(*found.values()).min()
        print(f"encoding, {len(rows):,} rows of 8 to {most} tokens; least cosine {alike:.5f}")
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(args.spans):
            for name, (work, one) in sides.items():
                times[name].append(spent(partial(work, one, rows, args.device), args.device))
        base = min(times["transformers"])
        for name, seconds in times.items():
            print(f"{name:12} {len(rows) / min(seconds):10,.0f} sentences/s {base / min(seconds):6.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="of full, ragged and encode; all if not given")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script out")
    parser.add_argument("--steps", type=int, default=20, help="updates a span")
    parser.add_argument("--spans", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="weft's loader's processes")
    parser.add_argument("--sentences", type=int, default=8192)
    parser.add_argument("--eager", action="store_true", help="do not compile transformers")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {version('transformers')}", flush=True)
    for what in args.what or ["full", "ragged", "encode"]:
        if what == "encode":
            encoding(sizes(args.tiny), args)
        else:
            training(sizes(args.tiny), what == "ragged", args)


if __name__ == "__main__":
    main()
