"""The schema of the routing store, as migrations of sqlite-utils. Only writers import it: it is slow."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from moe_audit.store import APPLICATION_ID, SCHEMA_VERSION, LayerInfo, meta_rows

PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)

migrations = Migrations("moe_audit")


@migrations()
def version_1(db: Database) -> None:
    """Tables, indexes and views of schema.sql."""
    text = files("moe_audit").joinpath("schema.sql").read_text(encoding="utf-8")
    statement = ""
    for line in text.replace("@ALL_BYTES@", bytes(range(256)).hex()).splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            db.execute(statement)
            statement = ""


def create_schema(
    connection: sqlite3.Connection,
    layers: Sequence[LayerInfo],
    sources: Sequence[str],
    meta: Mapping[str, Any],
    *,
    counts_only: bool,
) -> None:
    """Makes an empty database a routing store with these layers and sources."""
    page = best_page_size([i.num_experts for i in layers], len(sources), counts_only=counts_only)
    connection.execute(f"PRAGMA page_size = {page}")  # to be set before the first table
    db = Database(connection)
    migrations.apply(db)
    with db.atomic():
        db.table("layer").insert_all(
            {**vars(i), "tags": json.dumps(i.tags)} for i in sorted(layers, key=lambda i: i.layer)
        )
        db.table("source").insert_all({"source": s, "name": name} for s, name in enumerate(sources))
        db.table("meta").insert_all({"key": k, "value": v} for k, v in meta_rows(meta))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def best_page_size(num_experts: Sequence[int], num_sources: int, *, counts_only: bool) -> int:
    """The largest page size that takes at most 2 % more room than the best, for a few hundred records.

    Rows of a few kilobytes want large pages, since a leaf page takes only whole rows; rows of many kilobytes
    want small ones, since what is left of them fills whole overflow pages. Large pages are read faster.
    """
    size = {
        page: store_bytes(num_experts, num_sources, page, records=300, counts_only=counts_only)
        for page in PAGE_SIZES
    }
    return max(page for page in PAGE_SIZES if size[page] <= 1.02 * min(size.values()))


def store_bytes(
    num_experts: Sequence[int], num_sources: int, page: int, records: int, *, counts_only: bool
) -> float:
    """Bytes of a store with this many records, by SQLite's rule for rows larger than a page."""
    small = 13 * page  # the other tables
    if counts_only:
        load = [4 * num_sources * E + 36 for E in num_experts]
        return small + records * (14 * len(load) + _table_bytes(load, page))
    load = [8 * num_sources * E + 24 * num_sources + 36 for E in num_experts]
    stat = [24 * E + 40 for E in num_experts]
    return small + records * (28 * len(load) + _table_bytes(load, page) + _table_bytes(stat, page))


def _table_bytes(rows: Sequence[int], page: int) -> float:
    """Bytes of leaf and overflow pages for one record's rows, where many records of the same rows follow."""
    repeats = max(1, 2000 // len(rows))
    overflow, leaf, free = 0, 1, page - 8
    for row in list(rows) * repeats:
        local = row
        if row > page - 35:
            least = (page - 12) * 32 // 255 - 23
            local = least + (row - least) % (page - 4)
            local = local if local <= page - 35 else least
            overflow += -(-(row - local) // (page - 4))
        if local + 10 > free:
            leaf, free = leaf + 1, page - 8
        free -= local + 10
    return (overflow + leaf) * page / repeats
