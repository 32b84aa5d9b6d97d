"""Configuration: the file, the overrides, and what a person is told about a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_audit.thresholds.errors import UsageError
from moe_trainer.config import TrainConfig, load_config

SHIPPED = sorted((Path(__file__).parents[2] / "moe_trainer" / "configs").glob("*.toml"))


def test_overrides_change_settings_of_every_type(tiny: Path) -> None:
    config = load_config(
        tiny,
        [
            "optim.lr=3e-4",
            "model.moe.lb_loss_weight=0",
            "data.shuffle=none",
            "data.shard_order='round_robin'",
            "recorder.enabled=false",
            "model.moe.router.jitter_eps=none",
            "model.moe.z_loss_weight=1e-3",
            "data.sources.extra=some/where",
            "model.moe.latent.latent_dim=8",
            "optim.lr=2e-4",
        ],
    )
    assert config.optim.lr == 2e-4  # the last one counts
    assert config.model.moe.lb_loss_weight == 0.0
    assert (config.data.shuffle, config.data.shard_order) == ("none", "round_robin")
    assert config.recorder.enabled is False
    assert config.model.moe.router.jitter_eps is None
    assert config.model.moe.z_loss_weight == 1e-3
    assert config.data.sources["extra"] == str(Path("some/where").absolute())
    assert config.model.moe.latent is not None and config.model.moe.latent.latent_dim == 8
    assert config.model.num_layers == 2  # from the file


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configurations_load_and_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "resolved.toml").write_text(config.to_toml())
    again = load_config(tmp_path / "resolved.toml")
    assert again == config and again.sha256() == config.sha256()


def test_resolved_file_keeps_settings_that_were_switched_off(tiny: Path, tmp_path: Path) -> None:
    config = load_config(tiny, ["model.moe.lb_loss_weight=none", 'data.sources."a b\\"c"=x'])
    (tmp_path / "resolved.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "resolved.toml") == config
    assert config.model.moe.lb_loss_weight is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.learning_rat=1", ["unknown setting: optim.learning_rat", "did you mean 'optim."]),
        ("optim.lrr=1", ["unknown setting: optim.lrr", "did you mean 'optim.lr'?"]),
        ("model.moe.lb_los_weight=1", ["did you mean 'model.moe.lb_loss_weight'?"]),
        ("model.moe.router.topk=1", ["did you mean 'model.moe.router.top_k'?"]),
        ("lr=1", ["unknown setting: lr", "did you mean 'optim.lr'?"]),
        ("optim.steps=1", ["unknown setting: optim.steps", "did you mean 'train.steps'?"]),
        ("modl.moe.num_experts=4", ["unknown setting: modl", "did you mean 'model'?"]),
        ("optim.lr=fast", ["optim.lr = 'fast'", "number"]),
        ("optim.lr=-1", ["optim.lr = -1", "greater than 0"]),
        ("optim.lr=inf", ["optim.lr = inf", "finite"]),
        ("optim.lr.x=1", ["optim.lr is a value"]),
        ("optim=3", ["optim = 3", "section"]),
        ("train.steps=2.5", ["train.steps = 2.5", "integer"]),
        ("train.steps=true", ["train.steps = True", "integer"]),
        ("data.shuffle=tokens", ["data.shuffle = 'tokens'", "'document', 'shard' or 'none'"]),
        ("model.num_heads=3", ["model.num_heads = 3", "divide d_model = 16"]),
        ("model.moe_every=3", ["model.moe_every = 3", "no block"]),
        ("model.moe.router.top_k=5", ["top_k = 5", "num_experts = 4"]),
        ("model.moe.latent.latent_dim=16", ["latent_dim = 16", "d_model = 16"]),
        ("optim.lr", ["not an override: 'optim.lr'", "section.setting=value"]),
        ("=3", ["not an override: '=3'"]),
    ],
)
def test_a_mistake_is_one_message_with_name_value_and_rule(
    tiny: Path, override: str, said: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(tiny, ["optim.lr=1e-3", override])
    for part in said:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such configuration file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "bad.toml").write_bytes(b"[model\n")
    with pytest.raises(UsageError, match=r"bad\.toml cannot be read as TOML"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\x00")
    with pytest.raises(UsageError, match=r"binary\.toml"):
        load_config(tmp_path / "binary.toml")


def test_defaults_are_a_valid_configuration() -> None:
    assert TrainConfig().tokens_per_step == 2048
