import pytest

from hbf.errors import UserError
from hbf.training.durations import Clock

CLOCK = Clock(examples=1000, batch_size=64, epochs=2.5)


def test_the_run_completes_its_last_epoch():
  assert CLOCK.steps * 64 >= 2500 > (CLOCK.steps - 1) * 64


@pytest.mark.parametrize(
  ('duration', 'examples'),
  [('3steps', 192), ('1epoch', 1000), ('0.5epochs', 500), ('10examples', 10), ('50%', CLOCK.steps * 32)],
)
def test_units(duration, examples):
  assert CLOCK.to_examples('x', duration) == examples


def test_a_period_never_drifts():
  due = CLOCK.every('x', '1epoch')
  steps = [step for step in range(1, 64 * 1000) if due(step)]
  assert len(steps) == (64 * 1000 - 1) * 64 // 1000
  assert all(step == -(-1000 * epoch // 64) for epoch, step in enumerate(steps, 1))


@pytest.mark.parametrize('duration', ['', '5', 'epoch', '-1steps', '3 weeks', '0steps'])
def test_what_is_no_period_is_refused_by_name(duration):
  with pytest.raises(UserError, match=r'log\.every'):
    CLOCK.every('log.every', duration)
