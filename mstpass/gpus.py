"""The GPUs that mstpass knows by name: their sizes and speeds, from the makers' data sheets.

Speeds are *dense*: the maker's figures with 2:4 sparsity are halved. Speeds of half precision are
those of products that are summed in float32, as PyTorch's are. ``memory_bytes`` is what
``torch.cuda.get_device_properties`` reports, which is less than the maker's round number.

A real device is found by its name (``gpu_like``). Of a name that is not in the table, the
likest kind is taken: that of the same compute capability with the most similar words.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping

import torch

from mstpass.errors import UserError

TF32 = "tf32"
DEFAULT = "h100"  # taken where there is no device that could be asked

_MIB, _GIB = 2**20, 2**30


class UnknownGpuError(UserError):
    """The name is not one of ``GPUS``."""


@dataclasses.dataclass(frozen=True)
class Links:
    """What a GPU sends to other GPUs, in one direction: peak rates.

    Attributes:
        inside_bytes_per_us: to those of its node.
        between_bytes_per_us: to those of other nodes.
        source: the node that has these links.
        gpus: the GPUs of a node.
    """

    inside_bytes_per_us: float
    between_bytes_per_us: float
    source: str
    gpus: int = 8


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: the short name, as in ``--gpu h100``.
        full_name: the name that torch reports.
        capability: the CUDA compute capability, (9, 0) for sm_90.
        memory_bytes: the memory that torch reports.
        shared_memory_per_block_bytes: the most that a block may ask for.
        memory_bytes_per_us: peak bandwidth of the memory.
        flops_per_us: peak rate of matrix products by the dtype of their operands; ``"tf32"`` is
            float32 rounded to TF32. A dtype that is not named has no matrix units on this GPU.
        source: where the figures are from.
        host_bytes_per_us: attainable bandwidth of copies from or to pinned host memory, in one
            direction: that of its kind of link (``_OF_CAPABILITY``).
        links: to other GPUs (``_LINKS``).
    """

    name: str
    full_name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    shared_memory_per_block_bytes: int
    l2_bytes: int
    memory_bytes_per_us: float
    flops_per_us: Mapping[torch.dtype | str, float] = dataclasses.field(hash=False)
    source: str
    host_bytes_per_us: float
    links: Links

    def with_multiprocessors(self, count: int) -> Gpu:
        """The same kind with another number of multiprocessors, and speeds in proportion.

        A laptop's GPU or a part of a GPU (MIG) has the name of the whole, but fewer of them.
        """
        if count == self.multiprocessors or count < 1:
            return self
        share = count / self.multiprocessors
        return dataclasses.replace(
            self,
            multiprocessors=count,
            memory_bytes_per_us=self.memory_bytes_per_us * share,
            flops_per_us={dtype: rate * share for dtype, rate in self.flops_per_us.items()},
        )


# What copies from pinned memory reach, in GB/s: some 80 % of PCI Express with 16 lanes, of
# generations 3 to 5; 85 % of NVLink-C2C.
_PCIE3, _PCIE4, _PCIE5, _C2C = 12.0, 25.0, 50.0, 380.0
# Of each compute capability, the KiB of shared memory that a block may ask for, and those copies.
_OF_CAPABILITY = {
    (7, 0): (96, _PCIE3),
    (7, 5): (64, _PCIE3),
    (8, 0): (163, _PCIE4),
    (8, 6): (99, _PCIE4),
    (8, 9): (99, _PCIE4),
    (9, 0): (227, _PCIE5),
    (10, 0): (227, _PCIE5),
    (12, 0): (99, _PCIE5),
}

