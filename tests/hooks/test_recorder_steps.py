"""Steps, phases, records, attempts, and the invariants that each record is checked for."""

from __future__ import annotations

import contextlib
import os
import sqlite3

import pytest
import torch

from moe_audit.run import open_run
from moe_audit.thresholds.errors import UsageError


def picks(*counts: int) -> torch.Tensor:
    """Top-1 picks with these counts."""
    return torch.cat([torch.full((n, 1), e) for e, n in enumerate(counts)])


def test_records_end_at_step_ends(toy, attach, stored):
    model = toy.Scripted(2)
    with attach(model, toy.scripted(), flush_every=3) as recorder:
        for step in range(1, 6):
            for _ in range(2):
                with recorder.microbatch():
                    model(picks(1, 1))
            recorder.step(step, lr={"all": step / 10, "router": step / 100}, loss=torch.tensor(float(step)))
    got = stored()
    assert [(r.first_step, r.last_step, r.microbatches) for r in got.records] == [
        (1, 2, 4),
        (3, 4, 4),
        (5, 5, 2),
    ]
    assert [(r.lr, r.router_lr, r.loss) for r in got.records] == [
        (pytest.approx(lr), pytest.approx(lr / 10), loss) for lr, loss in ((0.1, 1.5), (0.3, 3.5), (0.5, 5.0))
    ]


def test_a_flush_before_a_save_cuts_a_record(toy, attach, stored):
    model = toy.Scripted(2)
    recorder = attach(model, toy.scripted())
    with recorder.microbatch():
        model(picks(3, 1))
    recorder.step(7)
    assert recorder.flush()
    assert [(r.first_step, r.last_step, r.tokens) for r in stored().records] == [(7, 7, 4)]
    assert recorder.flush()
    recorder.close()
    assert len(stored().records) == 1


def test_evaluation_is_a_record_of_its_own(toy, attach, stored):
    """C20: by module.training, and by the override for loops that never call eval()."""
    model = toy.Scripted(4)
    recorder = attach(model, toy.scripted(), flush_every=2)
    even = picks(100, 100, 100, 100)
    for step in (1, 2):
        with recorder.microbatch():
            model(even)
        if step == 1:
            model.eval()
            with torch.no_grad():
                model(picks(400))
            model.train()
            with recorder.phase("eval"), recorder.microbatch():
                model(picks(0, 7))
        recorder.step(step)
    recorder.close()
    assert stored().total == [[200, 200, 200, 200]]
    got = stored("eval")
    assert got.total == [[400, 7, 0, 0]]
    assert [(r.first_step, r.last_step, r.microbatches, r.lr) for r in got.records] == [(0, 0, 2, None)]


def test_paused_records_nothing(toy, attach, stored):
    """C18: dummy batches leave no trace, neither in counts nor in micro-batches."""
    model = toy.Scripted(4)
    recorder = attach(model, toy.scripted())
    with recorder.paused():
        model(picks(64))
        with recorder.microbatch():
            model(picks(64))
    with recorder.microbatch():
        with recorder.paused():
            model(picks(64))
        model(picks(16, 16, 16, 16))
    recorder.step(1)
    recorder.close()
    got = stored()
    assert (got.total, [r.microbatches for r in got.records]) == ([[16, 16, 16, 16]], [1])


@pytest.mark.parametrize(("first", "second"), [(5, 5), (5, 4), (5, 0), (5, -1)])
def test_steps_that_do_not_increase(toy, attach, first, second):
    """C67: a counter that restarts without a resume mark is an error, not an overwrite."""
    model = toy.Scripted(2)
    recorder = attach(model, toy.scripted())
    with recorder.microbatch():
        model(picks(1, 1))
    recorder.step(first)
    with pytest.raises(UsageError, match=f"{second}"):
        recorder.step(second)
    recorder.close()


