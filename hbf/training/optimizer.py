"""Optax optimizers and learning-rate schedules from the `optimizer` part of a config."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from ml_collections import ConfigDict

from hbf.errors import UserError, choose
from hbf.training.durations import Clock
from hbf.training.plateau import scale_by_plateau
from hbf.training.rules import Rule, heights_of, matrices_of, rules_of

_MUON_SIZE = 0.2  # root mean square of an update divided by the learning rate, as for Adam (Liu et al. 2025, eq. 4)
_LION_SECOND = 0.99  # Chen et al. 2023, Algorithm 2; Adam's value would be far too slow
_LAMB_EPSILON = 1e-6  # optax.lamb's


def make_schedule(config: ConfigDict, clock: Clock) -> optax.Schedule:
  """Return the learning rate by step: a linear warm-up from 0 to the peak `learning_rate`, then the named schedule.

  Schedule wsd stays at the peak, and then decays linearly to the minimum. The decay ends with the run. The config key
  `decay` is its length. Schedule rsqrt is peak · √(w / t) at step t, after a warm-up of w steps (Vaswani et al. 2017,
  "Attention is all you need", eq. 3). Schedule plateau stays at the peak. `make_optimizer` multiplies this rate by a
  factor that depends on the held-out scores (`hbf.training.plateau`).

  Raises:
    UserError: the schedule is unknown, or its parts do not fit into the run, or the config has a minimum rate that
      this schedule does not use.
  """
  warmup, last = (clock.to_steps(f'optimizer.{key}', config[key]) for key in ('warmup', 'decay'))
  peak, rest = config.learning_rate, max(clock.steps - warmup, 1)
  _check_schedule(config, warmup, last, rest)
  falling = optax.linear_schedule(peak, peak * config.minimum_rate, max(last, 1))
  decay = choose(
    'optimizer.schedule',
    config.schedule,
    {
      'cosine': optax.cosine_decay_schedule(peak, rest, config.minimum_rate),
      'restarts': _restarts(config, rest),
      'linear': optax.linear_schedule(peak, peak * config.minimum_rate, rest),
      'wsd': optax.join_schedules([optax.constant_schedule(peak), falling], [rest - last]),
      'rsqrt': lambda step: peak * jnp.sqrt(warmup / (warmup + jnp.maximum(step, 0))),
      'plateau': optax.constant_schedule(peak),
      'constant': optax.constant_schedule(peak),
    },
  )
  return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup]) if warmup else decay


def _check_schedule(config: ConfigDict, warmup: int, last: int, rest: int) -> None:
  """Raise UserError if a schedule does not fit into a run.

  Args:
    config: the `optimizer` part of a config.
    warmup: number of steps of the warm-up.
    last: number of steps of the decay of schedule wsd.
    rest: number of steps after the warm-up.
  """
  if config.schedule == 'wsd' and not 1 <= last <= rest:
    raise UserError(
      f'optimizer.decay={config.decay} is {last} steps of the {rest} after the warm-up: '
      f'expected 1 to {rest}; change optimizer.decay or optimizer.warmup'
    )
  if config.schedule == 'rsqrt' and not warmup:
    raise UserError(
      f'schedule rsqrt falls at the pace of its warm-up, and optimizer.warmup={config.warmup} has no step: '
      'set it to 1step or more'
    )
  if config.schedule == 'restarts' and np.diff(_cycle_starts(config, rest), append=rest).min() < 1:
    raise UserError(
      f'optimizer.cycles={config.cycles} with cycle_growth={config.cycle_growth:g} leaves a cycle without a step, '
      f'of the {rest} steps after the warm-up: set optimizer.cycles to a smaller number'
    )
  if config.schedule in ('constant', 'rsqrt') and config.minimum_rate:
    why = 'stays at the peak' if config.schedule == 'constant' else 'falls at a pace of its own'
    raise UserError(
      f'optimizer.minimum_rate is {config.minimum_rate}, but a {config.schedule} schedule {why}: '
      'set it to 0, or optimizer.schedule to cosine, restarts, linear, wsd or plateau'
    )


def _restarts(config: ConfigDict, rest: int) -> optax.Schedule:
  """Return a schedule of cosine decays, each of which starts at the peak again.

  The decays are called cycles. They fill the `rest` steps after the warm-up. Each cycle is `cycle_growth` times as
  long as the one before it, up to rounding.

  References: Loshchilov & Hutter 2017, "SGDR: Stochastic gradient descent with warm restarts", eq. 5.
  """
  starts = _cycle_starts(config, rest)
  lengths = np.diff(starts, append=rest)
  cosine = optax.cosine_decay_schedule(config.learning_rate, 1, config.minimum_rate)

  def rate(step: jax.typing.ArrayLike) -> jax.Array:
    now = jnp.maximum(step, 0)
    cycle = jnp.searchsorted(jnp.asarray(starts), now, side='right') - 1
    return cosine((now - jnp.asarray(starts)[cycle]) / jnp.asarray(lengths)[cycle])

  return rate


def _cycle_starts(config: ConfigDict, rest: int) -> np.ndarray:
  """Return the first step of each cycle of schedule restarts, int32 [cycles]. Steps count from the warm-up's end."""
  sizes = float(config.cycle_growth) ** np.arange(-config.cycles, 0)
  ends = np.cumsum(sizes) / sizes.sum()
  return np.round(rest * np.concatenate([[0.0], ends[:-1]])).astype(np.int32)


