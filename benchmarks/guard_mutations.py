"""Faults that are planted one at a time, to see that `guard.py` notices each.

    python benchmarks/guard_mutations.py                  # plant all; exit 1 if one is not noticed
    python benchmarks/guard_mutations.py --only autocast  # those whose reason has this word
    python benchmarks/guard_mutations.py --find           # look for the text of all, and plant none; seconds

A fault is planted in a copy of the product, and the cases of the guard that should notice it are compared with what
the copy did before. The text to change is looked for in all files of the product, since files move; it has to be there
once. If the code has been written anew, write the fault anew: the reason says what it is about.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("rotor_py", "solver", "profiling")
COPIED = (*PRODUCT, "cli", "benchmarks")
SOLVER = ("chains 0 to 9",)


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new`, because of which `cases` have to differ."""

    why: str
    old: str
    new: str
    cases: tuple[str, ...]


def mutation(why: str, old: str, new: str, *cases: str) -> Mutation:
    return Mutation(why, old, new, cases)


MUTATIONS = [
    # The tape
    mutation(
        "checkpoints are kept beyond the recomputations that read them",
        "            raise\n        held.inputs.drop_all_but(step.live)\n",
        "            raise\n",
        "two in flight, in reverse",
    ),
    mutation(
        "every checkpoint asks for a gradient",
        "self.needs_gradient[stage], strict=True):\n                tensor.requires_grad_(needed)",
        "self.needs_gradient[stage], strict=True):\n                tensor.requires_grad_(True)",
        "two in flight, in reverse",
    ),
    mutation(
        "of the inputs that nobody reads any more, one is kept",
        "for index in self._held.keys() - live:",
        "for index in sorted(self._held.keys() - live)[1:]:",
        "chain",
    ),
    mutation(
        "what a stage that ran again has saved is freed late",
        "attached.backward(gradients, retain_graph=current.retain_graph)",
        "attached.backward(gradients, retain_graph=True)",
        "chain",
    ),
    mutation(
        "a checkpoint holds its history",
        "        value = tree_map_only(torch.Tensor, detached, value)\n        self._held[index]",
        "        self._held[index]",
        "chain",
    ),
    mutation(
        "stages run again with a graph where none is needed",
        "torch.no_grad(), surroundings.restored(self.function, graph=False)",
        "torch.enable_grad(), surroundings.restored(self.function, graph=False)",
        "chain",
    ),
    # What a recomputation finds
    mutation("the random state is not restored for a recomputation", "self.random.restore()\n", "pass\n", "chain"),
    mutation(
        "the random stream goes on from a recomputation",
        "undo.append(RandomState.now(tuple(device for device, _ in self.random.devices)).restore)\n",
        "pass\n",
        "chain",
    ),
    mutation(
        "no stage is known to have drawn random numbers",
        "state = before if before is not None and RandomState.now(devices) != before else None",
        "state = None",
        "chain",
    ),
    mutation("statistics of BatchNorm move twice", "module._buffers.update(_scratch_of(module))", "pass", "chain"),
    mutation(
        "autocast is not restored",
        "stack.enter_context(restored_autocast(self.autocast, cache=graph))",
        "pass",
        "autocast",
    ),
    mutation(
        "a recomputation finds a buffer as the first run has left it",
        "                copy = before.clone()\n",
        "                copy = table[name].clone()\n",
        "two in flight, in reverse",
    ),
    mutation(
        "a recomputation moves a buffer again",
        "                undo.append(partial(table.__setitem__, name, table[name]))\n"
        "                copy = before.clone()\n"
        '                vars(copy)["lasting"] = table[name]\n'
        "                table[name] = copy\n",
        "                table[name].copy_(before)\n",
        "chain",
    ),
    # Measuring
    mutation(
        "what a stage saves is eight bytes more",
        "saved = max(0, max(forward.kept, attach.kept) - apart - dropped)",
        "saved = max(0, max(forward.kept, attach.kept) - apart - dropped) + 8",
        "chain",
    ),
    mutation(
        "the backward's own peak does not count",
        'for name in ("gradients", "backward") if name in phases',
        'for name in ("gradients",) if name in phases',
        "chain",
    ),
    mutation(
        "scratch memory is the less of two graphs",
        "forward_temp_bytes=max(forward.rise, attach.rise) - saved,",
        "forward_temp_bytes=min(forward.rise, attach.rise) - saved,",
        "captured",
    ),
    mutation(
        "outputs are taken to be held by the graph",
        "output_released_bytes=min(freed, known.activation_bytes, saved),",
        "output_released_bytes=0,",
        "chain",
    ),
    mutation(
        "a tensor that goes past stages does not count where they run without a graph",
        "nograd = list(forward)",
        "nograd = [0] * length",
        "captured",
    ),
    mutation(
        "the gradient of a tensor that goes past stages is not freed",
        "gradient[each.first - 1] -= each.gradient_bytes",
        "gradient[each.first - 1] -= 0",
        "captured",
    ),
    mutation(
        "buffers are not in the fixed part",
        "buffers=sum(size for storage, size in buffers.items() if storage not in parameters)",
        "buffers=0",
        "chain",
    ),
    mutation(
        "the optimizer's state is not in the fixed part",
        "optimizer=optimizer.state_bytes if optimizer else 0,",
        "optimizer=0,",
        "chain",
    ),
    mutation(
        "gradients of frozen parameters count",
        "bytes_like(p for p in stepped.others(model.parameters()) if p.requires_grad and p.device == device)",
        "bytes_like(p for p in stepped.others(model.parameters()) if p.device == device)",
        "two in flight, in reverse",
    ),
    mutation(
        "copies of moving buffers are not in the peak",
        "return self.snapshot_bytes if recomputes(sequence) else 0",
        "return 0",
        "chain",
    ),
    mutation(
        "copies of moving buffers are not taken off the limit",
        "return mem_limit - self.fixed.total - self.snapshot_bytes - others",
        "return mem_limit - self.fixed.total - others",
        "chain",
    ),
    # Several forwards in flight
    mutation(
        "what a forward in flight holds beside its chain does not wait with it",
        "kept=found.kept + more",
        "kept=found.kept",
        "two in flight",
    ),
    mutation(
        "no forward in flight needs more while it runs",
        'max(each.peak, each.waiting if order == "any" else 0)',
        'each.waiting if order == "any" else each.peak',
        "two in flight",
    ),
    mutation(
        "gradients of outputs of other forwards do not count",
        "(found.after[loss - 1] if loss else chain.input_bytes) + chain.activation[-1]",
        "(found.after[loss - 1] if loss else chain.input_bytes)",
        *SOLVER,
    ),
    # The solver and its simulator
    mutation(
        "scratch memory of a forward is no condition",
        "forward_need=saved + np.array([option.forward_temp for option in options], np.int64)",
        "forward_need=saved",
        *SOLVER,
    ),
    mutation(
        "gradients that later stages have left do not count",
        "base=np.concatenate([activation[1:] + left[1:] + held, [0]])",
        "base=np.concatenate([activation[1:] + held, [0]])",
        *SOLVER,
    ),
    mutation(
        "the loss is given a byte too little",
        "loss_need=chain.activation[-1] + chain.loss_temp",
        "loss_need=chain.activation[-1] + chain.loss_temp + 1",
        *SOLVER,
    ),
    mutation("the input counts twice while a checkpoint is made", "        kept[0] = 0\n", "", *SOLVER),
    # Of what an option takes, a slot more or less changes nothing: the solver goes on to finer slots.
    mutation(
        "what a checkpoint takes is rounded up to slots",
        "shift = grid.slots[j] - (1 if grid.remainder[j] < offset else 0)",
        "shift = grid.slots[j] + 1",
        *SOLVER,
    ),
    mutation(
        "the simulator forgets the gradient that the loss makes",
        "most = self.held + self.activation[last] + self.chain.loss_temp",
        "most = self.held + self.chain.loss_temp",
        *SOLVER,
    ),
    mutation(
        "the simulator does not count gradients of parameters",
        "        self.held += self.chain.stages[stage].gradient\n",
        "",
        *SOLVER,
    ),
    mutation(
        "the simulator counts what is freed of the input in a backward",
        "return max(before + kept.freed + self.activation[stage] + temp, self.held)",
        "return max(before + self.activation[stage] + temp, self.held)",
        *SOLVER,
    ),
    mutation(
        "the simulator takes the seconds of an output that is skipped",
        "            self.seconds -= self.chain.stages[stage].skipped_output_time\n",
        "            pass\n",
        *SOLVER,
    ),
    mutation(
        "Revolve is given a repetition too little",
        "return (repeats + 1) * steps - (math.comb",
        "return repeats * steps - (math.comb",
        "revolve",
    ),
    # Pipelines
    mutation(
        "a microbatch that is in progress is not in flight",
        "max(most.forwards, forwards[part] + 1)",
        "max(most.forwards, forwards[part])",
        *SOLVER,
    ),
    mutation(
        "all microbatches hold what waits, and one is in progress",
        "return (count - 1) * kept + peak",
        "return count * kept + peak",
        *SOLVER,
    ),
    mutation(
        "outputs of a pipeline are held for the others alone",
        "return others * incoming + count * outgoing + gradients + sent",
        "return others * incoming + others * outgoing + gradients + sent",
        *SOLVER,
    ),
    # Offload
    mutation("copies out are not waited for", "self._away[stage].wait_out()", "pass", "offload"),
    mutation("copies back begin when they are read", "self._away[stage].fetch()", "pass", "offload"),
]


