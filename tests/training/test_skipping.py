"""Steps with a number that is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from hbf.training.skipping import skipping, with_skips
from hbf.training.state import Diverged, Totals, TrainState, check_finite_state, repeat_step

NAN = float('nan')


def add(state, resident, batch):
  """Parameters and moments that sum what the batches hold, and so stay spoiled."""
  totals = state.totals.replace(loss=state.totals.loss + batch['loss'], steps=state.totals.steps + 1)
  params, moments = state.params + batch['params'], state.opt_state + batch['moments']
  return TrainState(state.step + 1, params, moments, totals)


def run(limit, **rows):
  config = ConfigDict({'optimizer': {'skip': limit}})
  start = TrainState(jnp.zeros((), jnp.int32), jnp.zeros(2), jnp.zeros(2), Totals.zeros())
  count = len(next(iter(rows.values())))
  rows = {name: jnp.array(rows.get(name, [1.0] * count)) for name in ('loss', 'params', 'moments')}
  steps = jax.jit(repeat_step(skipping(add, config)), donate_argnums=0)
  return steps(with_skips(start, config), None, rows, count)[0]


@pytest.mark.parametrize('spoiled', ['loss', 'params', 'moments'])
def test_a_skipped_step_changes_only_the_step_and_its_counts(spoiled):
  rows = [1.0, NAN, float('inf'), 1.0, NAN, -float('inf'), 1.0]
  state = run(2, **{spoiled: rows})
  assert (int(state.step), int(state.skips.total), int(state.skips.consecutive)) == (7, 4, 0)
  for found in (state.params, state.opt_state):
    np.testing.assert_array_equal(found, [3.0, 3.0])
  assert (float(state.totals.loss), int(state.totals.steps)) == (3.0, 3)


def test_beyond_the_limit_the_run_diverges():
  state = run(2, params=[1.0, NAN, NAN, NAN, 1.0])
  assert int(state.skips.total) == 2
  with pytest.raises(Diverged, match='not finite at step 5'):
    check_finite_state(5, state)


def test_without_a_limit_step_and_state_are_what_they_were():
  config = ConfigDict({'optimizer': {'skip': 0}})
  state = TrainState(jnp.zeros((), jnp.int32), {}, (), Totals.zeros())
  assert skipping(add, config) is add and with_skips(state, config) is state