# Links to other GPUs: GB/s in one direction inside of a node (the makers name the sum of both) and
# between nodes, where the ports of a node are shared equally; the node, and where its figures are.
_GUIDES = "https://docs.nvidia.com/dgx"
_LINKS = {
    "v100": (150.0, 6.25, f"DGX-1: NVLink 2, 4 x 100 Gb/s; {_GUIDES}/dgx1-user-guide/"),
    "a100": (300.0, 25.0, f"DGX A100: NVLink 3, 8 x 200 Gb/s; {_GUIDES}/dgxa100-user-guide/"),
    "h100": (450.0, 50.0, f"DGX H100: NVLink 4, 8 x 400 Gb/s; {_GUIDES}/dgxh100-user-guide/"),
    "b200": (900.0, 50.0, f"DGX B200: NVLink 5, 8 x 400 Gb/s; {_GUIDES}/dgxb200-user-guide/"),
}
_LIKE = {"a100-40gb": "a100", "h200": "h100", "gh200": "h100"}  # the same links
_ETHERNET = 1.5625  # 100 Gb/s for eight GPUs, as of AWS' g5.48xlarge
_PCIE_SHARE = 0.8  # of the peak, in _OF_CAPABILITY


def _links(name: str, host_gb_per_s: float) -> Links:
    """The links of a kind; without NVLink to all others of its node, those of its host."""
    known = _LINKS.get(_LIKE.get(name, name))
    if known is None:
        over = "PCI Express, 100 Gb/s a node; https://aws.amazon.com/ec2/instance-types/g5/"
        known = (host_gb_per_s / _PCIE_SHARE, _ETHERNET, over)
    inside, between, source = known
    return Links(inside * 1e3, between * 1e3, source)


_DTYPES: tuple[torch.dtype | str, ...] = (
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    TF32,
)


def _gpu(
    name: str,
    full_name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    memory_gib: float,
    l2_mib: float,
    gb_per_s: float,
    tflops: tuple[float | None, float | None, float | None, float, float | None],
    source: str,
    host_gb_per_s: float | None = None,
) -> Gpu:
    """A row of the table; ``tflops`` are those of ``_DTYPES``."""
    shared_kib, usual_gb_per_s = _OF_CAPABILITY[capability]
    return Gpu(
        name=name,
        full_name=full_name,
        capability=capability,
        multiprocessors=multiprocessors,
        memory_bytes=int(memory_gib * _GIB),
        shared_memory_per_block_bytes=shared_kib * 1024,
        l2_bytes=int(l2_mib * _MIB),
        memory_bytes_per_us=gb_per_s * 1e3,
        flops_per_us={d: t * 1e6 for d, t in zip(_DTYPES, tflops, strict=True) if t is not None},
        source=source,
        host_bytes_per_us=(host_gb_per_s or usual_gb_per_s) * 1e3,
        links=_links(name, usual_gb_per_s),
    )


_NVIDIA = "https://www.nvidia.com/en-us"
_IMAGES = "https://images.nvidia.com/aem-dam/Solutions"
_HOPPER = (1978.9, 989.4, 989.4, 66.9, 494.7)
_BLACKWELL = "https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
_A100 = f"{_NVIDIA}/data-center/a100/"
_RTX_BLACKWELL = f"{_IMAGES}/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_ADA = f"{_IMAGES}/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_GA102 = f"{_NVIDIA}/geforce/ampere/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_AMPERE = (None, 311.9, 311.9, 19.5, 155.9)

