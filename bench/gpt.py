"""GPT-2 (124M) trained and generating: weft beside transformers; tokens/s, MFU, and what memory it takes.

    python bench/gpt.py                           # one GPU, bf16: training, then generation
    python bench/gpt.py train --spans 3           # windows of 1024 tokens, 32 at a time
    python bench/gpt.py generate                  # 256 tokens after a prompt of 16: one text, and 64 at once
    python bench/gpt.py --tiny --device cpu       # to try the script out

Training: both sides have the same shapes and vocabulary (50,257), no dropout, bf16 autocast, clipped gradients and a
fused AdamW. weft trains as `weft train` does: file, tokenizer, loader, compiled step, checks, reports. transformers
gets ids that are ready on the device, and its model and loss are compiled together. What compiling takes is printed,
not counted. MFU counts useful operations alone: three passes of 2 x the numbers of each matrix x the tokens, and
4 x width a layer for each pair of tokens of which one may see the other; over what a large product reaches here.

Generation: greedy, with the same random weights in bf16, exactly so many tokens each. transformers runs as it comes
and, with --static, with a static cache and a compiled step. "same" is the share of texts that agree to the token; of
random weights the next words lie so close together that rounding changes them.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training import Listener, Result, Span, first, learner, peak, top, wait
from weft.config.run import Run
from weft.decoding.config import DecodingConfig
from weft.decoding.generate import generate
from weft.formats.huggingface.gpt import GPT2_MAP
from weft.models.gpt import GPT, GPTConfig
from weft.tasks.base import Task
from weft.tasks.factory import make_task
from weft.tasks.prepare import fit_tokenizer
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens
from weft.training.distributed import join_world
from weft.training.run import make_trainer
from weft.training.trainer import Trainer

CLIP, RATE, BETAS = 1.0, 1e-4, (0.9, 0.98)
SPECIALS = 3  # as many as the tokenizer of words has: unknown, beginning, end
PROMPT = 16  # tokens that are given to go on from

Side = Callable[[], list[list[int]]]  # writes the ids of each text


def sizes(tiny: bool) -> dict[str, int]:
    """Name what both sides are built of."""
    if tiny:
        return {"width": 64, "heads": 2, "layers": 2, "max_positions": 64, "vocab": 500, "rows": 4}
    return {"width": 768, "heads": 12, "layers": 12, "max_positions": 1024, "vocab": 50_257, "rows": 32}


def theirs(size: dict[str, int]) -> nn.Module:
    """Make transformers' GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size["vocab"],
        n_positions=size["max_positions"],
        n_embd=size["width"],
        n_head=size["heads"],
        n_layer=size["layers"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def useful(size: dict[str, int]) -> int:
    """Count the operations of an update on a batch of whole windows."""
    width, layers, longest = size["width"], size["layers"], size["max_positions"]
    matrices = layers * 12 * width * width + width * size["vocab"]
    pairs = longest * (longest + 1) // 2
    return 3 * size["rows"] * (2 * matrices * longest + 4 * width * layers * pairs)


# --- training ---------------------------------------------------------------------------------------------------------


def train_theirs(size: dict[str, int], args: argparse.Namespace) -> Result:
    """Train a span to warm up and then those that count."""
    torch.manual_seed(args.seed)
    model = theirs(size).to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=BETAS, fused=True)
    shape = size["rows"], size["max_positions"]
    batches = [torch.randint(size["vocab"], (2, *shape), device=args.device) for _ in range(4)]

    def loss(read: Tensor, follows: Tensor) -> Tensor:
        logits = model(input_ids=read, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), follows.flatten())

    learn = learner(loss if args.eager else torch.compile(loss, dynamic=False), model, optimizer, args.device)
    first(lambda: learn(*batches[0]), args.device)
    tokens, most = size["rows"] * size["max_positions"], top(args.device)
    seconds = [spent(lambda: [learn(*one) for one in batches], args.device) / len(batches) for _ in range(args.spans)]
    return Result([Span(tokens / one, useful(size) / one / most) for one in seconds], peak(args.device), tokens)


