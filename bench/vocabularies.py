"""Published vocabularies, read by weft from their files alone, against encodings that others made of them.

    python bench/vocabularies.py FOLDER

FOLDER has bert-base-uncased-vocab.txt, bert-base-cased-vocab.txt, gpt2-vocab.json, gpt2-merges.txt, the same of
roberta-base, and reference_encodings.json: {encodings: {gpt2: [{text, ids}, …], …}}. Prints how many texts have the
same ids and, of the vocabularies that lose nothing, how many come back as they were. A text that spells the mask has it
there, and so it is read here, as a question to a masked language model is.
"""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft.formats.huggingface.bert import BERT_MAP, ROBERTA_MAP
from weft.formats.huggingface.gpt import GPT2_MAP
from weft.formats.huggingface.mapping import HFMapping
from weft.formats.huggingface.tokenizer import read_tokenizer
from weft.tasks.mlm.cloze import Blanks
from weft.tokenization.trainable import Tokenizer

KNOWN: dict[str, tuple[HFMapping, int, dict[str, Any]]] = {
    "bert-base-uncased": (BERT_MAP, 30_522, {}),
    "bert-base-cased": (BERT_MAP, 28_996, {"do_lower_case": False}),
    "gpt2": (GPT2_MAP, 50_257, {}),
    "roberta-base": (ROBERTA_MAP, 50_265, {}),
}


def read(given: Path, name: str) -> Tokenizer:
    """Read a vocabulary."""
    family, size, told = KNOWN[name]
    files = ["vocab.txt"] if family is BERT_MAP else ["vocab.json", "merges.txt"]
    with TemporaryDirectory() as folder:
        for file in files:
            shutil.copy(given / f"{name}-{file}", Path(folder) / file)
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(told))
        return read_tokenizer(Path(folder), family, size)


def cut(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text, a mask in it as the mask."""
    mask = tokenizer.specials.mask
    known = mask is not None and tokenizer.token(mask) in text
    return Blanks(tokenizer, mask).ids(text) if known else tokenizer.encode(text).ids


def main() -> None:
    """Compare, and exit with 1 where something differs."""
    given, right = Path(sys.argv[1]), True
    encodings = json.loads((given / "reference_encodings.json").read_text(encoding="utf-8"))["encodings"]
    for name in KNOWN:
        tokenizer, rows = read(given, name), encodings[name]
        special = tokenizer.specials
        before, after = ([special.bos], [special.eos]) if KNOWN[name][0].framed else ([], [])
        same = sum([*before, *cut(tokenizer, row["text"]), *after] == row["ids"] for row in rows)
        back = sum(tokenizer.decode(row["ids"]) == row["text"] for row in rows) if tokenizer.lossless else len(rows)
        told = f", {back} decoded as they were" if tokenizer.lossless else ""
        print(f"{name}: {len(rows)} texts, {same} with the same ids{told}; {special}")
        right &= same == back == len(rows)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
