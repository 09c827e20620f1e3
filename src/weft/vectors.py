"""Word vectors of a file or of a run, with the queries of gensim's KeyedVectors.

vectors = weft.vectors.load("glove.6B.100d.txt")
vectors.most_similar(positive=["king", "woman"], negative=["man"])      king - man + woman
vectors.similarity("cat", "dog")                                        their cosine
vectors["cat"]                                                          the vector itself
"""

import os
from pathlib import Path

from weft.analysis.word_vectors import WordVectors
from weft.data.word_vectors.read import read_table
from weft.errors import ConfigError
from weft.pipeline import Pipeline
from weft.pipeline import load as load_pipeline

__all__ = ["WordVectors", "load"]


def load(path: str | Path, trust: bool = False) -> WordVectors:
    """Return the vectors of a file (.txt, .vec, .glove, .bin; .gz too), or the token embeddings of a run's model.

    `trust` lets a run import code of its own, as in `weft.load`.
    """
    if not os.path.isdir(path):  # noqa: PTH112  (of a name that is too long, it is False)
        return WordVectors(*read_table(str(path)))
    return _token_embeddings(load_pipeline(path, "cpu", trust), path)


def _token_embeddings(pipeline: Pipeline, path: str | Path) -> WordVectors:
    """Return the embeddings of all tokens but the special ones."""
    tables = pipeline.head.body.word_embeddings().get("vectors")
    if not tables:
        raise ConfigError(
            f"{path}: the model {pipeline.run.model.name!r} has no word vectors; give a word2vec run, or a file"
        )
    special = {pipeline.tokenizer.specials.bos, pipeline.tokenizer.specials.eos, pipeline.tokenizer.specials.unk}
    ids = [id for id in range(len(pipeline.tokenizer)) if id not in special]
    # A space at the start of a token becomes ▁, as in SentencePiece: words in files of vectors have no spaces.
    words = [pipeline.tokenizer.token(id).replace(" ", "▁") for id in ids]
    return WordVectors(words, tables[0].weight.detach()[ids].numpy())
