"""Hypothesis profiles: `pytest --hypothesis-profile=quick` while working."""

from hypothesis import Phase, settings

settings.register_profile("quick", max_examples=5)
# For seeded faults: that one fails is enough, the smallest example is not wanted.
settings.register_profile(
    "mutant", max_examples=5, phases=[Phase.explicit, Phase.generate], print_blob=False
)
