"""Tokens that end a text, from three files and the chat template."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken

from nanovllm.config import Config, ConfigError, load_config
from nanovllm.server.ends import eos_ids_of
from tests.server.tiny_tokenizer import tiny_tokenizer, write_folder

START, END, OVER = 0, 1, 2  # <|im_start|>, <|im_end|>, <|endoftext|>
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def config(folder, template=PLAIN, own=None, generation=None, settings=None) -> Config:
    write_folder(folder, template)
    (folder / "config.json").write_text(json.dumps(own or {}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_config(None, [f"model={folder}", "load.format=dummy"])


@pytest.mark.parametrize(
    ("own", "generation", "settings", "ids"),
    [
        ({}, None, {}, ()),
        ({"eos_token_id": 7}, None, {}, (7,)),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 8}, {}, (7, 8, 9)),
        ({"eos_token_id": None}, {"eos_token_id": [8, 7]}, {}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": 8}, {"eos_token": "<|endoftext|>"}, (2, 7, 8)),
        ({}, {}, {"eos_token": {"content": "<|im_end|>"}}, (1,)),
        ({"eos_token_id": [7, 500, -1], "vocab_size": 500}, None, {}, (7,)),
        ({"vocab_size": 2}, None, {"eos_token": "<|endoftext|>"}, ()),
    ],
)
def test_every_file_that_names_one_counts(tmp_path, own, generation, settings, ids) -> None:
    given = config(tmp_path, own=own, generation=generation, settings=settings)
    assert eos_ids_of(given) == ids


@pytest.mark.parametrize(
    ("template", "ids"),
    [
        (PLAIN, ()),
        (PLAIN + "<|im_start|>bot", ()),  # always begins a turn and ends none
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
            "<|im_start|>assistant\n",
            (),
        ),
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}", ()),
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", (END,)),
        ("{% for m in messages %}{{ m.content }} <|im_end|>{% endfor %}", (END,)),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n<|im_end|>\n"
            "{% endfor %}",
            (END,),
        ),
        (
            "{% for m in messages %}{{ m.content }}"
            "{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}",
            (END,),
        ),
        (
            "{% for m in messages %}{{ m.content }}"
            "{% if loop.last %}<|endoftext|>{% else %}<|im_end|>{% endif %}{% endfor %}",
            (END, OVER),
        ),
        # Without a gap, a model writes the next turn's beginning at the end of its turn.
        ("{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}{% endfor %}", (START,)),
        ("{% for m in messages %}{{ m.content }}<think>{% endfor %}", ()),  # not special
        ("{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
         "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", (END,)),
        ("{{ raise_exception('no') }}", ()),
        ("{{ messages[0].content }}", ()),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", ()),
    ],
)  # fmt: skip
def test_the_template_shows_how_turns_end(tmp_path, template, ids) -> None:
    assert eos_ids_of(config(tmp_path, template)) == ids


def test_the_longest_token_ends_a_turn(tmp_path) -> None:
    template = "{% for m in messages %}{{ m.content }}<|im_end|>>{% endfor %}"
    given = config(tmp_path, template)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert eos_ids_of(given) == (tokenizer.token_to_id("<|im_end|>>"),)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_files_are_named(tmp_path, name) -> None:
    given = config(tmp_path, generation={})
    (tmp_path / name).write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match=rf"{name}: .*eos_token_id"):
        eos_ids_of(given)
