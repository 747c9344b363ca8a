"""Models of the Hugging Face Hub, taken from its cache or downloaded to it.

Each kind of failure has one sentence with a remedy. The list of files and config.json are checked
before any weights are downloaded.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nanovllm.checkpoint import ADAPTER, CONFIG, base_of, check_names, is_weights
from nanovllm.typed_yaml import ConfigError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

log = logging.getLogger("serve")
WANTED = ("*.json", "*.safetensors", "*.jinja")
CONNECT_S, ANSWER_S = 1.5, 10.0  # timeouts of the first request to the Hub
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
Check = Callable[[Path, str], object]  # takes config.json and the model's id; raises ConfigError


def cached(model: str) -> Path | None:
    """Return the folder of a model in the Hub's cache, without a network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(WANTED), local_files_only=True))
    except (OSError, ValueError):
        return None


def fetched(model: str, check: Check, known: Collection[str] = ()) -> Path:
    """Return the folder of a Hub id's files, after downloading missing ones.

    Without a connection, return the cached files. `known` are ids of models, of which the closest
    is suggested if the Hub does not have this one. Raise ConfigError on failure.
    """
    from huggingface_hub import snapshot_download

    log.info("looking for %s on the Hub and in its cache", model)
    for library in ("httpx", "httpx2"):  # they log every request
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        info = model_info(model)
    except Exception as error:  # errors of these libraries have no common base class
        return offline(model, error, known)
    names = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    try:
        base = base_of(one_file(model, ADAPTER).parent) if ADAPTER in names else None
        check_names(names, model, base)
        config = one_file(model, CONFIG)
        check(config, model)
        check_space(model, names)
        return Path(snapshot_download(model, allow_patterns=list(WANTED)))
    except ConfigError:
        raise
    except Exception as error:
        raise failed(model, error, known) from None


def model_info(model: str) -> ModelInfo:
    """Return the Hub's entry of the model, with its list of files."""
    from urllib.request import getproxies

    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE and not getproxies():
        reach(constants.ENDPOINT)
    return HfApi().model_info(model, files_metadata=True, timeout=ANSWER_S)


def reach(url: str) -> None:
    """Raise ConnectionError unless the host is resolved and connected within CONNECT_S.

    The timeouts of the libraries are longer, and do not include name resolution.
    """
    import asyncio

    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    problem: list[object] = [f"no answer within {CONNECT_S:g} s"]

    async def connect() -> None:
        _, writer = await asyncio.open_connection(host, port, happy_eyeballs_delay=0.25)
        problem.clear()
        writer.close()

    def work() -> None:
        try:
            asyncio.run(connect())
        except OSError as error:
            number = error.errno or 0
            problem[:] = [os.strerror(number) if number > 0 else error.strerror or error]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    if problem:
        raise ConnectionError(str(problem[0]))


def offline(model: str, error: Exception, known: Collection[str]) -> Path:
    """Return the cached folder of a model that the Hub failed to return, if it has weights."""
    folder = cached(model)
    if folder is None or not any(is_weights(path.name) for path in folder.iterdir()):
        raise failed(model, error, known) from None
    log.warning("no answer from the Hub for %s; serving the files of its cache", model)
    return folder


def one_file(model: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, name))


def check_space(model: str, names: dict[str, int]) -> None:
    """Raise ConfigError if the disk of the cache has no room for the missing files."""
    from huggingface_hub import constants, try_to_load_from_cache

    files = [name for name in names if name.endswith(tuple(one[1:] for one in WANTED))]
    missing = [n for n in files if not isinstance(try_to_load_from_cache(model, n), str)]
    place = Path(constants.HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    needed, free = sum(names[name] for name in missing), shutil.disk_usage(place).free
    if needed > free:
        raise no_room(
            model, f"{needed / 1e9:.1f} GB are to be downloaded, {free / 1e9:.1f} are free"
        )


def no_room(model: str, why: str) -> ConfigError:
    from huggingface_hub import constants

    return ConfigError(
        f"no room for {model} in {constants.HF_HUB_CACHE}: {why}; free some, or set HF_HOME to a "
        "folder on another disk"
    )


def failed(model: str, error: Exception, known: Collection[str]) -> ConfigError:
    """Return the ConfigError, with a remedy, for an error of the Hub's libraries."""
    from huggingface_hub import constants, errors

    url = f"{constants.ENDPOINT}/{model}"
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{model} is a gated model: accept its terms at {url}, and set HF_TOKEN to a token of "
            "your account (or log in with `hf auth login`)"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        near = difflib.get_close_matches(model, known, 1)
        meant = f"did you mean {near[0]}? Check" if near and near[0] != model else "check"
        return ConfigError(
            f"the Hub has no model {model}: {meant} its spelling at {constants.ENDPOINT}; "
            "a private one needs HF_TOKEN"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ConfigError(
            f"{model} is not in the Hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE "
            "forbids downloading it: unset that, or name a folder"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        cure = "check HF_TOKEN" if status in (401, 403) else "try again later"
        return ConfigError(f"the Hub refused {model} with status {status}: {cure}, or see {url}")
    if isinstance(error, OSError) and error.errno in FULL:
        return no_room(model, str(error.strerror))
    if isinstance(error, PermissionError):
        return ConfigError(f"cannot write {error.filename}: {error.strerror}; set HF_HOME")
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{model} is not a valid Hub id: {error}")
    why = str(error).strip().splitlines()[:1] or [type(error).__name__]
    return ConfigError(
        f"no connection to {constants.ENDPOINT} ({why[0]}), and {model} is not in the Hub's cache: "
        "check the network, or copy the model here and name its folder"
    )
