#!/usr/bin/env bash
# crates/candle, which is a package outside of the workspace: its CPU half is formatted, has nothing to say to clippy,
# passes its tests, and its programs check their results. With the feature `cuda` clippy is silent, too.
source "$(dirname "$0")/env.sh"

# Not the target folder of the tests: this package has other dependencies, and optimises them.
export CARGO_TARGET_DIR=$PWD/target/candle CARGO_PROFILE_DEV_DEBUG=0
cd crates/candle
cargo fmt --check
cargo clippy --all-targets -- -D warnings

# candle compiles its kernels by nvcc. For clippy a stand-in does, which makes empty files.
nvcc=$CARGO_TARGET_DIR/nvcc
mkdir -p "$nvcc/bin" "$nvcc/include"
echo '#define CUDA_VERSION 13000' >"$nvcc/include/cuda.h"
cat >"$nvcc/bin/nvcc" <<'END'
#!/usr/bin/env bash
[[ " $* " == *" --version "* ]] && { echo "Cuda compilation tools, release 13.0, V13.0.88"; exit; }
file='' folder=. kernels=()
while (($#)); do
    case $1 in
    -o) shift && file=$1 ;;
    --output-directory) shift && folder=$1 ;;
    *.cu) kernels+=("$(basename "$1" .cu).ptx") ;;
    esac
    shift
done
if [[ -z $file ]]; then
    for kernel in "${kernels[@]}"; do : >"$folder/$kernel"; done
elif [[ $file == *.a ]]; then ar rc "$file"
else : >"$file"; fi
END
chmod +x "$nvcc/bin/nvcc"
CUDA_HOME=$nvcc CUDA_PATH=$nvcc CUDARC_CUDA_VERSION=13000 CUDA_COMPUTE_CAP=90 PATH=$nvcc/bin:$PATH \
    cargo clippy --features peer --lib --benches -- -D warnings

cargo test
for example in candle_digits candle_llama candle_serve; do
    GPU_POOL_BACKEND=host:3 cargo run --example "$example"
done
RUSTDOCFLAGS="-D warnings" cargo doc --no-deps
