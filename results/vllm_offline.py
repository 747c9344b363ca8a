"""vLLM without HTTP, for peers.py. The interpreter needs vLLM and not nanovllm.

The input from stdin is {"settings": arguments of LLM, "loads": [[warm-up, load], ...], "adapter":
a folder or null}. A load is [prompts as token ids, tokens to generate for each prompt, sampling
parameters, number of adapters]. Requests have this number of adapters in turn, all with the weights
in the folder. For each load, one line of the output begins with RESULT, which peers.py reads.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams, __version__

    settings = job["settings"] | {"load_format": "dummy", "skip_tokenizer_init": True}
    begin = time.perf_counter()
    llm = LLM(**settings)
    ready_s = time.perf_counter() - begin
    settings_text = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    for pair in job["loads"]:
        for prompts, outputs, sampling_params, num_adapters in pair:
            common = sampling_params | {"ignore_eos": True, "detokenize": False}
            params = [SamplingParams(max_tokens=count, **common) for count in outputs]
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            adapters = in_turn(job["adapter"], num_adapters, len(prompts))
            begin = time.perf_counter()
            outputs_of_load = llm.generate(inputs, params, use_tqdm=False, lora_request=adapters)
            duration_s = time.perf_counter() - begin
            if [len(one.outputs[0].token_ids) for one in outputs_of_load] != outputs:
                sys.exit("vLLM generated other numbers of tokens than requested")
        # `duration_s` is the time of the load, which comes after its warm-up.
        result = {
            "version": __version__,
            "ready_s": ready_s,
            "duration_s": duration_s,
            "settings": settings_text,
        }
        sys.stdout.write(f"\nRESULT {json.dumps(result)}\n")
        sys.stdout.flush()


def in_turn(folder: str, num_adapters: int, num_requests: int) -> list[object] | None:
    """Return the adapter of each request; None without adapters."""
    if not num_adapters:
        return None
    from vllm.lora.request import LoRARequest

    every = [LoRARequest(f"a{nth}", nth, folder) for nth in range(1, num_adapters + 1)]
    return [every[at % num_adapters] for at in range(num_requests)]


if __name__ == "__main__":
    main()
