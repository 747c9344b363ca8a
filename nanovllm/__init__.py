"""An LLM inference server that one person can read in an afternoon."""

from typing import NoReturn

__version__ = "0.1.0"


def __getattr__(name: str) -> NoReturn:
    """Raise ImportError for the classes of engines with a Python API, as a hint, else as usual."""
    if name in {
        "LLM", "LLMEngine", "SamplingParams", "AsyncLLM", "AsyncLLMEngine", "EngineArgs",
        "AsyncEngineArgs", "Engine", "PoolingParams", "RequestOutput", "CompletionOutput",
    }:  # fmt: skip
        raise ImportError(
            f"nanovllm has no {name}: it is a server, so start `nanovllm serve MODEL` and use an "
            "OpenAI client with its /v1 (nano-vllm, another project whose package is also named "
            "nanovllm, has LLM and SamplingParams)",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
