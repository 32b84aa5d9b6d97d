"""Text with sources: folders of documents -> packed token sequences that know where each token came from.

Every document belongs to one source. The documents of a source are cut into shards, the order of the
shards makes the token stream of an epoch, and the stream is cut into sequences of equal length. The
stream is endless and every position in it is a pure function of (seed, position), so the loader's
whole state is one integer and a resumed run sees exactly the tokens it would have seen.

Shapes: B sequences of a micro-batch, S tokens of a sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_audit.thresholds.errors import UsageError

SEPARATOR = 256  # opens every document; the other tokens are the bytes 0 to 255
VOCAB_SIZE = 257

ShardOrder = Literal["interleaved", "round_robin", "sequential"]
ShuffleGrain = Literal["document", "shard", "none"]

IntArray = NDArray[np.int64]


def encode(text: str) -> NDArray[np.uint16]:
    """Byte-level tokens of one document: the separator, then the UTF-8 bytes."""
    raw = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    tokens = np.empty(len(raw) + 1, dtype=np.uint16)
    tokens[0] = SEPARATOR
    tokens[1:] = raw
    return tokens


def decode(tokens: Sequence[int]) -> str:
    """Text of byte-level tokens; separators are left out, broken UTF-8 is replaced."""
    return bytes(t for t in tokens if t < SEPARATOR).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Corpus:
    """All documents of a run in one array.

    Attributes:
        tokens: every document's tokens, one after the other (uint16).
        starts: first token of each document, and the total at the end, [documents + 1].
        document_source: source id of each document, [documents].
        sources: source names; a source id is an index into this list.
    """

    tokens: NDArray[np.uint16]
    starts: IntArray
    document_source: IntArray
    sources: list[str]

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.starts)

    def source_tokens(self) -> dict[str, int]:
        """Tokens of each source, separators included."""
        totals = np.bincount(self.document_source, weights=self.lengths, minlength=len(self.sources))
        return {name: int(total) for name, total in zip(self.sources, totals)}

    def fingerprint(self) -> str:
        """Hash of content and sources: a resumed run must read the same text."""
        digest = hashlib.sha256("\0".join(self.sources).encode())
        for array in (self.tokens, self.starts, self.document_source):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]


def build_corpus(documents: dict[str, list[str]], max_document_bytes: int) -> Corpus:
    """Tokenise documents by source; text longer than `max_document_bytes` becomes several documents.

    Long files are cut because one file of 200 KB would otherwise hold a whole batch for many steps
    and no shuffling of documents could undo it.
    """
    pieces: list[NDArray[np.uint16]] = []
    owner: list[int] = []
    for source, texts in enumerate(documents.values()):
        for text in texts:
            tokens = encode(text)
            body = tokens[1:]
            for at in range(0, len(body), max_document_bytes):
                pieces += [tokens[:1], body[at : at + max_document_bytes]]
                owner.append(source)
    joined = [np.concatenate(pieces[i : i + 2]) for i in range(0, len(pieces), 2)]
    lengths = np.array([len(piece) for piece in joined], dtype=np.int64)
    return Corpus(
        tokens=np.concatenate(joined) if joined else np.zeros(0, np.uint16),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        document_source=np.array(owner, dtype=np.int64),
        sources=list(documents),
    )


def read_corpus(folders: dict[str, str], max_document_bytes: int) -> Corpus:
    """Read one folder of text files per source, files in the order of their paths.

    Raises:
        UsageError: no source is given, or a folder is missing or holds no text.
    """
    if not folders:
        raise UsageError("data.sources is empty", "name at least one folder of text: data.sources.prose=DIR")
    documents = {source: list(_read_texts(source, Path(path))) for source, path in folders.items()}
    return build_corpus(documents, max_document_bytes)


def _read_texts(source: str, folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        raise UsageError(
            f"data.sources.{source}: no such folder: {folder}",
            "give an existing folder of text files, or write one with: moe-train prepare demo -o DIR",
        )
    found = False
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        text = path.read_bytes().decode("utf-8", errors="replace")
        if text:
            found = True
            yield text
    if not found:
        raise UsageError(
            f"data.sources.{source}: no text in {folder}",
            "put at least one non-empty text file into it, or remove the source",
        )


def cut_shards(lengths: IntArray, shard_tokens: int) -> IntArray:
    """Shard number of each document: a shard closes with the document that fills `shard_tokens`."""
    shards = np.zeros(len(lengths), dtype=np.int64)
    shard, filled = 0, 0
    for i, length in enumerate(lengths):
        shards[i] = shard
        filled += int(length)
        if filled >= shard_tokens:
            shard, filled = shard + 1, 0
    return shards


def epoch_order(
    corpus: Corpus,
    *,
    shard_tokens: int,
    shard_order: ShardOrder,
    shuffle: ShuffleGrain,
    rng: np.random.Generator,
) -> IntArray:
    """Order of the documents in one epoch; every document exactly once.

    `shuffle` is the grain: `document` mixes the documents of a source before they are cut into
    shards, `shard` keeps the documents of a shard together and mixes the shards of a source, `none`
    keeps the order of the files. `shard_order` says how the sources take turns: `interleaved` (all
    sources at once, each in proportion to its size), `round_robin` (one shard of each source in
    turn) or `sequential` (one source after the other).
    """
    lengths = corpus.lengths
    documents: list[IntArray] = []
    keys: list[NDArray[np.float64]] = []
    for source in range(len(corpus.sources)):
        own = np.flatnonzero(corpus.document_source == source)
        if shuffle == "document":
            own = rng.permutation(own)
        shards = cut_shards(lengths[own], shard_tokens)
        if shuffle == "shard":
            # Renumber the shards at random, then bring the documents into that order.
            shards = rng.permutation(int(shards[-1]) + 1)[shards]
            by_shard = np.argsort(shards, kind="stable")
            own, shards = own[by_shard], shards[by_shard]
        if shard_order == "interleaved":
            ends = np.cumsum(lengths[own])
            key = (ends - lengths[own] / 2) / ends[-1]
        elif shard_order == "round_robin":
            key = shards.astype(np.float64)
        else:
            key = np.full(len(own), float(source))
        documents.append(own)
        keys.append(key)
    # Stable, so that ties keep the order of the sources, then the order within the source.
    return np.concatenate(documents)[np.argsort(np.concatenate(keys), kind="stable")]


def shard_cycle_steps(
    corpus: Corpus,
    *,
    shard_tokens: int,
    shard_order: ShardOrder,
    shuffle: ShuffleGrain,
    tokens_per_step: int,
) -> int | None:
    """Optimizer steps until the mix of text has gone once through its swing; None without a swing.

    `round_robin`: one shard of every source. `sequential`: the whole epoch. `interleaved` with whole
    shards: one shard of the source that takes longest, all sources being open at once. `interleaved`
    with shuffled documents mixes at the grain of a document and has no cycle.
    """
    if shard_order == "interleaved" and shuffle == "document":
        return None
    totals = np.array(list(corpus.source_tokens().values()), dtype=np.float64)
    sizes = np.array([_shard_size(lengths, shard_tokens) for lengths in _lengths_by_source(corpus)])
    if shard_order == "sequential":
        tokens = totals.sum()
    elif shard_order == "round_robin":
        tokens = sizes.sum()
    else:
        tokens = (sizes * totals.sum() / totals).max()
    return max(1, round(float(tokens) / tokens_per_step))


def _lengths_by_source(corpus: Corpus) -> list[IntArray]:
    return [corpus.lengths[corpus.document_source == s] for s in range(len(corpus.sources))]


def _shard_size(lengths: IntArray, shard_tokens: int) -> float:
    """Mean tokens of a shard: whole documents, so a little over `shard_tokens`; a short last one aside."""
    sizes = np.bincount(cut_shards(lengths, shard_tokens), weights=lengths)
    return float(sizes[:-1].mean() if len(sizes) > 1 else sizes[0])


@dataclass(frozen=True)
class Batch:
    """One micro-batch: inputs, the token that follows each of them, and each input's source id."""

    inputs_BS: IntArray
    targets_BS: IntArray
    sources_BS: IntArray