def test_resume_from_an_older_checkpoint(toy, attach, stored):
    """C67: steps 101 to 150 are taken from the later attempt."""
    model = toy.Scripted(2)

    def run(first: int, last: int, sick: range, **options: bool) -> None:
        with attach(model, toy.scripted(), flush_every=10, **options) as recorder:
            for step in range(first, last + 1):
                with recorder.microbatch():
                    model(picks(10, 0) if step in sick else picks(5, 5))
                recorder.step(step)

    run(1, 150, range(101, 151))
    run(101, 200, range(0), resume=True)
    got = stored()
    assert got.total == [[1000, 1000]]
    assert [r.last_step for r in got.records] == list(range(10, 201, 10))
    with pytest.raises(UsageError, match="resume=True"):
        attach(model, toy.scripted())


def test_resume_with_other_sources_or_layers(toy, attach):
    attach(toy.Scripted(2), toy.scripted(), sources=["a"]).close()
    with pytest.raises(UsageError, match="source"):
        attach(toy.Scripted(2), toy.scripted(), sources=["b"], resume=True)
    with pytest.raises(UsageError, match="layer"):
        attach(toy.Scripted(3), toy.scripted(), sources=["a"], resume=True)


@pytest.mark.filterwarnings("ignore:routing record")
def test_a_layer_that_never_fires_raises_at_the_first_step(toy, attach):
    """C51: the block goes round its router."""
    model = toy.Scripted(2, layers=3)
    recorder = attach(model, toy.scripted())
    with recorder.microbatch():
        model.layers[0](picks(1, 1))
    with pytest.raises(UsageError, match=r"attached 3, fired 1: .*layers\.1.*layers\.2"):
        recorder.step(1)
    recorder.close()


@pytest.mark.filterwarnings("ignore:routing record")
def test_nothing_fires(toy, attach):
    recorder = attach(toy.Scripted(2), toy.scripted())
    with pytest.raises(UsageError, match="attached 1, fired 0"):
        recorder.step(1)
    recorder.close()


def test_a_layer_that_falls_silent(toy, attach, stored):
    model = toy.Scripted(2, layers=2)
    recorder = attach(model, toy.scripted())
    with recorder.microbatch():
        model(picks(1, 1))
    recorder.step(1)
    with recorder.microbatch():
        model.layers[1](picks(1, 1))
    with pytest.raises(UsageError, match=r"attached 2, fired 1: .*layers\.0"):
        recorder.step(2)
    recorder.close()


@pytest.mark.parametrize("fires", [0, 1])
def test_marked_instead_of_raised(toy, attach, stored, fires):
    """Training goes on, and every record says that it is not whole."""
    model = toy.Scripted(2, layers=2)
    recorder = attach(model, toy.scripted(), silent_layers="mark")
    with pytest.warns(UserWarning, match="never fired") as caught:
        for step in (1, 2):
            with recorder.microbatch():
                for router in model.layers[:fires]:
                    router(picks(1, 1))
            recorder.step(step)
            recorder.flush()
    recorder.close()
    assert len(caught) == 1
    assert stored().broken == ["silent layer"] * 2 * (2 - fires)
    with open_run(recorder.path) as run:
        broken = [event for event in run.events if event.kind == "invariant"]
        assert {event.detail["record"] for event in broken} == {r.record for r in run.records}


@pytest.mark.parametrize("silent_layers", ["raise", "mark"])
def test_all_layers_fall_silent_in_one_micro_batch(toy, attach, stored, silent_layers):
    """As where something clears the hooks of the model; a paused micro-batch is no such thing."""
    model = toy.Scripted(2, layers=2)
    recorder = attach(model, toy.scripted(), silent_layers=silent_layers)
    for step in (1, 2):
        with recorder.microbatch(), recorder.paused() if step == 2 else contextlib.nullcontext():
            model(picks(1, 1))
        recorder.step(step)
    with recorder.microbatch():
        pass
    if silent_layers == "raise":
        with pytest.raises(UsageError, match="attached 2, fired 0"):
            recorder.step(3)
    else:
        recorder.step(3)
    with pytest.warns(UserWarning, match="no layer fired in 1 of 2 micro-batches"):
        recorder.close()
    assert stored().broken == ["silent layer"]


