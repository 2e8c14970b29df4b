#!/usr/bin/env bash
# Everything that wants a GPU, in one command: builds for this machine's card, tests, checks memory accesses, measures.
# docs/gpu.md explains the parts and their results.
#
#   bench/gpu/run_all.sh [--dry-run]
#
#   OUT     directory of the results            default: bench/results/gpu-<date>
#   PYTHON  interpreter with a CUDA torch       default: .venv/bin/python where it exists, else python3
#   WHEELS  what is missing and is not fetched  default: bench/gpu/wheels
#   BUDGET  seconds for everything              default: 600
#   ONLY    parts to run, separated by spaces   default: all
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
ROOT=$PWD
DRY=${1-}
if (($# > 1)) || [[ -n $DRY && $DRY != --dry-run ]]; then
  sed -n '2,/^set/{/^#/p}' "$0" >&2
  exit 2
fi
OUT=${OUT:-bench/results/gpu-$(date +%F)}
WHEELS=${WHEELS:-bench/gpu/wheels}
BUDGET=${BUDGET:-600}
ONLY=${ONLY-}
NAMES="machine build gpu_tests pytest micro trees batch fla memcheck racecheck"
for name in $ONLY; do
  if [[ " $NAMES " != *" $name "* ]]; then
    echo "ONLY: got '$name', want parts separated by spaces: $NAMES" >&2
    exit 2
  fi
done
if ! [[ $BUDGET =~ ^[1-9][0-9]*$ ]]; then
  echo "BUDGET: got '$BUDGET', want a number of seconds" >&2
  exit 2
fi
if [[ -z ${PYTHON-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=$ROOT/.venv/bin/python
fi
BUILD=$ROOT/build/gpu
SITE=$BUILD/site
export PYTHONPATH="$ROOT/python:$SITE${PYTHONPATH:+:$PYTHONPATH}"
PATH="$PATH:$SITE/bin:${CUDA_HOME:-/usr/local/cuda}/bin"

have() { command -v "$1" >/dev/null 2>&1; }
gpu() { have nvidia-smi && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }
installed() { "$PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }
record() { "$PYTHON" bench/gpu/record.py "$@"; }

# part NAME required|optional SECONDS COMMAND...: runs it with its own time limit, within the budget, and records how it
# ended. What it prints goes to a log; what it measured it writes to $OUT/NAME.json, or NAME.xml for tests.
part() {
  local name=$1 need=$2 limit=$3 status=ok begin=$SECONDS code
  shift 3
  [[ -n $ONLY && " $ONLY " != *" $name "* ]] && return
  if [[ -n $DRY ]]; then
    printf '  %-10s %-8s at most %3d s  %s\n' "$name" "$need" "$limit" "$*"
    return
  fi
  ((limit > BUDGET - SECONDS)) && limit=$((BUDGET - SECONDS))
  if ((limit < 5)); then
    skip "$name" "$need" "no time was left of the $BUDGET s"
    return
  fi
  echo "$name ..."
  rm -f "$OUT/$name.json" "$OUT/$name.partial.json" "$OUT/$name.xml"
  timeout -k 5 "$limit" "$@" >"$OUT/logs/$name.log" 2>&1
  code=$?
  case $code in
    0) ;;
    124 | 137) status="over its $limit s" ;;
    *) status="failed, exit status $code" ;;
  esac
  record part "$OUT" "$name" "$need" "$status" $((SECONDS - begin))
}

# skip NAME required|optional REASON: a part that cannot run.
skip() {
  [[ -n $ONLY && " $ONLY " != *" $1 "* ]] && return
  if [[ -n $DRY ]]; then
    printf '  %-10s %-8s not run: %s\n' "$1" "$2" "$3"
    return
  fi
  rm -f "$OUT/$1.json"
  echo "$1: not run, $3" | tee "$OUT/logs/$1.log"
  record part "$OUT" "$1" "$2" "not run: $3" 0
}

# The libraries, the tests and the benchmarks, for this card alone. A missing GoogleTest or Google Benchmark leaves its
# target out; their sources may lie in $WHEELS/googletest and $WHEELS/benchmark.
build() {
  local capability generator=() sources=() tests bench wheel
  for wheel in "$WHEELS"/*.whl; do  # one by one: a wheel for another Python must not keep the others out
    [[ -f $wheel ]] || continue
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" "$wheel" ||
      echo "not installed: $wheel"
  done
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
  have ninja && generator=(-G Ninja)
  [[ -d $WHEELS/googletest ]] && sources+=("-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=$(realpath "$WHEELS/googletest")")
  [[ -d $WHEELS/benchmark ]] && sources+=("-DFETCHCONTENT_SOURCE_DIR_BENCHMARK=$(realpath "$WHEELS/benchmark")")
  for tests in ON OFF; do
    for bench in ON OFF; do
      cmake -S . -B "$BUILD" "${generator[@]}" "${sources[@]}" -DSPECDEC_TORCH=ON -DSPECDEC_CUDA=ON \
        -DSPECDEC_TESTS=$tests -DSPECDEC_BENCH=$bench -DCMAKE_CUDA_ARCHITECTURES="$capability-real" \
        -DPython_EXECUTABLE="$(command -v "$PYTHON")" && break 2
    done
  done || return
  local targets=(specdec_ops specdec_ops_cuda _host)
  [[ $tests == ON ]] && targets+=(specdec_cuda_gpu_tests)
  [[ $bench == ON ]] && targets+=(specdec_bench_cuda)
  rm -f "$GPU_TESTS" "$GPU_BENCH"
  cmake --build "$BUILD" --parallel "$(nproc)" --target "${targets[@]}"
}
GPU_TESTS=$BUILD/tests/cpp/specdec_cuda_gpu_tests
GPU_BENCH=$BUILD/bench/cpp/specdec_bench_cuda
export -f build have
export BUILD SITE WHEELS PYTHON GPU_TESTS GPU_BENCH
# Every kernel family once; racecheck follows each access to shared memory and is slow.
CHECKED='*/VerifyTest.*/head_delta_32x32:VerifySolve.LowerPrecisions:VerifySolve.PaddingIsZeroAndUnread'
CHECKED+=':Prefill.PaddedRowsAreZeroAndUnread:ConvVerify.PaddingIsZeroAndUnread'
CHECKED+=':ConvVerify.PendingEqualsCommitFirst:CudaAcceptGreedy.RepeatedSiblings:CudaAcceptSampled.Limits:CudaLayer.FewTapsAndLongRows'

sanitize() {  # TOOL OPTION...
  if [[ -z $DRY ]] && ! have compute-sanitizer; then
    skip "$1" optional "compute-sanitizer is missing"
  elif [[ -z $DRY && ! -x $GPU_TESTS ]]; then
    skip "$1" optional "specdec_cuda_gpu_tests was not built"
  else
    part "$1" required 90 compute-sanitizer --tool "$@" --error-exitcode 9 "$GPU_TESTS" --require-gpu \
      "--gtest_filter=$CHECKED" "--gtest_output=xml:$OUT/$1.xml"
  fi
}

parts() {
  part machine required 30 "$PYTHON" bench/gpu/machine.py --json "$OUT/machine.json"
  part build required 400 bash -c build
  if [[ -n $DRY || -x $GPU_TESTS ]]; then
    part gpu_tests required 90 "$GPU_TESTS" --require-gpu "--gtest_output=xml:$OUT/gpu_tests.xml"
  else
    skip gpu_tests required "specdec_cuda_gpu_tests was not built"
  fi
  part pytest required 150 "$PYTHON" -m pytest tests/ops -q -k cuda -p no:cacheprovider "--junitxml=$OUT/pytest.xml"
  if [[ -n $DRY || -x $GPU_BENCH ]]; then
    part micro required 150 "$GPU_BENCH" --require-gpu "--benchmark_out=$OUT/micro.json" --benchmark_out_format=json
  else
    skip micro required "specdec_bench_cuda was not built"
  fi
  part trees required 60 "$PYTHON" bench/gpu/trees.py --json "$OUT/trees.json"
  part batch required 90 "$PYTHON" bench/gpu/batch.py --json "$OUT/batch.json"
  if [[ -n $DRY ]] || installed fla; then
    part fla optional 90 "$PYTHON" bench/gpu/compare_fla.py --json "$OUT/fla.json"
  else
    skip fla optional "flash-linear-attention is not installed"
  fi
  sanitize memcheck
  sanitize racecheck --racecheck-report all
}

if [[ -n $DRY ]]; then
  echo "tools:"
  for tool in nvidia-smi nvcc cmake ninja compute-sanitizer; do
    printf '  %-18s %s\n' "$tool" "$(command -v "$tool" || echo missing)"
  done
  for module in torch pytest pybind11 cutlass_library fla; do
    printf '  %-18s %s\n' "$module" "$(installed "$module" && echo installed || echo missing)"
  done
  printf '  %-18s %s\n' GPU "$(gpu && echo present || echo missing)"
  echo "parts, $BUDGET s in all, results in $OUT:"
  parts
  exit 0
fi
if ! gpu; then
  echo "no GPU: nothing was run (bench/gpu/run_all.sh --dry-run shows what would be)" >&2
  exit 1
fi
mkdir -p "$OUT/logs" && OUT=$(realpath "$OUT") || exit 1
rm -f "$OUT/summary.json"
parts
for name in trees batch fla; do  # their tables
  [[ -f $OUT/logs/$name.log ]] && cat "$OUT/logs/$name.log"
done
record summary "$OUT"
