"""Real text that is on every machine that can run the trainer: four sources for the demo.

code        Python source of the standard library
prose       English reference prose of `pydoc_data.topics`
headers     C++ headers that ship inside torch
docstrings  documentation strings of pandas (English and numpydoc tables)
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from moe_audit.thresholds.errors import UsageError

MIN_SOURCE_BYTES = 300_000
SOURCE_BYTES = 450_000  # of each source: equal shares, and just below what the prose holds
MAX_FILE_BYTES = 40_000  # no single file rules its source
# Installed packages, tests, generated tables, and the prose that is a source of its own.
_NOT_CODE = ("site-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data")

Document = tuple[str, str]  # file name, text


def write_demo(folder: Path) -> dict[str, int]:
    """Write the four sources as folders of text files below `folder`.

    Returns:
        bytes written per source.

    Raises:
        UsageError: `folder` exists and is not empty, or a source is too small on this machine.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty", "give a new folder with -o")
    chosen = {source: list(_take(documents)) for source, documents in demo_sources().items()}
    sizes = {source: sum(len(text.encode()) for _, text in documents) for source, documents in chosen.items()}
    for source, size in sizes.items():
        if size < MIN_SOURCE_BYTES:
            raise UsageError(
                f"demo source '{source}' has {size:,} bytes of text on this machine, "
                f"{MIN_SOURCE_BYTES:,} are needed",
                "install the full Python standard library, torch and pandas, or train on your own "
                "folders with data.sources",
            )
    for source, documents in chosen.items():
        (folder / source).mkdir(parents=True)
        for number, (name, text) in enumerate(documents):
            (folder / source / f"{number:04d}_{name}").write_bytes(text.encode())
    return sizes


def demo_sources() -> dict[str, Iterable[Document]]:
    """The four sources, each a lazy sequence of (file name, text) in a fixed order."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    return {
        "code": _files(stdlib, "*.py", without=_NOT_CODE),
        "prose": _topics(),
        "headers": _files(_package("torch") / "include", "*.h"),
        "docstrings": _docstrings(_package("pandas")),
    }


def _take(documents: Iterable[Document]) -> Iterator[Document]:
    taken = 0
    for name, text in documents:
        size = len(text.encode())
        if 200 <= size <= MAX_FILE_BYTES:
            yield name, text
            taken += size
        if taken >= SOURCE_BYTES:
            return


def _files(root: Path, pattern: str, without: tuple[str, ...] = ()) -> Iterator[Document]:
    for path in _spread(root, pattern):
        if not set(path.relative_to(root).parts[:-1]) & set(without):
            yield path.name, path.read_text(encoding="utf-8", errors="replace")


def _spread(root: Path, pattern: str) -> list[Path]:
    """Files below `root`, in a fixed order that does not take one sub-folder after the other."""
    return sorted(
        root.rglob(pattern),
        key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest(),
    )


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        # Long topics in parts, so that no size limit cuts them off.
        for part, at in enumerate(range(0, len(text), MAX_FILE_BYTES // 4)):
            yield f"{name}_{part}.txt", text[at : at + MAX_FILE_BYTES // 4]


def _docstrings(root: Path) -> Iterator[Document]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in _spread(root, "*.py"):
        if "tests" in path.parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        text = "\n\n\n".join(doc for doc in found if doc)
        for part, at in enumerate(range(0, len(text), MAX_FILE_BYTES // 4)):
            yield f"{path.stem}_{part}.txt", text[at : at + MAX_FILE_BYTES // 4]


def _package(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise UsageError(f"the demo text needs the package {name}", f"pip install {name}")
    return Path(spec.origin).parent
