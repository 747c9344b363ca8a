"""Who guesses tokens. The key is `speculate.method` of a recipe.

To add one: a file here that satisfies base.Drafter, and one line below.
"""

DRAFTERS = {
    "ngram": "nanovllm.spec.ngram:Ngram",
    "synthetic": "nanovllm.spec.synthetic:Synthetic",
}
