"""Identity of a model's weights: equal identities mean equal keys and values for equal tokens.

Cached pages outlive the process that computed them, on disk and in other engines. A path does not
identify them, since weights may be replaced under the same path.

Decision: the digest reads a sample of the weights. A digest of all bytes would read 700 GB of a
large model. Fine-tuning changes nearly every value of a tensor, so one block of each tensor
detects it. Times of files are left out, so that two hosts with the same files agree.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import msgspec
from msgspec import Struct

from nanovllm.checkpoint import CONFIG, weight_files

MAX_SAMPLES = 128  # of one file
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
NUM_THREADS = 8  # reads from a network file system take a millisecond each


class TensorSpan(Struct, frozen=True):
    """The field of a tensor in a safetensors header that is read; absent in `__metadata__`."""

    data_offsets: tuple[int, int] | None = None


def digest_of(*parts: object) -> bytes:
    """Return a SHA-256 digest of msgpack values and Structs. Different parts differ in it."""
    return sha256(msgspec.msgpack.encode(parts, order="sorted")).digest()


def model_identity(
    folder: Path, settings: Mapping[str, object], *, has_weights: bool = True
) -> bytes:
    """Return a digest of config.json, of a sample of the weights, and of `settings`.

    `settings` are the keys of the recipe that change keys and values, such as quantisation or the
    seed of random weights. Raise OSError if a file is unreadable, and ConfigError without weights.
    """
    config = sha256((folder / CONFIG).read_bytes()).digest()
    files = weight_files(folder)[1] if has_weights else []
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        samples = [*pool.map(sampled_digest, files)]
    names = [path.name for path in files]
    return digest_of("model", config, [*zip(names, samples, strict=True)], dict(settings))


def sampled_digest(path: Path) -> bytes:
    """Return a digest of a safetensors file's size, header, and one block from its tensors.

    All tensors are sampled if there are at most MAX_SAMPLES, otherwise evenly spaced ones.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
        is_known = header_bytes <= min(size - 8, MAX_HEADER_BYTES)
        header = os.pread(fd, header_bytes, 8) if is_known else b""
        digest = sha256(size.to_bytes(8, "little") + sha256(header).digest())
        for at in _sample_offsets(header, size):
            digest.update(os.pread(fd, SAMPLE_BYTES, at))
    finally:
        os.close(fd)
    return digest.digest()


def _sample_offsets(header: bytes, size: int) -> list[int]:
    """Return the middles of tensors, or evenly spaced offsets if the header is not readable."""
    try:
        tensors = msgspec.json.decode(header, type=dict[str, TensorSpan])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [size * i // MAX_SAMPLES for i in range(MAX_SAMPLES)]
    begin = 8 + len(header)
    spans = sorted(t.data_offsets for t in tensors.values() if t.data_offsets is not None)
    count = min(len(spans), MAX_SAMPLES)
    chosen = [spans[len(spans) * i // count] for i in range(count)]
    half = SAMPLE_BYTES // 2
    return [max(0, begin + max(first, (first + end) // 2 - half)) for first, end in chosen]
