"""Short questions to a GPU, each answered by one line of OUT/probe.jsonl as soon as it is known.

    python benchmarks/probe.py OUT                        # all questions, on a GPU
    python benchmarks/probe.py OUT equal_peak_llama link  # these alone
    python benchmarks/probe.py OUT --tiny                 # a rehearsal on a CPU, of what needs no CUDA

Each question has a number of seconds, after which it is given up. Where the package is not installed, set
`PYTHONPATH=.:solver:profiling`; for the questions about equal peaks, `PYTORCH_ALLOC_CONF=expandable_segments:True`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_parts.models import Gpt2, GptBlock, LlamaBlock, adamw, children_of, classified
from gpu_parts.steps import Checkpointed
from torch import nn
from torch.nn import functional as F

from rotor_profiling import timing
from rotor_py import Checkpointable, models
from rotor_py.capture.captured_layer import CapturedLayer
from rotor_py.measure.device import limit_bytes
from rotor_py.offload.open_tier import link_of
from rotor_solver import simulate, store_all

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
Found = dict[str, Any]


class Late(BaseException):
    """The time for a question is over. No Exception: the search for ways to store a layer swallows these."""


class Prober:
    """Asks questions; `out` is where answers go, and `tiny` makes models small."""

    def __init__(self, out: Path, tiny: bool) -> None:
        self.out, self.tiny = out, tiny
        out.mkdir(parents=True, exist_ok=True)

    def say(self, name: str, **found: Any) -> None:
        """Write an answer, so that it is there whatever comes later."""
        with (self.out / "probe.jsonl").open("a") as file:
            file.write(json.dumps({"probe": name, **found}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(name, json.dumps(found)[:1500], flush=True)

    def llama(self, words: int | None = None, count: int = 16) -> nn.Module:
        size, most, few, inner = (64, 4, 2, 128) if self.tiny else (2048, 32, 8, 8192)
        words = words or (256 if self.tiny else 128256)

        def make() -> nn.Module:
            blocks = [LlamaBlock(size, most, few, inner) for _ in range(count)]
            head = nn.Sequential(nn.RMSNorm(size), nn.Linear(size, words, bias=False))
            return nn.Sequential(nn.Embedding(words, size), *blocks, head)

        return bf16(make)

    def gpt(self, words: int | None = None, count: int = 24) -> nn.Module:
        if self.tiny:
            return bf16(lambda: Gpt2(32, 4, 2, 128, 32))
        return bf16(lambda: Gpt2(1024, count, 16, words or 50304, 1024))

    def tokens(self, batch: int, length: int, words: int) -> torch.Tensor:
        return torch.randint(words, (batch, 32 if self.tiny else length), device=DEVICE)

    def llama_tokens(self, words: int = 128256) -> torch.Tensor:
        return self.tokens(3, 4096, 256 if self.tiny else words)

    def gpt_tokens(self, batch: int = 34) -> torch.Tensor:
        return self.tokens(batch, 1024, 128 if self.tiny else 50304)


Question = Callable[[Prober], None]
QUESTIONS: dict[str, tuple[Question, int, bool]] = {}
"""By name: the question, the seconds that it may take, and whether it needs CUDA."""


def question(seconds: int, *, cuda: bool = True) -> Callable[[Question], Question]:
    def add(function: Question) -> Question:
        QUESTIONS[function.__name__] = (function, seconds, cuda)
        return function

    return add


def sync() -> None:
    if CUDA:
        torch.cuda.synchronize()


def empty_cache() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def bf16(make: Callable[[], nn.Module]) -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            return make()
    finally:
        torch.set_default_dtype(torch.float32)


def planner(model: nn.Module, loss: Callable[[Any], torch.Tensor] = classified, **options: Any) -> Checkpointable:
    return Checkpointable(model, loss=loss, fresh_grads=True, progress=False, cache=False, **options)


def bounds(planned: Checkpointable) -> tuple[int, int]:
    """The least limit, and what storing everything takes."""
    budget = planned.budget
    assert budget is not None
    return budget.least_bytes(), budget.peak_bytes(store_all(budget.chain))


def promised(planned: Checkpointable) -> int:
    assert planned.budget is not None
    assert planned.sequence is not None
    return planned.budget.peak_bytes(planned.sequence)


def seconds_by_plan(planned: Checkpointable) -> float:
    assert planned.chain is not None
    assert planned.sequence is not None
    return simulate(planned.chain, planned.sequence).makespan


def seconds_stored(planned: Checkpointable) -> float:
    assert planned.chain is not None
    return simulate(planned.chain, store_all(planned.chain)).makespan


def peak_of(step: Callable[[], object]) -> int:
    """The most that is allocated in a third step."""
    step()
    step()
    empty_cache()
    if not CUDA:
        return 0
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def trainer(run: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        classified(run(batch)).backward()
        optimizer.step()

    return step


def gradients_of(run: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    """A step without an optimizer."""
    parameters = list(run.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        classified(run(batch)).backward()

    return step


def in_turns(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, Found]:
    """Seconds of each step, taken in turns, with a wait before and after each; and of a few in a row with one wait."""
    alone: dict[str, list[float]] = {name: [] for name in steps}
    row: dict[str, float] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            alone[name].append(seconds_of(step, 1))
    for name, step in steps.items():
        row[name] = seconds_of(step, rounds)
    return {
        name: {"median": statistics.median(found), "least": min(found), "most": max(found), "in_a_row": row[name]}
        for name, found in alone.items()
    }


def seconds_of(step: Callable[[], object], times: int) -> float:
    sync()
    begun = time.perf_counter()
    for _ in range(times):
        step()
    sync()
    return (time.perf_counter() - begun) / times


@question(10)
def attention_repeats(prober: Prober) -> None:
    """Does the backward of attention give the same bits each time?"""
    tensors = [torch.randn(2, 32, 4096, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    gradient = torch.randn_like(tensors[0])

    def once() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(F.scaled_dot_product_attention(*tensors, is_causal=True), tensors, gradient)

    first, same = once(), [0, 0, 0]
    for _ in range(10):
        for position, (before, after) in enumerate(zip(first, once(), strict=True)):
            same[position] += bool(torch.equal(before, after))
    prober.say("attention_repeats", of=10, same_dq_dk_dv=same)


@question(60, cuda=False)
def layer_ways(prober: Prober) -> None:
    """Has a block of a chain ways to be stored in part, as it is and where sums are the same every time?"""
    said: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("rotor_py")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    length, size = (64, 64) if prober.tiny else (4096, 2048)
    try:
        for sure in (False, True):
            torch.use_deterministic_algorithms(sure, warn_only=True)
            block = bf16(lambda: LlamaBlock(64, 4, 2, 128) if prober.tiny else LlamaBlock(2048, 32, 8, 8192))
            batch = torch.randn(1, length, size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            layer = CapturedLayer(block, "block")
            found = layer.find(batch, DEVICE)
            prober.say("layer_ways", deterministic=sure, found=found, ways=list(layer.ways()), said=said[-3:])
    finally:
        torch.use_deterministic_algorithms(False)
        log.removeHandler(handler)
        log.setLevel(logging.WARNING)


@question(5)
def calls(prober: Prober) -> None:
    """How long do calls take that a step makes beside its kernels?"""

    def microseconds(function: Callable[[], object], times: int = 200) -> float:
        function()
        return 1e6 * seconds_of(function, times)

    state = torch.cuda.get_rng_state(DEVICE)
    functions: dict[str, Callable[[], object]] = {
        "memory_stats_as_nested_dict": lambda: torch.cuda.memory_stats_as_nested_dict(DEVICE),
        "mem_get_info": lambda: torch.cuda.mem_get_info(DEVICE),
        "get_rng_state": lambda: torch.cuda.get_rng_state(DEVICE),
        "set_rng_state": lambda: torch.cuda.set_rng_state(state, DEVICE),
        "cpu_get_rng_state": torch.get_rng_state,
    }
    prober.say("calls", microseconds={name: microseconds(each) for name, each in functions.items()})


@question(10)
def link(prober: Prober) -> None:
    """How fast is the link to the host, by itself, and both ways at once?"""
    found = link_of("host", DEVICE)
    here, more_here = (torch.empty(2**28, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, more_there = (torch.empty(2**28, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    out, back = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(out):
            here.copy_(there, non_blocking=True)
        with torch.cuda.stream(back):
            more_there.copy_(more_here, non_blocking=True)

    seconds = seconds_of(both, 8)
    pinning = seconds_of(lambda: torch.empty(2**31, dtype=torch.uint8, pin_memory=True), 1)
    prober.say("link", planned_with=str(found), both_ways_at_once=2**28 / seconds, pinning_2GiB_seconds=pinning)


@question(90, cuda=False)
def latency(prober: Prober) -> None:
    """How long does Python take before the first kernel? A wait in each step shows it; one for many steps hides it."""
    model, batch = prober.gpt(), prober.gpt_tokens(4)
    planned = planner(model)
    planned.measure(batch)
    planned.compute_sequence(bounds(planned)[1] + 2**24)
    steps = {"plain": gradients_of(model, batch), "planned": gradients_of(planned, batch)}
    found = in_turns(dict(steps), 3 if prober.tiny else 20)
    before = {}
    for name, run in (("plain", model), ("planned", planned)):
        times = []
        for _ in range(10):
            sync()
            begun = time.perf_counter()
            output = run(batch)
            del output
            times.append(time.perf_counter() - begun)
            sync()
        before[name] = statistics.median(times)
    prober.say("latency", steps=found, forward_returns_after=before)


@contextmanager
def stopwatches_that_wait() -> Iterator[None]:
    """Times of stages begin after a kernel that keeps the device busy: all launches are there when it is over."""
    start = timing._CudaStopwatch.start

    def waiting(watch: Any) -> None:
        torch.cuda.synchronize(watch._device)
        torch.cuda._sleep(10_000_000)
        watch._events = []
        watch.lap()

    timing._CudaStopwatch.start = waiting  # type: ignore[method-assign]
    try:
        yield
    finally:
        timing._CudaStopwatch.start = start  # type: ignore[method-assign]


@contextmanager
def stopwatches_as_they_are() -> Iterator[None]:
    yield


@question(90)
def stopwatch(prober: Prober) -> None:
    """Do times of stages add up to a step's, as they are taken, and where kernels wait until all have been launched?"""
    model, batch = prober.gpt(), prober.gpt_tokens(16)
    real = in_turns({"plain": gradients_of(model, batch)}, 10)["plain"]
    ways = {"as it is": stopwatches_as_they_are, "after a kernel that waits": stopwatches_that_wait}
    for name, way in ways.items():
        with way():
            planned = planner(model)
            planned.measure(batch)
            found: Found = {"store_all": seconds_stored(planned)}
            planned.compute_sequence(sum(bounds(planned)) // 2)
            found["half"] = seconds_by_plan(planned)
            found["half_real"] = in_turns({"planned": gradients_of(planned, batch)}, 10)["planned"]
        prober.say("stopwatch", way=name, plain=real, **found)


@question(30)
def graph_capture(prober: Prober) -> None:
    """Does a step by a plan work under torch.cuda.graph, or in which words is it refused?"""
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)]
    model, batch = nn.Sequential(*blocks).to(DEVICE), torch.randn(512, 512, device=DEVICE)
    planned = planner(model, lambda output: output.square().mean())
    planned.measure(batch)
    planned.compute_sequence(bounds(planned)[0])

    def step() -> None:
        planned(batch).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    said = "captured"
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        sync()
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:400]}"
    prober.say("graph_capture", said=said)


