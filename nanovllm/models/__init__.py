"""Model families, one file each, by `architectures[0]` of the checkpoint's config.json."""

MODELS = {
    "DeepseekV3ForCausalLM": "nanovllm.models.deepseek_v3:DeepseekV3",
    "Glm4MoeLiteForCausalLM": "nanovllm.models.glm4_moe_lite:Glm4MoeLite",
    "LlamaForCausalLM": "nanovllm.models.llama:Llama",
    "MiniMaxM2ForCausalLM": "nanovllm.models.minimax_m2:MiniMaxM2",
    "Qwen3_5ForCausalLM": "nanovllm.models.qwen3_5:Qwen35",
    "Qwen3_5ForConditionalGeneration": "nanovllm.models.qwen3_5:Qwen35",
    "Qwen3_5MoeForCausalLM": "nanovllm.models.qwen3_5:Qwen35Moe",
    "Qwen3_5MoeForConditionalGeneration": "nanovllm.models.qwen3_5:Qwen35Moe",
    "Qwen3ForCausalLM": "nanovllm.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "nanovllm.models.qwen3_moe:Qwen3Moe",
    "Qwen3NextForCausalLM": "nanovllm.models.qwen3_next:Qwen3Next",
}
