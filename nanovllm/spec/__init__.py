"""Draft-token proposers, by `speculate.method` of a recipe.

To add one without a model: a file here with a class that satisfies base.Drafter, and a line in
DRAFTERS. To add a model that drafts: a file with a class that satisfies model_base.DraftLoader, and
a line in DRAFT_LOADERS.
"""

DRAFTERS = {
    "ngram": "nanovllm.spec.ngram:Ngram",
    "synthetic": "nanovllm.spec.synthetic:Synthetic",
}
DRAFT_LOADERS = {
    "draft_model": "nanovllm.spec.draft_model:DraftModelLoader",
    "eagle3": "nanovllm.spec.eagle3:Eagle3Loader",
    "mtp": "nanovllm.spec.mtp:MtpLoader",
}