@question(60)
def cudnn_benchmark(prober: Prober) -> None:
    """Does cudnn.benchmark, which chooses anew, break a limit or change gradients?"""
    for on in (False, True):
        torch.backends.cudnn.benchmark = on
        torch.manual_seed(0)
        plain = models.resnet50().to(DEVICE, memory_format=torch.channels_last)
        model = copy.deepcopy(plain)
        batch = torch.randn(64, 3, 224, 224, device=DEVICE).to(memory_format=torch.channels_last)
        planned = planner(model)
        with torch.autocast("cuda", torch.bfloat16):
            planned.measure(batch)
        least, full = bounds(planned)
        limit = least + (full - least) // 3
        planned.compute_sequence(limit)
        peaks, worst = [], 0.0
        for _ in range(4):
            for each in (plain, model):
                each.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = classified(plain(batch))
            loss.backward()
            sync()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                loss = classified(planned(batch))
            loss.backward()
            peaks.append(torch.cuda.max_memory_allocated())
            worst = max(worst, largest_share(plain, model))
        prober.say(
            "cudnn_benchmark",
            on=on,
            limit=limit,
            promised=promised(planned),
            peaks=peaks,
            worst_difference=worst,
        )
        del plain, model, planned, loss
        empty_cache()
    torch.backends.cudnn.benchmark = False


