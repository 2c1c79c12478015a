"""Batches formed within a deadline, and uploads that are read as `hbf predict` reads files, or refused."""

import asyncio
import io
import itertools
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from hbf.errors import UserError
from hbf.serving.batcher import Batcher, OverloadedError, fixed_sizes
from hbf.serving.uploads import read_upload
from hbf.training.predict import read_image

SHAPE = (2, 2, 1)


class Sums:
  """A network whose logits are the sums of an image's pixels. It keeps the batches that it was asked for."""

  def __init__(self, seconds=0.0):
    self.seconds, self.asked = seconds, []

  def __call__(self, images):
    self.asked.append(images.copy())
    time.sleep(self.seconds)
    return images.sum(axis=(1, 2, 3), dtype=np.float32)[:, None] * np.array([1.0, -1.0], np.float32)


def image_of(number):
  return np.full(SHAPE, number, np.uint8)


def ask(batcher, numbers):
  """Return the first logits of images with these pixels, which arrive together."""

  async def ask_all():
    async with batcher.open():
      return await asyncio.gather(*(batcher.logits(image_of(number)) for number in numbers), return_exceptions=True)

  return asyncio.run(ask_all())


def test_a_batch_waits_for_one_call_and_not_for_all_that_came_before_it():
  batcher, done = Batcher(Sums(), SHAPE, deadline=0.0), []

  async def ask_after_calls():
    async with batcher.open():
      calls = [asyncio.create_task(batcher.in_thread(lambda: done.append(time.sleep(0.01)))) for _ in range(20)]
      await asyncio.sleep(0)
      await batcher.logits(image_of(1))
      before = len(done)
      await asyncio.gather(*calls)
      return before

  assert asyncio.run(ask_after_calls()) <= 3 < len(done) == 20


@pytest.mark.parametrize('most', [1, 2, 4, 5, 16, 32, 100])
def test_sizes_are_few_and_waste_less_than_three_quarters(most):
  sizes = fixed_sizes(most)
  assert (sizes[0], sizes[-1]) == (1, most) and list(sizes) == sorted(set(sizes))
  assert all(after <= 4 * before for before, after in itertools.pairwise(sizes))


def test_each_image_gets_its_own_logits_in_batches_of_fixed_sizes():
  sums, numbers = Sums(), [*range(23)]
  batcher = Batcher(sums, SHAPE, batch=8, deadline=0.001)
  batcher.compile()
  compiled = {len(images) for images in sums.asked}
  found = ask(batcher, numbers)
  assert [one.tolist() for one in found] == [[4.0 * number, -4.0 * number] for number in numbers]
  assert {one.dtype for one in found} == {np.dtype(np.float64)}
  assert compiled == {1, 4, 8} >= {len(images) for images in sums.asked}
  assert batcher.batches == 3


def test_a_full_batch_does_not_wait_and_a_lone_image_waits_for_the_deadline():
  begin = time.perf_counter()
  ask(Batcher(Sums(), SHAPE, batch=4, deadline=60.0), range(8))
  assert time.perf_counter() - begin < 30
  begin = time.perf_counter()
  ask(Batcher(Sums(), SHAPE, batch=4, deadline=0.05), [1])
  assert time.perf_counter() - begin >= 0.05


def test_images_that_come_while_a_batch_is_computed_form_the_next_one():
  sums = Sums(0.1)
  batcher = Batcher(sums, SHAPE, batch=8, deadline=0.0)

  async def in_turn():
    async with batcher.open():
      first = asyncio.create_task(batcher.logits(image_of(1)))
      await asyncio.sleep(0.03)
      await asyncio.gather(first, *(batcher.logits(image_of(number)) for number in (2, 3, 4)))

  asyncio.run(in_turn())
  assert [images[:, 0, 0, 0].tolist() for images in sums.asked] == [[1], [2, 3, 4, 0]]


def test_a_full_server_refuses_and_takes_images_again_afterwards():
  batcher = Batcher(Sums(), SHAPE, queue=2)
  with batcher.admitted():
    with batcher.admitted(), pytest.raises(OverloadedError, match='2 images are waiting'), batcher.admitted():
      pass
    with batcher.admitted():
      assert batcher.inside == 2
  assert batcher.inside == 0


def test_a_failed_batch_fails_its_images_only():
  sums = Sums()

  def failing(images):
    if images.max() == 9:
      raise MemoryError('no room')
    return sums(images)

  found = ask(Batcher(failing, SHAPE, batch=2, deadline=1.0), [1, 9, 2, 3])
  assert [type(one) for one in found[:2]] == [MemoryError] * 2
  assert [one[0] for one in found[2:]] == [8.0, 12.0]


