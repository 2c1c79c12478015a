"""Compilation of a train step: seconds without and with the persistent cache, instructions, memory.

python -m benchmarks.compile
python -m benchmarks.compile --models hyperbf --depths 12 --forms scanned,recomputed
"""

import tempfile
import time
from typing import Any

import jax
from ml_collections import ConfigDict

from benchmarks.common import parser, report
from benchmarks.models import make_training, random_batch
from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.training.machine import keep_freed_memory

FORMS: dict[str, dict[str, bool]] = {
  'unrolled': {},
  'scanned': {'scan_layers': True},
  'recomputed': {'scan_layers': True, 'remat': True},
}


def main() -> None:
  """Print a row for every model, depth and form of its blocks."""
  flags = parser(__doc__)
  flags.add_argument('--models', default='hyperbf,vit')
  flags.add_argument('--depths', default='4,12')
  flags.add_argument('--forms', default='unrolled,scanned', help=f'of {", ".join(FORMS)}')
  options = flags.parse_args()
  keep_freed_memory()
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    for model in options.models.split(','):
      for depth in map(int, options.depths.split(',')):
        rows += [measure(model, depth, form) for form in options.forms.split(',')]
  report('compile', 'Train step of recipe small on CIFAR-10, batch 256', rows, options.out)


def measure(model: str, depth: int, form: str) -> dict[str, Any]:
  """Return the row of a model. Its train step is compiled twice, the second time from the cache."""
  config = resolve(make_config(f'model={model},recipe=small', {'name': 'cifar10'})).unlock()
  config.model.update(depth=depth, **FORMS[form])
  _, compiled, cold = lower_and_compile(config)
  jax.clear_caches()
  trace, _, warm = lower_and_compile(config)
  return {
    'model': model,
    'depth': depth,
    'blocks': form,
    'trace s': trace,
    'compile s': cold,
    'load s': warm,
    'HLO': compiled.as_text().count(' = '),
    'temp MB': compiled.memory_analysis().temp_size_in_bytes / 1e6,
  }


def lower_and_compile(config: ConfigDict) -> tuple[float, Any, float]:
  """Return the seconds of tracing and lowering, the compiled step, and the seconds of compiling or loading it."""
  _, init, train_step = make_training(config, image_size=32)
  batch = random_batch(config.train.batch_size, 32)
  state = jax.eval_shape(init, None, batch)
  begin = time.perf_counter()
  lowered = jax.jit(train_step, donate_argnums=0).lower(state, None, batch)
  middle = time.perf_counter()
  return middle - begin, lowered.compile(), time.perf_counter() - middle


if __name__ == '__main__':
  main()
