"""Adapters without any framework: forms, names, numbers, the user's own router, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_audit.hooks import Recorder
from moe_audit.hooks.adapters import NO_PICK, FunctionAdapter, Routing, base, find_routers, router_function
from moe_audit.hooks.adapters.base import Adapter, Observation, canonical_name, register
from moe_audit.hooks.adapters.form import by_form, check_indices, check_map, expert_count
from moe_audit.run import open_run
from moe_audit.store import LayerInfo
from moe_audit.thresholds.errors import UsageError

E, K = 32, 4


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Adapters that a test registers are gone after it."""
    before = list(base._registry)
    yield
    base._registry[:] = before


class Router(nn.Module):
    """Top-k of a linear layer; `answer` puts the parts of the output in some order."""

    def __init__(self, answer: Any = None, num_experts: int = E, top_k: int = K) -> None:
        super().__init__()
        self.gate = nn.Linear(8, num_experts, bias=False)
        self.num_experts, self.top_k = num_experts, top_k
        self.answer = answer or (lambda logits, weights, ids: (logits, weights, ids))

    def forward(self, x: Tensor) -> Any:
        logits = self.gate(x.reshape(-1, 8))
        weights, ids = logits.softmax(-1).topk(self.top_k)
        return self.answer(logits, weights, ids)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.router(x)[1].sum()


def observe(router: nn.Module, x: Tensor, adapter: Adapter) -> Observation:
    seen = adapter.observe(router, (x,), {}, router(x))
    assert seen is not None
    return seen


# -- by form (C50)


@pytest.mark.parametrize(
    "answer",
    [
        lambda logits, weights, ids: (torch.zeros_like(logits).scatter(1, ids, weights), ids),
        lambda logits, weights, ids: (logits, weights, ids),
        lambda logits, weights, ids: (ids, weights),
        lambda logits, weights, ids: (weights, ids),
        lambda logits, weights, ids: {"weights": weights, "ids": ids.int(), "logits": logits},
        lambda logits, weights, ids: (weights, ids.to(torch.uint8), ids.new_zeros(E), None, (logits, 3)),
    ],
)
def test_ids_are_found_in_any_order(answer: Any) -> None:
    torch.manual_seed(0)
    router, x = Router(answer), torch.randn(2, 5, 8)
    expected = router.gate(x.reshape(-1, 8)).topk(K).indices
    seen = by_form(router(x), E, K, "router", "logits")
    assert torch.equal(seen.indices_TK.long(), expected)
    if seen.weights_TK is not None:
        assert seen.weights_TK.shape == (10, K)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ((torch.rand(6, E), torch.rand(6, K)), "no integer tensor with last dimension top_k = 4"),
        ((torch.zeros(6, K, dtype=torch.int64),) * 2, "2 integer tensors"),
        (torch.ones(6, K, dtype=torch.bool), "no integer tensor"),
        (None, "no integer tensor.*among no tensor"),
    ],
)
def test_no_or_two_candidates_are_an_error_that_names_the_router(output: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"GptRouter: {message}"):
        by_form(output, E, K, "GptRouter")


def test_indices_and_maps_are_checked() -> None:
    with pytest.raises(UsageError, match="cannot name 257 experts"):
        check_indices(torch.zeros(3, 2, dtype=torch.uint8), 257, 2, "r")
    assert check_indices(torch.zeros(3, 2, dtype=torch.uint8), 256, 2, "r").shape == (3, 2)
    with pytest.raises(UsageError, match="last dimension 2, not 3 picks"):
        check_indices(torch.zeros(3, 2, dtype=torch.int64), 8, 3, "r")
    with pytest.raises(UsageError, match="must be integers"):
        check_indices(torch.zeros(3, 2), 8, 2, "r")
    with pytest.raises(UsageError, match="routing map must be bool"):
        check_map(torch.zeros(3, 8), 8, "r")


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_expert_count_never_comes_from_experts_per_token(name: str) -> None:
    router = nn.Linear(2, 2)
    router.config = SimpleNamespace(num_experts_per_tok=2, experts_per_token=2)
    with pytest.raises(UsageError, match=r"number of experts of torch.nn.modules.linear.Linear is not known"):
        expert_count(router)
    setattr(router.config, name, 32)
    assert expert_count(router) == 32


# -- finding (C27, C55)


class BlockAndRouter(Adapter):
    """Matches the block and the router in it."""

    def match(self, module: nn.Module) -> bool:
        return isinstance(module, Block | Router)

    def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
        return LayerInfo(-1, name, E, K)

    def observe(self, module: Any, args: Any, kwargs: Any, output: Any) -> Observation:
        return by_form(output, E, K, "router")


def test_nested_matches_count_once() -> None:
    model = nn.Sequential(Block(), Block(), Block())
    assert [r.info.name for r in find_routers(model, BlockAndRouter())] == [
        "0.router",
        "1.router",
        "2.router",
    ]


