#!/usr/bin/env bash
# One GPU against two (or more) that share the model: tokens per second at several concurrencies, what
# a round's collectives take, and whether the texts are the same.
#   examples/tp_bench.sh OUT      OUT: a directory for widened models and results
# From the environment: SHAPES of `examples/widen.py` (`as-is` takes MODEL unwidened), MODEL, HEAD (its
# EAGLE3 head), SIZES of --tp-size, ALGORITHMS, LEVELS of concurrency, PROMPTS, TOKENS, FLAGS for every
# server, PYTHON.
set -euo pipefail

OUT=${1:?OUT is missing}
PYTHON=${PYTHON:-python}
MODEL=${MODEL:-smollm2}
HEAD=${HEAD:-smollm2-eagle3}
SHAPES=${SHAPES:-llama-8b qwen-32b}
SIZES=${SIZES:-1 2}
ALGORITHMS=${ALGORITHMS:-none EAGLE3 NGRAM}
LEVELS=${LEVELS:-1:24 8 48}
PROMPTS=${PROMPTS:-200}
TOKENS=${TOKENS:-256}
FLAGS=${FLAGS:---dtype bfloat16}
mkdir -p "$OUT"

flags() { # algorithm
  [ "$1" = none ] || echo "--speculative-algorithm $1"
  [ "$1" != EAGLE3 ] || echo "--speculative-draft-model-path $head --speculative-num-steps 5" \
    "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
}

for shape in $SHAPES; do
  model=$MODEL head=$HEAD
  if [ "$shape" != as-is ]; then
    model=$OUT/$shape head=$OUT/$shape-eagle3
    [ -e "$model/config.json" ] ||
      "$PYTHON" examples/widen.py --model-path "$MODEL" --shape "$shape" "$model"
    case $ALGORITHMS in *EAGLE3*)
      [ -e "$head/config.json" ] ||
        "$PYTHON" examples/widen.py --model-path "$MODEL" --shape "$shape" --draft "$HEAD" "$head"
    esac
  fi
  for algorithm in $ALGORITHMS; do
    for size in $SIZES; do
      echo "== $shape, $algorithm, --tp-size $size"
      run="--model-path $model --tp-size $size $(flags "$algorithm") $FLAGS"
      # shellcheck disable=SC2086
      "$PYTHON" -m sgl_spec.bench serving --levels $LEVELS --max-tokens "$TOKENS" --ignore-eos \
        --json "$OUT/serving.jsonl" --launch $run --disable-radix-cache
      for batch in ${LEVELS//:[0-9]*/}; do
        # shellcheck disable=SC2086
        "$PYTHON" -m sgl_spec.bench round --batch "$batch" --json "$OUT/rounds.jsonl" $run
      done
      # shellcheck disable=SC2086
      "$PYTHON" examples/tp_texts.py "$OUT/texts-$shape-$algorithm-$size.json" \
        --prompts "$PROMPTS" --max-tokens "$TOKENS" $run
    done
  done
  "$PYTHON" examples/tp_texts.py --compare "$OUT/texts-$shape"-*.json
done
