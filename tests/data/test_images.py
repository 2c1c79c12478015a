import io
import struct
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageOps

from hbf.data.images import codec
from hbf.errors import UserError

_ORIENTATION = 0x0112


def _decode(path, channels=3, size=None):
  return codec.decode_file(str(path), channels=channels, size=size)


@pytest.mark.parametrize('kind', ['png', 'tiff', 'pgm'])
@pytest.mark.parametrize('channels', [1, 3])
def test_16_bits_become_the_nearest_of_8(kind, channels, tmp_path):
  levels = np.arange(0, 65536, 17, dtype=np.uint16).reshape(-1, 16)[:240]
  Image.fromarray(levels).save(tmp_path / f'a.{kind}')
  expected = np.rint(levels.astype(np.float64) * 255 / 65535).astype(np.uint8)
  image = _decode(tmp_path / f'a.{kind}', channels)
  np.testing.assert_array_equal(image, np.repeat(expected[..., None], channels, axis=-1))


@pytest.mark.parametrize('dtype', [np.int32, np.float32])
def test_samples_of_unknown_range_are_refused(dtype, tmp_path):
  Image.fromarray(np.ones((4, 4), dtype)).save(tmp_path / 'a.tiff')
  with pytest.raises(UserError, match=r'a\.tiff .*samples of 32 bits'):
    _decode(tmp_path / 'a.tiff')


def _half_transparent(mode):
  """Return an image of two black pixels, the right one transparent, and options to save it."""
  if mode == 'P':
    image = Image.new('P', (2, 1))
    image.putpalette([0, 0, 0, 0, 0, 0])
    image.putpixel((1, 0), 1)
    return image, {'transparency': 1}
  if mode in ('L', 'I;16'):  # a gray level says that a pixel is transparent
    levels = np.array([[0, 7]], np.uint8 if mode == 'L' else np.uint16)
    return Image.fromarray(levels), {'transparency': 7}
  image = Image.new(mode, (2, 1))
  black = (0,) * (len(image.getbands()) - 1)
  image.putpixel((0, 0), (*black, 255))
  image.putpixel((1, 0), (*black, 0))
  return image, {}


@pytest.mark.parametrize('mode', ['L', 'I;16', 'P', 'LA', 'RGBA'])
@pytest.mark.parametrize('channels', [1, 3])
def test_what_is_transparent_is_white(mode, channels, tmp_path):
  image, options = _half_transparent(mode)
  image.save(tmp_path / 'a.png', **options)
  np.testing.assert_array_equal(_decode(tmp_path / 'a.png', channels)[0], [[0] * channels, [255] * channels])


def _png_of_16_bits(kind, *levels):
  """Return a PNG of one pixel with these levels. Pillow can't write it. The kind is PNG's color type."""

  def chunk(name, content):
    return struct.pack('>I', len(content)) + name + content + struct.pack('>I', zlib.crc32(name + content))

  head = struct.pack('>IIBBBBB', 1, 1, 16, kind, 0, 0, 0)
  row = zlib.compress(b'\0' + struct.pack(f'>{len(levels)}H', *levels))
  return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', head) + chunk(b'IDAT', row) + chunk(b'IEND', b'')


@pytest.mark.parametrize(
  ('kind', 'levels', 'found'),
  [(0, [0x10FF], [17] * 3), (2, [0x10FF, 0, 0x1000], [16, 0, 16]), (4, [0x10FF, 0xFFFF], [16] * 3)],
)
def test_only_gray_levels_of_16_bits_are_rounded(kind, levels, found):
  content = _png_of_16_bits(kind, *levels)
  assert codec.decode_file('a.png', channels=3, size=None, content=content).tolist() == [[found]]


def test_two_levels_and_cmyk(tmp_path):
  Image.fromarray(np.array([[False, True]])).save(tmp_path / 'two.png')
  np.testing.assert_array_equal(_decode(tmp_path / 'two.png')[0], [[0] * 3, [255] * 3])
  Image.new('CMYK', (8, 8), (0, 255, 255, 0)).save(tmp_path / 'red.jpg', quality=95)
  assert (abs(_decode(tmp_path / 'red.jpg').astype(int) - [255, 0, 0]) < 4).all()


@pytest.mark.parametrize('kind', ['jpg', 'png', 'webp', 'tiff'])
@pytest.mark.parametrize('orientation', range(10))  # 1 to 8 have a meaning
def test_images_are_turned_upright(kind, orientation, tmp_path):
  pixels = np.zeros((16, 32, 3), np.uint8)
  pixels[:8, 16:] = 255  # The stored image is white at the top right.
  exif = Image.Exif()
  exif[_ORIENTATION] = orientation
  Image.fromarray(pixels).save(tmp_path / f'a.{kind}', exif=exif, quality=95)
  found = _decode(tmp_path / f'a.{kind}')
  assert found.shape == ((32, 16, 3) if orientation in (5, 6, 7, 8) else (16, 32, 3))
  if orientation == 6:  # Viewers rotate the image by 90 degrees clockwise.
    assert (abs(found.astype(int) - np.rot90(pixels, -1)) < 8).all()
  with Image.open(tmp_path / f'a.{kind}') as image:
    np.testing.assert_array_equal(found, ImageOps.exif_transpose(image).convert('RGB'))


def test_an_image_is_turned_even_if_other_exif_data_are_wrong(tmp_path):
  entries = struct.pack('<HHII', _ORIENTATION, 3, 1, 6) + struct.pack('<HHI4s', 0x011A, 2, 3, b'72')  # text, no ratio
  exif = b'Exif\0\0II*\0' + struct.pack('<IH', 8, 2) + entries + bytes(4)
  Image.new('RGB', (6, 4)).save(tmp_path / 'a.jpg', exif=exif)
  assert _decode(tmp_path / 'a.jpg').shape == (6, 4, 3)


