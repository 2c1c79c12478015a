"""Tests of the bytes that compiled programs move, against the sizes of their arrays."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from hbf.hardware.hlo import Collective, count_kernels, count_traffic, instruction_traffic
from hbf.training.sharding import make_mesh

A = jax.ShapeDtypeStruct((64, 48), jnp.float32)
B = jax.ShapeDtypeStruct((48, 32), jnp.float32)
PRODUCT = 4 * (64 * 48 + 48 * 32 + 64 * 32)


def traffic(function, *shapes):
  return count_traffic(jax.jit(function).lower(*shapes).compile().as_text())


def test_a_product_reads_its_factors_and_writes_its_result():
  assert traffic(jnp.matmul, A, B) == (PRODUCT, {})


def test_what_is_fused_moves_nothing_in_between():
  assert traffic(lambda a: jnp.exp(2 * a + 1), A).memory == 2 * A.size * 4


def test_every_instruction_has_its_scope_and_its_bytes():
  def scoped(a, b):
    with jax.named_scope('first'):
      c = a @ b
    with jax.named_scope('second'):
      return jnp.flip(c, 0)

  text = jax.jit(scoped).lower(A, B).compile().as_text()
  sizes = {'first': 0, 'second': 0}
  for scope, size in instruction_traffic(text).values():
    sizes[scope.split('/')[1]] += size
  assert sizes == {'first': PRODUCT, 'second': 2 * 4 * 64 * 32}


SQUARE = jax.ShapeDtypeStruct((48, 48), jnp.float32)


def looped(times, a, b):
  return jax.lax.fori_loop(0, times, lambda _, c: jnp.sin(c @ b), a)


def test_a_loop_counts_as_often_as_it_runs():
  five, fifty = (traffic(functools.partial(looped, times), A, SQUARE).memory for times in (5, 50))
  a_turn = (fifty - five) / 45
  product_and_sine = 4 * (4 * A.size + SQUARE.size)
  assert product_and_sine <= a_turn < 1.5 * product_and_sine


def test_a_loop_of_unknown_length_counts_once():
  known = traffic(functools.partial(looped, 5), A, SQUARE).memory
  assert traffic(looped, jax.ShapeDtypeStruct((), jnp.int32), A, SQUARE).memory < known / 3


def test_of_what_is_sliced_only_the_slice_is_read():
  images = jax.ShapeDtypeStruct((10_000, 48), jnp.float32)
  moved = traffic(lambda z, i: jax.lax.dynamic_slice_in_dim(z, i, 4) + 1, images, jax.ShapeDtypeStruct((), jnp.int32))
  assert moved.memory < 4 * 4 * 48 * 4


@pytest.mark.parametrize(
  ('collective', 'kind', 'bytes_each'),
  [
    (lambda z: jax.lax.psum(z, 'data'), 'all-reduce', 4 * 8 * 48),
    (lambda z: jax.lax.all_gather(z, 'data', tiled=True), 'all-gather', 4 * 64 * 48),
    (lambda z: jax.lax.psum_scatter(z, 'data', tiled=True), 'reduce-scatter', 4 * 8 * 48),
    (lambda z: jax.lax.ppermute(z, 'data', [(i, (i + 1) % 8) for i in range(8)]), 'collective-permute', 4 * 8 * 48),
  ],
)
def test_collectives_count_what_they_take_or_give(collective, kind, bytes_each):
  mesh = make_mesh(jax.devices()[:8])
  mapped = jax.shard_map(collective, mesh=mesh, in_specs=P('data'), out_specs=P('data'), check_vma=False)
  text = jax.jit(mapped).lower(A).compile().as_text()
  assert count_traffic(text, [0, 0, 0, 0, 1, 1, 1, 1]).network == {Collective(kind, 8, 2): bytes_each}


@pytest.mark.parametrize(
  ('axes', 'devices', 'hosts'),
  [('data', 2, 2), ('fsdp', 2, 1), ('tensor', 2, 1), (('data', 'tensor'), 4, 2), (('fsdp', 'tensor'), 4, 1)],
)
def test_a_collective_is_among_the_devices_of_its_axes(axes, devices, hosts):
  """The first four of the eight devices are one host, so only `data` leaves it."""
  mesh = make_mesh(jax.devices()[:8], {'data': 2, 'fsdp': 2, 'tensor': 2})
  mapped = jax.shard_map(lambda z: jax.lax.psum(z, axes), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  text = jax.jit(mapped).lower(A).compile().as_text()
  assert list(count_traffic(text, [0, 0, 0, 0, 1, 1, 1, 1]).network) == [Collective('all-reduce', devices, hosts)]


# As a TPU's compiler writes it: what lies in S(1) is on the chip.
ON_CHIP = """HloModule step

