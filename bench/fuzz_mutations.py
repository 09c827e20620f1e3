"""Changes to valid inputs that keep most of their structure: trees of JSON and YAML, tables, text, bytes, tensors.

A mutation draws from its own `random.Random`, so that each can be repeated, or left out, without the others.
"""

import copy
import gzip
import json
import struct
from contextlib import suppress
from random import Random
from typing import Any

import yaml

# Text that JSON cannot be dumped with: they are written over what stands for them.
DIGITS, DEEP, AGAIN = "@digits@", "@deep@", "@again@"  # the last is a prefix: the key is there already

STRINGS = [
    *(
        "",
        " ",
        "\0",
        "\n",
        "\u2028",
        "\ufeff",
        "é" * 300,
        "a\u0301" * 50,
        "\u202e\u200d🙂",
        "../../etc",
        "~",
        "null",
        "true",
    ),
    *("no", "12:30", "1e400", "-0", "[MASK]", "<unk>", "%s%n{0}", "=", "a.b.c", "os:getcwd", "weft:load", "x" * 70_000),
    *("١٢٣", "\x1b[31m", "*", "[", "/dev/zero", "lstm", "bert", "words", "text.txt", "auto", "cuda:7", "\ud800"),
]
INTS = [0, 1, -1, 2, 3, 5, 255, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 10**12, 10**30]
SIZES = [10_000, 20_000, 10**6, 10**8]  # that weights lying beside them contradict
FLOATS = [0.0, -0.0, 0.5, 1e-320, 1e300, -1e300, 1.5, float("nan"), float("inf"), float("-inf")]


def odd_value(rng: Random, sizes: bool = False) -> Any:
    """Return a value that does not belong where it is put."""
    kind = rng.randrange(8)
    if kind <= 1:
        return rng.choice(INTS + SIZES * sizes)
    if kind == 2:
        return rng.choice(FLOATS)
    if kind <= 4:
        return rng.choice(STRINGS)
    if kind == 5:
        return rng.choice([None, True, False])
    if kind == 6:
        return rng.choice([[], {}, [[]], [None], {"": None}, [0] * 3, [1, "a"], {"name": "lm"}, ["a", ["b"]], {"a": 1}])
    return rng.choice([nested(5, True), nested(60, False), nested(150, True), DIGITS, DEEP, DEEP])


