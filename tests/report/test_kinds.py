"""Operations of compiled programs by kind."""

from paradec_jax.report.kinds import kinds_of


def test_a_fusion_is_of_the_kind_of_what_it_holds():
    program = """HloModule m

%inner (p: f32[4]) -> f32[] {
  %p = f32[4]{0} parameter(0)
  ROOT %sum = f32[] reduce(%p, %p), dimensions={0}, to_apply=%add
}

ENTRY %main (a: f32[4,4], b: (f32[4], s32[])) -> f32[] {
  %a = f32[4,4]{1,0} parameter(0)
  %product.1 = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}
  %both = (f32[4]{0}, s32[]) while(%b), condition=%c, body=%d
  ROOT %fused.2 = f32[] fusion(%product.1), kind=kLoop, calls=%inner
}
"""
    kinds = kinds_of(program)
    assert kinds["product.1"] == "products" and kinds["fused.2"] == "reductions" and "both" not in kinds
