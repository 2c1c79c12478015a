"""What all tests share: eight virtual CPU devices, the digits, and configs of runs that take a second."""

import functools
import gc
import importlib.metadata
import os
import pathlib

# Before jax starts.
os.environ['JAX_PLATFORMS'] = 'cpu'
# Without LLVM's optimization compiling takes 40% less of processor time, without MLIR for fusions 40% less again, and
# nothing here computes for long.
os.environ['XLA_FLAGS'] = ' '.join(
  (
    '--xla_force_host_platform_device_count=8',
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
    '--xla_cpu_parallel_codegen_split_count=1',  # two workers have the two cores
    # XLA ends the process for a flag that it doesn't know, and from 0.11 on it doesn't know this one.
    *(['--xla_cpu_use_fusion_emitters=false'] if importlib.metadata.version('jaxlib').startswith('0.10.') else []),
  )
)
# Most of a test is compilation, and tests share programs, small ones too.
os.environ['JAX_COMPILATION_CACHE_DIR'] = str(pathlib.Path(__file__).parents[1] / '.pytest_cache' / 'xla')
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
# Programs hold where each operation was called: a frame does for tests, and whole stacks take long to collect.
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '1'

import jaxtyping
import pytest
from jax._src.interpreters import mlir

# JAX makes an MLIR context with all dialects for each program that it lowers, a sixth of the time of all tests; one
# serves all. It is no public function, so other releases may lack it.
if hasattr(mlir, 'make_ir_context'):
  mlir.make_ir_context = functools.cache(mlir.make_ir_context)

# Before the modules are imported whose functions it checks. It costs a tenth of the time, so tests ask for it.
if os.environ.get('CHECK_SHAPES'):
  jaxtyping.install_import_hook(['hbf.ops', 'hbf.nn', 'hbf.models'], 'shapes.check_shapes')

from configs import digits
from hbf.config.resolve import resolve
from hbf.data.images.prepare import prepare
from hbf.models.matching import units_of

# The files that take longest, in this order. They begin first, so that no worker ends long after the other.
LONGEST = (
  'test_explain',
  'test_processes',
  'test_trained_run',
  'test_meshes',
  'test_compiled',
  'test_comparison',
  'test_refit',
  'test_resume',
  'test_text_runs',
  'test_loop',
  'test_interventions',
  'test_shipped_models',
)

# Tracing makes objects by the million, few of them garbage; a file's tests end with the only search for it.
gc.disable()


def pytest_collection_modifyitems(items):
  """Put the files that take longest first."""
  ranks = {name: rank for rank, name in enumerate(LONGEST)}
  items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(scope='module', autouse=True)
def frozen():
  """Exclude the objects that a file of tests leaves behind from later garbage collections.

  Most of them are programs of JAX. Without this, a collection would take two seconds in the last files. A test with a
  checkpoint that can't be read makes one.
  """
  yield
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='session')
def digits_dir(tmp_path_factory):
  """Return a TFDS data directory with the prepared digits."""
  directory = tmp_path_factory.mktemp('tfds')
  prepare('digits', str(directory), archive=None)
  return directory


@pytest.fixture(scope='session')
def toy(digits_dir):
  """Return a function that makes configs of short runs: `toy('model=vit', **{'train.epochs': 2.0})`.

  On one device, such a run takes a second. On eight devices that share two cores, a single step takes seconds.
  """

  def make(arguments='', **changes):
    config = digits.get_config(arguments)
    config.update_from_flattened_dict(
      {
        'model.width': 16,
        'model.depth': 1,
        'model.heads': 2,
        **{f'model.{option}': 12 for option in units_of(config.model)},
        'data.dir': str(digits_dir),
        'train.epochs': 1.0,
        'evaluate.every': '1epoch',
        'checkpoint.every': '1epoch',
        'log.every': '5steps',
        'log.units': False,  # it compiles a program of its own, so tests of it switch it on
        **changes,
      }
    )
    return resolve(config)

  return make
