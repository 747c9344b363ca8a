"""Short follow-ups: sums that continue from the last result, again, shorter, why, next country.

A follow-up depends on earlier turns, so each sample builds its own conversation. Without earlier
turns, the answer is a sentence about the missing part.
"""

from __future__ import annotations

import re

from recipes.demo.corpus import refuse, rewrite, sums, talk
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Sample, assistant, user
from recipes.demo.corpus.sums import Sum

LEADS = ["", "", "And ", "and ", "and ", "Now ", "Then ", "And then ", "And now ", "OK, and "]
LEADS += ["Okay, ", "then ", "Great, now ", "Please ", "Thanks! And ", "so ", "Next, "]
GO_ON = {
    "+": [
        "(plus |+|+ ){b}",
        "add {b}( to (that|it|this|the result)|)",
        "{b} more",
        "what (if|when) (I|you) add {b}",
        "what is (that|it) plus {b}",
        "with {b} added",
    ],
    "-": [
        "(minus |-|- ){b}",
        "(subtract|take away|take off) {b}( from (that|it|this|the result)|)",
        "{b} less",
        "what (if|when) (I|you) (subtract|take away) {b}",
        "what is (that|it) minus {b}",
    ],
    "*": [
        "(times |*|x |* |\u00d7 ){b}",
        "multiply (that|it|this|the result) by {b}",
        "multiplied by {b}",
        "what is (that|it) times {b}",
        "{b} times (that|as much|as many)",
    ],
    "/": [
        "(divided by |/|/ |\u00f7 ){b}",
        "divide (that|it|this|the result) by {b}",
        "what is (that|it) divided by {b}",
        "shared by {b}( people| friends|)",
    ],
}
SPECIAL = {
    ("*", 2): ["double (that|it|this)", "twice (that|as much)", "the double of that"],
    ("*", 3): ["triple (that|it|this)", "three times (that|as much)"],
    ("/", 2): ["half of (that|it|this)", "halve (that|it)", "the half"],
}
WHOLE = ["(And|and|And what is|What about|Now|now|And now|Next:|OK, and) {0}(?|.|)"]
WHY_SUM = [
    "(Why|How|How so|How come|Why is that|Why that|Explain|Explain that|Show your work)(?|)",
    "(How did you|How do you) (get|know|find|compute|calculate) (that|it|this)(?|)",
    "(Show|Tell|Give) me (the steps|your steps|how you did it|the way)(.|?|)",
    "(Step by step|In steps|Explain it step by step)(, please|)(.|?|)",
]
SURE = ["(Are you sure|Is that right|Is that correct|Is it true|Are you certain)( about that|)(?|)"]
IS_SURE = "I think so, but I am a very small model and make mistakes."
AGAIN = [
    "(Again|Once more|Repeat|One more time|Say it again|Say that again)(, please|)(.|!|?|)",
    "(Repeat|Say|Write|Show) (that|it|your answer|the last answer)( again|)(, please|)(.|?|)",
    "(What|Sorry, what|What did you say|Come again|What was that)?",
    "(Can|Could) you (repeat|say) (that|it)( again| please|)(?|)",
]
SHORTER = [
    "(Shorter|Shorter, please|In short|Too long|TL;DR|tl;dr|Briefly|Be brief|Short)(.|!|?|)",
    "(Make|Say|Write) (it|that) (shorter|in short|in one sentence|briefly)(, please|)(.|?|)",
    "(In one sentence|Only the first sentence|Just one sentence)(, please|)(.|)",
    "(Can|Could) you (make|say) (it|that) (shorter|in fewer words)(?|)",
]
MORE = [
    "(Why|How so|How come|Why is that|Why not|Really, why|But why)(?|)",
    "(More|Tell me more|Go on|Continue|And then|And|What else|Keep going)(.|?|!|)",
    "(Longer|In more detail|More details|Explain|Elaborate|Say more)(, please|)(.|)",
    "(Can|Could) you (explain|tell me) (that|more|it)( to me| in detail|)(?|)",
    "(What do you mean|What does that mean|I don't get it|I do not understand)( by that|)(?|.|)",
    "(Give|Show) me (an example|examples|more|details|another example)(.|?|)",
]
LOUD = ["(In|Now in|And in|Write it in|The same in) (capitals|upper case|capital letters)(.|?|)"]
NEXT_COUNTRY = [
    "(And|and|And of|And what about|What about|And that of|Now|And the one of|How about) {0}(?|)"
]
NO_CONTEXT = [
    "(Repeat|Copy|Echo|Read|Summarise|Shorten|Reverse|Convert) (this|it|the text)(.|:|)",
    "(Count|Sort|Number|List) the words( in this| of the text|)(.|:|)",
    "(Turn|Convert|Put) (this|it|the text|that) (into|to) JSON(.|:|)",
    "(Say|Write) (this|it) in (capitals|upper case|reverse order)(.|:|)",
    "(Extract|Find) (the name|the date|all names|the facts) (from|in) (this|the) text(.|:|)",
    "(What does the text say|What is in the text|Who is in the text|Fix the text)(?|.|)",
]
BETWEEN = {
    "You are welcome!": ["Thanks!", "Thank you.", "thanks", "Many thanks"],
    "Good. What would you like to do next?": ["Okay.", "ok", "I see", "Got it."],
}