def test_the_adapter_registered_last_wins_also_around_another() -> None:
    router_function(Router)(lambda output: output[2])
    model = nn.Sequential(Block(), nn.ReLU())
    assert [r.info.name for r in find_routers(model)] == ["0.router"]
    router_function(Block, num_experts=E, top_k=K)(lambda output: output)
    assert [r.info.name for r in find_routers(model)] == ["0"]


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.3.mlp.router",
        "module.decoder.layers.3.mlp.router",
        "module.module.decoder.layers.3.mlp.router",
        "_orig_mod.decoder.layers.3._checkpoint_wrapped_module.mlp.router",
        "_fsdp_wrapped_module.decoder.layers.3._fsdp_wrapped_module.mlp.router._orig_mod",
        "_orig_mod.module.decoder.layers.3.mlp._checkpoint_wrapped_module.router",
    ],
)
def test_wrapper_prefixes_are_stripped(name: str) -> None:
    assert canonical_name(name) == "decoder.layers.3.mlp.router"


def test_a_word_that_only_begins_like_a_wrapper_stays() -> None:
    assert canonical_name("modules.layers.3._orig_model.router") == "modules.layers.3._orig_model.router"


def stack(blocks: int, routed: list[int]) -> nn.ModuleList:
    return nn.ModuleList(Block() if i in routed else nn.Identity() for i in range(blocks))


def test_a_layer_is_the_index_of_its_block_in_model_order() -> None:
    router_function(Router)(lambda output: output[2])
    decoder_only = nn.ModuleDict({"decoder": nn.ModuleDict({"layers": stack(5, [1, 3])})})
    assert [(r.info.layer, r.info.name) for r in find_routers(decoder_only)] == [
        (1, "decoder.layers.1.router"),
        (3, "decoder.layers.3.router"),
    ]
    both = nn.ModuleDict({"encoder": stack(6, [3]), "decoder": stack(6, [0, 3])})
    assert [(r.info.layer, r.info.name) for r in find_routers(both)] == [
        (3, "encoder.3.router"),
        (6, "decoder.0.router"),
        (9, "decoder.3.router"),
    ]
    two_a_block = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert [r.info.layer for r in find_routers(two_a_block)] == [0, 2, 1, 3]
    assert find_routers(Block())[0].info.layer == 0


def test_compiled_and_data_parallel_names_are_those_of_the_bare_model() -> None:
    router_function(Router)(lambda output: output[2])
    model = nn.Sequential(*stack(3, [1, 2]))
    bare = [router.info for router in find_routers(model)]
    wrapped = nn.Module()
    wrapped.module = torch.compile(model)
    assert [router.info for router in find_routers(wrapped)] == bare


def test_a_pipeline_stage_keeps_the_numbers_of_the_whole_model() -> None:
    router_function(Router)(lambda output: output[2])
    stage = nn.Module()
    stage.layers = nn.ModuleDict({"4": Block(), "5": nn.Identity(), "6": Block()})
    assert [router.info.layer for router in find_routers(stage)] == [4, 6]


def test_nothing_found_says_what_was_looked_at() -> None:
    class Expertise(nn.Linear):
        """Named like a part of a mixture of experts, and none."""

    with pytest.raises(UsageError) as error:
        find_routers(nn.Sequential(nn.Linear(4, 4), Expertise(4, 4)))
    assert "no router found in torch.nn.modules.container.Sequential (3 modules of 3 classes" in str(
        error.value
    )
    assert "1 x test" in str(error.value) and "Expertise" in str(error.value)


# -- a router of the user's own


def test_function_adapter_reads_what_the_function_names() -> None:
    router, x = Router(), torch.randn(3, 2, 8)
    adapter = FunctionAdapter(
        Router,
        lambda output: Routing(
            indices=output[2].view(3, 2, K),
            weights=output[1],
            logits=output[0],
            kept=torch.ones(6, K, dtype=torch.bool),
        ),
        layout="sequence",
    )
    (found,) = find_routers(nn.Sequential(router), adapter)
    assert found.info == LayerInfo(0, "0", E, K, gating="softmax")
    seen = observe(router, x, adapter)
    assert seen.indices_TK.shape == (6, K) and seen.full_TE.shape == (6, E)
    assert (seen.full_kind, seen.layout, bool(seen.kept_TK.all())) == ("logits", "sequence", True)


def test_expert_choice_gives_a_map_and_picks_vary() -> None:
    chosen = torch.zeros(5, 6, dtype=torch.bool)
    chosen[0, [1, 4]] = chosen[3, 2] = True
    adapter = FunctionAdapter(
        "my.Router", lambda output: Routing(chosen=output), num_experts=6, top_k="varies"
    )
    assert adapter.describe("router", nn.Identity(), nn.Identity()).top_k is None
    seen = observe(nn.Identity(), chosen, adapter)
    picks = seen.indices_TK[seen.indices_TK != NO_PICK]
    assert sorted(picks.tolist()) == [1, 2, 4] and (seen.indices_TK[1] == NO_PICK).all()


