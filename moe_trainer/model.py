"""The decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU or MoE.

Shapes: B sequences, S tokens, D = d_model, N query heads, K key/value heads, H = width of a head,
V vocabulary, L MoE layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_trainer.config import ModelConfig
from moe_trainer.data import SEPARATOR, VOCAB_SIZE
from moe_trainer.moe.balance import MoELosses, resolve_global_balance
from moe_trainer.moe.layer import MoE

INIT_STD = 0.02


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        width, kv_width = config.d_model, config.num_kv_heads * config.head_dim
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BSD: Tensor, rotation_SH: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        """Mixed values of the earlier tokens, (B, S, D)."""
        q_BNSH = rotate(self._heads(self.q(x_BSD), self.num_heads), rotation_SH)
        k_BKSH = rotate(self._heads(self.k(x_BSD), self.num_kv_heads), rotation_SH)
        v_BKSH = self._heads(self.v(x_BSD), self.num_kv_heads)
        y_BNSH = F.scaled_dot_product_attention(
            q_BNSH, k_BKSH, v_BKSH, attn_mask=mask_B1SS, is_causal=mask_B1SS is None, enable_gqa=True
        )
        out: Tensor = self.out(y_BNSH.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x_BSD: Tensor, heads: int) -> Tensor:
        return x_BSD.view(*x_BSD.shape[:2], heads, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """Dense feed-forward: down(up(x) * silu(gate(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.dense_hidden_size, bias=False)
        self.gate = nn.Linear(config.d_model, config.dense_hidden_size, bias=False)
        self.down = nn.Linear(config.dense_hidden_size, config.d_model, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        out: Tensor = self.down(self.up(x_BSD) * F.silu(self.gate(x_BSD)))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, is_moe: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        if is_moe:
            self.moe = MoE(config.moe, config.d_model, num_layers=len(config.moe_layers))
        else:
            self.dense = SwiGLU(config)

    def forward(
        self,
        x_BSD: Tensor,
        rotation_SH: Tensor,
        mask_B1SS: Tensor | None,
        loss_divisor: float | None,
    ) -> tuple[Tensor, MoELosses | None]:
        """The new residual stream, and the router's losses of this block (None where it is dense)."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotation_SH, mask_B1SS)
        y_BSD = self.feed_forward_norm(x_BSD)
        if hasattr(self, "moe"):
            y_BSD, losses = self.moe(y_BSD, loss_divisor=loss_divisor)
            return x_BSD + y_BSD, losses
        return x_BSD + self.dense(y_BSD), None


class Transformer(nn.Module):
    """Token ids in, logits and the sum of the router losses out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCAB_SIZE, config.d_model)
        moe_layers = set(config.moe_layers)
        self.layers = nn.ModuleList(Block(config, i in moe_layers) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.output = nn.Linear(config.d_model, VOCAB_SIZE, bias=False)
        self._init_dense_weights()

    def _init_dense_weights(self) -> None:
        """Normal weights; the two that write into the residual stream are smaller in deep models.

        The MoE layers draw their own initial values.
        """
        residual_std = INIT_STD / (2 * len(self.layers)) ** 0.5
        for name, module in self.named_modules():
            if ".moe." in f".{name}." or not isinstance(module, nn.Linear | nn.Embedding):
                continue
            writes_residual = name.endswith((".out", ".down"))
            nn.init.normal_(module.weight, std=residual_std if writes_residual else INIT_STD)

    def forward(self, tokens_BS: Tensor, *, loss_divisor: float | None = None) -> tuple[Tensor, Tensor]:
        """Logits (B, S, V) and the summed router losses (a scalar; 0 in evaluation).

        `loss_divisor` is the number of tokens of the whole optimizer step, so that the losses do not
        grow with the number of micro-batches; None: the tokens of this call.
        """
        rotation_SH = rotation_angles(tokens_BS.shape[1], self.config, tokens_BS.device)
        mask_B1SS = document_mask(tokens_BS) if self.config.attend_within_documents else None
        x_BSD = self.embedding(tokens_BS)
        layer_losses: list[MoELosses] = []
        for layer in self.layers:
            x_BSD, losses = layer(x_BSD, rotation_SH, mask_B1SS, loss_divisor)
            if losses is not None:
                layer_losses.append(losses)
        router_losses_L = torch.stack([loss.total for loss in resolve_global_balance(layer_losses)])
        return self.output(self.norm(x_BSD)), router_losses_L.sum()


def rotation_angles(length: int, config: ModelConfig, device: torch.device) -> Tensor:
    """Rotary angles (S, H/2): position times theta^(-2i/H) (Su et al. 2021, RoFormer)."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequencies = config.rope_theta ** (-half / config.head_dim)
    return torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)


def rotate(x_BNSH: Tensor, angles_SH: Tensor) -> Tensor:
    """Rotate the pairs (i, i + H/2) of every head by the angle of their position."""
    cos_SH, sin_SH = angles_SH.cos(), angles_SH.sin()
    a, b = x_BNSH.chunk(2, dim=-1)
    return torch.cat([a * cos_SH - b * sin_SH, a * sin_SH + b * cos_SH], dim=-1)


def document_mask(tokens_BS: Tensor) -> Tensor:
    """True where a token (row) may see another (column): earlier and of the same document, (B, 1, S, S)."""
    document_BS = (tokens_BS == SEPARATOR).cumsum(dim=1)
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    return same_BSS.tril()[:, None]