def spent(work: Callable[[], object], device: str) -> float:
    """Return the seconds that it takes."""
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def recipe(folder: Path, size: dict[str, int], args: argparse.Namespace) -> Run:
    """Write a text of random words, and what `weft train` would be given."""
    rng, path = np.random.default_rng(args.seed), folder / "words.txt"
    words = rng.integers(0, size["vocab"] - SPECIALS, (40 * size["rows"] * size["max_positions"] // 400, 400))
    words[: size["vocab"] // 400 + 1].flat[: size["vocab"] - SPECIALS] = np.arange(size["vocab"] - SPECIALS)
    path.write_text("".join(" ".join(f"w{word}" for word in row) + "\n" for row in words.tolist()))
    names = ("width", "heads", "layers", "max_positions")
    train = {"batch_tokens": size["rows"] * size["max_positions"], "lr": RATE, "clip": CLIP, "device": args.device}
    train |= {"steps": args.steps * (args.spans + 1), "report_every": args.steps, "schedule": "constant"}
    train |= {"precision": "bf16" if args.device == "cuda" else "fp32", "seed": args.seed}
    return Run.parse(
        {
            "task": {"name": "lm", "sequences": "windows"},
            "data": {"train": str(path), "format": "txt", "max_length": size["max_positions"], "workers": args.workers},
            "tokenizer": {"name": "words", "size": size["vocab"]},
            "model": {"name": "gpt", "dropout": 0.0, **{name: size[name] for name in names}},
            "train": train,
        }
    )


def train_weft(run: Run, task: Task, tokenizer: Tokenizer, size: dict[str, int], args: argparse.Namespace) -> Result:
    """Train as `weft train` does, but write no checkpoint; its own reports say the rest."""
    heard = Listener()
    with ExitStack() as stack:
        trainer = make_trainer(run, task, tokenizer, join_world(args.device), None, stack, None, heard)
        assert isinstance(trainer, Trainer)
        batch = next(trainer.loader.stream(trainer.progress.position)).batch
        assert 3 * trainer.head.flops(batch) == useful(size), "counted alike"
        trainer.fit()
    spans = [Span(step.tokens_per_s, step.mfu) for step in heard.steps[1:]]  # the first is to warm up
    return Result(spans, peak(args.device), size["rows"] * size["max_positions"])


def training(size: dict[str, int], args: argparse.Namespace) -> None:
    """Train both sides, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        run = recipe(Path(folder), size, args)
        task = make_task(run)
        tokenizer = fit_tokenizer(run.tokenizer, run.data, task)
        assert len(tokenizer) == size["vocab"], f"{len(tokenizer)} words"
        task.tokenizer = tokenizer
        print(f"ceiling {top(args.device) / 1e12:,.1f} TFLOP/s", flush=True)
        peak(args.device)
        results = {"weft": train_weft(run, task, tokenizer, size, args)}
    torch.compiler.reset()
    results = {"transformers": train_theirs(size, args), **results}
    first = statistics.median(span.tokens_per_s for span in results["transformers"].spans)
    print(f"training, {size['rows']} x {size['max_positions']} tokens")
    for name, result in results.items():
        rate, mfu = (statistics.median(values) for values in zip(*result.spans, strict=True))
        print(f"{name:12} {rate:10,.0f} tokens/s {rate / first:6.2f}x  MFU {mfu:6.1%}", end="")
        print(f"  {result.peak / result.batch:10,.0f} bytes a token")


# --- generation -------------------------------------------------------------------------------------------------------


def to_weft(model: nn.Module, size: dict[str, int]) -> GPT:
    """Give weft's model transformers' weights."""
    names = ("width", "heads", "layers", "max_positions")
    own, given = GPT(GPTConfig(name="gpt", **{name: size[name] for name in names}), size["vocab"]), model.state_dict()
    found = own.state_dict()
    for mine, other in GPT2_MAP.modules.items():
        assert isinstance(other, str)
        for layer in range(size["layers"]):
            for part in ("weight", "bias"):
                name = f"{mine}.{part}".format(layer=layer)
                value = given.get(f"transformer.{other}.{part}".format(layer=layer))
                if name in found and value is not None:
                    found[name] = value.t() if part == "weight" and other.endswith(GPT2_MAP.turned) else value
    found["output.weight"] = found["embed.weight"]
    own.load_state_dict(found)
    return own


def generation(size: dict[str, int], args: argparse.Namespace) -> None:
    """Let both sides go on from the same prompts, and print the table."""
    torch.manual_seed(args.seed)
    half = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = theirs(size).to(args.device, half).eval()
    own = to_weft(model, size).to(args.device, half).eval().requires_grad_(False)
    length = min(args.length, size["max_positions"] - PROMPT)
    for count in (1, 4 if args.tiny else 64):
        prompts = torch.randint(1, size["vocab"], (count, PROMPT), device=args.device)
        sides: dict[str, Side] = {"transformers": partial(ids_of, model, prompts, length, None)}
        if args.static:
            sides["transformers, static"] = partial(ids_of, model, prompts, length, "static")
        sides["weft"] = partial(going_on, own, prompts, length)
        print(f"generation, {count} x {length} tokens", flush=True)
        compare(sides, count * length, args)


def compare(sides: dict[str, Side], tokens: int, args: argparse.Namespace) -> None:
    """Let the sides take turns, each once to warm up."""
    found = {name: work() for name, work in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, work in sides.items():
            seconds[name].append(spent(work, args.device))
    first = min(seconds["transformers"])
    for name, times in seconds.items():
        same = statistics.mean(one == other for one, other in zip(found[name], found["transformers"], strict=True))
        print(f"{name:20} {tokens / min(times):10,.0f} tokens/s {first / min(times):6.2f}x  same {same:4.0%}")


@torch.inference_mode()
def ids_of(model: nn.Module, prompts: Tensor, length: int, cache: str | None) -> list[list[int]]:
    """What transformers writes."""
    how = {} if cache is None else {"cache_implementation": cache}
    found = model.generate(  # type: ignore[operator]
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=length, min_new_tokens=length,
        do_sample=False, pad_token_id=0, **how,
    )  # fmt: skip
    ids: list[list[int]] = found[:, PROMPT:].tolist()
    return ids


@torch.inference_mode()
def going_on(model: GPT, prompts: Tensor, length: int) -> list[list[int]]:
    """What weft writes."""
    given = Tokens.flat(prompts.flatten(), torch.full((len(prompts),), PROMPT))
    return [
        list(group[0].ids) for group in generate(model, given, 0, DecodingConfig(min_length=length, max_length=length))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["train", "generate", "both"], default="both")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script out")
    parser.add_argument("--steps", type=int, default=20, help="updates a span")
    parser.add_argument("--spans", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="weft's loader's processes")
    parser.add_argument("--eager", action="store_true", help="do not compile transformers")
    parser.add_argument("--length", type=int, default=256, help="tokens to write")
    parser.add_argument("--static", action="store_true", help="also transformers with a compiled static cache")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {version('transformers')}", flush=True)
    for what, measure in (("train", training), ("generate", generation)):
        if args.what in (what, "both"):
            measure(sizes(args.tiny), args)


if __name__ == "__main__":
    main()
