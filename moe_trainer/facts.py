"""What the trainer knows about its run and the audit wants to know."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from moe_trainer.config import TrainConfig
from moe_trainer.data import TokenStream, shard_cycle_steps


def run_facts(config: TrainConfig, stream: TokenStream) -> dict[str, Any]:
    """The keys of the store's `meta` that only the trainer can fill; what it does not know is left out."""
    facts: dict[str, Any] = {
        "framework": "moe_trainer",
        "framework_version": metadata.version("moe-audit"),
        "config_hash": config.sha256(),
        "git_revision": git_revision(),
        "balancing": balancing_rule(config),
        "warmup_steps": config.optim.warmup_steps,
        "shard_cycle_steps": shard_cycle_steps(
            stream.corpus,
            shard_tokens=stream.shard_tokens,
            shard_order=stream.shard_order,
            shuffle=stream.shuffle,
            tokens_per_step=config.tokens_per_step,
        ),
    }
    return {name: value for name, value in facts.items() if value is not None}


def balancing_rule(config: TrainConfig) -> str:
    """How the load is balanced, in words."""
    moe = config.model.moe
    rules = []
    if moe.lb_loss_weight:
        rules.append(f"{moe.lb_loss_granularity} loss {moe.lb_loss_weight:g}")
    if moe.router.bias_gamma:
        rules.append(f"score bias {moe.router.bias_gamma:g}")
    return " + ".join(rules) or "none"


def git_revision() -> str | None:
    """Commit of the source tree this package runs from, if it is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