# name, name in torch, capability, multiprocessors, GiB in torch, MiB of L2, GB/s, TFLOP/s of
# (fp8, bf16, fp16, fp32, tf32), source
_TABLE = (
    _gpu(
        "h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 79.1, 50, 3350, _HOPPER,
        f"{_NVIDIA}/data-center/h100/",
    ),
    _gpu(
        "h100-pcie", "NVIDIA H100 PCIe", (9, 0), 114, 79.1, 50, 2039,
        (1513.0, 756.0, 756.0, 51.2, 378.0), f"{_NVIDIA}/data-center/h100/",
    ),
    _gpu(
        "h100-nvl", "NVIDIA H100 NVL", (9, 0), 132, 93.1, 50, 3938,
        (1671.0, 835.0, 835.0, 60.0, 417.5), f"{_NVIDIA}/data-center/h100/",
    ),
    _gpu(
        "h200", "NVIDIA H200", (9, 0), 132, 139.7, 50, 4800, _HOPPER,
        f"{_NVIDIA}/data-center/h200/",
    ),
    _gpu(
        "gh200", "NVIDIA GH200 480GB", (9, 0), 132, 94.5, 50, 4000, _HOPPER,
        f"{_NVIDIA}/data-center/grace-hopper-superchip/", _C2C,
    ),
    _gpu(
        "b200", "NVIDIA B200", (10, 0), 148, 178.3, 126.5, 7700,
        (4500.0, 2250.0, 2250.0, 75.0, 1125.0), _BLACKWELL,
    ),
    _gpu("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.1, 40, 2039, _AMPERE, _A100),
    _gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 39.4, 40, 1555, _AMPERE, _A100),
    _gpu(
        "l40s", "NVIDIA L40S", (8, 9), 142, 44.4, 96, 864,
        (733.0, 362.05, 362.05, 91.6, 183.0), f"{_NVIDIA}/data-center/l40s/",
    ),
    _gpu(
        "l4", "NVIDIA L4", (8, 9), 58, 22.0, 48, 300,
        (242.5, 121.0, 121.0, 30.3, 60.0), f"{_NVIDIA}/data-center/l4/",
    ),
    _gpu(
        "a10g", "NVIDIA A10G", (8, 6), 80, 22.0, 6, 600,
        (None, 70.0, 70.0, 35.0, 35.0), "https://aws.amazon.com/ec2/instance-types/g5/",
    ),
    _gpu(
        "4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 23.6, 72, 1008,
        (330.3, 165.2, 165.2, 82.6, 82.6), _ADA,
    ),
    _gpu(
        "3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 23.6, 6, 936,
        (None, 71.0, 71.0, 35.6, 35.6), _GA102,
    ),
    _gpu(
        "5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 31.3, 96, 1792,
        (419.0, 209.5, 209.5, 104.8, 104.8), _RTX_BLACKWELL,
    ),
    _gpu(
        "v100", "Tesla V100-SXM2-32GB", (7, 0), 80, 31.7, 6, 900,
        (None, None, 125.0, 15.7, None), f"{_NVIDIA}/data-center/v100/",
    ),
    _gpu(
        "t4", "Tesla T4", (7, 5), 40, 14.6, 4, 320,
        (None, None, 65.0, 8.1, None), f"{_NVIDIA}/data-center/tesla-t4/",
    ),
)  # fmt: skip

GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}


def gpu(name: str) -> Gpu:
    """The GPU of a short name.

    Raises:
        UnknownGpuError: no GPU has this name; the message names all, and the nearest.
    """
    key = name.strip().lower()
    if key in GPUS:
        return GPUS[key]
    plain = re.sub(r"^(nvidia|geforce|tesla|rtx|-|_|\s)+", "", key)
    near = difflib.get_close_matches(plain, GPUS, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise UnknownGpuError(f"unknown GPU {name!r}{hint} Known are: {', '.join(GPUS)}")


@functools.cache
def gpu_like(full_name: str, capability: tuple[int, int]) -> Gpu | None:
    """The kind of a real device: the likest by name of those with its compute capability.

    Args:
        full_name: as ``torch.cuda.get_device_name`` reports it.

    Returns:
        None if no GPU of the table has this compute capability.
    """
    words = _words(full_name)

    def likeness(kind: Gpu) -> tuple[int, int]:
        other = _words(kind.full_name)
        return len(words & other), -len(other - words)

    kinds = [kind for kind in _TABLE if kind.capability == tuple(capability)]
    return max(kinds, key=likeness, default=None)


def nearest_gpu(full_name: str, capability: tuple[int, int]) -> Gpu:
    """The same, but for a compute capability that is not in the table that of the next lower one.

    A GPU that is older than all of the table counts as the oldest.
    """
    known = sorted({kind.capability for kind in _TABLE})
    lower = [other for other in known if other <= tuple(capability)]
    found = gpu_like(full_name, max(lower, default=known[0]))
    assert found is not None, "one is found"
    return found


def _words(full_name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", full_name.lower()))
