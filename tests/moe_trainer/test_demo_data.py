"""The demo's text: four sources, large enough, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_audit.thresholds.errors import UsageError
from moe_trainer import demo_data
from moe_trainer.data import read_corpus
from moe_trainer.demo_data import MIN_SOURCE_BYTES, write_demo


def test_demo_text_is_large_enough_even_and_the_same_every_time(tmp_path: Path) -> None:
    sizes = write_demo(tmp_path / "a")
    assert list(sizes) == ["code", "prose", "headers", "docstrings"]
    assert min(sizes.values()) >= MIN_SOURCE_BYTES and max(sizes.values()) < 1.1 * min(sizes.values())
    assert write_demo(tmp_path / "b") == sizes
    files = [sorted((tmp_path / run).rglob("*.*")) for run in "ab"]
    assert [p.relative_to(tmp_path / "a") for p in files[0]] == [
        p.relative_to(tmp_path / "b") for p in files[1]
    ]
    assert all(x.read_bytes() == y.read_bytes() for x, y in zip(*files))
    on_disk = {s: sum(p.stat().st_size for p in (tmp_path / "a" / s).iterdir()) for s in sizes}
    assert on_disk == sizes
    corpus = read_corpus({s: str(tmp_path / "a" / s) for s in sizes}, 1024)
    assert all(tokens > size for tokens, size in zip(corpus.source_tokens().values(), sizes.values()))


def test_a_source_that_is_too_small_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_data, "demo_sources", lambda: {"poems": [("a.txt", "x" * 1000)]})
    with pytest.raises(UsageError, match=r"demo source 'poems' has 1,000 bytes.*300,000 are needed"):
        write_demo(tmp_path / "text")
    assert not (tmp_path / "text").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="exists and is not empty"):
        write_demo(tmp_path)
