#!/usr/bin/env bash
# Everything in this project that wants a GPU, unattended, on one CUDA machine, in under 25 minutes.
#
#     benchmarks/gpu/run_all.sh [--device cuda|cpu] [--out DIR] [--minutes M] [--only "PART..."]
#
# Calibrates, trains Llamas in plain PyTorch and in TorchTitan under every policy beside its prediction, records the caching
# allocator, runs the tests that need a device. Leaves DIR.tar.gz (default: gpu-results.tar.gz). A part that fails does not stop
# the others: DIR/status.txt says how each ended, DIR/logs what it said. With --device cpu: the same on tiny sizes. $PYTHON is
# the interpreter (default: python); the project need not be installed, its dependencies must be there. --only runs some of the
# parts calibrate, plain, titan, allocator, tests, into the DIR of an earlier run: for machines that are lent for minutes.
set -u
device=cuda out=gpu-results minutes=24 only="calibrate plain titan allocator tests"
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || { echo "run_all.sh: $1 needs a value" >&2; exit 2; }
    case "$1" in
        --device) device=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --minutes) minutes=$2; shift 2 ;;
        --only) only=$2; shift 2 ;;
        *) echo "run_all.sh: unknown argument $1" >&2; exit 2 ;;
    esac
done
case "$device" in cuda | cpu) ;; *) echo "run_all.sh: --device must be cuda or cpu" >&2; exit 2 ;; esac
case "$minutes" in '' | *[!0-9]*) echo "run_all.sh: --minutes must be a whole number" >&2; exit 2 ;; esac
python=${PYTHON:-python}
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out/logs" || exit 2
out=$(cd "$out" && pwd)
cd "$root" || exit 2
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
date >>"$out/status.txt"
begin=$(date +%s)
failed=0

wanted() { case " $only " in *" $1 "*) ;; *) return 1 ;; esac; }
left() { echo $((minutes * 60 - ($(date +%s) - begin))); }

# part NAME SHARE COMMAND...: at most SHARE percent of all the time, and never more than what is left.
part() {
    local name=$1 limit=$((minutes * 60 * $2 / 100)) rest
    shift 2
    rest=$(left)
    [ "$limit" -gt "$rest" ] && limit=$rest
    if [ "$limit" -lt 5 ]; then
        echo "$name: no time was left" | tee -a "$out/status.txt"
        failed=1
        return 1
    fi
    echo "== $name (at most $limit s)"
    timeout --kill-after=20 "$limit" "$@" >"$out/logs/$name.txt" 2>&1
    local code=$?
    echo "$name: exit code $code after $(($(date +%s) - begin)) s in all" | tee -a "$out/status.txt"
    [ "$code" -ne 0 ] && failed=1
    return "$code"
}

# Percent of the time: calibrating, and each of the two kinds of training; each may take `slack` more. On a CPU only one of
# them trains, and one thread is what other work on the machine disturbs least.
share=20 training=27 slack=5
[ "$device" = cpu ] && share=40 training=15 && export OMP_NUM_THREADS=1
minutes_of() { awk "BEGIN {print $minutes * $1 / 100}"; }
profile=$out/profile.toml
wanted calibrate && rm -f "$out"/profile.* # what an earlier run has left
# An operator that makes the device unusable, or ends the process, is left out by the next start.
resume=
wanted calibrate && for attempt in 1 2 3; do
    # shellcheck disable=SC2086
    part "calibrate_$attempt" $((share + slack)) "$python" -m autosac calibrate --device "$device" -o "$profile" \
        --minutes "$(minutes_of "$share")" --quiet $resume && break
    code=$?
    { [ "$code" -gt 137 ] || grep -q "start again with --resume" "$out/logs/calibrate_$attempt.txt"; } || break
    resume=--resume
done
if [ ! -f "$profile" ]; then
    profile=$("$python" -c 'from autosac.estimator.gpu import detect_gpu; print(detect_gpu())' 2>/dev/null) || profile=h100-sxm-80gb
    echo "predictions are made with $profile" | tee -a "$out/status.txt"
fi
for kind in plain titan; do
    wanted "$kind" || continue
    part "$kind" $((training + slack)) "$python" -m "benchmarks.gpu.$kind" --profile "$profile" --device "$device" --out "$out" \
        --minutes "$(minutes_of "$training")"
done
wanted allocator && part allocator 10 "$python" -m benchmarks.gpu.allocator --device "$device" --out "$out"
if ! wanted tests; then
    :
elif [ "$device" = cpu ]; then
    part tests 15 "$python" -m benchmarks.calibration --profile "$profile" --threads 1 --repeat 1 --models "mlp;llama, tiny"
else
    part tests 10 "$python" -m pytest -q -p no:cacheprovider tests/memory_sim/test_cuda_allocator.py
fi
timeout 60 "$python" -m benchmarks.gpu.compare "$out" >"$out/logs/compare.txt" 2>&1
code=$?
[ "$code" -ne 0 ] && failed=1
echo "compare: exit code $code after $(($(date +%s) - begin)) s in all" | tee -a "$out/status.txt"
cat "$out/comparison.md" 2>/dev/null
tar -C "$(dirname "$out")" -czf "$out.tar.gz.part" "$(basename "$out")" && mv "$out.tar.gz.part" "$out.tar.gz"
echo "results: $out.tar.gz"
exit "$failed"
