"""GPT-2's own vocabulary, read by weft, against encodings that others made of it.

    python bench/vocabularies.py FOLDER

FOLDER has gpt2-vocab.json, gpt2-merges.txt and reference_encodings.json: {encodings: {gpt2: [{text, ids}, …]}}.
Prints how many texts have the same ids, and how many come back as they were.
"""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from weft.checkpoint.hf_text import read_tokenizer
from weft.models.gpt_hf import GPT2_MAP

SIZE = 50_257


def main() -> None:
    """Compare, and exit with 1 where something differs."""
    given = Path(sys.argv[1])
    with TemporaryDirectory() as folder:
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(given / f"gpt2-{name}", Path(folder) / name)
        tokenizer = read_tokenizer(Path(folder), GPT2_MAP, SIZE)
    rows = json.loads((given / "reference_encodings.json").read_text(encoding="utf-8"))["encodings"]["gpt2"]
    same = sum(tokenizer.encode(row["text"]).ids == row["ids"] for row in rows)
    back = sum(tokenizer.decode(row["ids"]) == row["text"] for row in rows)
    print(f"{len(rows)} texts: {same} with the same ids, {back} decoded as they were; {tokenizer.specials}")
    sys.exit(0 if same == back == len(rows) else 1)


if __name__ == "__main__":
    main()
