-- The routing store, schema version 1. Matrices are little-endian BLOBs over [sources, experts], row-major.
-- A `crc` covers the values before it in its row, seeded with the row's key; NULL: not checked.

CREATE TABLE meta (key TEXT PRIMARY KEY NOT NULL, value ANY) STRICT;

CREATE TABLE layer (
  layer           INTEGER PRIMARY KEY,       -- 0-based index of the MoE layer's block in model order
  name            TEXT NOT NULL,
  num_experts     INTEGER NOT NULL CHECK (num_experts > 0),
  top_k           INTEGER CHECK (top_k > 0), -- NULL where the number of picks varies
  capacity_factor REAL,                      -- NULL where dropless
  gating          TEXT,
  tags            TEXT NOT NULL DEFAULT '[]' -- JSON list, e.g. ["post_drop"]
) STRICT;

CREATE TABLE source (source INTEGER PRIMARY KEY, name TEXT NOT NULL) STRICT;

CREATE TABLE attempt (
  attempt    INTEGER PRIMARY KEY,
  start_step INTEGER NOT NULL,               -- earlier attempts count only before it
  started_at TEXT NOT NULL,
  world_size INTEGER,
  writer     TEXT,                           -- tells the spilled records of one writer from another's
  written    INTEGER NOT NULL DEFAULT 0      -- records and events of that writer taken in
) STRICT;

CREATE TABLE record (
  record          INTEGER PRIMARY KEY,
  attempt         INTEGER NOT NULL REFERENCES attempt,
  phase           TEXT NOT NULL,             -- train, eval, or what the user named
  first_step      INTEGER NOT NULL,
  last_step       INTEGER NOT NULL CHECK (last_step >= first_step),
  microbatches    INTEGER,
  tokens          INTEGER,                   -- NULL: not known (an import)
  excluded_tokens INTEGER,                   -- masked out: padding and the like
  ranks           INTEGER,
  lr              REAL,
  router_lr       REAL,
  loss            REAL,
  written_at      TEXT NOT NULL,
  load_rows       INTEGER,                   -- its rows in load and in layer_stat: a lost one is seen
  stat_rows       INTEGER,
  crc             INTEGER                    -- CRC-32 of attempt to stat_rows, as JSON
) STRICT;

CREATE TABLE load (
  record   INTEGER NOT NULL REFERENCES record,
  layer    INTEGER NOT NULL REFERENCES layer,
  counts   BLOB NOT NULL,                    -- u4 [sources, experts]: router picks before any drop
  prob_sum BLOB,                             -- f4 [sources, experts]: sum of row-normalised gate probabilities
  tokens   BLOB,                             -- i8 [sources]: tokens that reached the router
  top1     BLOB,                             -- f4 [sources, 2]: sum, sum of squares of the largest probability
  invalid  INTEGER NOT NULL DEFAULT 0,       -- picks whose id is no expert (NaN logits, sentinels)
  crc      BLOB                              -- u4 [4]: CRC-32 of each matrix, 0 where there is none
) STRICT;
CREATE UNIQUE INDEX load_layer_record ON load (layer, record);

CREATE TABLE layer_stat (
  record     INTEGER NOT NULL REFERENCES record,
  layer      INTEGER NOT NULL REFERENCES layer,
  peak       BLOB,                           -- f4 [experts]: largest per-micro-batch load, in fair shares
  sq_over_t  BLOB,                           -- f8 [experts]: sum over micro-batches of n_e^2 / T_b
  dropped    BLOB,                           -- u4 [experts]: assignments dropped for capacity
  logit_mean BLOB,                           -- f4 [experts]
  logit_std  BLOB,                           -- f4 [experts]
  calls      INTEGER,                        -- router forwards in this record
  crc        BLOB                            -- u4 [5]: CRC-32 of each array, 0 where there is none
) STRICT;
CREATE UNIQUE INDEX layer_stat_layer_record ON layer_stat (layer, record);

CREATE TABLE event (
  event  INTEGER PRIMARY KEY,
  step   INTEGER,
  kind   TEXT NOT NULL,
  detail TEXT NOT NULL DEFAULT '{}'          -- JSON object
) STRICT;

-- A record counts unless a later attempt starts at or before its last step.
CREATE VIEW live_record AS
SELECT r.* FROM record r
WHERE NOT EXISTS (
  SELECT 1 FROM attempt a WHERE a.attempt > r.attempt AND a.start_step <= r.last_step
);

-- One row per (record, layer, source, expert), in plain SQL: a byte is its place in x'000102…ff', less one.
-- Both levels end in UNION ALL with a SELECT that has no FROM. It adds no row; it keeps SQLite from merging the
-- level into the query around it, which would sort whole BLOBs for a GROUP BY (measured: 379 s instead of 1 s for
-- a million experts). The first level cuts out a source, so that a large BLOB is not copied for every byte.
CREATE VIEW expert_load_all AS
WITH RECURSIVE
  expert(expert) AS (
    SELECT 0 UNION ALL SELECT expert + 1 FROM expert
    WHERE expert + 1 < (SELECT max(num_experts) FROM layer)
  ),
  per_source AS (
    SELECT
      r.record, r.attempt, r.record IN (SELECT record FROM live_record) AS live,
      r.first_step, r.last_step, r.phase, l.layer, s.name AS source, l.num_experts,
      substr(d.counts, 4 * s.source * l.num_experts + 1, 4 * l.num_experts) AS counts
    FROM layer l
    CROSS JOIN load d ON d.layer = l.layer
    CROSS JOIN record r ON r.record = d.record
    CROSS JOIN source s ON 4 * s.source * l.num_experts < length(d.counts)
    UNION ALL SELECT 0, 0, 0, 0, 0, '', 0, '', 0, x'' WHERE 0
  )
SELECT
  record, attempt, live, first_step, last_step, phase, layer, source, expert,
  instr(x'@ALL_BYTES@', substr(counts, 4 * expert + 1, 1)) - 1
  + (instr(x'@ALL_BYTES@', substr(counts, 4 * expert + 2, 1)) - 1) * 256
  + CASE substr(counts, 4 * expert + 3, 2) WHEN x'0000' THEN 0 ELSE
      (instr(x'@ALL_BYTES@', substr(counts, 4 * expert + 3, 1)) - 1) * 65536
      + (instr(x'@ALL_BYTES@', substr(counts, 4 * expert + 4, 1)) - 1) * 16777216
    END
  AS count
FROM per_source
CROSS JOIN expert ON expert < num_experts
UNION ALL SELECT 0, 0, 0, 0, 0, '', 0, '', 0, 0 WHERE 0;

CREATE VIEW expert_load AS
SELECT record, first_step, last_step, phase, layer, source, expert, count
FROM expert_load_all
WHERE live;
