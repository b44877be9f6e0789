"""python -m tests.support.fault_on_a_rank, under torchrun: kernels fail on rank 1 alone, in a loop
in which all ranks add something up."""

import os

import torch
import torch.distributed as dist

from slipstream.runtime import guarded_launch

KIND = ("linear.triton", "delta", torch.bfloat16, 128)


def main() -> None:
    dist.init_process_group("gloo")
    here = guarded_launch.CompilerState("sm_90", "3.6.0", "1.2.3")
    guarded_launch.compiler_state = lambda device: here
    rank = int(os.environ["RANK"])
    for step in range(1000):
        with guarded_launch.Guard("triton|eager", torch.device("cpu"), lambda: KIND) as usable:
            if usable and rank == 1 and step == 3:
                raise guarded_launch.Unusable("planted_kernel: the compiler's process died")
        dist.all_reduce(torch.ones(1))
    dist.barrier()  # else threads of gloo may free tensors while the interpreter ends: an abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
