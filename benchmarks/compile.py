"""Compilation of the train step of each recipe: seconds without and with the persistent cache, and memory.

python -m benchmarks.compile
python -m benchmarks.compile --models hyperbf --configs digits,cifar10:recipe=laptop
"""

import itertools
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.common import checked, launch, parser, report
from hbf.config.datasets import get_config
from hbf.config.resolve import resolve
from hbf.hardware.programs import Program, prepare_programs
from hbf.nn.registry import stage_names

CONFIGS = ('digits', *(f'cifar10:recipe={recipe}' for recipe in ('small', 'laptop', 'memo', 'strong')))
CONFIGS += ('shakespeare', 'imagenet:size=small', 'imagenet:size=base')


def main() -> None:
  """Print a row for every config and model, with the blocks one after another and in a scan."""
  flags = parser(__doc__)
  flags.add_argument('--models', default='hyperbf,vit', type=checked(stage_names))
  flags.add_argument('--configs', default=','.join(CONFIGS), type=checked(get_config))
  options = flags.parse_args()
  devices, rows = jax.devices(), []
  with tempfile.TemporaryDirectory() as folder:
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    for config, model, scan in itertools.product(options.configs, options.models, (False, True)):
      rows.append(measure(config, model, scan, devices))
  report('compile', 'Train step, float32', rows, options.out)


def measure(config: str, model: str, scan: bool, devices: Sequence[Any]) -> dict[str, Any]:
  """Return the row of a config and a model. Its train step is compiled twice, the second time from the cache."""
  changed = get_config(f'{config}{"," if ":" in config else ":"}model={model}').unlock()
  changed.model.scan_layers = scan
  program = prepare_programs(resolve(changed), devices).each[0]
  trace, compiled, cold = lower_and_compile(program)
  _, _, warm = lower_and_compile(program)
  return {
    'config': config,
    'model': model,
    'blocks': 'scanned' if scan else 'unrolled',
    'trace s': trace,
    'compile s': cold,
    'load s': warm,
    'temp MB': compiled.memory_analysis().temp_size_in_bytes / 1e6,
  }


def lower_and_compile(program: Program) -> tuple[float, Any, float]:
  """Return the seconds of tracing and lowering, the compiled step, and the seconds of compiling or loading it."""
  jax.clear_caches()  # JAX keeps traces of functions that several programs call
  begin = time.perf_counter()
  step = program.trace().lower()
  middle = time.perf_counter()
  return middle - begin, step.compile(), time.perf_counter() - middle


if __name__ == '__main__':
  launch(main)