def make_optimizer(config: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
  """Return the gradient transformation of a config.

  An update goes through these parts in order: clipping, the named optimizer, the rates of centers and sigmas
  (`center_rate`, `sigma_rate`), decoupled weight decay, the rates of layers (`layer_decay`), the schedule. Optimizer
  lamb has the rates of centers and sigmas after weight decay. Optimizer schedule_free wraps all parts (Defazio et al.
  2024, "The road less scheduled"). It takes the gradient at a point between the parameters of its last step and their
  average over the steps.

  Raises:
    UserError: the optimizer is unknown. Or it is schedule_free, and the schedule is not constant or the momentum is
      0.
  """
  rates = [
    optax.masked(optax.scale(config.center_rate), _where(lambda rule: rule.rate == 'center')),
    optax.masked(optax.scale(config.sigma_rate), _where(lambda rule: rule.rate == 'sigma')),
  ]
  decay = optax.add_decayed_weights(config.weight_decay, _weights)
  # LAMB divides each update by its norm, which would cancel earlier factors. The norm includes the weight decay.
  lamb = [decay, optax.masked(optax.scale_by_trust_ratio(), _weights), *rates]
  update = optax.chain(
    optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
    _scale(config),
    *(lamb if config.name == 'lamb' else [*rates, decay]),
    # A decay of 1 is left out. So the state has the same form as in existing checkpoints.
    *([_scale_by_layer(config.layer_decay)] if config.layer_decay != 1 else []),
    optax.scale_by_learning_rate(schedule),
    *([scale_by_plateau()] if config.schedule == 'plateau' else []),
  )
  if config.name != 'schedule_free':
    return update
  if config.schedule != 'constant':
    raise UserError(
      f'optimizer schedule_free averages its iterates instead of lowering its rate, and optimizer.schedule is '
      f'{config.schedule}: set it to constant'
    )
  if not config.momentum:
    raise UserError('optimizer schedule_free needs a momentum above 0: set optimizer.momentum, such as 0.9')
  return optax.contrib.schedule_free(update, schedule, b1=config.momentum)


def _scale(config: ConfigDict) -> optax.GradientTransformation:
  """Return the optimizer that `config` names, without learning rate, weight decay and clipping."""
  return choose(
    'optimizer.name',
    config.name,
    {
      'adamw': optax.scale_by_adam(config.momentum, config.second_momentum),
      'sgd': optax.trace(config.momentum),
      'lion': optax.scale_by_lion(config.momentum, _LION_SECOND),
      'muon': _scale_by_muon(config),
      'lamb': optax.scale_by_adam(config.momentum, config.second_momentum, _LAMB_EPSILON),
      'adafactor': _scale_by_adafactor(config.momentum),
      'schedule_free': optax.scale_by_adam(0.0, config.second_momentum),
    },
  )


def _scale_by_adafactor(momentum: float) -> optax.GradientTransformation:
  """Return Adafactor without a learning rate, made of optax's parts and with its constants.

  Updates of weights, centers and coefficients are multiplied by the root mean square of the parameter. Updates of
  other parameters are not. Otherwise log σ, for example, would hardly change if σ = 1, because it is then 0.

  Args:
    momentum: the decay of the average of the updates. 0: there is no average, as in most of the paper.

  References: Shazeer & Stern 2018, "Adafactor: Adaptive learning rates with sublinear memory cost", Algorithm 6.
  """
  return optax.chain(
    optax.scale_by_factored_rms(),
    optax.clip_by_block_rms(1.0),
    optax.masked(optax.scale_by_param_block_rms(), _weights),
    optax.ema(momentum, debias=False) if momentum else optax.identity(),
  )


def _scale_by_muon(config: ConfigDict) -> optax.GradientTransformation:
  """Return a transformation with Muon for the matrices of the blocks, and Adam for all other parameters."""

  def matrices(params: Any) -> Any:
    return jax.tree.map(bool, matrices_of(params))

  def others(params: Any) -> Any:
    return jax.tree.map(lambda count: not count, matrices_of(params))

  return optax.chain(
    optax.masked(optax.trace(config.matrix_momentum, nesterov=True), matrices),
    optax.masked(optax.stateless(lambda updates, _: orthogonalize(updates)), matrices),
    optax.masked(optax.scale_by_adam(config.momentum, config.second_momentum), others),
  )


def orthogonalize(updates: optax.Updates) -> optax.Updates:
  """Replace each matrix G = U S Vᵀ by an approximation of U Vᵀ with a root mean square of 0.2.

  Five Newton–Schulz steps compute the approximation. Its singular values lie between 0.7 and 1.2 before the scaling.
  If a parameter has more than two axes, each index of the leading axes, such as a head, selects a matrix of its own.
  If several linear layers lie side by side in one parameter, each layer is a matrix of its own. Examples are queries,
  keys and values, and the halves of a gate.

  Args:
    updates: the momenta of the matrices of all blocks, [..., rows, columns] each.

  References: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
    scalable for LLM training", for the root mean square.
  """
  counts = matrices_of(updates)
  # The axes are rows, matrices and columns. The matrices, and the axes before the rows, are a batch.
  views = jax.tree.map(lambda z, count: z.reshape(*z.shape[:-1], count, z.shape[-1] // count), updates, counts)
  axes = jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-3, -1), views)
  # Optax offers the iteration only inside its transformation, which does nothing else without momentum.
  iteration = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=axes)
  results, _ = iteration.update(views, iteration.init(views))

  def sized(z: jax.Array, result: jax.Array) -> jax.Array:
    size = _MUON_SIZE * jnp.sqrt(max(result.shape[-3], result.shape[-1]))
    return (size * result).reshape(z.shape).astype(z.dtype)

  return jax.tree.map(sized, updates, results)


def _scale_by_layer(decay: float) -> optax.GradientTransformation:
  """Return a transformation that multiplies the update of each parameter by decay^h.

  h is the height of the parameter: its distance from the head in layers (`hbf.training.rules.height_of`).

  References: Clark et al. 2020, "ELECTRA"; layers are counted as in Bao et al. 2022, "BEiT".
  """

  def scaled(updates: optax.Updates, _: Any) -> optax.Updates:
    return jax.tree.map(lambda update, height: update * decay**height, updates, heights_of(updates))

  return optax.stateless(scaled)


def _where(condition: Callable[[Rule], bool]) -> Callable[[Any], Any]:
  """Return a function from parameters to a tree of booleans: the value of `condition` for each parameter's rule."""
  return lambda params: jax.tree.map(condition, rules_of(params))


def _weights(params: Any) -> Any:
  """Return a tree of booleans, True for the parameters that weight decay shrinks: weights, centers, coefficients."""
  return _where(lambda rule: rule.decay)(params)