%fused (p0: f32[8,128], p1: f32[8,128]) -> f32[8,128] {
  %p0 = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
  %p1 = f32[8,128]{1,0:T(8,128)} parameter(1)
  ROOT %sum = f32[8,128]{1,0:T(8,128)S(1)} add(%p0, %p1)
}

%body (b: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %b = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%b), index=0
  %z = f32[8,128]{1,0:T(8,128)} get-tuple-element(%b), index=1
  %twice = f32[8,128]{1,0:T(8,128)} add(%z, %z)
  ROOT %next = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%i, %twice)
}

%condition (c: (s32[], f32[8,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %c = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %more = pred[]{:T(512)} compare(%n, %limit), direction=LT
}

ENTRY %main (a: f32[8,128], big: f32[64,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %big = f32[64,128]{1,0:T(8,128)} parameter(1)
  %start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %fetched = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%start)
  %cut = ((f32[64,128]{1,0:T(8,128)}), f32[8,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%big), slice={[0:8]}
  %part = f32[8,128]{1,0:T(8,128)S(1)} slice-done(%cut)
  %f = f32[8,128]{1,0:T(8,128)S(1)} fusion(%fetched, %a), kind=kLoop, calls=%fused
  %zero = s32[]{:T(128)} constant(0)
  %first = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%zero, %a)
  %loop = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%first), condition=%condition, body=%body
  %last = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %kernel = f32[8,128]{1,0:T(8,128)S(1)} custom-call(%f), custom_call_target="tpu_custom_call"
  ROOT %out = f32[8,128]{1,0:T(8,128)} add(%kernel, %last)
}
"""
TILE = 4 * 8 * 128


def test_what_stays_on_the_chip_is_not_counted():
  fetched, cut, read_by_fusion, loop, out = 1, 1, 1, 5 * 3, 2
  assert count_traffic(ON_CHIP).memory == TILE * (fetched + cut + read_by_fusion + loop + out)


def test_kernels_that_xla_did_not_write_are_named():
  assert count_kernels(ON_CHIP) == {'Mosaic': 1}
  assert count_kernels('custom_call_target="__cublas$lt$matmul"') == {}


# As a TPU's compiler writes collectives that run beside products, and a sum of which each device keeps a part.
IN_FUSIONS = """HloModule step

%begun (p0: f32[1,128]) -> (f32[1,128], f32[8,128]) {
  %p0 = f32[1,128]{1,0:T(1,128)S(1)} parameter(0)
  %all.1 = f32[8,128]{1,0:T(8,128)S(1)} all-gather(%p0), channel_id=3, replica_groups={}, dimensions={0}
  ROOT %both.1 = (f32[1,128]{1,0:T(1,128)S(1)}, f32[8,128]{1,0:T(8,128)S(1)}) custom-call(%all.1)
}

%gone_on (p1: f32[1,128], p2: f32[8,128]) -> f32[8,128] {
  %p1 = f32[1,128]{1,0:T(1,128)S(1)} parameter(0)
  %p2 = f32[8,128]{1,0:T(8,128)S(1)} parameter(1)
  %all.2 = f32[8,128]{1,0:T(8,128)S(1)} all-gather(%p1), channel_id=3, replica_groups={}, dimensions={0}
  ROOT %twice = f32[8,128]{1,0:T(8,128)S(1)} add(%p2, %p2)
}

%all-reduce-scatter.4 (p3: f32[8,128]) -> f32[1,128] {
  %p3 = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
  %sum = f32[8,128]{1,0:T(8,128)} all-reduce(%p3), channel_id=4, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %me = u32[] partition-id()
  %none = u32[] constant(0)
  ROOT %mine = f32[1,128]{1,0:T(1,128)S(1)} dynamic-slice(%sum, %me, %none), dynamic_slice_sizes={1,128}
}

ENTRY %main (a: f32[1,128]) -> f32[1,128] {
  %a = f32[1,128]{1,0:T(1,128)S(1)} parameter(0)
  %first = (f32[1,128]{1,0:T(1,128)S(1)}, f32[8,128]{1,0:T(8,128)S(1)}) fusion(%a), kind=kCustom, calls=%begun
  %part = f32[1,128]{1,0:T(1,128)S(1)} get-tuple-element(%first), index=0
  %whole = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%first), index=1
  %second = f32[8,128]{1,0:T(8,128)S(1)} fusion(%part, %whole), kind=kOutput, calls=%gone_on
  ROOT %out = f32[1,128]{1,0:T(1,128)S(1)} fusion(%second), kind=kCustom, calls=%all-reduce-scatter.4
}
"""


def test_collectives_within_fusions_are_met_once():
  found = count_traffic(IN_FUSIONS, [0, 0, 0, 0, 1, 1, 1, 1]).network
  assert found == {Collective('all-gather', 8, 2): TILE, Collective('reduce-scatter', 4, 1): TILE}


# As a TPU's compiler writes a loop over blocks: a fusion within takes a block's part of all, one puts its result into
# what is kept of all, and one changes the layout of what is only sliced.
OF_ALL_BLOCKS = """HloModule step

