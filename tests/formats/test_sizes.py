"""Sizes that a configuration claims are compared with the weights before anything is allocated.

Each folder is loaded in a process with limited memory. Without the comparison some take gigabytes, others never end.
"""

import json
import shutil
import struct

import pytest
from tests import hf_folders
from tests.limits import run_limited

from weft.checkpoint.contents import write_model
from weft.checkpoint.manifest import CHECKPOINT_MANIFEST, save_folder, seal
from weft.config.run import Run
from weft.config.yaml import read_yaml, write_yaml
from weft.tasks.factory import build, make_task
from weft.tasks.prepare import fit_tokenizer

CONFIGS = {
    "vocab": ({"vocab_size": 10**8}, "vocab_size is 100000000, but the embeddings"),
    "layers": ({"n_layer": 10**9}, "model.layers: should be less than or equal to 1000, but is 1000000000"),
    "some layers": ({"n_layer": 300}, "lacks the weight h.2."),
    "width": ({"n_embd": 3 * 7000}, "must be (401, 21000), but is (401, 24) instead"),
    "prime width": ({"n_embd": 4194301}, "model.heads must divide model.width"),
    "positions": ({"n_positions": 10**7}, "must be (10000000, 24), but is (96, 24) instead"),
    "more positions": ({"n_positions": 10**30}, "model.max_positions: should be less than or equal to"),
    "feed-forward": ({"n_inner": 4 * 10**6}, "must be (4000000, 24), but is (96, 24) instead"),
}
RECIPES = {
    "layers": ("model.layers", 10**9, "model.layers: should be less than or equal to 1000, but is 1000000000"),
    "some layers": ("model.layers", 300, "the file lacks it"),
    "width": ("model.width", 20_000, "must be (9, 20000), but is (9, 16) instead"),
    "locations": ("model.locations", 10**9, "model.locations: should be less than or equal to"),
    "embedding": ("model.embedding", 4_000_000, "must be"),
    "text": ("model.layers", "1", "model.layers: should be a valid integer, but is '1' instead"),
}


def write_sparse(path, shape):
    """Write weights of a shape that take no room on the disk: one embedding of int8."""
    size = shape[0] * shape[1]
    header = {"transformer.wte.weight": {"dtype": "I8", "shape": shape, "data_offsets": [0, size]}}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + size)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, request):
    """Return a folder of hostile models, and the message of each."""
    root, messages = tmp_path_factory.mktemp("sizes"), {}
    hf_folders.gpt2(root / "gpt2")
    for name, (changes, message) in CONFIGS.items():
        folder = shutil.copytree(root / "gpt2", root / f"hf {name}")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        messages[folder.name] = message
    sparse = shutil.copytree(root / "hf vocab", root / "hf sparse vocab")
    write_sparse(sparse / "model.safetensors", (10**8, 1))
    messages[sparse.name] = "weft.size: should be less than or equal to 10000000"
    return root, messages


def resealed(source, folder, key, value):
    """Copy a checkpoint with another value in its recipe, under a manifest that fits."""
    shutil.copytree(source, folder)
    recipe = read_yaml((folder / "run.yaml").read_text(), "run.yaml")
    section, name = key.split(".")
    recipe[section][name] = value
    (folder / "run.yaml").write_text(write_yaml(recipe))
    (folder / CHECKPOINT_MANIFEST).unlink()
    seal(folder, 0)


def test_sizes_are_compared_with_the_weights_before_anything_is_allocated(folders, recipe):
    root, messages = folders
    run = Run.parse(recipe)
    task, head = build(run, fit_tokenizer(run.tokenizer, run.data, make_task(run)))
    save_folder(root / "checkpoint", 0, lambda folder: write_model(folder, run, task.tokenizer, head))
    for name, (key, value, message) in RECIPES.items():
        resealed(root / "checkpoint", root / f"weft {name}", key, value)
        messages[f"weft {name}"] = message
    results = run_limited(
        """
        from pathlib import Path
        import weft

        for folder in sorted(Path(argument).iterdir()):
            try:
                weft.load(folder, device="cpu")
                results[folder.name] = None
            except weft.WeftError as error:
                results[folder.name] = str(error)
        """,
        root,
    )
    assert {results.pop(name) for name in ("gpt2", "checkpoint")} == {None}, "what is sound is loaded"
    assert results.keys() == messages.keys()
    for name, message in messages.items():
        assert message in (results[name] or "nothing"), name
