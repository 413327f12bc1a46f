"""Why torch finds no GPU: compares the driver with the version of CUDA that torch was built for."""

import torch

from workers.devices import driver_cuda_version


def why_no_cuda() -> str:
    """The likely reason in one line. torch itself only warns, or says nothing."""
    built_for = torch.version.cuda
    if built_for is None:
        return "this build of torch has no CUDA; install a build that has"
    driver = driver_cuda_version()
    if driver is None:
        return "there is no NVIDIA driver that answers"
    wanted = tuple(int(part) for part in built_for.split(".")[:2])
    if driver[0] < wanted[0]:
        runs = ".".join(map(str, driver))
        why = f"the driver runs CUDA up to {runs}, and torch is built for CUDA {built_for}; update the driver"
        if driver[0] != 12:
            return why
        build = f"torch=={torch.__version__.split('+')[0]}+cu126"
        return f'{why} (CUDA 13 needs 580 or newer), or install {build}, as README.md says under "On a GPU"'
    return "CUDA_VISIBLE_DEVICES may hide the GPUs, or the driver's modules do not fit the kernel (see dmesg)"
