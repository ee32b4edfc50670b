#!/bin/bash
# The entrypoint of a Ray job: bash train.sh NAME SEED [OPTIONS of rlframe train]. See ../README.md.
run_dir=${RUNS:?name a directory that all machines share: runtime-env.yaml}/$1-seed$2
seed=$2
shift 2

resume=()
[ -e "$run_dir/config.json" ] && resume=(--resume)
# `exec`, so that the run gets the SIGTERM of `ray job stop` itself.
exec rlframe train "$@" --seed "$seed" --run-dir "$run_dir" "${resume[@]}"
