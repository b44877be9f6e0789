"""The same bits while the GPU turns from one process to another, several times in a call."""

import subprocess
import sys

PROCESSES, SECONDS = 6, 12


def test_results_are_the_same_beside_other_processes() -> None:
    """Barriers that were not invalidated were written over what had their memory by then."""
    command = [sys.executable, "-m", "tests.gpu.beside_others", str(SECONDS)]
    subprocess.run([*command[:-1], "0"], check=True)  # fills the caches
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
    said = [x.communicate()[0] for x in children]
    assert not any(x.returncode for x in children), "\n".join(said)
    rounds = [int(x.strip().splitlines()[-1].split()[0]) for x in said]
    assert min(rounds) > 3, "\n".join(said)
