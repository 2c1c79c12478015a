"""Optax optimisers and learning-rate schedules from the `optimizer` part of a config."""

from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from hbf.errors import choose
from hbf.training.durations import Clock

# Only what multiplies a signal decays: not norms, biases, positions, gains, widths or metrics.
DECAYED = ('kernel', 'centres', 'coefficients')


def make_schedule(config: ConfigDict, clock: Clock) -> optax.Schedule:
  """Learning rate by step: linear warm-up from 0, then cosine or linear decay to 0 at the end, or constant."""
  warmup = clock.to_steps('optimizer.warmup', config.warmup)
  peak, rest = config.learning_rate, max(clock.steps - warmup, 1)
  decay = choose(
    'optimizer.schedule',
    config.schedule,
    {
      'cosine': optax.cosine_decay_schedule(peak, rest),
      'linear': optax.linear_schedule(peak, 0.0, rest),
      'constant': optax.constant_schedule(peak),
    },
  )
  return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup]) if warmup else decay


def make_optimizer(config: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
  """Clipping, the named optimiser, rates of centres and widths, decoupled weight decay, and the schedule.

  Raises:
    UserError: unknown optimiser.
  """
  scale = choose(
    'optimizer.name',
    config.name,
    {
      'adamw': optax.scale_by_adam(config.momentum, config.second_momentum),
      'sgd': optax.trace(config.momentum),
      'lion': optax.scale_by_lion(config.momentum, config.second_momentum),
    },
  )
  return optax.chain(
    optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
    scale,
    optax.masked(optax.scale(config.centre_rate), lambda params: _named(params, ('centres',))),
    optax.masked(optax.scale(config.width_rate), lambda params: _named(params, ('log_width',))),
    optax.add_decayed_weights(config.weight_decay, lambda params: _named(params, DECAYED)),
    optax.scale_by_learning_rate(schedule),
  )


def _named(params: Any, names: tuple[str, ...]) -> Any:
  """A tree of booleans: whether a parameter's own name is one of `names`."""
  return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, params)