def nested(depth: int, lists: bool) -> Any:
    """Return lists or mappings inside each other."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


def places(tree: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """List the containers and keys of a tree; long lists by their first items."""
    found: list[tuple[Any, Any]] = []
    if depth < 8 and isinstance(tree, dict | list):
        keys = list(tree)[:400] if isinstance(tree, dict) else range(min(len(tree), 20))
        for key in keys:
            found.append((tree, key))
            found += places(tree[key], depth + 1)
    return found


def mutate_tree(tree: Any, rng: Random, sizes: bool = False) -> Any:
    """Change one place of a tree."""
    tree = copy.deepcopy(tree)
    all_places = places(tree)
    if not all_places or rng.random() < 0.02:
        return odd_value(rng, sizes)
    holder, key = rng.choice(all_places)
    action = rng.choice(
        ["odd", "odd", "odd", "odd", "drop", "wrap", "retype", "copy", "rename", "again", "extra", "many"]
    )
    if action == "odd":
        holder[key] = odd_value(rng, sizes)
    elif action == "drop":
        del holder[key]
    elif action == "wrap":
        holder[key] = [holder[key]] if rng.random() < 0.5 else {"name": holder[key]}
    elif action == "retype":
        holder[key] = retyped(holder[key], rng)
    elif action == "copy":
        other, name = rng.choice(all_places)
        holder[key] = copy.deepcopy(other[name])
    elif action == "many":
        holder[key] = [holder[key]] * (2 if isinstance(holder[key], list | dict) else rng.choice([2, 1000]))
    elif isinstance(holder, dict):
        names = {
            "rename": str(key) + rng.choice(["s", " ", "\0", "é"]),
            "again": f"{AGAIN}{key}",
            "extra": odd_key(rng),
        }
        holder[names[action]] = odd_value(rng, sizes) if action == "extra" else holder[key]
        if action == "rename":
            del holder[key]
    return tree


def odd_key(rng: Random) -> str:
    """Return a key that does not belong there, or belongs elsewhere."""
    return rng.choice(
        ["", "name", "auto_map", "weights", "vectors", "preset", "__class__", "x" * 500, "é", "train", "0"]
    )


def retyped(value: Any, rng: Random) -> Any:
    """Return the same value as another type."""
    if isinstance(value, bool):
        return rng.choice([int(value), str(value), [value]])
    if isinstance(value, int | float):
        return rng.choice(
            [str(value), float(value), -value, value + 1, value * 1000, [value], bool(value), complex_text(value)]
        )
    if isinstance(value, str):
        return rng.choice(
            [[value], {value: value}, value.upper(), value + " ", value * 2, value.encode().hex(), 1, [*value]]
        )
    return rng.choice([str(value), None, list(value) if value else 0])


def complex_text(value: float) -> str:
    """Return a number as no reader takes it."""
    return f"{value}_000j"


def dump(tree: Any) -> bytes:
    """Return a tree as JSON, which is YAML too; what stands for digits and repeated keys is written out."""
    text = json.dumps(tree, ensure_ascii=False).replace(f'"{DIGITS}"', "9" * 6000)
    text = text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).replace(AGAIN, "")
    return text.encode("utf-8", "surrogatepass")


# Text of YAML that is small and grows, or names what it may not.
BOMBS = [
    "a: &a [x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "a: &a {k1: 1, k2: 2}\nb: &b {<<: [*a, *a, *a, *a, *a, *a]}\nc: &c {<<: [*b, *b, *b, *b, *b, *b, *b]}\n",
    "x: &x [*x]\n",
    "x: !!python/object/apply:os.getcwd []\n",
    "x: !!bool maybe\n",
    "x: !!int [1]\n",
    "x: !!timestamp 2020-99-99\n",
    "x: !!binary '@'\n",
    "x: 0x\n",
    "? [a, b]\n: 1\n",
    "--- 1\n--- 2\n",
    "%YAML 9.9\n---\n",
    "x: " + "[" * 5000 + "\n",
    "x: 2001-01-01\n",
    "<<: 1\n",
    "x: *nowhere\n",
]


def mutate_yaml(text: bytes, rng: Random) -> bytes:
    """Change a YAML file as text."""
    if rng.random() < 0.4:
        bomb = rng.choice(BOMBS)
        inner = "data: {train: [" + "*a, " * 3 + "]}\n" if rng.random() < 0.2 else ""
        indented = "  " + bomb.replace("\n", "\n  ").rstrip(" ") if rng.random() < 0.3 else bomb
        return text + b"\n" + (indented + inner).encode()
    return mutate_text(text, rng)


def mutate_text(data: bytes, rng: Random) -> bytes:
    """Change some lines or characters of a text."""
    lines = data.splitlines(keepends=True) or [b""]
    at = rng.randrange(len(lines))
    action = rng.randrange(10)
    if action == 0:
        lines[at] = lines[at] * rng.choice([2, 3, 50])
    elif action == 1:
        del lines[at]
    elif action == 2:
        cell = rng.choice([*STRINGS, "\t", ",", '"', "'", ";", "\t\t\t", "\r", "\r\n\r\n", " " * 5000])
        cut = rng.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:cut] + cell.encode("utf-8", "surrogatepass") + lines[at][cut:]
    elif action == 3:
        lines.insert(at, lines[rng.randrange(len(lines))])
    elif action == 4:
        rng.shuffle(lines)
    elif action == 5:
        return (
            b"".join(lines)
            .decode("utf-8", "replace")
            .encode(rng.choice(["utf-16", "utf-16-be", "utf-32", "utf-8-sig"]))
        )
    elif action == 6:
        lines[at] = lines[at].replace(
            rng.choice([b" ", b"\t", b"\n", b":", b"{", b'"']), rng.choice([b"", b"\t", b"\0", b"\xff"])
        )
    elif action == 7:
        return b"".join(lines[: at + 1]) * rng.choice([1, 20])
    else:
        return mutate_bytes(data, rng)
    return b"".join(lines)


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Change a file as bytes."""
    at = rng.randrange(len(data) + 1)
    action = rng.randrange(9)
    if action <= 1:
        return data[:at]
    if action == 2:
        return data[:at] + rng.randbytes(rng.choice([1, 8, 500])) + data[at:]
    if action == 3:
        return data[:at] + data[at + rng.choice([1, 8, 500]) :]
    if action == 4:
        return data + data[at:]
    if action == 5:
        return data[:at] + bytes(rng.choice([1, 64, 4096])) + data[at:]
    if action == 6:
        return gzip.compress(data)[: rng.choice([5, 20, 10**9])]
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice([1, 1, 1, 20])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8}


def mutate_tensors(data: bytes, rng: Random) -> bytes:
    """Change a safetensors file: its header as a tree, a tensor's dtype, shape, name or numbers, or its bytes."""
    if len(data) < 8 or rng.random() < 0.15:
        return mutate_bytes(data, rng)
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    names = [name for name in header if name != "__metadata__"] if isinstance(header, dict) else []
    entries = [name for name in names if isinstance(header[name], dict)]
    if not entries or rng.random() < 0.2:
        return pack_tensors(mutate_tree(header, rng, sizes=True), body)
    _mutate_tensor(header, body, rng.choice(entries), rng)
    return pack_tensors(header, body)


