"""Which features may change logits before a token is drawn, in the order they apply.

To add one: a file here that satisfies base.Processor, one line below, a field in wire.Sampling.
"""

PROCESSORS = (
    "nanovllm.sampling.logit_bias:LogitBias",
    "nanovllm.sampling.bad_words:BadWords",
    "nanovllm.sampling.min_tokens:MinTokens",
    "nanovllm.sampling.penalties:Penalties",
)

DRAWS = {
    "torch": "nanovllm_kernels.sampling_reference:draw",
    "triton": "nanovllm_kernels.sampling:draw",
}
FLOORS = {
    "torch": "nanovllm_kernels.sampling_reference:floors",
    "triton": "nanovllm_kernels.floors:floors",
}
ALLOW = {
    "torch": "nanovllm_kernels.allow:reference",
    "triton": "nanovllm_kernels.allow:allow",
}
