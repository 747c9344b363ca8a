"""A Hypothesis profile: `pytest --hypothesis-profile=quick` while working."""

from hypothesis import settings

settings.register_profile("quick", max_examples=5)