def _mutate_tensor(header: dict[str, Any], body: bytearray, name: str, rng: Random) -> None:
    """Change one tensor of a file whose header stays consistent."""
    entry = header[name]
    begin, end = entry["data_offsets"]
    action = rng.choice(["dtype", "shape", "scalar", "drop", "rename", "numbers", "numbers", "swap", "copy", "empty"])
    if action == "dtype":
        entry["dtype"] = rng.choice(list(WIDTHS))
        entry["shape"] = [(end - begin) // WIDTHS[entry["dtype"]]] if rng.random() < 0.5 else entry["shape"]
    elif action == "shape":
        shape = entry["shape"]
        entry["shape"] = rng.choice(
            [shape[::-1], [*shape, 1], [1, *shape], shape[1:], [int(size) * 2 for size in shape]]
        )
    elif action == "scalar":
        entry |= {"shape": [], "data_offsets": [begin, begin + WIDTHS[entry["dtype"]]]}
    elif action == "empty":
        entry |= {"shape": [0], "data_offsets": [begin, begin]}
    elif action == "drop":
        del header[name]
    elif action == "rename":
        header[name + rng.choice(["x", ".weight", "\0"])] = header.pop(name)
    elif action == "numbers":
        number = rng.choice([float("nan"), float("inf"), -float("inf"), 3e38, 1e-45, 0.0])
        words = (
            struct.pack("<f", number) if rng.random() < 0.7 else rng.choice([b"\xff" * 4, b"\x80\0\0\0", b"\0\0\0\x7f"])
        )
        count = (end - begin) // 4
        places_ = range(count) if rng.random() < 0.5 else [rng.randrange(max(count, 1))]
        for at in places_:
            body[begin + 4 * at : min(begin + 4 * at + 4, end)] = words[: end - begin - 4 * at]
    else:
        other = rng.choice([key for key in header if key != "__metadata__"])
        header[name], header[other] = (header[other], entry) if action == "swap" else (entry, dict(entry))


def pack_tensors(header: Any, body: bytes | bytearray) -> bytes:
    """Return a safetensors file; where tensors were left out, cut or doubled, the bytes are laid out anew."""
    if isinstance(header, dict) and all(isinstance(entry, dict) for entry in header.values()):
        header, body = _repack(header, bytes(body))
    text = dump(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def _repack(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Lay tensors end to end, as the format asks for; a header that cannot be is left as it is."""
    entries, pieces, place = {}, [], 0
    for name, entry in header.items():
        if name == "__metadata__":
            entries[name] = entry
            continue
        offsets = entry.get("data_offsets")
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(at) is int for at in offsets)):
            return header, body
        piece = body[max(offsets[0], 0) : max(offsets[1], 0)]
        if len(piece) != offsets[1] - offsets[0]:
            return header, body
        entries[name] = {**entry, "data_offsets": [place, place + len(piece)]}
        place += len(piece)
        pieces.append(piece)
    return entries, b"".join(pieces)


Special = str  # what a path is in place of a file: "directory", "loop", "fifo", "zero"
Content = bytes | Special
SPECIAL: list[Special] = ["directory", "loop", "fifo", "zero"]


def mutate_file(name: str, data: bytes, rng: Random, sizes: bool) -> Content | None:
    """Return the changed content of a file; None: it is not there. With `sizes`, numbers may ask for gigabytes."""
    if rng.random() < 0.04:
        return rng.choice([None, b"", *SPECIAL])
    if name.endswith(".safetensors"):
        with suppress(ValueError, TypeError, KeyError, IndexError, RecursionError):  # it was changed before
            return mutate_tensors(data, rng)
        return mutate_bytes(data, rng)
    if name.endswith((".json", ".yaml", ".jsonl")) and rng.random() < 0.75:
        with suppress(ValueError, TypeError, IndexError, RecursionError, yaml.YAMLError):  # it was changed before
            if name.endswith(".jsonl"):
                return _mutate_row(data, rng)
            tree = yaml.safe_load(data) if name.endswith(".yaml") else json.loads(data)
            return dump(mutate_tree(tree, rng, sizes))
    return mutate_yaml(data, rng) if name.endswith(".yaml") else mutate_text(data, rng)


def _mutate_row(data: bytes, rng: Random) -> bytes:
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = dump(mutate_tree(json.loads(lines[at]), rng))
    return b"\n".join(lines) + b"\n"
