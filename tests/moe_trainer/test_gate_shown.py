"""Where a person sees an action of the gate: TensorBoard and the HTML report."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_audit.checking import check
from moe_audit.reports.html import write_html
from moe_audit.run import open_run
from moe_trainer.config import load_config
from moe_trainer.runs import run

HOLD = (
    "gate.action=hold", "gate.cooldown=8", "train.steps=40", "train.accumulation=1", "train.log_every=2",
    "recorder.flush_every=2", "optim.router_lr_multiplier=30", "model.moe.lb_loss_weight=none",
)  # fmt: skip


def test_tensorboard_and_the_report_show_the_freeze(tiny: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('extends = "default"\nlength = 4\nnoise_aware = false\n[gates.max_load]\nfail = 1.3\n')
    folder = tmp_path / "run"
    run(load_config(tiny, [*HOLD, f"gate.policy={policy}"]), folder)
    with open_run(folder) as stored:
        steps = {e.kind: e.step or 0 for e in reversed(stored.events)}  # the first of each kind
        write_html(stored, check(stored, policy, all_cells=True), tmp_path / "report.html")
    begin, end = steps["lr_action"], steps["lr_return"]
    assert end == begin + 8
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    marks = {e.step: e.tensor_proto.string_val[0] for e in board.Tensors("routing/gate/text_summary")}
    assert b"hold" in marks[begin] and end in marks
    on = {e.step for e in board.Scalars("routing/gate_action") if e.value}
    assert {s for s in range(2, end + 1, 2) if begin <= s < end} == {s for s in on if s <= end}
    page = (tmp_path / "report.html").read_text()
    for kind in ("lr_action", "lr_return"):
        assert f'<tr><td class="n">{steps[kind]}</td><td>{kind}</td>' in page
