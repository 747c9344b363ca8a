"""Routed experts: choice of experts, sort of their rows, and their products."""