def test_conservation_is_checked_and_warned_once(toy, attach, stored):
    """A router that says top-2 and picks once: counted, marked in each record, warned once."""
    model = toy.Scripted(2)
    adapter = toy.scripted(2)
    adapter.observe = lambda module, args, kwargs, output: toy.scripted(1).observe(
        module, args, kwargs, output
    )
    recorder = attach(model, adapter, flush_every=1)
    with pytest.warns(UserWarning) as caught:
        for step in (1, 2):
            with recorder.microbatch():
                model(picks(3, 4))
            recorder.step(step)
    recorder.close()
    assert len(caught) == 1 and "7 picks where 2 x 7 tokens make 14" in str(caught[0].message)
    assert stored().broken == ["conservation", "conservation"]


def test_views_and_meta_need_no_code_of_ours(toy, attach, tmp_path):
    model = toy.Model()
    with attach(model, sources=["a", "b"]) as recorder:
        recorder.set_meta({"window_length": 20})
        recorder.event(1, "note", {"text": "begin"})
        for step in (1, 2):
            with recorder.microbatch(sources=["a", "b"]):
                model(torch.randn(2, 5, 8))
            recorder.step(step)
    connection = sqlite3.connect(tmp_path / "routing.db")
    rows = connection.execute("SELECT layer, source, sum(count) FROM expert_load GROUP BY 1, 2").fetchall()
    assert rows == [(layer, source, 20) for layer in range(3) for source in ("a", "b")]
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    assert (meta["window_length"], meta["world_size"], meta["flush_every"]) == (20, 1, 100)
    kinds = [kind for (kind,) in connection.execute("SELECT kind FROM event ORDER BY event")]
    assert kinds == ["attached", "note", "closed"]
    connection.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_worker_leaves_the_store_alone(toy, attach, stored):
    """Data loader workers inherit the recorder; they end without touching what the parent writes."""
    model = toy.Scripted(2)
    recorder = attach(model, toy.scripted(), flush_every=1)
    for step in range(1, 4):
        with recorder.microbatch():
            model(picks(2, 1))
        child = os.fork()
        if child == 0:
            os._exit(0)
        recorder.step(step)
        os.waitpid(child, 0)
    recorder.close()
    assert stored().total == [[6, 3]]


def test_closed_is_closed(toy, attach):
    model = toy.Scripted(2)
    recorder = attach(model, toy.scripted())
    with recorder.microbatch():
        model(picks(1, 1))
    recorder.step(1)
    recorder.close()
    recorder.close()
    assert recorder.flush()
    with pytest.raises(UsageError, match="closed"):
        recorder.step(2)


def test_wrong_arguments(toy, attach):
    for options in ({"flush_every": 0}, {"mode": "sum"}, {"silent_layers": "ignore"}, {"sources": ["all"]}):
        with pytest.raises(UsageError):
            attach(toy.Scripted(2), toy.scripted(), **options)
    recorder = attach(toy.Scripted(2), toy.scripted())
    for call in (lambda: recorder.microbatch(chunks=0), lambda: recorder.phase("test").__enter__()):
        with pytest.raises(UsageError):
            call()
    with pytest.raises(UsageError, match="inside"), recorder.microbatch(), recorder.microbatch():
        pass
    recorder.close()


@pytest.mark.parametrize("joint_bytes", [0, 2**18])
def test_inference_mode_before_and_after_training(toy, attach, stored, monkeypatch, joint_bytes):
    """What the recorder makes in a forward under inference_mode must serve outside of it too."""
    monkeypatch.setattr("moe_audit.hooks.counters.JOINT_BYTES", joint_bytes)
    model = toy.Model(layers=2)
    x = torch.randn(3, 5, 8)
    with attach(model) as recorder:
        with torch.inference_mode(), recorder.phase("eval"), recorder.microbatch():
            model(x)
        with recorder.phase("eval"), recorder.microbatch(), torch.inference_mode():
            model(x)
        with torch.inference_mode():
            model(x)
        model(x).backward()
        recorder.step(1)
    want = toy.brute_force(model, [x, x])
    assert stored().total == want and stored("eval").total == want


def test_ids_whose_memory_is_transposed(toy, attach, stored):
    picks = torch.randint(0, 7, (4, 20_000)).t()
    model = toy.Scripted(7)
    with attach(model, toy.scripted(4)) as recorder:
        model(picks)
        recorder.step(1)
    assert stored().total == [torch.bincount(picks.flatten(), minlength=7).tolist()]