def place_of(text: str, root: Path) -> Path:
    """The file of the product that has this text, once. LookupError if there is none, or more than one."""
    files = [path for folder in PRODUCT for path in sorted((root / folder).rglob("*.py"))]
    found = [(path, times) for path in files if (times := path.read_text().count(text))]
    if len(found) != 1 or found[0][1] != 1:
        places = ", ".join(f"{times} times in {path.relative_to(root)}" for path, times in found) or "nowhere"
        raise LookupError(f"the text {text!r} has to be there once; it is {places}")
    return found[0][0]


def copied(folder: Path) -> Path:
    for each in COPIED:  # with compiled kernels, which are known by the times of their files
        shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("*.pyc"))
    return folder


def guard(root: Path, action: str, cases: Iterable[str], jobs: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "benchmarks" / "guard.py"), action, "--jobs", str(jobs), "--only", *cases]
    return subprocess.run(command, capture_output=True, text=True, cwd=root)


def noticed(each: Mutation, root: Path, jobs: int) -> list[str]:
    """The lines by which the guard tells of a fault; empty if it does not."""
    path = place_of(each.old, root)
    before = path.read_text()
    path.write_text(before.replace(each.old, each.new))
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*"):
        cached.unlink()
    try:
        done = guard(root, "--check", each.cases, jobs)
    finally:
        path.write_text(before)
    if done.returncode == 0:
        return []
    return done.stdout.splitlines()[:-1] or done.stderr.splitlines()[-1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="faults whose reason has these words")
    parser.add_argument("--find", action="store_true", help="look for the text of all faults, and plant none")
    parser.add_argument("--jobs", type=int, default=2, help="cases at once")
    options = parser.parse_args()
    wanted = [each for each in MUTATIONS if not options.only or options.only in each.why]
    failed = 0
    for each in wanted:
        try:
            place_of(each.old, ROOT)
        except LookupError as error:
            failed += 1
            print(f"NOT FOUND: {each.why}: {error}", flush=True)
    if options.find:
        print(f"{len(wanted)} faults, {failed} of them without a place")
        return 1 if failed else 0
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        done = guard(root, "--record", sorted({case for each in wanted for case in each.cases}), options.jobs)
        if done.returncode:
            print(done.stdout or done.stderr)
            return 1
        for each in wanted:
            begun = time.perf_counter()
            try:
                lines = noticed(each, root, options.jobs)
            except LookupError:
                continue
            caught += bool(lines)
            said = f"noticed, in {len(lines)} lines: {lines[0][:110]}" if lines else "NOT NOTICED"
            print(f"{each.why}: {said} ({time.perf_counter() - begun:.0f} s)", flush=True)
    print(f"{caught} of {len(wanted)} faults are noticed")
    return 0 if caught == len(wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
