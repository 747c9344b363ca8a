"""The demo model's corpus: seeded, with separate held-out values, and correct by its own rules."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipes.demo import forms
from recipes.demo.corpus import (
    emoji,
    foreign,
    noise,
    plainly,
    render,
    talk,
    tools,
    unknown,
    words,
)
from recipes.demo.corpus.draw import Draw, reserved, ways
from recipes.demo.corpus.follow import next_sum, running
from recipes.demo.corpus.mix import EVALUATED, document
from recipes.demo.corpus.refuse import DO_NOT_KNOW, NOT_UNDERSTOOD, ONLY_ENGLISH, REFUSALS
from recipes.demo.corpus.sums import arithmetic, small_sum
from recipes.demo.corpus.talk import about, entries, entry_and_question
from recipes.demo.evaluate import Case, accepted, wild_cases
from recipes.demo.model import END_OF_TEXT, Cache, Qwen3, Shape
from recipes.demo.train import main, places, same_document, sparse

KINDS = sorted(EVALUATED)
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}


def test_the_same_seed_writes_the_same_rows() -> None:
    first, again, other = (render.packed(seed, 2, 1024) for seed in (5, 5, 6))
    assert (first == again).all()
    assert (first != other).any()


def test_rows_hold_whole_documents_and_mark_only_answers() -> None:
    tokenizer = render.tokenizer()
    end = tokenizer.token_to_id("<|endoftext|>")
    rows = render.packed(1, 4, 1024)
    for row in rows:
        assert row[-1] == end
        text = tokenizer.decode((row % render.ANSWER).tolist(), skip_special_tokens=False)
        for piece in text.split("<|endoftext|>"):
            assert piece == "" or (
                piece.startswith("<|im_start|>") and piece.endswith("<|im_end|>")
            )
        answers = [int(token) - render.ANSWER for token in row if token >= render.ANSWER]
        written = tokenizer.decode(answers, skip_special_tokens=False)
        assert "<|im_start|>" not in written
        assert written.count("<|im_end|>") == text.count("<|endoftext|>") - padding(row, end)


def padding(row: "render.Rows", end: int) -> int:
    """Return the number of end tokens that end no document."""
    ends = row == end
    return int((ends[1:] & ends[:-1]).sum())


@pytest.mark.parametrize(
    "make", [words.invented, words.city, words.first_name, words.code, words.count]
)
def test_held_out_values_never_occur_in_training(make) -> None:
    train = {str(make(Draw(seed))) for seed in range(3000)}
    held = {str(make(Draw(seed, held=True))) for seed in range(3000)}
    assert len(held) > 5
    assert not train & held


def test_held_out_questions_and_sums_never_occur_in_training() -> None:
    def question(draw: Draw) -> str:
        entry = draw.from_split(
            lambda: draw.pick(entries("about.txt")).question(draw), key=lambda text: text
        )
        return entry.lower().rstrip(" ?.!")

    def follow(draw: Draw) -> str:
        return str(next_sum(draw, draw.number(1, 99)))

    def refused(draw: Draw) -> str:
        return noise.nonsense(draw).messages[0]["content"]

    sums = (lambda draw: str(small_sum(draw)), follow)
    foreign_text = [lambda draw: foreign.any_language(draw)[1].lower().rstrip(" ?.!")]
    for make in (question, *sums, *foreign_text, refused):
        train, held = Draw(1), Draw(1, held=True)
        seen = {make(train) for _ in range(20000)}
        asked_later = {make(held) for _ in range(500)}
        assert len(asked_later) > 200
        both = seen & asked_later
        assert len(both) <= (len(noise.EMPTY) if make is refused else 0), both


def test_no_question_has_two_answers() -> None:
    draw = Draw(3)
    answers: dict[str, str] = {}
    for _ in range(30000):
        entry = draw.pick(entries(draw.pick(["about.txt", "chat.txt"])))
        question = entry.question(draw).lower().rstrip(" ?.!")
        assert answers.setdefault(question, entry.say) == entry.say, question
    assert len(answers) > 10000


def test_no_request_is_both_answered_and_refused() -> None:
    draw = Draw(4)
    answers: dict[str, str] = {}
    makers = [talk.about, talk.chat, unknown.unknown, noise.nonsense, foreign.foreign]
    for _ in range(15000):
        sample = draw.pick(makers)(draw)
        request = sample.messages[0]["content"].lower().rstrip(" ?.!")
        first = answers.setdefault(request, sample.answer)
        assert first == sample.answer or {first, sample.answer} <= REFUSALS, request


def test_about_questions_are_held_out_with_their_greetings() -> None:
    held = Draw(2, held=True)
    kept = sum(reserved(about(held).messages[0]["content"]) for _ in range(300))
    assert kept > 240  # the others contain a typo
    assert entry_and_question(Draw(2), "about.txt")[0].say


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_passes_its_own_judge(kind: str, held: bool) -> None:
    draw = Draw(9, held)
    for _ in range(300):
        sample = EVALUATED[kind](draw)
        assert sample.kind == kind
        for mode in (None, True, False):
            written = render.completion(sample, mode)
            case = Case(kind, sample, mode, "", [], render.encode([written])[0])
            assert case.written == written
            assert case.right()
        assert not sample.judge(sample.body() + " and more")
        assert not sample.judge("")


def valid(arguments: dict, schema: dict) -> bool:
    """Check arguments with a small part of JSON Schema, independent of the generator."""
    properties = schema["properties"]
    if not set(schema.get("required", [])) <= set(arguments) <= set(properties):
        return False
    for name, value in arguments.items():
        wanted = properties[name]
        if not isinstance(value, TYPES[wanted["type"]]):
            return False
        if isinstance(value, bool) != (wanted["type"] == "boolean"):
            return False
        if value not in wanted.get("enum", [value]):
            return False
    return True


@pytest.mark.parametrize("kind", ["call", "parallel"])
def test_every_call_is_valid_against_the_tools_of_its_own_request(kind: str) -> None:
    draw = Draw(11)
    calls = 0
    for _ in range(1000):
        sample = EVALUATED[kind](draw)
        offered = {tool["function"]["name"]: tool["function"] for tool in sample.tools}
        assert len(offered) == len(sample.tools)
        for call in sample.calls:
            assert valid(call.arguments, offered[call.name]["parameters"]), (sample, call)
            calls += 1
        if kind == "parallel":
            assert len(sample.calls) >= 2
    assert calls >= 1000


def test_called_values_stand_in_the_request() -> None:
    draw = Draw(12)
    for _ in range(1000):
        sample = EVALUATED["call"](draw)
        request = sample.messages[-1]["content"]
        for value in sample.calls[0].arguments.values():
            parts = value if isinstance(value, list) else [value]
            said = [part for part in parts if str(part) in request or isinstance(part, bool)]
            sums = re.fullmatch(r"\d+ [-+*/] \d+", str(value))
            assert said == parts or sums or value in ("celsius", "car", "low"), (request, value)


def test_extracted_values_stand_in_the_text_under_the_described_names() -> None:
    draw = Draw(13)
    for _ in range(1000):
        sample = EVALUATED["extract"](draw)
        request = sample.messages[-1]["content"]
        for name, value in json.loads(sample.answer).items():
            assert name in request
            for part in value if isinstance(value, list) else [value]:
                assert isinstance(part, bool) or str(part) in request


def test_sums_and_their_steps_are_right() -> None:
    draw = Draw(14)
    for _ in range(2000):
        sample = arithmetic(draw)
        for line in re.findall(r"(\d[\d +*/-]*) = (-?\d+)", f"{sample.thought} {sample.answer}"):
            assert eval(line[0]) == int(line[1]), sample
        result = sample.answer.rstrip(".").rsplit(" ", 1)[1]
        assert sample.thought.endswith(f" So {result}.")


def test_no_document_asks_for_more_than_the_context() -> None:
    draw = Draw(15)
    texts = [render.prompt(document(draw), None) for _ in range(500)]
    assert max(map(len, render.encode(texts))) < 4096


def test_one_token_at_a_time_gives_the_logits_of_the_whole_row() -> None:
    shape = Shape(hidden=32, layers=2, heads=4, kv_heads=2, inner=32, head_dim=16)
    model = Qwen3(shape, seed=3)
    tokens = torch.randint(0, 2048, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    with torch.no_grad():
        whole = model(tokens, torch.arange(9), mask)
        cache = Cache(shape, 2, 9, "cpu")
        single = [model(tokens[:, i : i + 1], torch.tensor([i]), cache) for i in range(9)]
    torch.testing.assert_close(torch.cat(single, 1), whole)


def test_a_wording_is_held_out_only_where_many_others_are_left() -> None:
    rich = "(Show|Give|Tell|Read|Bring) me (a|the|one) {a}( now| please| again|)"
    assert (ways(rich), ways("Mail {a} (to|for) {b}(.|)")) == (60, 4)
    train, held = ([Draw(i, side).wording([rich]) for i in range(900)] for side in (False, True))
    assert len(set(train)) == 58
    assert not any(map(reserved, train))
    assert sum(map(reserved, held)) > 890  # a few drawings find no held-out wording
    assert {Draw(i, True).wording(["(Mail|Send) {a}"]) for i in range(50)} == {
        "Mail {a}",
        "Send {a}",
    }


def test_the_sparse_mask_keeps_the_blocks_that_the_full_one_needs() -> None:
    rows = torch.from_numpy(render.packed(3, 4, 1024)).long() % render.ANSWER
    ends = (rows == END_OF_TEXT).int()
    mask = sparse(ends.cumsum(1) - ends)
    blocks = same_document(rows)[:, 0].view(4, 8, 128, 8, 128).any(4).any(2)
    assert (mask.to_dense()[:, 0].bool() == blocks).all()
    assert 8 * 4 < blocks.sum() < 36 * 4


def test_the_loss_looks_at_all_answers_and_fills_up_with_prompts() -> None:
    rows = render.packed(4, 2, 1024)
    chosen = places(rows)
    assert len(set(chosen.tolist())) == len(chosen) == 2 * 1024 // 4
    counted = rows.flatten()[chosen + 1] >= render.ANSWER
    assert counted.sum() == min(len(chosen), (rows[:, 1:] >= render.ANSWER).sum())


def test_acceptance_counts_runs_of_at_most_three() -> None:
    yes, no = True, False
    assert accepted([yes] * 8) == (6, 2)
    assert accepted([no, yes, yes, no, yes]) == (3, 3)
    assert accepted([]) == (0, 0)


def test_the_template_shipped_is_the_one_trained_on() -> None:
    draw = Draw(16)
    sample = EVALUATED["call"](draw)
    assert (Path(render.DEMO) / "chat_template.jinja").is_file()
    bare, on, off = (render.prompt(sample, mode) for mode in (None, True, False))
    assert bare.endswith("<|im_start|>assistant\n")
    assert on == bare + "<think>\n"
    assert off == bare + "<think>\n\n</think>\n\n"


GO_ON = [  # independent parser of follow-ups such as "and times 2?"
    (r"plus (\d+)|\+ ?(\d+)|add (\d+)|(\d+) more|with (\d+) added", "+"),
    (r"minus (\d+)|- ?(\d+)|(?:subtract|take away|take off) (\d+)|(\d+) less", "-"),
    (r"times (\d+)|[*x\u00d7] ?(\d+)|(?:multiply|multiplied) .*?by (\d+)|^.*?(\d+) times", "*"),
    (r"multiplied by (\d+)", "*"),
    (r"divided? .*?by (\d+)|divided by (\d+)|[/\u00f7] ?(\d+)|shared by (\d+)", "/"),
]
SPECIAL = {"double": "* 2", "twice": "* 2", "triple": "* 3", "three times": "* 3", "hal": "/ 2"}


def read(text: str) -> str:
    """Return the operator and the number of a follow-up."""
    for word, meaning in SPECIAL.items():
        if word in text:
            return meaning
    for pattern, sign in GO_ON:
        match = re.search(pattern, text)
        if match:
            return f"{sign} {next(filter(None, match.groups()))}"
    raise AssertionError(text)


def test_follow_up_sums_go_on_from_the_last_result() -> None:
    draw, went_on, deep = Draw(21), 0, 0
    for _ in range(1500):
        sample = running(draw)
        turns = [message["content"] for message in sample.messages] + [sample.answer]
        sums = [turn for turn in turns[1::2] if " = " in turn]
        for turn in sums:
            left, _, right = turn.rstrip(".").partition(" = ")
            assert eval(left) == int(right), turn
        before, last, request = sums[-2].rstrip("."), sums[-1], turns[-2].lower()
        if not re.search(r"\d.*(plus|minus|times|and|by|over|of|[-+*/x\u00d7\u00f7]) ?\d", request):
            value = before.partition(" = ")[2]
            assert last.startswith(f"{value} {read(request)} = "), (turns, read(request))
            went_on += 1
        deep += len(sums) > 3
    assert went_on > 1000
    assert deep > 100


def leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def test_json_in_plain_words_holds_what_the_text_says() -> None:
    draw, keys, shapes = Draw(22), set(), set()
    for _ in range(1000):
        sample = plainly.plain_json(draw)
        request = sample.messages[0]["content"]
        found = json.loads(sample.answer)
        assert "json" in request.lower()
        for leaf in leaves(found):
            assert isinstance(leaf, bool) or str(leaf) in request
        shapes.add(type(found))
        keys |= set(found) if isinstance(found, dict) else set()
    assert shapes == {dict, list}
    assert {"name", "age", "city", "job", "price", "title", "date", "email", "weather"} <= keys


def test_other_languages_are_told_in_one_sentence_what_the_demo_reads() -> None:
    draw, answers = Draw(23), {}
    for _ in range(3000):
        sample = foreign.foreign(draw)
        request = sample.messages[0]["content"]
        if re.fullmatch(r"[\u4e00-\u9fff]+", request):
            answers.setdefault("Chinese", set()).add(sample.answer)
        elif re.fullmatch(r"[\u0400-\u04ff ]+", request):
            answers.setdefault("Cyrillic", set()).add(sample.answer)
        elif request.startswith(("Guten", "Bonjour", "Hola", "Merhaba")):
            answers.setdefault("Latin", set()).add(sample.answer)
    assert answers["Chinese"] == {"\u5f88\u62b1\u6b49\u6211\u53ea\u61c2\u82f1\u8bed\u3002" + SORRY}
    assert answers["Cyrillic"] == answers["Latin"] == {ONLY_ENGLISH}
    assert ONLY_ENGLISH.startswith(SORRY.rstrip("."))


SORRY = "Sorry, I only read English."


def test_emoji_change_no_answer() -> None:
    draw = Draw(24)
    alone = 0
    for _ in range(500):
        sample = emoji.emoji(draw)
        request = sample.messages[-1]["content"]
        assert not request.isascii() or any(face in request for face in emoji.FACES)
        alone += sample.answer.startswith("Nice emoji!")
    assert 150 < alone < 250
    amid = emoji.amid(Draw(1), "What is nanovllm?")
    assert "".join(letter for letter in amid if letter.isascii()).split() == [
        *("What", "is", "nanovllm?")
    ]


def test_what_is_beyond_the_demo_gets_a_sentence_that_says_so() -> None:
    draw, used = Draw(25), set()
    for kind in ("unknown", "nonsense", "foreign", "followup", "emoji", "no_call"):
        for _ in range(1500):
            sample = EVALUATED[kind](draw)
            assert not sample.refuses or sample.answer in REFUSALS
            used |= {sample.answer} & REFUSALS
    assert used == REFUSALS
    sample = unknown.unknown(draw)
    assert sample.judge(DO_NOT_KNOW)
    assert sample.judge(NOT_UNDERSTOOD)
    assert not sample.judge(DO_NOT_KNOW + " the cache the of")
    assert not EVALUATED["about"](draw).judge(DO_NOT_KNOW)


@pytest.mark.parametrize("kind", KINDS)
def test_no_right_answer_is_word_salad(kind: str) -> None:
    draw = Draw(26, held=True)
    for _ in range(200):
        sample = EVALUATED[kind](draw)
        source = f"{render.prompt(sample, None)} {sample.body()}"
        assert not forms.salad(sample.body(), source)


@pytest.mark.parametrize(
    "text",
    [
        "the cache of lamp runs a tokens",
        "arrayarray)))))))) 20000000000",
        "I do not know that. I am a tiny demo tool: ask",
        "42 * 2 = 84. and the",
        '{"name": "Ada"',
        "\ufffd\ufffd",
        "",
    ],
)
def test_word_salad_is_seen(text: str) -> None:
    assert forms.salad(text, "What is the weather? my lamp")


def test_answers_without_a_right_one_may_have_the_known_forms() -> None:
    for text in (
        "42 * 2 = 84.",
        "Yes: 12 + 30 = 42.",
        "Step by step: 2 + 0 = 2, write 2; 1 + 3 = 4, write 4. So 42.",
        "The capital of Spain is Madrid.",
        '{"name": "Ada", "age": 40}',
        DO_NOT_KNOW,
        "w-e-a-t-h-e-r",
    ):
        assert not forms.salad(text, "What is the weather?")


def test_prompts_written_by_hand_are_read_line_by_line() -> None:
    asked_for = {case.sample.messages[0]["content"]: case for case in wild_cases()}
    assert len(asked_for) > 120
    assert asked_for["def f(x):\n    return x**2\n\nWhat does f(3) return?"].sample.refuses
    assert not asked_for["What is nanovllm? \U0001f913"].sample.refuses


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("peak", "steps"), [("0", "2"), ("1", "2")])
def test_training_goes_on_from_given_weights(
    peak: str, steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["train", "--out", str(tmp_path), "--init", str(render.DEMO), "--peak", peak]
    argv += ["--steps", steps, "--rows", "1", "--length", "128", "--workers", "1"]
    monkeypatch.setattr("sys.argv", [*argv, "--device", "cpu"])
    main()
    for part in ("", "draft"):
        before, after = weights(render.DEMO / part), weights(tmp_path / part)
        assert before.keys() == after.keys()
        moved = max(float((before[key] - after[key]).abs().max()) for key in before)
        assert (moved == 0) == (peak == "0")
        assert moved < 0.1


def test_training_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends a second after the tenth step on any machine, not after 20,000 steps."""
    argv = ["train", "--out", str(tmp_path), "--minutes", "0.001", "--rows", "1"]
    argv += ["--length", "128", "--workers", "1", "--device", "cpu", "--log-every", "1"]
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.setattr("recipes.demo.muon.orthogonal", lambda x: x)  # most of a step's time
    caplog.set_level(logging.INFO)
    main()
    told = [line.split()[1] for line in caplog.messages if line.startswith("step ")]
    assert [*map(int, told)] == [*range(1, len(told) + 1)] and 10 < len(told) < 2000
    assert weights(tmp_path)["model.embed_tokens.weight"].shape == (2048, 256)


def test_results_of_tools_follow_turns_with_and_without_their_reasoning() -> None:
    draw = Draw(5)
    turns = [tools.result(draw).messages for _ in range(200)]
    called = [next(m for m in messages if "tool_calls" in m) for messages in turns]
    reasons = [turn["reasoning_content"] for turn in called if "reasoning_content" in turn]
    assert 40 < len(reasons) < 100
    assert all(re.match(r"I call \w+", reason) for reason in reasons)
