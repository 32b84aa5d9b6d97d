"""Ways in and out: what a file says is what the store holds; what it cannot mean is said in one line."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moe_audit.exporters import export
from moe_audit.importers import import_files, parse_per_layer
from moe_audit.info import info, info_text
from moe_audit.record import LayerInfo
from moe_audit.run import open_run
from moe_audit.store import Store
from moe_audit.thresholds.errors import AuditError, NoDataError, UsageError

HEADER = "step,layer,source,expert,count\n"


def csv(folder: Path, text: str, name: str = "counts.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def imported(folder: Path, text: str, **options):
    path = csv(folder, text)
    return import_files(
        [path], "csv", output=folder / "routing.db", **{"num_experts": 4, "top_k": 2} | options
    )


def test_sparse_rows_are_filled_with_zeros(tmp_path):
    """Case C03: 61 of 64 experts have a row; an expert without one was never hit."""
    counts = np.random.default_rng(0).integers(1, 1000, 64)
    counts[[5, 17, 63]] = 0
    rows = "".join(f"7,15,arxiv,{e},{n}\n" for e, n in enumerate(counts) if n)
    assert imported(tmp_path, HEADER + rows, num_experts=64, top_k=1).records == 1
    with open_run(tmp_path) as run:
        assert run.counts(15).tolist() == [[counts.tolist()]] and run.layers[0].num_experts == 64
        assert run.tokens(15) is None and run.records[0].tokens is None


def test_rows_in_any_order_steps_without_rows_and_layers_of_different_size(tmp_path):
    text = HEADER + "9,3,b,5,1\n2,0,a,1,7\n9,0,a,0,4\n2,3,b,0,2\n"
    report = imported(tmp_path, text, num_experts={0: 2, 3: 6}, top_k={0: 1})
    assert (report.records, report.layers, report.sources) == (2, 2, ("b", "a"))
    with open_run(tmp_path) as run:
        assert [r.last_step for r in run.records] == [2, 9]  # 3 to 8 were not recorded
        assert run.counts(0).tolist() == [[[0, 0], [0, 7]], [[0, 0], [4, 0]]]
        assert run.counts(3)[:, 0].tolist() == [[2, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
        assert [info.top_k for info in run.layers] == [1, None] and run.gaps == []


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + HEADER + "1,0,a,0,3\n",  # a byte-order mark
        HEADER.replace(",", ", ") + "1, 0, a, 0, 3\n",
        HEADER + "1,0,a,0,3",  # no newline at the end
        HEADER + "1,0,a,0,3\n\n\n",
        HEADER + "1,0,a,0,3.0\r\n",  # as pandas writes integers once a value was missing
        'step,layer,source,expert,count\n1,0,"a",0,"3"\n',
        "count,expert,source,layer,step\n3,0,a,0,1\n",
    ],
)
def test_forms_of_csv(tmp_path, text):
    imported(tmp_path, text)
    with open_run(tmp_path) as run:
        assert run.counts(0).tolist() == [[[3, 0, 0, 0]]] and run.sources == ["a"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (HEADER, "no rows"),
        ("step,layer,expert,count\n1,0,0,3\n", "no column source"),
        ("a;b;c\n1;2;3\n", "no column step, layer, source, expert, count"),
        ("step,layer,source,expert,count,weight\n1,0,a,0,3,1\n", "column weight"),
        ("step,layer,source,expert,count,count\n1,0,a,0,3,3\n", "column count"),
        (HEADER + "1,0,a,0,-3\n", "line 2: count is '-3'"),
        (HEADER + "1,0,a,0,3\n1,0,a,1,2.5\n", "line 3: count is '2.5'"),
        (HEADER + "1,0,a,0,nan\n", "line 2: count is 'nan'"),
        (HEADER + "1,0,a,0,\n", "line 2: count is ''"),
        (HEADER + "1,0,a,0,inf\n", "line 2: count is 'inf'"),
        (HEADER + "1,0,a,0,True\n", "line 2: count is 'True'"),
        (HEADER + "1,0,a,0,3\n\n1,0,a,9,2\n", "line 4: expert 9"),
        (HEADER + "1,0,a,0,5000000000\n", "line 2: count is '5000000000'"),
        (HEADER + "1,0,a,0,99999999999999999999\n", "line 2: count"),
        (HEADER + "x,0,a,0,1\n", "line 2: step is 'x'"),
        (HEADER + "1,-1,a,0,1\n", "line 2: layer is '-1'"),
        (HEADER + "1,0,a,4,1\n", "line 2: expert 4 of layer 0, which has 4 experts"),
        (HEADER + "1,0,,0,1\n", "line 2: source is empty"),
        (HEADER + "1,0,all,0,1\n", "'all'"),
        (HEADER + "1,0,a,0\n", "line 2: count is ''"),
        (HEADER + "1,0,a,0,3,9\n1,0,a,1,2,9\n", "more cells"),
        (HEADER + "1,0,a,0,3\n1,0,a,1,2,9\n", "line 3"),
        (HEADER + "1,0,a,0,3\n2,0,a,0,1\n1,0,a,0,3\n", "line 4: step 1, layer 0, source a, expert 0"),
    ],
)
def test_what_a_csv_cannot_mean(tmp_path, text, words):
    with pytest.raises(AuditError) as caught:
        imported(tmp_path, text)
    message = str(caught.value)
    assert words in message and "\n" not in message and ("counts.csv" in message or words == "'all'")
    assert not (tmp_path / "routing.db").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": None}, "--num-experts"),
        ({"num_experts": {1: 4}}, "layer 0"),
        ({"num_experts": 0}, "0 experts"),
        ({"top_k": 5}, "top-k 5"),
        ({"top_k": 0}, "top-k 0"),
        ({"num_experts": 10**11}, "a store holds up to"),
    ],
)
def test_numbers_that_are_missing_or_do_not_go_together(tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        imported(tmp_path, HEADER + "1,0,a,0,3\n", **options)


def test_what_is_not_there_is_named(tmp_path):
    file = csv(tmp_path, HEADER + "1,0,a,0,3\n")
    for paths, format, words in [
        ([tmp_path / "none.csv"], "csv", "none.csv does not exist"),
        ([], "csv", "no file"),
        ([file], "xml", "'xml'"),
        ([file], "parquet", "no Parquet"),
        ([file], "megatron", "no JSON"),
        ([file], "ranks", "no SQLite database"),
        ([tmp_path], "megatron", "holds no"),
    ]:
        with pytest.raises(AuditError, match=words):
            import_files(paths, format, num_experts=4, output=tmp_path / "routing.db")
    imported(tmp_path, HEADER + "1,0,a,0,3\n")
    with pytest.raises(UsageError, match="exists already"):
        imported(tmp_path, HEADER + "1,0,a,0,3\n")
    (tmp_path / "latin.csv").write_bytes(b"step,layer,source,expert,count\n1,0,caf\xe9,0,3\n")
    with pytest.raises(UsageError, match="UTF-8"):
        import_files([tmp_path / "latin.csv"], "csv", num_experts=4, output=tmp_path / "latin.db")


def test_a_resume_in_a_table(tmp_path):
    """Case C67 as a table: a log that holds steps twice needs to say which attempt wrote them."""
    first = [(step, 1, [10, 0] if step > 100 else [5, 5]) for step in range(1, 151)]
    second = [(step, 2, [5, 5]) for step in range(101, 201)]
    rows = [f"{s},0,a,{e},{n[e]},{a}\n" for s, a, n in first + second for e in range(2)]
    imported(tmp_path, HEADER.replace("count", "count,attempt") + "".join(rows), num_experts=2, top_k=1)
    with open_run(tmp_path) as run:
        assert len(run.records) == 200 and run.counts(0).sum((0, 1)).tolist() == [1000, 1000]
    text = HEADER + "".join(row.rsplit(",", 1)[0] + "\n" for row in rows)
    with pytest.raises(UsageError, match=r"step 101.* second time.*attempt"):
        import_files([csv(tmp_path, text, "b.csv")], "csv", num_experts=2, output=tmp_path / "b.db")


@pytest.mark.parametrize(
    ("text", "value"), [("64", 64), ("0:8,1-3:64", {0: 8, 1: 64, 2: 64, 3: 64}), ("5:2", {5: 2})]
)
def test_a_number_for_each_layer(text, value):
    assert parse_per_layer(text, "--num-experts") == value


@pytest.mark.parametrize("text", ["", "x", "-1", "8:", "1-2", "0:8;1:9"])
def test_no_number_for_each_layer(text):
    with pytest.raises(UsageError, match="--num-experts"):
        parse_per_layer(text, "--num-experts")


@pytest.fixture
def run_file(tmp_path, make_record):
    store = Store.create(
        tmp_path / "run" / "routing.db",
        [LayerInfo(i, f"l{i}", 4, 2) for i in (0, 1)],
        ["a", "b"],
        {"run_id": "r"},
    )
    store.begin_attempt(1)
    store.extend([make_record(step) for step in range(1, 21)])
    store.begin_attempt(15)
    store.extend([make_record(step) for step in range(15, 31)] + [make_record(30, phase="eval")])
    store.close()
    return tmp_path / "run" / "routing.db"


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_what_is_exported_can_be_imported(tmp_path, run_file, format):
    out = tmp_path / f"counts.{format}"
    with open_run(run_file) as run:
        assert export(run, format, out) == 30 * 2 * 2 * 4
        import_files([out], format, num_experts=4, top_k=2, output=tmp_path / "back.db")
        with open_run(tmp_path / "back.db") as back:
            for layer in (0, 1):
                np.testing.assert_array_equal(back.counts(layer), run.counts(layer))
            steps = [(r.first_step, r.last_step, r.phase) for r in back.records]
            assert steps == [(r.first_step, r.last_step, r.phase) for r in run.records]
        for again, format_, words in [(out, format, "exists"), (tmp_path / "x", "xml", "'xml'")]:
            with pytest.raises(UsageError, match=words):
                export(run, format_, again)
    with open_run(run_file, "nothing") as run, pytest.raises(NoDataError):
        export(run, format, tmp_path / "x")


def test_export_to_sqlite_is_plain_integers(tmp_path, run_file):
    with open_run(run_file) as run:
        export(run, "sqlite", tmp_path / "out.db")
        total = sum(int(run.counts(layer).sum()) for layer in (0, 1))
    with closing(sqlite3.connect(tmp_path / "out.db")) as db:
        found = db.execute("SELECT DISTINCT typeof(count) FROM expert_load").fetchall()
        assert found == [("integer",)]
        assert db.execute("SELECT count(*), sum(count) FROM expert_load").fetchone() == (480, total)


def test_parquet_of_other_types(tmp_path):
    """Floats that are whole, categories and small integers are read; halves are not."""
    frame = pd.DataFrame(
        {"step": [1.0, 2.0], "layer": np.array([0, 0], np.int8), "source": pd.Categorical(["a", "b"]),
         "expert": [1, 2], "count": np.array([7, 9], np.uint32)}
    )  # fmt: skip
    frame.to_parquet(tmp_path / "c.parquet")
    import_files([tmp_path / "c.parquet"], "parquet", num_experts=4, output=tmp_path / "routing.db")
    with open_run(tmp_path) as run:
        assert run.counts(0).tolist() == [[[0, 7, 0, 0], [0] * 4], [[0] * 4, [0, 0, 9, 0]]]
    frame["count"] = [7.5, 9.0]
    frame.to_parquet(tmp_path / "d.parquet")
    with pytest.raises(UsageError, match=r"line 1: count is '7.5'"):
        import_files([tmp_path / "d.parquet"], "parquet", num_experts=4, output=tmp_path / "d.db")


def test_info_says_what_is_in_a_run(run_file):
    content = info(run_file.parent)
    json.dumps(content)
    assert content["phases"]["train"]["records"] == 30 and content["phases"]["eval"]["records"] == 1
    assert content["superseded"] == 6 and [a["start_step"] for a in content["attempts"]] == [1, 15]
    text = info_text(content)
    for words in ("0-1 (l0 …): 4 experts, top-2", "steps 1 to 30", "sources: a, b", "run_id: r", "6 records"):
        assert words in text


def trace(path: Path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def call(step, layer, rank, indices, **more):
    return {
        "step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank,
        "num_tokens": len(indices), "topk": 2, "top_indices": indices, **more,
    }  # fmt: skip


def test_megatron_traces(tmp_path):
    """Ranks and micro-batches are summed, ids that are no expert are invalid, prediction layers come last."""
    trace(
        tmp_path / "router_trace_rank0.jsonl",
        [
            call(0, 1, 0, [[0, 1], [2, 3]]),
            call(0, 1, 0, [[0, 1]]),
            call(0, 0, 0, [[3, 2]], block="mtp", mtp_idx=0),
        ],
    )
    trace(tmp_path / "router_trace_rank1.jsonl", [call(0, 1, 1, [[0, -1], [3, 4]])])
    with (tmp_path / "router_trace_rank1.jsonl").open("a") as file:
        file.write('{"step": 1, "lay')  # killed in the middle
    report = import_files([tmp_path], "megatron", num_experts=4, output=tmp_path / "routing.db")
    assert "cut off" in report.notes[0] and report.records == 1
    with open_run(tmp_path) as run:
        assert [(k.layer, k.name, k.top_k) for k in run.layers] == [
            (1, "decoder.layers.1", 2), (2, "mtp.0.layers.0", 2)
        ]  # fmt: skip
        assert run.counts(1).tolist() == [[[3, 2, 1, 2]]] and run.invalid(1).tolist() == [2]
        assert run.tokens(1).tolist() == [[5]] and run.records[0].ranks == 2
        assert run.counts(1).sum() + 2 == 2 * 5
    for bad, words in [
        ({"step": 0}, "line 1"),
        ([1], "line 1"),
        (call(0, 1, 0, [[0, 1], [2]]), "line 1"),
        (call(0, 1, 0, [[0, 1]]) | {"num_tokens": 9}, "line 1"),
    ]:
        trace(tmp_path / "bad.jsonl", [bad])
        with pytest.raises(UsageError, match=words):
            import_files([tmp_path / "bad.jsonl"], "megatron", num_experts=4, output=tmp_path / "bad.db")


def rank_file(folder, rank, size, records, sources=("a", "b")):
    path = folder / f"routing.rank{rank}.db"
    layers = [LayerInfo(i, f"l{i}", 4, 2) for i in (0, 1)]
    store = Store.create(path, layers, sources, {"rank": rank, "world_size": size, "run_id": "r"})
    store.begin_attempt(1)
    store.extend(records)
    store.close()
    return path


def test_rank_files_are_joined(tmp_path, make_record):
    """Sums of counts, the largest peak, pooled logits; the reference is one pass over all tokens."""
    rng = np.random.default_rng(1)
    parts = {}
    files = []
    for rank in range(3):
        records = [make_record(step * 10 + rank) for step in (1, 2)]
        for step, record in zip((1, 2), records, strict=True):
            record.first_step = record.last_step = step
            for layer in record.layers.values():
                logits_TE = rng.normal(rank, 1 + rank, (int(layer.tokens_S.sum()), 4))
                layer.logit_mean_E, layer.logit_std_E = logits_TE.mean(0), logits_TE.std(0)
                parts.setdefault((step, id(layer) and 0), [])
            parts[step, rank] = record
        files.append(rank_file(tmp_path, rank, 3, records))
    report = import_files(files[::-1], "ranks", output=tmp_path / "routing.db")
    assert report.records == 2 and report.notes == ()
    with open_run(tmp_path) as run:
        for r, step in enumerate((1, 2)):
            mine = [parts[step, rank].layers[1] for rank in range(3)]
            for got, name in ((run.counts(1), "counts_SE"), (run.tokens(1), "tokens_S")):
                np.testing.assert_array_equal(got[r], sum(getattr(part, name) for part in mine))
            np.testing.assert_allclose(run.prob_sum(1)[r], sum(p.prob_sum_SE for p in mine), rtol=1e-6)
            np.testing.assert_allclose(run.stat(1, "peak")[r], np.max([p.peak_E for p in mine], 0))
            n = np.array([part.tokens_S.sum() for part in mine])[:, None]
            mean = (n * [p.logit_mean_E for p in mine]).sum(0) / n.sum()
            square = (n * [p.logit_std_E**2 + p.logit_mean_E**2 for p in mine]).sum(0) / n.sum()
            np.testing.assert_allclose(run.stat(1, "logit_mean")[r], mean, rtol=1e-5)
            np.testing.assert_allclose(run.stat(1, "logit_std")[r], np.sqrt(square - mean**2), rtol=1e-4)
        assert [record.ranks for record in run.records] == [3, 3]
        assert run.records[0].tokens == sum(parts[1, rank].tokens for rank in range(3))
        assert "rank" not in run.meta and run.meta["world_size"] == 3


def test_ranks_that_are_missing_double_or_of_another_run(tmp_path, make_record):
    files = [rank_file(tmp_path, rank, 3, [make_record(1)]) for rank in range(3)]
    other = rank_file(tmp_path / "other", 1, 4, [make_record(1)])
    plain = tmp_path / "plain.db"
    Store.create(plain, [LayerInfo(0, "l0", 4, 2)]).close()
    for chosen, words in [
        (files[:2], "rank 2 of 3 is missing"),
        (files[1:2], "rank 0, 2 of 3 is missing"),
        ([*files, files[1]], "rank 1 is there twice"),
        ([files[0], other, files[2]], "different numbers of ranks"),
        ([plain], "not the file of one rank"),
    ]:
        with pytest.raises(UsageError, match=words):
            import_files(chosen, "ranks", output=tmp_path / "routing.db")
    assert not (tmp_path / "routing.db").exists()


def test_a_record_that_one_rank_lacks_is_kept_as_what_it_is(tmp_path, make_record):
    files = [rank_file(tmp_path, rank, 2, [make_record(s) for s in range(1, 4 - rank)]) for rank in range(2)]
    report = import_files(files, "ranks", output=tmp_path / "routing.db")
    assert report.records == 3 and "1 of 3 records" in report.notes[0]
    with open_run(tmp_path) as run:
        assert [record.ranks for record in run.records] == [2, 2, 1]
