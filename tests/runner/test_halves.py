"""Steps as two halves that take turns: the text and the bits are those of whole steps."""
