"""Kernels that an engine would compile, recorded without a GPU and without computing.

The real Runner and Scheduler run on CPU tensors that claim to be on a Hopper GPU. A launch of a
Triton kernel records its key; Triton compiles a kernel again only for a new key. A request for a
kernel in CuTe DSL records its arguments. Matrix products return uninitialised tensors, and tokens
are random. Kernels of a graph are recorded at its capture, not at its replay. With several ranks,
only rank 0 runs and its messages are dropped.

Run it in a separate process: it replaces Triton's driver and functions of modules permanently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from nanovllm_kernels import compile_cache
from nanovllm_kernels.exchange.all_reduce import PROGRAMS, Peers
from nanovllm_kernels.exchange.long_sums import Landings
from nanovllm_kernels.fp8_reference import Scaled
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from nanovllm.attention import latent_rows
from nanovllm.config import Config, load_config
from nanovllm.layers import kernels
from nanovllm.parallel.mesh import Mesh
from nanovllm.parallel.nccl import Links, NcclMesh
from nanovllm.parallel.peers import CAPACITY
from nanovllm.runner import build, graphs, resolved
from nanovllm.runner.graphs import Captured, DecodeGraphs
from tests.hopper import Hopper
from tests.parallel.test_nccl import Recorded
from tests.runner.random_steps import Traffic

RECIPES = Path(__file__).parents[2] / "recipes"
# For each argument or option: the part that selects a compiled kernel.
Key = tuple[tuple[str, str], ...]
PROCESSORS = 132
IMPORTED = (  # imported before the replacement, since these modules query the device on import
    "nanovllm_kernels.products.dense_fp8",
    "nanovllm_kernels.attention.latent_decode_cute",
    "nanovllm_kernels.attention.paged_decode_cute",
    "nanovllm_kernels.products.skinny_linear",
    "nanovllm_kernels.sampling.thresholds",
    "nanovllm.attention.flash",
    "nanovllm.layers.expert_kernels",
)


@dataclass
class Notes:
    """Recorded keys by kernel."""

    seen: dict[str, set[Key]] = field(default_factory=dict)  # during warm-up
    later: dict[str, dict[Key, str]] = field(default_factory=dict)  # first step with each new key
    is_warming: bool = True
    is_replayed: bool = False
    step: str = ""  # name of the current step of the traffic

    def note(self, kernel: str, key: Key) -> None:
        if self.is_replayed:
            return
        known = self.seen.setdefault(kernel, set())
        if self.is_warming:
            known.add(key)
        elif key not in known:
            self.later.setdefault(kernel, {}).setdefault(key, self.step)

    def forget(self) -> None:
        """Clear all keys before the next model."""
        self.seen.clear()
        self.later.clear()
        self.is_warming, self.step = True, ""

    def enter(self, step: str) -> None:
        self.step = step

    @contextmanager
    def replayed(self) -> Iterator[None]:
        before, self.is_replayed = self.is_replayed, True
        yield
        self.is_replayed = before

    def found(self) -> list[tuple[str, str, str]]:
        """Return of each late key the kernel, the difference from the nearest key, and the step."""
        return [
            (kernel, differences(key, self.seen.get(kernel, set())), step)
            for kernel, keys in self.later.items()
            for key, step in keys.items()
        ]


def differences(key: Key, known: set[Key]) -> str:
    if not known:
        return "never seen"
    ours = dict(key)

    def of(other: Key) -> list[str]:
        theirs = dict(other)
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        return [f"{name}={ours.get(name)} for {theirs.get(name)}" for name in names]

    return "; ".join(min(map(of, known), key=len))


class Cuda(str):
    """A device that claims to be a GPU."""

    type = "cuda"


class Nothing(TorchFunctionMode):
    """Mode in which products compute nothing. New integers are zeros, so that indices are valid."""

    EMPTY = (torch.empty, torch.empty_like, Tensor.new_empty)
    BATCHED = (torch.bmm,)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear:
            return args[0].new_empty(*args[0].shape[:-1], len(args[1]))
        if function in self.BATCHED:
            out = kwargs.get("out")
            shape = *args[0].shape[:2], args[1].shape[2]
            return args[0].new_empty(shape) if out is None else out
        if function is torch.einsum:
            subscripts, *factors = args
            shape = function(subscripts, *(factor.to("meta") for factor in factors)).shape
            return factors[0].new_empty(shape)
        if function is Tensor.addmm_:
            return args[0]
        made = function(*args, **kwargs)
        if function in self.EMPTY and not made.is_floating_point() and not made.is_meta:
            made.zero_()
        return made


def triton_noted(notes: Notes) -> Callable[..., None]:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if notes.is_replayed:  # its keys are those of the capture
            return
        *_, binder = self.device_caches[0]
        _, specialised, more = binder(*args, **options)
        names = [param.name for param in self.params]
        key = [(name, str(of)) for name, of in zip(names, specialised, strict=True)]
        key += [(name, str(value)) for name, value in sorted(more.items()) if name not in names]
        notes.note(f"{self.module.rpartition('.')[2]}:{self.__name__}", tuple(key))

    return run


def cute_noted(notes: Notes) -> Callable[..., Callable[..., None]]:
    def call(self: Any, *kind: Any) -> Callable[..., None]:
        job = self.job(*kind)
        notes.note(job.function, (("kind", job.arguments),))
        return lambda *args: None

    return call


def as_referenced(path: str, reference: str) -> None:
    """Replace a function by one that launches the same and stores the reference's results."""
    (module, name), (other, meaning) = path.split(":"), reference.split(":")
    function = getattr(import_module(module), name)
    means = getattr(import_module(other), meaning)

    @wraps(function)
    def both(*args: Any, **options: Any) -> Any:
        made, expected = function(*args, **options), means(*args, **options)
        each = [(made, expected)] if isinstance(made, Tensor) else zip(made, expected, strict=True)
        for to, source in each:
            to.copy_(source)
        return made

    setattr(import_module(module), name, both)


