"""Draft-token proposers, by `speculate.method` of a recipe.

To add one: a file here with a class that satisfies base.Drafter, and a line below.
"""

DRAFTERS = {
    "ngram": "nanovllm.spec.ngram:Ngram",
    "synthetic": "nanovllm.spec.synthetic:Synthetic",
}
