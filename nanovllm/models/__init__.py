"""One file per model family; the key is `architectures[0]` of the checkpoint's config.json."""

MODELS = {
    "LlamaForCausalLM": "nanovllm.models.llama:Llama",
    "Qwen3ForCausalLM": "nanovllm.models.qwen3:Qwen3",
}
