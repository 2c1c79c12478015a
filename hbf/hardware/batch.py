"""The largest batch that fits."""

from collections.abc import Callable

_TRIES = 8
_CLOSE = 0.03  # of the batch: what fits isn't sought more closely


def largest_batch(needs: Callable[[int], int], memory: int, unit: int, start: int, most: int) -> int | None:
  """The largest multiple of `unit` that fits, to 3%; None if not even one unit does.

  Memory grows nearly as a straight line with the batch: each try is where the line through two others meets the
  memory, and every answer has been tried.

  Args:
    needs: bytes on a device that a batch needs; it compiles, which takes minutes.
    memory: of a device.
    unit: that the batch must be a multiple of.
    start: the first batch to try.
    most: no batch may be larger.
  """
  known: dict[int, int] = {}
  fits, fails, units = 0, most // unit + 1, max(1, min(start, most) // unit)
  while len(known) < _TRIES:
    known[units] = needs(units * unit)
    fits, fails = (units, fails) if known[units] <= memory else (fits, units)
    close = max(1, int(_CLOSE * fits))
    if fails - fits <= close:
      break
    units = min(max(_meet(known, memory), fits + close), fails - close)
  return fits * unit or None


def _meet(known: dict[int, int], memory: int) -> int:
  """Where the line through the two batches nearest to the memory meets it."""
  (a, at_a), *others = sorted(known.items(), key=lambda item: abs(item[1] - memory))
  if not others:
    return 2 * a if at_a <= memory else a // 2
  b, at_b = others[0]
  slope = (at_b - at_a) / (b - a)
  return int(a + (memory - at_a) / slope) if slope > 0 else (2 * a if at_a <= memory else a // 2)