def test_an_image_that_nobody_waits_for_is_not_computed():
  sums = Sums(0.1)
  batcher = Batcher(sums, SHAPE, batch=1, deadline=0.0)

  async def leave():
    async with batcher.open():
      first, second, third = (asyncio.create_task(batcher.logits(image_of(number))) for number in (1, 2, 3))
      await asyncio.sleep(0.03)
      second.cancel()
      return (await first)[0], (await third)[0]

  assert asyncio.run(leave()) == (4.0, 12.0)
  assert [images.max() for images in sums.asked] == [1, 3]


def encoded(form, size=(9, 7)):
  file = io.BytesIO()
  pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
  Image.fromarray(pixels).save(file, format=form)
  return file.getvalue()


def zipped(comment=b''):
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w') as archive:
    archive.writestr('hello.txt', 'hello')
    archive.comment = comment
  return file.getvalue()


def tarred():
  file = io.BytesIO()
  with tarfile.open(fileobj=file, mode='w:gz') as archive:
    archive.addfile(tarfile.TarInfo('hello.txt'))
  return file.getvalue()


def png_of(width, height):
  """Return a PNG of a few bytes that promises this many pixels."""

  def chunk(kind, data):
    return struct.pack('>L', len(data)) + kind + data + struct.pack('>L', zlib.crc32(kind + data))

  head = struct.pack('>LLBBBBB', width, height, 8, 2, 0, 0, 0)
  return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', head) + chunk(b'IDAT', zlib.compress(bytes(100))) + chunk(b'IEND', b'')


@pytest.mark.parametrize('form', ['PNG', 'JPEG', 'WEBP', 'TIFF', 'BMP', 'GIF', 'PPM'])
def test_an_upload_is_read_as_the_file(form, tmp_path):
  path = tmp_path / 'image'
  path.write_bytes(encoded(form))
  for shape in ((8, 8, 1), (8, 8, 3), (7, 9, 3)):
    np.testing.assert_array_equal(read_upload(encoded(form), shape), read_image(str(path), shape))


def test_zeros_after_an_image_are_allowed():
  np.testing.assert_array_equal(
    read_upload(encoded('JPEG') + bytes(9), (8, 8, 3)), read_upload(encoded('JPEG'), (8, 8, 3))
  )


BAD = {
  'nothing': (b'', 'is empty'),
  'text': (b'<html>hello</html>', "can be read .cannot identify image file 'content'"),
  'an archive': (zipped(), 'is a ZIP archive'),
  'an empty archive': (b'PK\x05\x06' + bytes(18), 'is a ZIP archive'),
  'a compressed archive': (tarred(), 'cannot identify'),
  'an image with an archive after it': (encoded('BMP') + zipped(), 'is a ZIP archive'),
  'an archive whose comment ends like an image': (
    encoded('PNG') + zipped(b'IEND\xae\x42\x60\x82'),
    'is a ZIP archive',
  ),
  'a PNG and a script': (encoded('PNG') + b'alert(1)', 'does not end where a PNG ends'),
  'a GIF and a script': (encoded('GIF') + b'/*', 'does not end where a GIF ends'),
  'half a JPEG': (encoded('JPEG')[:400], 'does not end where a JPEG ends'),
  'half a TIFF': (encoded('TIFF')[:200], 'is not an image that can be read'),
  'a bomb': (png_of(100_000, 100_000), r'100000 x 100000 pixels, more than 89,478,485|decompression bomb'),
  'a PNG with too few pixels': (png_of(1_000, 1_000), 'is not an image that can be read'),
}


@pytest.mark.parametrize('name', BAD)
def test_what_is_not_one_whole_image_is_refused(name):
  content, said = BAD[name]
  with pytest.raises(UserError, match=said):
    read_upload(content, (8, 8, 3))


def test_an_upload_of_another_shape_is_refused():
  with pytest.raises(UserError, match='the body has 9×7 pixels: expected 6×4'):
    read_upload(encoded('PNG'), (4, 6, 3))


def test_a_missing_package_names_the_command_that_installs_it():
  script = "import sys; sys.modules['starlette'] = None; sys.argv = ['hbf', 'serve', '--workdir=runs/none']\n"
  script += 'from hbf.__main__ import main; main()'
  done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True)
  assert (done.returncode, done.stdout) == (1, '')
  assert done.stderr == "error: hbf serve needs the package starlette: install it by pip install 'hbf[serve]'\n"
