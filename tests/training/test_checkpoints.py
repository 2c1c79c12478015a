import contextlib
import errno
import gc
import json
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from toy_runs import damage

from benchmarks.damages import DAMAGES
from hbf.errors import UserError
from hbf.evaluation.scores import ACCURACY
from hbf.training import checkpoints as checkpoints_module
from hbf.training.checkpoints import Checkpoints
from hbf.training.sharding import DATA_PARALLEL, make_mesh, state_sharding
from hbf.training.state import Totals, TrainState, former_state


def state(value, devices=1, **sizes):
  params = {'layer': {'kernel': jnp.full((8, 4), float(value))}}
  new = TrainState(jnp.asarray(int(value)), params, optax.adam(1e-3).init(params), Totals.zeros())
  return jax.device_put(new, state_sharding(make_mesh(jax.devices()[:devices], DATA_PARALLEL | sizes), new))


@contextlib.contextmanager
def saved(folder, accuracies, keep=1):
  with contextlib.closing(Checkpoints(folder, keep, ACCURACY)) as checkpoints:
    for step, accuracy in accuracies.items():
      if accuracy is not None:
        checkpoints.score(step, accuracy)
      checkpoints.save(step, state(step))
  scores = {step: accuracy for step, accuracy in accuracies.items() if accuracy is not None}
  yield Checkpoints(folder, ranks=ACCURACY, scores=scores, read_only=True)


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_the_newest_and_the_best_are_kept(tmp_path):
  with saved(tmp_path, {100: 10.0, 200: 50.0, 300: 60.0, 400: 55.0, 500: 52.0}) as checkpoints:
    assert names(tmp_path) == ['300', '500']
    assert (checkpoints.latest, checkpoints.find('latest'), checkpoints.find('best')) == (500, 500, 300)


def test_of_equally_good_checkpoints_the_first_is_the_best(tmp_path):
  with saved(tmp_path, {1: 10.0, 2: 20.0, 3: 20.0, 4: None}) as checkpoints:
    assert names(tmp_path) == ['2', '4']
    assert checkpoints.find('best') == 2


def test_a_score_that_is_not_a_number_is_never_the_best(tmp_path):
  nan = float('nan')
  with saved(tmp_path, {1: nan, 2: 20.0, 3: nan, 4: nan}) as checkpoints:
    assert names(tmp_path) == ['2', '4']
    assert checkpoints.find('best') == 2
    assert checkpoints.evaluations_since_best(4) == 2 and not checkpoints.evaluations_since_best(1)
    assert not checkpoints.score(5, nan) and checkpoints.score(6, 21.0)


def test_a_figure_is_the_best_if_no_checkpoint_has_a_better_or_the_same(tmp_path):
  scores = {1: 30.0, 2: 90.0}  # of step 2 there is no checkpoint
  with contextlib.closing(Checkpoints(tmp_path, ranks=ACCURACY, scores=scores)) as checkpoints:
    assert checkpoints.score(0, 20.0)
    checkpoints.save(1, state(1))
    assert [checkpoints.score(step, value) for step, value in ((3, 20.0), (4, 30.0), (5, 40.0))] == [
      False,
      False,
      True,
    ]
    assert checkpoints.scored(5) and not checkpoints.scored(6)


def test_a_checkpoint_without_an_average_is_what_it_was_and_says_what_it_lacks(tmp_path):
  with saved(tmp_path / 'without', {1: None}) as checkpoints:
    message = r'checkpoint 1 in .* has no average of the parameters \(train.average was 0\): evaluate the parameters'
    with pytest.raises(UserError, match=message):
      checkpoints.restore_params(1, state(0).params, average=True)
    with pytest.raises(UserError, match='the run goes on and has removed it, so give the same command again'):
      checkpoints.restore_params(2, state(0).params, average=True)
  average = {'layer': {'kernel': jnp.full((8, 4), 5.0)}}
  with contextlib.closing(Checkpoints(tmp_path / 'with')) as checkpoints:
    checkpoints.save(1, state(1).replace(average=average))
    checkpoints.wait()
    found = checkpoints.restore_newest(state(0).replace(average=average)).state
    alone = checkpoints.restore_params(1, state(0).params, average=True)
  for restored in (found.average, alone):
    np.testing.assert_array_equal(restored['layer']['kernel'], 5.0)
  np.testing.assert_array_equal(found.params['layer']['kernel'], 1.0)
  items = [{path.name for path in (tmp_path / kind / '1').iterdir() if path.is_dir()} for kind in ('without', 'with')]
  assert items == [{'params', 'training'}, {'params', 'training', 'average'}]


