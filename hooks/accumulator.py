"""All accumulators of one phase (train, eval).

Shape suffixes: see `counters.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_audit.hooks.adapters.base import Observation
from moe_audit.hooks.counters import Bank
from moe_audit.hooks.labels import Labels
from moe_audit.store import LayerInfo
from moe_audit.thresholds.errors import UsageError


class Accumulator:
    """The counts of one phase since the last record.

    Args:
        layers: This rank's layers.
        devices: Where each layer's router runs.
        num_rows: Sources, and one row each for unlabelled and excluded tokens.
    """

    def __init__(self, layers: Sequence[LayerInfo], devices: Sequence[torch.device], num_rows: int) -> None:
        self.layers = layers
        self.num_rows = num_rows
        members: dict[tuple[int, torch.device], list[int]] = {}
        for i, (info, device) in enumerate(zip(layers, devices, strict=True)):
            members.setdefault((info.num_experts, device), []).append(i)
        self.banks: list[Bank] = []
        self.place: dict[int, tuple[Bank, int]] = {}
        for (num_experts, device), indices in members.items():
            bank = Bank([layers[i].top_k for i in indices], num_experts, num_rows, device)
            self.banks.append(bank)
            self.place.update({i: (bank, j) for j, i in enumerate(indices)})
        # Of the record: micro-batches, those with a mask, picks of the busiest layer (known to the host), and
        # per row how often the first layer saw tokens again.
        self.microbatches = self.masked = self.most_picks = 0
        self.repeated_R = torch.zeros(num_rows, dtype=torch.int64, device=self.place[0][0].device)
        self._calls = [0] * len(layers)
        self._picks = [0] * len(layers)
        self._usual_picks = 0
        self.dirty = False

    def seen(self) -> Tensor:
        """int64 [R]: the tokens of the record, each once per micro-batch."""
        bank, j = self.place[0]
        return bank.tokens(j) - self.repeated_R

    def observe(self, i: int, seen: Observation, labels: Labels) -> None:
        """Counts one forward of layer i into the open micro-batch."""
        bank, j = self.place[i]
        self.dirty = True
        self._calls[i] += 1
        self._picks[i] += seen.indices_TK.numel()
        bank.observe(j, seen, labels, self.layers[i].gating)

    def follow(self, i: int, device: torch.device) -> None:
        """Moves the accumulators of layer i to where its router runs now."""
        bank, _ = self.place[i]
        if bank.device != device:
            bank.move(device)
            self.repeated_R = self.repeated_R.to(self.place[0][0].device)

    def fired(self, i: int) -> bool:
        """Whether layer i has counts. Waits for the device."""
        bank, j = self.place[i]
        bank.join()
        return bool(bank.total_ints[j].any() or bank.open_tokens(j).any())

    def end_chunk(self, i: int) -> None:
        """Layer i begins the next chunk of a pipeline schedule: the one before was a micro-batch."""
        bank, j = self.place[i]
        bank.fold(j)

    def commit(self, microbatches: int, masked: bool, only: int | None = None) -> None:
        """The open micro-batch (or what layer `only` has of it) joins the record."""
        if only in (None, 0):
            # A layer called several times per micro-batch saw its tokens several times.
            repeats = max(1, self._calls[0] // microbatches)
            if repeats > 1:
                bank, j = self.place[0]
                tokens_R = bank.open_tokens(j)
                self.repeated_R.add_(tokens_R - tokens_R // repeats)
            self.microbatches += microbatches
            self.masked += microbatches * masked
        if only is None:
            for bank in self.banks:
                bank.commit(slice(None))
            picks = max(self._picks) or self._usual_picks  # none are heard of when CUDA graphs count
            self._usual_picks = picks
        else:
            bank, j = self.place[only]
            bank.commit(slice(j, j + 1))
            picks = self._picks[only] if only == 0 else 0
        self.most_picks += picks
        self._forget(only)

    def discard(self) -> None:
        """Forgets the open micro-batch."""
        for bank in self.banks:
            bank.discard(slice(None))
        self._forget(None)

    def _forget(self, only: int | None) -> None:
        for i in range(len(self.layers)) if only is None else [only]:
            self._calls[i] = self._picks[i] = 0
        self.dirty = any(self._calls)

    def reset(self) -> None:
        """Begins a new record."""
        for bank in self.banks:
            bank.reset()
        self.repeated_R.zero_()
        self.microbatches = self.masked = self.most_picks = 0


def check_observation(info: LayerInfo, seen: Observation) -> None:
    """Raises UsageError where an adapter's observation does not have the shapes of its layer."""
    shape = tuple(seen.indices_TK.shape)
    if len(shape) != 2 or seen.indices_TK.is_floating_point() or seen.indices_TK.dtype == torch.bool:
        raise UsageError(
            f"{info.name}: picks of shape {shape} and type {seen.indices_TK.dtype}",
            "an observation holds integer expert ids [tokens, k]",
        )
    if seen.full_TE is not None and tuple(seen.full_TE.shape) != (shape[0], info.num_experts):
        raise UsageError(
            f"{info.name}: scores of shape {tuple(seen.full_TE.shape)} for {shape[0]} tokens and"
            f" {info.num_experts} experts",
            "an observation's full_TE is [tokens, experts]",
        )
    if seen.kept_TK is not None and tuple(seen.kept_TK.shape) != shape:
        raise UsageError(f"{info.name}: kept of shape {tuple(seen.kept_TK.shape)} for picks {shape}")
