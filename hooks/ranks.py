"""Which ranks count together, and what they must agree on before they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from moe_audit.hooks.adapters.base import NoRouterError
from moe_audit.record import MAX_COUNT
from moe_audit.store import LayerInfo
from moe_audit.thresholds.errors import UsageError

Mode = Literal["reduce", "per_rank"]


@dataclass(frozen=True)
class Ranks:
    """The ranks that route different tokens.

    Attributes:
        rank: This process's place among them; -1: it is none of them and records nothing.
        size: How many they are.
        reduces: Whether counts are summed over them by collectives; without, each writes what it saw.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    mode: Mode

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, mode: str) -> Ranks:
        """Raises UsageError for a mode that there is not."""
        if mode not in ("reduce", "per_rank"):
            raise UsageError(f"mode={mode!r}", 'it is "reduce" or "per_rank"')
        checked: Mode = "reduce" if mode == "reduce" else "per_rank"
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1, checked)
        # Both are -1 where this process is not in the group.
        return cls(group, dist.get_rank(group), dist.get_world_size(group), checked)

    @property
    def is_member(self) -> bool:
        return self.rank >= 0

    @property
    def reduces(self) -> bool:
        return self.mode == "reduce" and self.size > 1

    @property
    def writes(self) -> bool:
        """Whether this process has a store: one in the group, or each with `per_rank`."""
        return self.rank == 0 if self.mode == "reduce" else self.is_member

    @property
    def expected(self) -> int:
        """How many ranks a record of this process must have seen."""
        return self.size if self.mode == "reduce" else 1

    def store_path(self, path: str | Path) -> Path:
        """`routing.db` -> `routing.rank0.db` with `per_rank`."""
        path = Path(path)
        return path if self.mode == "reduce" else path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")

    def gather_layers(
        self, layers: Sequence[LayerInfo], problem: Exception | None, settings: dict[str, Any]
    ) -> list[LayerInfo]:
        """The layers of all ranks, by number: pipeline stages have different ones.

        Args:
            layers: Those of this rank.
            problem: Why there are none; a stage of dense blocks may have none while others do.
            settings: What decides when ranks flush together.

        Raises:
            UsageError: there is no layer at all, or ranks disagree on a layer or a setting.
        """
        gathered: list[Any] = [(list(layers), problem, settings)] * max(1, self.size)
        if self.reduces and self.is_member:
            dist.all_gather_object(gathered, (list(layers), problem, settings), group=self.group)
        merged: dict[int, LayerInfo] = {}
        for rank, (theirs, _, their_settings) in enumerate(gathered):
            for key, value in settings.items():
                if their_settings[key] != value:
                    raise UsageError(
                        f"{key} is {value!r} on rank {self.rank} and {their_settings[key]!r} on rank {rank}",
                        "all ranks of the group attach alike",
                    )
            for info in theirs:
                if merged.setdefault(info.layer, info) != info:
                    raise UsageError(
                        f"layer {info.layer} is {merged[info.layer].name} on one rank and {info.name} on rank"
                        f" {rank}",
                        "pipeline stages keep the block numbers of the whole model in their module names",
                    )
        problems = [problem for _, problem, _ in gathered if problem is not None]
        for found in problems:
            if not merged or not isinstance(found, NoRouterError):
                raise found
        return [merged[number] for number in sorted(merged)]

    def share_error(self, error: Exception | None) -> None:
        """Raises on every rank what went wrong on the one that writes."""
        if self.reduces and self.is_member:
            shared: list[Any] = [error]
            dist.broadcast_object_list(shared, group=self.group, group_src=0)
            error = shared[0]
        if error is not None:
            raise error

    def steps_per_record(self, microbatches: int, picks: int, flush_every: int) -> int:
        """After how many steps the ranks cut a record, the same on all of them; asked once.

        Ranks may differ in the micro-batches that they make, and a pipeline stage of dense blocks makes none
        that is seen: the one that made most in the first step tells.

        Args:
            microbatches: What this rank made in the first step.
            picks: The most picks that one expert of this rank can have had in it.
            flush_every: Micro-batches per record.
        """
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, (microbatches, picks), group=self.group)
        microbatches, picks = (max(1, *numbers) for numbers in zip(*gathered, strict=True))
        # The sum over the ranks must fit too, also where later steps are twice as large.
        return max(1, min(-(-flush_every // microbatches), MAX_COUNT // (2 * picks * self.size)))

    def device(self, counted_on: torch.device) -> torch.device:
        """Where the collectives take place."""
        if self.reduces and dist.get_backend(self.group) == "nccl" and counted_on.type != "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return counted_on