def test_parameters_that_are_gone_are_read_and_dropped(tmp_path):
  """The optimizer's state holds the removed parameters too. A resumed run saves checkpoints without them."""
  optimizer = optax.adam(1e-3)

  def made(value, pool):
    tree = {'layer': {'kernel': jnp.full((8, 4), value)}, 'pool': {'kernel': jnp.full((8, 1), value)} | pool}
    return TrainState(jnp.asarray(1), tree, optimizer.init(tree), Totals.zeros(), tree)

  old, new = made(2.0, {'bias': jnp.full(1, 9.0)}), made(3.0, {})
  asked, former = (jax.tree.map(jnp.zeros_like, tree) for tree in (new, former_state(optimizer, new)))
  for saving, value in ((old, 2.0), (new, 3.0)):
    folder = tmp_path / str(value)
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
      checkpoints.save(1, saving)
      checkpoints.wait()
      found = checkpoints.restore_newest(asked, former).state
      alone = checkpoints.restore_params(1, asked.params, former.params, average=True)
    assert jax.tree.structure(found) == jax.tree.structure(new)
    assert {float(leaf.mean()) for leaf in jax.tree.leaves((found.params, found.average, alone))} == {value}


def test_parameters_of_old_names_are_read(tmp_path):
  """The optimizer's state has the old names too."""
  optimizer = optax.adam(1e-3)

  def made(value, names):
    tree = {'block0': {'stage2': {name: jnp.full((8, 4), value + i) for i, name in enumerate(names)}}}
    return TrainState(jnp.asarray(1), tree, optimizer.init(tree), Totals.zeros(), tree)

  old, asked = made(2.0, ('centres', 'log_width', 'metric')), made(0.0, ('centers', 'log_sigma', 'metric'))
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
    checkpoints.save(1, old)
    checkpoints.wait()
    found = checkpoints.restore_newest(asked).state
    alone = checkpoints.restore_params(1, asked.params, average=True)
  assert jax.tree.structure(found) == jax.tree.structure(asked)
  for params in (found.params, found.average, alone):
    assert {name: float(z.mean()) for name, z in params['block0']['stage2'].items()} == {
      'centers': 2.0,
      'log_sigma': 3.0,
      'metric': 4.0,
    }


def test_a_figure_that_comes_later_counts(tmp_path):
  """The score of a step may come after its checkpoint, if its evaluation was interrupted and is repeated later."""
  with contextlib.closing(Checkpoints(tmp_path, keep=1, ranks=ACCURACY)) as checkpoints:
    checkpoints.save(1, state(1))
    assert checkpoints.score(1, 50.0)
    for step in (2, 3):
      checkpoints.score(step, 40.0)
      checkpoints.save(step, state(step))
  assert names(tmp_path) == ['1', '3']


def test_unranked_checkpoints_do_not_pile_up(tmp_path):
  with saved(tmp_path, dict.fromkeys((1, 2, 3, 4)), keep=2) as checkpoints:
    assert (checkpoints.find('3'), checkpoints.find('latest')) == (3, 4)
    with pytest.raises(UserError, match=r'use latest, best or one of 3, 4'):
      checkpoints.find('1')
    with pytest.raises(UserError, match='no checkpoint has a validation accuracy'):
      checkpoints.find('best')


def test_a_folder_without_checkpoints_says_so(tmp_path):
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints, pytest.raises(UserError, match='no checkpoint in'):
    checkpoints.find('latest')


@pytest.mark.parametrize(
  ('devices', 'there', 'here'),
  [(8, {}, {}), (1, {}, {}), (8, {}, {'data': 1, 'fsdp': -1}), (1, {'data': 2, 'fsdp': 4}, {})],
  ids=['1 to 8', '8 to 1', 'data to fsdp', 'fsdp to 1'],
)
def test_restores_onto_the_devices_at_hand(tmp_path, devices, there, here):
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
    checkpoints.save(7, state(7, 8 if there or here else 9 - devices, **there), {'seconds': 1.5})
  target = state(0, devices, **here)
  checkpoints = Checkpoints(tmp_path, read_only=True)
  step, restored, about, damaged = checkpoints.restore_newest(target)
  assert (step, about, damaged) == (7, {'seconds': 1.5}, {})
  assert jax.tree.structure(restored) == jax.tree.structure(target)
  for leaf, asked in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
    assert leaf.sharding == asked.sharding
  assert int(restored.step) == 7
  np.testing.assert_array_equal(restored.params['layer']['kernel'], 7.0)
  np.testing.assert_array_equal(checkpoints.restore_params(7, target.params)['layer']['kernel'], 7.0)


