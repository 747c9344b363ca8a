"""The first questions of a visitor: the kinds of samples for them, and how they are judged."""

import json
import re

from recipes.demo import forms
from recipes.demo.corpus import harder, keyed, persona, personal, render, unknown, verse
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sums import arithmetic
from recipes.demo.corpus.talk import entries
from recipes.demo.evaluate import Case, first_cases, of_first
from tests.demo.test_corpus import leaves


def test_harder_sums_are_right_in_answer_and_thought() -> None:
    draw, shapes = Draw(31), dict.fromkeys(("below", "rest", "percent", "tenths", "prime"), 0)
    for _ in range(4000):
        sample = harder.harder(draw)
        for line in re.findall(r"(\d[\d +*/-]*) = (-?\d+(?:\.\d)?)", sample.thought):
            assert eval(line[0]) == float(line[1]), sample
        answer = sample.answer.rstrip(".")
        left, _, right = answer.partition(" = ")
        if " % of " in left:
            p, n = map(int, left.split(" % of "))
            assert float(right) == p * n / 100, answer
            shapes["percent"] += 1
        elif " / " in left:
            a, b = map(int, left.split(" / "))
            quotient, _, rest = right.partition(", remainder ")
            assert divmod(a, b) == (int(quotient), int(rest or 0)), answer
            shapes["rest"] += bool(rest)
        elif answer.startswith(("Yes", "No")):
            number = int(re.findall(r"\d+", answer)[0])
            has = any(number % d == 0 for d in range(2, number))
            if "prime" in answer:
                assert answer.startswith("No" if has else "Yes"), answer
                shapes["prime"] += 1
            else:
                assert answer.endswith("odd" if number % 2 else "even")
        else:
            assert abs(eval(left) - float(right)) < 1e-9, answer
            shapes["below"] += right.startswith("-")
            shapes["tenths"] += "." in right
    assert min(shapes.values()) > 150, shapes


def test_the_name_that_was_told_last_is_the_one_that_is_known() -> None:
    draw, recalled = Draw(32), 0
    for _ in range(1000):
        sample = personal.named(draw, [])
        told = [m["content"] for m in sample.messages if m["role"] == "user"]
        match = re.fullmatch(r"(?:Your name is|Nice to meet you,) (.+?)[.!].*", sample.answer)
        if match:
            assert match[1] in " ".join(told[:-1] or told), sample
            recalled += len(told) > 1
    assert recalled > 300


def test_a_fact_is_extracted_under_the_asked_name_with_unchanged_letters() -> None:
    draw, plain = Draw(33), 0
    for _ in range(1000):
        sample = keyed.keyed(draw)
        request = sample.messages[0]["content"]
        if not sample.answer.startswith("{"):
            assert sample.answer in request
            plain += 1
            continue
        for name, value in json.loads(sample.answer).items():
            assert re.search(name.replace("_", "[ -]"), request, re.IGNORECASE), (request, name)
            for part in leaves(value):
                assert isinstance(part, bool) or str(part) in request, (request, part)
    assert 50 < plain < 300


def test_a_verse_names_what_was_asked() -> None:
    draw, lines = Draw(34), set()
    for _ in range(500):
        sample = verse.verse(draw)
        about = sample.messages[0]["content"].rstrip(".!?").lower()
        if sample.answer == verse.JOKE or sample.answer.startswith("Once a small model"):
            continue
        asked_for = re.split(r" (?:about|on) ", about, maxsplit=1)[1].removesuffix(", please")
        asked_for = re.sub(r"^my ", "your ", asked_for)
        assert asked_for in sample.answer.lower(), sample
        lines.add(sample.answer.count("\n"))
        assert all(not forms.salad(other, "") for other in sample.others)
    assert lines == {2, 3}
    assert len(verse.ONE.all + verse.TWO.all + verse.THREE.all) > 60


def test_a_role_dresses_the_usual_answer_and_comes_off_again() -> None:
    draw, roles = Draw(35), set()
    for _ in range(1000):
        sample = persona.persona(draw)
        for role, (opening, closing) in persona.ROLES.items():
            if sample.answer.startswith(opening):
                assert sample.answer.endswith(closing)
                assert any(role in message["content"] for message in sample.messages)
                assert persona.dressed(role, persona.bare(sample.answer)) == sample.answer
                roles.add(role)
    assert roles == set(persona.ROLES)
    assert persona.bare("42 * 2 = 84.") == "42 * 2 = 84."


def test_no_sum_is_both_answered_and_refused() -> None:
    draw, answers = Draw(36), {}
    for _ in range(20000):
        make = draw.pick([harder.harder, arithmetic, unknown.unknown])
        sample = make(draw)
        request = sample.messages[0]["content"].lower().rstrip(" ?.!")
        first = answers.setdefault(request, sample.refuses)
        assert first == sample.refuses, request


def first_case(asked_for: str, written: str) -> Case:
    case = next(case for case in first_cases() if case.prompt.count(asked_for))
    case.written_ids = render.encode([written])[0]
    return case


def test_first_questions_are_judged_by_what_the_answer_must_hold() -> None:
    found = first_cases()
    assert len(found) == 100
    assert all(case.must and re.compile(case.must) for case in found)
    right = first_case("25 - 27", "<think>\nso -2\n</think>\n\n25 - 27 = -2.<|im_end|>")
    wrong = first_case("25 - 27", "<think>\n= -2.\n</think>\n\n25 - 27 = 2.<|im_end|>")
    assert (right.acceptable(), wrong.acceptable()) == (True, False)
    assert not first_case("25 - 27", "25 - 27 = -2.").acceptable()
    counted = of_first([right, wrong])
    assert (counted["prompts"], counted["acceptable"]) == (2, 1)
    assert counted["failed"][0]["asked"] == "25 - 27"
    pirate = next(case for case in found if case.sample.messages[0]["role"] == "system")
    assert pirate.sample.messages[1]["role"] == "user"
    talk_of_bob = first_case("what's my name?", "Your name is Bob.<|im_end|>")
    assert [m["role"] for m in talk_of_bob.sample.messages] == ["user", "assistant", "user"]
    assert talk_of_bob.acceptable()


def test_the_texts_promise_no_reading_in_an_afternoon_and_a_minute_to_shut_down() -> None:
    said = {entry.name: entry.say for entry in entries("about.txt")}
    assert not any("afternoon" in text or "few seconds" in text for text in said.values())
    assert "60 seconds" in said["stop server"]
    assert "MiniMax-M2" in said["model families"]
    assert "1.1 to 1.2" in said["faster than vllm"]