%part (p0: f32[12,8,128], i0: s32[]) -> f32[8,128] {
  %p0 = f32[12,8,128]{2,1,0:T(8,128)} parameter(0)
  %i0 = s32[] parameter(1)
  %none.0 = s32[] constant(0)
  %cut = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%p0, %i0, %none.0, %none.0), dynamic_slice_sizes={1,8,128}
  ROOT %one = f32[8,128]{1,0:T(8,128)} bitcast(%cut)
}

%other_layout (p1: f32[12,8,128]) -> f32[12,8,128] {
  %p1 = f32[12,8,128]{2,1,0:T(8,128)} parameter(0)
  ROOT %same = f32[12,8,128]{2,1,0:T(8,128)(2,1)} copy(%p1)
}

%block (p2: s32[], p3: f32[12,8,128], p4: f32[12,8,128]) -> f32[12,8,128] {
  %p2 = s32[] parameter(0)
  %p3 = f32[12,8,128]{2,1,0:T(8,128)} parameter(1)
  %p4 = f32[12,8,128]{2,1,0:T(8,128)} parameter(2)
  %mine = f32[8,128]{1,0:T(8,128)} fusion(%p3, %p2), kind=kLoop, calls=%part
  %new = f32[1,8,128]{2,1,0:T(8,128)} bitcast(%mine)
  %laid = f32[12,8,128]{2,1,0:T(8,128)(2,1)} fusion(%p4), kind=kLoop, calls=%other_layout
  %none.1 = s32[] constant(0)
  %put = f32[12,8,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%laid, %new, %p2, %none.1, %none.1)
  ROOT %back = f32[12,8,128]{2,1,0:T(8,128)} fusion(%put), kind=kLoop, calls=%other_layout
}

ENTRY %main (i: s32[], a: f32[12,8,128], b: f32[12,8,128]) -> f32[12,8,128] {
  %i = s32[]{:S(6)} parameter(0)
  %a = f32[12,8,128]{2,1,0:T(8,128)} parameter(1)
  %b = f32[12,8,128]{2,1,0:T(8,128)} parameter(2)
  ROOT %out = f32[12,8,128]{2,1,0:T(8,128)} fusion(%i, %a, %b), kind=kOutput, calls=%block
}
"""


def test_of_all_blocks_one_is_read_and_one_is_written():
  assert count_traffic(OF_ALL_BLOCKS).memory == 2 * TILE
