"""results/acceptance.py: which questions it asks, and how it reads the server's counters."""

from __future__ import annotations

import httpx
import pytest

from results import acceptance

PAGE = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{model_name="demo",engine="0"} 40
vllm:spec_decode_num_drafts_total{model_name="demo",engine="1"} 10
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="demo",engine="0",position="0"} 30
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="demo",engine="1",position="0"} 8
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="demo",engine="0",position="1"} 20
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="demo",engine="0",position="2"} 5
"""


def test_questions_are_single_turns() -> None:
    found = acceptance.questions()
    assert len(found) > 80 and found[0] == "hi"
    assert not [line for line in found if " | " in line or "=>" in line or line.startswith("#")]


def test_counts_are_sums_over_engines() -> None:
    answer = httpx.MockTransport(lambda _: httpx.Response(200, text=PAGE))
    with httpx.Client(transport=answer, base_url="http://server") as client:
        assert acceptance.counts(client) == [50, 38, 20, 5]


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ('vllm:x_total{model_name="demo",position="1"} 3', True),
        ('vllm:x_total{model_name="demo",position="10"} 3', False),
        ('vllm:y_total{position="1"} 3', False),
        ("# TYPE vllm:x_total counter", False),
    ],
)
def test_a_sample_has_the_name_and_the_label(line: str, is_one: bool) -> None:
    assert acceptance.like(line, 'vllm:x_total{position="1"') is is_one