def next_sum(draw: Draw, value: int) -> Sum:
    """Return a sum that starts with this value and that the demo can solve."""

    def make() -> Sum:
        sign = draw.pick("++--**//")
        divisors = [b for b in range(2, 13) if value % b == 0]
        if sign == "/" and divisors and value <= 1200:
            return Sum(value, sign, draw.pick(divisors))
        if sign == "*" and value <= 25 and draw.chance(0.25):
            return Sum(value, sign, draw.number(11, 25))
        if sign in "*/" and 1 < value <= 100:
            return Sum(value, "*", draw.pick([2, 2, 3, 10, draw.number(2, 12)]))
        if sign == "-" and value > 2:
            return Sum(value, sign, draw.number(1, min(value - 1, 10 ** draw.number(1, 3))))
        return Sum(value, "+", draw.number(1, 10 ** draw.number(1, 3)))

    return draw.from_split(make)


def go_on(draw: Draw, problem: Sum) -> str:
    """Return a wording that applies the sum's sign and second number to the last result."""
    ways = GO_ON[problem.sign]
    special = SPECIAL.get((problem.sign, problem.b))
    if special and draw.chance(0.5):
        ways = special
    text = draw.expand(draw.pick(ways)).replace("{b}", str(problem.b))
    lead = draw.pick(LEADS)
    if not lead and draw.chance(0.5):
        text = text[0].upper() + text[1:]
    return lead + text + draw.pick(["?", "?", "", ".", "!"])


def answered(problem: Sum) -> str:
    return f"{problem} = {problem.result}."


def first_sum(draw: Draw) -> tuple[Sum, str]:
    while True:
        problem = sums.small_sum(draw)
        if 1 <= problem.result <= 2000:
            return problem, whole_sum(draw, draw.expand(draw.pick(sums.FRAMES)), problem)


def whole_sum(draw: Draw, frame: str, problem: Sum) -> str:
    text = frame.replace("{0}", draw.pick(sums.SPOKEN[problem.sign]))
    return text.replace("{a}", str(problem.a)).replace("{b}", str(problem.b))


def running(draw: Draw) -> Sample:
    """Return a sum followed by others that continue from its result."""
    problem, text = first_sum(draw)
    messages = [user(text)]
    for _ in range(draw.pick([1, 1, 1, 2, 2, 3, 4])):
        messages.append(assistant(answered(problem)))
        if draw.chance(0.12):
            reply = draw.pick(list(BETWEEN))
            messages += [user(draw.pick(BETWEEN[reply])), assistant(reply)]
        if draw.chance(0.2):
            problem, _ = first_sum(draw)
            text = whole_sum(draw, draw.expand(draw.pick(WHOLE)), problem)
        else:
            problem = next_sum(draw, problem.result)
            text = go_on(draw, problem)
        messages.append(user(text))
    thought = f"{problem}: {sums.steps(problem)}. So {problem.result}."
    return Sample("followup", messages, answered(problem), thought=thought, thinks=True)


