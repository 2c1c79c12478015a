"""Optax optimisers and learning-rate schedules from the `optimizer` part of a config."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from hbf.errors import UserError, choose
from hbf.training.durations import Clock
from hbf.training.rules import Rule, heights_of, rules_of

_LION_SECOND = 0.99  # Chen et al. 2023, Algorithm 2; Adam's would be far too slow


def make_schedule(config: ConfigDict, clock: Clock) -> optax.Schedule:
  """Learning rate by step: linear warm-up from 0, then cosine or linear decay to the minimum, or constant.

  Raises:
    UserError: unknown schedule, or a minimum that it never comes to.
  """
  warmup = clock.to_steps('optimizer.warmup', config.warmup)
  peak, rest = config.learning_rate, max(clock.steps - warmup, 1)
  decay = choose(
    'optimizer.schedule',
    config.schedule,
    {
      'cosine': optax.cosine_decay_schedule(peak, rest, config.minimum_rate),
      'linear': optax.linear_schedule(peak, peak * config.minimum_rate, rest),
      'constant': optax.constant_schedule(peak),
    },
  )
  if config.schedule == 'constant' and config.minimum_rate:
    raise UserError(
      f'optimizer.minimum_rate is {config.minimum_rate}, but a constant schedule stays at the peak: '
      'set it to 0, or optimizer.schedule to cosine or linear'
    )
  return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup]) if warmup else decay


def make_optimizer(config: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
  """Clipping, the named optimiser, rates of centres and widths, decoupled weight decay, rates of layers, schedule.

  Raises:
    UserError: unknown optimiser.
  """
  scale = choose(
    'optimizer.name',
    config.name,
    {
      'adamw': optax.scale_by_adam(config.momentum, config.second_momentum),
      'sgd': optax.trace(config.momentum),
      'lion': optax.scale_by_lion(config.momentum, _LION_SECOND),
    },
  )
  return optax.chain(
    optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
    scale,
    optax.masked(optax.scale(config.centre_rate), _where(lambda rule: rule.rate == 'centre')),
    optax.masked(optax.scale(config.width_rate), _where(lambda rule: rule.rate == 'width')),
    optax.add_decayed_weights(config.weight_decay, _where(lambda rule: rule.decay)),
    # None where it is 1: the state keeps the form that checkpoints have of it.
    *([_scale_by_layer(config.layer_decay)] if config.layer_decay != 1 else []),
    optax.scale_by_learning_rate(schedule),
  )


def _scale_by_layer(decay: float) -> optax.GradientTransformation:
  """Multiplies what a parameter changes by with `decay` once for each layer up to the head (`heights_of`).

  References: Clark et al. 2020, "ELECTRA"; layers are counted as in Bao et al. 2022, "BEiT".
  """

  def scaled(updates: optax.Updates, _: Any) -> optax.Updates:
    return jax.tree.map(lambda update, height: update * decay**height, updates, heights_of(updates))

  return optax.stateless(scaled)


def _where(condition: Callable[[Rule], bool]) -> Callable[[Any], Any]:
  """Gives, for parameters, a tree of booleans: whose rule meets the condition."""
  return lambda params: jax.tree.map(condition, rules_of(params))
