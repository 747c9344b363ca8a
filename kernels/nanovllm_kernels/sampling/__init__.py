"""Tokens of a step: inputs from slots, draws, thresholds, grammar masks and drafts from text."""