def largest_share(plain: nn.Module, other: nn.Module) -> float:
    """The largest difference of gradients, as a share of the largest gradient of the same parameter."""
    pairs = [(a.grad, b.grad) for a, b in zip(plain.parameters(), other.parameters(), strict=True)]
    found = [(a - b).abs().max() / (a.abs().max() + 1e-12) for a, b in pairs if a is not None and b is not None]
    return max(map(float, found))


@question(60)
def capacity(prober: Prober) -> None:
    """Does a model run within the default limit if storing everything does not fit the device?"""
    model, batch = prober.gpt(), prober.gpt_tokens(60)
    optimizer = adamw(model.parameters())
    planned = planner(model, optimizer=optimizer)
    step = trainer(planned, optimizer, batch)
    times, said = [], "ran"
    try:
        for _ in range(6):
            times.append(seconds_of(step, 1))
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:300]}"
    stats = torch.cuda.memory_stats()
    prober.say(
        "capacity",
        settings=os.environ.get("PYTORCH_ALLOC_CONF"),
        said=said,
        seconds=times,
        limit=limit_bytes(None, DEVICE),
        promised=planned.budget and planned.sequence and promised(planned),
        allocated=torch.cuda.max_memory_allocated(),
        reserved=torch.cuda.max_memory_reserved(),
        retries=stats["num_alloc_retries"],
        ooms=stats["num_ooms"],
    )


