#!/usr/bin/env bash
# Trains both drafts for a model: its own answers, an EAGLE3 head, a small standalone draft, and what
# each is worth. Then it serves the model with the head and asks it something.
#   examples/train_eagle3.sh MODEL OUT      MODEL: a checkpoint directory, a hub id, or smollm2
# The defaults suit a GPU and a model of SmolLM2's size. From the environment: PROMPTS to make, TOKENS
# of data, SECONDS_EACH training, HELD_OUT share of prompts, and more flags in DATA_FLAGS, TRAIN_FLAGS,
# EAGLE3_FLAGS, STANDALONE_FLAGS, EVAL_FLAGS, SERVE_FLAGS, PROMPT_FLAGS. PYTHON, PORT.
set -euo pipefail

MODEL=${1:?MODEL is missing}
OUT=${2:?OUT is missing}
PYTHON=${PYTHON:-python}
PORT=${PORT:-30000}
PROMPTS=${PROMPTS:-60000}
TOKENS=${TOKENS:-20M}
SECONDS_EACH=${SECONDS_EACH:-600}
HELD_OUT=${HELD_OUT:-0.02}

train() { # command, directory, flags; goes on from a checkpoint that is there
  local resume=
  [ ! -e "$OUT/$2/checkpoint.pt" ] || resume=--resume
  # shellcheck disable=SC2086
  "$PYTHON" -m sgl_spec.training "$1" --model-path "$MODEL" --data "$OUT/data" --out "$OUT/$2" \
    --time-limit "$SECONDS_EACH" --held-out "$HELD_OUT" $resume ${TRAIN_FLAGS:-} $3
  # shellcheck disable=SC2086
  "$PYTHON" -m sgl_spec.training eval --model-path "$MODEL" --data "$OUT/data" --draft "$OUT/$2" \
    --held-out "$HELD_OUT" ${EVAL_FLAGS:-}
}

echo "== 1. The model answers prompts: $TOKENS tokens"
mkdir -p "$OUT"
[ -e "$OUT/prompts.jsonl" ] || # shellcheck disable=SC2086
  "$PYTHON" examples/make_prompts.py "$OUT/prompts.jsonl" --model-path "$MODEL" \
    --count "$PROMPTS" ${PROMPT_FLAGS:-}
# shellcheck disable=SC2086
"$PYTHON" -m sgl_spec.training data --model-path "$MODEL" --prompts "$OUT/prompts.jsonl" \
  --out "$OUT/data" --tokens "$TOKENS" ${DATA_FLAGS:-}
echo "== 2. An EAGLE3 head"
train eagle3 eagle3 "${EAGLE3_FLAGS:-}"
echo "== 3. A small standalone draft"
train standalone standalone "${STANDALONE_FLAGS:-}"

echo "== 4. The model serves with its head"
# shellcheck disable=SC2086
"$PYTHON" launch_server.py --model-path "$MODEL" --speculative-algorithm EAGLE3 \
  --speculative-draft-model-path "$OUT/eagle3" --port "$PORT" ${SERVE_FLAGS:-} &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
until curl -sf "http://127.0.0.1:$PORT/health" >/dev/null; do
  kill -0 "$server" # ends the script with the server
  sleep 0.3
done
curl -sf "http://127.0.0.1:$PORT/generate" -H 'Content-Type: application/json' \
  -d '{"text": "The harbour master", "sampling_params": {"temperature": 0, "max_new_tokens": 32}}'
echo
echo "== Done: $OUT/eagle3 and $OUT/standalone"
