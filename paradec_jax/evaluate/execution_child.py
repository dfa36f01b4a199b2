"""The child's side of `execution`: sets its limits, runs the program of its folder, reports that the end was reached.

It is started as a script in an interpreter of its own and imports nothing of the package.
"""

import ast
import os
import resource
import runpy
import sys


def limit(kind: int, wanted: int) -> None:
    """Sets both limits of a kind, never above the hard one that is there."""
    hard = resource.getrlimit(kind)[1]
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (value, value))


def main() -> None:
    """Runs `program.py` of the working folder; arguments are the word to report, then the limits."""
    word, memory, processor, file, processes = sys.argv[1:]
    sys.argv[:] = ["program.py"]
    # What the program prints goes nowhere; the report stays open under a number it does not know.
    report, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, int(memory))
    limit(resource.RLIMIT_FSIZE, int(file))
    limit(resource.RLIMIT_NPROC, int(processes))
    # The soft limit ends the process with SIGXCPU, which the parent tells from other ends.
    limit(resource.RLIMIT_CPU, int(processor) + 1)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (min(int(processor), hard), hard))
    write, end, number = os.write, os._exit, os.getpid  # the program may put its own in their place
    own = number()
    write(report, b"started\n")
    with open("candidate.py", encoding="utf-8") as source:
        ast.parse(source.read(), "candidate.py")  # complete by itself, or its end could hide the tests
    runpy.run_path("program.py", run_name="program")  # no "__main__": its main block is not run
    if number() == own:  # and not a copy that the program made
        write(report, word.encode())
    end(0)


if __name__ == "__main__":
    main()