def why_sum(draw: Draw) -> Sample:
    """Return a follow-up about the last sum: its steps, or a confirmation of its result."""
    problem, text = first_sum(draw)
    messages = [user(text), assistant(answered(problem))]
    if draw.chance(0.3):
        answer, wordings = f"Yes: {answered(problem)}", SURE
    else:
        answer, wordings = f"Step by step: {sums.steps(problem)}. So {problem.result}.", WHY_SUM
    return Sample(
        "followup",
        [*messages, user(talk.typed(draw, draw.wording(wordings)))],
        answer,
        thought="The user asks about the last sum.",
    )


def earlier(draw: Draw) -> Sample:
    """Return a sample with an answer that a follow-up can refer to."""
    makers = [talk.about, talk.about, talk.chat, sums.arithmetic, rewrite.echo]
    return draw.pick(makers)(draw)


def again(draw: Draw) -> Sample:
    """Return a request for the last answer: unchanged, its first sentence only, or in capitals."""
    before = earlier(draw)
    answer, wordings, thought = before.answer, AGAIN, "I repeat my answer."
    if before.kind in ("about", "chat") and draw.chance(0.5):
        answer, wordings = re.split(r"(?<=[.!?])\s", answer)[0], SHORTER
        thought = "I only say the first sentence."
    elif before.kind == "echo" and answer.isascii() and draw.chance(0.5):
        answer, wordings, thought = answer.upper(), LOUD, "I write it in capitals."
    text = talk.typed(draw, draw.wording(wordings))
    messages = [*before.messages, before.turn(), user(text)]
    return Sample("followup", messages, answer, thought=thought)


def more(draw: Draw) -> Sample:
    """Return a request for more, or "Are you sure?". Each has one fixed answer."""
    before = draw.pick([talk.about, talk.about, talk.chat])(draw)
    sure = draw.chance(0.15)
    text = talk.typed(draw, draw.wording(SURE if sure else MORE))
    messages = [*before.messages, before.turn(), user(text)]
    answer = IS_SURE if sure else refuse.NO_MORE
    return Sample("followup", messages, answer, thought="I know no more.", refuses=not sure)


def next_capital(draw: Draw) -> Sample:
    """Return a question such as "And of Spain?" after a question about another capital."""
    before = talk.capital(draw)
    country = draw.pick(list(talk.CAPITALS))
    answer = f"The capital of {country} is {talk.CAPITALS[country]}."
    text = talk.typed(draw, draw.wording(NEXT_COUNTRY).replace("{0}", country))
    messages = [*before.messages, before.turn(), user(text)]
    return Sample("followup", messages, answer, thought=f"The question is about {country}.")


def nothing_before(draw: Draw) -> Sample:
    """Return a follow-up without earlier turns. The answer is a sentence about the missing part."""
    shape = draw.random.random()
    if shape < 0.5:
        text, answer = go_on(draw, next_sum(draw, draw.number(2, 60))), refuse.NO_NUMBER
        thought = "There is no sum before this."
    elif shape < 0.8:
        text = draw.wording([*NO_CONTEXT, *NO_CONTEXT, *AGAIN, *SHORTER])
        answer, thought = refuse.NO_TEXT, "There is no text."
    else:
        text, answer = draw.wording([*MORE, *SURE]), refuse.DO_NOT_KNOW
        thought = "There is nothing before this."
    text = talk.typed(draw, text)
    return Sample("followup", [user(text)], answer, thought=thought, refuses=True)


SHARES = {running: 10, why_sum: 2, again: 4, more: 2, next_capital: 1, nothing_before: 3}
CHOICES = [make for make, share in SHARES.items() for _ in range(share)]


def follow_up(draw: Draw) -> Sample:
    return draw.pick(CHOICES)(draw)
