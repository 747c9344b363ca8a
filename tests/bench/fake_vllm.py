"""Stand-in for a Python interpreter with vLLM: `python fake_vllm.py ARGUMENTS OF PYTHON`.

`-m vllm.entrypoints.cli.main serve FOLDER --port PORT [...]` serves chats with vLLM's token counts
and chunks. Like vLLM, it reads FOLDER's tokenizer with transformers. For a model named "ill", every
other stream ends with an error. A script runs with a stand-in for the module `vllm`.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.fake_chat import FIRST_S, GAP_S, FakeChat, event, main

VERSION = "0.26.0"


class VllmChat(FakeChat):
    version = VERSION

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        super().__init__(folder.endswith("ill"), None)
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        vocabulary = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
        assert [*range(vocabulary)] == sorted(self.tokenizer.get_vocab().values())

    def card(self) -> dict:
        limit = self.tokenizer.model_max_length
        return {"id": self.folder, "object": "model", "owned_by": "vllm", "max_model_len": limit}

    def prompt_tokens(self, messages: list[dict]) -> int:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    async def stream(self, num_tokens: int, usage: dict, writer: asyncio.StreamWriter) -> None:
        def say(delta: dict, finish: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            event(writer, {"object": "chat.completion.chunk", "choices": [choice], "usage": None})

        say({"role": "assistant", "content": ""})
        await asyncio.sleep(FIRST_S)
        for at in range(num_tokens):
            if self.is_ill and self.num_requests % 2 and at:
                return event(writer, {"error": {"message": "EngineCore died", "code": 500}})
            await asyncio.sleep(GAP_S)
            is_last = at == num_tokens - 1
            if at == 1 and not is_last:
                say({"content": ""})  # half of a character
            else:  # the last text and the finish reason share a chunk
                say({"content": " ab"}, "length" if is_last else None)
        del usage["prompt_tokens_details"]
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return event(writer, {"choices": [], "usage": usage})


class LLM:
    """The part of vllm.LLM that results/vllm_offline.py uses. All rows take 1 ms per token."""

    def __init__(self, model: str, load_format: str, **settings: object) -> None:
        assert load_format == "dummy" and Path(model, "config.json").is_file()
        assert settings["skip_tokenizer_init"] and settings["max_model_len"] == 4096
        self.has_adapters = settings.get("enable_lora", False)

    def generate(
        self,
        asked: list[dict],
        params: list[dict],
        use_tqdm: bool,
        lora_request: list[tuple[str, int, str]] | None,
    ) -> list[object]:
        assert not use_tqdm and all(one["ignore_eos"] for one in params)
        for _, number, folder in lora_request or ():
            assert self.has_adapters and number >= 1
            assert Path(folder, "adapter_model.safetensors").is_file()
        assert all(isinstance(token, int) for one in asked for token in one["prompt_token_ids"])
        counts = [one["max_tokens"] for one in params]
        time.sleep(max(counts) / 1000)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * n)]) for n in counts]


if __name__ == "__main__":
    assert os.environ.get("VLLM_FAKE") == "yes"  # the environment for vLLM has arrived
    if sys.argv[1] == "-m":
        module, command, folder, *rest = sys.argv[2:]
        assert (module, command) == ("vllm.entrypoints.cli.main", "serve")
        assert rest[:2] == ["--load-format", "dummy"]
        asyncio.run(main(int(rest[rest.index("--port") + 1]), VllmChat(folder)))
    else:
        vllm = ModuleType("vllm")
        vllm.__dict__.update(LLM=LLM, SamplingParams=dict, __version__=VERSION)
        request = ModuleType("vllm.lora.request")
        request.__dict__["LoRARequest"] = lambda name, number, folder: (name, number, folder)
        sys.modules |= {
            "vllm": vllm,
            "vllm.lora": ModuleType("vllm.lora"),
            request.__name__: request,
        }
        runpy.run_path(sys.argv[1], run_name="__main__")
