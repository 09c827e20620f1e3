"""The wheel, installed with what it declares and nothing else: it holds all that it needs, and the README's tour works.

No package is downloaded: of the distributions that are installed for the tests, the environment sees those that the
wheel requires without extras, directly or not. An import that is not declared fails in it, as it would for a user.
"""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.test_docs import ROOT, read_blocks, read_commands, shorten
from tests.test_layering import SOURCE

BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
TOUR = Path(__file__).with_name("tour.py")
OPTIONAL = [
    *("ctranslate2", "fastapi", "gensim", "h5py", "httpx", "matplotlib", "onnx", "onnxruntime", "openai", "pandas"),
    *("prometheus_client", "pyarrow", "pytest", "tensorboard", "transformers", "uvicorn"),
]


def build(kind, source, into):
    """Call a hook of the build backend, `build_wheel` or `build_sdist`; return the file it writes."""
    command = [sys.executable, "-c", BUILD, kind, str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return into / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("build_wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def contents(path):
    """Return the names and checksums of the files of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def requirements(lines):
    """Return the requirements that hold here without extras, and then those of each of them."""
    needed, waiting = set(), [(Requirement(line), "") for line in lines]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (name := (canonicalize_name(requirement.name), wanted)) not in needed:
                needed.add(name)
                waiting += [(Requirement(line), wanted) for line in distribution(name[0]).requires or []]
    return {name for name, _ in needed}


def link(name, site):
    """Let a folder of packages have a distribution of this environment."""
    found = distribution(name)
    for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(found.locate_file(top))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Return the interpreter of an environment that has the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (metadata,) = site.glob("weft-*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    for name in requirements(
        line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist")
    ):
        link(name, site)
    return folder / "bin" / "python"


def run(python, *arguments, folder, given=""):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [python, "-I", *arguments]  # without PYTHONPATH and the packages of the user
    return subprocess.run(
        command, input=given, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


# What is in the files.


def test_the_wheel_has_every_file_of_the_package(wheel):
    files = {path.relative_to(SOURCE.parent).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert {name for name in contents(wheel) if ".dist-info/" not in name} == files
    assert {"weft/py.typed", "weft/recipes/dates.yaml", "weft/presets/bert-base.yaml"} <= files
    assert {"weft/analysis/render/assets/page.css", "weft/analysis/render/assets/page.js"} <= files


@pytest.fixture
def source(tmp_path):
    """Return the folder of an unpacked source distribution."""
    with tarfile.open(build("build_sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    return next(path for path in tmp_path.iterdir() if path.is_dir())


def test_a_wheel_from_the_source_distribution_is_the_same(wheel, source, tmp_path):
    assert contents(build("build_wheel", source, tmp_path)) == contents(wheel)
    (source / "src/weft/analysis/render/assets/page.css").unlink()
    shutil.rmtree(source / "src/weft/zoo")  # nor are the models there, which take long to compress
    gone = set(contents(wheel)) - set(contents(build("build_wheel", source, tmp_path)))
    assert {name for name in gone if not name.startswith("weft/zoo/")} == {"weft/analysis/render/assets/page.css"}
    assert len(gone) > 1


# What it does.


def tour():
    """Return the steps of the README, with small budgets; write its files to the current folder."""
    steps = []
    for block in read_blocks((ROOT / "README.md").read_text(encoding="utf-8")):
        if name := block.marks.get("file"):
            Path(name).write_text(block.text, encoding="utf-8")
        if block.language == "python" and not block.skipped:
            steps.append([None, block.text])
        if block.language == "console" and not block.skipped:
            steps += [[0, shorten(shlex.split(line), block.quick)] for line, _ in read_commands(block.text)]
    return steps


def test_the_tour_works_with_what_the_wheel_requires(python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture = [2, ["weft", "look", "dates", "May 1, 1990", "-o", "look.png"]]
    graph = [2, ["weft", "convert", "encoder-en", "encoder.onnx"]]
    done = run(python, TOUR, folder=tmp_path, given=json.dumps([*tour(), graph, picture]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error: an .onnx needs onnx, which is not installed: pip install 'weft[onnx]'\n" in done.stderr
    assert done.stderr.endswith("error: a .png needs matplotlib, which is not installed: pip install 'weft[plot]'\n")
    assert (tmp_path / "compared" / "report.html").is_file()


def test_what_is_not_declared_cannot_be_imported(python, tmp_path):
    code = "import sys; from importlib.util import find_spec; print(*filter(find_spec, sys.argv[1:]))"
    done = run(python, "-c", code, *OPTIONAL, "torch", "sklearn", "weft", folder=tmp_path)
    assert done.stdout.split() == ["torch", "sklearn", "weft"]
    assert find_spec("matplotlib"), "it could be imported here"
    done = run(python, TOUR, folder=tmp_path, given=json.dumps([[None, "import matplotlib"]]))
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'matplotlib'\n")


def test_the_tour_has_no_network(python, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        socket.create_connection(server.getsockname()).close()  # it could be reached from here
        done = run(python, TOUR, folder=tmp_path, given=json.dumps([[None, code]]))
    assert done.returncode == 1
    assert done.stderr.endswith("PermissionError: the tour needs no network\n")
