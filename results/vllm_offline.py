"""vLLM without HTTP, for peers.py. The interpreter needs vLLM and not nanovllm.

The input from stdin is {"settings": arguments of LLM, "loads": [[warm-up, load], ...]}. A load is
[prompts as token ids, tokens to generate for each prompt, sampling parameters]. peers.py reads the
line of the output that begins with RESULT.
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
    ready_s, taken = time.perf_counter() - begin, []
    for pair in job["loads"]:
        for prompts, outputs, drawn in pair:
            common = drawn | {"ignore_eos": True, "detokenize": False}
            params = [SamplingParams(max_tokens=count, **common) for count in outputs]
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            begin = time.perf_counter()
            done = llm.generate(inputs, params, use_tqdm=False)
            took = time.perf_counter() - begin
            if [len(one.outputs[0].token_ids) for one in done] != outputs:
                sys.exit("vLLM generated other numbers of tokens than requested")
        taken.append(took)  # without the warm-up
    shown = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    found = {"version": __version__, "ready_s": ready_s, "duration_s": taken, "settings": shown}
    sys.stdout.write(f"\nRESULT {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
