"""DRAFTERS"""

DRAFTERS: dict[str, str] = {}
