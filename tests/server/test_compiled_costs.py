"""The costs of a compiled GPU program are read from its HLO."""

# ruff: noqa: E501 -- HLO has one instruction per line
from __future__ import annotations

import pytest

from scripts.simulate.compiled_costs import Launch, Rates, Sequences, launches_of

HLO = """
HloModule jit_step

%slice_of_a_stack (p: bf16[4,64,32], i: s32[]) -> f32[64,32] {
  %p = bf16[4,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = bf16[1,64,32]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,64,32}
  %flat = bf16[64,32]{1,0} bitcast(%part)
  ROOT %converted = f32[64,32]{1,0} convert(%flat)
}

%update_of_a_stack (p: f32[4,64,32], u: f32[64,32], i: s32[]) -> f32[4,64,32] {
  %p = f32[4,64,32]{2,1,0} parameter(0)
  %u = f32[64,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,64,32]{2,1,0} bitcast(%u)
  ROOT %updated = f32[4,64,32]{2,1,0} dynamic-update-slice(%p, %row, %i, %zero, %zero)
}

%product_with_a_slice (w: bf16[4,64,32], i: s32[], x: bf16[16,32]) -> (bf16[16,64], s8[99]) {
  %w = bf16[4,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[16,32]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %part = bf16[1,64,32]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,64,32}
  %weight = bf16[64,32]{1,0} bitcast(%part)
  ROOT %product = (bf16[16,64]{1,0}, s8[99]{0}) custom-call(%x, %weight), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}

%body (state: (s32[], bf16[4,64,32], bf16[16,32])) -> (s32[], bf16[4,64,32], bf16[16,32]) {
  %state = (s32[], bf16[4,64,32]{2,1,0}, bf16[16,32]{1,0}) parameter(0)
  %product.1 = (bf16[16,64]{1,0}, s8[99]{0}) fusion(%state#1, %state#0, %state#2), kind=kCustom, calls=%product_with_a_slice
  ROOT %next = (s32[], bf16[4,64,32]{2,1,0}, bf16[16,32]{1,0}) tuple(%state#0, %state#1, %state#2)
}

%condition (state.1: (s32[], bf16[4,64,32], bf16[16,32])) -> pred[] {
  %state.1 = (s32[], bf16[4,64,32]{2,1,0}, bf16[16,32]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%short (a: f32[64,32]) -> f32[64,32] {
  ROOT %a = f32[64,32]{1,0} parameter(0)
}

%long (b: f32[64,32]) -> f32[64,32] {
  %b = f32[64,32]{1,0} parameter(0)
  ROOT %sorted = f32[64,32]{1,0} sort(%b), dimensions={1}
}

ENTRY %main (stack: bf16[4,64,32], index: s32[], sums: f32[4,64,32], x: bf16[16,32]) -> f32[4,64,32] {
  %stack = bf16[4,64,32]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %sums = f32[4,64,32]{2,1,0} parameter(2)
  %x = bf16[16,32]{1,0} parameter(3)
  %slice_fusion.12 = f32[64,32]{1,0} fusion(%stack, %index), kind=kLoop, calls=%slice_of_a_stack
  %state.2 = (s32[], bf16[4,64,32]{2,1,0}, bf16[16,32]{1,0}) tuple(%index, %stack, %x)
  %loop = (s32[], bf16[4,64,32]{2,1,0}, bf16[16,32]{1,0}) while(%state.2), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %chosen = f32[64,32]{1,0} conditional(%index, %slice_fusion.12, %slice_fusion.12), branch_computations={%long, %short}
  ROOT %update_fusion = f32[4,64,32]{2,1,0} fusion(%sums, %chosen, %index), kind=kLoop, calls=%update_of_a_stack
}
"""
SLICE, UPDATE = 64 * 32 * 2, 64 * 32 * 4
INDEX = 4


def test_slices_and_updates_in_place_count_with_their_size() -> None:
    launches = launches_of(HLO, Sequences())
    assert launches[0] == Launch(name="slice_fusion", kind="other", num_bytes=SLICE + INDEX + UPDATE)
    assert launches[-1] == Launch(name="update_fusion", kind="other", num_bytes=UPDATE + INDEX + UPDATE)


def test_a_product_is_counted_for_each_iteration_of_its_loop() -> None:
    launches = launches_of(HLO, Sequences())[1:-1]
    product = Launch(
        name="product 16x64 over 32",
        kind="product",
        num_bytes=2 * (16 * 32 + 64 * 32 + 16 * 64),
        flops=2 * 16 * 64 * 32,
    )
    assert launches == [product] * 3  # the branch without a sort has no launches


@pytest.mark.parametrize(
    ("launch", "expected_s"),
    [
        (Launch(name="copy", kind="other", num_bytes=8e9), 1e-6 + 2.0),
        (Launch(name="p", kind="product", num_bytes=1, flops=100.0, idle=1.5), 1e-6 + 1.5),
        (Launch(name="a", kind="attention", num_bytes=1, flops=100.0), 1e-6 + 2.0),
        (Launch(name="a", kind="attention", num_bytes=8e9), 1e-6 + 1.0),
        (Launch(name="p", kind="product", num_bytes=1, deep=True), 1e-6 + 3e-6),
    ],
)
def test_a_launch_takes_as_long_as_its_slowest_resource(launch: Launch, expected_s: float) -> None:
    rates = Rates(
        bytes_per_s=4e9,
        attention_bytes_per_s=8e9,
        product_flops_per_s=100.0,
        attention_flops_per_s=50.0,
        launch_s=1e-6,
        deep_product_s=3e-6,
    )
    assert rates.time_s(launch) == pytest.approx(expected_s)
