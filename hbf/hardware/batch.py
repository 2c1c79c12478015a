"""Search for the largest batch size that fits into the memory of a device."""

from collections.abc import Callable

_TRIES = 8
_CLOSE = 0.03  # relative precision of the search


def largest_batch(needs: Callable[[int], int], memory: int, unit: int, start: int, most: int) -> int | None:
  """Return the largest batch size that fits into a device's memory, with an error of up to 3%. None: no size fits.

  The needed memory grows almost linearly with the batch size. So each next size to try is where a straight line
  through two earlier tries reaches `memory`. The returned size was tried, and it fits.

  Args:
    needs: function from a batch size to the bytes that a step with this batch needs on a device. A call compiles the
      step, which takes minutes.
    memory: bytes of memory of a device.
    unit: a number. Only multiples of it are batch sizes.
    start: first batch size to try.
    most: largest batch size to try.
  """
  known: dict[int, int] = {}
  fits, fails, units = 0, most // unit + 1, max(1, min(start, most) // unit)
  while len(known) < _TRIES:
    known[units] = needs(units * unit)
    fits, fails = (units, fails) if known[units] <= memory else (fits, units)
    close = max(1, int(_CLOSE * fits))
    if fails - fits <= close:
      break
    units = min(max(_interpolate(known, memory), fits + close), fails - close)
  return fits * unit or None


def _interpolate(known: dict[int, int], memory: int) -> int:
  """Return k so that a batch of k · `unit` examples would need about `memory` bytes (`largest_batch`).

  `known` maps each tried k to its needed bytes. A straight line goes through the two tries nearest to `memory`. After
  only one try, k is doubled or halved.
  """
  (a, at_a), *others = sorted(known.items(), key=lambda item: abs(item[1] - memory))
  if not others:
    return 2 * a if at_a <= memory else a // 2
  b, at_b = others[0]
  slope = (at_b - at_a) / (b - a)
  return int(a + (memory - at_a) / slope) if slope > 0 else (2 * a if at_a <= memory else a // 2)