def test_fused_shared_experts_are_no_picks_and_sentinels_stay_invalid() -> None:
    ids = torch.tensor([[0, 3, 4, 5], [2, 6, 4, 5], [1, -1, 4, 5]])  # 4 experts, 2 shared ones behind them
    adapter = FunctionAdapter("my.Router", lambda output: output, num_experts=4, top_k=2, fused_shared=2)
    seen = observe(nn.Identity(), ids, adapter)
    assert seen.indices_TK.masked_fill(seen.indices_TK == NO_PICK, 99).tolist() == [
        [0, 3, 99, 99],
        [2, 6, 99, 99],
        [1, -1, 99, 99],
    ]
    with pytest.raises(UsageError, match="last dimension 3, not 4 picks"):
        observe(nn.Identity(), ids[:, :3], adapter)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (lambda output: Routing(), "either indices or chosen"),
        (lambda output: Routing(output[2], logits=output[0], probs=output[0]), "logits or probs, not both"),
        (lambda output: Routing(output[2], weights=output[0]), r"weights must be \(6, 4\)"),
        (lambda output: Routing(output[2], probs=output[0][:4]), r"scores of all experts must be \(6, 32\)"),
        (lambda output: output[1], "must be integers"),
    ],
)
def test_what_the_function_gives_is_checked(routing: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        observe(Router(), torch.randn(6, 8), FunctionAdapter(Router, routing))


def test_picks_that_nobody_tells_are_asked_for() -> None:
    adapter = FunctionAdapter(nn.Linear, lambda output: output, num_experts=8)
    with pytest.raises(UsageError, match=r"picks per token of torch.nn.modules.linear.Linear are not known"):
        find_routers(nn.Sequential(nn.Linear(2, 2)), adapter)


def test_a_subclass_can_be_registered() -> None:
    @register
    class Mine(Adapter):
        classes = (f"{__name__}.Router",)

        def describe(self, name: str, module: Any, parent: Any) -> LayerInfo:
            return LayerInfo(7, name, E, K, tags=("post_drop",))

        def observe(self, module: Any, args: Any, kwargs: Any, output: Any) -> Observation:
            return Observation(output[2])

    (found,) = find_routers(nn.Sequential(Block()))
    assert (found.info.layer, found.info.tags, type(found.adapter)) == (7, ("post_drop",), Mine)
    with pytest.raises(UsageError, match=r"several routers claim layer 7: 0.router, 1.router"):
        find_routers(nn.Sequential(Block(), Block()))


def test_a_biased_router_is_counted_by_the_ids_it_gives_out() -> None:
    """C52: top-k of the scores alone names other experts than the bias does."""
    scores = torch.tensor([[0.9, 0.8, 0.2, 0.1]]).expand(10, 4)
    ids = (scores + torch.tensor([-0.5, 0.0, 0.0, 0.0])).topk(1).indices
    seen = by_form((scores, scores.gather(1, ids), ids), 4, 1, "router", "probs")
    assert torch.bincount(seen.indices_TK.flatten(), minlength=4).tolist() == [0, 10, 0, 0]


class ExpertChoice(nn.Module):
    """Each expert takes its best tokens; what it returns is a map."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x.reshape(-1, 8))
        taken = logits.topk(4, dim=0).indices
        return torch.zeros_like(logits, dtype=torch.bool).scatter(0, taken, True)


@pytest.mark.parametrize("compiled", [False, True])
def test_expert_choice_is_recorded_as_chosen(compiled: bool, tmp_path: Path) -> None:
    model = nn.Sequential(ExpertChoice())
    adapter = FunctionAdapter(
        ExpertChoice, lambda output: Routing(chosen=output), num_experts=6, top_k="varies"
    )
    with Recorder.attach(model, tmp_path / "routing.db", ["code", "prose"], adapter=adapter) as recorder:
        run_model = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        with recorder.microbatch(sources=torch.tensor([0, 1])):
            chosen = run_model(torch.randn(2, 5, 8))
        recorder.step(1)
    run = open_run(tmp_path / "routing.db")
    expected = chosen.view(2, 5, 6).sum(1)
    assert torch.equal(torch.from_numpy(run.counts(0).sum(0)), expected)
    assert run.layers[0].top_k is None and expected.sum(0).tolist() == [4] * 6


def test_more_layers_than_dynamo_keeps_versions_of_one_code(tmp_path: Path) -> None:
    """Blocks compiled one by one share their code, and each hook makes a version of its own."""
    model = nn.Sequential(*stack(10, list(range(10))))
    adapter = FunctionAdapter(Router, lambda output: Routing(output[2], logits=output[0]))
    with Recorder.attach(model, tmp_path / "routing.db", adapter=adapter) as recorder:
        for block in model:
            block.compile(backend="eager", fullgraph=True)
        model(torch.randn(2, 4, 8))
        recorder.step(1)
    run = open_run(tmp_path / "routing.db")
    assert [run.counts(layer.layer).sum() for layer in run.layers] == [8 * K] * 10