def drawn(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `draw` with two different tokens, so that drafts are often right and often wrong."""

    def some(*args: Any) -> Tensor:
        tokens_S = draw(*args)
        return tokens_S.copy_(torch.randint_like(tokens_S, 2) + 5)

    return some


def capture_decodes(
    self: DecodeGraphs,
    sizes: list[Any],
    max_length: int,
    captured: Any = lambda: None,
    pool: Any = None,
) -> None:
    """Run each size without a graph, in place of DecodeGraphs.capture."""
    self.max_length = max_length
    for size in sorted(sizes, reverse=True):
        output = self.run(self.padded(size, max_length))
        self.captured[size] = Captured(None, self.keep(output), 0.0, 0)
    self.captured = dict(sorted(self.captured.items()))


def replay_decodes(notes: Notes) -> Callable[..., Any]:
    def replay(self: DecodeGraphs, size: Any) -> Any:
        with notes.replayed():
            output = self.keep(self.run(self.padded(size, self.max_length)))
        self.captured[size] = replace(self.captured[size], output=output)
        return output

    return replay


class PieceGraph:
    """Stand-in for the torch.cuda.CUDAGraph of a piece. Results of a replay are not used."""

    def capture_begin(self, pool: object) -> None: ...

    def capture_end(self) -> None: ...

    def pool(self) -> None: ...

    def replay(self) -> None: ...


REFERENCED = (  # modules of nanovllm_kernels.sampling, and a function of both
    ("batch_prep", "batch_reference", "gather_rows"),
    ("batch_prep", "batch_reference", "write_back"),
    ("draft_rows", "draft_reference", "first_rows"),
    ("draft_rows", "draft_reference", "later_rows"),
    ("ngram", "ngram_reference", "ngram"),
)


def imagine_a_gpu(notes: Notes, major: int = 9) -> None:
    """Patch this process permanently. `major` is of the GPU's compute capability."""
    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = triton_noted(notes)
    compile_cache.CachedCompile.__call__ = cute_noted(notes)
    for kernel, meaning, name in REFERENCED:
        of_sampling = "nanovllm_kernels.sampling."
        as_referenced(f"{of_sampling}{kernel}:{name}", f"{of_sampling}{meaning}:{name}")
    sampling = import_module("nanovllm_kernels.sampling.draw")
    sampling.draw = drawn(sampling.draw)
    for name in IMPORTED:
        import_module(name)
    fakes = dict(
        generation=lambda where: major,
        is_hopper=lambda where: major == 9,
        can_overlap=lambda where: major >= 9,
        processors=lambda where: PROCESSORS,
        INTERPRETED_PROCESSORS=PROCESSORS,
    )
    for name, module in [*sys.modules.items()]:
        if name.startswith(("nanovllm.", "nanovllm_kernels.")):
            for what, fake in fakes.items():
                if hasattr(module, what):
                    setattr(module, what, fake)
    latent_rows.expanded = unwritten
    Scaled.dequantised = whole_unwritten
    if major == 9:
        kernels.obstacle = lambda where: None
    torch.cuda.get_device_capability = lambda where: (major, 0)
    for module, name in (
        (kernels, "fastest"),
        (resolved, "reason"),
        (resolved, "select_ops"),
        (resolved, "choose_backend"),
        (resolved, "without_autos"),
        (resolved, "fastest"),
    ):
        setattr(module, name, as_cuda(getattr(module, name)))
    resolved.choose_device = lambda recipe: (torch.device("cpu"), torch.bfloat16)
    DecodeGraphs.capture, DecodeGraphs.replay = capture_decodes, replay_decodes(notes)
    torch.cuda.CUDAGraph = PieceGraph
    torch.cuda.memory_reserved = lambda *_: 0
    torch.cuda.graph_pool_handle = lambda: None
    torch.cuda.synchronize = lambda *_: None


class First(NcclMesh):
    """Rank 0 of ranks that do not exist."""

    def least(self, count: int) -> int:
        return count


def first_of(tp: int, *, has_peers: bool = True) -> Mesh:
    """Return rank 0 of `tp` ranks. With peers, short messages use the project's own kernels."""
    if tp == 1:
        return Mesh()
    if not has_peers:
        return First(0, tp, connected=[Links(Recorded(), None, -1)])
    at = torch.zeros(tp, dtype=torch.int64), torch.zeros(PROGRAMS, dtype=torch.int32)
    landings = Landings(0, tp, CAPACITY, *at)
    peers = Peers(0, tp, CAPACITY, *at, landings=landings, short_bytes=CAPACITY)
    links = Links(Recorded(), peers, CAPACITY)
    return First(0, tp, connected=[links])


def unwritten(cache: Any, slots_X: Tensor, q_THA: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised tensors for expanded keys and values, which library calls would fill."""
    room = len(slots_X), len(cache.key_HAX)
    return q_THA.new_empty(*room, q_THA.shape[2]), q_THA.new_empty(*room, cache.width)


def whole_unwritten(self: Scaled) -> Tensor:
    """Return an uninitialised tensor in place of the weight, of the type that products take."""
    return self.weight_ND.new_empty(self.shape, dtype=torch.bfloat16)


def as_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its device arguments claim to be GPUs."""

    def call(*args: Any, **options: Any) -> Any:
        return function(
            *(Cuda("cpu") if isinstance(a, torch.device) else a for a in args), **options
        )

    return call


def built_for(notes: Notes) -> Callable[..., build.Built]:
    """Return a replacement of runner.build.build that compiles everything before requests."""

    def make(config: Config, _: object = None) -> build.Built:
        has_peers = config.recipe.kernels.exchange != "torch"
        mesh = first_of(config.recipe.parallel.tp, has_peers=has_peers)
        found = resolved.resolve_config(config, mesh)
        model = found.empty_model(torch.device("cpu"))
        for job in build.jobs_of(found, model):
            notes.note(job.function, (("kind", job.arguments),))
        runner, recipe = build.with_caches(found, model)
        device = runner.device
        build.largest_steps(runner, recipe)
        runner.device = Cuda("cpu")
        build.warm_up(runner, recipe)
        runner.device = device
        if recipe.kernels.cuda_graphs:
            assert not graphs.obstacles(recipe), graphs.obstacles(recipe)
            build.capture(runner, recipe)
        notes.is_warming = False
        return build.Built(runner, recipe, found.model_config.vocab_size, found.layout)

    return make


def main(*models: str) -> None:
    """Print kernels that would compile late. A model is a recipe's name and changes to it."""
    notes = Notes()
    imagine_a_gpu(notes)
    torch.manual_seed(0)
    for model in models:
        name, *changes = model.split()
        notes.forget()
        config = load_config(
            str(RECIPES / f"{name}.yaml"), ["load.format=dummy", "parallel.tp=1", *changes]
        )
        with Nothing():
            traffic = Traffic(config, built_for(notes), notes.enter)
            traffic.prompts()
            traffic.wishes()
            traffic.streams(40)
        for kernel, differing, step in notes.found():
            sys.stdout.write(f"{name}: {kernel}: {differing}: {step}\n")
        modes = dict(traffic.engine.runner.steps_by_mode)
        keys = {kernel: len(known) for kernel, known in notes.seen.items()}
        sys.stderr.write(f"{name}: steps {modes}, keys {keys}\n")
