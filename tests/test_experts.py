"""Placement of experts on ranks: the file, errors in it, and the choice of replicas."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from nanovllm.config import ConfigError, load_config
from nanovllm.experts import (
    ExpertLoad,
    ExpertsByRank,
    PlacedLayer,
    Spread,
    evenly,
    placed,
    write_placement,
)


def spread(path: Path, *ranks: ExpertsByRank) -> Spread:
    lines = [PlacedLayer(layer, [], held) for layer, held in enumerate(ranks)]
    path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    return Spread(str(path))


def busiest(tokens: list[int], ranks: ExpertsByRank) -> float:
    """Return the maximum load of a rank relative to the mean. Replicas share an expert's tokens."""
    counts = [sum(expert in held for held in ranks) for expert in range(len(tokens))]
    loads = [sum(tokens[expert] / counts[expert] for expert in held) for held in ranks]
    return max(loads) * len(ranks) / sum(loads)


def test_hot_experts_have_copies_and_ranks_equal_loads() -> None:
    tokens = [1000, 10, 20, 400, 30, 10, 20, 30]
    assert busiest(tokens, evenly(8, 4)) > 2.6
    assert placed(tokens, 4, 0) == [[0, 5], [1, 3], [2, 4], [6, 7]]
    found = placed(tokens, 4, 1)
    assert found == [[0, 1, 3], [0, 3, 5], [0, 2, 4], [0, 6, 7]]
    assert busiest(tokens, found) < 1.22
    assert placed([5, 5], 2, 9) == [[0, 1], [0, 1]]


@given(
    ranks=st.integers(1, 8),
    each=st.integers(1, 6),
    more=st.integers(0, 5),
    data=st.data(),
)
def test_every_rank_holds_as_many_and_none_twice(
    ranks: int, each: int, more: int, data: st.DataObject
) -> None:
    count = ranks * each
    tokens = data.draw(st.lists(st.integers(0, 10**9), min_size=count, max_size=count))
    found = placed(tokens, ranks, more)
    assert {len(held) for held in found} == {min(each + more, count)}
    assert all(len({*held}) == len(held) for held in found)
    assert {expert for held in found for expert in held} == {*range(count)}


def test_a_file_says_what_each_rank_holds(tmp_path: Path) -> None:
    found = spread(tmp_path / "x", [[0, 2, 3], [1, 3, 0]], [[1, 0], [2, 3]])
    assert found.ranks(0, 4, 2) == [[0, 2, 3], [1, 3, 0]]
    assert found.ranks(1, 4, 2) == [[1, 0], [2, 3]]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[0, 1, 2, 3]], "is placed over 1 ranks; parallel.ep is 2"),
        ([[0, 1], [2, 4]], "must have all experts of the model, 0 to 3"),
        ([[0, 1], [2, 2]], "must have all experts of the model, 0 to 3"),
        ([[0, 1, 1], [2, 3, 0]],
         "must have the same number of experts on each rank, none of them twice"),
        ([[0, 1], [2, 3, 0]],
         "must have the same number of experts on each rank, none of them twice"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(ranks: ExpertsByRank, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(ConfigError) as caught:
        spread(path, ranks).ranks(0, 4, 2)
    assert str(caught.value) == f"experts.placement: {path}: layer 0 {said}"
    with pytest.raises(ConfigError, match="layer 7 is placed over 0 ranks"):
        Spread(str(path)).ranks(7, 4, 2)


def test_no_such_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(ConfigError) as caught:
        Spread(str(path))
    assert str(caught.value) == f"experts.placement: {path}: No such file or directory"
    path.write_text('{"layer": 0, "tokens": [], "ranks": 3}')
    with pytest.raises(ConfigError, match=r"experts.placement: .*x: Expected `array`, got `int`"):
        Spread(str(path))
    path.write_bytes(b'{"\xe9": 0}')
    with pytest.raises(ConfigError, match=r"experts.placement: .*x: .*(?i:utf-8)"):
        Spread(str(path))


def test_a_placement_needs_ranks() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["experts.placement=x.json"])
    assert str(caught.value) == "experts.placement needs a parallel.ep above 1; it is 1"


def test_what_an_engine_tells_becomes_a_placement(tmp_path: Path) -> None:
    tokens = b"".join(count.to_bytes(8, "little") for count in (50, 6, 7, 2**40))
    lines = ExpertLoad([1, 3], tokens, b"").lines()
    first = b'{"layer":1,"tokens":[50,6],"ranks":[]}'
    assert lines == first + b'\n{"layer":3,"tokens":[7,1099511627776],"ranks":[]}\n'
    path = tmp_path / "x"
    write_placement(lines, path, 2, 0)
    assert path.read_bytes().startswith(b'{"layer":1,"tokens":[50,6],"ranks":[[0],[1]]}\n')
    assert Spread(str(path)).ranks(3, 2, 2) == [[1], [0]]
    write_placement(lines + b"\n" + lines, path, 2, 0)  # two engines
    assert path.read_bytes().startswith(b'{"layer":1,"tokens":[100,12],"ranks":[[0],[1]]}\n')
    unseen = "no experts, or does not report them because server.page is off"
    for wrong, ranks, said in ((lines, 3, "2 experts over 3 ranks"), (b"", 2, unseen)):
        with pytest.raises(ConfigError) as caught:
            write_placement(wrong, path, ranks, 0)
        assert str(caught.value) == f"--expert-load {path}: the engine has {said}"
    with pytest.raises(ConfigError, match=r"cannot write .*: Is a directory"):
        write_placement(lines, tmp_path, 2, 0)
