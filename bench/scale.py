"""Large models on many GPUs, on paper: memory, communication and tokens a second, from what one GPU was measured to do.

    python bench/scale.py      # the tables of docs/scale.md

Nothing is trained. Parameters are counted from the presets; memory and bytes are those of PyTorch's DDP and FSDP2 with
weft's settings (fp32 weights, AdamW, bf16 under autocast); the model FLOPs utilisation is that of one H200
(bench/README.md); links are those of the data sheets. What is exchanged hides behind the backward pass, and what does
not fit behind it is added to the step. So the figures are what to expect at best, and show what breaks first.
"""

from dataclasses import dataclass
from itertools import product

from weft.config.run import Run
from weft.tasks.factory import body_on_meta

GB = 1e9
PEAK = 790e12  # bf16 FLOP/s of an H200, measured as `peak_flops` does
MEMORY = 141 * GB
NVLINK, NETWORK = 450 * GB, 50 * GB  # bytes a second, one way: to the GPUs of a node; of each GPU's 400 Gb/s card
GPUS_OF_NODE = 8
FEW = 4096  # tokens of a GPU in an update, where its batch must not grow with the GPUs
EXCHANGED = 0.7  # of a link's rate, that a collective reaches


@dataclass(frozen=True)
class Model:
    """A model as the recipe trains it."""

    preset: str
    tokenizer: str
    task: dict[str, object]
    vocab: int
    length: int  # tokens of a sequence
    mfu: float  # measured on one GPU
    bytes_per_token: float  # that one GPU keeps for the backward pass, by layer and width, without checkpointing
    tokens: int  # of a GPU's batches in an update

    @property
    def run(self) -> Run:
        raw = {
            "task": self.task,
            "data": {"train": "texts.txt", "max_length": self.length},
            "tokenizer": {"name": self.tokenizer},
            "train": {"steps": 1},
        }
        return Run.parse({**raw, "model": {"preset": self.preset}})


# What a layer keeps of a token, in bytes for each of its `width` numbers: GPT-2 124M was measured to take 556 kB a
# token in all, and BERT-base 347 kB, of which the logits of the vocabulary are the rest.
BERT_LARGE = Model("bert-large", "wordpiece", {"name": "mlm"}, 30_522, 512, 0.575, 34.0, 32_768)
GPT2_XL = Model("gpt2-xl", "bpe", {"name": "lm"}, 50_257, 1024, 0.57, 34.0, 16_384)


def parameters(model: Model) -> int:
    """Return the number of parameters, counted from the preset."""
    return sum(parameter.numel() for parameter in body_on_meta(model.run, model.vocab).parameters())


def flops_per_token(model: Model) -> float:
    """Return the operations of an update for a token: 6 for each weight, and attention's 12 x layers x width x length.

    A causal model computes half of the attention. Embeddings are looked up, but a tied output projection multiplies.
    """
    config = model.run.model
    attention = 12 * config.layers * config.width * model.length  # type: ignore[attr-defined]
    return 6 * parameters(model) + attention / (2 if model.preset.startswith("gpt") else 1)


def block_parameters(model: Model) -> int:
    """Return the parameters of a block: four matrices of attention, two of the feed-forward network, with biases."""
    config = model.run.model
    width, ffn = config.width, config.ffn_width  # type: ignore[attr-defined]
    return 4 * width * width + 2 * width * ffn + 9 * width + ffn


def states(model: Model, gpus: int, sharded: bool) -> float:
    """Return the bytes of weights, gradients and AdamW's two states on each GPU.

    With FSDP two blocks are whole at a time, in bf16: the one that is computed and the next, with one's gradient.
    """
    if not sharded:
        return 16.0 * parameters(model)
    return 16.0 * parameters(model) / gpus + 3 * 2 * block_parameters(model)


def activations(model: Model, checkpointing: bool) -> float:
    """Return the bytes that a GPU keeps of a batch for the backward pass, the logits aside."""
    config = model.run.model
    layers, width = config.layers, config.width  # type: ignore[attr-defined]
    tokens = min(model.tokens, 16 * 1024)  # of a batch; more are accumulated
    if checkpointing:  # the input of each block, and one block whole
        return tokens * width * (2.0 * layers + model.bytes_per_token)
    return tokens * width * layers * model.bytes_per_token


def exchanged(model: Model, gpus: int, sharded: bool) -> float:
    """Return the bytes that each GPU sends in an update.

    DDP reduces fp32 gradients around a ring: twice 4 bytes for each parameter. FSDP gathers bf16 weights before the
    forward and the backward pass, and scatters the sums of fp32 gradients.
    """
    share = (gpus - 1) / gpus
    return (2 * 2 + 4 if sharded else 2 * 4) * parameters(model) * share


def link(gpus: int) -> float:
    """Return the bytes a second that a GPU can send: the slowest link of the ring."""
    return EXCHANGED * (NVLINK if gpus <= GPUS_OF_NODE else NETWORK)


def tokens_per_s(model: Model, gpus: int, sharded: bool, tokens: int) -> float:
    """Return the tokens a second of all GPUs, of which each has so many in an update."""
    compute = tokens * flops_per_token(model) / (model.mfu * PEAK)
    hidden = compute if sharded else compute * 2 / 3  # DDP exchanges during the backward pass alone
    exchange = exchanged(model, gpus, sharded) / link(gpus) if gpus > 1 else 0.0
    return gpus * tokens / (compute + max(0.0, exchange - hidden))


def memory_table(models: dict[str, Model]) -> str:
    """Return the memory of each GPU as Markdown."""
    lines = [
        "| | parameters | GPUs | states, DDP | states, FSDP | activations | with checkpointing |",
        "|---" * 7 + "|",
    ]
    for name, model in models.items():
        whole, short = (activations(model, checkpointing) / GB for checkpointing in (False, True))
        for gpus in (1, 8, 64, 512):
            sides = [f"{states(model, gpus, sharded) / GB:.1f} GB" for sharded in (False, True)]
            lines.append(
                f"| {name} | {parameters(model) / 1e6:,.0f} M | {gpus} | {' | '.join(sides)} | {whole:.1f} GB "
                f"| {short:.1f} GB |"
            )
    return "\n".join(lines)


def speed_table(models: dict[str, Model]) -> str:
    """Return the tokens a second as Markdown, and how much of the growth with the GPUs they are."""
    lines = ["| | GPUs | tokens of a GPU in an update | in all | DDP, tokens/s | FSDP, tokens/s |", "|---" * 6 + "|"]
    for name, model in models.items():
        for gpus, tokens in product((8, 64, 512), (model.tokens, FEW)):
            alone = tokens_per_s(model, 1, False, tokens)
            rates = (tokens_per_s(model, gpus, sharded, tokens) for sharded in (False, True))
            sides = " | ".join(f"{rate / 1e6:.2f} M ({rate / alone / gpus:.0%})" for rate in rates)
            lines.append(f"| {name} | {gpus} | {tokens:,} | {gpus * tokens / 1e6:.2f} M | {sides} |")
    return "\n".join(lines)


MODELS = {"BERT-large": BERT_LARGE, "GPT-2 1.5B": GPT2_XL}

if __name__ == "__main__":
    print(memory_table(MODELS), speed_table(MODELS), sep="\n\n")