def test_tfds_images_stay_as_tfds_shows_them():
  buffer, exif = io.BytesIO(), Image.Exif()
  exif[_ORIENTATION] = 6
  Image.new('RGB', (6, 4)).save(buffer, 'JPEG', exif=exif)
  assert codec.decode(buffer, channels=3, size=None, formats=codec.TFDS_FORMATS).shape == (4, 6, 3)


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP', 'TIFF', 'BMP', 'GIF', 'PPM'])
def test_known_formats_are_read_whatever_the_name(kind, tmp_path):
  Image.new('RGB', (4, 6), 'white').save(tmp_path / 'image', format=kind)
  assert (_decode(tmp_path / 'image') == 255).all()
  codec.check_file(str(tmp_path / 'image'))


@pytest.mark.parametrize('kind', ['EPS', 'PDF', 'PCX', 'ICO'])
@pytest.mark.parametrize('use', [_decode, codec.check_file])
def test_other_formats_are_refused_and_start_no_program(kind, use, tmp_path, monkeypatch):
  started = []
  monkeypatch.setattr(EpsImagePlugin, 'Ghostscript', lambda *args, **kwargs: started.append(args))
  Image.new('RGB', (16, 16)).save(tmp_path / 'a.png', format=kind)
  with pytest.raises(
    UserError, match=rf'a\.png is not .*; expected .*{", ".join(codec.FORMATS)}.*: replace'
  ) as caught:
    use(str(tmp_path / 'a.png'))
  assert not started and '\n' not in str(caught.value)


@pytest.mark.parametrize('use', [_decode, codec.check_file])
@pytest.mark.parametrize('sides', [(10_000, 9_000), (20_000, 10_000)])  # Pillow warns of the first.
def test_an_image_of_too_many_pixels_is_refused_by_name(sides, use, tmp_path):
  Image.new('1', sides).save(tmp_path / 'large.png')
  with pytest.raises(UserError, match=r'large\.png is not .*at most 89,478,485 pixels'):
    use(str(tmp_path / 'large.png'))


def test_a_whole_jpeg_or_png_is_checked_without_decoding(tmp_path, monkeypatch):
  for kind in ('jpg', 'png'):
    Image.new('RGB', (16, 16)).save(tmp_path / f'a.{kind}')

  def refuse(*args):
    raise AssertionError('decoded')

  monkeypatch.setattr(Image.Image, 'load', refuse)
  monkeypatch.setattr('PIL.ImageFile.ImageFile.load', refuse)
  for kind in ('jpg', 'png'):
    codec.check_file(str(tmp_path / f'a.{kind}'))


@pytest.mark.parametrize('kind', codec.FORMATS)
@pytest.mark.parametrize('kept', [0.0, 0.01, 0.3, 0.9])
def test_cut_off_files_are_found(kind, kept, tmp_path):
  noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
  Image.fromarray(noise).save(tmp_path / 'a', format=kind)
  content = (tmp_path / 'a').read_bytes()
  (tmp_path / 'a').write_bytes(content[: int(kept * len(content))])
  with pytest.raises(UserError, match='a is not an image'):
    codec.check_file(str(tmp_path / 'a'))


@pytest.mark.parametrize('kind', ['JPEG', 'PNG'])
def test_what_follows_the_end_of_an_image_does_no_harm(kind, tmp_path):
  Image.new('RGB', (64, 64)).save(tmp_path / 'a', format=kind)
  (tmp_path / 'a').write_bytes((tmp_path / 'a').read_bytes() + bytes(1000))
  codec.check_file(str(tmp_path / 'a'))


@pytest.mark.parametrize('sides', [(60_000, 1), (1, 60_000)])
def test_a_thin_image_takes_no_more_memory_than_its_own(sides, tmp_path, monkeypatch):
  Image.new('L', sides, 7).save(tmp_path / 'thin.png')
  made, new = [], Image.Image._new
  monkeypatch.setattr(Image.Image, '_new', lambda self, core: made.append(core.size) or new(self, core))
  assert (_decode(tmp_path / 'thin.png', size=64) == 7).all()
  assert max(width * height for width, height in made) <= 60_000


@pytest.mark.parametrize('sides', [(300, 10), (10, 331), (2000, 100), (61, 3)])
@pytest.mark.parametrize('size', [8, 13, 64])
def test_a_long_image_is_cropped_to_what_a_resized_whole_would_show(sides, size):
  noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, sides[::-1], np.uint8))
  width, height = (round(side * size / min(sides)) for side in sides)
  left, top = (width - size) // 2, (height - size) // 2
  whole = noise.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
  found = codec._to_array(noise, 1, size)[..., 0].astype(int)
  assert abs(found - np.asarray(whole)).max() <= 1


@pytest.mark.parametrize('mode', ['1', 'P', 'LA', 'RGBA', 'CMYK', 'I;16'])
def test_tiles_are_converted_as_the_whole(mode, monkeypatch):
  noise = np.random.default_rng(0).integers(0, 256, (9, 14, 4), np.uint8)
  image = Image.fromarray(noise.view(np.uint16)[..., 0]) if mode == 'I;16' else Image.fromarray(noise).convert(mode)
  if mode == 'P':
    image.info['transparency'] = 3
  if mode == 'I;16':
    image.info['transparency'] = image.getpixel((6, 5))
  whole = np.asarray(codec._convert(image, 'RGB'))
  monkeypatch.setattr(codec, '_TILE', 4)
  np.testing.assert_array_equal(codec._convert(image, 'RGB'), whole)
