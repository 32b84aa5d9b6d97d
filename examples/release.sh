#!/usr/bin/env bash
# What a release job does with a checkpoint: judge its routing, state it, and verify what will be published.
#   bash examples/release.sh RUN STEP FOLDER
# Ends 0 only where the routing is acceptable and the statement is what the store says.
set -euo pipefail
run=$1 step=$2 folder=$3

moe-audit check "$run" --checkpoint "$step"                     # blocks here: exit code 1 to 5
moe-audit statement "$run" --checkpoint "$step" -o "$folder"    # routing_statement.json and .md
moe-audit statement --verify "$folder" "$run"                   # and again, where it is published from
echo "released: checkpoint $step of $run with $folder/routing_statement.json"
