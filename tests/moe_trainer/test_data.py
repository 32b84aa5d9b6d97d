"""Packing: nothing is lost, nothing is doubled, every token keeps its source."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_audit.thresholds.errors import UsageError
from moe_trainer.data import (
    SEPARATOR,
    Batch,
    Corpus,
    ShardOrder,
    ShuffleGrain,
    TokenStream,
    build_corpus,
    decode,
    encode,
    read_corpus,
    shard_cycle_steps,
)

ORDERS: tuple[ShardOrder, ...] = get_args(ShardOrder)
GRAINS: tuple[ShuffleGrain, ...] = get_args(ShuffleGrain)


def stream_of(
    corpus: Corpus,
    length: int = 4,
    shard_tokens: int = 20,
    order: ShardOrder = "interleaved",
    shuffle: ShuffleGrain = "document",
    seed: int = 0,
) -> TokenStream:
    return TokenStream(
        corpus,
        sequence_length=length,
        shard_tokens=shard_tokens,
        shard_order=order,
        shuffle=shuffle,
        seed=seed,
    )


def source_shares(stream: TokenStream, steps: int, sequences: int) -> np.ndarray:
    """Share of each source in each of `steps` batches, [steps, sources]."""
    batches = [stream.next_batch(sequences).sources_BS for _ in range(steps)]
    number = len(stream.corpus.sources)
    return np.array([np.bincount(b.ravel(), minlength=number) / b.size for b in batches])


# Every source writes with letters of its own, so that a token tells which source it must have.
alphabets = ["abcdef", "uvwxyz", "012345"]
corpora = st.tuples(
    *(st.lists(st.text(letters, min_size=1, max_size=60), min_size=1, max_size=6) for letters in alphabets)
).map(lambda texts: build_corpus(dict(zip(["s0", "s1", "s2"], texts)), max_document_bytes=25))


@settings(max_examples=60, deadline=None)
@given(
    corpus=corpora,
    length=st.integers(1, 9),
    sequences=st.integers(1, 4),
    shard_tokens=st.integers(1, 200),
    order=st.sampled_from(ORDERS),
    shuffle=st.sampled_from(GRAINS),
    seed=st.integers(0, 2**31),
)
def test_every_token_once_per_epoch_and_its_source_beside_it(
    corpus: Corpus,
    length: int,
    sequences: int,
    shard_tokens: int,
    order: ShardOrder,
    shuffle: ShuffleGrain,
    seed: int,
) -> None:
    epoch = len(corpus.tokens)
    stream = stream_of(corpus, length, shard_tokens, order, shuffle, seed)
    batches: list[Batch] = []
    while stream.position < 2 * epoch + 1:
        batches.append(stream.next_batch(sequences))
    inputs = np.concatenate([b.inputs_BS.ravel() for b in batches])
    targets = np.concatenate([b.targets_BS.ravel() for b in batches])
    sources = np.concatenate([b.sources_BS.ravel() for b in batches])
    assert all(b.inputs_BS.shape == b.sources_BS.shape == (sequences, length) for b in batches)
    # The target of every token is the next input, across sequences, batches and epochs.
    np.testing.assert_array_equal(targets[:-1], inputs[1:])
    for start in (0, epoch):
        np.testing.assert_array_equal(
            np.sort(inputs[start : start + epoch]), np.sort(corpus.tokens.astype(np.int64))
        )
    for source, letters in enumerate(alphabets):
        is_letter = np.isin(inputs, np.frombuffer(letters.encode(), np.uint8))
        assert (sources[is_letter] == source).all()
    # A separator belongs to the document that it opens.
    opening = np.flatnonzero(inputs[:-1] == SEPARATOR)
    np.testing.assert_array_equal(sources[opening], sources[opening + 1])


@settings(max_examples=30, deadline=None)
@given(corpus=corpora, world_size=st.integers(1, 4), steps=st.integers(1, 5), resume_at=st.integers(0, 4))
def test_ranks_share_the_stream_and_a_resumed_stream_goes_on(
    corpus: Corpus, world_size: int, steps: int, resume_at: int
) -> None:
    whole = stream_of(corpus)
    ranks = [stream_of(corpus) for _ in range(world_size)]
    for step in range(steps):
        if step == resume_at:
            fresh = [stream_of(corpus) for _ in ranks]
            for new, old in zip(fresh, ranks):
                new.load_state_dict(old.state_dict())
            ranks = fresh
        expected = whole.next_batch(2 * world_size)
        parts = [s.next_batch(2, rank=r, world_size=world_size) for r, s in enumerate(ranks)]
        np.testing.assert_array_equal(np.concatenate([p.inputs_BS for p in parts]), expected.inputs_BS)
        np.testing.assert_array_equal(np.concatenate([p.sources_BS for p in parts]), expected.sources_BS)


def test_other_text_is_refused_on_resume() -> None:
    state = stream_of(build_corpus({"a": ["one"]}, 10)).state_dict()
    with pytest.raises(UsageError, match="differs"):
        stream_of(build_corpus({"a": ["two"]}, 10)).load_state_dict(state)


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    clean = text.encode("utf-8", "ignore").decode()
    assert decode(encode(clean).tolist()) == clean


def equal_sources(number: int, documents: int, size: int) -> Corpus:
    """`documents` documents of `size` tokens (separator included) in each source."""
    return build_corpus(
        {f"s{i}": [chr(97 + i) * (size - 1)] * documents for i in range(number)}, max_document_bytes=size
    )


@pytest.mark.parametrize("shuffle", GRAINS)
def test_round_robin_swings_with_the_cycle_it_announces(shuffle: ShuffleGrain) -> None:
    corpus = equal_sources(number=4, documents=30, size=64)
    steps_per_shard, tokens_per_step = 5, 128
    shard_tokens = steps_per_shard * tokens_per_step
    cycle = shard_cycle_steps(
        corpus,
        shard_tokens=shard_tokens,
        shard_order="round_robin",
        shuffle=shuffle,
        tokens_per_step=tokens_per_step,
    )
    assert cycle == 4 * steps_per_shard
    stream = stream_of(corpus, 32, shard_tokens, "round_robin", shuffle)
    shares = source_shares(stream, 2 * cycle, sequences=4)
    np.testing.assert_array_equal(shares[:cycle], shares[cycle:])  # the swing repeats
    assert (shares.max(axis=1) == 1).all()  # one source at a time
    np.testing.assert_array_equal(shares[:steps_per_shard, 0], np.ones(steps_per_shard))


def test_the_cycle_counts_that_shards_hold_whole_documents() -> None:
    corpus = equal_sources(number=2, documents=90, size=30)
    cycle = shard_cycle_steps(
        corpus, shard_tokens=100, shard_order="round_robin", shuffle="none", tokens_per_step=10
    )
    assert cycle == 2 * 120 / 10  # 4 documents of 30 tokens fill a shard of 100


def test_interleaved_sources_are_even_in_every_step_and_have_no_cycle() -> None:
    corpus = equal_sources(number=4, documents=64, size=16)
    shares = source_shares(stream_of(corpus, 16, 256), steps=16, sequences=16)
    assert abs(shares - 0.25).max() <= 1 / 16
    settings_ = {"shard_tokens": 256, "tokens_per_step": 256}
    assert shard_cycle_steps(corpus, shard_order="interleaved", shuffle="document", **settings_) is None
    # Whole shards, all sources open: a shard of 256 tokens lasts 4 steps at a quarter of the tokens.
    assert shard_cycle_steps(corpus, shard_order="interleaved", shuffle="shard", **settings_) == 4
    assert shard_cycle_steps(corpus, shard_order="sequential", shuffle="document", **settings_) == 16


def test_interleaved_keeps_the_proportion_of_unequal_sources() -> None:
    corpus = build_corpus({"big": ["b" * 15] * 90, "small": ["s" * 15] * 30}, 100)
    shares = source_shares(stream_of(corpus, 16, 256), steps=7, sequences=16)
    assert abs(shares[:, 1] - 0.25).max() <= 1 / 16


def test_the_grain_decides_what_is_shuffled() -> None:
    corpus = build_corpus({"a": [chr(65 + i) * 9 for i in range(40)]}, 100)

    def first_letters(shuffle: ShuffleGrain, seed: int) -> list[int]:
        stream = stream_of(corpus, 400, 50, "sequential", shuffle, seed)
        tokens = stream.next_batch(1).inputs_BS[0]
        return (tokens[np.flatnonzero(tokens == SEPARATOR) + 1] - 65).tolist()

    assert first_letters("none", 1) == list(range(40))
    assert first_letters("document", 1) == first_letters("document", 1) != first_letters("document", 2)
    by_shard = np.array(first_letters("shard", 1)).reshape(8, 5)  # 5 documents fill a shard
    assert (np.diff(by_shard, axis=1) == 1).all() and not (np.diff(by_shard[:, 0]) == 5).all()


def test_long_files_become_several_documents() -> None:
    corpus = build_corpus({"a": ["x" * 25], "b": ["é" * 3]}, max_document_bytes=10)
    assert corpus.lengths.tolist() == [11, 11, 6, 7]
    assert corpus.document_source.tolist() == [0, 0, 0, 1]
    assert corpus.source_tokens() == {"a": 28, "b": 7}
    assert (corpus.tokens[corpus.starts[:-1]] == SEPARATOR).all()


def test_folders_without_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "nothing.txt").write_text("")
    with pytest.raises(UsageError, match=r"data\.sources\.a: no such folder"):
        read_corpus({"a": str(tmp_path / "absent")}, 10)
    with pytest.raises(UsageError, match=r"data\.sources\.b: no text in"):
        read_corpus({"b": str(tmp_path / "empty")}, 10)
    with pytest.raises(UsageError, match=r"data\.sources is empty"):
        read_corpus({}, 10)


def test_folders_are_read_in_order_and_bad_bytes_do_not_stop_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_bytes(b"two\xff")
    (tmp_path / "a.txt").write_bytes(b"one")
    corpus = read_corpus({"s": str(tmp_path)}, 100)
    assert decode(corpus.tokens.tolist()) == "onetwo�"
