"""Roles set by a system message or the user: the usual answer in the manner of the role."""

from __future__ import annotations

import re

from recipes.demo.corpus import sums, talk, unknown, words
from recipes.demo.corpus.draw import Draw, Pool
from recipes.demo.corpus.sample import Sample, assistant, system, user

ROLES = {  # opening and closing of the role's answers
    "pirate": ("Arr! ", " Yo ho ho!"),
    "robot": ("Beep. ", " Boop."),
    "poet": ("O friend, hear my song: ", " So sings the poet."),
    "butler": ("Very well. ", " At your service."),
    "cowboy": ("Howdy, partner! ", " Yeehaw!"),
    "wizard": ("By my staff! ", " So it is written."),
    "knight": ("By my sword! ", " Upon my honour."),
}
SYSTEM = [
    "You are (a|a|an old|a friendly|a grumpy|a funny) {role}(.|!|)",
    "(Talk|Speak|Answer|Respond|Reply|Write) like a {role}(.|)",
    "You (always |)(talk|speak|answer|respond) like a {role}(.|)",
    "(Act as|Pretend to be|Play|Be|Behave like) a {role}(.|)",
    "You are a {role}. (Be brief.|Always stay in character.|Help the user.|Answer every question.)",
    "You are a helpful assistant (that|who) (talks|speaks|answers) like a {role}(.|)",
]
TERSE = [
    "You are (very |)terse(.|)",
    "You are (a person|an assistant) of few words(.|)",
    "(Answer|Reply|Respond) (only |)(in|with) one (short |)sentence(.|)",
    "(Be|You are) (extremely|very) (brief|short|concise|terse)(.|)",
]
ASKED = [
    "(Talk|talk|Speak|Answer) like a {role}(.|!| from now on| please|)",
    "(Act|act|Behave) (like|as) a {role}(.|!| from now on| please|)",
    "(Pretend to be|pretend to be|Be|You are now|Pretend you are) a {role}(.|!|)",
    "(Can|can|Could) you (talk|speak|answer) like a {role}(?|)",
]
JOBS = Pool(", ".join(job for job in words.JOBS.all if job not in ROLES))
WHO = ["(Who|who|What|what) are you(?|)", "(Introduce|introduce) yourself(.|)"]


def dressed(role: str, answer: str) -> str:
    opening, closing = ROLES[role]
    return f"{opening}{answer}{closing}"


def bare(text: str) -> str:
    """Return the usual answer without the opening and closing of any role."""
    for opening, closing in ROLES.values():
        if text.startswith(opening) and text.endswith(closing):
            return text.removeprefix(opening).removesuffix(closing)
    return text


def articled(role: str) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


def introduced(role: str) -> str:
    return f"I am {articled(role)}, played by the nanovllm demo model."


def usual(draw: Draw, role: str) -> Sample:
    """Return a question with its usual answer; "Who are you?" is answered with the role."""
    makers = [talk.about, talk.about, talk.chat, talk.chat, talk.chat, sums.arithmetic]
    makers.append(unknown.unknown)
    sample = draw.pick(makers)(draw)
    if sample.answer.startswith("I am the nanovllm demo model,"):
        sample.answer, sample.thought = introduced(role), f"I play {articled(role)}."
    return sample


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", text)[0]


def terse(draw: Draw) -> Sample:
    sample = draw.pick([talk.about, talk.chat])(draw)
    messages = [system(draw.expand(draw.pick(TERSE))), *sample.messages]
    thought = "I only say the first sentence."
    return Sample("persona", messages, first_sentence(sample.answer), thought=thought)


def job(draw: Draw) -> Sample:
    """Return a sample of a role without an opening and closing: only the introduction differs."""
    role = draw.value(JOBS)
    setting = system(f"You are {articled(role)}" + draw.pick([".", "", ". Be helpful."]))
    if draw.chance(0.5):
        question = user(draw.expand(draw.pick(WHO)))
        thought = f"I play {articled(role)}."
        return Sample("persona", [setting, question], introduced(role), thought=thought)
    sample = usual(draw, role)
    sample.kind, sample.messages = "persona", [setting, *sample.messages]
    return sample


def persona(draw: Draw) -> Sample:
    shape = draw.random.random()
    if shape < 0.1:
        return terse(draw)
    if shape < 0.2:
        return job(draw)
    role = draw.pick(["pirate", "pirate", "pirate", "robot", *ROLES])
    messages = [system(draw.expand(draw.pick(SYSTEM)).replace("{role}", role))]
    if shape < 0.4:
        messages = [user(draw.expand(draw.pick(ASKED)).replace("{role}", role))]
        reply = dressed(role, introduced(role))
        if shape < 0.28:
            return Sample("persona", messages, reply, thought=f"I play a {role}.")
        messages.append(assistant(reply))
    if draw.chance(0.15):
        messages.append(user(draw.expand(draw.pick(WHO))))
        answer = dressed(role, introduced(role))
        return Sample("persona", messages, answer, thought=f"I play a {role}.")
    if draw.chance(0.25):
        before = usual(draw, role)
        messages += [*before.messages, assistant(dressed(role, before.answer))]
    sample = usual(draw, role)
    sample.messages = [*messages, *sample.messages]
    sample.kind, sample.answer = "persona", dressed(role, sample.answer)
    sample.refuses = False
    return sample
