#!/usr/bin/env bash
# The demo: two small MoE models trained on the same real text, one with its balancing loss, one without it
# and with a router learning rate far too high; then the same policy judges both.
#   make demo            or, where the package is installed:   bash examples/demo.sh RUNS SEED
set -euo pipefail
runs=${1:-runs} seed=${2:-1}
configs=$(dirname "$0")/../moe_trainer/configs

rm -rf "$runs/text"
moe-train prepare demo -o "$runs/text"
sources=()
for folder in "$runs/text"/*; do sources+=("data.sources.$(basename "$folder")=$folder"); done
for name in healthy sick; do
  printf '\n== training runs/%s\n' "$name"
  moe-train run "$configs/demo_$name.toml" --save-folder "$runs/$name" --overwrite "train.seed=$seed" "${sources[@]}"
done

check() { # RUN EXPECTED-EXIT-CODE
  printf '\n== moe-audit check %s\n' "$1"
  local code=0
  moe-audit check "$1" || code=$?
  moe-audit report "$1" -o "$1/report.html" --quiet
  if [ "$code" != "$2" ]; then
    echo "expected exit code $2 of moe-audit check $1, got $code" >&2
    exit 1
  fi
}
check "$runs/healthy" 0
check "$runs/sick" 1

cat <<END

runs         $runs/healthy (accepted)  $runs/sick (rejected)
reports      $runs/healthy/report.html  $runs/sick/report.html
TensorBoard  tensorboard --logdir $runs
END
