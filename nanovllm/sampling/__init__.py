"""Features that change logits before a token is drawn, in the order of their application.

To add one: a file here with a class that satisfies base.Processor, a line below, and a field in
wire.Sampling.
"""

PROCESSORS = {
    "allowed_tokens": "nanovllm.sampling.allowed_tokens:AllowedTokens",
    "logit_bias": "nanovllm.sampling.logit_bias:LogitBias",
    "bad_words": "nanovllm.sampling.bad_words:BadWords",
    "min_tokens": "nanovllm.sampling.min_tokens:MinTokens",
    "penalties": "nanovllm.sampling.penalties:Penalties",
}

THRESHOLDS = {
    "torch": "nanovllm_kernels.sampling.reference:thresholds",
    "triton": "nanovllm_kernels.sampling.thresholds:thresholds",
}
APPLY_MASK = {
    "torch": "nanovllm_kernels.sampling.apply_mask:reference",
    "triton": "nanovllm_kernels.sampling.apply_mask:apply_mask",
}
