"""Reading of files: grouping, order, and files that change during the read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.config import ConfigError
from nanovllm.models import shards
from nanovllm.models.destination import Destination
from nanovllm.models.shards import Piece, Stored, num_bytes, read, runs, tensors_in

CPU = torch.device("cpu")


def destination(tensor: Tensor, dim: int = 0, start: int = 0, count: int = -1) -> Destination:
    count = tensor.shape[dim] if count < 0 else count
    into = torch.empty_like(tensor.narrow(dim, start, count))
    return Destination(into, tuple(tensor.shape), dim, start, count)


def written(path: Path, tensors: dict[str, Tensor]) -> dict[str, Stored]:
    save_file(tensors, path)
    return dict(tensors_in(path))


def test_headers_say_what_safetensors_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"b": torch.zeros(3, 5), "f": torch.zeros(2).bfloat16()}, path, {"format": "pt"})
    found = dict(tensors_in(path))
    size = path.stat().st_size
    assert found["b"] == Stored(path, size - 64, size - 4, "F32", (3, 5))
    assert found["f"] == Stored(path, size - 4, size, "BF16", (2,))


@pytest.mark.parametrize("staging", [64, 4000, 1 << 20])
def test_every_slice_arrives_whatever_is_read_at_once(
    staging: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "STAGING", staging)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{i}": torch.randn(7 + i, 30 + i, generator=generator) for i in range(20)}
    tensors |= {"odd": torch.arange(5).to(torch.float8_e4m3fn), "last": torch.ones(9)}
    stored = written(tmp_path / "a.safetensors", tensors)
    cuts = [(0, 0, -1), (0, 3, 4), (1, 0, 11), (1, 5, 25), (0, 2, 0), (1, 2, 0)]
    places = {n: destination(t, *cuts[at % 6 if t.ndim == 2 else 0])
              for at, (n, t) in enumerate(tensors.items())}  # fmt: skip
    order = runs((stored[name], to) for name, to in places.items())
    assert sum(read(order, CPU)) == sum(map(num_bytes, order))
    for name, to in places.items():
        assert torch.equal(
            to.into.float(), tensors[name].narrow(to.dim, to.start, to.count).float()
        )


def test_neighbours_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is that of the file. A large gap with other ranks' tensors is skipped."""
    monkeypatch.setattr(shards, "STAGING", 4096)
    monkeypatch.setattr(shards, "GAP", 1024)
    tensors = {f"{i:02}": torch.full((16, 16), float(i)) for i in range(12)}  # 1024 bytes each
    stored = written(tmp_path / "a.safetensors", tensors)

    def read_at_once(names: list[str]) -> list[list[str]]:
        begins = {tensor.begin: name for name, tensor in stored.items()}
        pairs = ((stored[name], destination(tensors[name])) for name in names)
        return [[begins[piece.rows.begin] for piece in run] for run in runs(pairs)]

    assert read_at_once(["04", "02", "01", "00", "03"]) == [["00", "01", "02", "03"], ["04"]]
    assert read_at_once(["06", "04"]) == [["04", "06"]]
    assert read_at_once(["07", "04"]) == [["04"], ["07"]]
    other = written(tmp_path / "b.safetensors", {"x": torch.zeros(4)})["x"]
    pairs = [(stored["11"], destination(tensors["11"])), (other, destination(torch.zeros(4)))]
    assert [len(run) for run in runs(pairs)] == [1, 1]


