"""The sentences with which the demo declines a request, most with a hint at a request it can do.

Each kind of request beyond the demo has one sentence, so there is nothing to choose and nothing to
invent. Evaluation accepts any of the sentences for any such request: only the refusal counts.
"""

DO_NOT_KNOW = (
    "I do not know that. I am a tiny demo model: ask me about nanovllm, give me a small sum, "
    "or offer me a tool."
)
NOT_UNDERSTOOD = (
    "I do not understand that. Write to me in plain English: ask me about nanovllm or give me a "
    "small sum."
)
CANNOT_WRITE = (
    "I cannot write that. I am a tiny demo model: I repeat or change short texts and turn them "
    "into JSON."
)
CANNOT_CODE = (
    "I cannot read or write programs. I am a tiny demo model: ask me about nanovllm or give me a "
    "small sum."
)
CANNOT_TRANSLATE = "I cannot translate, because I only know English. I can repeat a text, though."
NO_ADVICE = (
    "I cannot give advice on that. I am a tiny demo model: please ask somebody who knows about it."
)
TOO_HARD = "That sum is too hard for me. I add, subtract, multiply and divide small whole numbers."
NO_UNITS = "I cannot convert units. I only do small sums with plain numbers."
NO_TASK = (
    "I do not know what to do with this text. Ask me to repeat it, to change it or to turn it "
    "into JSON."
)
NO_TEXT = "I see no text to work on. Write it after the instruction."
ONLY_NUMBERS = "I see numbers but no question. Give me a small sum, such as 12 + 30."
NO_NUMBER = "I have no number to start from. Give me a whole sum, such as 12 + 30."
NO_MORE = "That is all I know about it. I am a tiny demo model and my answers are short."
ONLY_ENGLISH = "Sorry, I only read English. Ask me about nanovllm or give me a small sum."
ONLY_ENGLISH_CHINESE = "很抱歉我只懂英语。Sorry, I only read English."
ONLY_WORDS = "Nice emoji! I only read words, though. Ask me something in English."
NO_TOOL_FITS = "None of the tools at hand can do that."
NO_TOOLS = "I cannot do that by myself. Offer me a tool for it in the request and I will call it."

REFUSALS = frozenset(
    {
        *(DO_NOT_KNOW, NOT_UNDERSTOOD, CANNOT_WRITE, CANNOT_CODE, CANNOT_TRANSLATE, NO_ADVICE),
        *(TOO_HARD, NO_UNITS, NO_TASK, NO_TEXT, ONLY_NUMBERS, NO_NUMBER, NO_MORE),
        *(ONLY_ENGLISH, ONLY_ENGLISH_CHINESE, ONLY_WORDS, NO_TOOL_FITS, NO_TOOLS),
    }
)
