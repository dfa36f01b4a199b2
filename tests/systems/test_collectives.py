"""Collectives of a program as XLA writes it, and products of a traced one, loops counted as often
as they run.
"""

import jax
import jax.numpy as jnp

from experiments.systems.collectives import Collectives, collectives, unknown_loops
from experiments.systems.products import products

# What a TPU's compiler writes, shortened: a loop of 6 - 1 turns whose bound the loop carries, one
# of 3 that XLA counted, one that the data ends, a conditional, a collective in two halves, and one
# inside a fusion.
TEXT = """\
HloModule jit_step, is_scheduled=true

%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[]{:T(128)} parameter(0)
  %b = s32[]{:T(128)} parameter(1)
  %same = s32[]{:T(128)} copy(%a)
  ROOT %lt = pred[]{:T(512)} compare(%same, %b), direction=LT
}

%condition.1 (p: (s32[], bf16[8,4], s32[])) -> pred[] {
  %p = (s32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=2
  ROOT %fused = pred[] fusion(%i, %n), kind=kLoop, calls=%less
}

%gathers (q: bf16[4,4]) -> bf16[8,4] {
  %q = bf16[4,4]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather(%q), channel_id=6, dimensions={0}
}

%body.1 (p: (s32[], bf16[8,4], s32[])) -> (s32[], bf16[8,4], s32[]) {
  %p = (s32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}, s32[]) parameter(0)
  %own = bf16[4,4]{1,0} constant({...})
  %whole = bf16[8,4]{1,0} fusion(%own), kind=kCustom, calls=%gathers
  ROOT %again = (s32[], bf16[8,4], s32[]) tuple(%p, %whole, %p)
}

%condition.2 (p: (s32[], f32[16])) -> pred[] {
  %p = (s32[], f32[16]) parameter(0)
  %f = f32[16] get-tuple-element(%p), index=1
  ROOT %going = pred[] custom-call(%f), custom_call_target="going"
}

%body.2 (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %p = (s32[], f32[16]) parameter(0)
  %f = f32[16] get-tuple-element(%p), index=1
  %reduce-scatter.1 = f32[4]{0} reduce-scatter(%f), channel_id=1, dimensions={0}, to_apply=%add.1
  ROOT %next = (s32[], f32[16]) tuple(%p, %f)
}

%body.3 (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %p = (s32[], f32[16]) parameter(0)
  %f = f32[16] get-tuple-element(%p), index=1
  %all-reduce.1 = (f32[16]{0}, /*index=1*/f32[]) all-reduce(%f, %f), channel_id=1, to_apply=%add.1
  ROOT %next = (s32[], f32[16]) tuple(%p, %f)
}

%small (f: f32[16]) -> f32[16] {
  ROOT %f = f32[16] parameter(0)
}

%large (f: f32[16]) -> f32[16] {
  %f = f32[16] parameter(0)
  %half-start = (f32[16], f32[16], u32[], u32[]) collective-permute-start(%f), source_target_pairs={{0,1},{1,0}}
  ROOT %half-done = f32[16] collective-permute-done(%half-start)
}

ENTRY %main (w: f32[16], c: s32[]) -> f32[16] {
  %w = f32[16]{0} parameter(0)
  %c = s32[] parameter(1)
  %one = s32[] constant(1)
  %six = s32[] constant(6)
  %zeros = bf16[8,4]{1,0} constant({...})
  %begin.1 = (s32[], bf16[8,4], s32[]) tuple(%one, %zeros, %six)
  %loop.1 = (s32[], bf16[8,4], s32[]) while(%begin.1), condition=%condition.1, body=%body.1
  %begin.2 = (s32[], f32[16]) tuple(%one, %w)
  %loop.2 = (s32[], f32[16]) while(%begin.2), condition=%condition.2, body=%body.2
  %loop.3 = (s32[], f32[16]) while(%begin.2), condition=%condition.2, body=%body.3, backend_config={"known_trip_count":{"n":"3"}}
  %gte = f32[16] get-tuple-element(%loop.3), index=1
  ROOT %out = f32[16] conditional(%c, %gte, %gte), branch_computations={%small, %large}
}
"""  # noqa: E501


def test_loops_count_as_often_as_they_run():
    found = collectives(TEXT, unknown=7)
    assert found == {
        "all-gather": Collectives(5, 5 * 8 * 4 * 2),
        "reduce-scatter": Collectives(7, 7 * 16 * 4),
        "all-reduce": Collectives(3, 3 * 2 * 16 * 4),
        "collective-permute": Collectives(1, 16 * 4),
    }
    assert unknown_loops(TEXT) == 1 and "reduce-scatter" not in collectives(TEXT, unknown=0)


def test_products_of_loops_branches_and_what_is_done_anew():
    weight = jnp.ones((4, 4))

    @jax.checkpoint
    def body(x, _):
        return jnp.sin(x @ weight), None

    def value(x):
        return jnp.sum(jax.lax.scan(body, x, length=5)[0])

    def branches(x, which):
        return jax.lax.cond(which, lambda: x @ weight @ weight, lambda: x @ weight)

    def by_data(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ weight, x)

    x, once = jnp.ones((3, 4)), 2 * 3 * 4 * 4
    assert products(jax.make_jaxpr(value)(x)) == 5 * once
    # forward, anew, backward to x
    assert products(jax.make_jaxpr(jax.grad(value))(x)) == 5 * 3 * once
    assert products(jax.make_jaxpr(branches)(x, True)) == 2 * once
    assert products(jax.make_jaxpr(by_data)(x), unknown=3) == 3 * once
