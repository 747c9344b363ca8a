#!/usr/bin/env bash
# Measure the records of README.md's tables on this machine, with random weights. Run it in the project's root:
#   results/measure.sh [PART ...]       default parts: online offline kernels ablation sweep
# Other parts: structured (the first of online), speculation, variants, peers, peers-offline, experts, fp8, latent,
# hybrid, turns and tiers; for several GPUs ranks, lanes, replicas, pair and four. The default parts take 20 minutes on one H200.
# Tables beside vLLM, by rows: drafts, adapters, agents, new, thin and invariant. ROWS=NAME,... restricts them, and FLAGS=--list prints
# their commands and times.
# FLAGS: further flags of every run, such as FLAGS="--results-dir /tmp/results". RECIPES: replaces 0.6B and 8B.
# RANKS: number of GPUs, 2 by default. VLLM_PYTHON: an interpreter with vLLM, for peers, peers-offline, experts and four.
set -uo pipefail
read -ra flags <<<"${FLAGS:-}"
common=(--load-format dummy ${flags[@]+"${flags[@]}"})
[ -f .commit ] && common+=(--commit "$(cat .commit)") # in a copy without .git
small=recipes/qwen3-0.6b.yaml large=recipes/qwen3-8b.yaml
recipes=${RECIPES:-$small $large}

online() { # RECIPE STREAMS PROMPT_TOKENS [MORE]
    nanovllm bench --start "$1" --concurrency "$2" --input-len "$3" --processes 6 "${@:4}" "${common[@]}"
}

