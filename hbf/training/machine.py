"""The machine of a run: device, memory, versions and commit, and settings for speed."""

import contextlib
import ctypes
import importlib.metadata
import os
import pathlib
import platform
import resource
import subprocess
from collections.abc import Iterable, Iterator, Sequence

import jax
from absl import logging

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
DETERMINISTIC = '--xla_gpu_deterministic_ops=true'
CACHE_BYTES = 2 * 10**9  # limit for compiled programs; the least recently used ones are removed first
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'tensorflow-datasets', 'grain', 'numpy')


def compute_deterministically() -> None:
  """Make XLA compute the same bits in every run on a GPU, at a lower speed. Call this before a device is used.

  It sets a flag of XLA. The flag excludes additions in varying order, and kernels that are chosen by timing. CPUs
  need no flag.
  """
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {DETERMINISTIC}'.strip()


def keep_freed_memory() -> None:
  """Make the C library keep freed memory instead of returning it to the system, on Linux with the CPU backend.

  XLA's CPU backend allocates its temporary arrays anew at every step, and memory from the system comes slowly
  (docs/explanation/runs-and-checkpoints.md, How runs stay fast on a CPU). Call this before anything is computed.
  """
  # The library keeps memory only for the main thread, so the CPU must compute in the thread that calls. This also
  # keeps the temporaries of several steps from being in memory at once.
  jax.config.update('jax_cpu_enable_async_dispatch', False)
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  if mallopt is not None and jax.default_backend() == 'cpu':
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def cache_folder(name: str) -> pathlib.Path:
  """Return the path ~/.cache/hbf/<name> or $XDG_CACHE_HOME/hbf/<name>. The folder is not made."""
  return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser() / 'hbf' / name


def keep_compiled_programs() -> None:
  """Make JAX keep compiled programs on disk for the next run, in ~/.cache/hbf/xla or $XDG_CACHE_HOME/hbf/xla.

  At the start of a run the least recently used programs are removed until the rest take at most CACHE_BYTES. If JAX
  has a cache folder already, for example from JAX_COMPILATION_CACHE_DIR, this function does nothing. If the folder
  can't be made, every run compiles.
  """
  if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
    return
  folder = cache_folder('xla')
  with contextlib.suppress(OSError):
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update('jax_compilation_cache_dir', str(folder))
    # JAX's own limit needs one more package, and fails on a folder that was filled without a limit.
    _trim(folder, CACHE_BYTES)


def _trim(folder: pathlib.Path, most: int) -> None:
  """Remove the least recently read files until the rest take at most `most` bytes. Subfolders stay as they are.

  XLA keeps the results of its autotuning for GPUs in a subfolder.
  """
  known = []
  for path in folder.iterdir():
    with contextlib.suppress(FileNotFoundError):  # removed by another run
      if path.is_file():
        known.append((path.stat().st_atime, path.stat().st_size, path))
  total = sum(size for _, size, _ in known)
  for _, size, path in sorted(known):
    if total <= most:
      break
    path.unlink(missing_ok=True)
    total -= size


def device_name(devices: Iterable[jax.Device] | None = None) -> str:
  """Return the number and the kind of devices, such as '8 × TPU v4' or '1 × cpu (x86_64, 2 cores)'.

  Args:
    devices: the devices. None: all.
  """
  devices = jax.devices() if devices is None else [*devices]
  kind = devices[0].device_kind
  if devices[0].platform == 'cpu':
    kind = f'cpu ({platform.machine()}, {cores()} cores)'
  return f'{len(devices)} × {kind}'


def cores() -> int:
  """Return the number of cores that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def peak_memory_bytes(devices: Sequence[jax.Device]) -> int:
  """Return the largest peak memory among this process's devices.

  If the backend does not report it, as on a CPU, return the peak memory of the process.
  """
  peaks = [(device.memory_stats() or {}).get('peak_bytes_in_use', 0) for device in devices]
  if any(peaks):
    return max(peaks)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if platform.system() == 'Darwin' else peak * 1024  # other systems report kilobytes


def versions() -> dict[str, str]:
  """Return the versions of Python and of the packages on which a result depends."""
  return {'python': platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


def commit() -> str | None:
  """Return the hash of this code's Git commit, with '-dirty' if tracked files differ from the commit.

  Return None if the code is an installed package.
  """
  code = pathlib.Path(__file__)
  git = ['git', '-C', str(code.parent)]
  try:
    subprocess.run([*git, 'ls-files', '--error-unmatch', code.name], capture_output=True, check=True)
    head = subprocess.run([*git, 'rev-parse', 'HEAD'], capture_output=True, text=True, check=True).stdout.strip()
    changes = subprocess.run([*git, 'status', '--porcelain', '-uno'], capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError):
    return None
  return head + ('-dirty' if changes.stdout.strip() else '')


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Silence the log of absl during the context. Orbax logs needless warnings, and errors that it also raises."""
  before = logging.get_verbosity()
  logging.set_verbosity(logging.FATAL)
  try:
    yield
  finally:
    logging.set_verbosity(before)
