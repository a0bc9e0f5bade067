"""Going through the families of the zoo: a process for each, with a limit on what it may take of the processor."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PRELOADED = ["torch", "transformers", "rotor_py", "zoo_families", "models"]
Row = dict[str, Any]


class OutOfTimeError(Exception):
    """The process was ended by its limit."""


class EndedError(Exception):
    """The process ended by itself, and without a word."""


def in_a_process(work: Callable[[str], Row], name: str, seconds: int) -> Row:
    """What `work(name)` returns in a process that is ended after so many seconds of its processor.

    Raises:
        OutOfTimeError: it was.
        EndedError: it crashed.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(_PRELOADED)
    receiving, sending = processes.Pipe(duplex=False)
    process = processes.Process(target=_send, args=(work, name, seconds, sending))
    process.start()
    sending.close()
    try:
        return dict(receiving.recv())
    except EOFError:
        process.join()
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise OutOfTimeError(f"it took more than {seconds} s") from None
        raise EndedError(f"the process ended with {process.exitcode}") from None
    finally:
        process.terminate()
        process.join()


def sentence(error: Exception) -> str:
    """The first line of an error, with paths from the package on."""
    text = str(error).strip().partition("\n")[0].partition("/site-packages/")
    return f"{type(error).__name__}: {text[0].rpartition(' ')[0] + ' ' + text[2] if text[2] else text[0]}"[:300]


def asked(description: str | None) -> argparse.Namespace:
    """What the command line asks of a script that goes through the families."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of families")
    parser.add_argument("--seconds", type=int, default=240, help="seconds of the processor that each may take")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def _send(work: Callable[[str], Row], name: str, seconds: int, pipe: Connection) -> None:
    used = math.ceil(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, used + seconds))
    pipe.send(work(name))