class TokenStream:
    """The endless stream of packed tokens; `next_batch` moves on, `state` is where it stands."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence_length: int,
        shard_tokens: int,
        shard_order: ShardOrder,
        shuffle: ShuffleGrain,
        seed: int,
    ) -> None:
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.shard_tokens = shard_tokens
        self.shard_order = shard_order
        self.shuffle = shuffle
        self.seed = seed
        self.position = 0  # tokens handed out since the start of the run
        self._fingerprint = corpus.fingerprint()
        self._epoch_cache: tuple[int, NDArray[np.uint16], NDArray[np.int16]] | None = None

    def next_batch(self, sequences: int, *, rank: int = 0, world_size: int = 1) -> Batch:
        """The next `sequences` sequences of this rank; all ranks together take neighbouring ones."""
        length = self.sequence_length
        start = self.position + rank * sequences * length
        tokens, sources = self._read(start, sequences * length + 1)
        self.position += world_size * sequences * length
        return Batch(
            inputs_BS=tokens[:-1].reshape(sequences, length),
            targets_BS=tokens[1:].reshape(sequences, length),
            sources_BS=sources[:-1].reshape(sequences, length),
        )

    def state_dict(self) -> dict[str, int | str]:
        return {"position": self.position, "corpus": self._fingerprint}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Stand where the saved run stood.

        Raises:
            UsageError: the text is not the text that the saved run read.
        """
        if state["corpus"] != self._fingerprint:
            raise UsageError(
                "the training text differs from the text of the saved run",
                "restore the folders of data.sources, or start a new run",
            )
        self.position = int(state["position"])

    def _read(self, start: int, count: int) -> tuple[IntArray, IntArray]:
        per_epoch = len(self.corpus.tokens)
        tokens: list[NDArray[np.uint16]] = []
        sources: list[NDArray[np.int16]] = []
        while count > 0:
            epoch, offset = divmod(start, per_epoch)
            epoch_tokens, epoch_sources = self._epoch(epoch)
            taken = min(count, per_epoch - offset)
            tokens.append(epoch_tokens[offset : offset + taken])
            sources.append(epoch_sources[offset : offset + taken])
            start, count = start + taken, count - taken
        return np.concatenate(tokens).astype(np.int64), np.concatenate(sources).astype(np.int64)

    def _epoch(self, epoch: int) -> tuple[NDArray[np.uint16], NDArray[np.int16]]:
        if self._epoch_cache is None or self._epoch_cache[0] != epoch:
            order = epoch_order(
                self.corpus,
                shard_tokens=self.shard_tokens,
                shard_order=self.shard_order,
                shuffle=self.shuffle,
                rng=np.random.default_rng([self.seed, epoch]),
            )
            starts, lengths = self.corpus.starts[order], self.corpus.lengths[order]
            # Token i of the epoch sits at (start of its document) + (i - start of that document here).
            here = np.cumsum(lengths) - lengths
            index = np.repeat(starts - here, lengths) + np.arange(int(lengths.sum()))
            owner = np.repeat(self.corpus.document_source[order], lengths)
            self._epoch_cache = (epoch, self.corpus.tokens[index], owner.astype(np.int16))
        return self._epoch_cache[1], self._epoch_cache[2]