@question(15)
def fraction(prober: Prober) -> None:
    """Is the share of the device that a process may have seen in its limit?"""
    torch.cuda.set_per_process_memory_fraction(0.25, DEVICE)
    found = limit_bytes(None, DEVICE), limit_bytes("80%", DEVICE)
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    may_have = 0.25 * torch.cuda.get_device_properties(DEVICE).total_memory
    prober.say("fraction", may_have=may_have, limit_none=found[0], limit_80=found[1])


@question(20)
def nccl_bytes(prober: Prober) -> None:
    """How many bytes does NCCL take outside of PyTorch's allocator?"""
    tensor = torch.ones(2**20, device=DEVICE)
    sync()
    before = torch.cuda.mem_get_info()[0]
    meeting = f"file://{(prober.out / 'meeting').absolute()}"
    dist.init_process_group("nccl", init_method=meeting, rank=0, world_size=1, device_id=DEVICE)
    dist.all_reduce(tensor)
    sync()
    prober.say("nccl_bytes", outside_of_pytorch=before - torch.cuda.mem_get_info()[0])
    dist.destroy_process_group()


def at_equal_peak(
    prober: Prober, name: str, make: Callable[[], nn.Module], kind: type[nn.Module], batch: torch.Tensor, **options: Any
) -> None:
    """Checkpointing every block, and a plan at the peak that this has: which is faster?"""

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = make()
        return model, adamw(model.parameters())

    model, optimizer = fresh()
    for parent, child in children_of(model, kind):
        setattr(parent, child, Checkpointed(getattr(parent, child)))
    by_blocks = trainer(model, optimizer, batch)
    peak = peak_of(by_blocks)
    theirs = in_turns({"blocks": by_blocks}, 10)["blocks"]
    del model, optimizer, by_blocks
    empty_cache()
    model, optimizer = fresh()
    planned = planner(model, optimizer=optimizer, **options)
    begun = time.perf_counter()
    planned.measure(batch)
    least, full = bounds(planned)
    planned.compute_sequence(max(least, peak) if CUDA else least + (full - least) // 3)
    planned_in = time.perf_counter() - begun
    step = trainer(planned, optimizer, batch)
    mine = peak_of(step)
    ours = in_turns({"planned": step}, 10)["planned"]
    prober.say(
        "at_equal_peak",
        model=name,
        options=str(options),
        blocks_peak=peak,
        planned_peak=mine,
        promised=promised(planned),
        planned_in=planned_in,
        blocks=theirs,
        planned=ours,
        ratio=ours["median"] / theirs["median"],
        ratio_in_a_row=ours["in_a_row"] / theirs["in_a_row"],
        predicted=seconds_by_plan(planned),
        store_all=seconds_stored(planned),
        sequence=str(planned.sequence),
    )


@question(90, cuda=False)
def equal_peak_llama(prober: Prober) -> None:
    at_equal_peak(prober, "Llama 1B", prober.llama, LlamaBlock, prober.llama_tokens())


@question(90, cuda=False)
def equal_peak_gpt(prober: Prober) -> None:
    at_equal_peak(prober, "GPT-2 medium", prober.gpt, GptBlock, prober.gpt_tokens())


@question(90, cuda=False)
def equal_peak_llama_few_words(prober: Prober) -> None:
    at_equal_peak(prober, "Llama, 2048 words", lambda: prober.llama(2048), LlamaBlock, prober.llama_tokens(2048))


@question(90)
def equal_peak_llama_host(prober: Prober) -> None:
    at_equal_peak(prober, "Llama 1B", prober.llama, LlamaBlock, prober.llama_tokens(), offload="host")


@question(90)
def equal_peak_gpt_host(prober: Prober) -> None:
    at_equal_peak(prober, "GPT-2 medium", prober.gpt, GptBlock, prober.gpt_tokens(), offload="host")


def late(*_: Any) -> None:
    raise Late("the time for this question is over")


def ask(prober: Prober, name: str) -> None:
    """Ask a question, if it can be asked here; an error is an answer."""
    function, seconds, cuda = QUESTIONS[name]
    if cuda and not CUDA:
        return
    begun = time.perf_counter()
    signal.alarm(seconds)
    try:
        function(prober)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said = f"{type(error).__name__}: {str(error)[:500]}"
        prober.say(name, failed=said, where=traceback.format_exc()[-600:])
    finally:
        signal.alarm(0)
    empty_cache()
    prober.say("took", of=name, seconds=round(time.perf_counter() - begun, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for answers")
    parser.add_argument("names", nargs="*", help=f"questions; all unless given: {', '.join(QUESTIONS)}")
    parser.add_argument("--tiny", action="store_true", help="small models, on one thread")
    options = parser.parse_args()
    if unknown := set(options.names) - set(QUESTIONS):
        parser.error(f"there is no question {', '.join(sorted(unknown))}")
    if options.tiny:
        torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, late)
    prober = Prober(options.out, options.tiny)
    for name in options.names or QUESTIONS:
        ask(prober, name)


if __name__ == "__main__":
    main()