@pytest.mark.parametrize("staging", [1 << 12, 16 << 20])
@pytest.mark.parametrize("ranks", [2, 4])
def test_of_columns_a_rank_reads_its_own_alone(
    ranks: int, staging: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result does not depend on page boundaries or neighbouring data."""
    monkeypatch.setattr(shards, "STAGING", staging)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.arange(3).to(torch.float8_e4m3fn),  # so that b begins at an odd offset
        "b": torch.randn(301, 2048, generator=generator).to(torch.float8_e4m3fn),
        "c": torch.randn(100, 1000, generator=generator),
        "d": torch.randn(77, 4096, generator=generator).bfloat16(),
        # Reading all columns of this one costs less than another call.
        "e": torch.randn(8, 64, generator=generator),
        "f": torch.randn(1, 200_000, generator=generator),
    }
    stored = written(tmp_path / "a.safetensors", tensors)
    for rank in range(ranks):
        places, least = {}, 0
        for name, tensor in tensors.items():
            width = tensor.shape[-1] // ranks
            where = (0, 0, -1) if name == "a" else (1, rank * width, width)
            places[name] = destination(tensor, *where)
            least += places[name].into.nbytes
        order = runs((stored[name], to) for name, to in places.items())
        assert least <= sum(read(order, CPU)) <= least + 8 * 64 * 4
        for name, to in places.items():
            expected = tensors[name].narrow(to.dim, to.start, to.count)
            assert torch.equal(to.into.float(), expected.float()), name


def test_tensors_at_odd_places_are_read_by_themselves(tmp_path: Path) -> None:
    """In files of other programs, a float tensor may follow one of an odd number of bytes."""
    entries = {
        "a": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    header, path = json.dumps(entries).encode(), tmp_path / "a.safetensors"
    values = torch.tensor([1.5, -2.0])
    data = bytes([56, 57, 58]) + values.numpy().tobytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    places = {"a": destination(torch.zeros(3).to(torch.float8_e4m3fn)), "b": destination(values)}
    stored = dict(tensors_in(path))
    assert len(order := runs((stored[name], to) for name, to in places.items())) == 2
    assert list(read(order, CPU)) == [3, 8]
    assert torch.equal(places["b"].into, values)
    assert places["a"].into.tolist() == [1.0, 1.125, 1.25]


def said_after(how: str, path: Path, order: list[list[Piece]]) -> str:
    """Return the error of reading a file that changed after its header was read."""
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError) as caught:
        list(read(order, CPU))
    return str(caught.value)


@pytest.mark.parametrize("how", ["cut short", "gone"])
def test_a_file_that_changes_after_its_header_was_read(how: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {f"{i}": torch.zeros(100, 100) for i in range(8)}
    stored = written(path, tensors)
    order = runs((stored[name], destination(tensor)) for name, tensor in tensors.items())
    assert (
        said_after(how, path, order)
        == {
            "gone": f"cannot read {path}: No such file or directory",
            "cut short": f"{path} became shorter while it was read",
        }[how]
    )


@pytest.mark.parametrize("how", ["cut short", "gone"])
def test_a_file_that_changes_before_its_columns_are_read(how: str, tmp_path: Path) -> None:
    path, tensor = tmp_path / "a.safetensors", torch.zeros(100, 1000)
    stored = written(path, {"a": tensor})
    order = runs([(stored["a"], destination(tensor, 1, 500, 500))])
    assert (
        said_after(how, path, order)
        == {
            "gone": f"cannot read {path}: No such file or directory",
            "cut short": f"cannot read {path}: mmap length is greater than file size",
        }[how]
    )


@pytest.mark.parametrize(
    "entry, said",
    [
        ({"shape": [3], "data_offsets": [0, 16]}, "bytes 0 to 16 are not F32 [3]"),
        ({"shape": [5], "data_offsets": [-4, 16]}, "bytes -4 to 16 are not F32 [5]"),
        (
            {"shape": [4], "data_offsets": [0, 20]},
            "it has {size} bytes; its header requires {more}",
        ),
        (
            {"shape": [4], "data_offsets": [0, 12]},
            "it has {size} bytes; its header requires {less}",
        ),
        ({"shape": 4, "data_offsets": [0, 16]}, "Expected `array`, got `int` - at `$[...].shape`"),
    ],
)
def test_a_header_that_is_wrong(entry: dict[str, object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = json.dumps({"a": {"dtype": "F32", **entry}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ConfigError) as caught:
        list(tensors_in(path))
    size = path.stat().st_size
    said = said.format(size=size, more=size + 4, less=size - 4)
    assert str(caught.value) == f"{path} is not a complete safetensors file: {said}"


def test_a_file_of_many_tensors_is_read_at_once(tmp_path: Path) -> None:
    path, count = tmp_path / "a.safetensors", 20_000
    names = [f"model.layers.{i // 1000}.experts.{i % 1000}.w1.weight" for i in range(count)]
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    header, values = json.dumps(entries).encode(), torch.arange(count, dtype=torch.float32)
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    stored, into = dict(tensors_in(path)), torch.empty(count, 1)
    places = {name: Destination(into[i], (1,), 0, 0, 1) for i, name in enumerate(names)}
    order = runs((stored[name], to) for name, to in places.items())
    assert list(read(order, CPU)) == [4 * count]
    assert torch.equal(into[:, 0], values)
