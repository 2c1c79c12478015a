"""Accelerators to compile for, with their makers' published numbers.

Rates are dense peak rates of the data sheets, so no program exceeds them. The comments below cite these sources:

* Cloud TPU: Google Cloud's pages of each generation, https://docs.cloud.google.com/tpu/docs/v5e and so on.
* Scaling book: Austin et al., How to Scale Your Model (2025), table of TPU specs.
* Data sheets of NVIDIA A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 (eight GPUs). From H100 on, the sheets give
  tensor core rates with sparsity. The dense rate is half of the rate with sparsity.
* XLA: openxla/xla, folder xla/backends/gpu/target_config/specs (a100_sxm_80, h100_sxm, h200, b200). Its files have
  the values that devices report.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """A kind of accelerator. All values are for one chip, which JAX shows as one device.

  Attributes:
    name: name of the chip in names of topologies: 'v5e' in v5e-16, which is 16 chips.
    kind: name of the product, such as 'TPU v5e'.
    platform: JAX's lowering platform, 'tpu' or 'cuda'.
    flops: FLOP/s of dense matrix products, by type: 'bfloat16', 'float32' and 'highest'. 'float32' is at JAX's
      default precision (TF32 on NVIDIA, one pass in bfloat16 on TPU). 'highest' is float32 at Precision.HIGHEST (CUDA
      cores on NVIDIA, six passes on TPU).
    memory_bytes: bytes of memory.
    memory_bandwidth: bytes/s to and from the memory.
    network: bytes/s that the chip can send to the other chips of a TPU slice (ICI, all links) or of a GPU's host
      (NVLink).
    network_between_hosts: bytes/s that the chip can send to other hosts. None if it equals `network`.
  """

  name: str
  kind: str
  platform: str
  flops: Mapping[str, float]
  memory_bytes: int
  memory_bandwidth: float
  network: float
  network_between_hosts: float | None = None

  @property
  def usable_bytes(self) -> int:
    """The bytes of memory that JAX can use for programs."""
    return self.memory_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuChip(Chip):
  """A kind of TPU. Its chips are connected in slices.

  Attributes:
    dimensions: 2 or 3. The chips of a slice form a rectangle or a box.
    cores_in_names: how often a slice's name counts a chip. The name v4-8 counts 8 TensorCores, two for each of 4
      chips.
    slices: all sizes that a slice can have, in chips, ascending.
  """

  platform: str = 'tpu'
  dimensions: int
  cores_in_names: int
  slices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuChip(Chip):
  """An NVIDIA GPU on an eight-way HGX or DGX board, with the values that XLA's compiler needs.

  Attributes:
    compute_capability: major and minor number of the compute capability.
    cores: number of streaming multiprocessors.
    fpus_per_core: number of floating-point units of a streaming multiprocessor.
    clock_ghz: clock rate in GHz.
    l2_cache_bytes: bytes of the L2 cache.
    shared_memory_per_core: bytes of shared memory of a streaming multiprocessor.
    shared_memory_per_block: most bytes of shared memory that a kernel can opt in to.
  """

  platform: str = 'cuda'
  compute_capability: tuple[int, int]
  cores: int
  fpus_per_core: int
  clock_ghz: float
  l2_cache_bytes: int
  shared_memory_per_core: int
  shared_memory_per_block: int

  @property
  def usable_bytes(self) -> int:
    """The bytes of memory that JAX uses by default: three quarters (XLA_PYTHON_CLIENT_MEM_FRACTION)."""
    return self.memory_bytes * 3 // 4


def _tpu_flops(bfloat16: float) -> dict[str, float]:
  """Return the peak FLOP/s of a TPU by type, given its peak for bfloat16.

  A TPU multiplies in bfloat16. With Precision.HIGHEST, it computes a product in float32 as six products in bfloat16.
  """
  return {'bfloat16': bfloat16, 'float32': bfloat16, 'highest': bfloat16 / 6}


GIB = 2**30
# Numbers of chips in 2-D slices. All slices here have a power of two of chips. Other 3-D slices exist, but are not
# supported.
_SLICES_2D = (1, 4, 8, 16, 32, 64, 128, 256)
# `memory_bytes` is the available HBM that libtpu 0.0.42 reports if a program does not fit. The comment beside it is
# the published size.
_TPUS = (
  TpuChip(
    name='v4',
    kind='TPU v4',
    flops=_tpu_flops(275e12),  # Cloud TPU
    memory_bytes=int(30.75 * GIB),  # of 32 GiB
    memory_bandwidth=1200e9,  # Cloud TPU
    # Six links of 50 GB/s: Jouppi et al., TPU v4 (ISCA 2023), table 4 (scaling book: 45).
    network=300e9,
    dimensions=3,
    cores_in_names=2,
    slices=tuple(2**n for n in range(2, 12)),  # up to 8x16x16, the largest of MaxText's table
  ),
  TpuChip(
    name='v5e',
    kind='TPU v5e',
    flops=_tpu_flops(197e12),  # Cloud TPU
    memory_bytes=int(15.75 * GIB),  # of 16 GB
    memory_bandwidth=819e9,  # Cloud TPU
    network=200e9,  # Cloud TPU: 400 GB/s both ways, four links (scaling book: 45 GB/s a link)
    dimensions=2,
    cores_in_names=1,
    slices=_SLICES_2D,
  ),
  TpuChip(
    name='v5p',
    kind='TPU v5p',
    flops=_tpu_flops(459e12),  # Cloud TPU
    memory_bytes=int(95.74 * GIB),  # of 95 GB in the page, 96 in the scaling book
    memory_bandwidth=2765e9,  # Cloud TPU
    network=600e9,  # Cloud TPU: 1,200 GB/s both ways, six links (scaling book: 90 GB/s a link)
    dimensions=3,
    cores_in_names=2,
    slices=tuple(2**n for n in range(2, 13)),  # one job can have at most 6,144 chips
  ),
  TpuChip(
    name='v6e',
    kind='TPU v6e',
    flops=_tpu_flops(918e12),  # Cloud TPU
    memory_bytes=int(31.25 * GIB),  # of 32 GB
    memory_bandwidth=1638e9,  # Cloud TPU
    network=400e9,  # Cloud TPU: 800 GB/s both ways, four links (scaling book: 90 GB/s a link)
    dimensions=2,
    cores_in_names=1,
    slices=_SLICES_2D,
  ),
)
# Rates and NVLink (halved, because sheets count both ways) are from the data sheets, other values from XLA. Between
# hosts, each GPU of a DGX has a network card of 200 Gbit/s (A100, ConnectX-6) or 400 Gbit/s (others, ConnectX-7).
_H100 = GpuChip(
  name='h100',
  kind='NVIDIA H100',
  flops={'bfloat16': 989.4e12, 'float32': 494.7e12, 'highest': 67e12},
  memory_bytes=84_942_979_072,
  memory_bandwidth=3352e9,
  network=450e9,
  network_between_hosts=50e9,
  compute_capability=(9, 0),
  cores=132,
  fpus_per_core=128,
  clock_ghz=1.98,
  l2_cache_bytes=52_428_800,
  shared_memory_per_core=233_472,
  shared_memory_per_block=232_448,
)
_GPUS = (
  GpuChip(
    name='a100',
    kind='NVIDIA A100 80GB',
    flops={'bfloat16': 312e12, 'float32': 156e12, 'highest': 19.5e12},
    memory_bytes=85_100_068_864,
    memory_bandwidth=2039e9,
    network=300e9,
    network_between_hosts=25e9,
    compute_capability=(8, 0),
    cores=108,
    fpus_per_core=64,
    clock_ghz=1.41,
    l2_cache_bytes=41_943_040,
    shared_memory_per_core=167_936,
    shared_memory_per_block=166_912,
  ),
  _H100,
  dataclasses.replace(
    _H100,
    name='h200',
    kind='NVIDIA H200',
    # CUDA reports this size in out-of-memory messages. XLA's file has a rounded 141 GiB.
    memory_bytes=int(139.8 * GIB),
    memory_bandwidth=4800e9,
  ),
  GpuChip(
    name='b200',
    kind='NVIDIA B200',
    flops={'bfloat16': 2250e12, 'float32': 1125e12, 'highest': 75e12},  # HGX: 36, 18 and 0.6 PFLOP/s
    memory_bytes=191_514_411_008,
    memory_bandwidth=7672e9,  # as reported by XLA; the data sheet has 8 TB/s
    network=900e9,
    network_between_hosts=50e9,
    compute_capability=(10, 0),
    cores=148,
    fpus_per_core=128,
    clock_ghz=1.965,
    l2_cache_bytes=132_644_864,
    shared_memory_per_core=233_472,
    shared_memory_per_block=232_448,
  ),
)
CHIPS: Mapping[str, TpuChip | GpuChip] = {chip.name: chip for chip in (*_TPUS, *_GPUS)}


def target_config(chip: GpuChip) -> str:
  """Return a GPU's description for XLA's compiler: a GpuTargetConfigProto as text.

  The text leaves out names, driver versions, and the FLOP/s of each type. Without autotuning, these values do not
  change the compiled program. The limits of blocks and threads are the same for all these chips (CUDA C++ Programming
  Guide, technical specifications per compute capability).
  """
  major, minor = chip.compute_capability
  # From 9.0 on, XLA compiles for exactly this architecture (sm_90a).
  features = 'ACCELERATED_FEATURES' if major >= 9 else 'NONE'
  return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus_per_core}
  clock_rate_ghz: {chip.clock_ghz}
  device_memory_size: {chip.memory_bytes}
  memory_bandwidth: {chip.memory_bandwidth:.0f}
  l2_cache_size: {chip.l2_cache_bytes}
  shared_memory_per_core: {chip.shared_memory_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.shared_memory_per_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
"""
