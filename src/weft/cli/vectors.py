"""`weft vectors`: what the vectors of words know, of a run or of a file, and how they get from one form to another."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.console import Json, Trust, print_table, tell
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.analysis.word_vectors import WordVectors

vectors_app = typer.Typer(help="Look into word vectors, judge them, write them to a file.", no_args_is_help=True)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run's directory, or a file of vectors: .txt, .bin, .glove, .vec.")
]
Most = Annotated[int, typer.Option("--most", min=1, help="Look among so many words, the most frequent.")]
Case = Annotated[bool, typer.Option("--case", help="Take words in upper and lower case for different ones.")]


@vectors_app.command()
def neighbours(
    model: Model,
    words: Annotated[list[str], typer.Argument(metavar="WORD", help="Whose neighbours?")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many of each.")] = 10,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """List the words whose vectors point the most in the same direction, with their cosines."""
    vectors = _vectors(model, trust)
    for word in words:
        found = vectors.neighbours(word, count)
        if as_json:
            near = [[other, round(cosine, 6)] for other, cosine in found]
            typer.echo(json.dumps({"word": word, "neighbours": near}, ensure_ascii=False))
        else:
            print_table([word, "cosine"], [[other, f"{cosine:.4f}"] for other, cosine in found])


@vectors_app.command()
def analogies(
    model: Model,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Questions, such as question-words.txt.")],
    most: Most = 300_000,
    case: Case = False,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Answer "a is to b as c is to …", and say how many answers are right."""
    found = _vectors(model, trust).analogies(file, most, fold=not case)
    rows = [*found.sections, *found.kinds, found.total]
    if as_json:
        scores = {one.name: {"accuracy": one.accuracy, "correct": one.correct, "asked": one.asked} for one in rows}
        typer.echo(json.dumps({"sections": scores, "unknown": found.unknown}, ensure_ascii=False))
        return
    table = [[one.name, f"{100 * one.accuracy:.1f}%", str(one.correct), str(one.asked)] for one in rows]
    print_table(["section", "accuracy", "correct", "asked"], table)
    tell(f"{found.unknown:,} questions have an unknown word, and count for nothing")


@vectors_app.command()
def similarity(
    model: Model,
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Pairs of words, and how alike they are.")],
    most: Most = 300_000,
    case: Case = False,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Compare cosines with people's judgement: WordSim-353, SimLex-999 and others, of tab-separated columns."""
    vectors, rows = _vectors(model, trust), []
    for file in files:
        found = vectors.similarity(file, most, fold=not case)
        if as_json:
            scores = {"spearman": found.spearman, "pearson": found.pearson}
            typer.echo(json.dumps({"file": file, **scores, "pairs": found.pairs, "unknown": found.unknown}))
        share = f"{100 * found.unknown:.1f}%"
        rows.append([Path(file).name, f"{found.spearman:.4f}", f"{found.pearson:.4f}", str(found.pairs), share])
    if not as_json:
        print_table(["file", "Spearman", "Pearson", "pairs", "unknown"], rows)


@vectors_app.command()
def export(
    model: Model,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The file: .txt, .bin or .glove; .gz too.")],
    form: Annotated[str | None, typer.Option("--format", help="word2vec, binary or glove; by the ending.")] = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Write vectors to a file that other tools read."""
    from weft.data.word_vectors.write import form_of, write_vectors

    chosen, vectors = form_of(out, form), _vectors(model, trust)
    whole = [place for place, word in enumerate(vectors.words) if word and not any(map(str.isspace, word))]
    write_vectors(out, [vectors.words[place] for place in whole], vectors.rows[whole], chosen)
    left_out = len(vectors.words) - len(whole)
    if as_json:
        typer.echo(json.dumps({"file": out, "format": chosen, "vectors": len(whole), "left_out": left_out}))
        return
    rest = f"; {left_out:,} tokens with a space in them are left out" if left_out else ""
    typer.echo(f"{len(whole):,} vectors of {vectors.rows.shape[1]} numbers in {out} ({chosen}){rest}")


def _vectors(model: str, trust: bool) -> "WordVectors":
    """Read a file of vectors, or take those that a run's model has for its tokens."""
    from weft.analysis.word_vectors import WordVectors

    if not Path(model).is_dir():
        from weft.data.word_vectors.read import read_table

        return WordVectors(*read_table(model))
    from torch import nn

    from weft.pipeline import load

    pipeline = load(model, "cpu", trust)
    embed = getattr(pipeline.head.body, "embed", None)
    if not isinstance(embed, nn.Embedding):
        raise ConfigError(f"{model}: the model {pipeline.run.model.name!r} has no vectors of words to look into")
    special = {pipeline.tokenizer.specials.bos, pipeline.tokenizer.specials.eos, pipeline.tokenizer.specials.unk}
    kept = [id for id in range(len(pipeline.tokenizer)) if id not in special]
    # A space that begins a token is written as SentencePiece writes it: files of vectors have no spaces in words.
    words = [pipeline.tokenizer.token(id).replace(" ", "▁") for id in kept]
    return WordVectors(words, embed.weight.detach()[kept].numpy())
