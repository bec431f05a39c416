#!/usr/bin/env bash
# Packs vLLM 0.26.0 (the newest for PyTorch 2.11 and CUDA 13) and this bench as parts of 60 MB in the folder $1, for a GPU
# machine without a network; or instead of vLLM what $2 lists: guidellm.txt. Left out is what one Hopper, LLM(...) and its
# OpenAI server do not need, and what the machine has.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "${1:?folder}" && cd "$1" && pwd)
mkdir -p "$out/wheels" "$out/site" "$out/parts"
platforms=()
for glibc in 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
for old in manylinux2014 manylinux1; do platforms+=(--platform "${old}_x86_64"); done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d "$out/wheels" -r "$here/${2:-requirements.txt}"
for wheel in "$out"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$out/site"; done
cd "$out/site"
rm -rf vllm/vllm_flash_attn/_vllm_fa2_C* vllm/vllm-rs vllm/_flashmla* vllm/_qutlass* vllm/_rust_tool_parser* \
  vllm/third_party/fmha_sm100 vllm/third_party/deep_gemm/include vllm/third_party/deep_gemm/_C.cpython-31{0,1,3,4}* \
  vllm/entrypoints/serve/instrumentator/static ./*.data pycountry/locales
cd "$out"
mkdir -p benchmarks
for part in __init__ peer/{__init__,bench_vllm,peer_drive,peer_model,peer_reuse,vllm_server} sweeps/{__init__,rows} prefix_cache/{__init__,chat_trace}; do
  mkdir -p "benchmarks/$(dirname "$part")" && cp "$here/../$part.py" "benchmarks/$part.py"
done
tar czf - site benchmarks | split -b 60000000 -d -a 2 - parts/p.
ls -l parts