measure() {
    case $1 in
    structured) # expected: at most 10 % slower than the same streams without a schema
        online $small 64 1000 --num-prompts 512
        online $small 64 1000 --num-prompts 512 --structured
        ;;
    online)
        measure structured
        online $large 64 1000 --num-prompts 512
        online $small 256 136 --num-prompts 1024 --set server.workers=4
        online $large 256 136 --num-prompts 1024 --set server.workers=4
        nanovllm bench --start recipes/paper.yaml --concurrency 256 --processes 4 --input-len 32 --output-len 1000
        ;;
    offline)
        for recipe in $recipes; do
            nanovllm bench --offline $recipe --workload w1,bs1,bs64,bs256,prefill "${common[@]}"
        done
        ;;
    kernels)
        nanovllm check-kernels --json results
        nanovllm capture-graphs $small --load-format dummy --load 1-512 --json results
        ;;
    ablation) # the effect of each optimisation, on one machine
        nanovllm bench --offline $small --workload w1 "${common[@]}" \
            --ablate kernels.cuda_graphs=false --ablate kernels.mixed_graph_tokens=0 --ablate schedule.depth=0 \
            --ablate kernels.skinny_linear=torch \
            --ablate kernels.gated_linear=torch --ablate kernels.sliced_linear=torch --ablate kernels.attention=triton --ablate kernels.decode=triton \
            --ablate kernels.rms_norm=torch,kernels.add_rms_norm=torch --ablate kernels.silu_mul=torch \
            --ablate kernels.rope_store=torch --ablate kernels.sample=torch --ablate kernels.batch_prep=torch \
            --ablate kernels.rms_norm=compile,kernels.add_rms_norm=compile,kernels.silu_mul=compile,kernels.rope_store=compile
        ;;
    speculation) # the same load without drafts, then with drafts accepted at given rates
        local rates
        for load in bs1 bs64; do
            nanovllm bench --offline $large --workload $load "${common[@]}"
            for rates in 0.6,0.4,0.2 0.9,0.75,0.55 0,0,0; do
                nanovllm bench --offline $large --workload $load "${common[@]}" --set speculate.method=synthetic \
                    --set speculate.tokens=3 --set "speculate.accept=[$rates]"
            done
        done
        ;;
    variants) # the effect of each kernel of more than 150 lines that has a replacement, on one machine
        for recipe in $recipes; do
            for load in w1 bs1 bs64 bs256 prefill; do
                nanovllm bench --offline $recipe --workload $load "${common[@]}" --ablate kernels.decode=triton \
                    --ablate kernels.skinny_linear=torch --ablate kernels.batch_prep=torch
            done
            nanovllm bench --offline $recipe --workload w1-top "${common[@]}" --ablate kernels.sample=torch
        done
        ;;
    ranks) # Qwen3-32B on one GPU, then on RANKS
        nanovllm check-kernels --tp "${RANKS:-2}" --json results
        for ranks in 1 "${RANKS:-2}"; do
            nanovllm bench --offline recipes/qwen3-32b.yaml --workload bs1,bs64,bs256,prefill "${common[@]}" \
                --set parallel.tp=$ranks --set schedule.slots=256
        done
        ;;
    lanes) # experts over RANKS GPUs, attention data-parallel and tensor-parallel; LAYERS: run only the first layers
        local size=${RANKS:-2} layers=()
        [ -n "${LAYERS:-}" ] && layers=(--set "model.num_layers=$LAYERS")
        nanovllm check-kernels --tp $size --json results
        for recipe in ${RECIPES:-recipes/qwen3-30b-a3b.yaml}; do
            for ranks in "{tp: 1, ep: $size}" "{tp: $size, ep: $size}" "{tp: $size}"; do
                nanovllm bench --offline $recipe --workload bs1-256,bs64,bs256-128,prefill "${common[@]}" --set "parallel=$ranks" \
                    --set experts.routing=uniform --set schedule.slots=256 ${layers[@]+"${layers[@]}"}
            done
        done
        ;;
    replicas) # one engine, then RANKS; four paper engines on 16 cores
        local paper="--start recipes/paper.yaml --set server.workers=2 --processes 8 --input-len 32 --output-len 1000"
        taskset -c 0-15 nanovllm bench $paper --concurrency 256 --num-prompts 1024 "${common[@]:2}"
        taskset -c 0-15 nanovllm bench $paper --concurrency 1024 --num-prompts 4096 --dp 4 "${common[@]:2}"
        for count in 1 "${RANKS:-2}"; do
            online $large $((256 * count)) 136 --num-prompts $((1024 * count)) --dp $count --set server.workers=4
        done
        ;;
    peers | peers-offline) # vLLM and nanovllm in turn, with one client and the same prompts; prints ratios and a plot
        [ "$1" = peers ] && how=online || how=offline
        for recipe in $recipes; do
            python3 results/peers.py $how $recipe ${flags[@]+"${flags[@]}"} || return
        done
        ;;
    fp8) # block fp8: kernels; 8B in bf16, with fp8 products for many rows only, and with those for few rows
        local names="block_fp8_linear block_fp8_experts block_fp8_gated experts_gated norm_quantise few_fp8_linear few_fp8_linear_add few_fp8_norm_linear few_fp8_norm_gate_up few_fp8_quantised"
        timeout 300 nanovllm check-kernels $(printf -- '--kernel %s ' $names) --json "results/fp8-$(date +%F).json"
        for load in bs1 prefill; do
            timeout 200 nanovllm bench --offline $large --workload $load "${common[@]}" \
                --ablate quantize=fp8,kernels.fp8_linear=tiled --ablate quantize=fp8,kernels.fp8_linear=cute
        done
        for recipe in "$large --set quantize=fp8 --set kernels.fp8_linear=cute" "recipes/qwen3-30b-a3b.yaml --set experts.routing=uniform"; do
            timeout 100 python3 results/profiled.py "results/scratch/profile-$(basename ${recipe%%.yaml*}).txt" 200 10 bench --offline $recipe --workload bs1 "${common[@]}" --results-dir "$(mktemp -d)"
        done
        ;;
    experts) # the same for models with experts, which nanovllm chooses by a hash and vLLM at random
        export VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
        for recipe in ${RECIPES:-recipes/qwen3-30b-a3b.yaml recipes/minimax-m2.yaml}; do
            local first=() # layers that one GPU holds
            [[ $recipe == *minimax-m2* ]] && first=(--layers 8 --set parallel.tp=1)
            [[ $recipe == *deepseek-r1* ]] && first=(--layers 6 --set parallel.tp=1)
            [[ $recipe == *qwen3-next* ]] && first=(--layers 16 --set parallel.tp=1 --theirs '{"gdn_prefill_backend":"triton"}' --ablate cache.state_dtype=bfloat16) # as in vLLM
            python3 results/peers.py offline $recipe ${first[@]+"${first[@]}"} --set experts.routing=uniform ${flags[@]+"${flags[@]}"} || return
        done
        ;;
    latent) # DeepSeek-R1's first 6 layers on one GPU: kernels, tests, absorbed and expanded prompts, both caches; with vLLM: RECIPES=recipes/deepseek-r1.yaml results/measure.sh experts
        nanovllm check-kernels --kernel latent_store --kernel latent_decode --kernel latent_decode_cute --json results
        python3 -m pytest -q tests/gpu/test_latent_chunks.py tests/gpu/test_latent.py
        timeout 100 python3 -m tests.gpu.test_latent_chunks # the chunk sizes from which expanding is faster
        timeout 200 python3 results/profiled.py results/scratch/profile-deepseek-r1.txt 100 10 bench --offline recipes/deepseek-r1.yaml --workload bs1-256 "${common[@]}" \
            --set parallel.tp=1 --set model.num_layers=6 --set experts.routing=uniform --results-dir "$(mktemp -d)"
        for load in bs1-256 bs64 bs256-128 prefill; do
            nanovllm bench --offline recipes/deepseek-r1.yaml --workload $load "${common[@]}" --set parallel.tp=1 \
                --set model.num_layers=6 --set experts.routing=uniform --ablate kernels.attention=triton \
                --ablate schedule.step_tokens=16384 --ablate kernels.decode=triton --ablate cache.dtype=fp8
        done
        ;;
    turns) # all of Qwen3-Next in fp8 on one GPU: a conversation's second turn of 30,000 tokens, then 1 to 512 streams
        python3 results/turns.py recipes/qwen3-next-80b-a3b.yaml --set load.format=dummy --set quantize=fp8 --set parallel.tp=1 --json results
        nanovllm bench --start recipes/qwen3-next-80b-a3b.yaml --sweep 1,8,64,256,512 --input-len 512 --output-len 128 --processes 6 "${common[@]}" --set quantize=fp8 --set parallel.tp=1 --set schedule.slots=512 --set experts.routing=uniform
        ;;
    tiers) # host memory and disk. DISK: a folder, by default /tmp. RESULTS: a folder for records
        local tier=(--set load.format=dummy --results-dir "${RESULTS:-results}") first=(--set parallel.tp=1 --set experts.routing=uniform --set cache.pages=600 --set cache.host_gib=2)
        python3 -m tests.load.copies $large "${tier[@]}"
        python3 -m tests.load.arriving $large "${tier[@]}" --set cache.pages=900 --set cache.host_gib=40
        python3 -m tests.load.disk_tier "${DISK:-/tmp}" --gib 8 --results-dir "${RESULTS:-results}"
        python3 -m tests.load.returning $large "${tier[@]}" --set cache.pages=300 --set cache.host_gib=16 --disk-gib 30 --disk-folder "${DISK:-/tmp}"
        nanovllm bench --offline $large --workload w1 "${common[@]}" --ablate cache.host_gib=32
        python3 -m tests.load.returning recipes/qwen3-next-80b-a3b.yaml "${tier[@]}" "${first[@]}" --set model.num_layers=16 --set schedule.slots=64 --set cache.checkpoints=64
        python3 -m tests.load.returning recipes/deepseek-r1.yaml "${tier[@]}" "${first[@]}" --set model.num_layers=6
        ;;
    hybrid) # Qwen3-Next on one GPU: kernels, tests, the first 16 layers in bf16, then all layers in fp8
        nanovllm check-kernels --kernel route --kernel delta_decode --kernel delta_drafted --kernel delta_prefill --json results
        python3 -m pytest -o addopts= -q --tb=short tests/gpu/test_hybrid.py
        python3 results/delta.py --quick
        for how in model.num_layers=16 quantize=fp8; do
            nanovllm bench --offline recipes/qwen3-next-80b-a3b.yaml --workload bs1-256,bs64,bs256-128,prefill "${common[@]}" --set parallel.tp=1 --set experts.routing=uniform --set $how || return
        done
        ;;
    pair) # prefill and decode apart on two GPUs, then two plain engines: 8,000 tokens in and 256 out, at 1, 2 and 3 requests/s
        python3 -m tests.load.pair $large --set load.format=dummy --results-dir results ${flags[@]+"${flags[@]}"}
        ;;
    four) # four H200s: all of MiniMax-M2 over HTTP and of Qwen3-Next, also with vLLM; first layers of R1, tensor- and data-parallel
        export VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random VLLM_ALLREDUCE_USE_SYMM_MEM=0
        VLLM_USE_DEEP_GEMM=0 python3 results/peers.py online recipes/minimax-m2.yaml --servers 4 --streams 1,8,64,256 --input-len 512 --output-len 128 \
            --set experts.routing=uniform --also parallel.ep=4 --also parallel.tp=1,parallel.ep=4,schedule.slots=64 ${flags[@]+"${flags[@]}"} || return
        python3 results/peers.py offline recipes/qwen3-next-80b-a3b.yaml --set parallel.tp=4 --set experts.routing=uniform --theirs '{"gdn_prefill_backend":"triton"}' \
            --ablate parallel.ep=4 --ablate parallel.tp=1,parallel.ep=4,schedule.slots=64,cache.state_dtype=bfloat16 ${flags[@]+"${flags[@]}"} || return
        for how in "--set parallel.tp=4 --set schedule.slots=512" "--set parallel.tp=1 --set parallel.ep=4 --set schedule.slots=128"; do
            nanovllm bench --start recipes/deepseek-r1.yaml --sweep 1,8,64,256,512 --input-len 512 --output-len 128 --processes 8 "${common[@]}" \
                --set experts.routing=uniform --set server.workers=4 --set "model.num_layers=${LAYERS:-42}" $how || return
        done
        ;;
    drafts | adapters | agents | new | thin | invariant) # tables of results/rows.py, nanovllm and vLLM in turn
        python3 -m results.rows "$1" --rows "${ROWS:-}" --recipe "${RECIPES:-}" ${flags[@]+"${flags[@]}"}
        ;;
    sweep) # one run per concurrency, and a plot
        nanovllm bench --start $small --sweep 1,4,16,64,128,256 --input-len 1000 --processes 6 "${common[@]}"
        ;;
    *) echo "no part $1" >&2 && return 2 ;;
    esac
}

[ $# -gt 0 ] || set -- online offline kernels ablation sweep
for part in "$@"; do
    measure "$part" || exit
done
