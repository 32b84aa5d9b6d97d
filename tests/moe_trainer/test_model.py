"""The transformer around the MoE layers."""

from __future__ import annotations

import pytest
import torch

from moe_trainer.config import ModelConfig
from moe_trainer.data import SEPARATOR, VOCAB_SIZE
from moe_trainer.model import Transformer, document_mask, rotate, rotation_angles
from moe_trainer.moe.config import LatentConfig, MoEConfig, RouterOptions, SharedExpertsConfig


def config(**changes: object) -> ModelConfig:
    settings = {
        "num_layers": 3,
        "d_model": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "dense_hidden_size": 24,
        "moe": MoEConfig(num_experts=4, hidden_size=16, router=RouterOptions(top_k=2)),
    }
    return ModelConfig.model_validate({**settings, **changes})


MOE_VARIANTS = [
    MoEConfig(num_experts=4, hidden_size=16, router=RouterOptions(top_k=2)),
    MoEConfig(num_experts=8, hidden_size=8, bias=True, activation="relu2", router=RouterOptions(bias=True)),
    MoEConfig(num_experts=4, hidden_size=16, shared_mlp=SharedExpertsConfig(num_experts=2, hidden_size=8)),
    MoEConfig(num_experts=4, hidden_size=16, latent=LatentConfig(latent_dim=8, norm=True)),
]


@pytest.mark.parametrize("moe_every", [1, 2])
@pytest.mark.parametrize("moe", MOE_VARIANTS)
def test_planned_parameters_equal_the_real_ones(moe: MoEConfig, moe_every: int) -> None:
    settings = config(moe=moe, moe_every=moe_every)
    parts = settings.num_params_per_part()
    assert sum(total for total, _ in parts.values()) == sum(
        p.numel() for p in Transformer(settings).parameters()
    )


def test_moe_blocks_are_every_nth_and_named_for_the_recorder() -> None:
    model = Transformer(config(num_layers=5, moe_every=2))
    routers = [name for name, _ in model.named_modules() if name.endswith("moe.router")]
    assert routers == ["layers.1.moe.router", "layers.3.moe.router"]


@pytest.mark.parametrize("within", [False, True])
def test_no_token_sees_a_later_one(within: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(config(attend_within_documents=within)).eval()
    tokens = torch.randint(0, 256, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = torch.randint(0, 256, (2, 5))
    a, b = model(tokens)[0], model(changed)[0]
    assert a.shape == (2, 12, VOCAB_SIZE)
    torch.testing.assert_close(a[:, :7], b[:, :7])
    assert not torch.allclose(a[:, 7:], b[:, 7:])


def test_attention_within_documents_gives_each_document_its_own_outputs() -> None:
    torch.manual_seed(0)
    model = Transformer(config(attend_within_documents=True)).eval()
    first = torch.cat([torch.tensor([SEPARATOR]), torch.randint(0, 256, (4,))])
    second = torch.cat([torch.tensor([SEPARATOR]), torch.randint(0, 256, (6,))])
    packed = model(torch.cat([first, second])[None])[0]
    # Rotary positions are relative, so a document does not notice where it was packed.
    torch.testing.assert_close(packed[:, :5], model(first[None])[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(packed[:, 5:], model(second[None])[0], atol=1e-5, rtol=1e-4)
    mask = document_mask(torch.tensor([[1, SEPARATOR, 2, SEPARATOR]]))
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


def test_rotation_depends_on_the_distance_only() -> None:
    angles = rotation_angles(20, config(), torch.device("cpu"))
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8).double().unbind()

    def score(i: int, j: int) -> float:
        return float((rotate(q, angles[i : i + 1]) * rotate(k, angles[j : j + 1])).sum())

    assert score(3, 1) == pytest.approx(score(17, 15), rel=1e-5)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-3)
    assert float(rotate(q, angles[7:8]).norm()) == pytest.approx(float(q.norm()), rel=1e-6)


def test_router_losses_do_not_grow_with_the_number_of_micro_batches() -> None:
    """Half-batches with the whole batch's divisor add up to the mean of the halves' own losses."""
    torch.manual_seed(0)
    model = Transformer(config())
    tokens = torch.randint(0, 256, (4, 8))
    halves = tokens.split(2)
    parts = sum(float(model(half, loss_divisor=tokens.numel())[1].detach()) for half in halves)
    own = [float(model(half)[1].detach()) for half in halves]
    assert parts == pytest.approx(sum(own) / 2, rel=1e-5)
    assert parts > 0
    assert float(model.eval()(tokens)[1]) == 0
