#!/usr/bin/env bash
# A GGUF file of a Hugging Face folder, by llama.cpp's own converter, with the folder's bfloat16.
#
#   benchmarks/compare/convert_gguf.sh PEERS MODEL
#
# writes MODEL.bfloat16.gguf beside the folder MODEL; PEERS is where setup_peers.sh built torch and
# llama-cpp. The file's weights are bit for bit those of the folder.
set -euo pipefail
peers=${1:?"usage: $0 PEERS MODEL"}
model=${2:?"usage: $0 PEERS MODEL"}
source=$peers/llama-cpp-source/vendor/llama.cpp
PYTHONPATH=$source/gguf-py "$peers/torch/bin/python" "$source/convert_hf_to_gguf.py" "${model%/}" \
    --outtype bf16 --outfile "${model%/}.bfloat16.gguf"