def test_checkpoints_of_before_are_read(tmp_path):
  """Older checkpoints hold their own score, and no times."""
  options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics['accuracy'])
  saving, old = ocp.args.StandardSave, state(3)
  with ocp.CheckpointManager(tmp_path, options=options, item_names=('params', 'training')) as manager:
    training = {'step': old.step, 'opt_state': old.opt_state, 'totals': old.totals}
    items = ocp.args.Composite(params=saving(old.params), training=saving(training))
    manager.save(3, args=items, metrics={'accuracy': 50.0})
  with contextlib.closing(Checkpoints(tmp_path, ranks=ACCURACY, scores={3: 50.0})) as checkpoints:
    found = checkpoints.restore_newest(state(0))
    assert (found.step, int(found.state.step), found.about, checkpoints.find('best')) == (3, 3, {}, 3)
    checkpoints.save(4, state(4))
    checkpoints.save(5, state(5))
  assert names(tmp_path) == ['3', '5']


@pytest.mark.parametrize('files', [2, 100])
def test_damaged_checkpoints_are_set_aside_and_made_anew(tmp_path, files):
  with saved(tmp_path, dict.fromkeys((1, 2, 3)), keep=3):
    pass
  for again in range(2):
    for step in (2, 3):
      damage(tmp_path, step, files)
    with contextlib.closing(Checkpoints(tmp_path, keep=3)) as checkpoints:
      found = checkpoints.restore_newest(state(0))
      assert found.step == checkpoints.latest == int(found.state.step) == 1
      aside = [f'{step}.damaged' + ('-2' if again else '') for step in (2, 3)]
      assert sorted(path.name for path in found.damaged.values()) == aside
      for step in (2, 3):
        checkpoints.save(step, state(step))
    assert set(names(tmp_path)) >= {'1', '2', '3', *aside}
    with contextlib.closing(Checkpoints(tmp_path, read_only=True)) as checkpoints:
      assert checkpoints.find('latest') == 3


def test_a_damaged_checkpoint_gets_a_name_that_is_free(tmp_path):
  with saved(tmp_path, dict.fromkeys((1, 2)), keep=2):
    damage(tmp_path, 2, 100)
  (tmp_path / '2.damaged-2' / 'params').mkdir(parents=True)  # '2.damaged' was removed
  for name in ('2.damaged', '2.damaged-3'):
    (tmp_path / '2').mkdir(exist_ok=True)
    with contextlib.closing(Checkpoints(tmp_path, keep=2)) as checkpoints:
      assert checkpoints.restore_newest(state(0)).damaged[2].name == name


@pytest.mark.slow
def test_whatever_one_bit_is_flipped_the_checkpoint_is_refused_or_the_same(tmp_path):
  kernel = jax.random.normal(jax.random.key(0), (40, 30))  # long enough not to lie beside what has a checksum
  whole = state(1).replace(params={'layer': {'kernel': kernel}})
  about = {'seconds': 1.5, 'steps': 1}
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
    checkpoints.save(1, whole, about)
  draw, refused = random.Random(0), 0
  files = [path for path in sorted(tmp_path.rglob('*')) if path.is_file() and path.stat().st_size]
  for path in files:
    content = path.read_bytes()
    for _ in range(10 if 'METADATA' in path.name or len(content) > 4000 else 2):
      flipped, place = bytearray(content), draw.randrange(len(content))
      flipped[place] ^= 1 << draw.randrange(8)
      path.write_bytes(flipped)
      with contextlib.closing(Checkpoints(tmp_path, read_only=True)) as checkpoints:
        try:
          found = checkpoints.restore_newest(whole)
        except UserError:
          refused += 1
        else:
          jax.tree.map(np.testing.assert_array_equal, found.state, whole)
          assert found.about == about
    path.write_bytes(content)
  assert refused > 20


def test_checkpoints_damaged_in_whatever_way_are_set_aside_without_ado(tmp_path, monkeypatch):
  steps = dict(zip(range(2, 2 + len(DAMAGES)), DAMAGES.values(), strict=True))
  long = {str(layer): jax.random.normal(jax.random.key(layer), (40, 30)) for layer in range(6)}
  ado = []
  gc.collect()  # what earlier tests have left
  monkeypatch.setattr(sys, 'unraisablehook', ado.append)
  with contextlib.closing(Checkpoints(tmp_path, keep=20)) as checkpoints:
    for step in (1, *steps):
      checkpoints.save(step, state(step).replace(params=long))
  for step, damage_it in steps.items():
    damage_it(tmp_path / str(step))
  (tmp_path / '99.orbax-checkpoint-tmp' / 'params').mkdir(parents=True)
  with contextlib.closing(Checkpoints(tmp_path, keep=20)) as checkpoints:
    found = checkpoints.restore_newest(state(0).replace(params=long))
    assert (found.step, sorted(found.damaged)) == (1, [*steps])
    gc.collect()
    assert not ado
    checkpoints.save(2, state(2).replace(params=long))
  assert names(tmp_path) == sorted(['1', '2', *(f'{step}.damaged' for step in steps)])


def test_a_checkpoint_of_before_checksums_is_read(tmp_path):
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
    checkpoints.save(1, state(1), {'seconds': 1.5, 'steps': 1})
  path = tmp_path / '1' / '_CHECKPOINT_METADATA'
  metadata = json.loads(path.read_text())
  path.write_text(json.dumps(metadata | {'custom_metadata': metadata['custom_metadata']['about']}))
  found = Checkpoints(tmp_path, read_only=True).restore_newest(state(0))
  assert (int(found.state.step), found.about) == (1, {'seconds': 1.5, 'steps': 1})


@pytest.mark.parametrize(
  'error',
  [
    MemoryError(),
    OSError(errno.EIO, 'no answer'),
    jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED'),
    ValueError('PERMISSION_DENIED: Error opening "zarr" driver: Permission denied'),  # as TensorStore says it
  ],
  ids=repr,
)
def test_what_is_the_machines_fault_sets_no_checkpoint_aside(tmp_path, monkeypatch, error):
  with saved(tmp_path, dict.fromkeys((1, 2)), keep=2):
    pass
  read = Checkpoints._read

  def refuse(self, step, items):
    if step == 2:
      raise error
    return read(self, step, items)

  monkeypatch.setattr(Checkpoints, '_read', refuse)
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints, pytest.raises(type(error)):
    checkpoints.restore_newest(state(0))
  assert names(tmp_path) == ['1', '2']


def test_what_may_not_be_read_is_not_missing(tmp_path, monkeypatch):
  """For Orbax, files in a folder without read permission are missing."""
  with saved(tmp_path, dict.fromkeys((1, 2)), keep=2):
    pass

  def overlook(self, step, items):
    raise FileNotFoundError('Individual parameter subdirectory not found')

  def refuse(*_):
    raise PermissionError(errno.EACCES, 'no')

  monkeypatch.setattr(Checkpoints, '_read', overlook)
  monkeypatch.setattr(checkpoints_module, 'open', refuse, raising=False)
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints, pytest.raises(PermissionError):
    checkpoints.restore_newest(state(0))
  assert names(tmp_path) == ['1', '2']


def test_if_no_checkpoint_can_be_read_all_stay(tmp_path):
  with saved(tmp_path, dict.fromkeys((1, 2)), keep=2):
    pass
  damage(tmp_path, 1)
  damage(tmp_path, 2)
  opened, refused = (
    contextlib.closing(Checkpoints(tmp_path)),
    pytest.raises(UserError, match=r'in .* can be read \(.+\): '),
  )
  with opened as checkpoints, refused:
    checkpoints.restore_newest(state(0))
  assert names(tmp_path) == ['1', '2']


def test_a_damaged_checkpoint_is_not_evaluated_and_the_others_are_named(tmp_path):
  with saved(tmp_path, dict.fromkeys((1, 2)), keep=2) as checkpoints:
    damage(tmp_path, 2, count=100)
    with pytest.raises(UserError, match=r'checkpoint 2 in .* cannot be read \(.+\): use --checkpoint with one of 1$'):
      checkpoints.restore_params(2, state(0).params)
  assert names(tmp_path) == ['1', '2']


def test_a_process_that_could_read_hears_of_one_that_could_not_before_it_compares(tmp_path, monkeypatch):
  """To compare the checksums of shared arrays, all processes must take part."""
  monkeypatch.setattr(checkpoints_module, '_in_several_processes', lambda tree: True)
  monkeypatch.setattr(checkpoints_module.processes, 'exchange', lambda reason: [reason, 'no route'])
  monkeypatch.setattr(checkpoints_module, '_describe_changed', None)
  refused = pytest.raises(UserError, match=r'checkpoint 1 in .* cannot be read \(no route\): there is no other')
  with saved(tmp_path, {1: None}) as checkpoints, refused:
    checkpoints.restore_params(1, state(0).params)
